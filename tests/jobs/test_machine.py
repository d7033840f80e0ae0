from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hatch_epcontext.jobs import run as machine
from hatch_epcontext.jobs.run import cores, free_memory, jobs_at_once

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
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setattr(machine, "free_memory", lambda: memory)
    assert jobs_at_once("auto", largest) == jobs
    assert jobs_at_once(3, largest) == 3, "a configured number is taken as it is"


def test_this_machine_has_cores() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much memory is free")
def test_this_machine_has_free_memory() -> None:
    free = free_memory()
    assert free is not None
    assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has control groups")
def test_the_limits_of_a_control_group_and_of_those_around_it_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, own = tmp_path / "groups", tmp_path / "cgroup"
    inside = root / "user" / "build"
    inside.mkdir(parents=True)
    own.write_text("1:cpu:/other\n0::/user/build\n", encoding="utf-8")
    for group, limit, used in ((inside, "max", 10), (root / "user", "1000", 900)):
        (group / "memory.max").write_text(f"{limit}\n", encoding="utf-8")
        (group / "memory.current").write_text(f"{used}\n", encoding="utf-8")
    monkeypatch.setattr(machine, "_GROUPS", root)
    monkeypatch.setattr(machine, "_OWN_GROUP", own)
    assert free_memory() == 100
    (root / "user" / "memory.current").write_text("2000\n", encoding="utf-8")
    assert free_memory() == 0
