"""Windows' job objects: what a process starts ends with the job, and the job with the process that has it."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys

_KILL_ON_JOB_CLOSE = 0x2000
_EXTENDED_LIMIT_INFORMATION = 9


class _Limits(ctypes.Structure):
    """``JOBOBJECT_EXTENDED_LIMIT_INFORMATION``, of which only ``flags`` is used."""

    _fields_ = (
        ("times", ctypes.c_int64 * 2),
        ("flags", ctypes.c_uint32),
        ("working_set", ctypes.c_size_t * 2),
        ("active_processes", ctypes.c_uint32),
        ("affinity", ctypes.c_size_t),
        ("classes", ctypes.c_uint32 * 2),
        ("io", ctypes.c_uint64 * 6),
        ("memory", ctypes.c_size_t * 4),
    )


def contain(process: subprocess.Popen[bytes]) -> contextlib.ExitStack:
    """Put ``process`` into a job of its own; closing the result ends all that it started.

    On other systems, and where Windows refuses, the result does nothing.
    """
    stack = contextlib.ExitStack()
    if sys.platform == "win32":
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.CreateJobObjectW.restype = ctypes.c_void_p
        job = ctypes.c_void_p(kernel.CreateJobObjectW(None, None))
        limits = _Limits(flags=_KILL_ON_JOB_CLOSE)
        kernel.SetInformationJobObject(
            job, _EXTENDED_LIMIT_INFORMATION, ctypes.byref(limits), ctypes.sizeof(limits)
        )
        kernel.AssignProcessToJobObject(job, ctypes.c_void_p(int(process._handle)))  # noqa: SLF001
        stack.callback(kernel.CloseHandle, job)
    return stack
