from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from hatch_epcontext.jobs import requirements
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.tools import environment
from tests.altered_workers import write_broken_qnn
from tests.cli.conftest import Cli
from tests.conftest import needs, needs_qnn


@pytest.fixture(scope="module")
def states() -> dict[str, environment.ProviderState]:
    return {state.provider: state for state in environment.examine()[1]}


def test_every_provider_has_devices_or_a_reason_for_none(
    cli: Cli, states: dict[str, environment.ProviderState]
) -> None:
    assert list(states) == list(PROVIDERS)
    assert all(state.devices or state.reason for state in states.values())
    assert [device.text for device in states["cpu"].devices] == ["CPUExecutionProvider loads"]
    assert states["vitisai"].reason == "onnxruntime-vitisai is not installed."
    machine = json.loads(cli("doctor", "--json").stdout)
    assert (machine["platform"], machine["problems"]) == (sys.platform, [])
    assert machine["packages"].keys() >= {"onnxruntime", "onnx", "numpy"}
    described = {state["provider"]: state for state in machine["providers"]}
    assert list(described) == list(PROVIDERS)
    assert described["cpu"]["devices"][0]["ep"] == "CPUExecutionProvider"
    for state in machine["providers"]:
        for device in state["devices"]:
            assert "library_path" not in device["metadata"]
    cli("doctor", "--json", "--library", "x", code=2)
    printed = cli("doctor").stdout
    assert re.search(r"^ONNX Runtime: onnxruntime [\d.]+$", printed, re.MULTILINE)
    assert re.search(r"^tools: onnx \S+, onnxslim \S+, numpy \S+$", printed, re.MULTILINE)
    assert "problems:" not in printed


@needs_qnn
def test_a_simulated_npu_is_called_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PROVIDERS", {"qnn": PROVIDERS["qnn"]})
    machine = ("x86_64" if sys.platform == "linux" else "AMD64", True), ("aarch64", False)
    for name, is_simulated in machine:
        monkeypatch.setattr("platform.machine", lambda name=name: name)
        assert ("a simulator runs" in cli("doctor").stdout) == is_simulated


@needs("onnxruntime_ep_nv_tensorrt_rtx")
@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA GPU")
def test_a_plugin_ep_without_its_driver_has_a_reason(
    states: dict[str, environment.ProviderState],
) -> None:
    assert states["tensorrt-rtx"].devices == ()
    assert "libcuda.so.1" in str(states["tensorrt-rtx"].reason)


@needs_qnn
@pytest.mark.skipif(sys.platform != "linux", reason="a library of Linux is altered")
def test_a_library_that_an_ep_loads_later_is_missing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write_broken_qnn(tmp_path / "broken")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    monkeypatch.setattr(environment, "PROVIDERS", {"qnn": PROVIDERS["qnn"]})
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
    monkeypatch.setattr(environment, "installed", lambda name: None)
    printed = cli("doctor", code=1).stdout
    assert "ONNX Runtime: none" in printed
    assert "- this environment: EPC101\n        No ONNX Runtime is installed." in printed
    assert "onnxruntime-qnn>=2.7 is not installed." in printed
