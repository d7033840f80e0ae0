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
from typing import Any

from hatch_epcontext.serialize import make_ready
from hatch_epcontext.worker.__main__ import main
from hatch_epcontext.worker.keeper import (
    Keeper,
    adopt_orphans,
    do_nothing,
    end_with_parent,
    kill_children,
    leave,
)
from hatch_epcontext.worker.protocol import STARTED, own_variables
from hatch_epcontext.worker.requests import REQUESTS

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
    """Forks a keeper for each order, which forks the worker, and sends its exit code to the build."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._orders: set[socket.socket] = set()
        self._keepers: set[int] = set()
        self._awake, wake = socket.socketpair()
        for each in (self._awake, wake):
            each.setblocking(False)
        self._wake = wake

    def serve(self) -> None:
        """Work until the build process closes its end."""
        # A keeper that is killed leaves its worker's processes to this one.
        adopt_orphans()
        signal.signal(signal.SIGCHLD, do_nothing)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for each in (self._control, self._awake):
            self._selector.register(each, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                found: Any = key.fileobj
                if found is self._awake:
                    self._awake.recv(4096)
                    self._reap()
                elif found is not self._control:
                    self._receive(found)
                elif not self._accept():
                    self._end()
                    return

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
        self._selector.unregister(connection)
        self._orders.remove(connection)
        # The keeper has the connection from now on.
        with connection:
            if order:
                self._fork(json.loads(order), connection)

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
                keeper = os.fork()
            except OSError:
                # Too many processes, or too little memory: the build process sees that nobody answers.
                return
            if keeper:
                self._keepers.add(keeper)
                return
            leave(lambda: self._keep(order, connection, parent))

    def _keep(self, order: dict[str, Any], connection: socket.socket, server: int) -> int:
        """Be the keeper of a worker."""
        end_with_parent(server, signal.SIGTERM)
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for each in (self._control, self._awake, self._wake, *self._orders):
            each.close()
        keeper = Keeper(connection.fileno())

        def work() -> int:
            connection.close()
            _become_worker(order)
            return main(*order["arguments"])

        def started() -> None:
            with contextlib.suppress(OSError):
                connection.sendall(STARTED)

        code = keeper.run(work, started)
        with contextlib.suppress(OSError):
            connection.sendall(str(code).encode())
        return 0

    def _reap(self) -> None:
        for keeper in list(self._keepers):
            process_id, status = os.waitpid(keeper, os.WNOHANG)
            if process_id:
                self._keepers.remove(keeper)
                if status:
                    kill_children(keep=self._keepers)

    def _end(self) -> None:
        """End all workers, and wait for their keepers."""
        for keeper in self._keepers:
            os.kill(keeper, signal.SIGTERM)
        for keeper in self._keepers:
            os.waitpid(keeper, 0)


def _become_worker(order: dict[str, Any]) -> None:
    os.chdir(order["folder"])
    os.environ.update(own_variables(Path(order["folder"])))
    # The server may have looked for it already.
    tempfile.tempdir = None
    log = os.open(order["log_path"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


if __name__ == "__main__":
    _preload()
    with socket.socket(fileno=int(sys.argv[1])) as _control:
        _Server(_control).serve()
