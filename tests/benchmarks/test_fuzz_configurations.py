"""A short part of what ``python -m benchmarks.fuzz_configurations`` does, and whether it finds a defect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.fuzz_configurations import fuzz
from hatch_epcontext.config import resolve
from hatch_epcontext.errors import Problem


def defects(count: int) -> list[str]:
    lines: list[str] = []
    assert fuzz(count, 1, lines.append) > count
    return lines


def test_each_fault_is_reported_with_its_key_and_line() -> None:
    assert defects(50) == []


def test_a_missing_check_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*arguments: object) -> Iterator[Problem]:
        return iter(())

    monkeypatch.setattr(resolve, "check_target", check)
    assert any("not reported: tool.epcontext.models" in line for line in defects(50))
