# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The hatch-epcontext developers
"""Compiles a target on the user's machine, for ``load(..., recompile=True)``.

This module is beside the loader only where a target has ``recompile = true``. It is a copy of
``hatch_epcontext/_recompile.py`` in hatch-epcontext, under the MIT licence.

Compilers may crash or hang: they run in a process of their own, which runs this file as a script.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import posixpath
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hatch_epcontext.loader import Opener, Variant

_NOTHING = "nothing is compiled on this machine"

# With the files of a context, beside them.
_RECORD = "files.json"

_REPLY = "reply.json"

# A compiler that needs longer is ended.
_SECONDS = 3600.0

# What failed is compiled again after as many seconds.
_REMEMBERED = 7 * 24 * 60 * 60.0

# Bytes below which a file system counts as full: compilers rarely report that reason.
_NO_ROOM = 64 << 10


class Compilation(NamedTuple):
    """What the process that compiles needs to know, as JSON on its standard input.

    ``folder`` contains what was compiled on this machine, under its ``key``; ``stale`` is when that was
    written which cannot be opened, if there is one. ``script`` is this file, ``path`` `sys.path`, ``loader``
    the name and the file of the module beside this one. ``package``, ``component`` and ``target`` identify
    the variant; ``model`` is its prepared model. ``library``: the name and the path of the EP's.
    """

    folder: str
    key: str
    file: str
    stale: int | None
    seconds: float
    script: str
    path: list[str]
    loader: tuple[str, str]
    package: str
    component: str
    target: str
    model: str
    library: tuple[str, str]
    request: Mapping[str, Any]


def open_compiled(loader: Any, opener: Opener) -> tuple[Any, str]:
    """Open a variant, after its prepared model was compiled here, once for its EP and device.

    ``loader`` is the module beside this one. Returns the session, and what it runs on. Raises LoadError
    with the reason if that fails.
    """
    try:
        return _open_compiled(loader, opener)
    except (ImportError, loader.SkipTargetError):
        raise
    except Exception as error:
        reason = loader._cause(error)  # noqa: SLF001
        raise loader.LoadError(f"compiling it on this machine: {reason}") from error


class CachedContext(NamedTuple):
    """The context for ``device`` in the user's cache, and when it was ``written``; None if it is not."""

    folder: Path
    key: str
    written: int | None
    prepared: Variant
    device: Any


def adapt_and_find(loader: Any, opener: Opener) -> CachedContext:
    """Where the context of this machine is, for which ``opener`` gets a variant of its own.

    Raises SkipTargetError if this machine cannot have one.
    """
    opener.variant = for_this_machine(opener.variant)
    opener.check()
    prepared = copy.copy(opener.variant)
    prepared.folder, prepared.file = posixpath.dirname(prepared.prepared), prepared.prepared
    with opener.lock:
        device = opener.find_devices()[0]
        key = _key_of_compiled(opener, prepared, device)
    try:
        folder: Path = loader.beside("_user_cache").find_folder(loader) / "compiled"
    except RuntimeError as error:
        # This user has no home.
        raise loader.SkipTargetError(f"{_NOTHING}: {error}") from None
    return CachedContext(folder, key, _written(folder / key), prepared, device)


def check_can_compile(loader: Any, cached: CachedContext) -> None:
    """Raise SkipTargetError if nothing can be compiled into ``cached``, or not yet again."""
    if reason := _earlier_failure(cached.folder, cached.key) or _reason_not_to_start():
        raise loader.SkipTargetError(f"{_NOTHING}: {reason}")


