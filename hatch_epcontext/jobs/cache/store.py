"""The folder of a user's cache, safe for several builds at once.

Below ``<root>/<LAYOUT>/``, where keys and names are hex sha256s:

- ``<kind>/<key>/``: an entry, with ``record.json`` and ``files/``;
- ``refs/<name>``: the key of an entry;
- ``index/``: see `index`;
- ``locks/<key>``: locked by the build that makes an entry;
- ``parts/<key>/``: the files of a download that is not complete;
- ``staging/``: entries that are not yet published, or being removed.

The folder ``<root>/reports`` has the report of each project's last build.

Only a folder that no other user can write to is used (`untrusted`), so its contents come from this user's
builds. A file that has changed is compared with its record.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, TypeVar, get_args

from hatch_epcontext.files import (
    FileRecord,
    is_generated,
    is_portable,
    is_sha256,
    known_text,
    link_or_copy,
    mark_used,
    patiently,
    read_regular,
    sweep,
    sync,
    temp_dir,
    write_atomically,
)
from hatch_epcontext.jobs.cache import LAYOUT
from hatch_epcontext.jobs.cache.index import Index
from hatch_epcontext.serialize import from_json, to_json

T = TypeVar("T")

Kind = Literal["artifacts", "searches", "facts", "models", "cut"]
"""What an entry is: the result of an attempt, the search of a job, the facts of a model, a model from
elsewhere, or a cut model.
"""

KINDS: tuple[Kind, ...] = get_args(Kind)

_LASTING = frozenset({"artifacts", "models"})
"""The kinds that survive a power cut, and are never replaced while they are intact."""

_RECORD, _FILES = "record.json", "files"

_ATTEMPTS = 3
"""How many times an entry is published again while other processes remove it."""

_POLL_SECONDS = 0.5
"""Seconds after which a build that waits for another one checks again whether it must end."""


class DamagedError(ValueError):
    """Something in a cache is not what was written; the text is the reason.

    ``blob``: the file of a shared cache that is damaged or missing, if it is one.
    """

    blob: FileRecord | None = None


@dataclass(frozen=True)
class Files:
    """The record of files alone, by name; that of every entry with files has them too."""

    files: Mapping[str, FileRecord]


@dataclass(frozen=True)
class Entry:
    """An entry of a store: its size in bytes, and the time of its last use."""

    kind: Kind
    folder: Path
    size: int
    used: datetime.datetime

    @property
    def key(self) -> str:
        return self.folder.name


class Store:
    """The cache folder ``root``. Builds may use it at the same time. Methods raise OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._layout = root / LAYOUT
        self.index = Index(self._layout / "index")

    def entry(self, kind: Kind, key: str) -> Path:
        """The folder of an entry."""
        return self._layout / kind / key

    def get(self, kind: Kind, key: str, type_: type[T], folder: Path | None = None) -> T | None:
        """The record of an entry, whose files are then in ``folder``, which is created; None for a miss.

        They are hard links where possible: later changes of the store do not matter. Raises DamagedError.
        """
        entry = self.entry(kind, key)
        try:
            record = read_record(read_regular(entry / _RECORD), type_)
        except (FileNotFoundError, NotADirectoryError):
            return None
        for name, recorded in files_of(record).items():
            if not self.index.is_intact(_file(entry, name), recorded):
                # Another process may have cleaned the store at this moment.
                if not entry.exists():
                    return None
                raise DamagedError(f"its file {name} is missing or has other content")
        if folder is not None:
            try:
                for name in files_of(record):
                    _link(_file(entry, name), folder / PurePosixPath(name))
            except OSError as error:
                shutil.rmtree(folder, ignore_errors=True)
                if isinstance(error, FileNotFoundError):
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
            for name, recorded in files_of(record).items():
                _link(folder / PurePosixPath(name), _file(staged, name))
                if lasts:
                    sync(_file(staged, name))
                self.index.remember(_file(staged, name), recorded)
            write_atomically(staged / _RECORD, text, durable=lasts)
            self._publish(staged, kind, key, type(record))

    def _publish(self, staged: Path, kind: Kind, key: str, type_: type[object]) -> None:
        entry = self.entry(kind, key)
        for _ in range(_ATTEMPTS):
            # Other builds also remove what is damaged, or clean the cache.
            entry.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                patiently(lambda: staged.rename(entry))
                return
            # Another build was faster, or the existing entry is damaged or older.
            with contextlib.suppress(OSError, DamagedError):
                if kind in _LASTING and self.get(kind, key, type_) is not None:
                    return
            patiently(lambda: self._discard(entry))
        patiently(lambda: staged.rename(entry))

    def ref(self, name: str) -> str | None:
        """The key that ``name`` stands for."""
        text = known_text(self._layout / "refs" / name)
        return text if text is not None and is_sha256(text) else None

    def set_ref(self, name: str, key: str) -> None:
        """Let ``name`` stand for ``key``."""
        if self.ref(name) != key:
            write_atomically(self._layout / "refs" / name, key, durable=False)

    @contextlib.contextmanager
    def lock(self, key: str, on_wait: Callable[[], None] | None = None) -> Iterator[bool]:
        """Hold the right to make the entry of ``key``, in this process and all others with this store.

        While another one holds it, ``on_wait`` is called repeatedly; an exception from it ends the wait.
        Without ``on_wait`` it does not wait. The value is whether the right is held: it is not where
        nothing can be locked. The system releases the lock of a process that ends, however it ends.
        """
        # Imported here because it imports asyncio, which builds from the cache do not need.
        import filelock

        file = self._layout / "locks" / key
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
            folder = self._layout / "parts" / key
            folder.mkdir(parents=True, exist_ok=True)
            yield folder
            shutil.rmtree(folder)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A temporary folder on the file system of the entries, so that it can be renamed."""
        parent = self._layout / "staging"
        parent.mkdir(parents=True, exist_ok=True)
        with temp_dir(parent) as folder:
            yield folder

    def record(self, entry: Entry, type_: type[T]) -> T | None:
        """The record of ``entry``, whose files are not checked; None if it cannot be read."""
        with contextlib.suppress(OSError, DamagedError):
            return read_record(read_regular(entry.folder / _RECORD), type_)
        return None

    def entries(self) -> list[Entry]:
        """All entries, the most recently used first."""
        entries = (_entry(kind, folder) for kind in KINDS for folder in self._written(kind))
        return sorted(filter(None, entries), key=lambda entry: entry.used, reverse=True)

    def prune(self, older_than: datetime.timedelta | None) -> list[Entry]:
        """Remove the entries that are unused for ``older_than``, and what killed builds left before that.

        With None it removes all that builds wrote into the folder. What somebody downloads stays.
        """
        now = datetime.datetime.now(datetime.timezone.utc)

        def is_old(used: datetime.datetime) -> bool:
            return not older_than or used < now - older_than

        removed = [entry for entry in self.entries() if is_old(entry.used)]
        with _removals() as remove:
            for entry in removed:
                remove(partial(self._discard, entry.folder))
            for folder in self._written("parts"):
                if is_old(max(map(_used, folder.rglob("*")), default=_used(folder))):
                    with self.lock(folder.name) as is_free:
                        remove(partial(shutil.rmtree, folder)) if is_free else None
            for file in self._written("refs"):
                key = self.ref(file.name)
                if not older_than or not any(
                    self.entry(kind, key or "").exists() for kind in KINDS
                ):
                    remove(file.unlink)
            for file in self._written("locks"):
                with self.lock(file.name) as is_free:
                    pass
                if is_free and is_old(_used(file)):
                    remove(file.unlink)
            for file in (*self._written("index"), *self._unfinished()):
                if is_old(_used(file)):
                    remove(file.unlink)
            for file in _inside(self.root / "reports") if not older_than else ():
                if file.suffix == ".json" and is_generated(file):
                    remove(file.unlink)
        sweep(self._layout / "staging")
        return removed

    def _written(self, folder: str) -> list[Path]:
        """What builds wrote into a folder of the layout: the user may have named any folder."""
        return [path for path in _inside(self._layout / folder) if is_sha256(path.name)]

    def _unfinished(self) -> Iterator[Path]:
        """What `write_atomically` was writing outside of entries."""
        folders = (self._layout / "index", self._layout / "refs", self.root / "reports")
        for file in (file for folder in folders for file in _inside(folder)):
            if re.fullmatch(r"\..+\.\d+-\d+\.tmp", file.name):
                yield file

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


def read_record(text: str | bytes, type_: type[T]) -> T:
    """The record of an entry; raises DamagedError if it is invalid, or names files outside of the entry."""
    try:
        record = from_json(text, type_)
    except ValueError:
        raise DamagedError("its record cannot be read") from None
    if not all(map(is_portable, files_of(record))):
        raise DamagedError("its record has a file outside of its folder")
    return record


def files_of(record: object) -> Mapping[str, FileRecord]:
    """The files of an entry, by name; none for a record without such a field."""
    files: Mapping[str, FileRecord] = getattr(record, "files", {})
    return files


def _file(entry: Path, name: str) -> Path:
    return entry / _FILES / PurePosixPath(name)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    link_or_copy(source, target)


@contextlib.contextmanager
def _removals() -> Iterator[Callable[[Callable[[], None]], None]]:
    """A function that removes something and skips what is in use; the first such error is raised at last."""
    failed: list[OSError] = []

    def remove(action: Callable[[], None]) -> None:
        try:
            # A program that keeps one file open keeps others open too.
            patiently(action) if not failed else action()
        except FileNotFoundError:
            pass
        except OSError as error:
            failed.append(error)

    yield remove
    if failed:
        raise failed[0]


def _inside(folder: Path) -> list[Path]:
    """The contents of ``folder``; none if it is missing, a link or no folder."""
    try:
        return [] if folder.is_symlink() else sorted(folder.iterdir())
    except OSError:
        return []


def _entry(kind: Kind, folder: Path) -> Entry | None:
    """The entry in ``folder``; None if that is no folder, or is being removed."""
    if folder.is_symlink() or not folder.is_dir():
        return None
    size = 0
    for inside, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += (Path(inside) / name).lstat().st_size
    return Entry(kind, folder, size, _used(folder))


def _used(path: Path) -> datetime.datetime:
    """The time of the last use of ``path``; now, if it is being removed."""
    with contextlib.suppress(OSError):
        return datetime.datetime.fromtimestamp(path.lstat().st_mtime, datetime.timezone.utc)
    return datetime.datetime.now(datetime.timezone.utc)
