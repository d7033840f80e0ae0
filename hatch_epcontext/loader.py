# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The hatch-epcontext developers
"""Opens precompiled ONNX models, which hatch-epcontext has put into this package.

    from my_app.epcontext import load

    session = load("model")  # an onnxruntime.InferenceSession

``load`` tries the model's targets in order, and opens the first that this machine can run. If there is
none, it opens the source model on the CPU. ``explain`` lists the outcome and the reason for each target.

This module is a copy of ``hatch_epcontext/loader.py`` in hatch-epcontext, under the MIT licence
(https://github.com/hatch-epcontext/hatch-epcontext); the version is in ``manifest.json``. It needs
Python 3.10, its standard library, and onnxruntime with its numpy. It trusts the files beside it, as any
module does; ``verify=True`` finds those that were changed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import ntpath
import operator
import os
import posixpath
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

# Other modules are imported where they are needed: importing this one costs an app almost nothing.
if TYPE_CHECKING:
    from pathlib import Path

    import onnxruntime

__all__ = [
    "LoadError",
    "Outcome",
    "TargetAttempt",
    "explain",
    "load",
    "models",
    "path",
    "shapes_of",
    "target_of",
]

T = TypeVar("T")
Device = Literal["npu", "gpu", "cpu", "any"]
Fallback = Literal["cpu", "jit"]
Shapes = Mapping[str, Sequence[int]]

SOURCE = "source"
"""The name of the last target, which is the source model on the CPU."""

USER_CACHE = "{user-cache}"
"""Stands in a provider option for the app's own folder inside the user's cache folder."""

METADATA = "hatch-epcontext"
"""The key of this module's own part of ``additional_metadata`` in the manifest."""

PREPARED = "prepared"
"""The folder, inside that of a target, with the prepared model; also the key that names its file."""

CPU_EP = "CPUExecutionProvider"

_MANIFEST = "manifest.json"

_UNUSED = 30 * 24 * 60 * 60.0
"""The seconds after which a copy of files from an archive is removed if no app has opened it."""

# EPs that can be asked about a compatibility string at any time, from trials in many processes.
_SAFE_TO_ASK = frozenset({"OpenVINOExecutionProvider"})

_TYPES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a whole number",
    bool: "a boolean",
}

_groups_lock = threading.Lock()
_target_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
# For each session that shares weights, the earlier sessions of its group, which have to outlive it.
_earlier_sessions: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
_groups: dict[tuple[str, str, str], weakref.WeakSet[Any]] = {}
_packages: dict[str, tuple[Any, Package]] = {}


class LoadError(RuntimeError):
    """No session could be opened. The message has the reason for each target."""


class Outcome(str, Enum):
    """The outcome of trying a target. Each member equals its text: ``Outcome.OPENED == "opened"``."""

    OPENED = "opened"
    SKIPPED = "skipped"
    """This machine cannot or should not run the target."""
    FAILED = "failed"
    """onnxruntime raised an error, or a file is missing or damaged."""
    NOT_TRIED = "not tried"
    """An earlier target was opened."""


class TargetAttempt(NamedTuple):
    """One target, its outcome, and the reason for it; for an opened target, what it runs on."""

    target: str
    outcome: Outcome
    reason: str | None

    def __str__(self) -> str:
        # `.value`, because Python 3.12 changed how members of such an Enum are formatted.
        text = f"{self.target}: {self.outcome.value}"
        return f"{text}, {self.reason}" if self.reason else text


class SkipTargetError(Exception):
    """This machine cannot or should not run a target."""


class FileError(Exception):
    """A file of the package is missing or damaged; the message names it."""


def models(package: str | os.PathLike[str] | None = None) -> list[str]:
    """The names of the models in this package, or in the package in the folder ``package``."""
    return list(_package(package).models)


def load(
    name: str,
    *,
    target: str | None = None,
    device: Device | None = None,
    shapes: Shapes | None = None,
    fallback: Fallback | None = "cpu",
    verify: bool = False,
    package: str | os.PathLike[str] | None = None,
    session_options: onnxruntime.SessionOptions
    | Callable[[], onnxruntime.SessionOptions]
    | None = None,
    provider_options: Mapping[str, object] | None = None,
    windows_ml: bool = False,
) -> onnxruntime.InferenceSession:
    """Open the model ``name`` on the first target that this machine can run.

    ``target``: try only this target ("source" for the source model on the CPU, if it is shipped).
    ``device``: try only targets on a device of this kind. "any" also accepts a device that only
    simulates the target's device. By default each target needs the device that it was built for.
    ``shapes``: the shapes of the inputs that the app has, by input. A model that was compiled for
    several shapes is opened in the smallest that is large enough in every dimension, or on a target
    with open shapes; ``shapes_of`` returns the shapes to pad to. Without it the first listed is opened.
    ``fallback``: what to do where a target cannot be opened. "cpu" tries the next one, and last opens
    the source model on the CPU, if it is shipped. "jit" does the same, but first compiles for a target
    that was built with ``recompile = true``: on this machine, once, into the user's cache folder. None
    tries the next target, and never opens the source model.
    ``verify``: compare the manifest and all files beside the model with the sha256 in the manifest before
    they are opened. A file that the manifest does not list is an error then.
    ``package``: the folder of another package that hatch-epcontext wrote, instead of the one that contains
    this module. Trust it as you trust code: its options name the libraries that an EP loads.
    ``session_options``: the app's own session options, to which the target's settings and execution
    provider are added. A function that creates them is called once for each target that is tried.
    ``provider_options``: more options of the execution provider, such as the address of a stream, or a
    secret with which the target was compiled. They are used for all targets except the source model.
    ``windows_ml``: first register the EPs that the catalogue of Windows ML (the package windowsml) has ready
    on this machine. It downloads none; where there is no catalogue it does nothing.

    Raises LoadError when no target could be opened, when the package is damaged, and when it has no
    such model, target or shape.
    """
    if windows_ml:
        _register_ready()
    request = _checked(device, shapes, fallback, verify, session_options, provider_options)
    attempts: list[TargetAttempt] = []
    session = None
    for attempt, opened in _try_targets(_package(package), name, target, request):
        attempts.append(attempt)
        log("warning" if attempt.outcome is Outcome.FAILED else "info", "%s on %s", name, attempt)
        session = opened or session
    if session is None:
        lines = "\n".join(f"  {each}" for each in attempts)
        raise LoadError(f"the model {name!r} cannot be opened on this machine:\n{lines}")
    return session