def _open_compiled(loader: Any, opener: Opener) -> tuple[Any, str]:
    cached, request = adapt_and_find(loader, opener), opener.request
    if request.verify:
        cached.prepared.package.on_disk(cached.prepared, verify=True)
    file = cached.folder / cached.key / posixpath.basename(opener.variant.file)
    if cached.written is not None:
        try:
            return _open_kept(loader, opener, file)
        except loader.SkipTargetError:
            raise
        except Exception as error:
            loader.log("warning", f"{file} cannot be opened any more: {error}")
    check_can_compile(loader, cached)
    try:
        loader.beside("_user_cache").make_writable(cached.folder)
    except OSError as error:
        raise loader.SkipTargetError(f"{_NOTHING}: {error}") from None
    work = _plan(loader, opener, cached)
    if request.recompile == "background":
        _compile_later(work)
        raise loader.SkipTargetError("it is compiled in the background, for a later start")

    def tell(text: str, level: str = "debug") -> None:
        loader.log(level, text)
        if request.progress is not None:
            # No EP gives a share to Python.
            request.progress(text, None)

    if reason := _compile_once(work, tell):
        raise loader.LoadError(reason)
    try:
        return _open_kept(loader, opener, file)
    except Exception as error:
        # Or each start would compile it again.
        _remember(cached.folder, cached.key, f"what was compiled cannot be opened: {error}")
        raise


def for_this_machine(variant: Variant) -> Variant:
    """``variant`` without what is only true of the context that was shipped, such as its chip."""
    variant = copy.copy(variant)
    variant.compatibility = ""
    variant.about = {**variant.about, "needs_device": False}
    of_chip = {*(variant.about.get("chip_options") or ())}
    options: dict[str, str] = variant.settings.get("provider_options") or {}
    options = {name: value for name, value in options.items() if name not in of_chip}
    variant.settings = {**variant.settings, "provider_options": options}
    return variant


def _open_kept(loader: Any, opener: Opener, file: Path) -> tuple[Any, str]:
    """Open the context ``file``, which was compiled on this machine."""
    record = json.loads((file.parent / _RECORD).read_bytes())
    if reason := loader.damage(file.parent, record, verify=opener.request.verify):
        raise loader.LoadError(reason)
    session, runs_on = opener.open(file)
    loader.beside("_user_cache").mark_used(file.parent)
    return session, f"{runs_on}, compiled on this machine"


def _written(folder: Path) -> int | None:
    """When the context in ``folder`` was written, in nanoseconds; None if there is none."""
    with contextlib.suppress(OSError):
        return (folder / _RECORD).stat().st_mtime_ns
    return None


