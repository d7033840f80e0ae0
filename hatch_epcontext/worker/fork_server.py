"""``python -m hatch_epcontext.worker.fork_server FD [PRELOAD PROVIDER...]``: fork a worker for a connection.

`hatch_epcontext.jobs.processes.forks` describes both sides.
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
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from pathlib import Path

from hatch_epcontext.files import temp_dir
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.worker.__main__ import flush, serve
from hatch_epcontext.worker.protocol import CRASHED, ENDED, NO_TELEMETRY, STARTED

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of Linux's ``prctl``: set the signal on the parent's death, and adopt orphans."""

_GRACE = 5.0
"""Seconds to wait for killed processes. One that waits for a broken disk may take longer."""

_ACTIONS = "hatch_epcontext.worker.actions."

_FIRST = ("numpy", "onnx", f"{_ACTIONS}check")
"""The imports before the first worker, which reads the models."""

_NEXT = ("onnxruntime", *(_ACTIONS + name for name in ("compile", "prepare", "validate")))


def _preload(names: Iterable[str]) -> None:
    # OpenBLAS would start threads, which forks lack. Workers multiply nothing large with it.
    threads = "OPENBLAS_NUM_THREADS"
    own = threads not in os.environ
    os.environ.setdefault(threads, "1")
    for name in names:
        # A worker that needs it fails by itself, with its own message and log.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if own:
        del os.environ[threads]
    _freeze()


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


def _rehearse() -> None:
    """Prepare, compile and validate a small model on the CPU.

    Python and ONNX Runtime do much work once per process. Each fork would repeat it: half of the time for a
    small model.
    """
    if os.environ.get(NO_TELEMETRY, "").lower() in ("0", "false"):
        # A session would start telemetry threads, which forks lack.
        return
    with contextlib.suppress(Exception), temp_dir() as folder:
        import onnx.reference  # noqa: F401, slow to import, though few workers need it

        from hatch_epcontext.worker.rehearsal import rehearse

        rehearse(folder)
    _freeze()


def _freeze() -> None:
    # The garbage collector of a fork must not copy shared memory.
    gc.collect()
    gc.freeze()


class _Server:
    """Forks a worker for each connection, and sends its exit code when it has ended.

    A living worker adopts its orphans. So orphans of the server are those of a worker that has ended, and
    are killed.
    """

    def __init__(self, control: socket.socket, later: Iterable[Callable[[], None]]) -> None:
        self._control = control
        self._later = list(later)
        self._workers: dict[int, socket.socket] = {}
        self._awake, self._wake = socket.socketpair()
        for each in (self._awake, self._wake):
            each.setblocking(False)
        self._poll = select.poll()
        self._is_used = self._must_end = False

    def serve(self) -> None:
        """Serve until the build process closes its end, or the supervisor has ended."""
        _adopt_orphans()
        # A handler, so that the signal wakes `poll`.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for each in (self._control, self._awake):
            self._poll.register(each, select.POLLIN)
        while not self._must_end:
            # Import more while the first worker runs. Other workers wait, and share the imports; the end of a
            # worker or of the build waits for one import at most.
            has_work = bool(self._later and self._is_used)
            self._poll.modify(self._control, select.POLLRDHUP if has_work else select.POLLIN)
            for descriptor, _ in self._poll.poll(0 if has_work else None):
                if descriptor == self._awake.fileno():
                    self._awake.recv(4096)
                    self._reap()
                elif descriptor == self._control.fileno():
                    self._must_end = has_work or not self._accept()
                else:
                    self._kill_worker(descriptor)
            if has_work:
                self._later.pop(0)()
        for worker in self._workers:
            _kill(worker)
        _kill_children()

    def _accept(self) -> bool:
        """Fork a worker for the next connection; False when the build process has closed its end."""
        message, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        # Without a descriptor, this process has too many open: the build process gets no answer.
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            worker = self._fork(connection)
            if worker is None:
                connection.close()
                continue
            self._workers[worker] = connection
            # The worker reads from it; here only the end of the build process's side matters.
            self._poll.register(connection, select.POLLRDHUP)
            self._is_used = True
        return bool(message)

    def _fork(self, connection: socket.socket) -> int | None:
        server = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns about threads, because a fork inherits their locks and never releases them.
            # The only thread here is one that ONNX Runtime starts on import: it sleeps until it gets work,
            # and this process gives it none. The rehearsal's sessions and their threads have ended.
            warnings.filterwarnings(
                "ignore", "This process .* is multi-threaded", DeprecationWarning
            )
            try:
                worker = os.fork()
            except OSError:
                # Too many processes, or too little memory: the build process gets no answer.
                return None
        if not worker:
            _leave(lambda: self._work(connection, server))
        return worker

    def _work(self, connection: socket.socket, server: int) -> int:
        """Run as a worker."""
        _begin_worker(server)
        _adopt_orphans()
        for each in (self._control, self._awake, self._wake, *self._workers.values()):
            each.close()
        connection.sendall(STARTED + b"\n")
        return serve(connection.makefile("rb"), connection.sendall)

    def _kill_worker(self, descriptor: int) -> None:
        """Kill the worker that the build process no longer needs."""
        for worker, connection in self._workers.items():
            if connection.fileno() == descriptor:
                self._poll.unregister(connection)
                _kill(worker)

    def _reap(self) -> None:
        """Send the exit codes of workers that have ended, after the end of all their children."""
        for worker, connection in list(self._workers.items()):
            if (code := _exit_code(worker)) is None:
                continue
            del self._workers[worker]
            _kill_children(keep=self._workers)
            with contextlib.suppress(KeyError):
                self._poll.unregister(connection)
            with connection, contextlib.suppress(OSError):
                # The worker may have ended in the middle of a line.
                connection.sendall(b"\n%b %d\n" % (ENDED, code))

    def _end(self, *_: object) -> None:
        self._must_end = True


