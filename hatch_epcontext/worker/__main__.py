"""``python -m hatch_epcontext.worker ACTION REQUEST REPLY [--verbose]``: answer one request and end."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from hatch_epcontext.errors import EpcontextError, ModelError, Problem
from hatch_epcontext.protocol import DONE, FAILED, REFUSED, REQUESTS, VERBOSE, Refusal
from hatch_epcontext.structure import from_json, to_json

_ANSWERS = {
    "inspect": "prepare.inspect",
    "prepare": "prepare.prepare",
    "compile": "compile.compile_job",
    "measure": "measure.measure",
    "validate": "validate.validate",
    "open": "opening.open_once",
    "describe": "describe.describe",
    "survey": "survey.survey",
}
"""The function that answers each action; only its module is imported."""

_WITHOUT_RUNTIME = ("describe",)
_INFO = 1
"""ONNX Runtime's severity of what is neither a warning nor for its own developers."""


def _answer(request: Any) -> Any:
    module, function = _ANSWERS[request.action].split(".")
    found = importlib.import_module(f"hatch_epcontext.worker.{module}")
    return getattr(found, function)(request)


def main(action: str, asked: str, answered: str, *how: str) -> int:
    """Answer the request in the file ``asked`` with the file ``answered``; returns the exit code."""
    request = from_json(Path(asked).read_bytes(), REQUESTS[action])
    try:
        if VERBOSE in how and action not in _WITHOUT_RUNTIME:
            import onnxruntime

            onnxruntime.set_default_logger_severity(_INFO)
        answer, code = _answer(request), DONE
    except ModelError as error:
        answer, code = Refusal(error.problems), REFUSED
    except EpcontextError as error:
        answer, code = Refusal(error.problems), FAILED
    except Exception as error:
        # ONNX Runtime's exceptions share no base class. What they say is for the user, and says all;
        # of any other the traceback goes to the log.
        if not type(error).__module__.startswith("onnxruntime."):
            import traceback

            traceback.print_exc()
        answer, code = Refusal((Problem("", f"{type(error).__name__}: {error}"),)), FAILED
    Path(answered).write_text(to_json(answer), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
