"""Devices and libraries of real EPs.

A registered library stays in its process until that ends, so most tests use worker processes.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.providers import Plugin
from hatch_epcontext.worker.readback import read_context
from hatch_epcontext.worker.requests import CompileReply, CompileRequest
from hatch_epcontext.worker.session import cpu_options, on_core, open_session, options
from tests.conftest import needs, needs_qnn, newer_runtime
from tests.models import network, parsed, save
from tests.worker.actions.test_compile import MODEL, X_ELITE, target

needs_rtx = needs("onnxruntime_ep_nv_tensorrt_rtx")
needs_openvino = needs("onnxruntime_ep_openvino")
needs_nxrt = needs("nxrt_ep_cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no affinity of threads")
def test_on_a_core_threads_stay_on_it_and_later_ones_do_not() -> None:
    def cores_of_a_thread() -> set[int]:
        found: list[set[int]] = []
        thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        return found[0]

    before = os.sched_getaffinity(0)
    for core in before:
        with on_core(core):
            assert os.sched_getaffinity(0) == cores_of_a_thread() == {core}
    assert os.sched_getaffinity(0) == cores_of_a_thread() == before


def product() -> onnx.ModelProto:
    """A single matrix product."""
    return parsed("(float[1, 4] x) => (float[1, 4] y) { [product] y = MatMul (x, w) }", w=(4, 4))


def compile_in_a_worker(to: Target, tmp_path: Path) -> CompileReply:
    path = save(product(), tmp_path / "models" / "a.onnx")
    folder = tmp_path / "compiled"
    folder.mkdir()
    request = CompileRequest((Model("a", path, MODEL),), (str(path),), to, str(folder))
    return Workers(120).call(request, tmp_path / "worker", location="a -> t")


def problem(to: Target, tmp_path: Path) -> Problem:
    """The problem of a worker that cannot compile for ``to``; it leaves no files."""
    with pytest.raises(BuildError) as raised:
        compile_in_a_worker(to, tmp_path)
    assert not list((tmp_path / "compiled").iterdir())
    (found,) = raised.value.problems
    assert found.location == "a -> t"
    return found


def message(to: Target, tmp_path: Path) -> str:
    """The message and the hint of the problem of a worker that cannot compile for ``to``."""
    found = problem(to, tmp_path)
    return f"{found.message}\n{found.hint}"


def plugin_target(
    ep: str, module: str = "", path: str = "", registration_name: str = "", **settings: Any
) -> Target:
    plugin = Plugin(module, module or "its library", registration_name or ep, path)
    return target("plugin", plugin=plugin, ep=ep, **settings)


@needs_rtx
@pytest.mark.skipif(
    Path("/proc/driver/nvidia").exists(), reason="this machine has the driver of an NVIDIA GPU"
)
def test_a_missing_driver_is_named(tmp_path: Path) -> None:
    found = problem(target("tensorrt-rtx"), tmp_path)
    assert found.kind is Kind.UNLOADABLE_LIBRARY
    assert "the library of NvTensorRTRTXExecutionProvider cannot be loaded" in found.message
    assert "libcuda.so.1" in found.message
    assert "Install the driver of an NVIDIA GPU." in str(found.hint)


def test_an_ep_of_another_distribution_is_an_error(tmp_path: Path) -> None:
    found = problem(target("directml", optimization="all"), tmp_path)
    assert found.kind is Kind.MISSING_REQUIREMENT
    assert "has no DmlExecutionProvider.\nIt has " in found.message
    assert found.hint == "Install onnxruntime-directml or onnxruntime-windowsml instead of it."


@pytest.mark.skipif(sys.platform == "darwin", reason="ONNX Runtime has Core ML there")
def test_an_ep_of_another_system_is_an_error(tmp_path: Path) -> None:
    found = problem(target("coreml", optimization="all"), tmp_path)
    assert found.kind is Kind.MISSING_REQUIREMENT
    assert found.hint == "CoreMLExecutionProvider needs macOS on Apple silicon."


IN_NXRT = [newer_runtime, needs_nxrt]


@pytest.mark.parametrize(
    ("ep", "module", "registration_name", "words"),
    [
        pytest.param("cpu_ep", "nxrt_ep_cpu", "",
                     ["cpu_ep compiled the model, but returns no EP contexts"], marks=IN_NXRT),
        pytest.param("nxrt", "nxrt_ep_cpu", "nxrt_ep",
                     ["nxrt_ep_cpu was registered as 'nxrt_ep' and offers cpu_ep, not nxrt.",
                      "Set ep-name to the name that it offers"], marks=IN_NXRT),
        pytest.param("QNNExecutionProvider", "onnxruntime_qnn", "other",
                     ["registered as 'other' and offers other, not QNNExecutionProvider"],
                     marks=needs_qnn),
        ("X", "no_such_ep", "", ["the package of X cannot be imported: No module named 'no_such_ep'."]),
        ("X", "json", "", ["json is not the package of a plugin EP: "]),
    ],
)  # fmt: skip
def test_a_module_that_does_not_give_the_ep_is_an_error(
    tmp_path: Path, ep: str, module: str, registration_name: str, words: list[str]
) -> None:
    text = message(plugin_target(ep, module, registration_name=registration_name), tmp_path)
    assert [word for word in words if word not in text] == []


@needs_qnn
def test_any_plugin_ep_can_compile(tmp_path: Path) -> None:
    import onnxruntime_qnn

    to = plugin_target(
        "QNNExecutionProvider",
        path=onnxruntime_qnn.get_library_path(),
        provider_options={"backend_type": "htp", **X_ELITE},
    )
    (context,) = compile_in_a_worker(to, tmp_path).contexts
    assert context.coverage is not None
    assert context.coverage.share == 1
    assert ":73:60:" in context.compatibility


def test_a_file_that_is_no_library_is_an_error(tmp_path: Path) -> None:
    text = tmp_path / "plugin.so"
    text.write_text("not a library", encoding="utf-8")
    found = problem(plugin_target("X", path=str(text)), tmp_path)
    assert "the library of X cannot be loaded" in found.message
    assert "Check that the file is a library" in str(found.hint)


@pytest.mark.skipif(sys.platform != "linux", reason="uses a library in Linux's format")
def test_a_library_without_an_ep_is_an_error(tmp_path: Path) -> None:
    import _ssl

    text = message(plugin_target("X", path=_ssl.__file__), tmp_path)
    assert "is a library, but not that of an EP" in text


@needs_qnn
def test_an_ep_that_cross_compiles_takes_any_of_its_devices() -> None:
    to = target("qnn", X_ELITE, device="npu")
    options(to, to.settings.provider_options)


@needs_qnn
@pytest.mark.parametrize("embed", [False, True])
def test_a_session_writes_the_context_model_of_an_ep_without_model_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embed: bool
) -> None:
    from hatch_epcontext.worker import compiling

    # QNN can do it too, with ONNX Runtime's keys instead of TensorRT's own.
    result = tmp_path / "a_ctx.onnx"
    to = target(
        "qnn",
        X_ELITE,
        session_options={
            "ep.context_enable": "1",
            "ep.context_file_path": str(result),
            "ep.context_embed_mode": str(int(embed)),
        },
    )
    prepared = save(network(1), tmp_path / "a.onnx")
    compiling._with_session(prepared, options(to, to.settings.provider_options), to)
    context = read_context(Model("a", prepared, MODEL), prepared, result, to)
    assert context.coverage is not None
    assert context.coverage.share == 1
    assert len(list(tmp_path.glob("a_ctx*"))) == (1 if embed else 2)


def test_int4_weights_are_computed_with_floats(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.integers(-8, 8, size=(128, 128))
    scale = rng.uniform(0.01, 0.02, size=(4, 128)).astype(np.float32)
    made = parsed(
        """(float[4, 128] x) => (float[4, 128] y) {
            floats = DequantizeLinear <axis = 0, block_size = 32> (w, scale)
            y = MatMul (x, floats) }""",
        opset=21, ir_version=10, w=numbers.astype(ml_dtypes.int4), scale=scale,
    )  # fmt: skip
    path = save(made, tmp_path / "a.onnx")
    x = rng.normal(size=(4, 128)).astype(np.float32)
    found = open_session(path, cpu_options()).run(None, {"x": x})[0]
    # With activations of int8, the default, errors reach 0.02.
    np.testing.assert_allclose(found, x @ (numbers * scale.repeat(32, 0)), atol=1e-4)
