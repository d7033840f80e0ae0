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
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Protocol

from hatch_epcontext.config.settings import CREDENTIALS
from hatch_epcontext.jobs.processes.worker_log import WorkerLog
from hatch_epcontext.worker.protocol import ANSWERED, LOG, NO_TELEMETRY, REPLY, REQUEST, STEP

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


class WorkerCommand:
    """A request to a worker: the action, the ``folder`` with its files, where the worker works, and flags.

    ``secrets`` and ``listener`` are those of its `WorkerLog`.
    """

    def __init__(
        self,
        action: str,
        folder: Path,
        flags: Iterable[str] = (),
        secrets: Collection[str] = (),
        listener: Callable[[str], None] | None = None,
    ) -> None:
        self.action = action
        self.folder = folder
        self.secrets = secrets
        self.request_path, self.reply_path = folder / REQUEST, folder / REPLY
        self.log = WorkerLog(folder / LOG, secrets, listener)
        # What a worker gets, as a line of JSON.
        self.order = json.dumps([action, str(folder), *flags]).encode() + b"\n"

    @property
    def last_step(self) -> str:
        """What the worker did last, and for how many seconds, for the end of a sentence."""
        step = self.folder / STEP
        try:
            text = step.read_text(encoding="utf-8")
            seconds = time.time() - step.stat().st_mtime
        except (OSError, ValueError):
            return ""
        return f" while {text} (for {max(seconds, 0):.0f} s)" if text else ""


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


_KILL_ON_JOB_CLOSE, _EXTENDED_LIMIT_INFORMATION = 0x2000, 9
"""Of job objects of Windows."""

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
        self._job = _contain(self._process)
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
            # Python may print when it starts.
            for line in filter(lambda each: each.startswith(ANSWERED), answers):
                self._answers.put(int(line.removeprefix(ANSWERED)))

    def _kill_group(self) -> None:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _contain(process: subprocess.Popen[bytes]) -> contextlib.ExitStack:
    """Put ``process`` into a job object of Windows; closing the result ends all that it started.

    The job ends with the process that has it too. On other systems, and where Windows refuses, the result
    does nothing.
    """
    stack = contextlib.ExitStack()
    if sys.platform == "win32":
        # Elsewhere no build pays for it.
        import ctypes

        class Limits(ctypes.Structure):
            """``JOBOBJECT_EXTENDED_LIMIT_INFORMATION``, of which only ``flags`` is used."""

            _fields_ = (
                ("times", ctypes.c_int64 * 2),
                ("flags", ctypes.c_uint32),
                ("working_set", ctypes.c_size_t * 2),
                ("active_processes", ctypes.c_uint32),
                ("affinity", ctypes.c_size_t),
                ("classes", ctypes.c_uint32 * 2),
                ("io", ctypes.c_uint64 * 6),
                ("memory", ctypes.c_size_t * 4),
            )

        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.CreateJobObjectW.restype = ctypes.c_void_p
        job = ctypes.c_void_p(kernel.CreateJobObjectW(None, None))
        limits = Limits(flags=_KILL_ON_JOB_CLOSE)
        kernel.SetInformationJobObject(
            job, _EXTENDED_LIMIT_INFORMATION, ctypes.byref(limits), ctypes.sizeof(limits)
        )
        kernel.AssignProcessToJobObject(job, ctypes.c_void_p(int(process._handle)))  # noqa: SLF001
        stack.callback(kernel.CloseHandle, job)
    return stack
