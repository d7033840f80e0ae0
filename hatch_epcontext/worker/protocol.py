"""What a worker process and who starts it agree on: arguments, exit codes, environment, temporary folder."""

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

STARTED = b"started"
"""What a fork sends first."""
ANSWERED = b"answered "
"""The beginning of what a worker sends when it has answered a request; the code follows."""

NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
"""The variable that ONNX Runtime reads when it is loaded: see "Disabling Telemetry" in its ``Privacy.md``."""

REQUEST, REPLY, LOG, STEP, TEMPORARY = "request.json", "reply.json", "worker.log", "step", "tmp"
"""What the folder of a request has: it, its reply, what the worker prints, what it is doing, and a folder for
temporary files."""
PRELOAD = "--preload"
"""The argument of the server of forks when it imports first what workers need."""
