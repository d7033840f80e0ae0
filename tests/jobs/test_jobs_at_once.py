from __future__ import annotations

import pytest

from hatch_epcontext.jobs import run
from hatch_epcontext.jobs.run import jobs_at_once

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "largest", "jobs"),
    [
        (None, 0, 8),
        (64 * GIB, 0, 8),
        (4 * GIB, 0, 4),
        (4 * GIB, GIB // 4, 2),
        (10 * GIB, 2 * GIB, 1),
        (GIB // 2, 0, 1),
    ],
)
def test_jobs_at_once_fit_into_the_cores_and_the_memory(
    monkeypatch: pytest.MonkeyPatch, memory: int | None, largest: int, jobs: int
) -> None:
    monkeypatch.setattr(run, "cores", lambda: 8)
    monkeypatch.setattr(run, "free_memory", lambda: memory)
    assert jobs_at_once("auto", largest) == jobs
    assert jobs_at_once(3, largest) == 3, "a configured number is taken as it is"
