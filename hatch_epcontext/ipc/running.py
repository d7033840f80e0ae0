"""A process that answers one request, however it was started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

ENVIRONMENT = {"PYTHONFAULTHANDLER": "1", "PYTHONUTF8": "1", "PYTHONSAFEPATH": "1"}
"""Variables of every worker."""


@dataclass(frozen=True)
class Order:
    """What a worker process gets: the action and its ``flags``, its working directory, and its files."""

    action: str
    folder: Path
    request_path: Path
    reply_path: Path
    log_path: Path
    flags: tuple[str, ...] = ()

    @property
    def step_path(self) -> Path:
        """The file in which the worker writes what it is doing."""
        return self.reply_path.with_name("step")

    @property
    def last_step(self) -> str:
        """What the worker did last, and for how many seconds, for the end of a sentence."""
        try:
            text = self.step_path.read_text(encoding="utf-8")
            seconds = time.time() - self.step_path.stat().st_mtime
        except (OSError, ValueError):
            return ""
        return f" while {text} (for {max(seconds, 0):.0f} s)" if text else ""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of ``python -m hatch_epcontext.worker``."""
        return (self.action, str(self.request_path), str(self.reply_path), *self.flags)


class Running(Protocol):
    """A started worker process; threads may use it at the same time."""

    def wait(self, seconds: float) -> int | None:
        """The exit code, negative for a signal; None if it still runs after ``seconds``."""

    def kill(self) -> None:
        """Begin to end it, with all processes that it started. It may have ended already."""

    def close(self) -> None:
        """Return when it has ended, after `kill` if it still runs."""


class Interpreter:
    """A worker in a fresh Python interpreter."""

    def __init__(self, order: Order) -> None:
        command = (sys.executable, "-m", "hatch_epcontext.worker", *order.arguments)
        with order.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=order.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT},
                # A group of its own, so that what it starts can be ended with it.
                start_new_session=True,
            )

    def wait(self, seconds: float) -> int | None:
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        _kill_group(self._process.pid)
        return code

    def kill(self) -> None:
        if self._process.poll() is None:
            _kill_group(self._process.pid)
            self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()


def _kill_group(process_id: int) -> None:
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            os.killpg(process_id, signal.SIGKILL)
