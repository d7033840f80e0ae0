"""What a worker process and who starts it agree on: arguments, exit codes, environment, temporary folder."""

from __future__ import annotations

from pathlib import Path

DONE = 0
REFUSED = 3
"""The worker's exit code when the model or its configuration is invalid."""
FAILED = 4
"""The worker's exit code when ONNX Runtime or the EP failed: its log may have more."""
VERBOSE = "--verbose"
"""The worker's argument when ONNX Runtime prints its whole log."""
END_WITH_INPUT = "--end-with-input"
"""The worker's argument when it must end, with all that it started, at the end of its standard input."""
MEMORY_LIMIT = "--memory-limit="
"""The beginning of the worker's argument with the bytes of memory that it may use."""

STARTED = b"started"
"""The first answer: the worker was forked."""

NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
"""The variable that ONNX Runtime reads when it is loaded: see "Disabling Telemetry" in its ``Privacy.md``."""

TEMPORARY = "tmp"
"""The temporary folder of a worker, in its own folder."""


def own_variables(folder: Path) -> dict[str, str]:
    """The variables of the worker with this folder: what libraries leave in their temporary one is in it."""
    return dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder / TEMPORARY))
