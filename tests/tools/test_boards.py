"""What a report calls the devices of a machine. Hardware that is missing here is described."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.config.settings import CompileSettings, Target
from hatch_epcontext.errors import Step, UnavailableError
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.providers import PROVIDERS, Plugin
from hatch_epcontext.tools.boards import Board, BoardDevice
from hatch_epcontext.tools.environment import chip_name
from hatch_epcontext.worker.requests import (
    Devices,
    DevicesReply,
    EpDevice,
    LibraryRequest,
    Runtime,
    TimeOpeningReply,
)
from hatch_epcontext.worker.results import (
    Agreement,
    AgreementStatus,
    Validation,
    ValidationStatus,
)

AGREES = Validation(ValidationStatus.RAN, (Agreement("y", 0.1, 0.999, 31.26),), samples=("a", "b"))

X_ELITE = "v2:6:2.51.0:5.51.0:73:60:0:0"


def target(provider: str) -> Target:
    known = PROVIDERS[provider]
    settings = CompileSettings(provider=provider, ep=known.ep, device=known.devices[0])
    return Target("npu", settings, known.plugin)


def device(provider: str, kind: str, **facts: str) -> EpDevice:
    return EpDevice(PROVIDERS[provider].ep, kind, "", "", (0, 0), facts)


def test_a_device_is_called_as_windows_or_its_ep_calls_it() -> None:
    times = TimeOpeningReply(0.5, 0.9, (0.003, 0.001, 0.002), False)
    name = "Snapdragon(R) X Elite - Hexagon(TM) NPU"
    run = BoardDevice(device("qnn", "npu", Description=name)).run(
        target("qnn"), X_ELITE, AGREES, times
    )
    assert (run.chip, run.verdict, run.snr, run.samples) == (name, "agrees", 31.3, 2)
    assert (run.latency, run.runs, run.load) == (0.002, 3, 0.5)
    facts = {"FULL_DEVICE_NAME": "Intel(R) AI Boost", "NPU_DRIVER_VERSION": "1688"}
    run = BoardDevice(device("openvino", "npu", **facts)).run(target("openvino"), "", AGREES, None)
    assert (run.chip, run.driver, run.latency) == ("Intel(R) AI Boost", "1688", None)


def test_a_device_without_a_name_is_the_chip_of_the_context() -> None:
    for simulated in (False, True):
        known = BoardDevice(device("qnn", "npu"), simulated)
        assert known.run(target("qnn"), X_ELITE, AGREES, None).chip == "snapdragon-x-elite"


def test_the_cpu_is_called_by_the_name_of_the_processor() -> None:
    run = BoardDevice(device("cpu", "cpu")).run(target("cpu"), "", AGREES, None)
    assert run.chip
    assert run.chip == chip_name()
    assert "onnxruntime" in run.versions


@pytest.mark.skipif(sys.platform == "win32", reason="the command is a script")
def test_the_drivers_own_command_names_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    known, other = (
        BoardDevice(replace(device("cuda", "gpu"), vendor=vendor)) for vendor in ("Nvidia", "Intel")
    )
    without = known.run(target("cuda"), "", AGREES, None)
    assert (without.chip, without.driver) == ("CUDAExecutionProvider on gpu", "")
    for script, chip, driver in (
        ("echo 'NVIDIA H200, 570.86.15'; echo 'NVIDIA L4, 1'", "NVIDIA H200", "570.86.15"),
        ("exit 1", without.chip, ""),
    ):
        command.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        command.chmod(0o755)
        run = known.run(target("cuda"), "", AGREES, None)
        assert (run.chip, run.driver) == (chip, driver)
        assert other.run(target("cuda"), "", AGREES, None).driver == ""


class Described(Workers):
    """Workers that find these devices."""

    def __init__(self, *devices: EpDevice, reason: str | None = None) -> None:
        super().__init__(1.0)
        self._reply = Devices(devices, reason)

    def call(
        self, request: Any, folder: Path | None = None, *, location: str, step: Step | None = None
    ) -> Any:
        if isinstance(request, LibraryRequest):
            return {"Any": self._reply}
        runtime = Runtime("1.32.0", (), True)
        return DevicesReply(runtime, dict.fromkeys(request.providers, self._reply))


def test_the_device_itself_comes_before_a_simulator() -> None:
    npu, cpu = device("qnn", "npu"), device("qnn", "cpu")
    for any_device in (False, True):
        assert Board(Described(cpu, npu), any_device=any_device).device(target("qnn")) == (
            BoardDevice(npu)
        )
    assert Board(Described(cpu), any_device=True).device(target("qnn")) == BoardDevice(cpu, True)
    with pytest.raises(UnavailableError, match="--device any"):
        Board(Described(cpu), any_device=False).device(target("qnn"))


@pytest.mark.parametrize("any_device", [False, True])
def test_a_machine_without_the_device_says_why(any_device: bool) -> None:
    board = Board(Described(reason="No driver."), any_device=any_device)
    with pytest.raises(UnavailableError, match="No driver"):
        board.device(target("qnn"))
    # OpenVINO has no simulator: its CPU is no NPU.
    board = Board(Described(device("openvino", "cpu")), any_device=any_device)
    npu = replace(target("openvino").settings, device="npu")
    with pytest.raises(UnavailableError, match="finds no device that is npu"):
        board.device(replace(target("openvino"), settings=npu))


def test_the_devices_of_an_unknown_library_are_those_of_its_ep() -> None:
    plugin = Plugin("any_ep", "any-ep", "Any")
    settings = CompileSettings(provider="plugin", ep="AnyEp", device="any")
    other, own = EpDevice("OtherEp", "npu", ""), EpDevice("AnyEp", "npu", "")
    board = Board(Described(other, own), any_device=False)
    assert board.device(Target("any", settings, plugin)) == BoardDevice(own)


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (AgreementStatus.SENSITIVE, "sensitive"),
        (AgreementStatus.DIFFERS, "differs"),
        (AgreementStatus.INCONCLUSIVE, "inconclusive"),
        (AgreementStatus.RANDOM, "not-compared"),
    ],
)
def test_the_verdict_of_a_run(status: AgreementStatus, verdict: str) -> None:
    validation = Validation(ValidationStatus.RAN, (Agreement("y", 0.1, 0.9, status=status),))
    run = BoardDevice(device("cpu", "cpu")).run(target("cpu"), "", validation, None)
    assert run.verdict == verdict
