"""Workers as forks of one process that has already imported what every worker needs.

A fresh interpreter needs about half a second for that, a fork some milliseconds. Only on Linux: the
frameworks of macOS do not survive a fork, and Windows has no forks.

The build process and the server (`hatch_epcontext.worker.fork_server`) share a socket. For each worker the
build process sends one end of a new connection over it, through which the worker gets its requests; the
server sends the exit code when the worker and all its children have ended. Closing the connection earlier
ends the worker, so no worker outlives the build, however that ends.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable

from hatch_epcontext.jobs.processes.running import (
    NotStartedError,
    WorkerProcess,
    worker_environment,
)

_GRACE = 10.0
"""Seconds in which the server must end a worker, and itself. If it does not end one, it starts no more."""


def is_supported() -> bool:
    """Whether this system can start workers as forks."""
    return sys.platform == "linux"


class Fork(WorkerProcess):
    """A worker that ``server`` forks; raises OSError, and NotStartedError when the server cannot."""

    def __init__(self, server: ForkServer) -> None:
        if server.is_stuck:
            raise NotStartedError
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
        with contextlib.suppress(NotStartedError):
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
            raise NotStartedError
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
