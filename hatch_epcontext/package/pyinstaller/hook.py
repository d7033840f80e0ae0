# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The hatch-epcontext developers
"""PyInstaller's hook of the package in the folder above, whose name follows ``hook-`` in that of this file.

It collects the models, the manifest, and the packages of the execution providers that the manifest names,
where they are installed. The app finds them in the frozen program as it does in an environment.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from PyInstaller.utils.hooks import (
    collect_data_files,
    collect_dynamic_libs,
    copy_metadata,
    logger,
)

_FOLDER = Path(__file__).parents[1]
_PACKAGE = Path(__file__).stem.removeprefix("hook-")
_METADATA = "hatch-epcontext"

_Files = list[tuple[str, str]]


def _models(manifest: dict[str, Any]) -> _Files:
    """The files of the package, each with its folder in the frozen app."""
    files = ["manifest.json", *manifest["additional_metadata"][_METADATA]["files"]]
    place = PurePosixPath(*_PACKAGE.split("."))
    return [
        (str(_FOLDER / name), str((place / name).parent))
        for name in files
        if not name.endswith(".py")
    ]


def _plugins(manifest: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The packages of execution providers that variants need, by the name of their module."""
    variants = (
        variant
        for component in manifest["components"].values()
        for variant in component["variants"].values()
    )
    found = (each["additional_metadata"][_METADATA].get("plugin") for each in variants)
    return {each["module"]: each for each in found if each and each["module"]}


def _collect(module: str, package: str) -> tuple[_Files, _Files]:
    """The data and the libraries of an execution provider's package."""
    data: _Files = collect_data_files(module)
    try:
        data += copy_metadata(package)
    except PackageNotFoundError:
        # The library may come from a package with another name.
        logger.debug("%s: %s has no metadata", _PACKAGE, package)
    return data, collect_dynamic_libs(module)


_manifest = json.loads((_FOLDER / "manifest.json").read_bytes())
if _manifest["layout"] == "installed":
    raise SystemExit(
        f"{_PACKAGE} is an editable install, whose models are elsewhere: PyInstaller cannot collect them. "
        "Install the app's wheel (pip install . without -e), and run PyInstaller again."
    )
datas = _models(_manifest)
binaries: _Files = []
hiddenimports = ["importlib.resources", "numpy", "onnxruntime"]
for _module, _plugin in _plugins(_manifest).items():
    if find_spec(_module.partition(".")[0]) is None:
        logger.warning(
            "%s: %s is not installed, and the frozen app will skip the targets that need it",
            _PACKAGE,
            _plugin["package"],
        )
        continue
    _data, _libraries = _collect(_module, _plugin["package"])
    datas += _data
    binaries += _libraries
    hiddenimports.append(_module)
