from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import onnx
import pytest

from tests.cli.conftest import Cli
from tests.conftest import needs_qnn
from tests.models import network, save, save_with_data
from tests.worker.test_compile import X_ELITE, compile_context_of


@pytest.fixture
def wheel(app_project: Path) -> Path:
    """The wheel of a project with two models and two targets."""
    text = (app_project / "pyproject.toml").read_text("utf-8")
    head = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "my-app"
version = "1.0"
[tool.hatch.build.targets.wheel.hooks.epcontext]
"""
    (app_project / "pyproject.toml").write_text(head + text, encoding="utf-8")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    subprocess.run(command, cwd=app_project, check=True, capture_output=True)
    (built,) = (app_project / "dist").glob("*.whl")
    return built


def test_a_wheel_is_shown_and_verified(cli: Cli, wheel: Path) -> None:
    printed = cli("inspect", wheel, "--verify").stdout
    assert printed.startswith("my_app/epcontext: hatch-epcontext ")
    assert printed.count("CPUExecution") == 4
    assert "verified: 7 files\n" in printed
    found = json.loads(cli("inspect", wheel, "--json").stdout)
    assert found["manifests"]["my_app/epcontext"]["models"].keys() == {"a", "b"}


def test_changed_and_missing_files_of_a_package_are_found(
    cli: Cli, wheel: Path, tmp_path: Path
) -> None:
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert "verified: 7 files" in cli("inspect", installed, "--verify").stdout
    package = installed / "my_app" / "epcontext"
    assert "verified: 7 files" in cli("inspect", package, "--verify").stdout
    (package / "a" / "one" / "a_optimized.onnx").write_bytes(b"changed")
    (package / "b" / "source" / "b.onnx").unlink()
    cli("inspect", package)
    printed = cli("inspect", package, "--verify", code=1).stderr
    assert "a_optimized.onnx" in printed
    assert "b.onnx" in printed
    assert "inspection failed (2 problems)" in printed


def test_a_damaged_wheel_is_found(cli: Cli, wheel: Path, tmp_path: Path) -> None:
    damaged = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(damaged, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, b"changed" if name.endswith("one/a_optimized.onnx") else content)
    cli("inspect", damaged)
    assert (
        "differs from its record in the manifest"
        in cli("inspect", damaged, "--verify", code=1).stderr
    )


def test_a_source_model_is_shown(cli: Cli, tmp_path: Path) -> None:
    path = save_with_data(network(), tmp_path / "a.onnx")
    printed = cli("inspect", path, "--verify").stdout
    assert "input x: float32, batch x 1 x 8 x 8\n" in printed
    assert "output y: float32, batch x 10\n" in printed
    assert "operators: Conv 1, Flatten 1, MatMul 1, Relu 1\n" in printed
    assert "external data: network.data\n" in printed
    assert "verified: 1 file\n" in printed
    (tmp_path / "network.data").unlink()
    assert "external data: network.data\n" in cli("inspect", path).stdout
    printed = cli("inspect", path, "--verify", code=1).stderr
    assert "the external data 'network.data' is not in its folder" in printed


@needs_qnn
def test_a_context_model_is_shown(cli: Cli, tmp_path: Path) -> None:
    path = compile_context_of(network(1), tmp_path, X_ELITE)
    printed = cli("inspect", path, "--verify").stdout
    assert "compatibility with QNNExecutionProvider: v2:" in printed
    assert "a_ctx_qnn.bin" in printed
    assert "verified: 1 file\n" in printed
    (context,) = json.loads(cli("inspect", path, "--json").stdout)["model"]["contexts"]
    assert context["source"] == "QNNExecutionProvider"
    assert len(context["sha256"]) == 64
    assert context["size"] == (path.parent / "a_ctx_qnn.bin").stat().st_size
    (path.parent / "a_ctx_qnn.bin").unlink()
    assert "(missing)" in cli("inspect", path).stdout
    assert "the sidecar 'a_ctx_qnn.bin'" in cli("inspect", path, "--verify", code=1).stderr


def test_external_data_outside_of_the_folder_is_an_error(cli: Cli, tmp_path: Path) -> None:
    made = network()
    save_with_data(made, tmp_path / "a.onnx")
    loaded = onnx.load(tmp_path / "a.onnx", load_external_data=False)
    for tensor in loaded.graph.initializer:
        tensor.external_data[0].value = "../secret"
    path = save(loaded, tmp_path / "b.onnx")
    assert "external data outside of its folder: ../secret" in cli("inspect", path).stdout
    assert (
        "the external data '../secret' is outside of its folder"
        in cli("inspect", path, "--verify", code=1).stderr
    )


@pytest.mark.parametrize("content", [b"", b"no model", b"version https://git-lfs", b"PK"])
def test_other_files_are_errors(cli: Cli, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.onnx"
    path.write_bytes(content)
    assert "is not an ONNX model" in cli("inspect", path, code=1).stderr


def test_a_folder_without_a_manifest_is_an_error(cli: Cli, tmp_path: Path) -> None:
    assert "has no epcontext.json" in cli("inspect", tmp_path, code=1).stderr
    (tmp_path / "epcontext.json").write_text("{", encoding="utf-8")
    assert "epcontext.json cannot be read" in cli("inspect", tmp_path, code=1).stderr


def test_a_missing_path_is_an_error(cli: Cli, tmp_path: Path) -> None:
    assert "does not exist" in cli("inspect", tmp_path / "none", code=2).stderr


def test_inspecting_needs_no_onnx_runtime() -> None:
    code = "import sys; import hatch_epcontext.worker.inspect; print('onnxruntime' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
