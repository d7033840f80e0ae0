from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hatch_epcontext.cli import doctor
from hatch_epcontext.cli.app import app
from hatch_epcontext.jobs import requirements
from hatch_epcontext.providers import PROVIDERS
from tests.altered_workers import write_broken_qnn
from tests.cli.conftest import Cli
from tests.conftest import needs, needs_qnn


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result: dict[str, Any] = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    return result


def state(found: dict[str, Any], provider: str) -> dict[str, Any]:
    (one,) = [each for each in found["providers"] if each["provider"] == provider]
    result: dict[str, Any] = one
    return result


def test_every_provider_has_devices_or_a_reason_for_none(found: dict[str, Any]) -> None:
    assert [each["provider"] for each in found["providers"]] == list(PROVIDERS)
    assert all(each["devices"] or each["reason"] for each in found["providers"])
    assert state(found, "cpu")["devices"] == ["CPUExecutionProvider loads"]
    assert state(found, "vitisai")["reason"] == "onnxruntime-vitisai is not installed."
    assert (found["distributions"], found["problems"]) == (
        {"onnxruntime": found["distributions"]["onnxruntime"]},
        [],
    )
    assert found["tools"].keys() == {"onnx", "onnxslim", "numpy"}


@needs_qnn
def test_a_simulated_npu_is_called_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROVIDERS", {"qnn": PROVIDERS["qnn"]})
    machine = ("x86_64" if sys.platform == "linux" else "AMD64", True), ("aarch64", False)
    for name, is_simulated in machine:
        monkeypatch.setattr("platform.machine", lambda name=name: name)
        assert ("a simulator runs" in cli("doctor").stdout) == is_simulated


@needs("onnxruntime_ep_nv_tensorrt_rtx")
@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA GPU")
def test_a_plugin_ep_without_its_driver_has_a_reason(found: dict[str, Any]) -> None:
    rtx = state(found, "tensorrt-rtx")
    assert rtx["devices"] == []
    assert "libcuda.so.1" in rtx["reason"]


@needs_qnn
@pytest.mark.skipif(sys.platform != "linux", reason="a library of Linux is altered")
def test_a_library_that_an_ep_loads_later_is_missing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write_broken_qnn(tmp_path / "broken")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    monkeypatch.setattr(doctor, "PROVIDERS", {"qnn": PROVIDERS["qnn"]})
    printed = cli("doctor", code=1).stdout
    assert "    QNNExecutionProvider on " in printed
    assert (
        f"- qnn: EPC105\n        {name} is missing, and libQnnSystem.so of onnxruntime-qnn"
        in printed
    )


def test_an_environment_without_onnx_runtime_is_a_problem(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "installed", lambda name: None)
    monkeypatch.setattr(doctor, "installed", lambda name: None)
    printed = cli("doctor", code=1).stdout
    assert "ONNX Runtime: none" in printed
    assert "- this environment: EPC101\n        No ONNX Runtime is installed." in printed
    assert "onnxruntime-qnn>=2.7 is not installed." in printed