def _key_of_compiled(opener: Opener, prepared: Variant, device: Any) -> str:
    """The name of what is compiled: the prepared model, its settings, the device, and what is installed."""
    import hashlib
    from importlib.metadata import PackageNotFoundError, version

    variant, facts = opener.variant, dict(device.ep_metadata)
    installed: list[Any] = []
    # The app may have registered a library that no package contains. A frozen app may unpack it at each
    # start, so neither its path nor its time counts.
    with contextlib.suppress(OSError):
        installed.append(os.stat(facts.pop("library_path", "")).st_size)  # noqa: PTH116
    # Of an empty name Python raises a ValueError.
    with contextlib.suppress(PackageNotFoundError, ValueError):
        installed.append(version(variant.plugin.get("package", "")))
    driver = []
    for name in variant.about.get("driver_files") or ():
        with contextlib.suppress(OSError):
            driver.append(Path(name).read_text(encoding="utf-8", errors="replace"))
    content = {
        # Without their folder: targets for several chips have the same.
        "model": {
            posixpath.relpath(name, prepared.folder): record["sha256"]
            for name, record in variant.package.files_of(prepared).items()
        },
        "settings": variant.settings,
        "onnxruntime": opener.ort.__version__,
        "ep": installed,
        "device": [device.device.vendor_id, device.device.device_id, sorted(facts.items())],
        "driver": driver,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _plan(loader: Any, opener: Opener, cached: CachedContext) -> Compilation:
    request, prepared = opener.request, cached.prepared
    root = prepared.package.root
    model = prepared.package.on_disk(prepared, verify=True)
    advice = "onnxruntime compiles only where the path has no letters outside ASCII; rename it"
    # An app in a zip archive has them where its package was unpacked.
    script, module = Path(__file__), Path(loader.__file__)
    return Compilation(
        folder=str(opener.readable(cached.folder, "ascii", advice)),
        key=cached.key,
        file=posixpath.basename(opener.variant.file),
        stale=cached.written,
        seconds=_SECONDS,
        script=str(script if script.is_file() else root / script.name),
        path=[os.path.abspath(folder) for folder in sys.path if folder],  # noqa: PTH100
        loader=(loader.__name__, str(module if module.is_file() else root / module.name)),
        package=os.path.abspath(root),  # noqa: PTH100
        component=prepared.component,
        target=prepared.target,
        model=str(opener.readable(model, "ascii", advice)),
        library=(cached.device.ep_name, cached.device.ep_metadata.get("library_path", "")),
        request={
            "target": request.target,
            "device": request.device,
            "shapes": {},
            "provider_options": {n: str(value) for n, value in request.provider_options.items()},
        },
    )


def _reason_not_to_start() -> str:
    """Why no Python can be started here, or an empty text: a frozen app would start itself again."""
    import re

    if getattr(sys, "frozen", False):
        return "the app is frozen, and a compiler needs a Python"
    name = os.path.basename(sys.executable or "")  # noqa: PTH119
    # Of the releases of CPython and PyPy: with a version, windowed, free-threaded, or for debugging.
    is_python = re.fullmatch(r"(python|pypy)w?[\d.]*t?(_d|-dbg)?(\.exe)?", name, re.IGNORECASE)
    if is_python and os.path.isfile(sys.executable):  # noqa: PTH113
        return ""
    return f"a compiler needs a Python, and sys.executable is {sys.executable!r}"


def _earlier_failure(folder: Path, key: str) -> str:
    """Why compiling has failed before, if it is not to be repeated yet, or an empty text."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        record = json.loads((folder / f"{key}.json").read_bytes())
        if 0 <= time.time() - record["time"] < _REMEMBERED:
            until = time.strftime("%Y-%m-%d", time.localtime(record["time"] + _REMEMBERED))
            return f"{record['reason']} (compiled again from {until} on, or with new versions)"
    return ""


def _remember(folder: Path, key: str, reason: str) -> None:
    with contextlib.suppress(OSError):
        record = {"time": time.time(), "reason": reason}
        (folder / f"{key}.json").write_text(json.dumps(record), encoding="utf-8")


def _compile_later(work: Compilation) -> None:
    """Compile in a process that outlives this one, unless one does it already."""
    import sqlite3
    import threading

    try:
        with _locked(Path(work.folder, f"{work.key}.lock")):
            pass
    except sqlite3.OperationalError:
        return
    process = _start("background", work, Path(work.folder))
    # It closes the input, and waits for the end, or the process would become a zombie.
    threading.Thread(target=process.communicate, daemon=True).start()


def _compile_once(work: Compilation, tell: Callable[..., object], *, in_turn: bool = False) -> str:
    """Compile, and let the result appear as a whole. Returns why that failed, or an empty text.

    Of several processes one compiles, and the others wait for it. ``tell`` gets texts about that. With
    ``in_turn`` no other process of this user compiles in the background.
    """
    folder, what = Path(work.folder), f"{work.component} is compiled for {work.target}"

    def wait(seconds: float) -> None:
        tell(f"{what} by another process: {seconds:.0f} s")

    with _locked(folder / f"{work.key}.lock", wait):
        if _written(folder / work.key) not in (None, work.stale):
            return ""
        # Asked again: this process may have waited for another one, which failed.
        if reason := _earlier_failure(folder, work.key):
            return reason
        _remove(folder / f"{work.key}.tmp")
        _sweep(folder)
        turn = _locked(folder.parents[1] / "epcontext.lock", wait)
        with turn if in_turn else contextlib.nullcontext():
            tell(f"{what} on this machine, once", "warning")
            return _compile_locked(work, lambda seconds: tell(f"{what}: {seconds:.0f} s"))


def _compile_locked(work: Compilation, tell: Callable[[float], object]) -> str:
    """Compile, while no other process does the same; ``tell`` gets the seconds that it took until then."""
    import shutil

    folder = Path(work.folder)
    result, temporary = folder / work.key, folder / f"{work.key}.tmp"
    try:
        temporary.mkdir()
        reason, is_lasting = _run_compiler(work, temporary, tell)
        if not reason:
            # What cannot be opened any more; on Windows what a process has open stays.
            with contextlib.suppress(OSError):
                result.rename(temporary / "old")
            (temporary / work.key).rename(result)
            (folder / f"{work.key}.json").unlink(missing_ok=True)
        elif shutil.disk_usage(folder).free < _NO_ROOM:
            reason = f"no space is left in {folder}"
        elif is_lasting:
            _remember(folder, work.key, reason)
    finally:
        _remove(temporary)
    return reason


def _sweep(folder: Path) -> None:
    """Remove what processes have left that were killed while they compiled."""
    import sqlite3

    for temporary in folder.glob("*.tmp"):
        with contextlib.suppress(sqlite3.Error), _locked(temporary.with_suffix(".lock")):
            _remove(temporary)


def _remove(folder: Path) -> None:
    """Remove ``folder``: on Windows a process that has just ended may still have it open."""
    import shutil

    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def _run_compiler(
    work: Compilation, temporary: Path, tell: Callable[[float], object]
) -> tuple[str, bool]:
    """Compile into ``temporary``, in a process. Returns why that failed, and whether it would again."""
    import subprocess

    start = time.monotonic()
    with _start("compile", work, temporary) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(1, work.seconds))
                    break
                if (seconds := time.monotonic() - start) > work.seconds:
                    return f"the compiler did not end in {work.seconds:.0f} s", True
                tell(seconds)
        finally:
            if process.poll() is None:
                _kill(process.pid)
    with contextlib.suppress(OSError, ValueError, KeyError):
        reply = json.loads((temporary / _REPLY).read_bytes())
        return reply["reason"], reply["is_lasting"]
    return f"the compiler {_ended(process.returncode)}", True


def _start(task: str, work: Compilation, folder: Path) -> Any:
    """Start this file as a script in ``folder``, with no handle of this process but its input's pipe."""
    import subprocess

    flags = ("CREATE_NO_WINDOW", *(["IDLE_PRIORITY_CLASS"] if task == "background" else []))

    process = subprocess.Popen(
        [sys.executable, "-I", work.script, task],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # What it starts itself ends with it.
        start_new_session=True,
        creationflags=sum(getattr(subprocess, name, 0) for name in flags),
    )
    # It may have ended.
    with contextlib.suppress(OSError):
        assert process.stdin is not None
        process.stdin.write(json.dumps(work).encode() + b"\n")
        process.stdin.flush()
    return process


def _kill(group: int) -> None:
    """Kill a process that `_start` has started, with those that it started itself where groups exist."""
    import signal

    if sys.platform == "win32":
        os.kill(group, signal.SIGTERM)
    else:
        os.killpg(group, signal.SIGKILL)


def _ended(code: int) -> str:
    """How a process ended with this exit code."""
    import signal

    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code if code < 256 else hex(code)}"


