"""Processes that answer requests: forks of one that has imported what all need, and fresh interpreters.

A fresh interpreter needs about half a second for the imports, a fork some milliseconds. Only Linux has forks:
the frameworks of macOS do not survive one, and Windows has none.

The build process and the server (`hatch_epcontext.worker.fork_server`) share a socket. For each worker the
build process sends one end of a new connection over it, through which the worker gets its requests; the
server sends the exit code when the worker and all its children have ended. Closing the connection earlier
ends the worker, so no worker outlives the build, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from hatch_epcontext.config.environ import CREDENTIALS
from hatch_epcontext.worker.protocol import ENDED, FAILURE, NO_TELEMETRY, READY, REPLY

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


CAN_FORK = sys.platform == "linux"
"""Whether this system can start workers as forks."""


class WorkerProcess:
    """A process that reads requests from ``orders`` and writes ``messages``: see `worker.protocol`.

    One thread gets its answers; others may kill it.
    """

    def __init__(self, orders: IO[bytes], messages: IO[bytes]) -> None:
        self._orders = orders
        self._lines = queue.SimpleQueue[bytes]()
        self._was_ready = self._has_ended = False
        threading.Thread(target=self._read, args=(messages,), daemon=True).start()

    def answer(self, order: bytes, seconds: float) -> tuple[bytes, bytes] | None:
        """Its answer to ``order``, which it gets as soon as it is ready, as a word and a text.

        It is `ENDED` with the exit code, negative for a signal, if it ends; None after ``seconds``, which
        are for its next message. Raises ChildProcessError if it ended before it could read a request.
        """
        try:
            line = self._lines.get(timeout=max(seconds, 0))
        except queue.Empty:
            return None
        word, _, text = line.rstrip(b"\n").partition(b" ")
        if word == READY:
            self._was_ready = True
            # The end of its messages shows that it has ended.
            with contextlib.suppress(OSError):
                self._orders.write(order)
                self._orders.flush()
        if not line:
            word, text = ENDED, b"%d" % self._exit_code()
        self._has_ended |= word == ENDED
        return (word, text) if word in (REPLY, FAILURE, ENDED) else None

    def kill(self) -> None:
        """Begin to end it, with all its children. It may have ended already."""
        raise NotImplementedError

    def close(self) -> None:
        """Return when it has ended; kill it if it still runs."""
        raise NotImplementedError

    def _exit_code(self) -> int:
        """The exit code of the process, whose messages have ended."""
        raise NotImplementedError

    def _read(self, messages: IO[bytes]) -> None:
        with messages, contextlib.suppress(OSError):
            for line in messages:
                self._lines.put(line)
        self._lines.put(b"")


_KILL_ON_JOB_CLOSE, _PROCESS_MEMORY, _EXTENDED_LIMIT_INFORMATION = 0x2000, 0x100, 9
"""Of job objects of Windows."""

_APART = sum(
    getattr(subprocess, flag, 0) for flag in ("CREATE_NEW_PROCESS_GROUP", "CREATE_NO_WINDOW")
)
"""How a worker starts on Windows: without a window, and without Ctrl-C, which ends it through the build."""


class Interpreter(WorkerProcess):
    """A worker in a fresh Python interpreter, whose first output goes to ``log_path``.

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
                creationflags=_APART,
            )
        self._job = _contain(self._process, memory_limit)
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        super().__init__(self._process.stdin, self._process.stdout)

    def answer(self, order: bytes, seconds: float) -> tuple[bytes, bytes] | None:
        has_ended = self._process.poll() is not None
        answer = super().answer(order, seconds)
        if answer is None and has_ended and self._lines.empty():
            # What it started keeps its output open.
            return ENDED, b"%d" % self._exit_code()
        return answer

    def kill(self) -> None:
        if self._process.poll() is None:
            self._kill_group()
            self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._orders.close()
        self._job.close()

    def _exit_code(self) -> int:
        code = self._process.wait()
        self._kill_group()
        return code

    def _kill_group(self) -> None:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _contain(process: subprocess.Popen[bytes], memory_limit: int | None) -> contextlib.ExitStack:
    """Put ``process`` into a job object of Windows; closing the result ends all its children.

    Each of its processes gets at most ``memory_limit`` bytes of memory. The job also ends with this process.
    On other systems, and where Windows does not let it, the result does nothing.
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


_GRACE = 10.0
"""Seconds in which the server must end a worker, and itself. If it does not end one, it starts no more."""


class Fork(WorkerProcess):
    """A worker that ``server`` forks; raises OSError."""

    def __init__(self, server: ForkServer) -> None:
        if server.is_stuck:
            raise ChildProcessError("the server does not end its workers")
        self._server = server
        with contextlib.ExitStack() as stack:
            self._connection, workers_end = socket.socketpair()
            stack.callback(self._connection.close)
            with workers_end:
                socket.send_fds(server.control, [b"+"], [workers_end.fileno()])
            super().__init__(self._connection.makefile("wb"), self._connection.makefile("rb"))
            stack.pop_all()

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.kill()
        end = time.monotonic() + _GRACE
        # One that is not ready yet does nothing.
        with contextlib.suppress(ChildProcessError):
            while self._was_ready and not self._has_ended:
                if (left := end - time.monotonic()) <= 0:
                    self._server.is_stuck = True
                    break
                self.answer(b"", left)
        with self._connection, contextlib.suppress(OSError):
            # The thread that reads from it ends.
            self._connection.shutdown(socket.SHUT_RDWR)
            self._orders.close()

    def _exit_code(self) -> int:
        # The server sends it, so the server itself has ended, or could not start the worker.
        if not self._was_ready:
            raise ChildProcessError("the server has ended")
        return -signal.SIGKILL


class ForkServer:
    """The process that forks workers; closing it ends all of them.

    It loads the simulators of ``providers``. ``is_stuck``: it, or one of its workers, is suspended and does
    not end. It starts no more, and ends with the build: its other workers still run.
    """

    def __init__(self, providers: Iterable[str] = ()) -> None:
        self.is_stuck = False
        with contextlib.ExitStack() as stack:
            control, servers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(control.close)
            with servers_end:
                self._process = subprocess.Popen(
                    (
                        *(sys.executable, "-m", "hatch_epcontext.worker.fork_server"),
                        *(str(servers_end.fileno()), *providers),
                    ),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    # OpenBLAS would start threads, which forks lack. Workers multiply nothing large with it.
                    env={"OPENBLAS_NUM_THREADS": "1", **worker_environment()},
                    pass_fds=(servers_end.fileno(),),
                    # Ctrl-C goes to the build process only, which ends its workers itself.
                    start_new_session=True,
                    # Not in the project's folder: Python 3.10 would import its modules before all others.
                    cwd="/",
                )
            stack.pop_all()
        self.control = control

    def close(self) -> None:
        """End the server and all its workers, and wait for them."""
        self.control.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            # Suspended, or stuck in an import: its workers end with it.
            self._process.kill()
            self._process.wait()
