"""Who raised an exception; it imports no ONNX Runtime."""

from __future__ import annotations

import traceback
from pathlib import Path


def is_of_onnx_runtime(error: Exception) -> bool:
    """Whether ONNX Runtime or an EP raised it: their messages are complete and meant for users.

    Its exceptions share no base class, and EPs raise a plain RuntimeError through its sessions.
    """
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and "onnxruntime" in Path(frames[-1].filename).parts
    return type(error).__module__.startswith("onnxruntime.") or inside
