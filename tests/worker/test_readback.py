"""Read back context models, most of them compiled with a real EP."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import helper

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, InspectionError, Kind, Setting
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.tools.inspecting import inspect_model, verify_model
from hatch_epcontext.worker import readback
from tests.conftest import needs_qnn
from tests.models import half_for_the_cpu, interrupted, network, save, with_weights_left_over
from tests.worker.actions.test_compile import MODEL, X_ELITE, compiled, target


def context_node(**attributes: str | int) -> onnx.NodeProto:
    node = helper.make_node("EPContext", ["x"], ["y"], "n", domain="com.microsoft")
    for name, given in attributes.items():
        node.attribute.append(helper.make_attribute(name, given))
    return node


@pytest.mark.parametrize(
    ("nodes", "kind", "message"),
    [
        ([], Kind.NOTHING_COMPILED, "without an EPContext node"),
        ([context_node(source="OtherEP")], Kind.WRONG_RESULT, "was written by 'OtherEP', not by QNN"),
        ([context_node(source="QNNExecutionProvider", embed_mode=0, ep_cache_context="no.bin")],
         Kind.WRONG_RESULT, "names 'no.bin', which is missing"),
        ([context_node(source="QNNExecutionProvider", embed_mode=0, ep_cache_context="../x.bin")],
         Kind.WRONG_RESULT, "names a file outside the artifact: '../x.bin'"),
    ],
)  # fmt: skip
def test_wrong_contexts_are_an_error(
    tmp_path: Path, nodes: list[onnx.NodeProto], kind: Kind, message: str
) -> None:
    problem = next(readback._wrong_contexts(nodes, tmp_path / "a_ctx.onnx", PROVIDERS["qnn"]))
    assert problem.kind is kind
    assert message in problem.message


CHIPS = {"soc_model": "60,57"}


@needs_qnn
def test_a_context_for_several_chips_is_read_back(tmp_path: Path) -> None:
    path = save(network(1), tmp_path / "a.onnx")
    to = target("qnn", CHIPS)
    reply, folder = compiled(path, to, tmp_path)
    (context,) = reply.contexts
    assert context.compatibility.split(":")[4:6] == ["73,75", "60,57"]
    result = folder / context.model_file
    spec = Model("a", path, MODEL)
    # Another order is another context, and one chip is not two.
    for chips in ("57,60", "60", "60,57,69"):
        with pytest.raises(BuildError, match=f"soc_model = {chips} was requested, but the EP"):
            readback.read_context(spec, path, result, target("qnn", {"soc_model": chips}))
    model = onnx.load(result)
    (mark,) = [a for a in model.graph.node[0].attribute if a.name == "is_multi_soc_ep_context"]
    assert mark.i == 1
    mark.i = 0
    onnx.save(model, result)
    with pytest.raises(BuildError, match="its attribute is_multi_soc_ep_context is not 1"):
        readback.read_context(spec, path, result, to)


@needs_qnn
def test_two_embedded_contexts_are_an_error_for_an_ep_that_loads_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(interrupted(), tmp_path / "a.onnx")
    compiled(path, target("qnn", X_ELITE, embed=True), tmp_path / "fine")
    one = PROVIDERS["qnn"].changed(embeds_one=True)
    monkeypatch.setitem(PROVIDERS, "qnn", one)
    with pytest.raises(BuildError, match="became 2 contexts, and QNNExecutionProvider loads only"):
        compiled(path, target("qnn", X_ELITE, embed=True), tmp_path / "refused")


@needs_qnn
def test_a_context_model_that_is_too_large_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(network(1), tmp_path / "a.onnx")
    monkeypatch.setattr(readback, "PROTOBUF_LIMIT", 10_000)
    with pytest.raises(BuildError, match="an ONNX file cannot be larger than 2 GiB") as raised:
        compiled(path, target("qnn", X_ELITE, embed=True), tmp_path)
    assert raised.value.problems[0].settings == (Setting(MODEL / "embed", False),)


@needs_qnn
@pytest.mark.parametrize("embed", [False, True])
def test_an_empty_context_is_an_error(tmp_path: Path, embed: bool) -> None:
    path = save(network(1), tmp_path / "a.onnx")
    to = target("qnn", X_ELITE, embed=embed)
    reply, folder = compiled(path, to, tmp_path)
    result = folder / reply.contexts[0].model_file
    made = onnx.load(result)
    (blob,) = [each for each in made.graph.node[0].attribute if each.name == "ep_cache_context"]
    if embed:
        blob.s = b""
    else:
        (folder / blob.s.decode()).write_bytes(b"")
    onnx.save(made, result)
    with pytest.raises(BuildError, match="empty"):
        readback.read_context(Model("a", path, MODEL), path, result, to)
    with pytest.raises(InspectionError, match="is empty"):
        verify_model(result, inspect_model(result))


@needs_qnn
def test_a_context_that_needs_the_sources_external_data_is_an_error(tmp_path: Path) -> None:
    made = with_weights_left_over()
    path = save(made, tmp_path / "a.onnx")
    reply, folder = compiled(path, target("qnn", X_ELITE), tmp_path)
    result = folder / reply.contexts[0].model_file
    context = onnx.load(result)
    (kernel,) = [tensor for tensor in context.graph.initializer if tensor.name == "kernel"]
    onnx.external_data_helper.set_external_data(kernel, "a.data", offset=0, length=1600)
    kernel.ClearField("raw_data")
    onnx.save(context, result)
    spec = Model("a", path, MODEL)
    with pytest.raises(
        BuildError, match=r"left tensors in the source model's external data: .*a\.data"
    ) as raised:
        readback.read_context(spec, path, result, target("qnn", X_ELITE))
    (setting,) = raised.value.problems[0].settings
    assert str(setting) == "tool.epcontext.models[0].external-initializers = true"


@needs_qnn
def test_that_a_shape_depends_on_data_is_only_known_for_fixed_inputs(tmp_path: Path) -> None:
    path = save(half_for_the_cpu(), tmp_path / "a.onnx")
    reply, folder = compiled(path, target("qnn", X_ELITE), tmp_path)
    (context,) = reply.contexts
    assert context.coverage is not None
    assert context.coverage.uncovered[0].own
    named, unknown = half_for_the_cpu(), half_for_the_cpu()
    named.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    unknown.graph.input[0].type.tensor_type.ClearField("shape")
    for made in (named, unknown):
        open_path = save(made, tmp_path / "open.onnx")
        spec = Model("a", open_path, MODEL, static_shapes=False)
        result = folder / context.model_file
        read = readback.read_context(spec, open_path, result, target("qnn", X_ELITE))
        assert read.coverage is not None
        assert [each.own for each in read.coverage.uncovered] == [False]
