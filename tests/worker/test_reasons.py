"""Reasons for uncovered nodes: from the EP's log, from types and ranks, and from what decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.worker import reasons
from hatch_epcontext.worker.reasons import ask, explained, refused_nodes
from hatch_epcontext.worker.results import NodeFacts
from tests.conftest import needs_qnn
from tests.models import interrupted, network, save, value
from tests.worker.actions.test_compile import X_ELITE, target


def explain(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    logged: Mapping[str, str],
) -> tuple[NodeFacts, ...]:
    graph = helper.make_graph(nodes, "graph", inputs, outputs)
    uncovered = [NodeFacts(node.name, node.op_type) for node in nodes]
    return explained(uncovered, logged, graph, graph, PROVIDERS["qnn"])


@pytest.mark.parametrize(
    ("dtype", "shape", "reason"),
    [
        (TensorProto.INT16, [2, 4], "the EP does not support int16"),
        (TensorProto.FLOAT, [1] * 6, "it has a tensor of rank 6, and the EP takes at most 5"),
        (TensorProto.INT32, [2, 4], "the EP refuses it with int32 [2 x 4] -> int32 [2 x 4]"),
    ],
)
def test_where_the_ep_gives_no_reason_types_and_shapes_do(
    dtype: int, shape: list[int], reason: str
) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["y"], "neg")]
    inputs, outputs = [value("x", shape, dtype)], [value("y", shape, dtype)]
    assert [each.reason for each in explain(nodes, inputs, outputs, {"neg": ""})] == [reason]
    assert [each.reason for each in explain(nodes, inputs, outputs, {"neg": "its own"})] == [
        "its own"
    ]
    assert [each.reason for each in explain(nodes, inputs, outputs, {})] == [None]


@pytest.mark.parametrize("token", [False, True])
def test_an_input_that_decides_is_named_unless_it_is_an_index(token: bool) -> None:
    nodes = [
        helper.make_node("Cast", ["length"], ["n"], "cast", to=TensorProto.INT32),
        helper.make_node("GRU", ["x", "w", "r", "", "n"], ["y"], "gru"),
    ]
    if token:
        nodes.append(helper.make_node("Gather", ["table", "length"], ["z"], "gather"))
    inputs = [
        value("x", [4, 1, 3]),
        value("length", [1], TensorProto.INT64),
        value("table", [9, 2]),
        value("w", [1, 6, 3]),
        value("r", [1, 6, 2]),
    ]
    found = explain(nodes, inputs, [value("y", None)], {"gru": "a reason"})[1]
    if token:
        assert (found.reason, found.freeze) == ("a reason", {})
    else:
        assert found.reason == "a reason; the input 'length' decides 'n'"
        assert found.freeze == {"length": None}


def test_an_input_that_the_node_reads_itself_decides_nothing_else() -> None:
    nodes = [helper.make_node("TensorScatter", ["cache", "rows", "at"], ["y"], "scatter")]
    inputs = [
        value("cache", [1, 9, 2]),
        value("rows", [1, 1, 2]),
        value("at", [1], TensorProto.INT64),
    ]
    (found,) = explain(nodes, inputs, [value("y", None)], {"scatter": "a reason"})
    assert found.reason == "a reason; it reads the input 'at'"


@needs_qnn
def test_the_ep_is_asked_without_compiling_or_printing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = save(interrupted(), tmp_path / "a.onnx")
    assert ask(path, target("qnn", X_ELITE)) == {"hardmax": "the EP does not have this operator"}
    assert "LogNodeSupport" not in "".join(capfd.readouterr())
    refused = refused_nodes(path, target("qnn", X_ELITE))
    assert [each.name for each in tmp_path.iterdir()] == ["a.onnx"]
    assert refused.text == "It refuses Hardmax (the EP does not have this operator)."


@needs_qnn
def test_an_ep_that_refuses_nothing_gives_no_reasons(tmp_path: Path) -> None:
    path = save(network(1), tmp_path / "a.onnx")
    assert refused_nodes(path, target("qnn", X_ELITE)).text == ""


def test_an_ep_that_logs_no_reasons_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reasons, "open_session", lambda *_: pytest.fail("it was asked"))
    path = save(network(1), tmp_path / "a.onnx")
    assert ask(path, target("cpu")) == {}
