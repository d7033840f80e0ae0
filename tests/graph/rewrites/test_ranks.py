from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.ranks import (
    join_reshapes,
    reduce_rank_of_gather,
    reduce_rank_of_transpose,
)
from hatch_epcontext.graph.scope import Scope
from tests.graph.rewrites.equal import operators, reasons, rewritten
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
    both = (reduce_rank_of_transpose, join_reshapes)
    after = rewritten(permuted(sizes, perm), *both)
    # What an EP refuses again is split.
    if largest_rank(after) > 4:
        after = rewritten(after, *both)
    assert largest_rank(after) <= 4
    assert operators(after).count("Transpose") == transposes


@pytest.mark.parametrize("sizes", [[2, 3, 2, 1, 3], [1, 2, 3, 3, 2]])
def test_permutations_of_any_order(sizes: list[int]) -> None:
    for perm in itertools.islice(itertools.permutations(range(5)), 1, 120, 17):
        model = permuted(sizes, list(perm))
        # An EP that refuses one of them gets none of many dimensions.
        after = rewritten(model, reduce_rank_of_transpose, join_reshapes, refused=["Reshape"])
        assert largest_rank(after) <= 5


def test_a_chain_without_a_transpose_is_one_reshape() -> None:
    model = parsed("""(float[2, 3, 4] x) =>
        (float[2, 1, 3, 4] y) <int64[2] axes = {0, 2}, int64[1] axis = {0}> {
            a = Unsqueeze (x, axes)
            y = Squeeze (a, axis) }""")
    (node,) = rewritten(model, join_reshapes).graph.node
    assert graph.operator(node) == "Reshape"


def test_few_dimensions_stay() -> None:
    model = permuted([2, 3, 4, 5], [3, 1, 0, 2])
    for rewrite in (reduce_rank_of_transpose, join_reshapes):
        assert reasons(model, rewrite) == []


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
    after = rewritten(model, reduce_rank_of_gather, join_reshapes)
    assert largest_rank(after) <= 4
    assert operators(after).count("Gather") == 1


def test_a_gather_of_few_dimensions_stays() -> None:
    text = (
        "(float[3, 2, 2, 2] x) => (float[2, 2, 2, 2] y) <int64[2] i = {1, 0}> { y = Gather (x, i) }"
    )
    assert reasons(parsed(text), reduce_rank_of_gather) == []
