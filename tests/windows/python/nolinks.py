"""Symbolic links fail as they do for most users of Windows; Wine says that it makes them, and does not."""

import errno
import os
from typing import Any


def _refuse(*_: Any, **__: Any) -> None:
    error = OSError(errno.EINVAL, "A required privilege is not held by the client")
    error.winerror = 1314  # type: ignore[attr-defined, unused-ignore]
    raise error


os.symlink = _refuse
