"""Calls workers in processes of their own, because a vendor's compiler may crash, hang or print."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_epcontext.config.environ import PREFIX
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
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.processes.forks import ForkServer, NotStartedError, is_supported
from hatch_epcontext.jobs.processes.running import Interpreter, WorkerCommand, WorkerProcess
from hatch_epcontext.jobs.processes.worker_log import LOG_LIMIT
from hatch_epcontext.providers import Provider, missing, variables_in
from hatch_epcontext.serialize import from_json, to_json
from hatch_epcontext.system import full_disk_problem, removed_problem, writing
from hatch_epcontext.text import hide_values, show_size
from hatch_epcontext.worker.protocol import DONE, FAILED, MEMORY_LIMIT, TEMPORARY, VERBOSE

if TYPE_CHECKING:
    from hatch_epcontext.worker.requests import ReplyT, WorkerRequest

_FIRST_BEAT, _NEXT_BEATS = 10.0, 30.0
"""Seconds until a running worker is reported, and between further reports."""

_POLL_SECONDS = 0.2
"""Seconds between checks of a worker and its log."""

_NO_MEMORY = re.compile(
    r"bad_alloc|bad allocation|MemoryError|allocate memory|failed to allocate|out of memory|bfc_arena"
    r"|can't start new thread",
    re.IGNORECASE,
)
"""How Python, C++ and ONNX Runtime report a lack of memory."""

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


class Heartbeat:
    """When to report that something still runs: after ten seconds, then every thirty without a line.

    Threads may use it at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._next = self._start + _FIRST_BEAT

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def due(self) -> bool:
        """Whether a report is due; after True, not until the next one."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                return False
            self._next = now + _NEXT_BEATS
            return True

    def mark_reported(self) -> None:
        """Restart the interval, because a line was printed."""
        with self._lock:
            self._next = time.monotonic() + _NEXT_BEATS


class _Processes:
    """The running processes of all threads, and the server that forks them, if there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[WorkerProcess] = set()
        self._server: ForkServer | None = None
        self._shares = False
        self.simulated: tuple[str, ...] = ()
        self.stopped = False

    def enter(self) -> None:
        """Let workers share a server that has imported what they need, where the system has forks."""
        self._shares = is_supported()

    def exit(self) -> None:
        """Let each worker import what it needs again."""
        with self._lock:
            self._shares = False
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def start(self, log_path: Path, memory_limit: int | None, *, alone: bool) -> WorkerProcess:
        """Start a process, whose first output goes to ``log_path``; ``alone``: it imports everything itself.

        Raises BuildError after `stop`, and NotStartedError if the system refuses it.
        """
        with self._lock:
            if self.stopped:
                raise _interrupted()
            try:
                process = self._start(log_path, memory_limit, alone=alone)
            except OSError as error:
                raise NotStartedError from error
            self._running.add(process)
            return process

    def end(self, process: WorkerProcess) -> None:
        """Kill ``process`` if it still runs, and return when it has ended."""
        process.close()
        with self._lock:
            self._running.discard(process)

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for process in self._running:
                process.kill()

    def _start(self, log_path: Path, memory_limit: int | None, *, alone: bool) -> WorkerProcess:
        if not is_supported():
            return Interpreter(log_path, memory_limit)
        if alone or not self._shares:
            return ForkServer(log_path).start()
        if self._server is None:
            self._server = ForkServer(providers=self.simulated)
        return self._server.start()


