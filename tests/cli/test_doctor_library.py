"""``epcontext doctor --library``, with real libraries of plugin EPs."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner

from hatch_epcontext.cli.app import app
from hatch_epcontext.text import to_toml
from hatch_epcontext.tools.libraries import try_library
from hatch_epcontext.worker.requests import EpDevice
from tests.cli.conftest import Cli
from tests.conftest import needs, needs_qnn, newer_runtime
from tests.models import network
from tests.projects import make_project


def library_of(package: str) -> Path:
    return Path(importlib.import_module(package).get_library_path())


@needs_qnn
def test_the_table_of_an_ep_builds(cli: Cli, tmp_path: Path) -> None:
    printed = cli("doctor", "--library", "onnxruntime_qnn").stdout
    assert printed.startswith(
        "onnxruntime_qnn is registered as QNNExecutionProvider, and offers:\n"
    )
    assert "\n  QNNExecutionProvider on cpu (" in printed
    newest = onnx.defs.onnx_opset_version()
    assert f"on cpu: compiles EP contexts, up to opset {newest}\n" in printed
    _, table = printed.split("\n[tool.epcontext.")
    models = '[tool.epcontext]\nmodels = [{ path = "models/a.onnx", dims = { batch = 1 } }]\n'
    # Without it the EP cannot be created.
    assert 'provider-options = { backend_type = "htp" }\n' in table
    project = make_project(tmp_path / "app", "", network())
    file = project / "pyproject.toml"
    head = file.read_text(encoding="utf-8").partition("[tool.epcontext]")[0]
    file.write_text(f"{head}{models}[tool.epcontext.{table}", encoding="utf-8")
    assert "4/4 nodes, agrees" in cli("build", project).output


@newer_runtime
@needs("nxrt_ep_cpu")
def test_a_library_outside_of_a_package_is_named_after_its_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "libonnxruntime_providers_new.so"
    shutil.copy(library_of("nxrt_ep_cpu"), path)
    printed = cli("doctor", "--library", path, code=1).stdout
    assert f"{path} is registered as new, and offers:\n  cpu_ep on cpu (" in printed
    # It compiles while a session opens, and nothing ahead of time.
    does = (
        "compiles no EP contexts, but runs the model: it compiles the model, and returns no context"
    )
    assert f"A small model on each device:\n  cpu_ep on cpu: {does}\n" in printed
    assert "ship the source model, or an optimized graph" in printed
    assert "[tool.epcontext.targets" not in printed


@needs_qnn
def test_the_target_of_a_library_outside_of_a_package_has_its_options(
    cli: Cli,
) -> None:
    library = library_of("onnxruntime_qnn")
    printed = cli("doctor", "--library", library, "-O", "soc_model=60").stdout
    assert " is registered as qnn, and offers:\n  qnn on cpu (" in printed
    assert "\n  qnn on cpu: compiles EP contexts, up to opset " in printed
    assert f"library = {to_toml(str(library))}\n" in printed
    assert 'ep-name = "qnn"\n' in printed
    assert '"60"' in printed.partition("provider-options = { ")[2]
    assert "requirements" not in printed


def test_options_are_for_libraries(cli: Cli) -> None:
    assert "needs --library" in cli("doctor", "-O", "a=b", code=2).stderr
    for pair in ("a", "=b"):
        assert "is not key=value" in cli("doctor", "--library", "x", "-O", pair, code=2).stderr


@needs("onnxruntime_ep_openvino")
def test_each_device_is_tried(cli: Cli) -> None:
    result = CliRunner().invoke(app, ["doctor", "--library", "onnxruntime_ep_openvino"])
    if "offers no device" in result.stderr:
        pytest.skip("OpenVINO offers no CPU device on this processor")
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if ": compiles " in line]
    (cpu, auto) = lines
    assert cpu.startswith("  OpenVINOExecutionProvider on cpu: compiles EP contexts, up to opset ")
    assert "AUTO on cpu: compiles no EP contexts, but runs the model: EPContext model" in auto
    assert 'ep-name = "OpenVINOExecutionProvider"\n' in result.stdout
    assert '.AUTO"\n' not in result.stdout


@needs("onnxruntime_ep_webgpu")
@pytest.mark.skipif(Path("/dev/dri").exists(), reason="this machine may have a GPU for WebGPU")
def test_a_library_that_ends_its_process_is_a_line() -> None:
    # Virtual devices, which only ONNX Runtime's own registration names with this end have.
    name, device = "gpu.virtual", EpDevice("WebGpuExecutionProvider", "gpu", "")
    (trial,) = try_library("onnxruntime_ep_webgpu", name, (device,), {})
    assert not trial.compiles
    assert trial.account.startswith("compiles no EP contexts: the worker crashed with ")


@needs("onnxruntime_ep_webgpu")
@pytest.mark.skipif(Path("/dev/dri").exists(), reason="this machine may have a GPU for WebGPU")
def test_a_library_without_a_device_is_an_error(cli: Cli) -> None:
    printed = cli("doctor", "--library", "onnxruntime_ep_webgpu", code=1).stderr
    assert "registered as WebGpuExecutionProvider, and offers no device" in printed


def test_a_file_that_is_no_library_is_an_error(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plugin.so"
    path.write_text("not a library", encoding="utf-8")
    printed = cli("doctor", "--library", path, code=1).stderr
    assert "the library cannot be loaded: " in printed
    assert "Check that the file is a library for this system" in printed


def test_a_library_that_is_not_there_is_an_error(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "is not a file." in cli("doctor", "--library", "./none.so", code=2).output
    printed = cli("doctor", "--library", "no_such.package.at_all", code=1).stderr
    assert "cannot be imported: No module named 'no_such'" in printed


def test_a_package_without_the_function_is_an_error(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_ep.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    printed = cli("doctor", "--library", "some_ep", code=1).stderr
    assert "name the path of the library instead." in printed
