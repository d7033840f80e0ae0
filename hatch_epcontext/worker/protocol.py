"""The protocol between a worker and the build: messages, codes, environment, the folder of a request."""

from __future__ import annotations

DONE = 0
FAILED = 4
"""The worker's code when the reply is a `requests.Failure`."""
VERBOSE = "--verbose"
"""The worker's flag for ONNX Runtime's verbose log."""
MEMORY_LIMIT = "--memory-limit="
"""The prefix of the worker's flag with the bytes of memory that it may use."""

STARTED, STEP, REPLY, ANSWERED, ENDED = b"started", b"step", b"reply", b"answered", b"ended"
"""The first words of the lines that a worker sends: a fork's first line; its current step; the reply to a
request as JSON; and the code of that reply. The last one is from the server of forks, with the exit code.
"""

NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
"""The variable that ONNX Runtime reads when it is loaded: see "Disabling Telemetry" in its ``Privacy.md``."""

LOG, TEMPORARY = "worker.log", "tmp"
"""Names in the folder of a request: the worker's log, and a folder for temporary files."""
CRASHED = 5
"""The exit code of the server of forks when the server itself crashed."""
PRELOAD = "--preload"
"""The argument that makes the server of forks import what workers need; the names of providers follow whose
simulators it also loads.
"""
