"""Calls workers in processes of their own, because a vendor's compiler may crash, hang or print."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_epcontext.errors import (
    STEP_NAMES,
    AccidentError,
    BuildError,
    CrashError,
    InterruptedBuildError,
    Kind,
    Problem,
    Step,
)
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.processes import failures
from hatch_epcontext.jobs.processes.running import (
    CAN_FORK,
    Fork,
    ForkServer,
    Interpreter,
    WorkerProcess,
)
from hatch_epcontext.providers import Provider
from hatch_epcontext.serialize import from_json, to_json
from hatch_epcontext.system import Heartbeat, core_numbers, cores, removed_problem, writing
from hatch_epcontext.worker.protocol import REPLY, Order

if TYPE_CHECKING:
    from hatch_epcontext.worker.requests import ReplyT, WorkerRequest

_POLL_SECONDS = 0.2
"""Seconds between checks of a worker's log."""

_TASKS, _IDLE = 32, 16
"""The most tasks of one process, because what libraries leave in it adds up; processes that wait for one."""


class Workers:
    """The processes of one build, for all its threads, and how they run.

    ``timeout``: seconds for each request. ``log``, if given, gets each request and every line that a worker
    prints while it runs; with ``verbose`` ONNX Runtime prints more than its warnings. ``memory_limit``: bytes
    of memory for each. ``progress`` gets a line about what runs whenever ``pulse`` is due; ``recipes``: those
    of jobs then, by their locations. ``stopped``: whether `stop` was called.

    As a context manager it starts one process that has imported what workers need, where the system can
    fork it; otherwise each worker is a fresh interpreter. And only then processes are kept for other tasks.
    """

    def __init__(
        self,
        timeout: float,
        log: Callable[[str], None] | None = None,
        verbose: bool = False,
        memory_limit: int | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.timeout, self.memory_limit = timeout, memory_limit
        self.log, self.verbose, self.progress = log, verbose, progress
        self.pulse, self.recipes = Heartbeat(), dict[str, str]()
        self.stopped = self._is_open = False
        self._lock = threading.Lock()
        # Those that a worker still has: for others `kill` does nothing.
        self._running = weakref.WeakSet[WorkerProcess]()
        self._idle: list[tuple[Hashable, Worker]] = []
        self._server: ForkServer | None = None
        self._simulated: tuple[str, ...] = ()
        self._tasks, self._tasks_of_cores = 0, Counter[int]()

    def __enter__(self) -> Workers:
        self._is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_open = False
            server, self._server = self._server, None
        if server is not None:
            server.close()
        self.close_idle()

    def close_idle(self) -> None:
        """End the processes that wait for another task."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, worker in idle:
            worker.close()

    def stop(self) -> None:
        """Kill all running workers, and start no more: each call then raises BuildError."""
        with self._lock:
            self.stopped = True
            for process in self._running:
                process.kill()

    def expect(self, providers: Iterable[Provider]) -> None:
        """Name the ``providers`` that workers will compile for, before the first worker starts."""
        names = {provider.name for provider in providers if provider.simulator}
        self._simulated = tuple(sorted(names))

    @property
    def is_busy(self) -> bool:
        """Whether there are tasks for all cores."""
        return self._tasks >= cores()

    @contextlib.contextmanager
    def one_core(self) -> Iterator[int]:
        """The number of a core for one task, which no other has while there are as many cores."""
        numbers, own = core_numbers(), self._tasks_of_cores
        with self._lock:
            # Of builds at once each begins with another one.
            first = os.getpid() % len(numbers)
            core = min(numbers[first:] + numbers[:first], key=own.__getitem__)
            own[core] += 1
        try:
            yield core
        finally:
            with self._lock:
                own[core] -= 1

    def is_report_due(self) -> bool:
        """Whether a line about what runs is due, and somebody gets it."""
        return self.progress is not None and self.pulse.due()

    def report(self, line: str) -> None:
        """Pass ``line`` to ``progress``; the next one is due later."""
        if self.progress is not None:
            self.progress(line)
            self.pulse.mark_reported()

    def call(
        self,
        request: WorkerRequest[ReplyT],
        folder: Path | None = None,
        *,
        location: str,
        step: Step | None = None,
    ) -> ReplyT:
        """The reply of a worker of its own to ``request``, without a ``folder`` in a temporary one; see
        `Worker.call`.
        """
        with contextlib.ExitStack() as stack:
            folder = folder or stack.enter_context(temp_dir()) / "call"
            worker = stack.enter_context(self.process())
            return worker.call(request, folder, location=location, step=step)

    @contextlib.contextmanager
    def process(self, purpose: Hashable = None) -> Iterator[Worker]:
        """A worker for several requests: those of one task.

        It ends with the context; with a ``purpose`` it may have done tasks of the same purpose before, and is
        kept for more.
        """
        worker = Worker(self)
        with self._lock:
            for number, (kept_for, idle) in enumerate(self._idle):
                if kept_for == purpose:
                    del self._idle[number]
                    worker = idle
                    break
            self._tasks += 1
        worker.tasks += 1
        surplus: Worker | None = worker
        try:
            yield worker
            with self._lock:
                if purpose is not None and self._is_open and worker.tasks < _TASKS:
                    self._idle.append((purpose, worker))
                    surplus = self._idle.pop(0)[1] if len(self._idle) > _IDLE else None
        finally:
            with self._lock:
                self._tasks -= 1
            # After an error, such as an interruption, nothing needs its reply.
            if surplus is not None:
                surplus.close()

    def start_server(self) -> None:
        """Begin to start the process that forks the others, where there is one: its imports take a while."""
        # Whoever then needs a process gets the error.
        with self._lock, contextlib.suppress(OSError, RuntimeError):
            if self._is_open and CAN_FORK:
                self._server = self._server or ForkServer(self._simulated)

    def start(self, log_path: Path, *, forked: bool) -> WorkerProcess:
        """Start a process; ``forked``: by the server, where there is one.

        Raises BuildError after the build was stopped, and OSError or RuntimeError if the system does not:
        the latter if Python cannot start a thread.
        """
        with self._lock:
            if self.stopped:
                raise failures.interrupted()
            if forked and self._is_open and CAN_FORK:
                self._server = self._server or ForkServer(self._simulated)
                process: WorkerProcess = Fork(self._server)
            else:
                process = Interpreter(log_path, self.memory_limit)
            self._running.add(process)
            return process


class Worker:
    """A process that answers the requests of one thread, one after the other; it starts with the first.

    ``tasks``: how many the process has begun.
    """

    def __init__(self, workers: Workers) -> None:
        self.tasks = 0
        self._workers = workers
        self._process: WorkerProcess | None = None

    def close(self) -> None:
        """Return when it has ended, with all its children. The next request starts another process."""
        if self._process is not None:
            self._process.close()
            self._process, self.tasks = None, 1

    def call(
        self,
        request: WorkerRequest[ReplyT],
        folder: Path,
        *,
        location: str,
        step: Step | None = None,
    ) -> ReplyT:
        """The worker's reply to ``request``.

        ``folder``, which is created, is the worker's working directory and gets its log. ``location`` labels
        the log, and problems without a location. With the ``step`` of a job problems get only that:
        the job's runner sets their location. Raises what the worker raised, CrashError
        when it crashes, LimitError when it takes too long or too much memory, and AccidentError when it is
        killed or the system fails; all this only in a process that has done no other task.
        """
        is_used = self.tasks > 1
        try:
            return self._call(request, folder, location, step)
        except InterruptedBuildError:
            raise
        except BuildError:
            if not is_used:
                raise
        # What another task has left in the process may be the cause.
        with writing("a folder for a worker", folder):
            shutil.rmtree(folder, ignore_errors=True)
            if request.fills:
                output: str = getattr(request, request.fills)
                shutil.rmtree(output, ignore_errors=True)
                Path(output).mkdir()
        return self._call(request, folder, location, step)

    def _call(
        self, request: WorkerRequest[ReplyT], folder: Path, location: str, step: Step | None
    ) -> ReplyT:
        workers, limit = self._workers, self._workers.memory_limit
        name = STEP_NAMES[step] if step else ""
        label = f"{location}: {name}" if name else location
        order = Order(request.action, request, folder, workers.verbose, limit)
        line = to_json(order, indent=None)
        log = failures.WorkerLog(folder, label, workers.log)
        try:
            with writing("a folder for a worker", folder):
                folder.mkdir(parents=True)
                log.path.touch(exist_ok=False)
            action = order.action.replace("_", " ")
            recipe = workers.recipes.get(location)
            task = f"{location}: {recipe}: {action}" if recipe else f"{label}: {action}"
            message = self._exchange(line.encode(), log, task)
            if workers.stopped:
                raise failures.interrupted()
            if not log.path.is_file():
                raise AccidentError(removed_problem(folder, ""))
            if message is None:
                raise failures.too_slow(log, workers.timeout)
            word, text = message
            try:
                if word == REPLY:
                    reply_type: type[ReplyT] = request.reply_type
                    return from_json(text, reply_type)
                error = failures.failed(word, text, log)
            except ValueError as invalid:
                reason = f"the worker's reply cannot be read: {invalid}."
                error = CrashError(Problem(Kind.WORKER_CRASHED, "", reason))
            raise failures.by_causes(error, log, limit)
        except BuildError as error:
            raise error.located("" if step else location, step=step) from error

    def _exchange(
        self, line: bytes, log: failures.WorkerLog, label: str
    ) -> tuple[bytes, bytes] | None:
        """The answer to the request ``line``, or the end of the worker; None after the timeout."""
        workers, message, forked = self._workers, None, True
        start = time.monotonic()
        if workers.log is not None:
            workers.log(f"{label} ...")
        try:
            while (left := start + workers.timeout - time.monotonic()) > 0 and message is None:
                if workers.is_report_due():
                    seconds = time.monotonic() - start
                    # Of many short activities the current one has often just begun.
                    state = f"has run for {seconds:.0f} s{log.last_activity}"
                    workers.report(f"{label} {state if seconds >= 1 else 'begins'}")
                try:
                    if self._process is None:
                        self._process = workers.start(log.path, forked=forked)
                    message = self._process.answer(line, min(left, _POLL_SECONDS))
                except (OSError, RuntimeError) as error:
                    if not forked:
                        raise failures.not_started(error) from error
                    # For example, an import in the server crashes: the log of a fresh interpreter shows more.
                    # Others stay with the server.
                    self.close()
                    forked = False
                if message is None:
                    if log.size > failures.LOG_LIMIT:
                        raise failures.flooded(log)
                    log.forward()
        finally:
            if message is None or message[0] != REPLY:
                self.close()
            log.forward(is_last=True)
            if workers.log is not None:
                workers.log(f"{label} took {time.monotonic() - start:.1f} s")
        return message
