"""Devices that are there, missing or too old; only hardware that is missing is simulated."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.conftest import needs_qnn
from tests.loader.shipped import (
    CPU,
    CPU_EP,
    NPU,
    QNN,
    Shipper,
    Table,
    X,
    changed,
    device,
    opener,
    outcomes,
    variant,
)


@pytest.mark.parametrize(
    ("offered", "requested", "reason"),
    [
        (["CPU"], None, "finds no npu, only cpu (device='any' accepts it)"),
        (["CPU", "GPU"], "npu", "finds no npu, only cpu, gpu"),
        ([], None, "finds no npu on this machine"),
        ([], "any", "finds no npu on this machine"),
    ],
)
def test_a_target_whose_device_is_missing_is_skipped(
    ship: Shipper, offered: list[str], requested: str, reason: str
) -> None:
    app = ship(npu=NPU)
    app.Opener._offered = lambda self: [device(kind) for kind in offered]
    npu = app.explain("a", device=requested)[0]
    assert npu.outcome == "skipped"
    assert reason in npu.reason


def test_the_targets_own_device_is_preferred(ship: Shipper) -> None:
    app = ship(npu=NPU)
    devices = [device("CPU"), device("NPU")]
    app.Opener._offered = lambda self: devices
    for requested in ("npu", "any"):
        assert opener(app, device=requested).find_devices() == [devices[1]]


def test_models_that_share_weights_are_not_opened_on_a_simulator(ship: Shipper) -> None:
    """QNN's simulator refuses contexts that share weights."""
    app = ship(npu=changed(NPU, group="g", needs_device=True))
    app.Opener._offered = lambda self: [device("CPU")]
    npu, source = app.explain("a", device="any")
    assert (npu.outcome, npu.reason.count("only cpu")) == ("skipped", 1)
    assert source.outcome == "opened"
    app.Opener._offered = lambda self: [device("CPU"), device("NPU")]
    found = opener(app, device="any").find_devices()
    assert [each.device.type.name for each in found] == ["NPU"]


