"""Ends all that a worker started, also daemons (Linux).

Who has started workers adopts what they leave behind, also processes with a session of their own, and kills
its children, then theirs, until it has none. The server of forks does that itself. A worker that is a fresh
interpreter has a supervisor of its own, which does so when the worker has ended in any way, when the build
process closes its end of a connection, and when the process that has started the supervisor dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Container
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""Of Linux's ``prctl``: the signal that a process gets when its parent dies, and to adopt orphans."""

_GRACE = 5.0
"""Seconds in which killed processes must end. One that waits for a broken disk may take longer."""


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int, by: signal.Signals) -> None:
    """Let the death of the process ``parent``, which is that of this one, send this one the signal."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        # It died before that.
        os._exit(1)


def begin_worker(parent: int) -> None:
    """Make this fork of the process ``parent`` a worker: with signals of its own, it ends with ``parent``."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # A group of its own, so that what it starts can be ended with it at once.
    os.setsid()
    end_with_parent(parent, signal.SIGKILL)


def exit_code(worker: int) -> int | None:
    """The exit code of a child, negative for a signal, after the end of its group; None if it still runs."""
    # Not reaped yet: until then its number belongs to it, and its group can be ended safely.
    if os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return None
    kill(worker)
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def kill_children(keep: Container[int] = ()) -> None:
    """End all children of this process except those to ``keep``, with all that they started."""
    end = time.monotonic() + _GRACE
    while _has_children() and time.monotonic() < end:
        # A list is only complete when nobody ends while it is read.
        found = [child for child in {*_children(), *_children()} if child not in keep]
        if not found:
            return
        for child in found:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        for child in found:
            # Not -1: nobody else must wait for those to keep.
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
        # One file for each thread, without a look at all processes of the system.
        lists = [each.read_text("ascii") for each in Path("/proc/self/task").glob("*/children")]
        if lists:
            return [int(number) for number in " ".join(lists).split()]
    names = (each.name for each in Path("/proc").iterdir())
    return [int(name) for name in names if name.isdigit() and _parent(name) == own]


def _parent(process: str) -> int | None:
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
        # The name before the last parenthesis can have any characters.
        return int(status.rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


class Supervisor:
    """Runs one worker; ``connection`` is a descriptor that becomes readable when the worker must end."""

    def __init__(self, connection: int) -> None:
        self._connection = connection
        self._awake, self._wake = socket.socketpair()
        for each in (self._awake, self._wake):
            each.setblocking(False)
        self._must_end = False

    def run(self, work: Callable[[], int], started: Callable[[], None]) -> int:
        """The exit code of a fork that runs ``work``, negative for a signal.

        ``started`` is called when it was forked. Raises OSError when that is impossible.
        """
        adopt_orphans()
        signal.signal(signal.SIGCHLD, do_nothing)
        signal.signal(signal.SIGTERM, self._end)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        supervisor = os.getpid()
        worker = os.fork()
        if not worker:
            leave(lambda: self._be_worker(supervisor, work))
        started()
        code = self._wait(worker)
        kill_children()
        return code

    def _be_worker(self, supervisor: int, work: Callable[[], int]) -> int:
        begin_worker(supervisor)
        for each in (self._awake, self._wake):
            each.close()
        return work()

    def _wait(self, worker: int) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            selector.register(self._awake, selectors.EVENT_READ)
            while (code := exit_code(worker)) is None:
                for key, _ in selector.select():
                    if key.fileobj is self._awake:
                        self._awake.recv(4096)
                    else:
                        self._must_end = True
                        selector.unregister(self._connection)
                if self._must_end:
                    kill(worker)
        return code

    def _end(self, signal_number: int, frame: FrameType | None) -> None:
        self._must_end = True


def leave(work: Callable[[], int]) -> None:
    """Run ``work``, and end this fork without what Python and libraries do at their end: it belongs to
    the process that was forked.
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
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        ctypes.CDLL(None).fflush(None)
    finally:
        # In any case, also when the log cannot be written: ONNX Runtime hangs at the usual end of a fork.
        os._exit(code)


def kill(process_id: int) -> None:
    """Kill a process, and its group if it leads one."""
    for each in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            each(process_id, signal.SIGKILL)


def do_nothing(signal_number: int, frame: FrameType | None) -> None:
    """Let the signal wake a `select`."""
