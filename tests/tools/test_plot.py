"""The chart, read as text."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
import pytest

from hatch_epcontext.tools.measuring import Bench, Case, Compiled, Measured, Series
from hatch_epcontext.tools.plot import draw


def measured(case: Case, *seconds: float) -> Measured:
    if not seconds:
        return Measured(case, error="it crashed")
    return Measured(case, Series(seconds), Series(seconds), None)


def bench(*each: Measured) -> Bench:
    compiled = tuple(Compiled(model, False, 1.0, 10) for model in {e.case.model for e in each})
    return Bench("g", "s", "qnn", {"onnxruntime": "1.31.1"}, 3, compiled, each)


def texts(made: Bench, path: Path) -> list[str]:
    with mpl.rc_context({"svg.fonttype": "none"}):
        draw(made, path)
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))


def test_each_case_has_a_bar_with_its_median(tmp_path: Path) -> None:
    found = texts(
        bench(
            measured(Case("a", "source", None, False), 1.0, 1.25, 9.0),
            measured(Case("a", "artifact", False, False), 0.1, 0.2, 0.3),
            measured(Case("a", "artifact", True, True), 0.4, 0.4, 0.4),
            measured(Case("b", "source", None, False), 2.0, 2.0, 2.0),
            measured(Case("b", "cache", False, False), 0.05, 0.05, 0.05),
        ),
        tmp_path / "c.svg",
    )
    assert {"1.250 s", "0.200 s", "0.400 s", "2.000 s", "0.050 s"} <= set(found)
    assert {"a", "b", "from disk", "from memory"} <= set(found)
    assert {
        "source model on the EP",
        "context, blob beside",
        "context, blob inside",
        "context + runtime cache, blob beside",
    } <= set(found)
    assert "optimized graph" not in found
    assert "qnn: onnxruntime 1.31.1; median of 3 runs" in found


def test_a_failed_case_has_no_bar(tmp_path: Path) -> None:
    found = texts(
        bench(
            measured(Case("a", "source", None, False), 1.0),
            measured(Case("a", "artifact", False, False)),
        ),
        tmp_path / "c.svg",
    )
    assert "1.000 s" in found
    assert "context, blob beside" not in found


@pytest.mark.parametrize("suffix", [".png", ".pdf"])
def test_a_chart_without_measurements_is_written(tmp_path: Path, suffix: str) -> None:
    draw(bench(), tmp_path / f"c{suffix}")
    assert (tmp_path / f"c{suffix}").stat().st_size > 1000
