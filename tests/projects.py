"""A small project whose wheel has one package, for tests that configure and build it."""

from __future__ import annotations

from pathlib import Path

import onnx

from tests.models import network, save

HEAD = """
[build-system]
requires = ["hatchling", "hatch-epcontext"]
build-backend = "hatchling.build"

[project]
name = "my-app"
version = "1.0"
requires-python = ">=3.10"

[tool.hatch.build.hooks.epcontext]
"""
"""A ``pyproject.toml`` without ``[tool.epcontext]``."""

PROJECT = f"{HEAD}\n[tool.epcontext]\n"

GROUP = """
[[models]]
path = "models/a.onnx"
share-weights = "both"
[[models]]
path = "models/b.onnx"
share-weights = "both"
[targets.npu]
provider = "qnn"
[targets.cpu]
provider = "cpu"
"""
"""A weight-sharing group of two models, for two targets."""


def make_project(folder: Path, toml: str, model: onnx.ModelProto | None = None) -> Path:
    """Write a project with one model, ``models/a.onnx``, into ``folder``, which is made."""
    (folder / "my_app").mkdir(parents=True, exist_ok=True)
    (folder / "my_app" / "__init__.py").touch()
    (folder / "pyproject.toml").write_text(PROJECT + toml, encoding="utf-8")
    save(model or network(), folder / "models" / "a.onnx")
    return folder
