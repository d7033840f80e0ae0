from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.ranks import FEW_DIMENSIONS
from hatch_epcontext.graph.scope import Scope
from tests.graph.rewrites.equal import operators, rewritten, untouched
from tests.models import parsed

FLOAT = TensorProto.FLOAT


def permuted(sizes: list[int], perm: list[int]) -> onnx.ModelProto:
    """Values that are reshaped, transposed, and reshaped again."""
    count = math.prod(sizes)
    return parsed(
        f"""(float[{count}] x) => (float[1, {count}] y) {{
            a = Reshape (x, many)
            b = Transpose <perm = {perm}> (a)
            y = Reshape (b, few) }}""",
        many=np.array(sizes),
        few=np.array([1, count]),
    )


def largest_rank(model: onnx.ModelProto) -> int:
    scope = Scope.of(model)
    return max(len(scope.shape(name) or ()) for node in model.graph.node for name in node.output)


@pytest.mark.parametrize(
    ("sizes", "perm", "transposes"),
    [
        # Windows of 7 x 7, and a pixel shuffle.
        ([1, 4, 7, 4, 7, 8], [0, 1, 3, 2, 4, 5], 1),
        ([2, 4, 7, 4, 7, 8], [0, 1, 3, 2, 4, 5], 1),
        ([1, 3, 2, 2, 4, 5], [0, 1, 4, 2, 5, 3], 2),
        ([2, 3, 2, 3, 2, 3], [5, 4, 2, 0, 3, 1], 4),
        ([1, 1, 6, 1, 1], [4, 3, 2, 1, 0], 0),
        ([2, 3, 2, 3, 2], [0, 1, 2, 3, 4], 0),
    ],
)
def test_many_dimensions_become_few(sizes: list[int], perm: list[int], transposes: int) -> None:
    after = rewritten(permuted(sizes, perm), FEW_DIMENSIONS)
    # What an EP refuses again is split.
    if largest_rank(after) > 4:
        after = rewritten(after, FEW_DIMENSIONS)
    assert largest_rank(after) <= 4
    assert operators(after).count("Transpose") == transposes


@pytest.mark.parametrize("sizes", [[2, 3, 2, 1, 3], [1, 2, 3, 3, 2]])
def test_permutations_of_any_order(sizes: list[int]) -> None:
    for perm in itertools.islice(itertools.permutations(range(5)), 1, 120, 17):
        after = rewritten(permuted(sizes, list(perm)), FEW_DIMENSIONS)
        assert largest_rank(after) <= 5


def test_a_chain_without_a_transpose_is_one_reshape() -> None:
    model = parsed("""(float[2, 3, 4] x) =>
        (float[2, 1, 3, 4] y) <int64[2] axes = {0, 2}, int64[1] axis = {0}> {
            a = Unsqueeze (x, axes)
            y = Squeeze (a, axis) }""")
    assert untouched(model, FEW_DIMENSIONS) is False
    (node,) = rewritten(model, FEW_DIMENSIONS).graph.node
    assert graph.operator(node) == "Reshape"


def test_few_dimensions_stay() -> None:
    assert untouched(permuted([2, 3, 4, 5], [3, 1, 0, 2]), FEW_DIMENSIONS)


@pytest.mark.parametrize(
    ("sizes", "axis", "indices"),
    [
        ([1, 2, 3, 2, 4, 5], 2, [0, -1]),
        ([2, 3, 2, 4, 5], 4, 1),
        ([3, 4, 5], 1, [[[0, 1], [1, 2]]]),
    ],
)
def test_a_gather_of_many_dimensions_is_one_of_three(
    sizes: list[int], axis: int, indices: Any
) -> None:
    count = math.prod(np.take(np.zeros(sizes), indices, axis).shape)
    model = parsed(
        f"""(float[{math.prod(sizes)}] x) => (float[1, {count}] y) {{
            a = Reshape (x, many)
            b = Gather <axis = {axis}> (a, i)
            y = Reshape (b, few) }}""",
        many=np.array(sizes),
        few=np.array([1, count]),
        i=np.array(indices),
    )
    after = rewritten(model, FEW_DIMENSIONS)
    assert largest_rank(after) <= 4
    assert operators(after).count("Gather") == 1


def test_a_gather_of_few_dimensions_stays() -> None:
    text = (
        "(float[3, 2, 2, 2] x) => (float[2, 2, 2, 2] y) <int64[2] i = {1, 0}> { y = Gather (x, i) }"
    )
    assert untouched(parsed(text), FEW_DIMENSIONS)


SIX = [1, 2, 3, 2, 4, 2]


@pytest.mark.parametrize(
    ("nodes", "shape", "result"),
    [
        ("y = Mul (a, z)", SIX, SIX),
        ("c = Greater (z, a) y = Where (c, z, a)", SIX, SIX),
        ("y = Expand (a, wide)", [1, 2, 3, 1, 4, 1], SIX),
        ("y = Tile (a, times)", [1, 2, 3, 1, 4, 1], [2, 2, 3, 2, 4, 2]),
        ("y = ReduceMean <axes = [3, 5], keepdims = 0> (a)", SIX, [1, 2, 3, 4]),
        ("y = ReduceSum (a, axes)", SIX, [1, 2, 3, 1, 4, 1]),
        ("y = Concat <axis = -1> (a, a)", [1, 2, 3, 4, 2, 1], [1, 2, 3, 4, 2, 2]),
    ],
)
def test_operators_with_six_dimensions_have_fewer(
    nodes: str, shape: list[int], result: list[int]
) -> None:
    before, after = math.prod(shape), math.prod(result)
    model = parsed(f"""(float[{before}] x, float[3, 1, 1, 2] z) => (float[{after}] y)
    <int64[6] many = {{{", ".join(map(str, shape))}}}, int64[6] wide = {{1, 2, 3, 2, 4, 2}},
    int64[6] times = {{2, 1, 1, 2, 1, 2}}, int64[2] axes = {{3, -1}}, int64[1] flat = {{-1}}>
    {{ a = Reshape (x, many) {nodes.replace("y =", "b =")} y = Reshape (b, flat) }}""")
    assert largest_rank(rewritten(model, FEW_DIMENSIONS)) <= 4
