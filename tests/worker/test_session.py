"""Devices and libraries of real EPs. What is registered stays for as long as a process lives, so most of
this is asked of workers.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import pytest
from onnx import helper

from hatch_epcontext.errors import BuildError
from hatch_epcontext.process import Workers
from hatch_epcontext.protocol import CompileReply, CompileRequest, ModelSpec, TargetSpec
from hatch_epcontext.providers import Plugin
from hatch_epcontext.worker.libraries import AbsentError
from hatch_epcontext.worker.readback import read_context
from hatch_epcontext.worker.session import matches, options
from tests.conftest import needs, needs_qnn
from tests.models import model, network, save, value, weights
from tests.worker.test_compile import X_ELITE, target

newer_runtime = pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 24),
    reason="ONNX Runtime 1.23 does not get all devices of plugin EPs",
)
needs_rtx = needs("onnxruntime_ep_nv_tensorrt_rtx")
needs_openvino = needs("onnxruntime_ep_openvino")
needs_webgpu = needs("onnxruntime_ep_webgpu")
needs_nxrt = needs("nxrt_ep_cpu")


def product() -> onnx.ModelProto:
    """A matrix product and no more."""
    return model(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        [value("x", [1, 4])],
        [value("y", [1, 4])],
        [weights("w", 4, 4)],
    )


def compile_in_a_worker(to: TargetSpec, tmp_path: Path) -> CompileReply:
    path = save(product(), tmp_path / "models" / "a.onnx")
    folder = tmp_path / "compiled"
    folder.mkdir()
    request = CompileRequest((ModelSpec("a", str(path), "m"),), (str(path),), to, str(folder))
    reply: CompileReply = Workers(120).call(request, tmp_path / "worker", where="a -> t")
    return reply


def refusal(to: TargetSpec, tmp_path: Path) -> str:
    """What is told when a worker cannot compile for ``to``; nothing is left behind."""
    with pytest.raises(BuildError) as raised:
        compile_in_a_worker(to, tmp_path)
    assert not list((tmp_path / "compiled").iterdir())
    (problem,) = raised.value.problems
    assert problem.where == "a -> t"
    return f"{problem.what}\n{problem.fix}"


def plugin_target(
    ep: str, module: str = "", path: str = "", registration_name: str = ""
) -> TargetSpec:
    plugin = Plugin(module, module or "its library", registration_name or ep, path)
    return dataclasses.replace(target("plugin"), ep=ep, plugin=plugin)


@needs_rtx
@pytest.mark.skipif(
    Path("/proc/driver/nvidia").exists(), reason="this machine has the driver of an NVIDIA GPU"
)
def test_a_driver_that_is_not_there_is_told_with_what_brings_it(tmp_path: Path) -> None:
    told = refusal(target("tensorrt-rtx"), tmp_path)
    assert "the library of NvTensorRTRTXExecutionProvider cannot be loaded" in told
    assert "libcuda.so.1" in told
    assert "Install the driver of an NVIDIA GPU (" in told


@newer_runtime
@needs_openvino
def test_a_virtual_device_is_compiled_for_or_its_compiler_is_missed(tmp_path: Path) -> None:
    to = dataclasses.replace(
        target("openvino"),
        virtual_devices=True,
        device="npu",
        device_filter={"npu_platform": "4000", "vendor": "intel"},
    )
    told = refusal(to, tmp_path)
    # The package for Linux lacks it.
    assert "because libopenvino_intel_npu_compiler_loader.so is not on this machine" in told
    assert "the driver of an Intel NPU" in told


@newer_runtime
@needs_openvino
def test_where_nothing_matches_every_device_is_told(tmp_path: Path) -> None:
    to = dataclasses.replace(
        target("openvino"), virtual_devices=True, device="npu", device_filter={"npu_platform": "1"}
    )
    told = refusal(to, tmp_path)
    assert "OpenVINOExecutionProvider finds no device here that is npu, npu_platform = '1'." in told
    assert "CPUExecutionProvider on cpu" in told
    for platform in ("4000", "5010", "5020", "6010"):
        assert f"npu_platform = '{platform}'" in told
    assert "device-filter" in told


@needs_webgpu
@pytest.mark.skipif(Path("/dev/dri").exists(), reason="this machine may have a GPU for WebGPU")
def test_an_optimized_graph_of_its_own_needs_the_ep(tmp_path: Path) -> None:
    told = refusal(target("webgpu", optimization="all"), tmp_path)
    assert "WebGpuExecutionProvider finds no device here" in told
    assert "It needs a GPU" in told


def test_an_ep_of_another_distribution(tmp_path: Path) -> None:
    told = refusal(target("migraphx", optimization="all"), tmp_path)
    assert "has no MIGraphXExecutionProvider.\nIt has " in told
    assert "Install onnxruntime-migraphx in its place." in told


@newer_runtime
@needs_nxrt
def test_an_ep_that_returns_no_contexts_is_told_as_that(tmp_path: Path) -> None:
    told = refusal(plugin_target("cpu_ep", "nxrt_ep_cpu"), tmp_path)
    assert "cpu_ep compiled the model, and returns no EP contexts" in told


@newer_runtime
@needs_nxrt
def test_an_ep_of_another_name_than_was_said(tmp_path: Path) -> None:
    told = refusal(plugin_target("nxrt", "nxrt_ep_cpu", registration_name="nxrt_ep"), tmp_path)
    assert "nxrt_ep_cpu was registered as 'nxrt_ep' and brought cpu_ep, not nxrt." in told
    assert "Set ep-name to what it brings" in told


@needs_qnn
def test_an_ep_that_is_called_what_it_is_registered_as(tmp_path: Path) -> None:
    to = plugin_target("QNNExecutionProvider", "onnxruntime_qnn", registration_name="other")
    told = refusal(to, tmp_path)
    assert "registered as 'other' and brought other, not QNNExecutionProvider" in told
    assert "set registration-name" in told


@needs_qnn
def test_any_plugin_can_be_compiled_with(tmp_path: Path) -> None:
    import onnxruntime_qnn

    to = plugin_target("QNNExecutionProvider", path=onnxruntime_qnn.get_library_path())
    to = dataclasses.replace(to, provider_options={"backend_type": "htp", **X_ELITE})
    (context,) = compile_in_a_worker(to, tmp_path).contexts
    assert context.coverage is not None
    assert context.coverage.share == 1
    assert ":73:60:" in context.compatibility


@pytest.mark.parametrize(
    ("module", "what"),
    [
        ("no_such_ep", "the package of X cannot be imported: No module named 'no_such_ep'."),
        ("json", "json is no package of a plugin EP: "),
    ],
)
def test_a_package_that_is_none(tmp_path: Path, module: str, what: str) -> None:
    assert what in refusal(plugin_target("X", module), tmp_path)


def test_a_library_that_is_no_library(tmp_path: Path) -> None:
    text = tmp_path / "plugin.so"
    text.write_text("not a library", encoding="utf-8")
    told = refusal(plugin_target("X", path=str(text)), tmp_path)
    assert "the library of X cannot be loaded" in told
    assert "See that it is one" in told


@pytest.mark.skipif(sys.platform != "linux", reason="finds a library as Linux has them")
def test_a_library_that_is_of_no_ep(tmp_path: Path) -> None:
    import _ssl

    told = refusal(plugin_target("X", path=_ssl.__file__), tmp_path)
    assert "is a library, and not that of an EP" in told


@needs_qnn
@pytest.mark.parametrize("policy", ["prefer-npu", "max-performance", "min-overall-power"])
def test_onnx_runtimes_policies_choose_the_ep_with_its_options(tmp_path: Path, policy: str) -> None:
    to = dataclasses.replace(target("qnn", X_ELITE), policy=policy)
    (context,) = compile_in_a_worker(to, tmp_path).contexts
    assert ":73:60:" in context.compatibility


@needs_qnn
def test_an_ep_that_cross_compiles_takes_any_of_its_devices() -> None:
    to = dataclasses.replace(target("qnn", X_ELITE), device="npu")
    options(to, to.provider_options)
    with pytest.raises(AbsentError, match="vendor = 'nobody'"):
        options(dataclasses.replace(to, device_filter={"vendor": "nobody"}), {})


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({}, True),
        ({"type": "npu"}, True),
        ({"type": "gpu"}, False),
        ({"vendor": "intel"}, True),
        ({"vendor-id": "32902", "device-id": "7"}, True),
        ({"npu_platform": "4000"}, True),
        ({"npu_platform": "5010"}, False),
        ({"is_virtual": "1"}, True),
        ({"no_such_thing": "1"}, False),
    ],
)
def test_what_a_filter_takes(wanted: dict[str, str], fits: bool) -> None:
    hardware: Any = SimpleNamespace(
        type=SimpleNamespace(name="NPU"),
        vendor="Intel",
        vendor_id=32902,
        device_id=7,
        metadata={"is_virtual": "1"},
    )
    device = SimpleNamespace(device=hardware, ep_metadata={"npu_platform": "4000"})
    assert matches(device, wanted) is fits


@needs_qnn
@pytest.mark.parametrize("embed", [False, True])
def test_a_session_writes_contexts_for_eps_that_do_so_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embed: bool
) -> None:
    from hatch_epcontext.worker import compile as compile_module

    # QNN also can, with ONNX Runtime's keys where TensorRT has its own.
    result = tmp_path / "a_ctx.onnx"
    to = dataclasses.replace(
        target("qnn", X_ELITE),
        session_options={
            "ep.context_enable": "1",
            "ep.context_file_path": str(result),
            "ep.context_embed_mode": str(int(embed)),
        },
    )
    prepared = save(network(1), tmp_path / "a.onnx")
    compile_module._with_session(prepared, options(to, to.provider_options), to)
    context = read_context("a", prepared, result, to)
    assert context.coverage is not None
    assert context.coverage.share == 1
    assert len(list(tmp_path.glob("a_ctx*"))) == (1 if embed else 2)
