"""Wheels with files that are stored and not deflated, and what a killed build leaves of one."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from hatch_epcontext.package.repack import INCOMPLETE
from tests.integration.conftest import build_here, build_project, run, tool
from tests.models import model, value
from tests.projects import make_project

TOML = """
models = [{ path = "models/a.onnx", fallback = "source" }]
targets.cpu.provider = "cpu"
"""

KILLING = """
import os
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatch_epcontext import hatch_build
from hatch_epcontext.package import repack
class Hook(BuildHookInterface):
    def initialize(self, version, build_data):
        METHOD = lambda *_: os._exit(9)
"""
"""Another hook of a build, which ends it when a method of ours is called."""


def large() -> onnx.ModelProto:
    numbers = np.random.default_rng(0).normal(size=(1600, 1600)).astype(np.float32)
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    x, y = value("x", (1, 1600)), value("y", (1, 1600))
    return model([node], [x], [y], [numpy_helper.from_array(numbers, "w")])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project", TOML, large())


def installer_s_output(wheel: Path, *, fails: bool) -> str:
    site = wheel.parents[2] / "site"
    command = ("uv", "pip", "install", "--no-deps", "--target", site, wheel)
    return run(tool("uv"), *command[1:], cwd=wheel.parent, env=os.environ, fails=fails)


def test_weights_are_stored(project: Path) -> None:
    wheel, printed = build_project(project)
    with zipfile.ZipFile(wheel) as archive:
        kinds = {info.filename: info.compress_type for info in archive.infolist()}
        assert archive.testzip() is None
    stored = {name for name, kind in kinds.items() if kind == zipfile.ZIP_STORED}
    folder = "my_app/epcontext/a"
    assert stored == {f"{folder}/source/a.onnx", f"{folder}/cpu/a_optimized.onnx"}
    assert INCOMPLETE not in kinds
    assert "verified the wheel: " in printed
    assert [path.name for path in (project / "dist").iterdir()] == [wheel.name]
    assert installer_s_output(wheel, fails=False)
    # Nothing changes from build to build.
    first = wheel.read_bytes()
    assert build_project(project)[0].read_bytes() == first


@pytest.mark.parametrize(
    ("method", "is_written"),
    [("repack.FinishedWheel.write", False), ("hatch_build.HatchBuild.verify", True)],
)
def test_no_installer_takes_what_a_killed_build_leaves(
    project: Path, method: str, is_written: bool
) -> None:
    toml = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(f"{toml}\n[tool.hatch.build.hooks.custom]\n")
    (project / "hatch_build.py").write_text(KILLING.replace("METHOD", method))
    env = {**os.environ, "HATCH_EPCONTEXT_CACHE_DIR": str(project.parent / "cache")}
    command = ("-m", "hatchling", "build", "-t", "wheel")
    run(sys.executable, *command, cwd=project, env=env, fails=True)
    assert bool([*project.glob("dist/.*/*.whl")]) == is_written
    (wheel,) = (project / "dist").glob("*.whl")
    printed = installer_s_output(wheel, fails=True)
    found = "Multiple .dist-info directories found: models_are_missing, my_app-1.0"
    assert found in " ".join(printed.split())
    (project / "pyproject.toml").write_text(toml)
    build_here(project, project.parent / "cache")
    assert [*(project / "dist").rglob("*.whl")] == [wheel]
    assert installer_s_output(wheel, fails=False)


def test_an_error_leaves_no_wheel(project: Path) -> None:
    toml = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(f"{toml}\n[tool.hatch.build.hooks.custom]\n")
    body = 'pathlib.Path(self.root, "models", "a.onnx").write_bytes(b"")'
    (project / "hatch_build.py").write_text(
        "import pathlib\n"
        "from hatchling.builders.hooks.plugin.interface import BuildHookInterface\n"
        "class Hook(BuildHookInterface):\n"
        f"    def initialize(self, version, build_data): {body}\n"
    )
    build_here(project, project.parent / "cache", fails=True)
    assert [*(project / "dist").iterdir()] == []
