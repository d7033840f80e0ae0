"""What a real EP wrote is read back, and not taken on trust."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx
import pytest
from onnx import helper

from hatch_epcontext.errors import BuildError
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.worker import readback
from tests.conftest import needs_qnn
from tests.models import interrupted, network, save, with_weights_left_over
from tests.worker.test_compile import X_ELITE, compiled, target


def context_node(**attributes: str | int) -> onnx.NodeProto:
    node = helper.make_node("EPContext", ["x"], ["y"], "n", domain="com.microsoft")
    for name, given in attributes.items():
        node.attribute.append(helper.make_attribute(name, given))
    return node


@pytest.mark.parametrize(
    ("nodes", "what"),
    [
        ([], "without a single EPContext node"),
        ([context_node(source="OtherEP")], "was made by 'OtherEP', not by QNN"),
        ([context_node(source="QNNExecutionProvider", embed_mode=0, ep_cache_context="no.bin")],
         "names 'no.bin', which is not there"),
        ([context_node(source="QNNExecutionProvider", embed_mode=0, ep_cache_context="../x.bin")],
         "names a file elsewhere: '../x.bin'"),
    ],
)  # fmt: skip
def test_what_an_ep_wrote_is_not_taken_on_trust(
    tmp_path: Path, nodes: list[onnx.NodeProto], what: str
) -> None:
    found = readback._wrong_contexts(nodes, tmp_path / "a_ctx.onnx", PROVIDERS["qnn"])
    assert what in next(found).what


def test_embedded_and_secondary_contexts_name_no_file(tmp_path: Path) -> None:
    nodes = [
        context_node(source="QNNExecutionProvider", ep_cache_context="blob"),
        context_node(source="QNNExecutionProvider", embed_mode=0, main_context=0),
    ]
    found = readback._wrong_contexts(nodes, tmp_path / "a_ctx.onnx", PROVIDERS["qnn"])
    assert not list(found)


@needs_qnn
def test_an_ep_that_loads_one_embedded_context_is_not_given_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(interrupted(), tmp_path / "a.onnx")
    compiled(path, target("qnn", X_ELITE, embed=True), tmp_path / "fine")
    one = dataclasses.replace(PROVIDERS["qnn"], embeds_one=True)
    monkeypatch.setattr(readback, "provider_of", lambda _: one)
    with pytest.raises(BuildError, match="became 2 contexts, and QNNExecutionProvider loads only"):
        compiled(path, target("qnn", X_ELITE, embed=True), tmp_path / "refused")


@needs_qnn
def test_what_came_out_too_large_to_embed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(network(1), tmp_path / "a.onnx")
    monkeypatch.setattr(readback, "PROTOBUF_LIMIT", 10_000)
    with pytest.raises(BuildError, match="no ONNX file can be larger than 2 GiB") as raised:
        compiled(path, target("qnn", X_ELITE, embed=True), tmp_path)
    assert raised.value.problems[0].fix == "Leave embed out."


@needs_qnn
def test_a_context_that_still_needs_the_sources_data_is_refused(tmp_path: Path) -> None:
    made = with_weights_left_over()
    path = save(made, tmp_path / "a.onnx")
    reply, folder = compiled(path, target("qnn", X_ELITE), tmp_path)
    result = folder / reply.contexts[0].model_file
    context = onnx.load(result)
    (left,) = [tensor for tensor in context.graph.initializer if tensor.name == "kernel"]
    onnx.external_data_helper.set_external_data(left, "a.data", offset=0, length=1600)
    left.ClearField("raw_data")
    onnx.save(context, result)
    with pytest.raises(
        BuildError, match=r"left tensors where the source model has them: .*a\.data"
    ):
        readback.read_context("a", path, result, target("qnn", X_ELITE))