def explain(
    name: str,
    *,
    target: str | None = None,
    device: Device | None = None,
    shapes: Shapes | None = None,
    fallback: Fallback | None = "cpu",
    verify: bool = False,
    package: str | os.PathLike[str] | None = None,
    session_options: onnxruntime.SessionOptions
    | Callable[[], onnxruntime.SessionOptions]
    | None = None,
    provider_options: Mapping[str, object] | None = None,
    windows_ml: bool = False,
) -> list[TargetAttempt]:
    """What `load` tries with the same arguments. It opens a session to find out."""
    if windows_ml:
        _register_ready()
    request = _checked(device, shapes, fallback, verify, session_options, provider_options)
    return [attempt for attempt, _ in _try_targets(_package(package), name, target, request)]


def target_of(session: onnxruntime.InferenceSession) -> str:
    """The target on which `load` opened ``session``; "source" for the source model on the CPU.

    Raises KeyError for a session that `load` did not open.
    """
    return _target_names[session]


def shapes_of(session: onnxruntime.InferenceSession) -> dict[str, tuple[int | str | None, ...]]:
    """The shape of each input of ``session``: sizes to pad to, or the name of an open dimension."""
    return {each.name: tuple(each.shape) for each in session.get_inputs()}


@contextlib.contextmanager
def path(
    name: str,
    target: str | None = None,
    *,
    package: str | os.PathLike[str] | None = None,
) -> Iterator[Path]:
    """The path of a model file, with its sidecars beside it, for tools that open it themselves.

    ``target`` is the first of the model's targets by default. Files inside a zip archive are copied once,
    into the user's cache folder. Raises LoadError as `load` does.
    """
    found = _package(package)
    variants = _choose(found, name, target, None)
    if not variants:
        raise LoadError(f"the model {name!r} has no targets in {found.location}")
    with contextlib.ExitStack() as stack:
        try:
            file = found.on_disk(variants[0], stack)
        except Exception as error:
            raise LoadError(f"{name} on {variants[0].target}: {error}") from error
        yield file


class Request(NamedTuple):
    """The arguments of `load` that do not choose a model."""

    device: Device | None
    shapes: Shapes | None
    fallback: Fallback | None
    verify: bool
    session_options: Any
    provider_options: dict[str, object]


def _checked(
    device: Device | None,
    shapes: Shapes | None,
    fallback: Fallback | None,
    verify: bool,
    session_options: Any,
    provider_options: Mapping[str, object] | None,
) -> Request:
    """The request with these arguments. Raises LoadError for a value that an argument does not take."""
    if device not in (None, "npu", "gpu", "cpu", "any"):
        raise LoadError(f"device must be 'npu', 'gpu', 'cpu', 'any' or None, not {device!r}")
    if fallback not in (None, "cpu", "jit"):
        raise LoadError(f"fallback must be 'cpu', 'jit' or None, not {fallback!r}")
    if not isinstance(provider_options or {}, Mapping):
        # Without the value, which can be a secret.
        raise LoadError(
            f"provider_options must be a mapping, not {type(provider_options).__name__}"
        )
    known = session_options is None or callable(session_options)
    if not known and not hasattr(session_options, "add_session_config_entry"):
        raise LoadError(f"session_options must be SessionOptions, not {session_options!r}")
    try:
        # Sizes may also be integers of numpy, or a framework's shape.
        sizes = {name: tuple(map(operator.index, shape)) for name, shape in (shapes or {}).items()}
    except (AttributeError, TypeError):
        sizes = {"": (-1,)}
    if any(size < 0 for shape in sizes.values() for size in shape):
        example = "{'x': (1, 3, 224, 224)}"
        raise LoadError(
            f"shapes must have the sizes of each input by its name, such as {example}, not {shapes!r}"
        )
    options = dict(provider_options or {})
    return Request(device, sizes or None, fallback, verify, session_options, options)


class Variant(NamedTuple):
    """A model compiled for a target, or its source, as the manifest describes it.

    ``folder`` and ``file`` are relative to the package, with forward slashes. ``device`` is the kind of
    device that it was built for, ``group`` its weight-sharing group, ``settings`` how it was compiled, and
    ``about`` our part of its metadata.
    """

    target: str
    component: str
    folder: str
    file: str
    ep: str
    device: str
    compatibility: str
    inputs: dict[str, list[int | str | None]]
    session_options: dict[str, str]
    provider_options: dict[str, str]
    load_options: dict[str, str]
    plugin: dict[str, str]
    group: str
    settings: dict[str, Any]
    about: dict[str, Any]

    @property
    def is_source(self) -> bool:
        return self.target == SOURCE


