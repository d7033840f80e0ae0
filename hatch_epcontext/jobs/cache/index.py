"""An index of files: from a file's status to its sha256. With it a build reads no unchanged file.

An index is a folder of small files, which are written atomically, and which any number of builds may use.

The status of a user's file, which has the time of its change, is trusted once that is two seconds old.
Windows has no such time: there each build reads the content.

An `Index` belongs to one build, which sees one version of each file: it fails when a file has changed since
it was first read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

from hatch_epcontext.errors import Kind, ModelError, Problem
from hatch_epcontext.files import (
    FileRecord,
    file_sha256,
    is_sha256,
    known_text,
    mark_used,
    write_atomically,
)

_SETTLED_NS = 2 * 10**9
"""Nanoseconds after which a changed file must have another status: the coarsest time stamps are two seconds
apart."""


class _Look(NamedTuple):
    """A file when a build first read it, and its hex sha256."""

    status: os.stat_result
    sha256: str
    settled: bool
    """Whether another change must show in its status."""


class Index:
    """An index in ``folder``; with None it only remembers what it read itself."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._looks: dict[Path, _Look] = {}

    def record(self, path: Path) -> FileRecord:
        """The size and the hex sha256 of the file ``path``; raises as `sha256` does."""
        return FileRecord(path.stat().st_size, self.sha256(path))

    def sha256(self, path: Path, *, again: bool = False) -> str:
        """The hex sha256 of the file ``path``, from the index if its status is known there.

        Raises ModelError if the file has changed since it was first read. To find that out, a file is read
        ``again`` that was written just before.
        """
        if (first := self._looks.get(path)) is not None:
            self._compare(path, first, read=again and not first.settled)
            return first.sha256
        status = path.stat()
        settled = _is_settled(status)
        file = self.folder / _digest(status) if self.folder and settled else None
        sha256 = known_text(file) if file else None
        if file and sha256 and is_sha256(sha256):
            mark_used(file)
        else:
            sha256 = file_sha256(path)
            if _digest(path.stat()) != _digest(status):
                raise changed_error(path)
            if file:
                with contextlib.suppress(OSError):
                    write_atomically(file, sha256, durable=False)
        # Threads may read it at the same time: the first result counts.
        return self._looks.setdefault(path, _Look(status, sha256, settled)).sha256

    def _compare(self, path: Path, look: _Look, *, read: bool) -> None:
        """Raise ModelError if the file differs from what it was at the first ``look``.

        It is read again with ``read``, or if its status changed: hard links and chmod change that too.
        """
        try:
            status = path.stat()
            moved = abs(status.st_mtime_ns - look.status.st_mtime_ns) > _SETTLED_NS
            # Written in the meantime: a worker may have read neither the old nor the new contents.
            if moved or status.st_size != look.status.st_size:
                raise changed_error(path)
            if not read and _digest(status) == _digest(look.status):
                return
            if file_sha256(path) != look.sha256 or _digest(path.stat()) != _digest(status):
                raise changed_error(path)
        except OSError as error:
            raise changed_error(path) from error
        self._looks[path] = _Look(status, look.sha256, _is_settled(status))


def changed_error(path: Path) -> ModelError:
    """The error for a file, or a folder of files, that changed during the build."""
    return ModelError(
        Problem(
            Kind.MODEL_CHANGED,
            str(path),
            "changed during the build: what was compiled may be neither the old nor the new contents.",
            "Build again when nothing writes to it. Nothing of it was stored or shipped.",
        )
    )


def _digest(status: os.stat_result) -> str:
    """What identifies a file and its last change."""
    times = status.st_mtime_ns, status.st_ctime_ns
    parts = (status.st_dev, status.st_ino, status.st_size, *times)
    return hashlib.sha256(":".join(map(str, parts)).encode()).hexdigest()


def _is_settled(status: os.stat_result) -> bool:
    if sys.platform == "win32":
        return False
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    return changed < time.time_ns() - _SETTLED_NS