@pytest.mark.parametrize(
    "error", [MemoryError("std::bad_alloc"), ValueError("basic_string::_M_create"), SystemError()]
)
def test_a_device_that_vanishes_between_listing_and_opening_is_a_failure(
    ship: Shipper, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    app = ship(npu=NPU)
    app.Opener._offered = lambda self: [device("NPU")]

    class Options(onnxruntime.SessionOptions):  # type: ignore[misc]
        def add_provider_for_devices(self, devices: Any, options: Any) -> None:
            raise error

    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    npu, source = app.explain("a")
    assert str(npu) == f"npu: failed, {type(error).__name__}: {error}"
    assert source.outcome == "opened"


def test_a_target_whose_ep_this_onnxruntime_does_not_contain_is_skipped(ship: Shipper) -> None:
    settings = {"ep": "MIGraphXExecutionProvider", "device": "gpu"}
    gpu = variant("a/cpu", "a_optimized.onnx", settings=settings)
    amd, _ = ship(amd=gpu).explain("a")
    assert amd.outcome == "skipped"
    assert "does not contain MIGraphXExecutionProvider" in amd.reason


def test_a_session_without_the_targets_ep_is_not_used(
    ship: Shipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime with CUDA but without its libraries: it logs that, and opens the session."""
    cuda = variant("a/cpu", "a_optimized.onnx", settings={"ep": "CUDAExecutionProvider"})
    app = ship(gpu=cuda)

    class Session(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, *arguments: Any, providers: Any, **named: Any) -> None:
            super().__init__(*arguments, providers=[CPU_EP], **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    gpu, _ = app.explain("a", fallback=True)
    assert gpu.outcome == "skipped"
    assert "without CUDAExecutionProvider" in gpu.reason


CUDA = variant(
    "a/cpu", "a_optimized.onnx", settings={"ep": "CUDAExecutionProvider", "device": "gpu"}
)


class Cuda:
    """A stand-in for an onnxruntime with CUDA: ``errors`` are those of the next sessions that use it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: list[Exception] = []
        self.preloaded = 0
        errors = self.errors

        class Session(onnxruntime.InferenceSession):  # type: ignore[misc]
            def __init__(self, *arguments: Any, providers: Any, **named: Any) -> None:
                self.cuda = any("CUDA" in str(provider) for provider in providers)
                if self.cuda and errors:
                    raise errors.pop(0)
                super().__init__(*arguments, providers=[CPU_EP], **named)

            def get_providers(self) -> list[str]:
                return ["CUDAExecutionProvider", CPU_EP] if self.cuda else [CPU_EP]

        monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
        names = ["CUDAExecutionProvider", CPU_EP]
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)
        monkeypatch.setattr(onnxruntime, "preload_dlls", self.preload)

    def preload(self) -> None:
        self.preloaded += 1
        # As onnxruntime's function prints.
        vars(onnxruntime).get("print", print)("Failed to load", "libcublasLt.so.13")
        raise OSError("libcudart.so.13")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "preloaded"),
    [
        ({"target": "gpu"}, 1),
        ({"target": "source"}, 0),
        ({"target": "source", "fallback_providers": ["CUDAExecutionProvider"]}, 1),
        ({"target": "source", "fallback_providers": [("CUDAExecutionProvider", {})]}, 1),
        ({"target": "source", "fallback_providers": [CPU_EP]}, 0),
        ({"target": "gpu", "fallback_providers": ["CUDAExecutionProvider"]}, 1),
        ({"target": "cpu", "fallback_providers": ["CUDAExecutionProvider"]}, 0),
        # Its library contains them, but what it is linked to may not.
        ({"target": "rtx", "device": "gpu"}, 1),
    ],
)
def test_libraries_of_cuda_are_loaded_once_where_the_ep_needs_them(
    ship: Shipper,
    cuda: Cuda,
    arguments: Table,
    preloaded: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rtx = {**NPU, "ep": "NvTensorRTRTXExecutionProvider"}
    app = ship(gpu=CUDA, cpu=CPU, rtx=changed(rtx, settings={"device": "gpu"}))
    for _ in range(2):
        app.explain("a", **arguments)
    assert cuda.preloaded == preloaded
    # What onnxruntime prints is for a log.
    assert capsys.readouterr().out == ""
    assert "print" not in vars(onnxruntime)


CALL = (
    "onnxruntime::CudaCall(ERRTYPE, const char*, int) [with ERRTYPE = cudaError; bool THRW = true] "
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            (
                f"/src/call.cc:129 std::conditional_t<THRW, void> {CALL}/src/call.cc:121 void {CALL}"
                "CUDA failure 100: no CUDA-capable device is detected ; GPU=-1 ; file=/src/a.cc ; line=285 ; "
                "expr=cudaSetDevice(info_.device_id);"
            ),
            "CUDA failure 100: no CUDA-capable device is detected",
        ),
        (
            (
                r"D:\a\s\call.cc:129 onnxruntime::CudaCall D:\a\s\call.cc:121 onnxruntime::CudaCall "
                "CUDNN failure 1001: not initialized (busy) ; GPU=0 ; expr=cudnnCreate(&handle);"
            ),
            "CUDNN failure 1001: not initialized (busy)",
        ),
        (
            (
                "Exception during initialization: /src/bfc_arena.cc:376 void* "
                "onnxruntime::BFCArena::Allocate(size_t, bool) const Failed to\nallocate 12 bytes"
            ),
            "Exception during initialization: Failed to allocate 12 bytes",
        ),
        ("it is " + 500 * "long", f"it is {500 * 'long'}"[:300]),
    ],
)
def test_the_reason_of_a_failure_is_a_line_without_sources(
    ship: Shipper, cuda: Cuda, error: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.errors += [RuntimeError(error), RuntimeError(error)]
    caplog.set_level("DEBUG")
    app = ship(gpu=CUDA)
    assert app.target_of(app.load("a")) == "source"
    lines = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert lines == [f"a on gpu: failed, RuntimeError: {reason}"]
    assert any(error in record.message for record in caplog.records if record.levelname == "DEBUG")


def test_a_gpu_that_is_busy_is_asked_a_second_time(ship: Shipper, cuda: Cuda) -> None:
    app = ship(gpu=CUDA)
    busy = RuntimeError(
        "CUDA failure 900: operation not permitted when stream is capturing ; GPU=0"
    )
    cuda.errors += [busy]
    (gpu, _) = app.explain("a")
    assert (gpu.outcome, gpu.reason) == (
        "opened",
        (
            "CUDAExecutionProvider on gpu, at the second attempt (RuntimeError: CUDA failure 900: "
            "operation not permitted when stream is capturing)"
        ),
    )
    cuda.errors += [busy]
    runner = app.runner("a", target="source", fallback_providers=["CUDAExecutionProvider"])
    assert runner.explain()[0].reason.startswith("CUDAExecutionProvider, at the second attempt (")
    cuda.errors += [busy, busy, busy]
    assert outcomes(app.explain("a")) == [("gpu", "failed"), ("source", "opened")]
    assert len(cuda.errors) == 1


def test_the_source_opens_on_the_cpu_where_its_fallback_providers_find_no_gpu(
    ship: Shipper, cuda: Cuda
) -> None:
    cuda.errors += 2 * [RuntimeError("CUDA failure 100: no CUDA-capable device is detected")]
    app = ship(gpu=CUDA)
    (source,) = app.explain("a", target="source", fallback_providers=["CUDAExecutionProvider"])
    assert (source.outcome, source.reason) == (
        "opened",
        (
            "CPUExecutionProvider on cpu, without its fallback providers (RuntimeError: CUDA failure 100: no "
            "CUDA-capable device is detected)"
        ),
    )


@pytest.mark.parametrize("compares", [True, False])
def test_an_ep_says_why_it_does_not_support_a_device(
    ship: Shipper, monkeypatch: pytest.MonkeyPatch, compares: bool
) -> None:
    """An EP that the manifest does not name is not asked: QNN crashes."""
    module, asked = "onnxruntime.capi._pybind_state", list[str]()

    def details(ep: str, hardware: Any) -> Table:
        asked.append(ep)
        return {"reasons_bitmask": 1, "notes": "Compute capability 9.0\nis not supported."}

    hardware = [device(kind).device for kind in ("CPU", "NPU")]
    monkeypatch.setattr(f"{module}.get_hardware_devices", lambda: hardware, raising=False)
    monkeypatch.setattr(
        f"{module}.get_hardware_device_ep_incompatibility_details", details, raising=False
    )
    app = ship(npu=changed(NPU, compares=compares))
    app.Opener._offered = lambda self: []
    why = ": Compute capability 9.0 is not supported." if compares else ""
    npu = "SomeExecutionProvider finds no npu on this machine"
    assert app.explain("a")[0].reason == f"{npu}{why}"
    assert asked == ["SomeExecutionProvider"] * compares
    # An EP that gives no answer, and an onnxruntime that has no such function.
    monkeypatch.setattr(f"{module}.get_hardware_device_ep_incompatibility_details", None)
    assert app.explain("a")[0].reason == npu


def test_without_onnxruntime_the_reason_says_so(
    ship: Shipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = ship(cpu=CPU)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(app.LoadError, match=r"cpu: skipped, .*onnxruntime"):
        app.load("a")


def test_an_onnxruntime_without_plugins_opens_only_its_own_eps(
    ship: Shipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = ship(npu=NPU, cpu=CPU)
    monkeypatch.delattr(onnxruntime, "get_ep_devices")
    npu, cpu, _ = app.explain("a")
    assert (npu.outcome, cpu.outcome) == ("skipped", "opened")
    assert "is too old for SomeExecutionProvider" in npu.reason


@needs_qnn
def test_a_context_runs_on_the_simulator_only_on_request(qnn: Shipper) -> None:
    app = qnn(npu=QNN)
    npu, source = app.explain("a")
    assert "finds no npu, only cpu (device='any' accepts it)" in npu.reason
    assert source.outcome == "opened"
    session = app.load("a", device="any")
    assert app.target_of(session) == "npu"
    difference = session.run(None, X)[0] - app.load("a").run(None, X)[0]
    assert np.abs(difference).max() < 0.05


COMPATIBILITY = "onnxruntime.capi._pybind_state.get_model_compatibility_for_ep_devices"


def test_a_context_for_another_version_of_openvino_is_skipped(
    openvino: tuple[Shipper, Table],
) -> None:
    ship, entry = openvino
    app = ship(openvino=entry)
    assert entry["compatibility_string"]
    assert outcomes(app.explain("a")) == [("openvino", "opened"), ("source", "not needed")]
    entry["compatibility_string"] = "of another version"
    first, source = ship(openvino=entry).explain("a")
    assert (first.target, first.outcome) == ("openvino", "skipped")
    assert first.reason.endswith("of another version")
    entry["additional_metadata"]["hatch-epcontext"]["settings"]["compute_capabilities"] = ["8.9"]
    assert ship(openvino=entry).explain("a")[0].reason.endswith("for 8.9")
    assert source.outcome == "opened"
    # The EP gives no answer, and ONNX Runtime 1.23 cannot ask.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(COMPATIBILITY, lambda devices, text: int("not implemented"))
        assert app.explain("a")[0].outcome == "opened"
        patch.delattr(COMPATIBILITY)
        assert app.explain("a")[0].outcome == "opened"
    entry["compatibility_string"] = None
    assert ship(openvino=entry).explain("a")[0].outcome == "opened"


@needs_qnn
def test_qnn_is_never_asked_about_compatibility(
    qnn: Shipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can crash the process."""
    asked: list[str] = []
    monkeypatch.setattr(COMPATIBILITY, lambda devices, text: asked.append(text))
    app = qnn(npu={**QNN, "compatibility_string": "of another version"})
    assert app.target_of(app.load("a", device="any")) == "npu"
    assert asked == []
