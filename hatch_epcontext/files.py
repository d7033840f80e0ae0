"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path


def replace(file: Path, text: str) -> Path:
    """Write ``file`` so that others see the old text or the new one; its folder is made if need be.

    A file that is there keeps its mode. What is no Unicode, as a part of a file's name may be, is written as
    an escape.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # Beside it, for a file can only be renamed within its file system.
    own = f"{os.getpid()}-{threading.get_ident()}"
    temporary = file.with_name(f".{file.name}.{own}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
        sync(temporary)
        if file.exists():
            shutil.copymode(file, temporary)
        return temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def sync(file: Path) -> None:
    """Have the system write ``file`` to its disk: a power cut can leave a renamed file empty."""
    with file.open("rb+") as handle:
        os.fsync(handle.fileno())
