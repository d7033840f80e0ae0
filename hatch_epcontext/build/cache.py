"""A content-addressed store of artifacts in the user's cache folder, safe for several builds at once.

Below its root: ``v3/<first two digits>/<fingerprint>/`` with ``files/``, ``record.json``, ``seal.json``
and a ``validation-<digest>.json`` for each way in which the artifact was validated;
``v3/latest/<settings key>`` with the fingerprint of the last artifact of the same models and settings,
compiled by any versions; ``v3/locks/``; ``v3/index/``, which `index` describes; and ``reports/`` with the
report of each project's last build.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import platformdirs

from hatch_epcontext.build.artifact import GENERATOR, Artifact, Record, ValidationRun
from hatch_epcontext.files import FileRecord, is_intact, link_or_copy, sync, write_atomically
from hatch_epcontext.serialize import from_json, to_json

_POLL_SECONDS = 0.5
"""Seconds between two looks at whether a build that waits for another one shall end."""

LAYOUT = "v3"
"""The folder of this format below the cache's root."""


def default_root() -> Path:
    """The user's cache folder for this package."""
    return Path(platformdirs.user_cache_dir("hatch-epcontext", appauthor=False))


@dataclass(frozen=True)
class StoredRecord:
    """``record.json``: the record, and the fingerprint of the artifact that it belongs to."""

    fingerprint: str
    record: Record


