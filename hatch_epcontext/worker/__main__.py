"""``python -m hatch_epcontext.worker ACTION REQUEST REPLY [FLAGS]``: answer one request and exit."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from hatch_epcontext.errors import EpcontextError, Kind, ModelError, Problem
from hatch_epcontext.files import write_atomically
from hatch_epcontext.serialize import from_json, to_json
from hatch_epcontext.system import is_refusal, system_problem
from hatch_epcontext.worker.progress import report_to
from hatch_epcontext.worker.protocol import (
    DONE,
    END_WITH_INPUT,
    FAILED,
    MEMORY_LIMIT,
    NO_TELEMETRY,
    REFUSED,
    VERBOSE,
)
from hatch_epcontext.worker.requests import REQUESTS, Refusal

_INFO = 1
"""ONNX Runtime's log severity for everything but messages for its own developers."""


def _answer(action: str, request: Any, *, verbose: bool) -> Any:
    handler = importlib.import_module(f"hatch_epcontext.worker.actions.{action}")
    # Not imported here: `inspect` works without ONNX Runtime.
    runtime: Any = sys.modules.get("onnxruntime")
    if (
        sys.platform == "win32"
        and runtime is not None
        and os.environ.get(NO_TELEMETRY, "").lower() not in ("0", "false")
    ):
        # Some builds for Windows do not read the variable. They have sent an event already.
        runtime.disable_telemetry_events()
    if verbose and runtime is not None:
        runtime.set_default_logger_severity(_INFO)
    return handler.handle(request)


def _limit_memory(size: int) -> None:
    if sys.platform == "linux":
        import resource

        # Not the address space, of which the libraries of EPs reserve much and use little.
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def main(action: str, request_path: str, reply_path: str, *flags: str) -> int:
    """Answer the request in the file ``request_path`` with the file ``reply_path``.

    Returns the exit code.
    """
    if sys.version_info >= (3, 14):
        # The stack of C has more lines than an error shows of a log, and the reason is above it.
        faulthandler.enable(c_stack=False)
    for flag in flags:
        if flag.startswith(MEMORY_LIMIT):
            _limit_memory(int(flag.removeprefix(MEMORY_LIMIT)))
    report_to(Path(reply_path).with_name("step"))
    request = from_json(Path(request_path).read_bytes(), REQUESTS[action])
    try:
        reply, code = _answer(action, request, verbose=VERBOSE in flags), DONE
    except ModelError as error:
        reply, code = Refusal(error.problems), REFUSED
    except EpcontextError as error:
        reply, code = Refusal(error.problems), FAILED
    except OSError as error:
        reply, code = Refusal((_os_problem(error),)), FAILED
    except Exception as error:
        # For any other exception than ONNX Runtime's the traceback goes to the log.
        if not _is_of_onnx_runtime(error):
            _print_traceback()
        reply, code = Refusal((_problem(error),)), FAILED
    try:
        write_atomically(Path(reply_path), to_json(reply), durable=False)
    except OSError as error:
        # Often the disk is full, which the build finds out.
        with contextlib.suppress(OSError):
            print(f"the reply cannot be written: {error}")  # noqa: T201, it is for the log
        return 1
    return code


def _is_of_onnx_runtime(error: Exception) -> bool:
    """Whether ONNX Runtime or an EP raised it: their messages are complete and meant for users.

    Its exceptions share no base class, and EPs raise a plain RuntimeError through its sessions.
    """
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and "onnxruntime" in Path(frames[-1].filename).parts
    return type(error).__module__.startswith("onnxruntime.") or inside


def _print_traceback() -> None:
    # The disk that is full has the log too.
    with contextlib.suppress(OSError):
        traceback.print_exc()


def _os_problem(error: OSError) -> Problem:
    """The problem for ``error``: the system's, or that of the library that raised it."""
    if is_refusal(error):
        return system_problem(error, Path.cwd())
    _print_traceback()
    return _problem(error)


def _problem(error: Exception) -> Problem:
    return Problem(Kind.COMPILE_FAILED, "", f"{type(error).__name__}: {error}")


def _keep(arguments: list[str]) -> int:
    """Answer the request in a fork, which ends with standard input; returns its exit code."""
    from hatch_epcontext.worker.supervisor import Supervisor

    def work() -> int:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        return main(*arguments)

    return Supervisor(0).run(work, lambda: None)


def _end_with_input() -> None:
    """End this process when nobody has the other end of its standard input any more."""
    with contextlib.suppress(OSError):
        os.read(0, 1)
    if sys.platform != "win32":
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _die_like(code: int) -> None:
    """End as the process with the exit code ``code`` did: a negative one is that of a signal."""
    if code < 0:
        faulthandler.disable()
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    _arguments = [each for each in sys.argv[1:] if each != END_WITH_INPUT]
    if END_WITH_INPUT not in sys.argv:
        sys.exit(main(*_arguments))
    elif sys.platform == "linux":
        _die_like(_keep(_arguments))
    else:
        # On Windows a job object ends it with the build. There numpy's import would wait for this
        # thread: it asks for the type of standard input (numpy 24290, CPython 78961).
        if sys.platform != "win32":
            threading.Thread(target=_end_with_input, daemon=True).start()
        sys.exit(main(*_arguments))
