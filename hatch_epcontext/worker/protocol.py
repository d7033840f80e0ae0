"""The protocol between a worker and the build: lines, environment, and the folder of a request.

The build answers `READY` with a request: an `Order` as one line of JSON. Then the worker sends `REPLY`, with
the request's reply as JSON, or `FAILURE`, with a `requests.Failure`. Each line of a worker begins with one of
these words.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, BinaryIO

from hatch_epcontext.frozen import dataclass

READY, REPLY, FAILURE = b"ready", b"reply", b"failure"

ENDED = b"ended"
"""The word before the exit code of a fork, in the last line, which the server of forks sends."""


@dataclass(frozen=True)
class Order:
    """A ``request`` for the ``action`` that answers it in ``folder``; for that it is plain values.

    With ``verbose`` ONNX Runtime prints more than its warnings. ``memory_limit``: the most bytes of memory.
    """

    action: str
    request: Any
    folder: Path
    verbose: bool = False
    memory_limit: int | None = None


NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
"""The variable that ONNX Runtime reads when it is loaded: see "Disabling Telemetry" in its ``Privacy.md``."""

LOG, ACTIVITY = "worker.log", "activity"
"""Names in the folder of a request: the worker's log, and what it does now."""

_reported: list[tuple[BinaryIO, str]] = []
"""The open file for what the worker does, and its last text."""


def report_in(folder: Path) -> None:
    """Write what each `announce` gets into a file in ``folder``: the build reads it only if it needs it."""
    _reported.clear()
    # The build may have ended, or the disk may be full.
    with contextlib.suppress(OSError):
        _reported.append(((folder / ACTIVITY).open("wb", buffering=0), ""))


def announce(text: str, part: str = "") -> None:
    """Report what begins, such as ``"opening the source model on the CPU"``, or a ``part`` of it."""
    for file, last in _reported:
        # Repeated runs of a model are not reported again: a run takes less time than a report.
        if (line := f"{text} {part}") != last:
            _reported[:] = [(file, line)]
            with contextlib.suppress(OSError):
                file.seek(0)
                file.write(" ".join(line.split()).encode("utf-8", "replace"))
                file.truncate()
