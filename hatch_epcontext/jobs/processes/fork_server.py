"""Workers as forks of one process that has imported already what every worker needs.

A fresh interpreter needs about half a second for that, a fork some milliseconds. Only on Linux: the
frameworks of macOS do not survive a fork, and Windows has none.

The build process and the server (`hatch_epcontext.worker.fork_server`) share a socket. For each worker
the build process sends one end of a new connection over it, and on that the order as JSON; the answer is
the exit code, which comes when all has ended that the worker started. A connection that is closed before
ends its worker, so no worker outlives the build, however that ends. The server's own parent, its supervisor,
ends what the server leaves behind if it is killed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time

from hatch_epcontext.jobs.processes.running import WorkerCommand, worker_environment
from hatch_epcontext.worker.protocol import STARTED

_GRACE = 10.0
"""Seconds in which the server must end a worker. Then it is killed itself, and its workers end with it."""


class ServerGoneError(Exception):
    """The server has ended, and did not start the worker."""


def is_supported() -> bool:
    """Whether this system can start workers as forks."""
    return sys.platform == "linux"


class Fork:
    """A worker that the server forked; one thread waits for it."""

    def __init__(self, connection: socket.socket, server: ForkServer) -> None:
        self._connection = connection
        self._server = server
        self._started = self._ended = False
        self._code = -signal.SIGKILL

    def wait(self, seconds: float) -> int | None:
        """The exit code, negative for a signal; None if it still runs after ``seconds``.

        Raises ServerGoneError if it was never started.
        """
        end = time.monotonic() + seconds
        while not self._ended:
            self._connection.settimeout(max(end - time.monotonic(), 0.001))
            try:
                answer = self._connection.recv(64)
            except TimeoutError:
                return None
            except OSError:
                answer = b""
            if answer == STARTED:
                self._started = True
                continue
            self._ended = True
            if answer:
                self._code = int(answer)
            elif not self._started:
                raise ServerGoneError
        return self._code

    def kill(self) -> None:
        """Begin to end it, with all processes that it started. It may have ended already."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Return when it has ended, after `kill` if it still runs."""
        with contextlib.suppress(ServerGoneError), contextlib.closing(self._connection):
            self.kill()
            if self.wait(_GRACE) is None:
                self._server.kill()


class ForkServer:
    """The process that forks workers; closing it ends all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "hatch_epcontext.worker.fork_server", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=worker_environment(),
                pass_fds=(theirs.fileno(),),
                # Ctrl-C is for the build process, which ends its workers itself.
                start_new_session=True,
                # Not the project's folder: Python 3.10 would find its modules before all others.
                cwd="/",
            )
        self._control = ours

    def start(self, order: WorkerCommand) -> Fork:
        """Start a worker; raises ServerGoneError when the server cannot."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                with self._lock:
                    socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                ours.sendall(_plain(order).encode())
            except OSError as error:
                ours.close()
                raise ServerGoneError from error
        return Fork(ours, self)

    def kill(self) -> None:
        """End the server at once, and all its workers with it: it is stopped, or stuck."""
        self._process.terminate()
        self.close()

    def close(self) -> None:
        """End the server and all its workers, and wait for that."""
        with self._lock:
            self._control.close()
            try:
                self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                # Stopped, or stuck: its supervisor ends it, and its workers with it.
                self._process.terminate()
                try:
                    self._process.wait(_GRACE)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()


def _plain(order: WorkerCommand) -> str:
    return json.dumps(
        {
            "arguments": order.arguments,
            "folder": str(order.folder),
            "log_path": str(order.log_path),
        }
    )
