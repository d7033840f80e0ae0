"""``python -m hatch_epcontext.worker``: answer the requests in lines of standard input, one by one.

The lines of standard output are those of `hatch_epcontext.worker.protocol`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import queue
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hatch_epcontext.errors import AccidentError, EpcontextError, Kind, LibraryError, Problem
from hatch_epcontext.serialize import from_json, from_plain, to_json
from hatch_epcontext.system import is_of_system, system_problem
from hatch_epcontext.worker.protocol import (
    FAILURE,
    LOG,
    NO_TELEMETRY,
    READY,
    REPLY,
    Order,
    report_in,
)
from hatch_epcontext.worker.raised import is_of_onnx_runtime
from hatch_epcontext.worker.requests import REQUESTS, Failure

_INFO, _WARNING = 1, 2
"""ONNX Runtime's log severities: everything but messages for its own developers, and its default."""


def serve(orders: Iterable[bytes], send: Callable[[bytes], object]) -> int:
    """Answer the requests of ``orders``; ``send`` gets the lines for each.

    Returns the exit code of this process.
    """
    # Python's own output at its start may not end with a line break.
    send(b"\n%b\n" % READY)
    for line in orders:
        order = from_json(line, Order)
        _begin(order)
        try:
            word, reply = REPLY, answer(order)
        except Exception as exception:
            error = _explained(exception)
            word, reply = FAILURE, Failure(type(error).__name__, error.problems)
        _flush()
        send(b"%b %b%b\n" % (word, to_json(reply, indent=None).encode(), READY))
    return 0


def answer(order: Order) -> Any:
    """The reply to a request; raises what its action raises."""
    request = from_plain(order.request, REQUESTS[order.action])
    handler = importlib.import_module(f"hatch_epcontext.worker.actions.{order.action}")
    # Not imported, because `inspect` works without ONNX Runtime.
    runtime: Any = sys.modules.get("onnxruntime")
    if (
        sys.platform == "win32"
        and runtime is not None
        and os.environ.get(NO_TELEMETRY, "").lower() not in ("0", "false")
    ):
        # Some builds for Windows ignore the variable. They have already sent an event.
        runtime.disable_telemetry_events()
    if runtime is not None:
        runtime.set_default_logger_severity(_INFO if order.verbose else _WARNING)
    return handler.handle(request)


def _begin(order: Order) -> None:
    """Make the order's folder the working directory, redirect all output to the log there, and limit the
    memory.
    """
    os.chdir(order.folder)
    report_in(order.folder)
    os.environ.update(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(order.folder)))
    # This process, or the forked one, may have cached the folder for temporary files.
    tempfile.tempdir = None
    # On Windows C would also translate line ends, and an empty line would follow each line.
    binary = getattr(os, "O_BINARY", 0)
    log = os.open(order.folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | binary, 0o666)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    if sys.version_info >= (3, 14):
        # The C stack has more lines than an error shows of a log, and the reason is above it.
        faulthandler.enable(c_stack=False)
    if sys.platform == "linux" and order.memory_limit is not None:
        import resource

        # Not the address space: the libraries of EPs reserve much of it and use little.
        resource.setrlimit(resource.RLIMIT_DATA, (order.memory_limit,) * 2)


def _explained(error: Exception) -> EpcontextError:
    """``error``, if it is the package's own; otherwise one that says what the system or a library raised."""
    if isinstance(error, EpcontextError):
        return error
    if isinstance(error, OSError) and is_of_system(error):
        return AccidentError(system_problem(error, Path.cwd()))
    # For any other exception than ONNX Runtime's the traceback goes to the log.
    if not is_of_onnx_runtime(error):
        # The log is on the full disk too.
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    return LibraryError(Problem(Kind.COMPILE_FAILED, "", f"{type(error).__name__}: {error}"))


def _flush() -> None:
    """Write what Python and C have not yet written: this process may be killed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None).fflush(None)


def _orders(descriptor: int) -> Iterator[bytes]:
    """The lines of a pipe; at its end this process ends, with its group."""
    lines = os.fdopen(descriptor, "rb")
    if sys.platform == "win32":
        # A job object ends this process with the build. Here importing numpy would wait for a thread that
        # reads standard input, because it gets its type (numpy 24290, CPython 78961).
        yield from lines
        return
    unanswered = queue.SimpleQueue[bytes]()

    def read() -> None:
        for line in lines:
            unanswered.put(line)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield unanswered.get()


def _main() -> int:
    # Not inherited by the processes that a vendor's library starts.
    orders, messages = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    with os.fdopen(messages, "wb") as file:

        def send(lines: bytes) -> None:
            file.write(lines)
            file.flush()

        return serve(_orders(orders), send)


if __name__ == "__main__":
    sys.exit(_main())
