from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from hatch_epcontext.graph.rewrites.branches import BRANCHES, removed, with_inputs
from tests.graph.rewrites.equal import made, operators, rewritten, untouched
from tests.models import value

FLOAT = TensorProto.FLOAT


def choosing(
    then: list[onnx.NodeProto],
    other: list[onnx.NodeProto],
    condition: list[int] | None = None,
    sizes: tuple[list[int], list[int]] = ([2, 3], [2, 3]),
) -> onnx.ModelProto:
    """``y = then(x) if sum(x) > 0 else other(x)``, with a condition of the shape ``condition``."""
    names = ("t", "e")
    branches = [
        helper.make_graph(
            nodes,
            name,
            [],
            [value(name, size)],
            [numpy_helper.from_array(np.array([[2]], np.float32), "k")],
        )
        for nodes, name, size in zip((then, other), names, sizes, strict=True)
    ]
    return made(
        [
            helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
            helper.make_node("Greater", ["sum", "zero"], ["above"]),
            helper.make_node("Reshape", ["above", "form"], ["c"]),
            helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1]),
        ],
        {"x": (FLOAT, [2, 3]), "i": (TensorProto.INT64, [2, 3])},
        {"y": (FLOAT, [2, 3])},
        {"zero": np.float32(0), "form": np.array(condition or [], np.int64)},
    )


TWICE = helper.make_node("Mul", ["x", "k"], ["t"])
NEGATIVE = helper.make_node("Neg", ["x"], ["e"])


@pytest.mark.parametrize("condition", [[], [1], [1, 1]])
def test_both_branches_are_computed(condition: list[int]) -> None:
    # Both have a value of that name.
    other = [helper.make_node("Mul", ["x", "k"], ["v"]), helper.make_node("Neg", ["v"], ["e"])]
    then = [helper.make_node("Exp", ["x"], ["v"]), helper.make_node("Sqrt", ["v"], ["t"])]
    after = rewritten(choosing(then, other, condition), BRANCHES)
    assert operators(after)[3:] == ["Exp", "Sqrt", "Mul", "Neg", "Where"]


def test_a_condition_of_more_dimensions_than_the_result_is_reshaped() -> None:
    branches = [
        helper.make_graph([helper.make_node(each, ["x"], [name])], name, [], [value(name, [])])
        for each, name in (("Exp", "t"), ("Neg", "e"))
    ]
    model = made(
        [helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])],
        {"x": (FLOAT, []), "c": (TensorProto.BOOL, [1, 1])},
        {"y": (FLOAT, [])},
    )
    assert operators(rewritten(model, BRANCHES)) == ["Exp", "Neg", "Reshape", "Where"]


@pytest.mark.parametrize(
    "other",
    [
        [
            helper.make_node("Div", ["i", "i"], ["q"]),
            helper.make_node("Cast", ["q"], ["e"], to=FLOAT),
        ],
        [
            helper.make_node("Cast", ["x"], ["j"], to=TensorProto.INT64),
            helper.make_node("GatherElements", ["x", "j"], ["e"]),
        ],
        [helper.make_node("RandomNormalLike", ["x"], ["e"])],
    ],
    ids=["division of integers", "computed indices", "chance"],
)
def test_branches_that_can_fail_stay(other: list[onnx.NodeProto]) -> None:
    assert untouched(choosing([TWICE], other), BRANCHES)


def test_branches_of_other_shapes_stay() -> None:
    first = helper.make_node("ReduceSum", ["x"], ["e"], keepdims=1)
    model = choosing([TWICE], [first], sizes=([2, 3], [1, 1]))
    model.graph.output[0].CopyFrom(value("y", [None, None]))
    assert untouched(model, BRANCHES)


def test_a_condition_is_made_an_input() -> None:
    model = choosing([TWICE], [NEGATIVE])
    after = rewritten(model, BRANCHES)
    assert removed(model, after) == ("c",)
    assert removed(model, model) == ()
    x: Any = {"x": np.ones((2, 3), np.float32), "i": np.ones((2, 3), np.int64)}
    for each in model, after:
        session = ort.InferenceSession(with_inputs(each, ["c"], {}).SerializeToString())
        assert session.run(None, {**x, "c": np.array(True)})[0].max() == 2
        assert session.run(None, {**x, "c": np.array(False)})[0].max() == -1
