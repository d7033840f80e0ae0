"""The log of a worker, which can be huge, and why it failed: what its error, its end and its log say."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from hatch_epcontext.errors import (
    AccidentError,
    BuildError,
    CrashError,
    InterruptedBuildError,
    Key,
    Kind,
    LimitError,
    ModelError,
    Problem,
    RefusedError,
    Setting,
    UnavailableError,
    error_of_worker,
)
from hatch_epcontext.providers import is_benign, missing
from hatch_epcontext.serialize import from_json
from hatch_epcontext.system import full_disk_problem
from hatch_epcontext.text import narrow, printable, show_size
from hatch_epcontext.worker.protocol import ACTIVITY, FAILURE, LOG

LOG_LIMIT = 100 * 10**6
"""Bytes of a log above which its worker is stopped: more than ONNX Runtime's verbose log of a large model."""

TAIL = 40
"""The most lines of a worker's log that an error shows."""

_TAIL_BYTES = 64 << 10
"""Bytes at the end of a log that are searched for these lines."""

_MAX_LINE = 2000
"""The most characters that are shown of a line of a log."""

_COLOUR = r"\x1b\[[0-9;]*m"


class WorkerLog:
    """The log of a worker in ``folder``.

    ``listener``, if given, gets the lines that `forward` finds, each with the ``label``. It is a file and not
    a pipe, because a vendor's compiler may leave processes running that would keep a pipe open.
    """

    def __init__(
        self, folder: Path, label: str = "", listener: Callable[[str], None] | None = None
    ) -> None:
        self.folder, self.path = folder, folder / LOG
        self._label, self._listener = label, listener
        self._offset = 0

    @property
    def size(self) -> int:
        """Bytes of the file; 0 if there is none."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @property
    def last_activity(self) -> str:
        """What the worker did last and for how long, for the end of a sentence."""
        path = self.folder / ACTIVITY
        with contextlib.suppress(OSError):
            seconds = time.time() - path.stat().st_mtime
            if text := path.read_text("utf-8"):
                return f" while {text} (for {seconds:.0f} s)"
        return ""

    def forward(self, *, is_last: bool = False) -> None:
        """Pass the new lines to the listener; of an incomplete one what there is, if it ``is_last``."""
        if self._listener is None:
            return
        text = self._read(self._offset, LOG_LIMIT)
        text = text if is_last else text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        *lines, rest = narrow(text).split(b"\n")
        for line in (*lines, rest) if rest else lines:
            self._listener(f"{self._label} | {self._shown(line)}")

    def tail(self, *, only_errors: bool = False) -> str:
        """The last lines, as an error shows them.

        Without lines that clean runs print too; with ``only_errors`` only errors.
        """
        start = max(self.size - _TAIL_BYTES, 0)
        lines = narrow(self._read(start, _TAIL_BYTES)).rstrip().splitlines()
        return "\n".join(list(_relevant(map(self._shown, lines), only_errors=only_errors))[-TAIL:])

    def _read(self, offset: int, size: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                return file.read(size)
        except FileNotFoundError:
            return b""

    def _shown(self, line: bytes) -> str:
        text = line.decode("utf-8", "replace")[:_MAX_LINE]
        # ONNX Runtime writes colours even to a file.
        return printable(re.sub(_COLOUR, "", text).rstrip("\r"))


_ENTRY = r"\[([VIWEF]):onnxruntime"
"""The severity of an entry in ONNX Runtime's log; lines without one belong to the entry before them."""


def _relevant(lines: Iterable[str], *, only_errors: bool) -> Iterator[str]:
    kept = not only_errors
    for line in lines:
        if is_benign(line):
            continue
        if only_errors and (entry := re.search(_ENTRY, line)):
            kept = entry[1] in "EF"
        if kept:
            yield line


_NO_MEMORY = (
    r"(?i)bad_alloc|bad allocation|MemoryError|allocate memory|failed to allocate|out of memory|bfc_arena"
    r"|can't start new thread"
)
"""How Python, C++ and ONNX Runtime report a lack of memory."""

_MEMORY_LIMIT = Key() / "build" / "memory-limit"

_LESS_MEMORY = (
    "Run fewer jobs at once (build.jobs), or build on a machine with more memory (not tried)."
)

_CRASHES = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS"})
"""The signals of a process that crashes; all others come from outside."""

_WINDOWS_CRASHES = {
    0xC0000005: "access violation",
    0xC00000FD: "stack overflow",
    # Usually from abort(): the C library of Windows raises it.
    0xC0000409: "an abort, or a stack buffer overrun",
    0xC0000374: "heap corruption",
    0xC000001D: "illegal instruction",
}

_STOPPED = 0xC000013A
"""The exit code of a process on Windows that was ended by Ctrl-C, Ctrl-Break or the end of its console."""


def by_causes(error: BuildError, log: WorkerLog, memory_limit: int | None) -> BuildError:
    """``error``, with which a worker ended, by its causes."""
    causes = [_by_cause(error, problem, log, memory_limit) for problem in error.problems]
    accident = next((cause for cause in causes if isinstance(cause, AccidentError)), error)
    return type(accident)(*(problem for cause in causes for problem in cause.problems))


