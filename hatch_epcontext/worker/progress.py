"""The current step of this worker, for the message of a build that has to stop it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import BinaryIO

from hatch_epcontext.worker.protocol import STEP

_reported: list[tuple[BinaryIO, str]] = []
"""The open file for the step, and the last step in it."""


def report_in(folder: Path) -> None:
    """Write each `step` into a file in ``folder``: the build reads it only if it needs it."""
    _reported.clear()
    # The build may have ended, or the disk may be full.
    with contextlib.suppress(OSError):
        _reported.append(((folder / STEP).open("wb", buffering=0), ""))


def step(text: str) -> None:
    """Report the step that begins, such as ``"opening the source model on the CPU"``."""
    for file, last in _reported:
        # Repeated runs of a model are not reported again: a run takes less time than a report.
        if text != last:
            _reported[:] = [(file, text)]
            with contextlib.suppress(OSError):
                file.seek(0)
                file.write(" ".join(text.split()).encode("utf-8", "replace"))
                file.truncate()
