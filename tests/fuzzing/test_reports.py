"""Reports of boards that are not as they were written: each is read, or is one error."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hatch_epcontext.errors import ConfigError
from hatch_epcontext.files import FileRecord
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.boards import BoardEntry, BoardReport, BoardRun, describe_run
from hatch_epcontext.jobs.hardware import Reports, read_reports, with_boards
from hatch_epcontext.serialize import to_plain
from tests.fuzzing.mutations import mutated
from tests.results import configured

RUN = BoardRun("agrees", "a chip", "1.2", "Linux", {"onnxruntime": "1.32.0"}, latency=0.0021)
ENTRY = BoardEntry("a", "npu", "Ep", "00" * 32, {"a.onnx": FileRecord(1, "ab" * 32)}, RUN)
REPORT = to_plain(BoardReport(1, "hatch-epcontext 0.1.0", "a.whl", (ENTRY,)))

TOML = 'models = ["models/a.onnx"]\ntargets.cpu.provider = "cpu"\nvalidated-on = "r.json"\n'


@given(st.data())
def test_any_report_is_read_or_one_error(project: Path, data: st.DataObject) -> None:
    text = json.dumps(data.draw(mutated(REPORT)))
    (project / "r.json").write_text(text, encoding="utf-8", errors="backslashreplace")
    reports: Reports = {}
    kinds = list[str]()
    try:
        reports = read_reports(configured(project, TOML))
    except ConfigError as error:
        kinds = [problem.kind.id for problem in error.problems]
    assert kinds == ([] if reports else ["EPC511"])
    lines = list[str]()
    with_boards(Result((), ()), reports, lines.append, lines.append)
    entries = (entry for report in reports.values() for entry in report.entries)
    runs = [entry.run for entry in entries if entry.run]
    assert len(lines) == len(runs)
    assert all(map(describe_run, runs))