def _by_cause(
    error: BuildError, problem: Problem, log: WorkerLog, memory_limit: int | None
) -> BuildError:
    """The first of these causes: a lack of memory, a full disk, missing libraries of the EP, or the
    ``problem`` of ``error``.
    """
    has_log = not isinstance(error, ModelError)
    # What the worker finds wrong in a result can only be related to errors in its log.
    is_finding = not has_log or type(error) is RefusedError
    errors = log.tail(only_errors=True) if has_log else ""
    shown = errors if is_finding else log.tail()
    problem = replace(problem, log=shown or None)
    output = f"{problem.message}\n{shown}"
    # Without a limit a log may contain warnings about memory: only the log of a crash counts.
    counts_log = memory_limit or isinstance(error, CrashError)
    if re.search(_NO_MEMORY, output if counts_log else problem.message):
        return LimitError(_out_of_memory(problem, memory_limit))
    if problem.kind is Kind.SYSTEM_ERROR:
        return AccidentError(problem)
    if full := full_disk_problem(log.folder, problem.location, output):
        return AccidentError(replace(full, log=problem.log))
    # Many EPs only log that.
    if isinstance(error, RefusedError) and (lacking := missing(errors)):
        message = f"the EP cannot load its own libraries, because {lacking} is missing."
        where, hint = problem.location, lacking.advice
        return UnavailableError(Problem(Kind.UNLOADABLE_LIBRARY, where, message, hint, log=errors))
    if memory_limit:
        # Some EPs report a lack of memory only as a failure.
        size = show_size(memory_limit)
        cause = f"Or the worker had too little memory: {_MEMORY_LIMIT} is {size}."
        problem = replace(problem, causes=(cause, *problem.causes))
    return type(error)(problem)


def _out_of_memory(problem: Problem, memory_limit: int | None) -> Problem:
    what, advice = "ran out of memory", _LESS_MEMORY
    settings: tuple[Setting, ...] = ()
    if memory_limit:
        what = f"needs more memory than {_MEMORY_LIMIT} allows ({show_size(memory_limit)})"
        limit = Setting(_MEMORY_LIMIT, f"{-(-2 * memory_limit // 10**6)} MB")
        advice, settings = "Raise the limit, or remove it (not tried).", (limit,)
    return replace(
        problem,
        kind=Kind.OUT_OF_MEMORY,
        message=f"the worker {what}: {problem.message}",
        hint=advice,
        settings=settings,
    )


def too_slow(log: WorkerLog, timeout: float) -> BuildError:
    """The error of a worker that was stopped after ``timeout`` seconds."""
    limit = Setting(Key() / "build" / "timeout", round(2 * timeout, 3))
    hint = "Give it more time (not tried)."
    message = f"the worker was stopped after {timeout:g} seconds{log.last_activity}."
    tail = log.tail()
    return LimitError(Problem(Kind.WORKER_TIMEOUT, "", message, hint, settings=(limit,), log=tail))


def flooded(log: WorkerLog) -> BuildError:
    """The error of a worker that was stopped because of the size of its log."""
    message = f"the worker was stopped, because its log had more than {show_size(LOG_LIMIT)}."
    return CrashError(Problem(Kind.WORKER_CRASHED, "", message, log=log.tail()))


def not_started(error: OSError | RuntimeError) -> BuildError:
    """The error of a worker that the system does not start."""
    reason = (isinstance(error, OSError) and error.strerror) or "the system starts no process"
    hint = "Run fewer jobs at once (build.jobs), or allow more processes and files (ulimit -u, ulimit -n)."
    message = f"the worker cannot be started: {reason}."
    return AccidentError(Problem(Kind.SYSTEM_ERROR, "", message, hint))


def interrupted() -> BuildError:
    """The error of a worker that the build stopped."""
    return InterruptedBuildError(Problem(Kind.INTERRUPTED, "", "the build was interrupted."))


def failed(word: bytes, text: bytes, log: WorkerLog) -> BuildError:
    """The error for the last message of a worker; raises ValueError if it cannot be read."""
    # Imported here: a build that finds everything in the cache makes no requests.
    from hatch_epcontext.worker.requests import Failure

    if word == FAILURE:
        failure = from_json(text, Failure)
        return error_of_worker(failure.error, failure.problems)
    return ended(int(text), log.last_activity)


def ended(code: int, activity: str) -> BuildError:
    """The error of a worker that ended in this ``activity`` with exit code ``code`` and without a reply."""
    name, unsigned = _signal_name(code), code & 0xFFFFFFFF
    if name is not None and name not in _CRASHES:
        hint = "Something else ended it: build again."
        if name == "SIGKILL":
            hint = f"The system kills processes when memory is short. {_LESS_MEMORY}"
        message = f"the worker was killed with {name}{activity}."
        return AccidentError(Problem(Kind.WORKER_KILLED, "", message, hint))
    if unsigned == _STOPPED:
        message = f"the worker was stopped with Ctrl-C, or with its console{activity}."
        return AccidentError(Problem(Kind.WORKER_KILLED, "", message, "Build again."))
    how = f"ended with exit code {code} and without a reply"
    if name or unsigned in _WINDOWS_CRASHES:
        how = f"crashed with {name or f'{_WINDOWS_CRASHES[unsigned]} (0x{unsigned:08X})'}"
    hint = "The crash is in ONNX Runtime or in the execution provider's library: see the log."
    message = f"the worker {how}{activity}."
    return CrashError(Problem(Kind.WORKER_CRASHED, "", message, hint))


def _signal_name(code: int) -> str | None:
    """The name of the signal that ended a process with this exit code, if one did."""
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"the signal {-code}"
