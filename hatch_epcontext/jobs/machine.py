"""How much this machine can do at once."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

_JOB_MEMORY = 1 << 30
"""Bytes that a job needs besides its model: for ONNX Runtime, the EP's compiler, and its log."""

_MODEL_COPIES = 4
"""The most copies of its model that a job has in memory: read, simplified and compiled."""

_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def jobs_at_once(configured: int | Literal["auto"], largest_model: int) -> int:
    """How many jobs to run at once: the ``configured`` number, or for "auto" as many as fit.

    ``largest_model``: bytes of the largest source model.
    """
    if configured != "auto":
        return configured
    memory = free_memory()
    fit = cores() if memory is None else memory // (_JOB_MEMORY + _MODEL_COPIES * largest_model)
    return max(1, min(cores(), fit))


def cores() -> int:
    """The number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory() -> int | None:
    """Bytes of free memory, within the limits of this process's control groups; None if unknown."""
    if sys.platform != "linux":
        return None
    return min((*_system_memory(), *_group_memory()), default=None)


def _system_memory() -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _group_memory() -> Iterator[int]:
    """The bytes left in this process's control group, and in those around it (version 2)."""
    with contextlib.suppress(OSError):
        for line in _OWN_GROUP.read_text(encoding="utf-8").splitlines():
            own = _GROUPS / line.removeprefix("0::/")
            for group in (own, *own.parents) if line.startswith("0::/") else ():
                with contextlib.suppress(OSError, ValueError):
                    limit = int((group / "memory.max").read_text(encoding="ascii"))
                    used = int((group / "memory.current").read_text(encoding="ascii"))
                    yield max(0, limit - used)
