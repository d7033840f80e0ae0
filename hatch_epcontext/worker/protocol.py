"""What a worker process and who starts it agree on: messages, codes, environment, the folder of a request."""

from __future__ import annotations

DONE = 0
REFUSED = 3
"""The worker's code when the model or its configuration is invalid."""
FAILED = 4
"""The worker's code when ONNX Runtime or the EP failed: its log may have more."""
VERBOSE = "--verbose"
"""The worker's argument when ONNX Runtime prints its whole log."""
MEMORY_LIMIT = "--memory-limit="
"""The beginning of the worker's argument with the bytes of memory that it may use."""

STARTED, STEP, REPLY, ANSWERED, ENDED = b"started", b"step", b"reply", b"answered", b"ended"
"""The first words of the lines that a worker sends: a fork's first one; what it does now; the reply to a
request as JSON; then the code of that reply. A fork's server sends the last one, with the exit code.
"""

NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
"""The variable that ONNX Runtime reads when it is loaded: see "Disabling Telemetry" in its ``Privacy.md``."""

LOG, TEMPORARY = "worker.log", "tmp"
"""What the folder of a request has: what the worker prints, and a folder for temporary files."""
PRELOAD = "--preload"
"""The argument of the server of forks when it imports first what workers need; the names of providers follow
whose simulators it loads too.
"""
