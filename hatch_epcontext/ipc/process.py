"""Calls workers in processes of their own, because a vendor's compiler may crash, hang or print."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.errors import BuildError, Key, Kind, ModelError, Problem, Setting
from hatch_epcontext.ipc.fork_server import ForkServer, ServerGoneError, is_supported
from hatch_epcontext.ipc.running import Interpreter, Order, Running
from hatch_epcontext.serialize import from_json, to_json
from hatch_epcontext.text import printable, show_size

if TYPE_CHECKING:
    from hatch_epcontext.ipc.protocol import ReplyT, Request

_TAIL = 40
"""The number of lines of a worker's log that an error shows."""

_POLL_SECONDS = 0.2
"""Seconds between two reads of the log of a worker that is followed."""

_FIRST_BEAT, _NEXT_BEATS = 10.0, 30.0
"""Seconds after which a running worker is reported first, and then again."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

_NO_MEMORY = re.compile(
    r"bad_alloc|bad allocation|MemoryError|allocate memory|failed to allocate|out of memory|bfc_arena",
    re.IGNORECASE,
)
"""How Python, C++ and ONNX Runtime say that memory is short."""

_WINDOWS_CRASHES = {
    0xC0000005: "access violation",
    0xC00000FD: "stack overflow",
    0xC0000409: "stack buffer overrun",
    0xC0000374: "heap corruption",
    0xC000001D: "illegal instruction",
}


class Heartbeat:
    """When to report that something still runs: after ten seconds, and then every thirty."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.next = self.start + _FIRST_BEAT

    def due(self) -> float | None:
        """Seconds since the start, if it is time for a report."""
        now = time.monotonic()
        if now < self.next:
            return None
        self.next = now + _NEXT_BEATS
        return now - self.start


