"""``python -m hatch_epcontext.worker.fork_server FD``: fork a worker for each order that comes over a socket.

`hatch_epcontext.ipc.fork_server` describes both sides.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import warnings
from types import FrameType
from typing import Any

from hatch_epcontext.ipc.fork_server import STARTED
from hatch_epcontext.ipc.protocol import REQUESTS
from hatch_epcontext.serialize import make_ready
from hatch_epcontext.worker.__main__ import main

_PRELOADED = (
    "numpy",
    "onnx",
    "onnxruntime",
    *(f"hatch_epcontext.worker.{name}" for name in ("check", "compile", "prepare", "validate")),
)

_PR_SET_PDEATHSIG = 1
"""Of Linux's ``prctl``: the signal that a process gets when its parent dies."""


def _preload() -> None:
    # OpenBLAS would start threads, which a fork does not have. Workers multiply nothing large with it.
    threads = "OPENBLAS_NUM_THREADS"
    own = threads not in os.environ
    os.environ.setdefault(threads, "1")
    for name in _PRELOADED:
        # A worker that needs it fails by itself, with its own message and log.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if own:
        del os.environ[threads]
    # Each fork would generate it again for its only request.
    for request in REQUESTS.values():
        make_ready(request)
    # The garbage collector of a fork must not copy what all share.
    gc.collect()
    gc.freeze()


class _Server:
    """Forks workers, and sends each exit code over the connection of its order."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, socket.socket] = {}
        self._awake, wake = socket.socketpair()
        for each in (self._awake, wake):
            each.setblocking(False)
        self._wake = wake

    def serve(self) -> None:
        """Work until the build process closes its end."""
        signal.signal(signal.SIGCHLD, _do_nothing)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for each in (self._control, self._awake):
            self._selector.register(each, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                found: Any = key.fileobj
                if found.fileno() < 0:
                    # Its worker has ended, and an earlier event of the same moment has closed it.
                    continue
                if found is self._awake:
                    self._awake.recv(4096)
                    self._reap()
                elif found is not self._control:
                    self._receive(found)
                elif not self._accept():
                    for process_id in self._running:
                        _kill(process_id)
                    return

    def _accept(self) -> bool:
        """Take the connection for the next order; False when the build process has closed its end."""
        message, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        # Without a descriptor this process has too many: the build process sees that nobody answers.
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            self._selector.register(connection, selectors.EVENT_READ)
        return bool(message)

    def _receive(self, connection: socket.socket) -> None:
        try:
            order = connection.recv(1 << 20)
        except OSError:
            order = b""
        known = {each: process_id for process_id, each in self._running.items()}
        if connection in known:
            self._selector.unregister(connection)
            _kill(known[connection])
        elif order:
            self._fork(json.loads(order), connection)
        else:
            self._selector.unregister(connection)
            connection.close()

    def _fork(self, order: dict[str, Any], connection: socket.socket) -> None:
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads, whose locks a fork inherits and nobody releases. There is one
            # here, which ONNX Runtime starts when it is imported: it sleeps until there is work for it,
            # and this process never gives it any.
            warnings.filterwarnings(
                "ignore", "This process .* is multi-threaded", DeprecationWarning
            )
            try:
                process_id = os.fork()
            except OSError:
                # Too many processes, or too little memory: the build process sees that nobody answers.
                self._selector.unregister(connection)
                connection.close()
                return
        if process_id:
            self._running[process_id] = connection
            with contextlib.suppress(OSError):
                connection.sendall(STARTED)
            return
        code = 1
        try:
            self._close(connection)
            _become_worker(order, parent)
            code = main(*order["arguments"])
        finally:
            _leave(code)

    def _close(self, connection: socket.socket) -> None:
        """Close in a fork what belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for each in (self._control, self._awake, self._wake, connection, *self._running.values()):
            each.close()

    def _reap(self) -> None:
        for process_id, connection in list(self._running.items()):
            # Not reaped yet: until then its number belongs to it, and its group can be ended safely.
            if os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _kill(process_id)
            _, status = os.waitpid(process_id, 0)
            del self._running[process_id]
            with contextlib.suppress(OSError):
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            connection.close()


def _become_worker(order: dict[str, Any], parent: int) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The server died before that.
        os._exit(1)
    os.chdir(order["folder"])
    log = os.open(order["log_path"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def _leave(code: int) -> None:
    """End a fork without what Python and libraries do at their end: it belongs to the server."""
    if sys.exc_info()[0] is not None:
        import traceback

        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


def _kill(process_id: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(process_id, signal.SIGKILL)


def _do_nothing(signal_number: int, frame: FrameType | None) -> None:
    """Let the signal wake the server up."""


if __name__ == "__main__":
    _preload()
    with socket.socket(fileno=int(sys.argv[1])) as _control:
        _Server(_control).serve()