@dataclass(frozen=True)
class Workers:
    """How workers run.

    ``timeout``: seconds for each. ``log``, if given, gets each request and every line that a worker
    prints while it runs; ``progress`` gets a line from time to time while a worker runs. With ``verbose``
    ONNX Runtime prints more than its warnings. ``memory_limit``: bytes of memory for each.
    ``pulse``, if given: when ``progress`` gets a line although no single worker runs for long.

    As a context manager it starts one process that has imported what workers need, where the system can
    fork it; otherwise each worker is a fresh interpreter.
    """

    timeout: float
    log: Callable[[str], None] | None = None
    verbose: bool = False
    memory_limit: int | None = None
    progress: Callable[[str], None] | None = None
    pulse: Heartbeat | None = None
    _processes: _Processes = field(default_factory=_Processes)

    def __enter__(self) -> Workers:
        self._processes.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.exit()

    def expect(self, providers: Iterable[Provider]) -> None:
        """Name the ``providers`` that workers will compile for, before the first worker starts."""
        names = {each.name for each in providers if each.simulator}
        self._processes.simulated = tuple(sorted(names))

    def call(
        self,
        request: WorkerRequest[ReplyT],
        folder: Path,
        *,
        location: str,
        step: str | None = None,
    ) -> ReplyT:
        """The reply of a worker of its own to ``request``; see `Worker.call`."""
        with self.process() as worker:
            return worker.call(request, folder, location=location, step=step)

    @contextlib.contextmanager
    def process(self) -> Iterator[Worker]:
        """A worker for several requests, which ends with the context."""
        worker = Worker(self, self._processes)
        try:
            yield worker
        finally:
            # After an error, such as an interruption, nothing needs its reply.
            worker.close()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._processes.stopped

    def stop(self) -> None:
        """Kill all running workers, and start no more: each call then raises BuildError."""
        self._processes.stop()


class Worker:
    """A process that answers the requests of one thread, one after the other; it starts with the first."""

    def __init__(self, workers: Workers, processes: _Processes) -> None:
        self._workers = workers
        self._processes = processes
        self._process: WorkerProcess | None = None
        self._orders: list[WorkerCommand] = []

    def close(self) -> None:
        """Return when it has ended, with all its children."""
        self._end()
        for order in self._orders:
            # The log is complete, and stays until the end of the build.
            order.log.hide_secrets()
        self._orders.clear()

    def call(
        self,
        request: WorkerRequest[ReplyT],
        folder: Path,
        *,
        location: str,
        step: str | None = None,
    ) -> ReplyT:
        """The worker's reply to ``request``.

        ``folder``, which is created, is the worker's working directory and gets its log. ``location`` labels
        the log, and problems without a location. With the ``step`` of a job (empty for compiling) problems
        get only the step: the job's runner sets their location. Raises what the worker raised, CrashError
        when it crashes, LimitError when it takes too long or too much memory, and AccidentError when it is
        killed or the system refuses something.
        """
        try:
            return self._call(request, folder, f"{location}: {step}" if step else location)
        except BuildError as error:
            own = location if step is None else ""
            raise error.located(own, step=step or "") from error

    def _call(self, request: WorkerRequest[ReplyT], folder: Path, location: str) -> ReplyT:
        # Imported here: a build that finds everything in the cache makes no requests.
        from hatch_epcontext.worker.requests import Failure

        text, memory_limit = to_json(request, indent=None), self._workers.memory_limit
        secrets = _secrets(text)
        flags = [f"{MEMORY_LIMIT}{memory_limit}"] if memory_limit else []
        # ONNX Runtime's verbose log has the values of all options.
        flags += [VERBOSE] if self._workers.verbose and not secrets else []
        log, start = self._workers.log, time.monotonic()
        listener = None if log is None else lambda line: log(f"{location} | {line}")
        order = WorkerCommand(request.action, text, folder, flags, secrets, listener)
        with writing("a folder for a worker", folder):
            (folder / TEMPORARY).mkdir(parents=True)
            order.log.path.touch()
        self._orders.append(order)
        if log is not None:
            log(f"{location}: {order.action} ...")
        code = None
        try:
            code = self._run(order, location)
        finally:
            if code != DONE or order.reply is None:
                self._end()
            order.log.forward(is_last=True)
            if log is not None:
                log(f"{location}: {order.action} took {time.monotonic() - start:.1f} s")
        if self._processes.stopped:
            raise _interrupted()
        if not order.log.path.is_file():
            raise AccidentError(removed_problem(folder, ""))
        if code is None:
            raise LimitError(_too_slow(order, self._workers.timeout))
        reply = order.reply if code in (DONE, FAILED) else None
        try:
            if reply is None:
                error = _ended(code, order.last_step)
            elif code == DONE:
                reply_type: type[ReplyT] = request.reply_type
                return from_json(reply, reply_type)
            else:
                failure = from_json(reply, Failure)
                error = error_of_worker(failure.error, failure.problems)
        except ValueError as invalid:
            message = f"the worker's reply cannot be read: {invalid}."
            error = CrashError(Problem(Kind.WORKER_CRASHED, "", message))
        raise _explained(error, order, memory_limit)

    def _run(self, order: WorkerCommand, location: str) -> int | None:
        """The code of the answer, or the exit code; None after the timeout."""
        try:
            return self._run_once(order, location)
        except NotStartedError:
            # For example, an import in the server crashes: the log of a worker of its own shows more. Others
            # stay with the server.
            self._end()
        try:
            return self._run_once(order, location, alone=True)
        except NotStartedError as error:
            raise AccidentError(_not_started(error.__cause__)) from error

    def _run_once(self, order: WorkerCommand, location: str, *, alone: bool = False) -> int | None:
        if self._process is None:
            limit = self._workers.memory_limit
            self._process = self._processes.start(order.log.path, limit, alone=alone)
        beat = Heartbeat()
        self._process.send(order, self._workers.timeout)
        return self._wait(self._process, order, location, beat)

    def _end(self) -> None:
        if self._process is not None:
            self._processes.end(self._process)
            self._process = None

    def _wait(
        self, process: WorkerProcess, order: WorkerCommand, location: str, beat: Heartbeat
    ) -> int | None:
        self._report(beat, order, location)
        while (left := self._workers.timeout - beat.seconds) > 0:
            code = process.wait(min(left, _POLL_SECONDS))
            if code is not None:
                return code
            if order.log.size > LOG_LIMIT:
                raise CrashError(_flooded(order))
            order.log.forward()
            self._report(beat, order, location)
        return None

    def _report(self, beat: Heartbeat, order: WorkerCommand, location: str) -> None:
        """Report what runs, if a report is due."""
        progress, pulse = self._workers.progress, self._workers.pulse
        is_long = beat.due()
        if progress is None or not (is_long or (pulse is not None and pulse.due())):
            return
        for each in filter(None, (beat, pulse)):
            each.mark_reported()
        # Among many short steps, the current one has often just begun.
        begins = beat.seconds < 1 and not is_long
        state = "begins" if begins else f"has run for {beat.seconds:.0f} s{order.last_step}"
        progress(f"{location}: {order.action} {state}")


