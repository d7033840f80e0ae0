"""Compiling with real EPs, in this process: what is asked of the workers, and how they refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.errors import BuildError
from hatch_epcontext.protocol import (
    CompileReply,
    CompileRequest,
    Folding,
    ModelSpec,
    PrepareReply,
    PrepareRequest,
    TargetSpec,
)
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.worker.compile import compile_job
from hatch_epcontext.worker.prepare import prepare
from tests.conftest import needs_qnn
from tests.models import (
    choosing_nothing,
    half_for_the_cpu,
    model,
    network,
    save,
    save_with_data,
    value,
)

X_ELITE = {"soc_model": "60", "htp_arch": "73"}


def target(
    provider: str,
    options: Mapping[str, str] | None = None,
    *,
    optimization: str = "basic",
    embed: bool = False,
) -> TargetSpec:
    known = PROVIDERS[provider]
    complete = known.complete(options or {})
    return TargetSpec(
        name=provider,
        provider=provider,
        ep=known.ep,
        plugin=known.plugin,
        provider_options=complete,
        session_options={},
        load_options=known.loading(complete),
        device=known.devices[0],
        device_filter={},
        policy=None,
        virtual_devices=False,
        optimization=optimization,  # type: ignore[arg-type]
        embed=embed,
    )


def prepared(spec: ModelSpec, tmp_path: Path, folding: Folding = "onnxruntime") -> PrepareReply:
    """The model of ``spec``, prepared in a folder of its own."""
    folder = tmp_path / "prepared"
    folder.mkdir()
    return prepare(PrepareRequest(spec, folding, str(folder), True))


def compile_request(spec: ModelSpec, to: TargetSpec, tmp_path: Path) -> CompileRequest:
    """A request to compile the model of ``spec``, which is prepared as the target wants it."""
    made = tmp_path / "made"
    made.mkdir(parents=True)
    reply = prepared(spec, tmp_path, "none" if to.optimization == "none" else "onnxruntime")
    return CompileRequest((spec,), (reply.path,), to, str(made))


def compiled(path: Path, to: TargetSpec, tmp_path: Path) -> tuple[CompileReply, Path]:
    spec = ModelSpec("a", str(path), "models[0]", {"batch": 1} if "batch" in path.name else {})
    request = compile_request(spec, to, tmp_path)
    return compile_job(request), Path(request.folder)


def compile_context_of(made: onnx.ModelProto, tmp_path: Path, options: Mapping[str, str]) -> Path:
    """The context model that QNN makes of ``made``, with its sidecar beside it."""
    path = save(made, tmp_path / "models" / "a.onnx")
    reply, folder = compiled(path, target("qnn", options), tmp_path)
    return folder / reply.contexts[0].model_file


@needs_qnn
def test_a_context_is_compiled_for_a_chip_that_is_not_here(tmp_path: Path) -> None:
    path = save(network(), tmp_path / "batch.onnx")
    reply, made = compiled(path, target("qnn", X_ELITE), tmp_path)
    (context,) = reply.contexts
    assert reply.product == "context"
    assert sorted(file.name for file in made.iterdir()) == ["a_ctx.onnx", "a_ctx_qnn.bin"]
    assert context.model_file == "a_ctx.onnx"
    assert context.inputs[0].shape == (1, 1, 8, 8)
    assert context.compatibility.split(":")[4:6] == ["73", "60"]
    assert context.ep_sdk_version
    assert context.coverage is not None
    assert (context.coverage.partitions, context.coverage.left) == (1, ())
    assert context.coverage.share == 1.0
    (node,) = onnx.load(made / "a_ctx.onnx").graph.node
    assert node.op_type == "EPContext"


@needs_qnn
def test_an_embedded_context_is_one_file(tmp_path: Path) -> None:
    path = save(network(1), tmp_path / "a.onnx")
    _, made = compiled(path, target("qnn", X_ELITE, embed=True), tmp_path)
    assert [file.name for file in made.iterdir()] == ["a_ctx.onnx"]


@needs_qnn
def test_the_nodes_that_are_left_to_the_cpu_are_named(tmp_path: Path) -> None:
    path = save(half_for_the_cpu(), tmp_path / "a.onnx")
    reply, _ = compiled(path, target("qnn", X_ELITE), tmp_path)
    coverage = reply.contexts[0].coverage
    assert coverage is not None
    assert (coverage.nodes, coverage.compiled, coverage.partitions) == (3, 2, 1)
    (left,) = coverage.left
    assert (left.name, left.op) == ("where", "NonZero")
    assert left.reason == "the shape of its output 'y' depends on the data"


@needs_qnn
def test_a_source_with_external_data_gives_a_context_that_needs_none(tmp_path: Path) -> None:
    path = save_with_data(network(1), tmp_path / "models" / "a.onnx")
    _, made = compiled(path, target("qnn", X_ELITE), tmp_path)
    assert sorted(file.name for file in made.iterdir()) == ["a_ctx.onnx", "a_ctx_qnn.bin"]


@needs_qnn
def test_nothing_compiled_is_an_error(tmp_path: Path) -> None:
    only = model(
        [helper.make_node("NonZero", ["x"], ["y"])],
        [value("x", [2, 2])],
        [value("y", [2, None], TensorProto.INT64)],
    )
    path = save(only, tmp_path / "a.onnx")
    with pytest.raises(BuildError, match="QNNExecutionProvider compiled no node of the model"):
        compiled(path, target("qnn", X_ELITE), tmp_path)


@needs_qnn
def test_a_chip_that_the_ep_did_not_compile_for_is_an_error(tmp_path: Path) -> None:
    path = save(network(1), tmp_path / "a.onnx")
    with pytest.raises(BuildError, match="htp_arch = 999 was asked for and the EP compiled for 0"):
        compiled(path, target("qnn", {"soc_model": "60", "htp_arch": "999"}), tmp_path)


@pytest.mark.parametrize("optimization", ["none", "basic", "extended", "all"])
def test_the_cpu_gets_an_optimized_graph_and_no_context(tmp_path: Path, optimization: str) -> None:
    path = save(network(), tmp_path / "batch.onnx")
    reply, made = compiled(path, target("cpu", optimization=optimization), tmp_path)
    (context,) = reply.contexts
    assert reply.product == "optimized"
    assert context.coverage is None
    assert [file.name for file in made.iterdir()] == ["a_optimized.onnx"]
    operators = {node.op_type for node in onnx.load(made / "a_optimized.onnx").graph.node}
    # From the extended level on, the convolution takes the ReLU in.
    assert ("Relu" in operators) == (optimization in ("none", "basic"))


def test_an_optimized_graph_has_its_weights_with_it(tmp_path: Path) -> None:
    path = save_with_data(network(1), tmp_path / "models" / "a.onnx")
    _, made = compiled(path, target("cpu"), tmp_path)
    session = onnxruntime.InferenceSession(
        made / "a_optimized.onnx", providers=["CPUExecutionProvider"]
    )
    assert session.get_outputs()[0].shape == [1, 10]


@needs_qnn
@pytest.mark.parametrize("external", [False, True])
def test_in_memory_it_is_one_file_of_the_same(tmp_path: Path, external: bool) -> None:
    path = (save_with_data if external else save)(network(1), tmp_path / "models" / "a.onnx")
    to = dataclasses.replace(target("qnn", X_ELITE, embed=True), in_memory=True)
    reply, made = compiled(path, to, tmp_path)
    assert [file.name for file in made.iterdir()] == ["a_ctx.onnx"]
    by_file, _ = compiled(path, target("qnn", X_ELITE, embed=True), tmp_path / "file")
    assert reply.contexts == by_file.contexts


@needs_qnn
def test_nothing_compiled_in_memory_is_an_error(tmp_path: Path) -> None:
    path = save(choosing_nothing(), tmp_path / "a.onnx")
    to = dataclasses.replace(target("qnn", X_ELITE, embed=True), in_memory=True)
    with pytest.raises(BuildError, match="QNNExecutionProvider compiled no node of the model"):
        compiled(path, to, tmp_path)
