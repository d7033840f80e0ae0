"""An index of files: from a file's status to its sha256. With it a build reads no unchanged file.

An index is a folder of small files, which are written atomically, and which any number of builds may use.

The status of a user's file, which has the time of its change, is trusted once that is two seconds old.
Windows has no such time: there each build reads the content. Only builds write to the files of the cache, so
their size, inode and time of change are enough to detect damage.

An `Index` belongs to one build, which sees one version of each file: it fails when a file has changed since
it was first read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from dataclasses import field, replace
from pathlib import Path

from hatch_epcontext.errors import Kind, ModelError, Problem
from hatch_epcontext.files import (
    FileRecord,
    file_sha256,
    is_sha256,
    known_text,
    mark_used,
    record_file,
    write_atomically,
)
from hatch_epcontext.frozen import dataclass


@dataclass(frozen=True)
class FileState:
    """A file when a build first read it: size in bytes, time of its last change in ns, hex sha256.

    ``settled``: whether another change must show in its status.
    """

    size: int
    changed: int
    digest: str
    sha256: str
    settled: bool


_SETTLED_NS = 2 * 10**9
"""Nanoseconds after which a changed file must have another status: the coarsest time stamps are two seconds
apart."""


@dataclass(frozen=True)
class Index:
    """An index in ``folder``; with None it only remembers what it read itself."""

    folder: Path | None = None
    _states: dict[Path, FileState] = field(default_factory=dict)
    _absent: dict[Path, FileRecord] = field(default_factory=dict)

    def assume(self, path: Path, record: FileRecord) -> None:
        """Take ``record`` for the file ``path``, which is not there and which the build does not read."""
        self._absent[path] = record

    def has(self, path: Path) -> bool:
        """Whether the file ``path`` is known although it is not there."""
        return path in self._absent

    def record(self, path: Path) -> FileRecord:
        """The size and the hex sha256 of the file ``path``; raises as `sha256` does."""
        absent = self._absent.get(path)
        return absent or FileRecord(path.stat().st_size, self.sha256(path))

    def sha256(self, path: Path) -> str:
        """The hex sha256 of the file ``path``, from the index if its status is known there.

        Raises ModelError if the file has changed since it was first read.
        """
        if (absent := self._absent.get(path)) is not None:
            return absent.sha256
        first = self._states.get(path)
        if first is None:
            return self._first_state(path).sha256
        self._compare(path, first, read=False)
        return first.sha256

    def check(self, path: Path) -> None:
        """Raise ModelError if the file ``path`` has changed since it was first read.

        Unlike `sha256` this reads a file again that was written just before it was first read.
        """
        first = self._states.get(path)
        if first is None:
            self._first_state(path)
        else:
            self._compare(path, first, read=not first.settled)

    def _first_state(self, path: Path) -> FileState:
        status = path.stat()
        key = _digest_of(status)
        settled = _is_settled(status)
        found = self._read(key) if settled else None
        if found is None:
            found = file_sha256(path)
            if _digest_of(path.stat()) != key:
                raise changed_error(path)
            if settled:
                self._write(key, found)
        # Threads may read it at the same time: the first result counts.
        look = FileState(status.st_size, status.st_mtime_ns, key, found, settled)
        return self._states.setdefault(path, look)

    def _compare(self, path: Path, first: FileState, *, read: bool) -> None:
        """Raise ModelError if the file differs from its ``first`` state.

        It is read again with ``read``, or if its status changed: hard links and chmod change that too.
        """
        try:
            status = path.stat()
            moved = abs(status.st_mtime_ns - first.changed) > _SETTLED_NS
            # Written in the meantime: a worker may have read neither the old nor the new contents.
            if moved or status.st_size != first.size:
                raise changed_error(path)
            digest = _digest_of(status)
            if not read and digest == first.digest:
                return
            if file_sha256(path) != first.sha256 or _digest_of(path.stat()) != digest:
                raise changed_error(path)
        except OSError as error:
            raise changed_error(path) from error
        self._states[path] = replace(first, digest=digest, settled=_is_settled(status))

    def is_intact(self, path: Path, recorded: FileRecord) -> bool:
        """Whether a file of the cache is unchanged; it is read if its status has changed."""
        try:
            key = _digest_of_own(path)
            if self._read(key) != recorded.sha256:
                if record_file(path) != recorded:
                    return False
                self._write(key, recorded.sha256)
        except OSError:
            return False
        return True

    def remember(self, path: Path, recorded: FileRecord) -> None:
        """Remember that a file of the cache is as ``recorded``."""
        self._write(_digest_of_own(path), recorded.sha256)

    def _read(self, key: str) -> str | None:
        if self.folder is None:
            return None
        sha256 = known_text(self.folder / key)
        if sha256 is None or not is_sha256(sha256):
            return None
        mark_used(self.folder / key)
        return sha256

    def _write(self, key: str, sha256: str) -> None:
        if self.folder is not None:
            with contextlib.suppress(OSError):
                write_atomically(self.folder / key, sha256, durable=False)


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


def _digest_of(status: os.stat_result) -> str:
    return _digest(status.st_dev, status.st_ctime_ns, status)


def _digest_of_own(path: Path) -> str:
    # Without the time of the last change of its status, which every hard link to it changes.
    return _digest(0, 0, path.stat())


def _digest(device: int, changed: int, status: os.stat_result) -> str:
    parts = (device, status.st_ino, status.st_size, status.st_mtime_ns, changed)
    return hashlib.sha256(":".join(map(str, parts)).encode()).hexdigest()


def _is_settled(status: os.stat_result) -> bool:
    if sys.platform == "win32":
        return False
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    return changed < time.time_ns() - _SETTLED_NS
