"""A process that answers requests, however it was started."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hatch_epcontext.config.settings import SECRET_VARIABLES
from hatch_epcontext.jobs.processes import job_object
from hatch_epcontext.worker.protocol import NO_TELEMETRY

_ADDED = {
    "PYTHONFAULTHANDLER": "1",
    "PYTHONSAFEPATH": "1",
    # What a worker prints before it ends abruptly often says why: buffers of Python and of C would be lost.
    "PYTHONUNBUFFERED": "1",
    "PYTHONUTF8": "1",
}

_WITHHELD = SECRET_VARIABLES | {
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN",
}
"""Credentials of the shared cache, which only the build process uses."""


def worker_environment() -> dict[str, str]:
    """The variables of every worker: those of this process, without the credentials of the shared cache."""
    inherited = {name: value for name, value in os.environ.items() if name not in _WITHHELD}
    # Only who builds decides what a build sends: ONNX Runtime's wheels send events of sessions by default.
    telemetry = {NO_TELEMETRY: os.environ.get(NO_TELEMETRY) or "1"}
    return {**inherited, **_ADDED, **telemetry}


@dataclass(frozen=True)
class WorkerCommand:
    """A request to a worker: the action and its ``flags``, its working directory, and its files."""

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
    def order(self) -> bytes:
        """The line with which a worker gets it, as JSON."""
        arguments = (self.action, str(self.request_path), str(self.reply_path), *self.flags)
        order = {
            "arguments": arguments,
            "folder": str(self.folder),
            "log_path": str(self.log_path),
        }
        return json.dumps(order).encode() + b"\n"


class WorkerProcess(Protocol):
    """A started worker process; threads may use it at the same time."""

    def send(self, command: WorkerCommand) -> None:
        """Let it answer a request, after it has answered those before."""

    def wait(self, seconds: float) -> int | None:
        """The code of its answer, or that with which it has ended, negative for a signal.

        None if it still works after ``seconds``.
        """

    def kill(self) -> None:
        """Begin to end it, with all processes that it started. It may have ended already."""

    def close(self) -> None:
        """Return when it has ended, after `kill` if it still runs."""


_POLL = 0.1
"""Seconds between two looks whether an interpreter has ended."""


class Interpreter:
    """A worker in a fresh Python interpreter, where the system has no forks.

    It ends at the end of its standard input, and so with the build, however that ends.
    """

    def __init__(self, log_path: Path) -> None:
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "hatch_epcontext.worker"),
                # Not the project's folder: Python 3.10 would find its modules before all others.
                cwd=log_path.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=worker_environment(),
                # A group of its own, so that what it starts can be ended with it.
                start_new_session=True,
            )
        self._job = job_object.contain(self._process)
        self._answers = queue.SimpleQueue[int]()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, command: WorkerCommand) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        # Whoever waits finds out that it has ended.
        with contextlib.suppress(OSError):
            self._process.stdin.write(command.order)
            self._process.stdin.flush()

    def wait(self, seconds: float) -> int | None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            code = self._process.poll()
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=min(left, _POLL))
            if code is not None:
                self._kill_group()
                return code
        return None

    def kill(self) -> None:
        if self._process.poll() is None:
            self._kill_group()
            self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        assert self._process.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._job.close()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        with self._process.stdout as answers:
            for line in answers:
                self._answers.put(int(line))

    def _kill_group(self) -> None:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
