"""The protocol between a worker and the build: lines, environment, and the folder of a request.

The build answers `READY` with a request: an `Order` as one line of JSON. Then the worker sends `REPLY`, with
the request's reply as JSON, or `FAILURE`, with a `requests.Failure`. Each line of a worker begins with one of
these words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatch_epcontext.frozen import dataclass

READY, REPLY, FAILURE = b"ready", b"reply", b"failure"

ENDED = b"ended"
"""The word before the exit code of a fork, in the last line, which the server of forks sends."""


@dataclass(frozen=True)
class Order:
    """A ``request``, as plain values, for the ``action`` that answers it in ``folder``.

    With ``verbose`` ONNX Runtime prints more than its warnings. ``memory_limit``: the most bytes of memory.
    """

    action: str
    request: Any
    folder: Path
    verbose: bool = False
    memory_limit: int | None = None


NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
"""The variable that ONNX Runtime reads when it is loaded: see "Disabling Telemetry" in its ``Privacy.md``."""

LOG, STEP = "worker.log", "step"
"""Names in the folder of a request: the worker's log, and its current step."""
