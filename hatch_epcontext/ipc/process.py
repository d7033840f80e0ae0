"""Starts workers in processes of their own, because a vendor's compiler may crash, hang or print."""

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

from hatch_epcontext.errors import BuildError, Key, Kind, ModelError, Problem, Setting
from hatch_epcontext.ipc.protocol import (
    DONE,
    FAILED,
    REFUSED,
    VERBOSE,
    Refusal,
    ReplyT,
    Request,
)
from hatch_epcontext.serialize import from_json, to_json

_TAIL = 40
"""The number of lines of a worker's log that an error shows."""

_POLL_SECONDS = 0.2
"""Seconds between two reads of the log of a worker that is followed."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ENVIRONMENT = {"PYTHONFAULTHANDLER": "1", "PYTHONUTF8": "1", "PYTHONSAFEPATH": "1"}

_WINDOWS_CRASHES = {
    0xC0000005: "access violation",
    0xC00000FD: "stack overflow",
    0xC0000409: "stack buffer overrun",
    0xC0000374: "heap corruption",
    0xC000001D: "illegal instruction",
}


class _Processes:
    """The running processes of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self.stopped = False

    def start(
        self, start_process: Callable[[], subprocess.Popen[bytes]]
    ) -> subprocess.Popen[bytes] | None:
        """The process that ``start_process`` starts, or None after `stop`."""
        with self._lock:
            if self.stopped:
                return None
            process = start_process()
            self._running.add(process)
            return process

    def remove(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.discard(process)

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for process in self._running:
                process.kill()


@dataclass(frozen=True)
class Workers:
    """How workers run.

    ``timeout``: seconds for each. ``log``, if given, gets each request and every line that a worker
    prints while it runs. With ``verbose`` ONNX Runtime prints more than its warnings.
    """

    timeout: float
    log: Callable[[str], None] | None = None
    verbose: bool = False
    _processes: _Processes = field(default_factory=_Processes)

    def call(self, request: Request[ReplyT], folder: Path, *, location: str) -> ReplyT:
        """The worker's reply to ``request``.

        ``folder`` gets the request, the reply and the log; it is made, and is the worker's working
        directory. Raises ModelError when the worker refuses the request, and BuildError when it
        fails, crashes or takes too long.
        """
        folder.mkdir(parents=True)
        request_path, reply_path = folder / "request.json", folder / "reply.json"
        log_path = folder / "worker.log"
        request_path.write_text(to_json(request), encoding="utf-8")
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "hatch_epcontext.worker",
            request.action,
            request_path,
            reply_path,
            *([VERBOSE] if self.verbose else []),
        ]
        with self._followed(log_path, location, request.action):
            exit_code = self._run(command, folder, log_path, location)
        tail = _tail(log_path)
        if self._processes.stopped:
            raise _interrupted(location)
        if exit_code is None:
            raise BuildError(
                Problem(
                    Kind.WORKER_TIMEOUT,
                    location,
                    f"the worker was stopped after {self.timeout:g} seconds.",
                    settings=(Setting(Key() / "build" / "timeout", round(2 * self.timeout, 3)),),
                    log=tail,
                )
            )
        if exit_code not in (DONE, REFUSED, FAILED) or not reply_path.is_file():
            message = f"the worker {_describe_exit(exit_code)}."
            raise BuildError(
                Problem(Kind.WORKER_CRASHED, location, message, _crash_hint(exit_code), log=tail)
            )
        text = reply_path.read_text(encoding="utf-8")
        if exit_code == DONE:
            reply: ReplyT = from_json(text, request.reply_type)
            return reply
        raise (ModelError if exit_code == REFUSED else BuildError)(
            *(
                replace(
                    problem,
                    location=problem.location or location,
                    log=tail if exit_code == FAILED else None,
                )
                for problem in from_json(text, Refusal).problems
            )
        )

    def stop(self) -> None:
        """Kill all running workers, and start no more: each call then raises BuildError."""
        self._processes.stop()

    def _run(
        self, command: Sequence[str | Path], folder: Path, log_path: Path, location: str
    ) -> int | None:
        """The exit code of ``command``, or None after the timeout."""
        with log_path.open("wb") as log:
            process = self._processes.start(
                lambda: subprocess.Popen(
                    command,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **_ENVIRONMENT},
                )
            )
            if process is None:
                raise _interrupted(location)
            try:
                return process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                return None
            finally:
                # After any error, such as an interruption, nobody waits for it.
                process.kill()
                process.wait()
                self._processes.remove(process)

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
    return _COLOUR.sub("", text).rstrip("\r")


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
