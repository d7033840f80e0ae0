# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The hatch-epcontext developers
"""Compiles a target on the user's machine, for ``load(..., recompile=True)``.

This module is beside the loader only where a target has ``recompile = true``. It is a copy of
``hatch_epcontext/_recompile.py`` in hatch-epcontext, under the MIT licence.
"""

from __future__ import annotations

import contextlib
import copy
import os
import posixpath
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from hatch_epcontext.loader import Opener, Variant

# With the files of a context, beside them.
_RECORD = "files.json"


def open_compiled(loader: Any, opener: Opener) -> tuple[Any, str]:
    """Open a variant, after its prepared model was compiled here, once for its EP and driver.

    ``loader`` is the module beside this one. Returns the session, and what it runs on.
    """
    request = opener.request
    opener.variant = variant = copy.copy(opener.variant)
    # It is that of the context that was shipped.
    variant.compatibility = ""
    opener.check()
    prepared = copy.copy(variant)
    prepared.folder, prepared.file = posixpath.dirname(variant.prepared), variant.prepared
    if request.verify:
        prepared.package.on_disk(prepared, verify=True)
    with opener.lock:
        key = _key_of_compiled(opener, prepared)
    folder = loader.user_folder() / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / key / posixpath.basename(variant.file)
    with _locked(folder / f"{key}.lock"):
        try:
            _check_record(loader, file.parent, verify=request.verify)
            session, runs_on = opener.open(file)
        except loader.SkipTargetError:
            raise
        except Exception as error:
            if file.parent.exists():
                loader.log("warning", f"{file} cannot be opened any more: {error}")
            _compile(loader, opener, prepared, file)
            session, runs_on = opener.open(file)
    loader.beside("_user_cache").mark_used(file.parent)
    return session, f"{runs_on}, compiled on this machine"


def _check_record(loader: Any, folder: Path, *, verify: bool) -> None:
    """Raise an exception if a file of a context that was compiled here is missing or damaged."""
    import json

    record = json.loads((folder / _RECORD).read_bytes())
    if reason := loader.damage(folder, record, verify=verify):
        raise loader.LoadError(reason)


def _key_of_compiled(opener: Opener, prepared: Variant) -> str:
    """The name of what is compiled: the prepared model, its settings, and all that is installed."""
    import hashlib
    import json
    from importlib.metadata import PackageNotFoundError, version

    ort, variant, device = opener.ort, opener.variant, opener.find_devices()[0]
    facts = dict(device.ep_metadata)
    installed: list[Any] = []
    # The app may have registered a library that no package contains. A frozen app may unpack it at each
    # start, so neither its path nor its time counts.
    with contextlib.suppress(OSError):
        installed.append(os.stat(facts.pop("library_path", "")).st_size)  # noqa: PTH116
    # Python refuses an empty name with a ValueError.
    with contextlib.suppress(PackageNotFoundError, ValueError):
        installed.append(version(variant.plugin.get("package", "")))
    content = {
        "model": {n: record["sha256"] for n, record in variant.package.files_of(prepared).items()},
        "settings": variant.settings,
        "onnxruntime": ort.__version__,
        "ep": installed,
        "device": [device.device.vendor_id, device.device.device_id, sorted(facts.items())],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _compile(loader: Any, opener: Opener, prepared: Variant, file: Path) -> None:
    """Compile the prepared model into ``file``, in a folder that appears as a whole."""
    import json
    import tempfile

    ort, settings = opener.ort, prepared.settings
    model = prepared.package.on_disk(prepared, verify=True)
    compiled_with: dict[str, str] = settings.get("provider_options") or {}
    files = str(opener.variant.option_files)
    provider_options = {n: v.replace(loader.OPTION_FILE, files) for n, v in compiled_with.items()}
    options = ort.SessionOptions()
    for key, value in (settings.get("session_options") or {}).items():
        options.add_session_config_entry(key, value)
    level = {"none": "DISABLE_ALL", "basic": "ENABLE_BASIC", "extended": "ENABLE_EXTENDED"}.get(
        settings.get("optimization") or "basic", "ENABLE_ALL"
    )
    advice = "onnxruntime compiles only where the path has no letters outside ASCII; rename it"
    what = f"{prepared.component} is compiled for {prepared.target}"
    loader.log("warning", f"{what} on this machine, once")
    parent = file.parent.parent
    with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as temporary:
        result = parent / temporary / file.parent.name
        result.mkdir()
        with opener.lock:
            # Listed again: this process may have waited for another one that compiled, and failed.
            options.add_provider_for_devices(opener.find_devices()[:1], provider_options)
            compiler = ort.ModelCompiler(
                options,
                str(opener.readable(model, "ascii", advice)),
                embed_compiled_data_into_model=bool(settings.get("embed")),
                flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
                graph_optimization_level=getattr(ort.GraphOptimizationLevel, f"ORT_{level}"),
            )
            compiler.compile_to_file(str(opener.readable(result, "ascii", advice) / file.name))
        record = {
            file.name: {"size": file.stat().st_size, "sha256": loader.sha256(file)}
            for file in result.iterdir()
        }
        (result / _RECORD).write_text(json.dumps(record), encoding="utf-8")
        # What cannot be opened any more; on Windows what a process has open stays.
        with contextlib.suppress(OSError):
            file.parent.rename(parent / temporary / "old")
        result.rename(file.parent)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold ``file`` locked: of several processes one compiles, and the others wait for it.

    It is an empty database: SQLite locks files on every system, which unlocks them when a process ends in
    any way.
    """
    import sqlite3

    # A compiler may take hours.
    with contextlib.closing(sqlite3.connect(file, timeout=1e6)) as database:
        database.execute("BEGIN EXCLUSIVE")
        yield
