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
from hatch_epcontext.worker.protocol import (
    ANSWERED,
    ENDED,
    LOG,
    NO_TELEMETRY,
    REPLY,
    STARTED,
    STEP,
)

_ADDED = {
    "PYTHONFAULTHANDLER": "1",
    "PYTHONSAFEPATH": "1",
    # The last output of a worker that crashes often has the cause: buffers of Python and C would be lost.
    "PYTHONUNBUFFERED": "1",
    "PYTHONUTF8": "1",
}


def worker_environment() -> dict[str, str]:
    """The variables of every worker: those of this process, without the credentials of the shared cache."""
    inherited = {name: value for name, value in os.environ.items() if name not in CREDENTIALS}
    # Only the user decides what a build sends: ONNX Runtime's wheels send telemetry by default.
    telemetry = {NO_TELEMETRY: os.environ.get(NO_TELEMETRY) or "1"}
    return {**inherited, **_ADDED, **telemetry}


PIECE = 1 << 18
"""Bytes that are read at once from a worker."""


class WorkerCommand:
    """A request to a worker, as JSON: the action, the ``folder`` where the worker works, and flags.

    ``secrets`` and ``listener`` are those of its `WorkerLog`.
    """

    def __init__(
        self,
        action: str,
        request: str,
        folder: Path,
        flags: Iterable[str] = (),
        secrets: Collection[str] = (),
        listener: Callable[[str], None] | None = None,
    ) -> None:
        self.action = action
        self.folder = folder
        self.secrets = secrets
        self.log = WorkerLog(folder / LOG, secrets, listener)
        # The line of JSON that the worker gets.
        self.order = json.dumps([action, request, str(folder), *flags]).encode() + b"\n"
        self.reply: bytes | None = None
        self._step, self._since = "", 0.0

    def note(self, step: str) -> None:
        """Remember the worker's current step."""
        self._step, self._since = step, time.monotonic()

    @property
    def last_step(self) -> str:
        """The worker's last step and its seconds, for the end of a sentence."""
        seconds = time.monotonic() - self._since
        return f" while {self._step} (for {seconds:.0f} s)" if self._step else ""


class Messages:
    """The lines of a worker, which come in pieces."""

    def __init__(self) -> None:
        self.is_started = False
        self.exit_code: int | None = None
        self._command: WorkerCommand | None = None
        self._unread = bytearray()

    def begin(self, command: WorkerCommand) -> None:
        """Assign everything that follows to ``command``."""
        self._command = command

    def read(self, piece: bytes) -> int | None:
        """The code of an answer if ``piece`` completes one, or the exit code if ``piece`` has that."""
        seen = len(self._unread)
        self._unread += piece
        code = None
        while (end := self._unread.find(b"\n", seen)) >= 0:
            code = self._read_line(bytes(self._unread[:end]), code)
            del self._unread[: end + 1]
            seen = 0
        return self.exit_code if code is None else code

    def _read_line(self, line: bytes, code: int | None) -> int | None:
        word, _, rest = line.partition(b" ")
        if word == ANSWERED:
            return int(rest)
        if word == ENDED:
            self.exit_code = int(rest)
        elif word == STARTED:
            self.is_started = True
        elif self._command is not None and word == STEP:
            self._command.note(rest.decode())
        elif self._command is not None and word == REPLY:
            self._command.reply = rest
        # Without forks there may also be lines that Python prints at its start.
        return code


class WorkerProcess(Protocol):
    """A started worker process; threads may use it at the same time."""

    def send(self, command: WorkerCommand, seconds: float) -> None:
        """Send it a request, to be answered after earlier ones; it may take ``seconds`` to read it."""

    def wait(self, seconds: float) -> int | None:
        """The code of its answer, or its exit code, negative for a signal; None after ``seconds``."""

    def kill(self) -> None:
        """Begin to end it, with all its children. It may have ended already."""

    def close(self) -> None:
        """Return when it has ended; kill it if it still runs."""


_KILL_ON_JOB_CLOSE, _PROCESS_MEMORY, _EXTENDED_LIMIT_INFORMATION = 0x2000, 0x100, 9
"""Of job objects of Windows."""

_ALONE = sum(
    getattr(subprocess, flag, 0) for flag in ("CREATE_NEW_PROCESS_GROUP", "CREATE_NO_WINDOW")
)
"""How a worker starts on Windows: without a window, and without Ctrl-C, which ends it through the build."""

_POLL = 0.1
"""Seconds between checks whether an interpreter has ended."""


class Interpreter:
    """A worker in a fresh Python interpreter, where the system has no forks.

    It ends when its standard input ends, and so with the build, however that ends.
    """

    def __init__(self, log_path: Path, memory_limit: int | None = None) -> None:
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "hatch_epcontext.worker"),
                # Not in the project's folder: Python 3.10 would import its modules before all others.
                cwd=log_path.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=worker_environment(),
                # A group of its own, so that its children can be ended with it.
                start_new_session=True,
                creationflags=_ALONE,
            )
        self._job = _contain(self._process, memory_limit)
        self._messages = Messages()
        self._pieces = queue.SimpleQueue[bytes]()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, command: WorkerCommand, seconds: float) -> None:
        self._messages.begin(command)
        # A pipe's buffer is small, and the interpreter reads it only after its start.
        writer = threading.Thread(target=self._write, args=(command.order,), daemon=True)
        writer.start()
        writer.join(seconds)

    def wait(self, seconds: float) -> int | None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            code = self._process.poll()
            try:
                answer = self._messages.read(self._pieces.get(timeout=min(left, _POLL)))
            except queue.Empty:
                if code is None:
                    continue
                self._kill_group()
                return code
            if answer is not None:
                return answer
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

    def _write(self, order: bytes) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        # The waiting thread notices that it has ended, also through `close`.
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(order)
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        with self._process.stdout as output:
            while piece := os.read(output.fileno(), PIECE):
                self._pieces.put(piece)

    def _kill_group(self) -> None:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _contain(process: subprocess.Popen[bytes], memory_limit: int | None) -> contextlib.ExitStack:
    """Put ``process`` into a job object of Windows; closing the result ends all its children.

    Each of its processes gets at most ``memory_limit`` bytes of memory. The job also ends with this process.
    On other systems, and where Windows refuses, the result does nothing.
    """
    stack = contextlib.ExitStack()
    if sys.platform == "win32":
        # Imported here, because other systems do not need it.
        import ctypes

        class Limits(ctypes.Structure):
            """``JOBOBJECT_EXTENDED_LIMIT_INFORMATION``; only ``flags`` and the first of ``memory`` count."""

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
        if memory_limit is not None:
            limits.flags |= _PROCESS_MEMORY
            limits.memory[0] = memory_limit
        kernel.SetInformationJobObject(
            job, _EXTENDED_LIMIT_INFORMATION, ctypes.byref(limits), ctypes.sizeof(limits)
        )
        kernel.AssignProcessToJobObject(job, ctypes.c_void_p(int(process._handle)))  # noqa: SLF001
        stack.callback(kernel.CloseHandle, job)
    return stack
