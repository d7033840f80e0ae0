"""The lines of a worker's log that an error shows."""

from __future__ import annotations

from pathlib import Path

from hatch_epcontext.jobs.processes.failures import TAIL, WorkerLog

STANDING = (
    "2026-01-01 10:00 [W:onnxruntime:, qnn_ep.cc:933 QnnEp] File mapped weights feature is only available",
    "2026-01-01 10:00 [W:onnxruntime:, ep.cc:26 Io] EPContext encryption config unavailable",
    " # LIBNATIVE: No alternate configuration present in libnative_tls.conf",
)
WARNING = "2026-01-01 10:00:00.2 [W:onnxruntime:, a.cc:1 Run] Something is slow."
ERROR = "2026-01-01 10:00:00.3 [E:onnxruntime:, b.cc:1 Compile] Check failed:"


def _tail(folder: Path, *lines: str, only_errors: bool = False) -> list[str]:
    path = folder / "worker.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return WorkerLog(folder).tail(only_errors=only_errors).splitlines()


def test_standing_warnings_are_not_shown(tmp_path: Path) -> None:
    assert _tail(tmp_path, *STANDING, WARNING, "Traceback") == [WARNING, "Traceback"]
    assert _tail(tmp_path, *STANDING) == []


def test_only_errors_with_their_further_lines_are_shown_where_only_they_count(
    tmp_path: Path,
) -> None:
    lines = ("a vendor's line", WARNING, ERROR, "the node", STANDING[2], "and why", WARNING)
    shown = _tail(tmp_path, *lines, only_errors=True)
    assert shown == [ERROR, "the node", "and why"]


def test_the_last_lines_that_count_are_shown(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(TAIL + 1)]
    assert _tail(tmp_path, *lines, *STANDING * TAIL) == lines[1:]
