"""Lines in the logs of ONNX Runtime and of EPs that clean runs print too: they explain no failure."""

from __future__ import annotations

import re

_STANDING = re.compile(
    "|".join(
        (
            # QNN, except on Windows for Arm.
            r"File mapped weights feature is only available",
            # An EP for another version of ONNX Runtime.
            r"EPContext encryption config unavailable",
            # The C library that QNN's simulator contains.
            r"# ?LIBNATIVE: No alternate configuration",
            # Whenever nodes are left to the CPU.
            r"Unable to get producer node for OrtValueInfo",
            r"Some nodes were not assigned to the preferred execution providers",
            r"Rerunning with verbose output on a non-minimal build",
            # Exporters write such models.
            r"appears in graph inputs and will not be treated as constant value",
            r"CleanUnusedInitializersAndNodeArgs\] Removing initializer",
        )
    )
)


def is_benign(line: str) -> bool:
    """Whether a line of a log is one that clean runs print too."""
    return _STANDING.search(line) is not None
