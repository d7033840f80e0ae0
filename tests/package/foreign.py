"""Model packages as any tool may write them, for tests that read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hatch_epcontext.errors import InspectionError, Problem
from hatch_epcontext.package.manifest import ModelPackage
from hatch_epcontext.package.reader import FolderFiles, read

DET = "components.det"
CPU = f"{DET}.variants.cpu"
ORT = f"{CPU}.executor_info.ort"
"""The places in `manifest` of its component, of its variant, and of what ONNX Runtime opens."""

MODEL = "det/cpu/det.onnx"
"""The only model file of `manifest`."""

ASSET = "sha256:" + "0123456789abcdef" * 4
ASSET_FOLDER = "shared_assets/sha256-" + "0123456789abcdef" * 4

Edit = Callable[[dict[str, Any]], None]


def manifest(*edits: Edit) -> dict[str, Any]:
    """The manifest of a package with the component ``det`` and its variant ``cpu``, after ``edits``."""
    variant = {
        "variant_directory": "det/cpu",
        "ep": "CPUExecutionProvider",
        "executor_info": {"ort": {"model_file": "det.onnx"}},
    }
    content: dict[str, Any] = {
        "schema_version": "1.0",
        "layout": "portable",
        "components": {"det": {"variants": {"cpu": variant}}},
    }
    for edit in edits:
        edit(content)
    return content


def put(place: str, **values: Any) -> Edit:
    """Set the keys ``values`` at ``place``, which is a dotted key, or empty for the manifest itself."""
    return lambda content: _at(content, place).update(values)


def drop(place: str, key: str) -> Edit:
    """Remove ``key`` at ``place``."""
    return lambda content: _at(content, place).pop(key)


def _at(content: dict[str, Any], place: str) -> Any:
    found: Any = content
    for key in place.split(".") if place else ():
        found = found[key]
    return found


def save(folder: Path, content: Any, files: Iterable[str] = (MODEL,)) -> Path:
    """Write a package into ``folder``; ``content`` is its manifest, or the bytes of it.

    ``files``: the names of all its other files.
    """
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"model")
    folder.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "manifest.json").write_bytes(text)
    return folder


def reading(folder: Path) -> tuple[ModelPackage | None, list[Problem]]:
    """The package in ``folder``, if it can be read, and all problems, located below ``package``."""
    try:
        return read(FolderFiles(folder), "package"), []
    except InspectionError as error:
        return None, list(error.problems)