def _secrets(request: str) -> tuple[str, ...]:
    """The values of the environment variables to which the secrets of a request refer."""
    return tuple(value for name in variables_in(request) if (value := os.environ.get(name)))


def _explained(error: BuildError, order: WorkerCommand, memory_limit: int | None) -> BuildError:
    """``error``, with which a worker ended, by its causes; without the values of secrets."""
    explained = [_by_cause(error, found, order, memory_limit) for found in error.problems]
    cause = next((each for each in explained if isinstance(each, AccidentError)), error)
    return type(cause)(*(problem for each in explained for problem in each.problems))


def _by_cause(
    error: BuildError, found: Problem, order: WorkerCommand, memory_limit: int | None
) -> BuildError:
    """The first of these causes: a full disk, missing libraries of the EP, a lack of memory, or the problem
    ``found`` of ``error``.
    """
    has_log = not isinstance(error, ModelError)
    # What the worker finds wrong in a result can only be related to errors in its log.
    is_finding = not has_log or type(error) is RefusedError
    location, message, hint = (
        hide_values(text or "", order.secrets)
        for text in (found.location, found.message, found.hint)
    )
    errors = order.log.tail(only_errors=True) if has_log else ""
    log = errors if is_finding else order.log.tail()
    own = tuple(hide_values(each, order.secrets) for each in found.causes)
    found = replace(
        found, location=location, message=message, hint=hint or None, log=log or None, causes=own
    )
    output = f"{message}\n{log}"
    if full := full_disk_problem(order.folder, location, output):
        # The worker's own message names the path.
        is_known = found.kind is Kind.SYSTEM_ERROR
        return AccidentError(found if is_known else replace(full, log=found.log))
    # Many EPs only log that.
    if isinstance(error, RefusedError) and (lacking := missing(errors)):
        message = f"the EP cannot load its own libraries, because {lacking} is missing."
        return UnavailableError(
            Problem(Kind.UNLOADABLE_LIBRARY, location, message, lacking.advice, log=errors)
        )
    key, size = Key() / "build" / "memory-limit", show_size(memory_limit or 0)
    causes = (*own, *_small_address_space())
    # Without a limit a log may contain warnings about memory: only the log of a crash counts.
    has_crashed = isinstance(error, CrashError)
    if not _NO_MEMORY.search(output if memory_limit or has_crashed else message):
        if memory_limit:
            # Some EPs report a lack of memory only as a failure.
            causes = (f"Or the worker had too little memory: {key} is {size}.", *causes)
        is_known = found.kind is Kind.SYSTEM_ERROR
        return type(error)(found if is_known else replace(found, causes=causes))
    limit = Setting(key, f"{-(-2 * (memory_limit or 0) // 10**6)} MB")
    advice, settings = _to_raise(limit, "Raise the limit, or remove it (not tried).")
    what = f"needs more memory than {key} allows ({size})"
    if not memory_limit:
        what, advice, settings = "ran out of memory", _LESS_MEMORY, ()
    message = f"the worker {what}: {message}"
    return LimitError(
        Problem(
            Kind.OUT_OF_MEMORY,
            location,
            message,
            advice,
            found.key,
            settings,
            found.log,
            causes=causes,
        )
    )


