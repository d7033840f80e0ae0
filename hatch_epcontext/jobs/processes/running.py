"""A process that answers one request, however it was started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hatch_epcontext.config.settings import CREDENTIALS
from hatch_epcontext.jobs.processes import job_object
from hatch_epcontext.worker.protocol import END_WITH_INPUT, NO_TELEMETRY, own_variables

_ADDED = {
    "PYTHONFAULTHANDLER": "1",
    "PYTHONSAFEPATH": "1",
    # What a worker prints before it ends abruptly often says why: buffers of Python and of C would be lost.
    "PYTHONUNBUFFERED": "1",
    "PYTHONUTF8": "1",
}


def worker_environment() -> dict[str, str]:
    """The variables of every worker: those of this process, without the credentials of the shared cache."""
    inherited = {name: value for name, value in os.environ.items() if name not in CREDENTIALS}
    # Only who builds decides what a build sends: ONNX Runtime's wheels send events of sessions by default.
    telemetry = {NO_TELEMETRY: os.environ.get(NO_TELEMETRY) or "1"}
    return {**inherited, **_ADDED, **telemetry}


@dataclass(frozen=True)
class WorkerCommand:
    """What a worker process gets: the action and its ``flags``, its working directory, and its files."""

    action: str
    folder: Path
    request_path: Path
    reply_path: Path
    log_path: Path
    flags: tuple[str, ...] = ()
    secrets: tuple[str, ...] = field(default=(), repr=False)

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


class WorkerProcess(Protocol):
    """A started worker process; threads may use it at the same time."""

    def wait(self, seconds: float) -> int | None:
        """The exit code, negative for a signal; None if it still runs after ``seconds``."""

    def kill(self) -> None:
        """Begin to end it, with all processes that it started. It may have ended already."""

    def close(self) -> None:
        """Return when it has ended, after `kill` if it still runs."""


_GRACE = 10.0
"""Seconds in which a worker must end, with all that it started, when its input is closed."""


class Interpreter:
    """A worker in a fresh Python interpreter.

    It ends at the end of its standard input, and so with the build, however that ends. On Linux it is a fork
    of that interpreter, which stays as its supervisor: see `hatch_epcontext.worker.supervisor`.
    """

    def __init__(self, order: WorkerCommand) -> None:
        arguments = (*order.arguments, END_WITH_INPUT)
        command = (sys.executable, "-m", "hatch_epcontext.worker", *arguments)
        with order.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=order.folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=worker_environment() | own_variables(order.folder),
                # A group of its own, so that what it starts can be ended with it.
                start_new_session=True,
            )
        self._lock = threading.Lock()
        self._job = job_object.contain(self._process)

    def wait(self, seconds: float) -> int | None:
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        _kill_group(self._process.pid)
        return code

    def kill(self) -> None:
        if sys.platform == "linux":
            # Its supervisor ends it, and what it started.
            self._close_input()
        elif self._process.poll() is None:
            _kill_group(self._process.pid)
            self._process.kill()

    def close(self) -> None:
        self.kill()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            # Stopped, or stuck.
            _kill_group(self._process.pid)
            self._process.kill()
            self._process.wait()
        self._close_input()
        self._job.close()

    def _close_input(self) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        with self._lock, contextlib.suppress(OSError):
            self._process.stdin.close()


def _kill_group(process_id: int) -> None:
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            os.killpg(process_id, signal.SIGKILL)
