from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.together import builds_at_once, threads_at_once

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_builds_at_once_get_the_same_models_while_the_cache_is_cleared(tmp_path: Path) -> None:
    made = builds_at_once(2, ("prune", "--all"), "all", tmp_path)
    assert not made.wrong
    assert made.compiled >= 3


def test_threads_get_one_answer(tmp_path: Path) -> None:
    _, answers = threads_at_once(4, tmp_path)
    assert answers == 1
