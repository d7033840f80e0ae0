"""``python -m hatch_epcontext.worker.fork_server FD``: fork a worker for each order that comes over a socket.

`hatch_epcontext.jobs.processes.fork_server` describes both sides.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

from hatch_epcontext.serialize import make_ready
from hatch_epcontext.worker.__main__ import main
from hatch_epcontext.worker.protocol import STARTED, own_variables
from hatch_epcontext.worker.requests import REQUESTS
from hatch_epcontext.worker.supervisor import (
    adopt_orphans,
    begin_worker,
    do_nothing,
    end_with_parent,
    exit_code,
    kill,
    kill_children,
    leave,
)

_PRELOADED = (
    "numpy",
    "onnx",
    "onnxruntime",
    *(
        f"hatch_epcontext.worker.actions.{name}"
        for name in ("check", "compile", "prepare", "validate")
    ),
)


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
    """Forks a worker for each order, and sends its exit code to the build.

    Workers adopt what they leave behind while they live. So orphans that come to the server are those of a
    worker that has ended: they end too.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._orders: set[socket.socket] = set()
        self._workers: dict[int, socket.socket] = {}
        self._awake, self._wake = socket.socketpair()
        for each in (self._awake, self._wake):
            each.setblocking(False)
        self._must_end = False

    def serve(self) -> None:
        """Work until the build process closes its end, or the supervisor has ended."""
        adopt_orphans()
        signal.signal(signal.SIGCHLD, do_nothing)
        signal.signal(signal.SIGTERM, self._end)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for each in (self._control, self._awake):
            self._selector.register(each, selectors.EVENT_READ)
        while not self._must_end:
            for key, _ in self._selector.select():
                found: Any = key.fileobj
                if found is self._awake:
                    self._awake.recv(4096)
                    self._reap()
                elif found is self._control:
                    self._must_end = not self._accept()
                elif found in self._orders:
                    self._receive(found)
                elif worker := self._worker_of(found):
                    # The build process does not want it any more.
                    self._selector.unregister(found)
                    kill(worker)
        for worker in self._workers:
            kill(worker)
        kill_children()

    def _worker_of(self, connection: socket.socket) -> int | None:
        """The worker that still runs for ``connection``."""
        found = (pid for pid, each in self._workers.items() if each is connection)
        return next(found, None)

    def _accept(self) -> bool:
        """Take the connection for the next order; False when the build process has closed its end."""
        message, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        # Without a descriptor this process has too many: the build process sees that nobody answers.
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            self._orders.add(connection)
            self._selector.register(connection, selectors.EVENT_READ)
        return bool(message)

    def _receive(self, connection: socket.socket) -> None:
        try:
            order = connection.recv(1 << 20)
        except OSError:
            order = b""
        self._orders.remove(connection)
        worker = self._fork(json.loads(order)) if order else None
        if worker is None:
            self._selector.unregister(connection)
            connection.close()
            return
        self._workers[worker] = connection
        with contextlib.suppress(OSError):
            connection.sendall(STARTED)

    def _fork(self, order: dict[str, Any]) -> int | None:
        server = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads, whose locks a fork inherits and nobody releases. There is one
            # here, which ONNX Runtime starts when it is imported: it sleeps until there is work for it,
            # and this process never gives it any.
            warnings.filterwarnings(
                "ignore", "This process .* is multi-threaded", DeprecationWarning
            )
            try:
                worker = os.fork()
            except OSError:
                # Too many processes, or too little memory: the build process sees that nobody answers.
                return None
        if not worker:
            leave(lambda: self._work(order, server))
        return worker

    def _work(self, order: dict[str, Any], server: int) -> int:
        """Be a worker."""
        begin_worker(server)
        adopt_orphans()
        self._selector.close()
        own = (self._control, self._awake, self._wake, *self._orders, *self._workers.values())
        for each in own:
            each.close()
        _become_worker(order)
        return main(*order["arguments"])

    def _reap(self) -> None:
        """Send the exit codes of workers that have ended, after the end of all that they started."""
        for worker, connection in list(self._workers.items()):
            if (code := exit_code(worker)) is None:
                continue
            del self._workers[worker]
            kill_children(keep=self._workers)
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            with connection, contextlib.suppress(OSError):
                connection.sendall(str(code).encode())

    def _end(self, signal_number: int, frame: FrameType | None) -> None:
        self._must_end = True


def _supervise(server: int) -> None:
    """End the server, and what it leaves behind, when it ends, or at SIGTERM."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: kill(server))
    os.waitpid(server, 0)
    kill_children()


def _become_worker(order: dict[str, Any]) -> None:
    os.chdir(order["folder"])
    os.environ.update(own_variables(Path(order["folder"])))
    # The server may have looked for it already.
    tempfile.tempdir = None
    log = os.open(order["log_path"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def _serve(descriptor: int, supervisor: int) -> int:
    end_with_parent(supervisor, signal.SIGTERM)
    with socket.socket(fileno=descriptor) as control:
        _preload()
        _Server(control).serve()
    return 0


if __name__ == "__main__":
    _descriptor, _supervisor = int(sys.argv[1]), os.getpid()
    # Before this process has threads, and much memory.
    _process = os.fork()
    if not _process:
        leave(lambda: _serve(_descriptor, _supervisor))
    os.close(_descriptor)
    _supervise(_process)
