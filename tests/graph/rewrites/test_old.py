from __future__ import annotations

import pytest

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.old import NEWER
from tests.graph.rewrites.equal import operators, rewritten, untouched
from tests.models import parsed

LARGEST = "(float[3, 5] x) => (float[3, 2] y, int64[3, 2] i)"
OLD = f"{LARGEST} {{ y, i = TopK <k = 2> (x) }}"


@pytest.mark.parametrize("opset", [7, 9])
def test_an_old_top_k_has_its_count_as_an_input(opset: int) -> None:
    after = rewritten(parsed(OLD, opset), NEWER)
    assert graph.opset(after) == 11
    assert [len(node.input) for node in after.graph.node if node.op_type == "TopK"] == [2]


def test_an_old_scatter_has_another_name() -> None:
    model = parsed(
        """(float[1, 5] x) => (float[1, 5] y) <int64[1, 2] i = {1, 3}, float[1, 2] u = {7, 8}>
        { y = Scatter <axis = 1> (x, i, u) }""",
        9,
    )
    assert operators(rewritten(model, NEWER)) == ["ScatterElements"]


def test_what_is_new_or_is_not_understood_stays() -> None:
    assert untouched(parsed(f"{LARGEST} <int64[1] k = {{2}}> {{ y, i = TopK (x, k) }}", 11), NEWER)
    removed = f"{LARGEST} {{ a = Affine <alpha = 2.0, beta = 1.0> (x) y, i = TopK <k = 2> (a) }}"
    assert untouched(parsed(removed, 9, check=False), NEWER, ["TopK"])


def test_operators_of_other_domains_stay_in_a_newer_opset() -> None:
    text = f"{LARGEST} {{ g = com.microsoft.FastGelu (x) y, i = TopK <k = 2> (g) }}"
    assert "com.microsoft.FastGelu" in operators(rewritten(parsed(text, 9), NEWER))
