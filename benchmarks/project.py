"""Projects that are built as users build them: with the hook, or the same files with Hatch alone."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import Done, run

TARGETS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"provider": "cpu"},
    "qnn": {"provider": "qnn", "chip": "snapdragon-x-elite"},
    # The script by hand fixes the shapes too.
    "openvino": {"provider": "openvino", "static-shapes": True},
    # By NVIDIA's library, which needs no GPU.
    "tensorrt-rtx": {
        "provider": "tensorrt-rtx",
        "chip": ["rtx-30", "rtx-40", "rtx-50"],
    },
}
"""The keys of the only target, by the name of its provider."""

PACKAGE = "benchmark_app"

_PROJECT = f"""
[build-system]
requires = ["hatchling", "hatch-epcontext"]
build-backend = "hatchling.build"

[project]
name = "benchmark-app"
version = "1.0"

[tool.hatch.build.targets.wheel]
packages = ["{PACKAGE}"]
"""


@dataclass(frozen=True)
class Source:
    """A model: its file, the shape of each input, its constants, and the bounds of integer inputs."""

    name: str
    path: Path
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    bounds: Mapping[str, int] = field(default_factory=dict)


def write(
    root: Path, sources: Sequence[Source], targets: Mapping[str, Mapping[str, Any]], **keys: Any
) -> None:
    """Write a project that compiles ``sources`` for ``targets``, with other ``keys`` of the root table."""
    models = []
    (root / "models").mkdir(parents=True)
    for source in sources:
        path = root / "models" / f"{source.name}.onnx"
        shutil.copyfile(source.path, path)
        model: dict[str, Any] = {"name": source.name, "path": path.relative_to(root).as_posix()}
        if source.shapes:
            model["shapes"] = source.shapes
        if source.constants:
            model["constants"] = source.constants
        models.append(model)
    write_project(root, {**keys, "targets": targets, "models": models})


def write_project(root: Path, table: Mapping[str, Any]) -> None:
    """Write a project with ``table`` as ``[tool.epcontext]``."""
    lines = [f"{toml(key)} = {toml(value)}" for key, value in table.items()]
    hook = "[tool.hatch.build.hooks.epcontext]"
    _write(root, "\n".join([hook, "", "[tool.epcontext]", *lines]))


def write_plain(root: Path, folder: Path) -> None:
    """Write a project without the hook, whose wheel contains the files in ``folder``."""
    table = "[tool.hatch.build.targets.wheel.force-include]"
    _write(root, f"{table}\n{toml(str(folder))} = {toml(f'{PACKAGE}/epcontext')}")


def _write(root: Path, tables: str) -> None:
    (root / PACKAGE).mkdir(parents=True)
    (root / PACKAGE / "__init__.py").touch()
    (root / "pyproject.toml").write_text(f"{_PROJECT}\n{tables}\n", encoding="utf-8")


def build(root: Path, cache: Path | None = None, report: Path | None = None) -> Done:
    """Build the project's wheel with Hatch's own command, the hook's ``cache``, and its ``report`` there."""
    paths = {"CACHE_DIR": cache, "REPORT": report}
    env = {f"HATCH_EPCONTEXT_{name}": str(path) for name, path in paths.items() if path}
    return run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], root, env)


def wheel(root: Path) -> Path:
    """The wheel that `build` wrote."""
    (path,) = (root / "dist").glob("*.whl")
    return path


def unpack(root: Path, folder: Path) -> Path:
    """Unpack the wheel of the project into ``folder``; returns the folder that the hook filled."""
    with zipfile.ZipFile(wheel(root)) as archive:
        archive.extractall(folder)
    return folder / PACKAGE / "epcontext"


def toml(value: Any) -> str:
    """``value`` as TOML, in one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{toml(key)} = {toml(value[key])}" for key in value) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)