def _serve(descriptor: int, supervisor: int, flags: Sequence[str]) -> int:
    _end_with_parent(supervisor, signal.SIGTERM)
    later: list[Callable[[], None]] = []
    with socket.socket(fileno=descriptor) as control:
        if flags:
            _preload(_FIRST)
            named = (PROVIDERS[name] for name in flags[1:])
            simulators = (partial(_load_simulator, each) for each in named)
            later = [*(partial(_preload, [name]) for name in _NEXT), *simulators, _rehearse]
        _Server(control, later).serve()
    return 0


def _adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_with_parent(parent: int, by: signal.Signals) -> None:
    """Let the death of ``parent``, the parent of this process, send this process the signal."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        # It died before the call.
        os._exit(1)


def _begin_worker(parent: int) -> None:
    """Make this fork of ``parent`` a worker, with default signal handlers, that ends with ``parent``."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # A group of its own, so that its children can be ended with it.
    os.setsid()
    _end_with_parent(parent, signal.SIGKILL)


def _exit_code(worker: int) -> int | None:
    """The exit code of a child, negative for a signal, after the end of its group; None if it still runs."""
    # It is not reaped yet: until then its process id is its own, and its group can be ended safely.
    if os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return None
    _kill(worker)
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def _kill_children(keep: Container[int] = ()) -> None:
    """Kill all children of this process except ``keep``, with their own children."""
    end = time.monotonic() + _GRACE
    while _has_children() and time.monotonic() < end:
        # The list is complete only if no process ends while it is read.
        found = [child for child in {*_children(), *_children()} if child not in keep]
        if not found:
            return
        for child in found:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        for child in found:
            # Not -1: other code waits for those to keep.
            with contextlib.suppress(OSError):
                os.waitpid(child, os.WNOHANG)
        time.sleep(0.002)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children() -> list[int]:
    own = os.getpid()
    with contextlib.suppress(OSError):
        # One file for each thread, instead of scanning all processes of the system.
        lists = [each.read_text("ascii") for each in Path("/proc/self/task").glob("*/children")]
        if lists:
            return [int(number) for number in " ".join(lists).split()]
    try:
        names = [each.name for each in Path("/proc").iterdir()]
    except OSError:
        # Too many open files: its own end ends them.
        return []
    return [int(name) for name in names if name.isdigit() and _parent(name) == own]


def _parent(process: str) -> int | None:
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
        # The name before the last parenthesis can contain any characters.
        return int(status.rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def _leave(work: Callable[[], int]) -> None:
    """Run ``work``, and end this fork without the exit handlers of Python and libraries: these belong to the
    forked process.
    """
    code = 1
    try:
        try:
            code = work()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        flush()
    finally:
        # Always, even if the log cannot be written: ONNX Runtime hangs at the normal exit of a fork.
        os._exit(code)


def _kill(process_id: int) -> None:
    """Kill a process, and its group if it leads one."""
    for each in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            each(process_id, signal.SIGKILL)


def _supervise(server: int) -> int:
    """Wait until the child ``server`` ends, or for SIGTERM; then kill it and everything that it leaves.

    Returns the exit code of this process.
    """
    _adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: _kill(server))
    _, status = os.waitpid(server, 0)
    _kill_children()
    return CRASHED if os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL) else 0


if __name__ == "__main__":
    _descriptor, _supervisor = int(sys.argv[1]), os.getpid()
    # Before this process has threads and much memory.
    try:
        _process = os.fork()
    except OSError:
        # The build process notices that no worker has started.
        sys.exit(0)
    if not _process:
        _leave(lambda: _serve(_descriptor, _supervisor, sys.argv[2:]))
    os.close(_descriptor)
    sys.exit(_supervise(_process))
