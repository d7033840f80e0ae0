from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from benchmarks import sweep
from benchmarks.sweep import LARGEST, Case, Result, changes, judge

X = np.array([[-1, 0, 2, LARGEST]], np.float32)


def judged(got: list[float], exact: list[float], step: float = 0.0) -> Result:
    case = Case("y = Identity(x)", X, step=step)
    return judge(case, np.array([got], np.float32), np.array([exact], np.float32))


def test_results_within_a_few_units_of_float16_are_right() -> None:
    assert judged([-1, 0, 2.005, LARGEST], [-1, 0, 2, LARGEST]).status == "right"
    assert judged([-1, 0, 2.02, LARGEST], [-1, 0, 2, LARGEST]).wrong == 1
    assert judged([-1, 0, 2.02, LARGEST], [-1, 0, 2, LARGEST], step=0.03).status == "right"


def test_saturated_results_are_right_at_any_limit_and_wrong_below_it() -> None:
    exact = [-np.inf, 0, 1e9, 1e5]
    found = judged([-LARGEST, 0, 131008, 131008], exact)
    assert (found.status, found.largest) == ("right", 131008)
    found = judged([LARGEST, 0, 131008, 7], exact)
    assert (found.wrong, found.low, found.high, found.nearest) == (2, -1, LARGEST, 1)


def test_nan_is_wrong_where_the_result_is_defined_and_right_where_it_is_not() -> None:
    assert judged([np.nan, 0, 2, 3], [1, 0, 2, 3]).wrong == 1
    assert judged([5, 0, 2, 3], [np.nan, 0, 2, 3]).status == "right"


def test_cases_have_different_names_and_inputs_that_are_values_of_float16() -> None:
    cases = sweep.cases()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.model()
        is_float = case.x.dtype.kind == "f"
        assert not is_float or (case.x.astype(np.float16) == case.x).all(), case.name


def test_the_cpu_computes_nothing_wrong() -> None:
    words = ("Pow(x, 2)", "Softplus", "Pad<", "CumSum", "Cast<to=6>", 'nearest_mode="floor"')
    cases = [case for case in sweep.cases() if any(word in case.name for word in words)]
    results = [result for _, result in sweep.sweep("cpu", cases)]
    assert len(results) > len(words)
    assert {each.status for each in results} == {"right"}


class Fatal(Case):
    """A case that ends the process that runs it."""

    def model(self) -> bytes:
        os._exit(11)


def test_a_crash_is_a_result_and_the_next_case_runs() -> None:
    cases = [Fatal("y = Abs(x)", X), Case("y = Neg(x)", X), Fatal("y = Sqrt(x)", X)]
    statuses = [result.status for _, result in sweep.sweep("cpu", cases)]
    assert statuses == ["crashed", "right", "crashed"]


def test_changes_name_new_other_and_removed_results() -> None:
    wrong = Result("wrong", 9, 1, examples=[[1, 2, 3]])
    before = {"a": Result(), "b": wrong, "c": Result()}
    after = {"a": Result(), "b": Result(), "d": wrong}
    found = list(changes(before, after))
    assert [line.partition(":")[0] for line in found] == ["b", "d", "c"]


def test_a_written_table_is_read_again(tmp_path: Path) -> None:
    results = {"a": Result(values=4, largest=2), "b": Result("wrong", 9, 1, examples=[[1, 2, 3]])}
    (tmp_path / "table.json").write_text(sweep.text("cpu", results), encoding="utf-8")
    assert sweep.read(tmp_path / "table.json") == results
    assert "onnxruntime " in json.loads(sweep.text("cpu", results))["seen"]
