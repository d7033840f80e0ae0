"""What one build sees of the caches, and an index of files, with which it reads no unchanged file.

The status of a user's file, which has the time of its change, is trusted once that is two seconds old.
Windows has no such time: there each build reads the content.

An `Index` belongs to one build, which sees one version of each file: it fails when a file has changed since
it was first read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hatch_epcontext.cache.store import DamagedError, EntryKind, Store, files_of, untrusted
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.errors import Kind, ModelError, Problem
from hatch_epcontext.files import FileRecord, file_sha256
from hatch_epcontext.system import reason_not_written

if TYPE_CHECKING:
    from hatch_epcontext.cache.shared import SharedCache

T = TypeVar("T")

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
    """An index in ``store``; with None it only remembers what it read itself."""

    def __init__(self, store: Store | None = None) -> None:
        self.store = store
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
        settled, key, sha256 = _is_settled(status), _digest(status), None
        if self.store and settled:
            with contextlib.suppress(OSError, DamagedError):
                sha256 = self.store.get("index", key, str)
        if not sha256:
            sha256 = file_sha256(path)
            if _digest(path.stat()) != key:
                raise changed_error(path)
            if self.store and settled:
                with contextlib.suppress(OSError):
                    self.store.put("index", key, sha256)
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
    message = (
        "changed during the build: what was compiled may be neither the old nor the new contents."
    )
    hint = "Build again when nothing writes to it. Nothing of it was stored or shipped."
    return ModelError(Problem(Kind.MODEL_CHANGED, str(path), message, hint))


class Cache:
    """The entries of `store` for one build: first those in the user's folder, then those of a shared cache.

    ``root``: that folder; None when the build does not use it. ``warn`` gets a line for each damaged entry,
    and one when the folder cannot be used; the build then goes on without it. What is stored is also sent to
    ``shared``, if the build may write to it. ``index``: of the files that the build reads.
    """

    def __init__(
        self, root: Path | None, warn: Callable[[str], None], shared: SharedCache | None = None
    ) -> None:
        self._warn = warn
        self.shared = shared
        if root is not None and (reason := untrusted(root)):
            warn(
                f"the cache folder {root} is not used, because {reason}. {PREFIX}CACHE_DIR names another."
            )
            root = None
        self._store = None if root is None else Store(root)
        if shared is not None:
            shared.sent = self._store
        self._is_writable = True
        self._damaged: set[Path] = set()
        self.index = Index(self._store)

    @property
    def trouble(self) -> str:
        """Why the build goes on without the shared cache, as a line of a message; empty if it uses it."""
        if self.shared is None or not (reason := self.shared.transport.stopped):
            return ""
        return f"\nThe shared cache {self.shared.transport.url} cannot be used ({reason})."

    def stop(self) -> None:
        """Stop waiting for the shared cache, and stop using it."""
        if self.shared is not None:
            self.shared.stop()

    def get(
        self,
        kind: EntryKind,
        key: str,
        type_: type[T],
        folder: Path | None = None,
        fits: Callable[[T], bool] = lambda record: True,
        *,
        latest: bool = False,
    ) -> T | None:
        """The record of an entry, whose files are then in ``folder``, which is created; None for a miss.

        The files are hard links where possible: later changes of the cache do not matter. Without a folder
        only its record is read. An entry is used only if its record ``fits``. A shared cache is asked for
        what this machine lacks; with ``latest`` also for what others have added or replaced.
        """
        own: Any = None
        reason = ""
        if self._store is not None:
            try:
                own = self._store.get(kind, key, type_, folder)
            except DamagedError as error:
                reason = f"is damaged ({error})"
            except OSError as error:
                reason = f"cannot be read ({error.strerror or error})"
            entry = self._store.entry(kind, key)
            if reason and entry not in self._damaged:
                self._damaged.add(entry)
                self._warn(f"the entry {entry} of the cache {reason}, and is made again")
        record = own if own is not None and fits(own) else None
        if self.shared is not None and (record is None or latest):
            other = self.shared.get(kind, key, type_, folder)
            if other is not None and fits(other):
                record = own.joined(other) if own is not None and kind == "searches" else other
                if folder is not None or not files_of(record):
                    self.put(kind, key, record, folder, is_new=False)
        if record is None and folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        elif self.shared is not None and record is not None and not latest:
            # Another build may have made it that could not write to the shared cache.
            self.shared.put(kind, key, record, folder)
        return record

    def put(
        self,
        kind: EntryKind,
        key: str,
        record: object,
        folder: Path | None = None,
        *,
        is_new: bool = True,
    ) -> None:
        """Store ``record``, which names the files in ``folder`` that no longer change.

        It is also sent to the shared cache, if it ``is_new`` there.
        """
        if self._store is not None and self._is_writable:
            try:
                self._store.put(kind, key, record, folder)
            except OSError as error:
                self._is_writable, root = False, self._store.root
                self._warn(
                    f"the cache folder {root} cannot be written ({reason_not_written(error, root)}); this "
                    f"build does not store its artifacts. {PREFIX}CACHE_DIR names another folder."
                )
        if self.shared is not None and is_new:
            self.shared.put(kind, key, record, folder)

    def put_report(self, name: str, text: str) -> Path | None:
        """Store the report of the project ``name``; returns its path, or None without a cache."""
        if self._store is not None and self._is_writable:
            with contextlib.suppress(OSError):
                return self._store.put_report(name, text)
        return None

    def lock(self, key: str, on_wait: Callable[[], None]) -> AbstractContextManager[object]:
        """Hold the right to make what ``key`` identifies: see `Store.lock`."""
        return contextlib.nullcontext() if self._store is None else self._store.lock(key, on_wait)


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
