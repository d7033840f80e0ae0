"""Temporary folders."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def temp_dir() -> Iterator[Path]:
    """A temporary folder, which is removed in the end."""
    with tempfile.TemporaryDirectory(
        prefix="hatch-epcontext-", ignore_cleanup_errors=True
    ) as folder:
        # Resolved, because a temporary folder is often behind a link, and EPs compare paths.
        yield Path(folder).resolve()
