"""Ends all that a worker started, also daemons (Linux).

The server that forks workers adopts what they leave behind, also processes with a session of their own, and
kills its children, then theirs, until it has none. Its own parent does so when the server ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Container
from pathlib import Path

from hatch_epcontext.worker.__main__ import flush

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
        flush()
    finally:
        # In any case, also when the log cannot be written: ONNX Runtime hangs at the usual end of a fork.
        os._exit(code)


def kill(process_id: int) -> None:
    """Kill a process, and its group if it leads one."""
    for each in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            each(process_id, signal.SIGKILL)


def supervise(server: int) -> None:
    """End the child ``server``, and what it leaves behind, when it ends, or at SIGTERM."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: kill(server))
    os.waitpid(server, 0)
    kill_children()
