"""Workers as forks of one process that has already imported what every worker needs.

A fresh interpreter needs about half a second for that, a fork some milliseconds. Only on Linux: the
frameworks of macOS do not survive a fork, and Windows has no forks.

The build process and the server (`hatch_epcontext.worker.fork_server`) share a socket. For each worker the
build process sends one end of a new connection over it. Through it the worker gets commands and sends the
code of each answer; the server sends the exit code when the worker and all its children have ended. Closing
the connection earlier ends the worker, so no worker outlives the build, however that ends. The server's own
parent, its supervisor, ends what the server leaves behind if it is killed.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from hatch_epcontext.jobs.processes.running import (
    PIECE,
    Messages,
    WorkerCommand,
    worker_environment,
)
from hatch_epcontext.worker.protocol import CRASHED, PRELOAD

_MODULE = "hatch_epcontext.worker.fork_server"

_GRACE, _BUSY = 10.0, 60.0
"""Seconds in which the server must end, and at most those in which it must end a worker: it may be importing
something. A server that does not end is killed, and one that does not end a worker starts no more.
"""


class NotStartedError(Exception):
    """The worker never started, or its server crashed, which leaves its fate unknown."""


def is_supported() -> bool:
    """Whether this system can start workers as forks."""
    return sys.platform == "linux"


class Fork:
    """A worker that the server forks; one thread waits for it."""

    def __init__(self, connection: socket.socket, server: ForkServer) -> None:
        self._connection = connection
        self._server = server
        self._messages = Messages()
        self._patience = _GRACE

    def send(self, command: WorkerCommand, seconds: float) -> None:
        self._messages.begin(command)
        # With a short timeout the build does not wait for long until the worker ends.
        self._patience = min(max(seconds, _GRACE), _BUSY)
        self._connection.settimeout(seconds)
        # The waiting thread notices that it has ended.
        with contextlib.suppress(OSError):
            self._connection.sendall(command.order)

    def wait(self, seconds: float) -> int | None:
        """Raises NotStartedError as `ForkServer.exit_code` does."""
        end = time.monotonic() + seconds
        while self._messages.exit_code is None:
            self._connection.settimeout(max(end - time.monotonic(), 0.001))
            try:
                piece = self._connection.recv(PIECE)
            except TimeoutError:
                return None
            except ConnectionResetError:
                # It ended before it read a command; what it sent before can still be read.
                continue
            except OSError:
                piece = b""
            if not piece:
                self._messages.exit_code = self._server.exit_code(self._messages.is_started)
            elif (code := self._messages.read(piece)) is not None:
                return code
        return self._messages.exit_code

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.kill()
        end = time.monotonic() + self._patience
        with contextlib.suppress(NotStartedError), contextlib.closing(self._connection):
            # It may answer before it ends.
            while self._messages.exit_code is None:
                if self.wait(end - time.monotonic()) is None:
                    self._server.give_up()
                    return
        self._server.left()


class ForkServer:
    """The process that forks workers; closing it ends all of them.

    With ``log`` it serves one worker: it imports nothing in advance, and Python's output at the start goes to
    that file. Without, it loads the simulators of ``providers``.
    """

    def __init__(self, log: Path | None = None, providers: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._is_for_one = log is not None
        self._is_stuck = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flags = [PRELOAD, *providers] if log is None else []
        with theirs, contextlib.ExitStack() as stack:
            closing = stack.enter_context(contextlib.ExitStack())
            closing.callback(ours.close)
            output = subprocess.DEVNULL if log is None else stack.enter_context(log.open("wb"))
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=worker_environment(),
                pass_fds=(theirs.fileno(),),
                # Ctrl-C goes to the build process only, which ends its workers itself.
                start_new_session=True,
                # Not in the project's folder: Python 3.10 would import its modules before all others.
                cwd="/",
            )
            closing.pop_all()
        self._control = ours

    def start(self) -> Fork:
        """Start a worker; raises NotStartedError when the server cannot, and OSError."""
        if self._is_stuck:
            raise NotStartedError
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                with self._lock:
                    socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            except OSError as error:
                if not self._is_for_one:
                    ours.close()
                    raise NotStartedError from error
        return Fork(ours, self)

    def exit_code(self, is_started: bool) -> int:
        """The exit code of a worker for which this server sent none, because the server itself has ended.

        Raises NotStartedError if the worker is not the cause: it never started, or the server crashed.
        """
        if self._is_for_one:
            self.close()
            code = -signal.SIGKILL if is_started else self._process.wait()
            if code:
                return code
            # It ended well, but could not fork.
            raise NotStartedError
        with contextlib.suppress(subprocess.TimeoutExpired):
            if is_started and self._process.wait(_GRACE) != CRASHED:
                return -signal.SIGKILL
        raise NotStartedError

    def left(self) -> None:
        """End the server if its only worker has ended."""
        if self._is_for_one:
            self.close()

    def give_up(self) -> None:
        """Wait no longer for the end of a worker: the server or that worker is suspended or stuck.

        A server of its own ends with it. Another one starts no more, and ends with the build: its other
        workers still run.
        """
        if self._is_for_one:
            self._process.terminate()
            self.close()
        else:
            self._is_stuck = True

    def close(self) -> None:
        """End the server and all its workers, and wait for them."""
        with self._lock:
            self._control.close()
            try:
                self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                # Suspended or stuck: its supervisor ends it and its workers.
                self._process.terminate()
                try:
                    self._process.wait(_GRACE)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
