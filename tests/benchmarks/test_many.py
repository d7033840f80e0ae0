from __future__ import annotations

import pytest

from benchmarks.many import line


def test_the_line_through_exact_points_has_their_constants() -> None:
    found = line({count: 0.5 + 0.02 * count for count in (1, 10, 100)})
    assert found == pytest.approx((0.5, 0.02))