class Package:
    """A package that was read: its models, and where its files are.

    ``root`` is a folder, or its stand-in inside a zip archive. Raises LoadError if the manifest is damaged.
    """

    def __init__(self, root: Any, location: str, *, is_archive: bool) -> None:
        import json

        self.root, self.location, self.is_archive = root, location, is_archive
        self.components: dict[str, list[Variant]] = {}
        self.constants: dict[str, dict[str, Any]] = {}
        self.models: dict[str, list[str]] = {}
        place = _MANIFEST
        try:
            self._text: bytes = (root / _MANIFEST).read_bytes()
            manifest = json.loads(self._text)
            if b"\\u" in self._text:
                # Half characters are in no path and no option: no text of them can be written.
                json.dumps(manifest, ensure_ascii=False).encode()
            version = get(manifest, "schema_version", str)
            if not version.startswith("1."):
                raise ValueError(f"it has the schema {version}, and this loader reads 1.x")  # noqa: TRY301
            self._is_portable = get(manifest, "layout", str, "portable") != "installed"
            about = _ours(manifest)
            self.files: dict[str, dict[str, Any]] = get(about, "files", dict, {})
            for name, recorded in self.files.items():
                self._inside(name)
                get(recorded, "size", int), get(recorded, "sha256", str)
            self._checksum = get(about, "manifest_sha256", str, "")
            for component, body in get(manifest, "components", dict).items():
                place = f"{_MANIFEST}: {component}"
                ours = _ours(body)
                self.constants[component] = get(ours, "constants", dict, {})
                self.models.setdefault(get(ours, "model", str, component), []).append(component)
                self.components[component] = []
                for target, each in get(body, "variants", dict).items():
                    place = f"{_MANIFEST}: {component} -> {target}"
                    self.components[component].append(self._variant(target, component, each))
        except Exception as error:
            # Of any kind: archives raise their own errors.
            raise LoadError(f"{location}: {place} cannot be read ({error})") from None

    def _variant(self, target: str, component: str, body: Any) -> Variant:
        about, ort = _ours(body), get(get(body, "executor_info", dict), "ort", dict)
        settings = get(about, "settings", dict, {})
        folder = self._inside(get(body, "variant_directory", str))
        ep = get(body, "ep", str)
        device = get(body, "device", str, "cpu" if ep == CPU_EP else "any")
        inputs: list[Any] = get(about, "inputs", list, [])
        if about.get(PREPARED):
            self._inside(get(about, PREPARED, str))
        return Variant(
            target,
            component,
            folder,
            join(folder, self._inside(get(ort, "model_file", str))),
            ep,
            get(settings, "device", str, device),
            get(body, "compatibility_string", str, ""),
            {get(each, "name", str): get(each, "shape", list) for each in inputs},
            _texts(ort, "session_options"),
            _texts(ort, "provider_options"),
            _texts(about, "load_options"),
            _texts(about, "plugin"),
            get(get(about, "sharing", dict, {}), "group", str, ""),
            settings,
            about,
        )

    def _inside(self, name: str) -> str:
        """``name``, which must not leave a package that can be moved, whatever the system."""
        first, *_ = parts = name.replace("\\", "/").split("/")
        leaves = not first or any(
            # On Windows ".. " is the parent folder too.
            ntpath.splitdrive(part)[0] or (part.strip(". ") == "" and part not in ("", "."))
            for part in parts
        )
        if not name or (leaves and (self._is_portable or self.is_archive)):
            raise ValueError(f"{name!r} is outside of the package")
        return name

    def verify(self) -> None:
        """Raise FileError if the manifest or a Python module beside it is not as recorded."""
        import hashlib

        # A file cannot contain its own sha256: that of the manifest is with zeros in this place.
        text = self._text.replace(self._checksum.encode() or b"?", b"0" * 64)
        if hashlib.sha256(text).hexdigest() != self._checksum:
            raise _changed(_MANIFEST)
        for name, recorded in self.files.items():
            # Frozen apps have their modules elsewhere.
            if "/" not in name and (self.root / name).is_file():
                content = (self.root / name).read_bytes()
                if hashlib.sha256(content).hexdigest() != recorded["sha256"]:
                    raise _changed(name)

    def on_disk(
        self,
        variant: Variant,
        stack: contextlib.ExitStack,
        *,
        verify: bool = False,
        prepared: bool = False,
    ) -> Path:
        """The model file of ``variant`` on disk, with its sidecars beside it; or its prepared model.

        ``stack`` holds the temporary folder of files from an archive, where the user's cache cannot have
        them. Raises FileError when a file is missing or has another size than it was recorded with; with
        ``verify`` also if its sha256 differs, and if it was not recorded.
        """
        file = join(variant.folder, variant.about[PREPARED]) if prepared else variant.file
        names = self.files_of(variant, prepared=prepared)
        root: Path = self._unpacked(names, stack, verify=verify) if self.is_archive else self.root
        if verify and self._is_portable:
            for path in (root / variant.folder).rglob("*"):
                name = path.relative_to(root).as_posix()
                if name not in self.files and path.is_file() and "__pycache__" not in path.parts:
                    raise FileError(f"{name} is not in the manifest, and cannot be verified")
        for name in names:
            # Copies from an archive were compared when they were made or found.
            check_file(root / name, name, self.files[name], verify=verify and not self.is_archive)
        if not (root / file).is_file():
            raise FileError(f"{file} is missing in {self.location}")
        return root / file

    def files_of(self, variant: Variant, *, prepared: bool) -> list[str]:
        """The recorded files that a session of ``variant`` reads; or its prepared model's."""
        # Models that share weights are in one folder.
        others = {each.file for all_ in self.components.values() for each in all_} - {variant.file}
        folder, its_prepared = f"{variant.folder}/", f"{variant.folder}/{PREPARED}/"
        return [
            name
            for name in self.files
            if name.startswith(folder) and name.startswith(its_prepared) == prepared
            if name not in others
        ]

    def _unpacked(self, names: list[str], stack: contextlib.ExitStack, *, verify: bool) -> Path:
        """A folder with copies of the files ``names`` of an archive, named by their contents.

        It is in the user's cache, where the next start finds it. Where that cannot be written it is a
        temporary folder, which ``stack`` removes.
        """
        import hashlib
        import tempfile
        import time
        from pathlib import Path

        key = hashlib.sha256(repr([(name, self.files[name]["sha256"]) for name in names]).encode())
        options: Any = {"ignore_cleanup_errors": True}
        try:
            folder = user_folder() / "unpacked"
            found = folder / key.hexdigest()[:32]
            if not self._is_whole(found, names, verify=verify):
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(prefix=".new-", dir=folder, **options) as made:
                    copy = Path(made) / "copy"
                    self._copy(names, copy)
                    # Another process may have made it meanwhile.
                    if not self._is_whole(found, names, verify=verify):
                        remove(found)
                        with contextlib.suppress(OSError):
                            copy.rename(found)
            with contextlib.suppress(OSError):
                os.utime(found)
                for each in folder.iterdir():
                    if each.stat().st_mtime < time.time() - _UNUSED:
                        remove(each)
            if self._is_whole(found, names, verify=False):
                return found
        except (OSError, RuntimeError) as error:
            # RuntimeError: this user has no home. As a text: the error would keep the session alive.
            log("info", "%s is copied into a temporary folder: %s", self.location, str(error))
        temporary = tempfile.TemporaryDirectory(prefix="epcontext-", **options)
        root = Path(stack.enter_context(temporary))
        self._copy(names, root)
        return root

    def _is_whole(self, folder: Path, names: list[str], *, verify: bool) -> bool:
        try:
            for name in names:
                check_file(folder / name, name, self.files[name], verify=verify)
        except FileError:
            return False
        return True

    def _copy(self, names: list[str], folder: Path) -> None:
        """Copy files of an archive into ``folder``. Raises FileError for one that cannot be read."""
        import shutil

        for name in names:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as copy:
                try:
                    with (self.root / name).open("rb") as original:
                        shutil.copyfileobj(original, copy, 1 << 20)
                except Exception as error:
                    # Of any kind: archives raise their own errors.
                    reason = f"{name} cannot be copied from {self.location} ({error})"
                    raise FileError(reason) from None
                copy.flush()
                os.fsync(copy.fileno())
            check_file(target, name, self.files[name], verify=True)


