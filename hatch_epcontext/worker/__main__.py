"""``python -m hatch_epcontext.worker ACTION REQUEST REPLY [FLAGS]``: answer one request and exit."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from hatch_epcontext.errors import EpcontextError, Kind, ModelError, Problem
from hatch_epcontext.ipc.protocol import (
    DONE,
    FAILED,
    MEMORY_LIMIT,
    REFUSED,
    REQUESTS,
    VERBOSE,
    Refusal,
)
from hatch_epcontext.serialize import from_json, to_json
from hatch_epcontext.worker.step import report_to

_INFO = 1
"""ONNX Runtime's log severity for everything but messages for its own developers."""


def _answer(action: str, request: Any, *, verbose: bool) -> Any:
    handler = importlib.import_module(f"hatch_epcontext.worker.{action}")
    # Not imported here: `inspect` works without ONNX Runtime.
    runtime: Any = sys.modules.get("onnxruntime")
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
    except Exception as error:
        # ONNX Runtime's exceptions share no base class. Their messages are complete and meant for
        # users; for any other exception the traceback goes to the log.
        if not type(error).__module__.startswith("onnxruntime."):
            import traceback

            traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        reply, code = Refusal((Problem(Kind.COMPILE_FAILED, "", message),)), FAILED
    Path(reply_path).write_text(to_json(reply), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
