"""The current step of this worker, for the message of a build that has to stop it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hatch_epcontext.worker.protocol import STEP

_reported: list[tuple[Path, str]] = []
"""The file for the step, and the last step in it."""


def report_in(folder: Path) -> None:
    """Write each `step` into a file in ``folder``: the build reads it only if it needs it."""
    _reported[:] = [(folder / STEP, "")]


def step(text: str) -> None:
    """Report the step that begins, such as ``"opening the source model on the CPU"``."""
    for file, last in _reported:
        # Repeated runs of a model are not reported again: a run takes less time than a report.
        if text != last:
            _reported[:] = [(file, text)]
            # The build may have ended, or the disk may be full.
            with contextlib.suppress(OSError):
                file.write_text(" ".join(text.split()), "utf-8", "replace")
