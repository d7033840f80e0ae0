from __future__ import annotations

import pytest

from hatch_epcontext.graph.graph import sizes
from hatch_epcontext.graph.inference import inferred
from hatch_epcontext.graph.rewrites import REWRITES
from tests.graph.rewrites.equal import operators, reasons, rewritten
from tests.models import parsed

RANKS = [
    rewrite for rewrite in REWRITES if "rank" in rewrite.name or rewrite.name == "join_reshapes"
]
BY_NAME = {rewrite.name: rewrite for rewrite in RANKS}

BLOCKS = "(float[2, 4, 9] x) => (float[{result}] y) <int64[6] wide = {{2, 2, 2, 3, 3, 1}}, {more}>"
SPLIT = "a = Reshape (x, wide)"

NODES = {
    "Transpose": ("reduce_rank_of_transpose", "b = Transpose <perm = [0, 3, 1, 4, 2, 5]> (a)"),
    "Gather": ("reduce_rank_of_gather", "b = Gather <axis = 2> (a, i)"),
    "Tanh": ("reduce_rank", "b = Tanh (a)"),
    "Mul": ("reduce_rank", "b = Mul (a, row)"),
    "Softmax": ("reduce_rank", "b = Softmax <axis = 3> (a)"),
    "ReduceSum": ("reduce_rank_of_reduction", "b = ReduceSum <keepdims = 0> (a, axes)"),
    "ReduceMean": ("reduce_rank_of_reduction", "b = ReduceMean <keepdims = 0> (a)"),
    "ReduceMax": ("reduce_rank_of_reduction", "b = ReduceMax <axes = [0, 2, 3]> (a)"),
    "Tile": ("reduce_rank_of_tile", "b = Tile (a, wide)"),
    "MatMul": ("reduce_rank", "t = Transpose <perm = [0, 1, 2, 3, 5, 4]> (a) b = MatMul (a, t)"),
    "CumSum": ("reduce_rank", "k = Constant <value_int = 3> () b = CumSum (a, k)"),
    "TopK": ("reduce_rank", "k = Constant <value_ints = [2]> () b, n = TopK <axis = 3> (a, k)"),
    "ThresholdedRelu": ("reduce_rank", "b = ThresholdedRelu (a)"),
    "Slice": ("reduce_rank", "b = Slice (a, i, ends, axes)"),
    "Concat": ("reduce_rank", "b = Concat <axis = 1> (a, a)"),
}


@pytest.mark.parametrize("operator", NODES)
def test_what_has_six_dimensions_has_few_between_reshapes(operator: str) -> None:
    name, node = NODES[operator]
    sizes_ = {"ReduceSum": 18, "Concat": 144, "ReduceMean": 1, "Slice": 36, "ReduceMax": 6}
    size = (sizes_ | {"Tile": 72**2, "MatMul": 216, "TopK": 48}).get(operator, 72)
    model = parsed(
        f"""(float[2, 4, 9] x) => (float[{size}] y) <int64[6] wide = {{2, 2, 2, 3, 3, 1}},
        int64[1] flat = {{-1}}, int64[2] i = {{1, 0}}, int64[2] axes = {{1, 2}}, int64[2] ends = {{2, 9}},
        float[3, 1] row = {{1, 2, 3}}>
        {{ {SPLIT} {node} y = Reshape (b, flat) }}"""
    )
    allowed = [*{"Reshape", operator}]
    after = rewritten(model, BY_NAME[name], BY_NAME["join_reshapes"], allowed=allowed)
    values = inferred(after).value_info
    assert (
        max(
            len(sizes(value.type) or ())
            for value in values
            if value.name not in ("a", "b", "n", "t")
        )
        < 6
    )
    assert operator in operators(after)


def test_indices_of_a_part_of_other_axes_keep_their_dimensions() -> None:
    model = parsed(
        """(float[2, 3, 2, 3, 4] x) => (float[2, 2, 2, 2, 2] y)
        <int64[5] n = {2, 2, 2, 2, 2}> { w = ConstantOfShape (n) y = GatherElements <axis = 1> (x, w) }"""
    )
    assert reasons(model, BY_NAME["reduce_rank"]) == ["its axes are not fixed"]