@contextlib.contextmanager
def _locked(file: Path, tell: Callable[[float], object] | None = None) -> Iterator[None]:
    """Hold ``file`` locked, and wait for that if there is a ``tell``, which gets the seconds until then.

    It is an empty database: SQLite locks files on every system, which unlocks them when a process ends in
    any way. Raises sqlite3.OperationalError if it cannot be locked.
    """
    import sqlite3

    start = time.monotonic()
    with contextlib.closing(sqlite3.connect(file, timeout=1 if tell else 0)) as database:
        while not database.in_transaction:
            try:
                # Without a journal, which has no room on a full disk.
                database.execute("PRAGMA journal_mode = OFF")
                database.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError as error:
                if tell is None or "locked" not in str(error):
                    raise
                tell(time.monotonic() - start)
        # Or it would be removed as unused.
        os.utime(file)
        yield


# What follows runs in the processes that `_start` starts.


def _main() -> None:
    import threading

    # On Windows libraries wait for the input, while it is read, when they are loaded.
    pipe = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with os.fdopen(pipe, "rb", closefd=False) as request:
        work = Compilation(*json.loads(request.readline()))
    if sys.argv[1] == "background":
        if sys.platform != "win32":
            os.nice(19)
        _compile_once(work, lambda *_: None, in_turn=True)
        return
    # It ends with the app, and does not wait for an app that was forked.
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    limit = threading.Timer(work.seconds + 60, _end)
    limit.daemon = True
    limit.start()
    sys.path[:] = work.path
    folder = Path(work.folder, f"{work.key}.tmp")
    try:
        reason, is_lasting = _serve(work, folder / work.key)
        reply = json.dumps({"reason": reason, "is_lasting": is_lasting})
        (folder / _REPLY).write_text(reply, encoding="utf-8")
    finally:
        # At once: some EPs crash when their sessions are closed.
        os._exit(0)


