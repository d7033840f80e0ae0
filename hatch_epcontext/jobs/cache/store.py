"""What earlier builds made: in the folder of a user's cache, and after it in a shared cache.

Several builds may use the folder at once. Below ``<root>/<LAYOUT>/``, where keys are hex sha256s:

- ``<kind>/<key>/``: an entry: ``record.json``, ``files/``, and their status when they were intact;
- ``index/``: see `index`; ``locks/<key>``: locked by the build that makes an entry;
- ``parts/<key>/``: the files of a download that is not complete;
- ``sent/``: what a shared cache has, see `shared`;
- ``staging/``: entries that are not yet published, or being removed.

The folder ``<root>/reports`` has the report of each project's last build.

Only a folder that no other user can write to is used (`untrusted`), so its contents come from this user's
builds. A file that has changed is compared with its record.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import math
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.files import (
    FileRecord,
    is_generated,
    is_regular,
    known_text,
    link_or_copy,
    mark_used,
    patiently,
    read_regular,
    record_file,
    sweep,
    sync,
    temp_dir,
    write_atomically,
)
from hatch_epcontext.jobs.cache import LAYOUT, DamagedError, Growing, files_of, read_record
from hatch_epcontext.jobs.cache.index import Index
from hatch_epcontext.serialize import to_json
from hatch_epcontext.system import refusal

if TYPE_CHECKING:
    from hatch_epcontext.jobs.cache.shared import SharedCache

T = TypeVar("T")

Kind = Literal["artifacts", "searches", "refs", "facts", "models", "cut"]
"""What an entry is: the result of an attempt, the search of a job, the key of the latest artifact with some
settings, the facts of a model, a model from elsewhere, or a cut model.
"""

KINDS: tuple[Kind, ...] = get_args(Kind)

_LASTING = frozenset({"artifacts", "models"})
"""The kinds that survive a power cut, and are never replaced while they are intact."""

_RECORD, _FILES, _STATUS = "record.json", "files", "status.json"

_OWN_NAME = re.compile(r"[0-9a-f]{64}|\..+\.\d+-\d+\.tmp")
"""A hex sha256, or what `write_atomically` calls a file while it writes it."""

_ATTEMPTS = 3
"""How many times an entry is published again while other processes remove it."""

_POLL_SECONDS = 0.5
"""Seconds after which a build that waits for another one checks again whether it must end."""


@dataclass(frozen=True)
class Files:
    """The record of files alone, by name; that of every entry with files has them too."""

    files: Mapping[str, FileRecord]


@dataclass(frozen=True)
class Entry:
    """An entry of a store: its size in bytes, and the time of its last use, in seconds since the epoch."""

    kind: Kind
    folder: Path
    size: int
    used: float

    @property
    def key(self) -> str:
        return self.folder.name

    @property
    def files(self) -> Mapping[str, FileRecord] | None:
        """Its files, which are not checked, by name; None if its record has none, or cannot be read."""
        with contextlib.suppress(OSError, DamagedError):
            return read_record(read_regular(self.folder / _RECORD), Files).files
        return None


class Store:
    """The cache folder ``root``. Builds may use it at the same time. Methods raise OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.layout = root / LAYOUT

    def entry(self, kind: Kind, key: str) -> Path:
        """The folder of an entry."""
        return self.layout / kind / key

    def get(self, kind: Kind, key: str, type_: type[T], folder: Path | None = None) -> T | None:
        """The record of an entry, whose files are then in ``folder``, which is created; None for a miss.

        They are hard links where possible: later changes of the store do not matter. Raises DamagedError.
        """
        entry = self.entry(kind, key)
        try:
            record = read_record(read_regular(entry / _RECORD), type_)
            _check(entry, files_of(record))
            if folder is not None:
                for name in files_of(record):
                    _transfer(kind, entry / _FILES / name, folder / name)
        except OSError as error:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            # Or another process cleans the store at this moment.
            if isinstance(error, (FileNotFoundError, NotADirectoryError)):
                return None
            raise
        mark_used(entry)
        return record

    def put(self, kind: Kind, key: str, record: object, folder: Path | None = None) -> None:
        """Store ``record``, which names the files in ``folder`` that no longer change."""
        entry, text = self.entry(kind, key), to_json(record, indent=None)
        if folder is None:
            if known_text(entry / _RECORD) == text:
                mark_used(entry)
            else:
                # Another process may remove the entry at this moment: the next build stores it.
                with contextlib.suppress(FileNotFoundError):
                    write_atomically(entry / _RECORD, text, durable=False)
            return
        lasts = kind in _LASTING
        with self.staging() as temporary:
            staged = temporary / "entry"
            for name in files_of(record):
                _transfer(kind, folder / name, staged / _FILES / name)
                if lasts:
                    sync(staged / _FILES / name)
            (staged / _STATUS).write_text(_status(staged, files_of(record)), encoding="utf-8")
            write_atomically(staged / _RECORD, text, durable=lasts)
            for _ in range(_ATTEMPTS):
                # Other builds also remove what is damaged, or clean the cache.
                entry.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(OSError):
                    patiently(lambda: staged.rename(entry))
                    return
                # Another build was faster, or the existing entry is damaged or older.
                with contextlib.suppress(OSError, DamagedError):
                    if lasts and self.get(kind, key, type(record)) is not None:
                        return
                patiently(lambda: self._discard(entry))
            patiently(lambda: staged.rename(entry))

    @contextlib.contextmanager
    def lock(self, key: str, on_wait: Callable[[], None] | None = None) -> Iterator[bool]:
        """Hold the right to make the entry of ``key``, in this process and all others with this store.

        While another one holds it, ``on_wait`` is called repeatedly; an exception from it ends the wait.
        Without ``on_wait`` it does not wait. The value is whether the right is held: it is not where
        nothing can be locked. The system releases the lock of a process that ends, however it ends.
        """
        # Imported here because it imports asyncio, which builds from the cache do not need.
        import filelock

        file = self.layout / "locks" / key
        lock = filelock.FileLock(file, thread_local=False)
        with contextlib.suppress(OSError, NotImplementedError):
            file.parent.mkdir(parents=True, exist_ok=True)
            while not lock.is_locked:
                try:
                    lock.acquire(timeout=_POLL_SECONDS if on_wait else 0)
                except filelock.Timeout:
                    if on_wait is None:
                        break
                    on_wait()
        try:
            yield lock.is_locked
        finally:
            lock.release()

    @contextlib.contextmanager
    def parts(self, key: str, on_wait: Callable[[], None]) -> Iterator[Path]:
        """A locked folder for the files of the entry ``key`` while they arrive; it stays after an error."""
        with self.lock(key, on_wait):
            folder = self.layout / "parts" / key
            folder.mkdir(parents=True, exist_ok=True)
            yield folder
            shutil.rmtree(folder)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A temporary folder on the file system of the entries, so that it can be renamed."""
        parent = self.layout / "staging"
        parent.mkdir(parents=True, exist_ok=True)
        with temp_dir(parent) as folder:
            yield folder

    def entries(self) -> list[Entry]:
        """All entries, the most recently used first."""
        entries = []
        folders = [(kind, folder) for kind in KINDS for folder in _written(self.layout / kind)]
        for kind, folder in folders:
            # Another process may remove it at this moment.
            with contextlib.suppress(FileNotFoundError):
                size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
                entries.append(Entry(kind, folder, size, folder.lstat().st_mtime))
        return sorted(entries, key=lambda entry: entry.used, reverse=True)

    def prune(self, older_than: datetime.timedelta | None) -> list[Entry]:
        """Remove the entries that are unused for ``older_than``, and what killed builds left before that.

        With None it removes all that builds wrote into the folder. What somebody downloads stays.
        """
        before = math.inf if older_than is None else time.time() - older_than.total_seconds()
        entries = self.entries()
        # As the records of refs name them.
        kept = {to_json(entry.key, indent=None) for entry in entries if entry.used >= before}

        def is_stale(entry: Entry) -> bool:
            is_ref = entry.kind == "refs"
            return entry.used < before or (
                is_ref and known_text(entry.folder / _RECORD) not in kept
            )

        removed = list(filter(is_stale, entries))
        refused: list[OSError] = []
        discards = (partial(self._discard, entry.folder) for entry in removed)
        for remove in itertools.chain[Callable[[], object]](discards, self._leftovers(before)):
            try:
                # A program that keeps one file open keeps others open too.
                remove() if refused else patiently(remove)
            except FileNotFoundError:
                pass
            except OSError as error:
                refused.append(error)
        sweep(self.layout / "staging")
        if refused:
            raise refused[0]
        return removed

    def _leftovers(self, before: float) -> Iterator[Callable[[], object]]:
        """Functions that remove what is older than ``before`` outside of entries, and not needed."""
        for folder in _written(self.layout / "parts", before):
            with self.lock(folder.name) as is_free:
                if is_free:
                    yield partial(shutil.rmtree, folder)
        reports = self.root / "reports"
        for folder in (self.layout / "index", self.layout / "locks", self.layout / "sent", reports):
            for file in _written(folder, before):
                # The lock of what somebody downloads stays.
                if not (self.layout / "parts" / file.name).exists():
                    yield file.unlink
        for file in reports.glob("*.json") if before == math.inf else ():
            if is_generated(file):
                yield file.unlink

    def _discard(self, entry: Path) -> None:
        """Remove an entry so that a build finds all of it or nothing."""
        with self.staging() as trash, contextlib.suppress(FileNotFoundError):
            entry.rename(trash / "entry")


def untrusted(root: Path) -> str | None:
    """Why the contents of the folder ``root`` may not be this user's, as the end of a sentence; else None.

    A missing folder is created so that, if possible, only this user can enter it.
    """
    for folder in (root, root / LAYOUT):
        with contextlib.suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
        try:
            status = folder.stat()
        except OSError:
            # It cannot be written either, which whoever stores something reports.
            return None
        if sys.platform == "win32":
            continue
        # The superuser's builds run on folders of other users, as in a container.
        if os.geteuid() not in (0, status.st_uid):
            return f"{folder} belongs to another user"
        if stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
            return f"other users can write to {folder} (chmod go-w {folder})"
    # What is below has the modes that the user's processes give new files.
    with contextlib.suppress(OSError):
        (root / LAYOUT).chmod(0o700)
    return None


def _transfer(kind: Kind, source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # ONNX Runtime refuses some external data of models if it has several hard links.
    (shutil.copyfile if kind == "cut" else link_or_copy)(source, target)


def _status(entry: Path, files: Mapping[str, FileRecord]) -> str:
    """The status of intact files: only builds write to them, and another size or time shows damage."""
    values = {}
    for name, recorded in files.items():
        status = (entry / _FILES / name).stat()
        values[name] = recorded.sha256, status.st_ino, status.st_size, status.st_mtime_ns
    return json.dumps(values)


def _check(entry: Path, files: Mapping[str, FileRecord]) -> None:
    """Raise DamagedError if a file is not as recorded; all are read if the status of one has changed."""
    with contextlib.suppress(FileNotFoundError):
        if not files or known_text(entry / _STATUS) == _status(entry, files):
            return
    for name, recorded in files.items():
        file = entry / _FILES / name
        if not is_regular(file) or record_file(file) != recorded:
            # Gone, if another process cleans the store at this moment.
            (entry / _RECORD).stat()
            raise DamagedError(f"its file {name} is missing or has other content")
    with contextlib.suppress(OSError):
        write_atomically(entry / _STATUS, _status(entry, files), durable=False)


def _written(folder: Path, before: float = math.inf) -> list[Path]:
    """What builds wrote into ``folder``, or were writing, before that time: the user may name any folder."""
    paths = []
    for path in sorted(folder.glob("*")):
        # Another process may remove it at this moment.
        with contextlib.suppress(FileNotFoundError):
            if _OWN_NAME.fullmatch(path.name) and path.lstat().st_mtime < before:
                paths.append(path)
    return paths


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
        if shared is not None and root is not None:
            shared.sent = root / LAYOUT / "sent"
        self._is_writable = True
        self._damaged: set[Path] = set()
        self.index = Index(None if self._store is None else self._store.layout / "index")

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
        kind: Kind,
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
        own = self._own(kind, key, type_, folder)
        record = own if own is not None and fits(own) else None
        if self.shared is not None and (record is None or latest):
            other = self.shared.get(kind, key, type_, folder)
            if other is not None and fits(other):
                record = own.joined(other) if isinstance(own, Growing) else other
                if folder is not None or not files_of(record):
                    self._keep(kind, key, record, folder)
        if record is None and folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        elif self.shared is not None and record is not None and not latest:
            # Another build may have made it that could not write to the shared cache.
            self.shared.put(kind, key, _shareable(record), folder)
        return record

    def put(self, kind: Kind, key: str, record: object, folder: Path | None = None) -> None:
        """Store ``record``, which names the files in ``folder`` that no longer change."""
        self._keep(kind, key, record, folder)
        if self.shared is not None:
            self.shared.put(kind, key, _shareable(record), folder)

    def lock(self, key: str, on_wait: Callable[[], None]) -> AbstractContextManager[object]:
        """Hold the right to make what ``key`` identifies: see `Store.lock`."""
        return contextlib.nullcontext() if self._store is None else self._store.lock(key, on_wait)

    def store_report(self, name: str, text: str) -> Path | None:
        """Store the report of the last build of ``name``; returns its path, or None if it is not stored."""
        if self._store is None:
            return None
        file = self._store.root / "reports" / f"{name}.json"
        with contextlib.suppress(OSError):
            if file.exists() and not is_generated(file):
                return None
            # Builds without changes have equal reports, and replacing a file may wait for the disk.
            if file.is_file() and file.read_text(encoding="utf-8", errors="replace") == text:
                return file
            return write_atomically(file, text, durable=False)
        return None

    def _own(self, kind: Kind, key: str, type_: type[T], folder: Path | None) -> T | None:
        if self._store is None:
            return None
        try:
            return self._store.get(kind, key, type_, folder)
        except DamagedError as error:
            reason = f"is damaged ({error})"
        except OSError as error:
            reason = f"cannot be read ({error.strerror or error})"
        entry = self._store.entry(kind, key)
        if entry not in self._damaged:
            self._damaged.add(entry)
            self._warn(f"the entry {entry} of the cache {reason}, and is made again")
        return None

    def _keep(self, kind: Kind, key: str, record: object, folder: Path | None) -> None:
        if self._store is None or not self._is_writable:
            return
        try:
            self._store.put(kind, key, record, folder)
        except OSError as error:
            self._is_writable, root = False, self._store.root
            self._warn(
                f"the cache folder {root} cannot be written ({refusal(error, root)}); this "
                f"build does not store its artifacts. {PREFIX}CACHE_DIR names another folder."
            )


def _shareable(record: object) -> object:
    """What other machines may use of ``record``."""
    to_share: Callable[[], object] = getattr(record, "to_share", lambda: record)
    return to_share()
