"""``python -m hatch_epcontext.worker.fork_server FD [PRELOAD]``: fork a worker for each connection.

`hatch_epcontext.jobs.processes.fork_server` describes both sides.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import warnings

from hatch_epcontext.files import temp_dir
from hatch_epcontext.worker.__main__ import serve
from hatch_epcontext.worker.protocol import ANSWERED, NO_TELEMETRY, PRELOAD, STARTED
from hatch_epcontext.worker.supervisor import (
    adopt_orphans,
    begin_worker,
    end_with_parent,
    exit_code,
    kill,
    kill_children,
    leave,
    supervise,
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
    _freeze()


def _rehearse() -> None:
    """Prepare, compile and validate a small model on the CPU.

    Python and ONNX Runtime do much only the first time, which each fork would do again: half of the time
    that a small model takes.
    """
    if os.environ.get(NO_TELEMETRY, "").lower() in ("0", "false"):
        # A session would start what sends events, and forks would not have its threads.
        return
    with contextlib.suppress(Exception), temp_dir() as folder:
        from hatch_epcontext.worker.rehearsal import rehearse

        rehearse(folder)
    _freeze()


def _freeze() -> None:
    # The garbage collector of a fork must not copy what all share.
    gc.collect()
    gc.freeze()


class _Server:
    """Forks a worker for each connection, and sends its exit code when it has ended.

    Workers adopt what they leave behind while they live. So orphans that come to the server are those of a
    worker that has ended: they end too.
    """

    def __init__(self, control: socket.socket, *, rehearses: bool) -> None:
        self._control = control
        self._must_rehearse = rehearses
        self._workers: dict[int, socket.socket] = {}
        self._awake, self._wake = socket.socketpair()
        for each in (self._awake, self._wake):
            each.setblocking(False)
        self._poll = select.poll()
        self._must_end = False

    def serve(self) -> None:
        """Work until the build process closes its end, or the supervisor has ended."""
        adopt_orphans()
        # A handler, so that the signal wakes `poll`.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for each in (self._control, self._awake):
            self._poll.register(each, select.POLLIN)
        while not self._must_end:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._awake.fileno():
                    self._awake.recv(4096)
                    self._reap()
                elif descriptor == self._control.fileno():
                    if not self._accept():
                        self._must_end = True
                else:
                    self._kill(descriptor)
        for worker in self._workers:
            kill(worker)
        kill_children()

    def _accept(self) -> bool:
        """Fork a worker for the next connection; False when the build process has closed its end."""
        message, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        # Without a descriptor this process has too many: the build process sees that nobody answers.
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            worker = self._fork(connection)
            if worker is None:
                connection.close()
                continue
            self._workers[worker] = connection
            # The worker reads it; here only the end of the build process's side counts.
            self._poll.register(connection, select.POLLRDHUP)
        if self._must_rehearse and self._workers:
            # Now, when the build waits for its first worker.
            self._must_rehearse = False
            _rehearse()
        return bool(message)

    def _fork(self, connection: socket.socket) -> int | None:
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
            leave(lambda: self._work(connection, server))
        return worker

    def _work(self, connection: socket.socket, server: int) -> int:
        """Be a worker."""
        begin_worker(server)
        adopt_orphans()
        for each in (self._control, self._awake, self._wake, *self._workers.values()):
            each.close()
        connection.sendall(STARTED)
        orders = iter(lambda: connection.recv(1 << 20), b"")
        return serve(orders, lambda code: connection.sendall(ANSWERED + str(code).encode()))

    def _kill(self, descriptor: int) -> None:
        """Kill the worker that the build process does not want any more."""
        for worker, connection in self._workers.items():
            if connection.fileno() == descriptor:
                self._poll.unregister(connection)
                kill(worker)

    def _reap(self) -> None:
        """Send the exit codes of workers that have ended, after the end of all that they started."""
        for worker, connection in list(self._workers.items()):
            if (code := exit_code(worker)) is None:
                continue
            del self._workers[worker]
            kill_children(keep=self._workers)
            with contextlib.suppress(KeyError):
                self._poll.unregister(connection)
            with connection, contextlib.suppress(OSError):
                connection.sendall(str(code).encode())

    def _end(self, *_: object) -> None:
        self._must_end = True


def _serve(descriptor: int, supervisor: int, *, preload: bool) -> int:
    end_with_parent(supervisor, signal.SIGTERM)
    with socket.socket(fileno=descriptor) as control:
        if preload:
            _preload()
        _Server(control, rehearses=preload).serve()
    return 0


if __name__ == "__main__":
    _descriptor, _supervisor = int(sys.argv[1]), os.getpid()
    # Before this process has threads, and much memory.
    _process = os.fork()
    if not _process:
        leave(lambda: _serve(_descriptor, _supervisor, preload=PRELOAD in sys.argv))
    os.close(_descriptor)
    supervise(_process)
