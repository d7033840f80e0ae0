"""Nodes that onnx itself computes."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from hatch_epcontext.graph.evaluating import evaluate


def test_a_node_is_computed_as_its_opset_defines_it() -> None:
    node = helper.make_node("Split", ["x", "sizes"], ["a", "b"], axis=1)
    values = {"x": np.arange(6).reshape(2, 3), "sizes": np.array([1, 2])}
    first, second = evaluate(node, values, 13)
    assert (first.tolist(), second.tolist()) == ([[0], [3]], [[1, 2], [4, 5]])


def test_operands_may_be_missing_or_the_same() -> None:
    node = helper.make_node("Clip", ["x", "", "x"], ["y"])
    (result,) = evaluate(node, {"x": np.array(3, np.float32)}, 13)
    assert result == 3


@pytest.mark.parametrize(
    ("operator", "domain", "operand"),
    [("Gelu", "com.microsoft", 1.0), ("Reshape", "", 1.0), ("Nothing", "", 1.0)],
)
def test_what_onnx_does_not_compute_is_a_value_error(
    operator: str, domain: str, operand: float
) -> None:
    node = helper.make_node(operator, ["x"], ["y"], domain=domain)
    with pytest.raises(ValueError, match=f"onnx does not compute {operator}"):
        evaluate(node, {"x": np.array(operand, np.float32)}, 17)
