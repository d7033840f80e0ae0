"""``epcontext doctor --library``, with real libraries of plugin EPs."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path

import pytest

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
    _, table = printed.split("\n[tool.epcontext.")
    models = '[tool.epcontext]\nmodels = [{ path = "models/a.onnx", dims = { batch = 1 } }]\n'
    options = 'provider-options = { backend_type = "htp", soc_model = 60 }\n'
    project = make_project(tmp_path / "app", "", network())
    file = project / "pyproject.toml"
    head = file.read_text(encoding="utf-8").partition("[tool.epcontext]")[0]
    file.write_text(f"{head}{models}[tool.epcontext.{table}{options}", encoding="utf-8")
    assert "4/4 nodes, agrees" in cli("build", project).output


@newer_runtime
@needs("nxrt_ep_cpu")
def test_a_library_outside_of_a_package_is_named_after_its_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "libonnxruntime_providers_new.so"
    shutil.copy(library_of("nxrt_ep_cpu"), path)
    printed = cli("doctor", "--library", path).stdout
    assert f"{path} is registered as new, and offers:\n  cpu_ep on cpu (" in printed
    assert f'library = "{path.as_posix()}"' in printed
    assert 'ep-name = "cpu_ep"\n' in printed
    assert "requirements" not in printed


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
