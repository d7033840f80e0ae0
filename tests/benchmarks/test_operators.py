from __future__ import annotations

from typing import Any

from benchmarks.operators import Result, _read, rows, show

COMPUTED = "X compiled no node. None of them depends on an input: ONNX Runtime computes them all."


def failure(name: str, kind: str, message: str) -> Any:
    return {"models": [name], "problems": [{"kind": kind, "message": message}]}


REPORT = {
    "jobs": [
        {"models": [{"model": "one", "preparation": {"rewrites": ["a_rule", "other", "a_rule"]}}]}
    ],
    "failures": [
        failure("two", "EPC301", "X refuses Op y (the EP does not have 'y' (at all))."),
        failure("three", "EPC302", "X compiled 1 of 2 nodes (50.0%). Left: Op (it has no Op)."),
        failure("four", "EPC301", COMPUTED),
        failure("five", "EPC401", "the output differs."),
    ],
}


def test_a_table_counts_how_the_tests_of_an_operator_end_and_why() -> None:
    names = dict.fromkeys(("one", "two", "three", "four", "five"), "Op")
    results = _read(REPORT, names)
    ends = {name: result.end for name, result in results.items()}
    right = ("right", "refused", "partial", "folds", "wrong")
    assert ends == dict(zip(names, right, strict=True))
    table = rows({**results, "six": Result("several", "right")})
    assert [*table] == ["Op", "several"]
    row = table["Op"]
    assert (row.tests, dict(row.rewrites)) == (5, {"a_rule": 1, "other": 1})
    assert "it has no Op" in row.reasons
    assert [line.split()[:3] for line in show(table)][1] == ["all", "6", "2"]
