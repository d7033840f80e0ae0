"""The reports of boards in a build: those that are about what it compiles count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ConfigError, Key, Kind, Problem
from hatch_epcontext.files import read_regular
from hatch_epcontext.jobs.artifact import Built, Result
from hatch_epcontext.jobs.boards import (
    REPORT_FORMAT,
    BoardEntry,
    BoardReport,
    BoardRun,
    describe_run,
    report_files,
)
from hatch_epcontext.serialize import from_json, value_sha256

_KEY = Key() / "validated-on"

_COUNTING = ("agrees", "sensitive", "differs")
"""The verdicts that count."""

Reports = Mapping[str, BoardReport]
"""The reports of a project by their path in it."""


def read_reports(config: Config) -> Reports:
    """The reports that the project names; raises ConfigError for what is none, and for a conflict."""
    if config.validated_on is None:
        return {}
    files, reports, problems = report_files(config.validated_on), {}, []
    if not files:
        message = "the folder has no report (*.json)."
        hint = "epcontext validate --report writes one. Without any, remove the key."
        raise ConfigError(Problem.at(_KEY, Kind.FILE_NOT_FOUND, message, hint))
    for file in files:
        name = file.relative_to(config.root).as_posix()
        try:
            reports[name] = _read(file)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            hint = "Write it again with epcontext validate --report, or remove it."
            problems.append(Problem(Kind.INVALID_REPORT, name, f"it is not used: {reason}.", hint))
    ConfigError.check([*problems, *_conflicts(reports)])
    return reports


def _read(file: Path) -> BoardReport:
    """The report in ``file``; raises OSError, and ValueError for anything that is none."""
    report = from_json(read_regular(file), BoardReport)
    if report.format != REPORT_FORMAT:
        raise ValueError(f"its format is {report.format}, and this version reads {REPORT_FORMAT}")
    return report


def _conflicts(reports: Reports) -> Iterator[Problem]:
    """Reports that disagree about the same files, on the same chip with the same driver and versions."""
    known: dict[str, tuple[str, bool]] = {}
    for name, entry, run in _runs(reports):
        if run.verdict not in _COUNTING:
            continue
        same = value_sha256([entry.source_sha256, entry.files, run.board])
        other, differed = known.setdefault(same, (name, run.verdict == "differs"))
        if differed != (run.verdict == "differs"):
            message = (
                f"{entry.model} -> {entry.target} {describe_run(run)}, and {other} says the opposite "
                "of the same files, driver and versions."
            )
            hint = "Validate it again there, and remove the wrong report."
            yield Problem(Kind.CONFLICTING_REPORTS, name, message, hint)


def _runs(reports: Reports) -> Iterator[tuple[str, BoardEntry, BoardRun]]:
    """The entries of all ``reports`` whose targets were run, with their runs."""
    for name, report in reports.items():
        for entry in report.entries:
            if entry.run is not None:
                yield name, entry, entry.run


def with_boards(
    result: Result, reports: Reports, log: Callable[[str], None], warn: Callable[[str], None]
) -> Result:
    """``result`` with those runs of the ``reports`` that are about its files.

    ``log`` gets a line for each, and for each one that does not count; ``warn`` those that differ.
    """
    boards: dict[tuple[str, str], tuple[BoardRun, ...]] = {}
    for name, entry, run in _runs(reports):
        key, where = (entry.model, entry.target), f"{entry.model} -> {entry.target}"
        before, reason = boards.get(key, ()), _reason_not_to_count(entry, run, result)
        if run.board in [other.board for other in before]:
            reason = "another report is of the same chip, driver and versions"
        if reason:
            log(f"{where}: {name} does not count: {reason}")
            continue
        (warn if run.verdict == "differs" else log)(f"{where}: {describe_run(run)} ({name})")
        boards[key] = (*before, run)
    return dataclasses.replace(result, boards=boards) if boards else result


def _reason_not_to_count(entry: BoardEntry, run: BoardRun, result: Result) -> str | None:
    """Why the ``run`` of ``entry`` is not about what ``result`` has; None if it is."""
    if run.verdict not in _COUNTING:
        return "it was not compared there"
    source = next((s for s in result.sources if s.model.name == entry.model), None)
    shape_set = source.model.shape_set if source else None
    names = {entry.model, shape_set.name} if shape_set and shape_set.members else {entry.model}
    built = next((b for b in result.built if _is_of(b, names, entry.target)), None)
    if source is None or built is None:
        return "this build compiles no such target"
    if source.identity != entry.source_sha256:
        return "it is about another source, or other sizes"
    for name, record in built.record.files.items():
        if entry.files.get(name) != record:
            return f"it is about another file {name}"
    return None


def _is_of(built: Built, names: Iterable[str], target: str) -> bool:
    return built.job.target.name == target and any(m.name in names for m in built.job.models)
