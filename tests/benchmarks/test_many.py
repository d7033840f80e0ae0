from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import many
from benchmarks.many import line, measure


def test_the_line_through_exact_points_has_their_constants() -> None:
    found = line({count: 0.5 + 0.02 * count for count in (1, 10, 100)})
    assert found == pytest.approx((0.5, 0.02))


@pytest.mark.integration
@pytest.mark.slow
def test_trivial_models_are_built_cold_and_warm_and_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only what is measured needs settled files.
    monkeypatch.setattr(many, "SETTLE", 0)
    costs = measure("cpu", 2, 1, tmp_path)
    assert {name: len(each) for name, each in costs.items()} == {
        "cold": 1,
        "by hand": 1,
        "warm": 1,
        "packing": 1,
    }
