"""A short part of what ``python -m benchmarks.fuzz`` does, and whether it would find a defect."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hatch_epcontext.graph import graph, reading
from tests.mutants import mutants

if sys.platform == "win32":
    pytest.skip("it forks", allow_module_level=True)

from benchmarks import fuzz

SLOW = 60.0


def defects(count: int) -> list[str]:
    found: list[str] = []
    fuzz.fuzz(count, 20, SLOW, found.append)
    return found


def test_mutated_files_are_read_or_refused() -> None:
    assert defects(250) == []


def test_a_seed_chooses_the_same_files_again() -> None:
    assert list(mutants(3, 20)) == list(mutants(3, 20))
    assert list(mutants(3, 20)) != list(mutants(4, 20))


def test_a_missing_check_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_damage", lambda model: iter(()))
    monkeypatch.setattr(graph, "_typed", lambda node, given, type_: given.no_such_field)
    assert any("traceback" in line for line in defects(100))


def test_a_crash_is_counted_and_the_rest_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def read(path: Path) -> None:
        if path.read_bytes() == b"bad":
            os._exit(11)

    monkeypatch.setattr(fuzz, "read", read)
    files = [("a", b"good"), ("b", b"bad"), ("c", b"good"), ("d", b"bad")]
    assert list(fuzz.outcomes(files, tmp_path, SLOW)) == ["accepted", "crash", "accepted", "crash"]
