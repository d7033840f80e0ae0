"""SIGTERM as an error: workers are stopped and temporary folders removed before the process ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def terminated_as_error() -> Iterator[None]:
    """While it is entered, SIGTERM raises SystemExit with the exit code of a shell, 143; a second one kills.

    Not where the process has a handler of its own, and not outside of its main thread, which handles
    signals. The earlier handler is restored.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(signal_number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(128 + signal_number)