def get(table: Any, key: str, type_: type[T], default: T | None = None) -> T:
    """The value of ``key``, of this type; the default where it is missing. Raises ValueError otherwise."""
    value = table.get(key) if isinstance(table, dict) else None
    value = default if value is None else value
    if type(value) is not type_:
        raise ValueError(f"{key} must be {_TYPES[type_]}, not {value!r}")
    return value


def _texts(table: Any, key: str) -> dict[str, str]:
    texts: dict[str, str] = get(table, key, dict, {})
    return {name: get(texts, name, str) for name in texts}


def _ours(body: Any) -> dict[str, Any]:
    """Our part of the metadata of a package, a component or a variant."""
    return get(get(body, "additional_metadata", dict, {}), METADATA, dict, {})


def join(folder: str, name: str) -> str:
    # Only an editable install has absolute names, and on Windows they begin with a drive.
    return name if ntpath.isabs(name) else posixpath.normpath(posixpath.join(folder, name))


def _changed(name: str) -> FileError:
    return FileError(f"{name} was changed: its sha256 differs from the recorded one")


def check_file(file: Path, name: str, recorded: Mapping[str, Any], *, verify: bool = False) -> None:
    """Raise FileError if ``file`` is missing, or has another size or (with ``verify``) another sha256."""
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        raise FileError(f"{name} is missing") from None
    except (OSError, ValueError) as error:
        raise FileError(f"{name} cannot be read ({error})") from None
    # An EP may crash on a truncated file.
    if size != recorded["size"]:
        raise FileError(f"{name} has {size} bytes, and {recorded['size']} were recorded")
    if verify and sha256(file) != recorded["sha256"]:
        raise _changed(name)


