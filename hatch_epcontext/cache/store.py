"""The folder of a user's cache. An entry is a record, a dataclass in JSON, and the files that it names.

Several builds may use the folder at once. Below ``<root>/<LAYOUT>/``, where keys are hex sha256s:

- ``<kind>/<key>/``: an entry: ``record.json``, ``files/``, and their status when they were intact;
- ``locks/<key>``: locked by the build that makes an entry;
- ``reports/<name>.json``: the report of the last build of a project;
- ``staging/``: entries that are not yet published, or being removed.

Only a folder that no other user can write to is used (`untrusted`), so its contents come from this user's
builds. A file that has changed is compared with its record.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeVar, get_args

from hatch_epcontext.config.location import LAYOUT
from hatch_epcontext.files import (
    FileRecord,
    is_intact,
    is_portable,
    is_sha256,
    known_text,
    link_or_copy,
    lock,
    mark_used,
    patiently,
    read_regular,
    sweep,
    sync,
    temp_dir,
    write_atomically,
)
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.serialize import from_json, to_json
from hatch_epcontext.text import file_name

T = TypeVar("T")

EntryKind = Literal["artifacts", "searches", "refs", "facts", "models", "cut", "index", "sent"]
"""What an entry is: the result of an attempt, the search of a job, the key of the latest artifact with some
settings, the facts of a model, a model from elsewhere, a cut model, the hash of a file (see `build`), or the
time when something was sent (see `shared`). Only to searches each build may add something.
"""

KINDS: tuple[EntryKind, ...] = get_args(EntryKind)

_LASTING = frozenset({"artifacts", "models"})
"""The kinds that survive a power cut, and are never replaced while they are intact."""

_RECORD, _FILES, _STATUS = "record.json", "files", "status.json"

_ATTEMPTS = 3
"""How many times an entry is published again while other processes remove it."""

_POLL_SECONDS = 0.1
"""Seconds after which a build that waits for another one looks again."""


class DamagedError(ValueError):
    """Something in a cache is not what was written; the text is the reason."""


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


@dataclass(frozen=True)
class Files:
    """The record of only the files, by name; that of every entry with files has them too."""

    files: Mapping[str, FileRecord]


@dataclass(frozen=True)
class Entry:
    """An entry of a store: its size in bytes, and the time of its last use, in seconds since the epoch."""

    kind: EntryKind
    folder: Path
    size: int
    used: float

    @property
    def key(self) -> str:
        return self.folder.name

    @property
    def files(self) -> list[str]:
        """The names of its files."""
        return sorted(file.name for file in (self.folder / _FILES).rglob("*") if file.is_file())


class Store:
    """The cache folder ``root``. Builds may use it at the same time. Methods raise OSError.

    ``staging``: a folder on the file system of the entries, whose contents can be renamed to them.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.layout = root, root / LAYOUT
        self.staging = self.layout / "staging"

    def entry(self, kind: EntryKind, key: str) -> Path:
        """The folder of an entry."""
        return self.layout / kind / key

    def get(
        self, kind: EntryKind, key: str, type_: type[T], folder: Path | None = None
    ) -> T | None:
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

    def put(self, kind: EntryKind, key: str, record: object, folder: Path | None = None) -> None:
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
        with temp_dir(self.staging) as temporary:
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

    def put_report(self, name: str, text: str) -> Path:
        """Store the report of the last build of the project ``name``; returns its path."""
        file = self.layout / "reports" / f"{file_name(name, '_')}.json"
        if known_text(file) != text:
            write_atomically(file, text, durable=False)
        return file

    @contextlib.contextmanager
    def lock(self, key: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the right to make the entry of ``key``, in this process and all others with this store.

        While another one holds it, ``on_wait`` is called repeatedly; an exception from it ends the wait.
        Where nothing can be locked, all may make it. The system releases the lock of a process that ends.
        """
        file = self.layout / "locks" / key
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
                stack.callback(os.close, opened)
                mark_used(file)
                while not lock(opened):
                    on_wait()
                    time.sleep(_POLL_SECONDS)
            yield

    def entries(self) -> list[Entry]:
        """All entries, the most recently used first."""
        entries = []
        folders = [(kind, folder) for kind in KINDS for folder in (self.layout / kind).glob("*")]
        for kind, folder in folders:
            # The user may name a folder with other files.
            if not is_sha256(folder.name):
                continue
            # Another process may remove it at this moment.
            with contextlib.suppress(FileNotFoundError):
                size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
                entries.append(Entry(kind, folder, size, folder.lstat().st_mtime))
        return sorted(entries, key=lambda entry: entry.used, reverse=True)

    def prune(self, days: int | None) -> list[Entry]:
        """Remove the entries that are unused for so many ``days``, and what killed builds left.

        With None it removes all that builds wrote into the folder.
        """
        before = math.inf if days is None else time.time() - days * 24 * 60 * 60
        entries = self.entries()
        # As the records of refs name them.
        kept = {to_json(entry.key, indent=None) for entry in entries if entry.used >= before}

        def is_stale(entry: Entry) -> bool:
            is_ref = entry.kind == "refs"
            return entry.used < before or (
                is_ref and known_text(entry.folder / _RECORD) not in kept
            )

        removed = list(filter(is_stale, entries))
        errors: list[OSError] = []
        for entry in removed:
            try:
                self._discard(entry.folder)
            except OSError as error:
                errors.append(error)
        locks = (file for file in (self.layout / "locks").glob("*") if is_sha256(file.name))
        for file in (*locks, *(self.layout / "reports").glob("*.json")):
            with contextlib.suppress(OSError):
                if file.stat().st_mtime < before:
                    file.unlink()
        sweep(self.staging)
        if errors:
            raise errors[0]
        return removed

    def _discard(self, entry: Path) -> None:
        """Remove an entry so that a build finds all of it or nothing."""
        with temp_dir(self.staging) as trash, contextlib.suppress(FileNotFoundError):
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


def _transfer(kind: EntryKind, source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # ONNX Runtime rejects some external data of models if it has several hard links.
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
        if not is_intact(file, recorded):
            # Gone, if another process cleans the store at this moment.
            (entry / _RECORD).stat()
            raise DamagedError(f"its file {name} is missing or has other content")
    with contextlib.suppress(OSError):
        write_atomically(entry / _STATUS, _status(entry, files), durable=False)