def _small_address_space() -> tuple[str, ...]:
    """The cause that this shell limits the address space, if it does: EPs do not report it."""
    if sys.platform == "win32":
        return ()
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ()
    allowed = f"Or the worker had too little address space: ulimit -v allows {show_size(limit)}."
    return (f"{allowed} Run the build with ulimit -v unlimited.",)


def _to_raise(limit: Setting, hint: str) -> tuple[str, tuple[Setting, ...]]:
    """The hint and the settings that raise a ``limit`` of the build: its variable, if that is set."""
    variable = PREFIX + str(limit.key.parts[-1]).upper().replace("-", "_")
    if os.environ.get(variable):
        return f"Raise {variable}, which wins over the configuration (not tried).", ()
    return hint, (limit,)


def _too_slow(order: WorkerCommand, timeout: float) -> Problem:
    limit = Setting(Key() / "build" / "timeout", round(2 * timeout, 3))
    hint, settings = _to_raise(limit, "Give it more time (not tried).")
    message = f"the worker was stopped after {timeout:g} seconds{order.last_step}."
    tail = order.log.tail()
    return Problem(Kind.WORKER_TIMEOUT, "", message, hint, settings=settings, log=tail)


def _flooded(order: WorkerCommand) -> Problem:
    message = f"the worker was stopped, because its log had more than {show_size(LOG_LIMIT)}."
    return Problem(Kind.WORKER_CRASHED, "", message, log=order.log.tail())


def _not_started(error: BaseException | None) -> Problem:
    reason = (isinstance(error, OSError) and error.strerror) or "the system refuses a fork"
    hint = "Run fewer jobs at once (build.jobs), or allow more processes and files (ulimit -u, ulimit -n)."
    return Problem(Kind.SYSTEM_ERROR, "", f"the worker cannot be started: {reason}.", hint)


def _interrupted() -> BuildError:
    return InterruptedBuildError(Problem(Kind.INTERRUPTED, "", "the build was interrupted."))


def _ended(code: int, step: str) -> BuildError:
    """The error of a worker that ended in ``step`` with exit code ``code`` and without a reply."""
    name = _signal_name(code)
    if name is not None and name not in _CRASHES:
        hint = "Something else ended it: build again."
        if name == "SIGKILL":
            hint = f"The system kills processes when memory is short. {_LESS_MEMORY}"
        message = f"the worker was killed with {name}{step}."
        return AccidentError(Problem(Kind.WORKER_KILLED, "", message, hint))
    if code & 0xFFFFFFFF == _STOPPED:
        message = f"the worker was stopped with Ctrl-C, or with its console{step}."
        return AccidentError(Problem(Kind.WORKER_KILLED, "", message, "Build again."))
    hint = "The crash is in ONNX Runtime or in the execution provider's library: see the log."
    message = f"the worker {_describe_exit(code)}{step}."
    return CrashError(Problem(Kind.WORKER_CRASHED, "", message, hint))


def _signal_name(code: int) -> str | None:
    """The name of the signal that ended a process with this exit code, if one did."""
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"the signal {-code}"


def _describe_exit(code: int) -> str:
    if name := _signal_name(code):
        return f"crashed with {name}"
    if crash := _WINDOWS_CRASHES.get(code & 0xFFFFFFFF):
        return f"crashed with {crash} (0x{code & 0xFFFFFFFF:08X})"
    return f"ended with exit code {code} and without a reply"