class _Processes:
    """The running processes of all threads, and the server that forks them, if there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Running] = set()
        self._server: ForkServer | None = None
        self._forks = False
        self.stopped = False

    def enter(self) -> None:
        """From now on workers are forks, where the system has them."""
        self._forks = is_supported()

    def exit(self) -> None:
        """From now on workers are fresh interpreters."""
        with self._lock:
            self._forks = False
            server, self._server = self._server, None
        if server is not None:
            server.close()

    @contextlib.contextmanager
    def run(self, order: Order, location: str) -> Iterator[Running]:
        """A started process, which has ended when the context ends; raises BuildError after `stop`."""
        with self._lock:
            if self.stopped:
                raise _interrupted(location)
            process = self._start(order)
            self._running.add(process)
        try:
            yield process
        finally:
            # After any error, such as an interruption, nobody waits for it.
            process.close()
            with self._lock:
                self._running.discard(process)

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for process in self._running:
                process.kill()

    def _start(self, order: Order) -> Running:
        if self._forks:
            if self._server is None:
                self._server = ForkServer()
            return self._server.start(order)
        return Interpreter(order)


@dataclass(frozen=True)
class Workers:
    """How workers run.

    ``timeout``: seconds for each. ``log``, if given, gets each request and every line that a worker
    prints while it runs; ``progress`` gets a line from time to time while a worker runs. With ``verbose``
    ONNX Runtime prints more than its warnings. ``memory_limit``: bytes of memory for each (Linux only).

    As a context manager it starts a process once that has imported what workers need, where the system
    can fork it; otherwise each worker is a fresh interpreter.
    """

    timeout: float
    log: Callable[[str], None] | None = None
    verbose: bool = False
    memory_limit: int | None = None
    progress: Callable[[str], None] | None = None
    _processes: _Processes = field(default_factory=_Processes)

    def __enter__(self) -> Workers:
        self._processes.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.exit()

    def call(self, request: Request[ReplyT], folder: Path, *, location: str) -> ReplyT:
        """The worker's reply to ``request``.

        ``folder`` gets the request, the reply and the log; it is made, and is the worker's working
        directory. Raises ModelError when the worker refuses the request, and BuildError when it
        fails, crashes or takes too long.
        """
        # Only now: a build that finds everything in the cache needs no requests.
        from hatch_epcontext.ipc.protocol import (
            DONE,
            FAILED,
            MEMORY_LIMIT,
            REFUSED,
            VERBOSE,
            Refusal,
        )

        folder.mkdir(parents=True)
        order = Order(
            request.action,
            folder,
            folder / "request.json",
            folder / "reply.json",
            folder / "worker.log",
            (
                *([VERBOSE] if self.verbose else []),
                *([f"{MEMORY_LIMIT}{self.memory_limit}"] if self.memory_limit else []),
            ),
        )
        order.request_path.write_text(to_json(request), encoding="utf-8")
        order.log_path.touch()
        with self._followed(order.log_path, location, request.action):
            exit_code = self._run(order, location)
        tail = _tail(order.log_path)
        if self._processes.stopped:
            raise _interrupted(location)
        if exit_code is None:
            limit = Setting(Key() / "build" / "timeout", round(2 * self.timeout, 3))
            message = f"the worker was stopped after {self.timeout:g} seconds{order.last_step}."
            problem = Problem(Kind.WORKER_TIMEOUT, location, message, settings=(limit,), log=tail)
            raise BuildError(_with_variable(problem, "TIMEOUT"))
        if exit_code not in (DONE, REFUSED, FAILED) or not order.reply_path.is_file():
            message = f"the worker {_describe_exit(exit_code)}{order.last_step}."
            problem = Problem(
                Kind.WORKER_CRASHED, location, message, _crash_hint(exit_code), log=tail
            )
            raise BuildError(self._explained(problem))
        text = order.reply_path.read_text(encoding="utf-8")
        if exit_code == DONE:
            reply: ReplyT = from_json(text, request.reply_type)
            return reply
        problems = [
            replace(each, location=each.location or location)
            for each in from_json(text, Refusal).problems
        ]
        if exit_code == REFUSED:
            raise ModelError(*map(self._explained, problems))
        raise BuildError(*(self._explained(replace(each, log=tail)) for each in problems))

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._processes.stopped

    def stop(self) -> None:
        """Kill all running workers, and start no more: each call then raises BuildError."""
        self._processes.stop()

    def _run(self, order: Order, location: str) -> int | None:
        """The exit code of the worker, or None after the timeout."""
        while True:
            try:
                with self._processes.run(order, location) as process:
                    return self._wait(process, order, location)
            except ServerGoneError:
                # What every worker imports crashes, for example: the worker's own log then has more.
                self._processes.exit()

    def _wait(self, process: Running, order: Order, location: str) -> int | None:
        beat = Heartbeat()
        end = beat.start + self.timeout
        while (now := time.monotonic()) < end:
            code = process.wait(min(end, beat.next) - now)
            if code is not None:
                return code
            seconds = beat.due()
            if seconds is not None and self.progress is not None:
                self.progress(f"{location}: {order.action} runs for {seconds:.0f} s")
        return None

    def _explained(self, problem: Problem) -> Problem:
        """``problem``, or that the worker had too little memory if a limit is or may be the reason."""
        if self.memory_limit is None:
            return problem
        key, size = Key() / "build" / "memory-limit", show_size(self.memory_limit)
        if not _NO_MEMORY.search(f"{problem.message}\n{problem.log}"):
            # Some EPs only say that they cannot do what they could do with more memory.
            hint = f"Or the worker had too little memory: {key} is {size}."
            return replace(problem, hint=f"{problem.hint}\n{hint}" if problem.hint else hint)
        return _with_variable(
            replace(
                problem,
                kind=Kind.OUT_OF_MEMORY,
                message=f"the worker needs more memory than {key} allows ({size}): {problem.message}",
                hint="Raise the limit, or remove it.",
                settings=(Setting(key, f"{-(-2 * self.memory_limit // 10**6)} MB"),),
            ),
            "MEMORY_LIMIT",
        )

    @contextlib.contextmanager
    def _followed(self, log_path: Path, location: str, action: str) -> Iterator[None]:
        """While it is entered, a thread forwards what is written to ``log_path``."""
        if self.log is None:
            yield
            return
        start = time.monotonic()
        self.log(f"{location}: {action} ...")
        ended = threading.Event()
        thread = threading.Thread(target=_follow, args=(log_path, ended, location, self.log))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.log(f"{location}: {action} took {time.monotonic() - start:.1f} s")


def _with_variable(problem: Problem, name: str) -> Problem:
    """``problem``, with the environment variable to change instead of the key if it is set."""
    variable = PREFIX + name
    if not os.environ.get(variable):
        return problem
    hint = f"Raise {variable}, which wins over the configuration."
    return replace(problem, hint=hint, settings=())


def _follow(
    log_path: Path, ended: threading.Event, location: str, log: Callable[[str], None]
) -> None:
    """Forward each line of the log as soon as it is complete; the last one as it is.

    A file and not a pipe: processes that a vendor's compiler starts and leaves running would keep a
    pipe open.
    """
    offset, rest = 0, b""
    last = False
    while not last:
        last = ended.wait(_POLL_SECONDS)
        if not log_path.is_file():
            continue
        with log_path.open("rb") as file:
            file.seek(offset)
            found = file.read()
        offset += len(found)
        *lines, rest = (rest + found).split(b"\n")
        for line in [*lines, *([rest] if last and rest else [])]:
            log(f"{location} | {_plain(line.decode('utf-8', 'replace'))}")


def _plain(text: str) -> str:
    # ONNX Runtime writes colours even to a file.
    return printable(_COLOUR.sub("", text).rstrip("\r"))


def _interrupted(location: str) -> BuildError:
    return BuildError(Problem(Kind.INTERRUPTED, location, "the build was interrupted."))


def _tail(log_path: Path) -> str:
    text = log_path.read_text(encoding="utf-8", errors="replace")
    return "\n".join(_plain(line) for line in text.rstrip().splitlines()[-_TAIL:])


def _describe_exit(code: int) -> str:
    if code < 0:
        try:
            return f"crashed with {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    if name := _WINDOWS_CRASHES.get(code & 0xFFFFFFFF):
        return f"crashed with {name} (0x{code & 0xFFFFFFFF:08X})"
    return f"ended with exit code {code} and without a reply"


def _crash_hint(code: int) -> str:
    if code == -getattr(signal, "SIGKILL", 9):
        return "The system kills processes when memory is short: run fewer jobs at once."
    return "The crash is in ONNX Runtime or in the execution provider's library: see the log."