def sha256(file: Path) -> str:
    import hashlib

    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def remove(folder: Path) -> None:
    import shutil

    # Renamed first: another process finds all of it or nothing. On Windows one that is open stays.
    trash = folder.with_name(f".old-{folder.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def _package(folder: str | os.PathLike[str] | None) -> Package:
    """The package in ``folder``, or the one that contains this module; read again when it changed."""
    from pathlib import Path

    stamp: Any = None
    try:
        root: Any = Path(__file__).parent if folder is None else Path(folder)
    except TypeError:
        raise LoadError(f"package must be the path of a folder, not {folder!r}") from None
    location = str(root)
    with contextlib.suppress(OSError, ValueError):
        stat = (root / _MANIFEST).stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
    # Otherwise this module is inside a zip archive.
    if is_archive := stamp is None and folder is None and not root.is_dir():
        try:
            root = importlib.import_module("importlib.resources").files(__name__)
        except Exception as error:
            raise LoadError(f"{location} cannot be read ({error})") from None
    known = _packages.get(location)
    if known is None or known[0] != stamp or is_archive:
        known = _packages[location] = stamp, Package(root, location, is_archive=is_archive)
    return known[1]


def _try_targets(
    package: Package, name: str, target: str | None, request: Request
) -> Iterator[tuple[TargetAttempt, Any]]:
    """Yield an attempt for each target, with the session of the one that is opened and else None."""
    variants = _choose(package, name, target, request.shapes)
    if target is None and request.fallback is None:
        variants = [variant for variant in variants if not variant.is_source]
    if not variants:
        only = ", only its source model" if request.fallback is None else ""
        raise LoadError(f"the model {name!r} has no targets in {package.location}{only}")
    compiled = [each for each in variants if not each.is_source]
    # An editable install may have source models alone.
    if request.fallback == "jit" and compiled and not any(v.about.get(PREPARED) for v in compiled):
        ours = "it" if target is None else f"its target {target!r}"
        raise LoadError(
            f"fallback='jit' needs a prepared model of {name!r}, and {ours} has none here: set "
            "recompile = true on the target, and build the package again"
        )
    session, skipped = None, None
    for variant, opener in _attempts(variants, request):
        if session is not None:
            if opener is _open:
                yield TargetAttempt(variant.target, Outcome.NOT_TRIED, None), None
            continue
        try:
            _check_shapes(package, variant, request.shapes)
            session, runs_on = opener(package, variant, request)
        except SkipTargetError as error:
            attempt = TargetAttempt(variant.target, Outcome.SKIPPED, str(error))
            # Without its device a target can be compiled as little as opened.
            if attempt != skipped:
                yield attempt, None
            skipped = attempt
        except Exception as error:
            # Of any kind: a device that has vanished makes onnxruntime raise even MemoryError.
            what = "" if isinstance(error, FileError) else f"{type(error).__name__}: "
            when = "" if opener is _open else "compiling it on this machine: "
            yield TargetAttempt(variant.target, Outcome.FAILED, f"{when}{what}{error}"), None
        else:
            _target_names[session] = variant.target
            _keep_alive(session, package, variant)
            yield TargetAttempt(variant.target, Outcome.OPENED, runs_on), session


def _attempts(
    variants: list[Variant], request: Request
) -> Iterator[tuple[Variant, Callable[..., Any]]]:
    """Each variant with the function that opens it; with "jit" also with the one that compiles it."""
    for variant in variants:
        yield variant, _open
        if request.fallback == "jit" and variant.about.get(PREPARED):
            # Beside this module only where a target has recompile = true.
            module = importlib.import_module("._recompile", __package__)
            yield variant, functools.partial(module.open_compiled, sys.modules[__name__])


def _choose(
    package: Package, name: str, target: str | None, shapes: Shapes | None
) -> list[Variant]:
    """The variants of the model to try, one for each target, in order.

    Raises LoadError for a model or a target that the package does not have.
    """
    if not isinstance(name, str):
        raise LoadError(f"the name of a model must be a string, not {name!r}")
    if name in package.models:
        components = package.models[name]
    elif name in package.components:
        components = [name]
    else:
        raise LoadError(_unknown("model", name, list(package.models)))
    # All components of a model list their targets in the same order.
    targets = list(dict.fromkeys(v.target for each in components for v in package.components[each]))
    if target is not None and target not in targets:
        raise LoadError(_unknown("target", target, targets))
    chosen = []
    for each in targets if target is None else [target]:
        sizes = [v for c in components for v in package.components[c] if v.target == each]
        if shapes is not None:
            _check_inputs(shapes, sizes[0], name)
            sizes = sorted(sizes, key=_elements)
            sizes = [size for size in sizes if _fits(size, shapes)] or sizes
        chosen.append(sizes[0])
    return chosen


def _check_inputs(shapes: Shapes, variant: Variant, name: str) -> None:
    known = variant.inputs
    for each, shape in shapes.items():
        if known and each not in known:
            raise LoadError(f"{name!r}: {_unknown('input', each, list(known))}")
        if known and len(shape) != len(known[each]):
            rank = f"has {len(known[each])} dimensions, and shapes gives {len(shape)}"
            raise LoadError(f"the input {each!r} of {name!r} {rank}")


def _fits(variant: Variant, shapes: Shapes) -> bool:
    """Whether the variant's shapes are large enough in every dimension; open dimensions are."""
    return all(
        not isinstance(size, int) or size >= wanted
        for each, shape in shapes.items()
        for size, wanted in zip(variant.inputs.get(each, ()), shape, strict=False)
    )


def _elements(variant: Variant) -> float:
    total = 0.0
    for shape in variant.inputs.values():
        elements = 1.0
        for size in shape:
            elements *= size if isinstance(size, int) else float("inf")
        total += elements
    return total


def _check_shapes(package: Package, variant: Variant, shapes: Shapes | None) -> None:
    """Raise SkipTargetError if no size of the variant's target takes ``shapes``."""
    if shapes is None or _fits(variant, shapes):
        return
    siblings = next(each for each in package.models.values() if variant.component in each)
    listed = (
        ", ".join(f"{x}: {_shape_text(each.inputs[x])}" for x in shapes if x in each.inputs)
        for component in siblings
        for each in package.components[component]
        if each.target == variant.target
    )
    # The components of a model have the same source.
    raise SkipTargetError(
        f"none of its shapes is large enough ({'; '.join(dict.fromkeys(listed))})"
    )


def _shape_text(shape: Sequence[int | str | None]) -> str:
    return " x ".join("?" if size is None else str(size) for size in shape)


def _keep_alive(session: Any, package: Package, variant: Variant) -> None:
    """Keep the earlier sessions of the variant's weight-sharing group alive as long as ``session``."""
    if variant.group:
        key = (package.location, variant.group, variant.target)
        with _groups_lock:
            group = _groups.setdefault(key, weakref.WeakSet())
            _earlier_sessions[session] = tuple(group)
            group.add(session)


def _unknown(what: str, name: str, known: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}.{hint} Known: {', '.join(known) or 'none'}."


def log(level: str, message: str, *arguments: object) -> None:
    import logging

    getattr(logging.getLogger(__name__), level)(message, *arguments, stacklevel=2)


def import_onnxruntime() -> Any:
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise SkipTargetError(f"onnxruntime cannot be imported ({error})") from error


def _open(package: Package, variant: Variant, request: Request) -> tuple[Any, str]:
    """Open ``variant``; return the session, and what it runs on."""
    ort = import_onnxruntime()
    if request.verify:
        package.verify()
    with contextlib.ExitStack() as stack:
        file = package.on_disk(variant, stack, verify=request.verify)
        session, runs_on = open_file(ort, package, variant, request, file)
        if package.is_archive:
            # A temporary folder is there as long as the session.
            weakref.finalize(session, stack.pop_all().close)
    return session, runs_on


def readable(file: Path, encoding: str, reason: str) -> Path:
    """``file``, on Windows by a path of which ``encoding`` has all letters: its own, or its short one.

    Raises SkipTargetError if there is none; ``reason``: why it is needed, and what to do.
    """
    if sys.platform != "win32":
        return file
    import ctypes

    short = ctypes.create_unicode_buffer(1 << 15)
    ctypes.windll.kernel32.GetShortPathNameW(str(file), short, len(short))
    for path in filter(None, (str(file), short.value)):
        with contextlib.suppress(UnicodeEncodeError):
            path.encode(encoding)
            return type(file)(path)
    raise SkipTargetError(f"{reason}, or use another folder than {file}")


def open_file(
    ort: Any, package: Package, variant: Variant, request: Request, file: Path
) -> tuple[Any, str]:
    """Open the model ``file`` of ``variant``; return the session, and what it runs on."""
    if variant.about.get("needs_code_page"):
        crash = f"{variant.ep} crashes where the path has letters outside the code page of Windows"
        file = readable(file, "mbcs", f"{crash}; set embed = true for the target")
    kind = kind_of_device(variant, request)
    options = request.session_options
    options = (options() if callable(options) else options) or ort.SessionOptions()
    check_secrets(variant.about.get("secrets") or (), request)
    provider_options = _provider_options(variant, request)
    constants = package.constants[variant.component]
    class_ = _session_with_constants(ort) if constants else ort.InferenceSession
    if _is_built_in(ort, variant):
        _add_session_options(options, variant)
        with warnings.catch_warnings():
            # The app's own options may still have the EP of a target that failed: these replace it.
            if getattr(options, "has_providers", bool)():
                warnings.filterwarnings("ignore", "Specified 'providers'")
            providers = [(variant.ep, provider_options)]
            session = class_(file, options, providers=providers, enable_fallback=0)
        runs_on = f"{variant.ep} on {variant.device}"
    else:
        with ep_lock(ort):
            runs_on = _add_devices(ort, variant, kind, options, provider_options)
            _add_session_options(options, variant)
            session = class_(file, options, enable_fallback=0)
    if constants:
        # As arrays: `run_async` needs them until it is done.
        session.epcontext_constants = {name: _array(name, each) for name, each in constants.items()}
    # If a library of the EP is missing, onnxruntime only logs it, and opens the session without the EP.
    found = session.get_providers()
    if variant.ep not in found and found[:1] == [CPU_EP]:
        hint = "onnxruntime's log may name a missing library"
        raise SkipTargetError(f"the session was opened without {variant.ep}; {hint}")
    return session, runs_on


def _add_session_options(options: Any, variant: Variant) -> None:
    # Not before its EP is found: a target that is skipped leaves the app's own options as they are.
    for key, value in variant.session_options.items():
        options.add_session_config_entry(key, value)


def ep_lock(ort: Any) -> Any:
    """The lock for registering plugin EPs and for opening on them.

    There is one in the process, also for the loaders of other packages: some EPs crash when two threads
    open a session at the same moment.
    """
    return vars(ort).setdefault("_epcontext_lock", threading.Lock())


def kind_of_device(variant: Variant, request: Request) -> str:
    """The kind of device to open ``variant`` on."""
    built_for, wanted = variant.device, request.device or variant.device
    if "any" not in (wanted, built_for) and wanted != built_for:
        raise SkipTargetError(f"it is for the {built_for}, and device={wanted!r} was requested")
    return wanted


def _add_devices(
    ort: Any, variant: Variant, kind: str, options: Any, provider_options: dict[str, str]
) -> str:
    """Add the variant's EP to ``options``; return what a session will run on."""
    # Listed again each time: onnxruntime forgets the devices of a library that is unregistered.
    device = find_devices(ort, variant, kind)[0]
    _check_compatibility(device, variant)
    policy = variant.settings.get("policy")
    if policy is None:
        # The devices are interchangeable, and a session takes one.
        options.add_provider_for_devices([device], provider_options)
        return f"{variant.ep} on {_kind(device)}"
    # A policy takes no provider options. These keys are where onnxruntime itself keeps them.
    for name, value in provider_options.items():
        options.add_session_config_entry(f"ep.{device.ep_name.lower()}.{name}", value)
    known = ort.OrtExecutionProviderDevicePolicy.__members__
    if (member := known.get(policy.replace("-", "_").upper())) is None:
        raise SkipTargetError(f"onnxruntime {ort.__version__} does not know the policy {policy!r}")
    options.set_provider_selection_policy(member)
    return f"{variant.ep}, by the policy {policy}"


@functools.cache
def _session_with_constants(ort: Any) -> Any:
    """A session class that takes the inputs that the build froze, and checks their values.

    With it the source model, which still has these inputs, is called like the compiled ones.
    """
    import numpy as np

    class SessionWithConstants(ort.InferenceSession):  # type: ignore[misc]
        epcontext_constants: Mapping[str, Any] = {}

        def get_inputs(self) -> Any:
            inputs = super().get_inputs()
            return [each for each in inputs if each.name not in self.epcontext_constants]

        def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
            return super().run(output_names, self._feed(input_feed), run_options)

        def run_async(
            self,
            output_names: Any,
            input_feed: Any,
            callback: Any,
            user_data: Any,
            run_options: Any = None,
        ) -> Any:
            feed = self._feed(input_feed)
            return super().run_async(output_names, feed, callback, user_data, run_options)

        def _feed(self, given: Mapping[str, Any]) -> dict[str, Any]:
            feed = dict(given)
            needed = {each.name for each in super().get_inputs()}
            for name, value in self.epcontext_constants.items():
                if name in feed and not np.array_equal(np.ravel(feed.pop(name)), value.ravel()):
                    raise ValueError(
                        f"the input {name!r} was frozen to {value.tolist()!r} when the model was "
                        "compiled, and has another value here"
                    )
                if name in needed:
                    feed[name] = value
            return feed

    return SessionWithConstants


def _array(name: str, constant: Any) -> Any:
    """The value of a frozen input; one number has the rank that the model takes."""
    import numpy as np

    dtype, rank = get(constant, "dtype", str), len(get(constant, "shape", list))
    try:
        array = np.asarray(
            constant.get("value"), np.dtype("object" if dtype == "string" else dtype)
        )
    except (TypeError, ValueError, OverflowError) as error:
        reason = f"the constant {name!r} in the manifest is not of the type {dtype} ({error})"
        raise FileError(reason) from error
    return array.reshape([1] * rank) if array.ndim != rank and array.size == 1 else array


def _provider_options(variant: Variant, request: Request) -> dict[str, str]:
    """The variant's provider options, and those of the app unless it is the source."""
    given = {} if variant.is_source else request.provider_options
    result = dict(variant.provider_options)
    for name, value in variant.load_options.items():
        try:
            result[name] = _in_user_cache(value)
        except RuntimeError as error:
            # No home folder, as in a container that runs as any user. A cache only makes starts faster.
            log("warning", "%s is left out, because this user has no cache folder: %s", name, error)
    for name, more in given.items():
        result[name] = str(int(more) if isinstance(more, bool) else more)
    return result


def check_secrets(names: Sequence[str], request: Request) -> None:
    """Raise SkipTargetError if the app does not give these options, with which a target was compiled."""
    if missing := set(names) - request.provider_options.keys():
        example = ", ".join(f"{name!r}: ..." for name in sorted(missing))
        raise SkipTargetError(
            "it was compiled with a secret, which the app has to give: "
            f"load(..., provider_options={{{example}}})"
        )


def _is_built_in(ort: Any, variant: Variant) -> bool:
    """Whether the EP is part of onnxruntime's own distribution.

    Raises SkipTargetError for a built-in EP that this distribution does not contain.
    """
    if variant.plugin:
        return False
    offered = _devices_of(ort, variant.ep, None)
    # onnxruntime also counts a registered library among its own.
    if any("library_path" in each.ep_metadata for each in offered):
        return False
    if variant.ep in ort.get_available_providers():
        return True
    if offered:
        return False
    raise SkipTargetError(f"this onnxruntime ({ort.__version__}) does not contain {variant.ep}")


def user_folder() -> Path:
    """The app's own folder in the user's cache folder. Raises RuntimeError for a user without a home."""
    from pathlib import Path

    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / __name__.split(".")[0]


def _in_user_cache(value: str) -> str:
    """``value``, a folder, which is created, with ``{user-cache}`` replaced by the app's own."""
    from pathlib import Path

    if USER_CACHE not in value:
        return value
    folder = Path(value.replace(USER_CACHE, str(user_folder())))
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def _kind(device: Any) -> str:
    return str(device.device.type.name).lower()


def find_devices(ort: Any, variant: Variant, kind: str) -> list[Any]:
    """The devices that the target can run on, best first; ``kind`` is a kind of device or "any".

    The caller holds `ep_lock`. Raises SkipTargetError if there is none.
    """
    needed, needs_device = variant.device, variant.about.get("needs_device")
    facts = _texts(variant.settings, "device_filter")
    offered = [each for each in _offered(ort, variant) if _passes(each, facts)]
    fitting = [each for each in offered if _kind(each) == (needed if kind == "any" else kind)]
    if kind == "any" and not fitting:
        if needs_device:
            raise SkipTargetError(f"it needs a real {needed}, not a simulated one")
        fitting = offered
    if not fitting:
        kinds = ", ".join(sorted({_kind(each) for each in offered}))
        only = f", only {kinds}" if kinds else " on this machine"
        accepts = " (device='any' accepts it)" if kinds and not needs_device else ""
        raise SkipTargetError(
            f"{variant.ep} finds no {'device' if kind == 'any' else kind}{only}{accepts}"
        )
    return fitting


def _check_compatibility(device: Any, variant: Variant) -> None:
    """Raise SkipTargetError if the EP reports that it cannot run what was compiled.

    Python sessions do not compare the compatibility string, so it is asked here; but only of EPs for
    which that is known to be safe: QNN crashes when it is asked after a session was closed.
    """
    if not variant.compatibility or variant.ep not in _SAFE_TO_ASK:
        return
    try:
        module = importlib.import_module("onnxruntime.capi._pybind_state")
        ask = module.get_model_compatibility_for_ep_devices
        answer = ask([device], variant.compatibility).name
    except Exception as error:
        log("debug", "%s gives no answer on compatibility: %s", variant.ep, error)
        return
    if answer == "EP_UNSUPPORTED":
        compiled = f"is not compatible with what was compiled ({variant.compatibility})"
        raise SkipTargetError(f"{variant.ep} on this machine {compiled}")


def _passes(device: Any, wanted: Mapping[str, str]) -> bool:
    """Whether ``device`` has no known property that differs from ``wanted``; unknown ones pass."""
    if not wanted:
        return True
    facts = {
        **dict(device.device.metadata),
        **dict(device.ep_metadata),
        "vendor": device.device.vendor,
        "vendor-id": str(device.device.vendor_id),
    }
    return all(
        facts.get(name, value).casefold() == value.casefold() for name, value in wanted.items()
    )


def _offered(ort: Any, variant: Variant) -> list[Any]:
    """The devices of the variant's EP. Its library is registered if needed, once per process."""
    ep, plugin = variant.ep, variant.plugin
    if not hasattr(ort, "get_ep_devices"):
        raise SkipTargetError(f"onnxruntime {ort.__version__} is too old for {ep}")
    if offered := _devices_of(ort, ep, None):
        return offered
    if not plugin.get("module"):
        call = "onnxruntime.register_execution_provider_library"
        raise SkipTargetError(f"{ep} is not registered; the app has to call {call} first")
    try:
        library = str(importlib.import_module(plugin["module"]).get_library_path())
    except ImportError as error:
        raise SkipTargetError(f"{plugin['package']} is not installed ({error})") from error
    except Exception as error:
        reason = f"{plugin['package']} names no library ({type(error).__name__}: {error})"
        raise SkipTargetError(reason) from error
    # The app may have registered the library under another name, which some EPs take as their own.
    if offered := _devices_of(ort, ep, library):
        return offered
    try:
        ort.register_execution_provider_library(plugin["registration_name"], library)
    except Exception as error:
        # The app, or another package's loader, may have registered it at the same moment.
        offered = _devices_of(ort, ep, library)
        if offered or "already registered" in str(error):
            return offered
        reason = f"the library of {plugin['package']} cannot be loaded ({error})"
        raise SkipTargetError(reason) from error
    return _devices_of(ort, ep, library)


def _devices_of(ort: Any, ep: str, library: str | None) -> list[Any]:
    """The devices of ``ep``, or else those that the file ``library`` offers under another name."""
    devices: list[Any] = ort.get_ep_devices() if hasattr(ort, "get_ep_devices") else []
    return [each for each in devices if each.ep_name == ep] or [
        each
        for each in devices
        if library and _real(each.ep_metadata.get("library_path", "")) == _real(library)
    ]


def _real(path: str) -> str:
    return os.path.normcase(os.path.realpath(path))


def _register_ready() -> None:
    """Register, once in a process, the EPs that Windows ML's catalogue has on this machine."""
    try:
        ort, catalogue = import_onnxruntime(), importlib.import_module("windowsml")
        with ep_lock(ort):
            # Kept: with some drivers it crashes when it is closed.
            if "_epcontext_catalog" not in vars(ort):
                vars(ort)["_epcontext_catalog"] = found = catalogue.EpCatalog()
                for each in found.find_all_providers():
                    if each.ready_state.name == "Ready" and not _devices_of(ort, each.name, None):
                        with contextlib.suppress(Exception):
                            # What fails is skipped with its reason: its EP is not registered.
                            ort.register_execution_provider_library(each.name, each.library_path)
    except Exception as error:
        log("info", "the catalogue of Windows ML cannot be used (%s)", error)
