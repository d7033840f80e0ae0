"""The current step of this worker, for the message of a build that has to stop it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from hatch_epcontext.worker.protocol import STEP

_listeners: list[Callable[[bytes], object]] = []
_last: list[str] = []


def report_to(send: Callable[[bytes], object]) -> None:
    """Send a line for each `step` to ``send``."""
    _listeners[:] = [send]
    _last.clear()


def step(text: str) -> None:
    """Report the step that begins, such as ``"opening the source model on the CPU"``."""
    # Repeated runs of a model are not reported again: a run takes less time than a report.
    if [text] == _last:
        return
    _last[:] = [text]
    for send in _listeners:
        # The build may have ended.
        with contextlib.suppress(OSError):
            send(STEP + b" " + " ".join(text.split()).encode(errors="replace") + b"\n")
