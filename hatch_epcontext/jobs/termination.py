"""SIGTERM, and Ctrl-Break, as an error: workers are stopped and temporary folders removed at the end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, *(number for number in signal.Signals if number.name == "SIGBREAK"))


@contextlib.contextmanager
def terminated_as_error() -> Iterator[None]:
    """In this context SIGTERM raises SystemExit with the exit code of a shell, 143; a second one kills.

    So does Ctrl-Break on Windows, which has no SIGTERM. It does nothing if the process has a handler of its
    own, or outside of the main thread, which handles signals. The earlier handlers are restored.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    unhandled = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    if not in_main_thread or not unhandled:
        yield
        return
    for number in unhandled:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)


def _end(signal_number: int, frame: FrameType | None) -> None:
    signal.signal(signal_number, signal.SIG_DFL)
    raise SystemExit(128 + signal_number)
