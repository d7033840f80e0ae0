from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.basics import SHAPES
from tests.graph.rewrites.equal import made, rewritten, untouched

FLOAT = TensorProto.FLOAT


def comparing(operator: str) -> onnx.ModelProto:
    nodes = [
        helper.make_node("QuickGelu", ["x"], ["g"], domain="com.microsoft"),
        helper.make_node(operator, ["g", "x"], ["c"]),
        helper.make_node("Where", ["c", "x", "g"], ["y"]),
    ]
    return made(nodes, {"x": (FLOAT, [2, 3])}, {"y": (FLOAT, [2, 3])}, opset=13)


def test_the_shape_of_a_comparison_is_written_down() -> None:
    after = rewritten(comparing("GreaterOrEqual"), SHAPES)
    (value,) = after.graph.value_info
    assert graph.facts(value).shape == (2, 3)
    assert untouched(after, SHAPES)


def test_shapes_that_onnx_runtime_infers_are_not() -> None:
    assert untouched(comparing("Greater"), SHAPES)
