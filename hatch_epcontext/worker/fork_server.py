"""``python -m hatch_epcontext.worker.fork_server FD [PROVIDER...]``: fork a worker for each connection.

`hatch_epcontext.jobs.processes.running` describes both sides.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NoReturn

from hatch_epcontext.files import temp_dir
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.worker.__main__ import serve
from hatch_epcontext.worker.protocol import ENDED, NO_TELEMETRY

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of Linux's ``prctl``: set the signal on the parent's death, and adopt orphans."""

_GRACE = 5.0
"""Seconds to wait for killed processes. One that waits for a broken disk may take longer."""

_ACTIONS = ("check", "prepare", "rewrite", "compile", "validate")
"""The actions of jobs."""


def preload(providers: Iterable[Provider] = ()) -> None:
    """Import and load what workers of ``providers`` need, and do once what each would repeat."""
    # Most of what is imported stays: collecting garbage meanwhile takes an eighth of the time.
    gc.disable()
    actions = (f"hatch_epcontext.worker.actions.{action}" for action in _ACTIONS)
    for name in ("numpy", "onnx", "onnxruntime", *actions):
        # A worker that needs it fails by itself, with its own message and log.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for provider in providers:
        _load_simulator(provider)
    # A session would start telemetry threads, which forks lack.
    if os.environ.get(NO_TELEMETRY, "").lower() not in ("0", "false"):
        with contextlib.suppress(Exception), temp_dir() as folder:
            from hatch_epcontext.worker.rehearsal import rehearse

            rehearse(folder)
    # The garbage collector of a fork must not copy shared memory.
    gc.freeze()
    gc.enable()


def _load_simulator(provider: Provider) -> None:
    """Load the simulator's libraries of ``provider``, a fifth of the time for a small model."""
    spec = importlib.util.find_spec(provider.plugin.module) if provider.plugin else None
    # On the vendor's own processors they are drivers, and may access the device.
    if spec is None or spec.origin is None or os.uname().machine != "x86_64":
        return
    for name in provider.simulator:
        # A worker that needs it fails by itself, with its own message and log.
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(Path(spec.origin).with_name(name)))


class _Server:
    """Forks a worker for each connection, and sends its exit code when it has ended.

    A living worker adopts its orphans. So orphans of the server are those of a worker that has ended, and
    are killed.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._workers: dict[int, socket.socket] = {}
        self._awake, self._wake = socket.socketpair()
        self._poll = select.poll()

    def serve(self) -> None:
        """Serve until the build process closes its end."""
        _adopt_orphans()
        for end in (self._awake, self._wake):
            end.setblocking(False)
        # A handler, so that the signal wakes `poll`.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for readable in (self._control, self._awake):
            self._poll.register(readable, select.POLLIN)
        is_needed = True
        while is_needed:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._awake.fileno():
                    self._awake.recv(4096)
                    self._reap()
                elif descriptor == self._control.fileno():
                    is_needed = self._accept()
                else:
                    self._kill_worker(descriptor)
        _kill_children()

    def _accept(self) -> bool:
        """Fork a worker for the next connection; False when the build process has closed its end."""
        message, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        # Without a descriptor, this process has too many open: the build process gets no answer.
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            try:
                worker = os.fork()
            except OSError:
                # Too many processes, or too little memory: the build process gets no answer.
                connection.close()
                continue
            if not worker:
                self._work(connection)
            self._workers[worker] = connection
            # The worker reads from it; here only the end of the build process's side matters.
            self._poll.register(connection, select.POLLRDHUP)
        return bool(message)

    def _work(self, connection: socket.socket) -> NoReturn:
        """Run as a worker."""
        code = 1
        try:
            _begin_worker()
            for inherited in (self._control, self._awake, self._wake, *self._workers.values()):
                inherited.close()
            code = serve(connection.makefile("rb"), connection.sendall)
        except BaseException:
            traceback.print_exc()
        finally:
            # Without the exit handlers of Python and libraries, which belong to the server: ONNX Runtime's
            # hang. Always, even if the log cannot be written.
            os._exit(code)

    def _kill_worker(self, descriptor: int) -> None:
        """Kill the worker that the build process no longer needs."""
        for worker, connection in self._workers.items():
            if connection.fileno() == descriptor:
                self._poll.unregister(connection)
                os.kill(worker, signal.SIGKILL)

    def _reap(self) -> None:
        """Send the exit codes of workers that have ended, after the end of all their children."""
        for worker, connection in list(self._workers.items()):
            ended, status = os.waitpid(worker, os.WNOHANG)
            if not ended:
                continue
            del self._workers[worker]
            _kill_children(keep=self._workers)
            with contextlib.suppress(KeyError):
                self._poll.unregister(connection)
            with connection, contextlib.suppress(OSError):
                # The worker may have ended in the middle of a line.
                code = os.waitstatus_to_exitcode(status)
                connection.sendall(b"\n%b %d\n" % (ENDED, code))


def _adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _begin_worker() -> None:
    """Make this fork a worker that ends with its parent, with default signal handlers."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Libraries may send signals to their group.
    os.setsid()
    _adopt_orphans()


def _kill_children(keep: Container[int] = ()) -> None:
    """Kill all children of this process except ``keep``, with their own children, which it adopts."""
    end = time.monotonic() + _GRACE
    # The list is complete only if no process ends while it is read.
    while time.monotonic() < end and (
        children := [child for child in {*_children(), *_children()} if child not in keep]
    ):
        for child in children:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
            # Not -1: `_reap` waits for those to keep.
            with contextlib.suppress(OSError):
                os.waitpid(child, os.WNOHANG)
        time.sleep(0.002)


def _children() -> list[int]:
    with contextlib.suppress(OSError):
        lists = [file.read_text("ascii") for file in Path("/proc/self/task").glob("*/children")]
        return list(map(int, " ".join(lists).split()))
    # Too many open files: its own end ends them.
    return []


def _main(descriptor: str, *providers: str) -> None:
    # Python 3.12 warns about threads, because a fork inherits their locks and never releases them. The only
    # thread here is one that ONNX Runtime starts on import: it sleeps until it gets work, and this process
    # gives it none. The rehearsal's sessions and their threads have ended.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    with socket.socket(fileno=int(descriptor)) as control:
        preload(map(PROVIDERS.__getitem__, providers))
        _Server(control).serve()


if __name__ == "__main__":
    _main(*sys.argv[1:])
    # Not through the exit handlers of libraries.
    os._exit(0)