class Cache:
    """Artifacts by fingerprint.

    ``root`` is None when the build does not use the user's cache. ``warn`` gets a line for each damaged
    artifact, and one when the folder cannot be written; the build then goes on without it.
    """

    def __init__(self, root: Path | None, warn: Callable[[str], None]) -> None:
        self._root = root
        self._warn = warn

    @property
    def index_folder(self) -> Path | None:
        """The folder of the index of files, if there is a cache."""
        return None if self._root is None else self._root / LAYOUT / "index"

    def has(self, fingerprint: str) -> bool:
        """Whether the cache has the artifact of that fingerprint, as it was stored."""
        return self._find(fingerprint) is not None

    def take(self, fingerprint: str, folder: Path) -> Artifact | None:
        """The artifact of that fingerprint with its files in ``folder``, which is made; None for a miss.

        Hard links where they are possible: what happens to the cache later does not matter.
        """
        record = self._find(fingerprint)
        if self._root is None or record is None:
            return None
        entry = _entry_folder(self._root, fingerprint)
        try:
            for name in map(PurePosixPath, record.files):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(entry / "files" / name, folder / name)
        except OSError:
            # Somebody cleaned the cache at this moment.
            shutil.rmtree(folder, ignore_errors=True)
            return None
        # `prune` removes artifacts by the time of their last use.
        with contextlib.suppress(OSError):
            os.utime(entry)
        return Artifact(folder, record)

    @contextlib.contextmanager
    def lock(self, fingerprint: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the right to compile ``fingerprint``, in this process and all others with this cache.

        While another build has it, ``on_wait`` is called again and again; what it raises ends the waiting.
        The system releases the lock of a process that ends in any way. Without a cache that can be locked
        nothing is held.
        """
        # It imports asyncio, which builds from the cache do without.
        import filelock

        if self._root is None:
            yield
            return
        file = self._root / LAYOUT / "locks" / fingerprint
        held = filelock.FileLock(file, thread_local=False)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            while not held.is_locked:
                try:
                    held.acquire(timeout=_POLL_SECONDS)
                except filelock.Timeout:
                    on_wait()
        except (OSError, NotImplementedError):
            # `store` says that the folder cannot be written.
            yield
            return
        try:
            yield
        finally:
            held.release()

    def set_latest(self, settings_key: str, fingerprint: str) -> None:
        """Store ``fingerprint`` as the latest artifact with these settings, if the cache can be written."""
        if self._root is not None and self.latest(settings_key) != fingerprint:
            with contextlib.suppress(OSError):
                write_atomically(
                    self._latest(self._root, settings_key), f"{fingerprint}\n", durable=False
                )

    def latest(self, settings_key: str) -> str | None:
        """The fingerprint of the latest artifact with these settings."""
        if self._root is None:
            return None
        try:
            text = self._latest(self._root, settings_key).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        return text.strip() if _is_fingerprint(text.strip()) else None

    def store(self, fingerprint: str, folder: Path, record: Record) -> None:
        """Store the files in ``folder``, to which nothing writes any more, under ``fingerprint``."""
        if self._root is None:
            return
        try:
            self._store(self._root, fingerprint, folder, record)
        except OSError as error:
            self._warn(
                f"the cache folder {self._root} cannot be written "
                f"({error.strerror or error}); this build does not store its artifacts"
            )
            self._root = None

    def validation(self, fingerprint: str, key: str) -> ValidationRun | None:
        """The validation under ``key`` of the artifact of that fingerprint."""
        if self._root is None:
            return None
        try:
            text = _validation_file(self._root, fingerprint, key).read_bytes()
            return from_json(text, ValidationRun)
        except (OSError, ValueError):
            return None

    def store_validation(self, fingerprint: str, key: str, run: ValidationRun) -> None:
        """Store ``run`` beside the artifact, if the cache has it and can be written."""
        if self._root is None or not _entry_folder(self._root, fingerprint).is_dir():
            return
        with contextlib.suppress(OSError):
            write_atomically(_validation_file(self._root, fingerprint, key), to_json(run))

    def store_report(self, name: str, text: str) -> Path | None:
        """Store the report of the last build of ``name``; returns its path, or None if it is not stored."""
        if self._root is None:
            return None
        file = self._root / "reports" / f"{name}.json"
        with contextlib.suppress(OSError):
            # Builds without changes have equal reports, and replacing a file can wait for the disk.
            if file.is_file() and file.read_text(encoding="utf-8", errors="replace") == text:
                return file
            return write_atomically(file, text, durable=False)
        return None

    def _latest(self, root: Path, settings_key: str) -> Path:
        return root / LAYOUT / "latest" / settings_key

    def _find(self, fingerprint: str) -> Record | None:
        if self._root is None:
            return None
        entry = _entry_folder(self._root, fingerprint)
        record = _intact(entry, fingerprint)
        if record is None and entry.exists():
            self._warn(f"the cached artifact in {entry} is damaged; compiling again")
        return record

    def _store(self, root: Path, fingerprint: str, folder: Path, record: Record) -> None:
        entry = _entry_folder(root, fingerprint)
        entry.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".staged-", dir=entry.parent))
        try:
            shutil.copytree(folder, staged / "files", copy_function=link_or_copy)
            for file in (staged / "files").rglob("*"):
                if file.is_file():
                    sync(file)
            write_atomically(staged / "record.json", to_json(StoredRecord(fingerprint, record)))
            _write_seal(staged, record)
            _publish(staged, entry)
        finally:
            shutil.rmtree(staged, ignore_errors=True)


def _publish(staged: Path, entry: Path) -> None:
    try:
        staged.rename(entry)
    except OSError:
        # Another build was faster, or the existing entry is damaged.
        if _intact(entry, entry.name) is not None:
            return
        trash = Path(tempfile.mkdtemp(prefix=".trash-", dir=entry.parent))
        entry.rename(trash / "entry")
        staged.rename(entry)
        shutil.rmtree(trash, ignore_errors=True)


def _entry_folder(root: Path, fingerprint: str) -> Path:
    return root / LAYOUT / fingerprint[:2] / fingerprint


def _validation_file(root: Path, fingerprint: str, key: str) -> Path:
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return _entry_folder(root, fingerprint) / f"validation-{digest}.json"


def _is_fingerprint(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None


def _record(entry: Path) -> Record | None:
    """The record of the entry in the folder ``entry``, if it can be read and is its own."""
    try:
        stored = from_json((entry / "record.json").read_bytes(), StoredRecord)
    except (OSError, ValueError):
        return None
    return stored.record if stored.fingerprint == entry.name else None


def _intact(entry: Path, fingerprint: str) -> Record | None:
    """The record of an entry whose files are as they were stored; files that changed are read again."""
    record = _record(entry)
    if record is None or entry.name != fingerprint:
        return None
    sealed = _read_seal(entry)
    changed: dict[str, FileRecord] = {}
    for name, recorded in record.files.items():
        try:
            seal = _seal(entry / "files" / PurePosixPath(name))
        except OSError:
            return None
        if sealed.get(name) != seal or seal[0] != recorded.size:
            changed[name] = recorded
    if changed:
        if not is_intact(entry / "files", changed):
            return None
        with contextlib.suppress(OSError):
            _write_seal(entry, record)
    return record


def _seal(path: Path) -> list[int]:
    """Size in bytes, time of the last change in ns, and inode of a file.

    For one that was verified by sha256 a cheap sign that nobody wrote to it since. Not the time of its last
    status change, which every hard link to it moves.
    """
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _read_seal(entry: Path) -> Mapping[str, Any]:
    """The seal of each file by its name; empty if there is none."""
    try:
        found = json.loads((entry / "seal.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_seal(entry: Path, record: Record) -> None:
    folder = entry / "files"
    seals = {name: _seal(folder / PurePosixPath(name)) for name in record.files}
    write_atomically(entry / "seal.json", json.dumps(seals), durable=False)


@dataclass(frozen=True)
class Entry:
    """One artifact in a cache: its size in bytes, and the time of its last use.

    ``record`` is None where it cannot be read.
    """

    folder: Path
    record: Record | None
    size: int
    used: datetime.datetime

    @property
    def fingerprint(self) -> str:
        return self.folder.name


@dataclass(frozen=True)
class Store:
    """A whole cache folder, to list and clean it. Builds may use it at the same time."""

    root: Path

    def entries(self) -> list[Entry]:
        """All artifacts, the most recently used first."""
        folders = (self.root / LAYOUT).glob("??/*")
        # In any folder that a user names, only entries that a build can have stored are touched.
        found = [_entry(f) for f in folders if _is_fingerprint(f.name) and f.is_dir()]
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def damaged(self) -> list[Entry]:
        """The artifacts that are not as they were stored."""
        return [
            entry
            for entry in self.entries()
            if entry.record is None or not is_intact(entry.folder / "files", entry.record.files)
        ]

    def prune(self, older_than: datetime.timedelta | None, max_size: int | None) -> list[Entry]:
        """Remove artifacts unused for ``older_than``, and the longest unused beyond ``max_size`` bytes."""
        oldest = datetime.datetime.now(datetime.timezone.utc) - older_than if older_than else None
        kept, removed = 0, []
        for entry in self.entries():
            fits = max_size is None or kept + entry.size <= max_size
            if fits and (oldest is None or entry.used >= oldest):
                kept += entry.size
            else:
                removed.append(entry)
        for file in self._small_files("locks", "index"):
            with contextlib.suppress(FileNotFoundError):
                if oldest is not None and _changed(file) < oldest:
                    file.unlink()
        return self._remove(removed)

    def clear(self) -> list[Entry]:
        """Remove all artifacts, and everything else that builds wrote into the folder."""
        removed = self._remove(self.entries())
        for file in self._small_files("latest", "locks", "index"):
            file.unlink(missing_ok=True)
        for file in (self.root / "reports").glob("*.json"):
            if f'"generator": "{GENERATOR} ' in file.read_text(encoding="utf-8", errors="replace"):
                file.unlink(missing_ok=True)
        return removed

    def _small_files(self, *folders: str) -> Iterator[Path]:
        """The files that builds wrote into folders of the layout, named by hashes."""
        for folder in folders:
            found = (self.root / LAYOUT / folder).glob("*")
            yield from (file for file in found if _is_fingerprint(file.name))

    def _remove(self, entries: list[Entry]) -> list[Entry]:
        for entry in entries:
            # Renamed first: a build finds the whole entry or nothing.
            trash = Path(tempfile.mkdtemp(prefix=".trash-", dir=entry.folder.parent))
            entry.folder.rename(trash / "entry")
            shutil.rmtree(trash, ignore_errors=True)
        return entries


def _entry(folder: Path) -> Entry:
    record = _record(folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Entry(folder, record, size, _changed(folder))


def _changed(path: Path) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