def _end_with(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    _end()


def _end() -> None:
    if sys.platform != "win32":
        _kill(os.getpid())
    os._exit(1)


def _serve(work: Compilation, result: Path) -> tuple[str, bool]:
    """Compile into the new folder ``result``. Returns why that failed, and whether it would again."""
    loader = _import_loader(*work.loader)
    try:
        opener = _opener(loader, work)
        result.mkdir()
        _write_context(opener, work, result / work.file)
        record = {
            file.name: {"size": file.stat().st_size, "sha256": loader.sha256(file)}
            for file in result.iterdir()
        }
        # As `load` opens it: the manifest forbids that it is compiled then.
        opener.open(result / work.file)
        (result / _RECORD).write_text(json.dumps(record), encoding="utf-8")
    except Exception as error:
        # Of any kind: onnxruntime raises many. Not those of the system, or of what is missing.
        is_lasting = not isinstance(error, OSError | ImportError | loader.SkipTargetError)
        return loader._cause(error), is_lasting  # noqa: SLF001
    return "", False


def _import_loader(name: str, file: str) -> Any:
    """The module beside this one, without the package of the app that contains it."""
    from importlib.util import module_from_spec, spec_from_file_location

    folder = str(Path(file).parent)
    spec = spec_from_file_location(name, file, submodule_search_locations=[folder])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _opener(loader: Any, work: Compilation) -> Opener:
    """What opens the variant of ``work``, after the EP's library was registered as in the app."""
    import importlib
    import itertools

    package = loader.Package(Path(work.package))
    every = itertools.chain.from_iterable(package.models.values())
    name = work.component, work.target
    variant = next(v for v in every if (v.component, v.target) == name)
    opener: Opener = loader.Opener(variant, loader.Request(**work.request))
    # Where the library is a package's, that may prepare what it needs.
    with contextlib.suppress(Exception):
        importlib.import_module(variant.plugin["module"]).get_library_path()
    registration_name, library = work.library
    if library:
        opener.ort.register_execution_provider_library(registration_name, library)
    if adapt_and_find(loader, opener).key != work.key:
        raise ImportError("the process that compiles finds another device or version than the app")
    return opener


def _write_context(opener: Opener, work: Compilation, file: Path) -> None:
    """Compile the prepared model of ``work`` into ``file``."""
    ort, settings, variant = opener.ort, opener.variant.settings, opener.variant
    files = str(variant.option_files)
    own = settings["provider_options"]
    provider_options = {name: value.replace("{file}", files) for name, value in own.items()}
    options = ort.SessionOptions()
    for key, value in (settings.get("session_options") or {}).items():
        options.add_session_config_entry(key, value)
    level = {"none": "DISABLE_ALL", "basic": "ENABLE_BASIC", "extended": "ENABLE_EXTENDED"}.get(
        settings.get("optimization") or "basic", "ENABLE_ALL"
    )
    options.add_provider_for_devices(opener.find_devices()[:1], provider_options)
    compiler = ort.ModelCompiler(
        options,
        work.model,
        embed_compiled_data_into_model=bool(settings.get("embed")),
        flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
        graph_optimization_level=getattr(ort.GraphOptimizationLevel, f"ORT_{level}"),
    )
    compiler.compile_to_file(str(file))


if __name__ == "__main__":
    _main()
