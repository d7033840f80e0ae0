from __future__ import annotations

import pytest

from hatch_epcontext.graph.rewrites.basics import REVERSED
from tests.graph.rewrites.equal import operators, rewritten, untouched
from tests.graph.unrolling.models import parsed

TEXT = """
main (float[2, 4, 3] x) => (float[2, 4, 3] y)
<int64[%d] lengths = {%s}>
{ y = ReverseSequence <batch_axis = %d, time_axis = %d> (x, lengths) }
"""


@pytest.mark.parametrize(
    "given", [(2, "4, 4", 0, 1), (2, "3, 3", 0, 1), (4, "2, 2, 2, 2", 1, 0), (2, "1, 1", 0, 1)]
)
def test_lengths_that_are_the_same_for_all_are_one_order(given: tuple[object, ...]) -> None:
    assert operators(rewritten(parsed(TEXT % given), REVERSED)) == ["Gather"]


def test_different_lengths_stay() -> None:
    assert untouched(parsed(TEXT % (2, "4, 3", 0, 1)), REVERSED)
