"""Reports of boards in a build: which count, which do not, and which end it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.errors import ConfigError
from hatch_epcontext.files import FileRecord
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.boards import BoardEntry, BoardReport, BoardRun, describe_run
from hatch_epcontext.jobs.hardware import read_reports, with_boards
from hatch_epcontext.jobs.report import make_report
from hatch_epcontext.jobs.report_file import render_page
from hatch_epcontext.serialize import to_json
from tests.results import compiled, configured

TOML = """
models = ["models/a.onnx"]
targets.npu.provider = "qnn"
targets.cpu.provider = "cpu"
validated-on = "reports"
"""

RUN = BoardRun(
    "agrees", "Snapdragon X Elite", "1.2", "Windows-11", {"onnxruntime": "1.32.0"}, latency=0.0021
)

Edit = Callable[[BoardEntry], BoardEntry]


@pytest.fixture
def result(project: Path, tmp_path: Path) -> Result:
    return compiled(configured(project, TOML.replace("validated-on", "# ")), tmp_path / "compiled")


def entry(result: Result, target: str = "npu", run: BoardRun | None = RUN) -> BoardEntry:
    """What a board says of the model ``a`` for ``target``, in the files of ``result``."""
    built = next(built for built in result.built if built.job.target.name == target)
    files, (source,) = built.record.files, result.sources
    return BoardEntry("a", target, built.job.target.provider.ep, source.identity, files, run)


def write(project: Path, name: str, *entries: BoardEntry) -> Path:
    path = project / "reports" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(to_json(BoardReport(1, "hatch-epcontext 0.1.0", "a.whl", entries)), "utf-8")
    return path


def taken(project: Path, result: Result) -> tuple[Result, list[str], list[str]]:
    """``result`` with the reports of the project; the lines and the warnings."""
    lines, warnings = list[str](), list[str]()
    reports = read_reports(configured(project, TOML))
    return with_boards(result, reports, lines.append, warnings.append), lines, warnings


def test_a_report_of_the_same_files_counts(project: Path, result: Result) -> None:
    write(project, "x-elite.json", entry(result), entry(result, "cpu", None))
    with_runs, lines, warnings = taken(project, result)
    assert with_runs.boards == {("a", "npu"): (RUN,)}
    says = "agrees on Snapdragon X Elite (driver 1.2), 2.1 ms"
    assert lines == [f"a -> npu: {says} (reports/x-elite.json)"]
    assert warnings == []
    assert says in render_page(make_report(with_runs), "my-app")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda e: replace(e, source_sha256="0" * 64), "it is about another source, or other sizes"),
        (
            lambda e: replace(e, files=e.files | {"sidecar.bin": FileRecord(1, "0" * 64)}),
            "it is about another file sidecar.bin",
        ),
        (lambda e: replace(e, files={}), "it is about another file a_ctx.onnx"),
        (lambda e: replace(e, target="other"), "this build compiles no such target"),
        (lambda e: replace(e, model="other"), "this build compiles no such target"),
        (
            lambda e: replace(e, run=replace(RUN, verdict="not-compared")),
            "it was not compared there",
        ),
    ],
)  # fmt: skip
def test_a_report_of_something_else_does_not_count(
    project: Path, result: Result, edit: Edit, reason: str
) -> None:
    changed = edit(entry(result))
    write(project, "r.json", changed)
    with_runs, (line,), _ = taken(project, result)
    assert with_runs.boards == {}
    where = f"{changed.model} -> {changed.target}"
    assert line == f"{where}: reports/r.json does not count: {reason}"


def test_of_one_chip_with_the_same_versions_the_first_report_counts(
    project: Path, result: Result
) -> None:
    slower, other = replace(RUN, latency=0.5), replace(RUN, driver="1.3")
    for name, run in (("b.json", slower), ("a.json", RUN), ("c.json", other)):
        write(project, name, entry(result, run=run))
    with_runs, lines, _ = taken(project, result)
    assert with_runs.boards == {("a", "npu"): (RUN, other)}
    assert "reports/b.json does not count: another report is of the same chip" in lines[1]


def test_what_differs_on_a_board_is_a_warning(project: Path, result: Result) -> None:
    write(project, "r.json", entry(result, run=replace(RUN, verdict="differs", latency=None)))
    with_runs, lines, warnings = taken(project, result)
    assert (lines, warnings) == (
        [],
        ["a -> npu: differs on Snapdragon X Elite (driver 1.2) (reports/r.json)"],
    )
    assert len(with_runs.boards) == 1


@pytest.mark.parametrize(("driver", "conflicts"), [("1.2", True), ("1.3", False)])
def test_opposite_verdicts_of_the_same_board_are_an_error(
    project: Path, result: Result, driver: str, conflicts: bool
) -> None:
    write(project, "a.json", entry(result))
    write(project, "b.json", entry(result, run=replace(RUN, verdict="differs", driver=driver)))
    if not conflicts:
        assert len(taken(project, result)[0].boards["a", "npu"]) == 2
        return
    with pytest.raises(ConfigError) as raised:
        taken(project, result)
    (problem,) = raised.value.problems
    assert (problem.kind.id, problem.location) == ("EPC407", "reports/b.json")
    assert "reports/a.json says the opposite" in problem.message


def garbled(**changes: Any) -> Callable[[dict[str, Any]], str]:
    return lambda content: json.dumps(content | changes)


def with_run(**changes: Any) -> Callable[[dict[str, Any]], str]:
    def change(content: dict[str, Any]) -> str:
        content["entries"][0]["run"] |= changes
        return json.dumps(content)

    return change


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda content: "", "Expecting value"),
        (lambda content: json.dumps(content)[:-9], "line 1 column"),
        (lambda content: "[" * 100_000, "it has too many levels"),
        (lambda content: "[]", "must be a table"),
        (garbled(format=2), "its format is 2, and this version reads 1"),
        (garbled(format="\x1b[31m" * 999), "format"),
        (garbled(entries=7), "entries"),
        (with_run(verdict="perfect"), "verdict"),
        (with_run(latency="fast"), "latency"),
        (with_run(latency=float("nan")), "NaN"),
    ],
)
def test_what_is_no_report_is_one_error(
    project: Path, result: Result, edit: Callable[[dict[str, Any]], str], reason: str
) -> None:
    path = write(project, "r.json", entry(result))
    path.write_text(edit(json.loads(path.read_text("utf-8"))), "utf-8")
    write(project, "valid.json", entry(result))
    with pytest.raises(ConfigError) as raised:
        read_reports(configured(project, TOML))
    (problem,) = raised.value.problems
    assert (problem.kind.id, problem.location) == ("EPC511", "reports/r.json")
    assert reason in problem.message
    assert "\x1b" not in str(raised.value)


@pytest.mark.parametrize("reports", ["none", "empty", "outside"])
def test_a_key_without_reports_is_an_error(project: Path, reports: str) -> None:
    if reports == "empty":
        (project / "reports").mkdir()
    toml = TOML.replace('"reports"', '"../reports"') if reports == "outside" else TOML
    with pytest.raises(ConfigError) as raised:
        read_reports(configured(project, toml))
    (problem,) = raised.value.problems
    assert str(problem.key) == "tool.epcontext.validated-on"
    assert problem.kind.id == ("EPC022" if reports == "outside" else "EPC021")


def test_one_report_can_be_named_itself(project: Path, result: Result) -> None:
    write(project, "r.json", entry(result))
    named = configured(project, TOML.replace('"reports"', '"reports/r.json"'))
    assert [*read_reports(named)] == ["reports/r.json"]


def test_a_run_in_words() -> None:
    simulated = replace(RUN, simulated=True, latency=None, driver="")
    assert describe_run(simulated) == "agrees on the simulator of Snapdragon X Elite"
    sensitive = replace(RUN, verdict="sensitive", latency=0.0000123)
    assert describe_run(sensitive) == (
        "agrees, but is SENSITIVE, on Snapdragon X Elite (driver 1.2), 0.0123 ms"
    )
    slow = replace(RUN, verdict="not-compared", latency=1.234)
    assert describe_run(slow) == "ran, NOT compared, on Snapdragon X Elite (driver 1.2), 1.23 s"
