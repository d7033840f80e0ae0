"""Projects of other build backends, configured as ``docs/adopting.md`` says."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from hatch_epcontext.cli.app import app
from tests.conftest import REPOSITORY
from tests.integration.conftest import make_environment, run, tool
from tests.models import network, save

pytestmark = [pytest.mark.front_ends, pytest.mark.network, pytest.mark.slow]

PAGE = (REPOSITORY / "docs" / "adopting.md").read_text(encoding="utf-8")

PROJECT = """
[project]
name = "my-app"
version = "1.0"
requires-python = ">=3.10"
dependencies = ["onnxruntime"]

[tool.epcontext]
targets.cpu.provider = "cpu"
models = [{ path = "models/digits.onnx", dims = { batch = 1 } }]
"""

CMAKE = """
cmake_minimum_required(VERSION 3.15...4.0)
project(my_app LANGUAGES C)
add_library(fast SHARED fast.c)
install(TARGETS fast DESTINATION my_app)
"""

CARGO = """
[package]
name = "my-app"
version = "1.0.0"
edition = "2021"
"""

FILES: Mapping[str, Mapping[str, str]] = {
    "setuptools": {},
    "scikit-build-core": {"CMakeLists.txt": CMAKE, "fast.c": "int fast(void) { return 1; }\n"},
    "maturin": {"Cargo.toml": CARGO, "src/main.rs": 'fn main() { println!("fast"); }\n'},
}
"""What each backend builds beside the models."""

NEEDED = {"scikit-build-core": "cc", "maturin": "cargo"}
"""The compilers of each backend."""

OPEN = """
import numpy
from my_app.epcontext import load
session = load("digits")
print(session.run(None, {"x": numpy.zeros((1, 1, 8, 8), numpy.float32)})[0].shape)
"""


def cli(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("backend", FILES)
def test_a_wheel_of_another_backend_has_the_models(
    backend: str, env: Mapping[str, str], tmp_path: Path
) -> None:
    if shutil.which(NEEDED.get(backend, "git")) is None:
        pytest.skip(f"{NEEDED[backend]} is missing")
    project = tmp_path / "my-app"
    (project / "my_app").mkdir(parents=True)
    (project / "my_app" / "__init__.py").touch()
    found = re.search(rf"^### {backend}\n.*?```toml\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    (project / "pyproject.toml").write_text(found[1] + PROJECT, encoding="utf-8")
    for name, text in FILES[backend].items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text, encoding="utf-8")
    save(network(), project / "models" / "digits.onnx")
    (project / ".gitignore").write_text("/my_app/epcontext/\n", encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)

    run(tool("uv"), "build", "--wheel", "-o", tmp_path / "plain", project, cwd=project, env=env)
    (plain,) = (tmp_path / "plain").glob("*.whl")
    assert "has no manifest.json of a model package" in cli("inspect", "--verify", plain, code=1)

    cli("export", project, "-o", project / "my_app" / "epcontext")
    run(tool("uv"), "build", "-o", tmp_path / "dist", project, cwd=project, env=env)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "verified: 4 files" in cli("inspect", "--verify", wheel)

    installed = make_environment(tmp_path / "venv", env)
    installed.install(wheel)
    assert installed.python("-c", OPEN).endswith("(1, 10)\n")
