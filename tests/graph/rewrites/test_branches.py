from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from hatch_epcontext.graph.rewrites.branches import if_as_where
from tests.graph.rewrites.equal import operators, reasons, rewritten
from tests.models import parsed


def choosing(then: str, other: str, shape: str = "int64[0] shape = {}") -> onnx.ModelProto:
    """``t`` of the nodes ``then`` if the sum of ``x`` is positive, and otherwise ``e`` of ``other``.

    ``shape``: the shape of the condition.
    """
    return parsed(
        f"""(float[2, 3] x, int64[2, 3] i) => (float[2, 3] y) <float zero = {{0}}, {shape}> {{
            sum = ReduceSum <keepdims = 0> (x)
            above = Greater (sum, zero)
            c = Reshape (above, shape)
            y = If (c) <
                then_branch = then_ () => (float[2, 3] t) <float[1, 1] k = {{2}}> {{ {then} }},
                else_branch = else_ () => (float[2, 3] e) <float[1, 1] k = {{2}}> {{ {other} }}> }}"""
    )


TWICE, NEGATIVE = "t = Mul (x, k)", "e = Neg (x)"


@pytest.mark.parametrize(
    "shape", ["int64[0] shape = {}", "int64[1] shape = {1}", "int64[2] shape = {1, 1}"]
)
def test_both_branches_are_computed(shape: str) -> None:
    # Both have a value of that name.
    model = choosing("v = Exp (x) t = Sqrt (v)", "v = Mul (x, k) e = Neg (v)", shape)
    assert operators(rewritten(model, if_as_where))[3:] == ["Exp", "Sqrt", "Mul", "Neg", "Where"]


def test_a_condition_of_more_dimensions_than_the_result_is_reshaped() -> None:
    model = parsed("""(float x, bool[1, 1] c) => (float y) {
        y = If (c) <then_branch = then_ () => (float t) { t = Exp (x) },
                    else_branch = else_ () => (float e) { e = Neg (x) }> }""")
    assert operators(rewritten(model, if_as_where)) == ["Exp", "Neg", "Reshape", "Where"]


@pytest.mark.parametrize(
    ("other", "operator"),
    [
        ("q = Div (i, i) e = Cast <to = 1> (q)", "Div"),
        ("j = Cast <to = 7> (x) e = GatherElements (x, j)", "GatherElements"),
        ("e = RandomNormalLike (x)", "RandomNormalLike"),
    ],
    ids=["division of integers", "computed indices", "chance"],
)
def test_branches_that_can_fail_stay(other: str, operator: str) -> None:
    (reason,) = reasons(choosing(TWICE, other), if_as_where)
    assert reason.startswith(f"in a branch, {operator} ")


def test_branches_of_other_shapes_stay() -> None:
    model = choosing(TWICE, "e = ReduceSum <keepdims = 1> (x)")
    (other,) = (a.g for a in model.graph.node[-1].attribute if a.name == "else_branch")
    for dim in (*other.output[0].type.tensor_type.shape.dim,):
        dim.dim_value = 1
    for dim in model.graph.output[0].type.tensor_type.shape.dim:
        dim.ClearField("dim_value")
    (reason,) = reasons(model, if_as_where)
    assert reason == "its branches have results of different types, or of open shapes"


def test_each_branch_is_selected() -> None:
    after = rewritten(choosing(TWICE, NEGATIVE), if_as_where)
    session = ort.InferenceSession(after.SerializeToString())
    for x, expected in ((1, 2), (-1, 1)):
        feeds = {"x": np.full((2, 3), x, np.float32), "i": np.ones((2, 3), np.int64)}
        assert (session.run(None, feeds)[0] == expected).all()
