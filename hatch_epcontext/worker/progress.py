"""What this worker is doing, for the message of a build that has to stop it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from hatch_epcontext.worker.protocol import STEP

_listeners: list[Callable[[bytes], object]] = []
_last: list[str] = []


def report_to(send: Callable[[bytes], object]) -> None:
    """From now on ``send`` gets a line for each `step`."""
    _listeners[:] = [send]
    _last.clear()


def step(text: str) -> None:
    """Report what begins now, such as ``"opening the source model on the CPU"``."""
    # A model is run several times: that takes less time than to report it.
    if [text] == _last:
        return
    _last[:] = [text]
    for send in _listeners:
        # A build that has ended does not wait for this worker.
        with contextlib.suppress(OSError):
            send(STEP + b" " + " ".join(text.split()).encode(errors="replace") + b"\n")
