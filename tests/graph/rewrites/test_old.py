from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.old import NEWER
from tests.graph.rewrites.equal import made, operators, rewritten, untouched

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def single(
    op: str, shape: list[int], outputs: dict[str, Any], opset: int, **attributes: Any
) -> onnx.ModelProto:
    node = helper.make_node(op, ["x"], [*outputs], **attributes)
    return made([node], {"x": (FLOAT, shape)}, outputs, opset=opset)


@pytest.mark.parametrize("opset", [7, 9])
def test_an_old_top_k_has_its_count_as_an_input(opset: int) -> None:
    outputs = {"y": (FLOAT, [3, 2]), "i": (INT64, [3, 2])}
    after = rewritten(single("TopK", [3, 5], outputs, opset, k=2), NEWER)
    assert graph.opset(after) == 11
    assert [len(node.input) for node in after.graph.node if node.op_type == "TopK"] == [2]


def test_an_old_scatter_has_another_name() -> None:
    node = helper.make_node("Scatter", ["x", "i", "u"], ["y"], axis=1)
    stored = {"i": np.array([[1, 3]]), "u": np.array([[7.0, 8.0]], np.float32)}
    model = made([node], {"x": (FLOAT, [1, 5])}, {"y": (FLOAT, [1, 5])}, stored, opset=9)
    assert operators(rewritten(model, NEWER)) == ["ScatterElements"]


def test_what_is_new_or_is_not_understood_stays() -> None:
    node = helper.make_node("TopK", ["x", "k"], ["y", "i"])
    outputs = {"y": (FLOAT, [3, 2]), "i": (INT64, [3, 2])}
    assert untouched(
        made([node], {"x": (FLOAT, [3, 5])}, outputs, {"k": np.array([2])}, opset=11), NEWER
    )
    nodes = [
        helper.make_node("Affine", ["x"], ["a"], alpha=2.0, beta=1.0),
        helper.make_node("TopK", ["a"], ["y", "i"], k=2),
    ]
    removed = made(nodes, {"x": (FLOAT, [3, 5])}, outputs, opset=9)
    assert untouched(removed, NEWER, ["TopK"])


def test_operators_of_other_domains_stay_in_a_newer_opset() -> None:
    nodes = [
        helper.make_node("FastGelu", ["x"], ["g"], domain="com.microsoft"),
        helper.make_node("TopK", ["g"], ["y", "i"], k=2),
    ]
    outputs = {"y": (FLOAT, [3, 2]), "i": (INT64, [3, 2])}
    after = rewritten(made(nodes, {"x": (FLOAT, [3, 5])}, outputs, opset=9), NEWER)
    assert "com.microsoft.FastGelu" in operators(after)
