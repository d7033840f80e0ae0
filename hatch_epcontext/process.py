"""Starts workers, for a vendor's compiler may crash, hang or print."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hatch_epcontext.errors import BuildError, ModelError, Problem
from hatch_epcontext.protocol import DONE, FAILED, REFUSED, VERBOSE, Refusal, Request
from hatch_epcontext.structure import from_json, to_json

TAIL = 30
"""How many lines of a worker's log an error shows."""

FOLLOWING = 0.2
"""Seconds between two looks at the log of a worker that is followed."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ENVIRONMENT = {"PYTHONFAULTHANDLER": "1", "PYTHONUTF8": "1", "PYTHONSAFEPATH": "1"}

_WINDOWS_CRASHES = {
    0xC0000005: "access violation",
    0xC00000FD: "stack overflow",
    0xC0000409: "stack buffer overrun",
    0xC0000374: "heap corruption",
    0xC000001D: "illegal instruction",
}


class _Running:
    """The processes that run, in whatever threads they were started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self.stopped = False

    def start(self, make: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes] | None:
        """The process that ``make`` starts, or None if no more are to be started."""
        with self._lock:
            if self.stopped:
                return None
            process = make()
            self._processes.add(process)
            return process

    def ended(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._processes.discard(process)

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for process in self._processes:
                process.kill()


@dataclass(frozen=True)
class Workers:
    """How workers are run.

    ``timeout``: seconds for each. ``tell``, if given, is told what each is asked, and every line that it
    prints while it runs; with ``verbose`` ONNX Runtime prints more than its warnings.
    """

    timeout: float
    tell: Callable[[str], None] | None = None
    verbose: bool = False
    _running: _Running = field(default_factory=_Running)

    def call(self, request: Request, folder: Path, *, where: str) -> Any:
        """The worker's reply to ``request``, of the type that the request names.

        ``folder`` is where the request, the reply and the log are written; it is made, and is the
        worker's working directory. Raises ModelError when the worker refuses, and BuildError when it
        fails, crashes or takes too long.
        """
        folder.mkdir(parents=True)
        asked, answered, log = folder / "request.json", folder / "reply.json", folder / "worker.log"
        asked.write_text(to_json(request), encoding="utf-8")
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "hatch_epcontext.worker",
            request.action,
            asked,
            answered,
            *([VERBOSE] if self.verbose else []),
        ]
        with self._told(log, where, request.action):
            ended = self._run(command, folder, log, where)
        tail = _tail(log)
        if self._running.stopped:
            raise _interrupted(where)
        if ended is None:
            raise BuildError(
                Problem(
                    where,
                    f"the worker was stopped: it took longer than {self.timeout:g} seconds.",
                    "Give it more with timeout, or HATCH_EPCONTEXT_TIMEOUT.",
                    tail,
                )
            )
        if ended not in (DONE, REFUSED, FAILED) or not answered.is_file():
            raise BuildError(Problem(where, f"the worker {_death(ended)}.", _remedy(ended), tail))
        text = answered.read_text(encoding="utf-8")
        if ended == DONE:
            return from_json(text, request.reply)
        raise (ModelError if ended == REFUSED else BuildError)(
            *(
                replace(problem, where=problem.where or where, log=tail if ended == FAILED else "")
                for problem in from_json(text, Refusal).problems
            )
        )

    def stop(self) -> None:
        """Kill all workers that run, and start no more: each call then raises BuildError."""
        self._running.stop()

    def _run(
        self, command: Sequence[str | Path], folder: Path, log: Path, where: str
    ) -> int | None:
        with log.open("wb") as sink:
            process = self._running.start(
                lambda: subprocess.Popen(
                    command,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **_ENVIRONMENT},
                )
            )
            if process is None:
                raise _interrupted(where)
            try:
                return process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                return None
            finally:
                # Whatever the reason, an interruption among them, nobody waits for it any more.
                process.kill()
                process.wait()
                self._running.ended(process)

    @contextlib.contextmanager
    def _told(self, log: Path, where: str, action: str) -> Iterator[None]:
        """While it is entered, a thread tells what comes into ``log``."""
        if self.tell is None:
            yield
            return
        start = time.monotonic()
        self.tell(f"{where}: {action} ...")
        ended = threading.Event()
        follower = threading.Thread(target=_follow, args=(log, ended, where, self.tell))
        follower.start()
        try:
            yield
        finally:
            ended.set()
            follower.join()
            self.tell(f"{where}: {action} took {time.monotonic() - start:.1f} s")


def _follow(log: Path, ended: threading.Event, where: str, tell: Callable[[str], None]) -> None:
    """Tell each line of ``log`` as soon as it is whole; the last one as it is.

    A file, and no pipe: what a vendor's compiler starts and leaves behind would hold a pipe open.
    """
    offset, rest = 0, b""
    last = False
    while not last:
        last = ended.wait(FOLLOWING)
        if not log.is_file():
            continue
        with log.open("rb") as file:
            file.seek(offset)
            found = file.read()
        offset += len(found)
        *lines, rest = (rest + found).split(b"\n")
        for line in [*lines, *([rest] if last and rest else [])]:
            tell(f"{where} | {_plain(line.decode('utf-8', 'replace'))}")


def _plain(text: str) -> str:
    # ONNX Runtime colours its log even where it is no terminal.
    return _COLOUR.sub("", text).rstrip("\r")


def _interrupted(where: str) -> BuildError:
    return BuildError(Problem(where, "the build was interrupted."))


def _tail(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    return "\n".join(_plain(line) for line in text.rstrip().splitlines()[-TAIL:])


def _death(code: int) -> str:
    if code < 0:
        try:
            return f"crashed with {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    if name := _WINDOWS_CRASHES.get(code & 0xFFFFFFFF):
        return f"crashed with {name} (0x{code & 0xFFFFFFFF:08X})"
    return f"ended with exit code {code} and gave no answer"


def _remedy(code: int) -> str:
    if code == -getattr(signal, "SIGKILL", 9):
        return "The system ends processes so when memory runs out: fewer jobs at once may help."
    return "The crash is in ONNX Runtime or in the execution provider's library; the log may name the place."
