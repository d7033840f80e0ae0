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
from typing import TYPE_CHECKING, Any

import platformdirs

from hatch_epcontext.build.artifact import (
    GENERATOR,
    Artifact,
    Record,
    StoredRecord,
    ValidationRun,
)
from hatch_epcontext.build.index import Index
from hatch_epcontext.files import (
    FileRecord,
    is_intact,
    is_sha256,
    link_or_copy,
    sync,
    write_atomically,
)
from hatch_epcontext.serialize import from_json, to_json

if TYPE_CHECKING:
    from hatch_epcontext.build.remote import Remote

_POLL_SECONDS = 0.5
"""Seconds between two looks at whether a build that waits for another one shall end."""

_STAGED, _TRASH = ".staged-", ".trash-"
"""How folders beside the artifacts begin, before an artifact is there and before it is removed."""

_LEFTOVER_AGE = datetime.timedelta(days=1)
"""A build that wrote a file so long ago, and did not finish it, does not run any more."""

_SMALL_FILES = ("latest", "locks", "index")
"""The folders of the layout with small files, which are named by hashes."""

LAYOUT = "v3"
"""The folder of this format below the cache's root."""


NO_HOME = "this user has no home folder, and so no cache folder"
"""Why there is no default folder, as in a container that runs as any user."""


def default_root() -> Path | None:
    """The user's cache folder for this package; None if the user has no home folder."""
    try:
        root = Path(platformdirs.user_cache_dir("hatch-epcontext", appauthor=False))
    except RuntimeError:
        return None
    # Older versions of platformdirs leave the `~` as it is.
    return root if root.is_absolute() else None


class Cache:
    """Artifacts by fingerprint.

    ``root`` is None when the build does not use the user's cache. ``warn`` gets a line for each damaged
    artifact, and one when the folder cannot be written; the build then goes on without it. What the
    folder does not have is read from ``remote``, and what is stored is sent there, as far as the build
    may write to it.
    """

    def __init__(
        self, root: Path | None, warn: Callable[[str], None], remote: Remote | None = None
    ) -> None:
        self._root = root
        self._warn = warn
        self._remote = remote

    def index(self) -> Index:
        """An index of files in the cache, if there is one."""
        return Index(None if self._root is None else self._root / LAYOUT / "index", self._remote)

    def stop(self) -> None:
        """Wait no longer for the remote, and do not use it any more."""
        if self._remote is not None:
            self._remote.stop()

    def has(self, fingerprint: str) -> bool:
        """Whether the cache has the artifact of that fingerprint, as it was stored."""
        return self._find(fingerprint) is not None or (
            self._remote is not None and self._remote.has(fingerprint)
        )

    def take(self, fingerprint: str, folder: Path) -> Artifact | None:
        """The artifact of that fingerprint with its files in ``folder``, which is made; None for a miss.

        Hard links where they are possible: what happens to the cache later does not matter.
        """
        artifact = self._take(fingerprint, folder)
        if self._remote is None:
            return artifact
        if artifact is not None:
            # Another build may have made it, which could not write to the remote.
            self._remote.send(fingerprint, folder, artifact.record)
            return artifact
        record = self._remote.fetch(fingerprint, folder)
        if record is None:
            return None
        self._keep(fingerprint, folder, record)
        return Artifact(folder, record)

    @contextlib.contextmanager
    def lock(self, fingerprint: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the right to compile ``fingerprint``, in this process and all others with this cache.

        While another build has it, ``on_wait`` is called again and again; what it raises ends the waiting.
        The system releases the lock of a process that ends in any way. Without a cache that can be locked
        nothing is held.
        """
        if self._root is None:
            yield
            return
        # It imports asyncio, which builds from the cache do without.
        import filelock

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
        """Store ``fingerprint`` as the latest artifact with these settings, where that can be written."""
        text = f"{fingerprint}\n"
        if self._root is not None and self._read(self._latest(self._root, settings_key)) != text:
            with contextlib.suppress(OSError):
                write_atomically(self._latest(self._root, settings_key), text, durable=False)
        if self._remote is not None:
            self._remote.share(f"latest/{settings_key}", text)

    def latest(self, settings_key: str) -> str | None:
        """The fingerprint of the latest artifact with these settings.

        The remote's, if there is one: the user's own folder can be older than what others compiled.
        """
        text = None if self._remote is None else self._remote.read(f"latest/{settings_key}")
        if text is None and self._root is not None:
            text = self._read(self._latest(self._root, settings_key))
        found = (text or "").strip()
        return found if is_sha256(found) else None

    def store(self, fingerprint: str, folder: Path, record: Record) -> None:
        """Store the files in ``folder``, to which nothing writes any more, under ``fingerprint``."""
        self._keep(fingerprint, folder, record)
        if self._remote is not None:
            self._remote.send(fingerprint, folder, record)

    def validation(self, fingerprint: str, key: str) -> ValidationRun | None:
        """The validation under ``key`` of the artifact of that fingerprint."""
        root, name = self._root, _validation_name(fingerprint, key)
        text = None if root is None else self._read(_validation_file(root, fingerprint, key))
        if self._remote is not None and text is not None:
            self._remote.share(name, text)
        elif self._remote is not None and (text := self._remote.read(name)) is not None:
            self._keep_validation(fingerprint, key, text)
        try:
            return None if text is None else from_json(text, ValidationRun)
        except ValueError:
            return None

    def store_validation(self, fingerprint: str, key: str, run: ValidationRun) -> None:
        """Store ``run`` beside the artifact, where the cache has it and can be written."""
        text = to_json(run)
        self._keep_validation(fingerprint, key, text)
        if self._remote is not None:
            self._remote.write(_validation_name(fingerprint, key), text)

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

    def _read(self, file: Path) -> str | None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None

    def _keep_validation(self, fingerprint: str, key: str, text: str) -> None:
        if self._root is not None and _entry_folder(self._root, fingerprint).is_dir():
            with contextlib.suppress(OSError):
                write_atomically(_validation_file(self._root, fingerprint, key), text)

    def _take(self, fingerprint: str, folder: Path) -> Artifact | None:
        """As `take`, from the folder only."""
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

    def _keep(self, fingerprint: str, folder: Path, record: Record) -> None:
        """As `store`, into the folder only."""
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

    def _find(self, fingerprint: str) -> Record | None:
        if self._root is None:
            return None
        entry = _entry_folder(self._root, fingerprint)
        record = _intact(entry)
        if record is None and entry.exists():
            self._warn(f"the cached artifact in {entry} is damaged; compiling again")
        return record

    def _store(self, root: Path, fingerprint: str, folder: Path, record: Record) -> None:
        entry = _entry_folder(root, fingerprint)
        entry.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=_STAGED, dir=entry.parent))
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
        if _intact(entry) is not None:
            return
        trash = Path(tempfile.mkdtemp(prefix=_TRASH, dir=entry.parent))
        entry.rename(trash / "entry")
        staged.rename(entry)
        shutil.rmtree(trash, ignore_errors=True)


def _entry_folder(root: Path, fingerprint: str) -> Path:
    return root / LAYOUT / fingerprint[:2] / fingerprint


def _validation_file(root: Path, fingerprint: str, key: str) -> Path:
    return _entry_folder(root, fingerprint) / f"validation-{_digest(key)}.json"


def _validation_name(fingerprint: str, key: str) -> str:
    return f"validations/{fingerprint}/{_digest(key)}.json"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _record(entry: Path) -> Record | None:
    """The record of the entry in the folder ``entry``, if it can be read and is its own."""
    try:
        stored = from_json((entry / "record.json").read_bytes(), StoredRecord)
    except (OSError, ValueError):
        return None
    return stored.record if stored.fingerprint == entry.name else None


def _intact(entry: Path) -> Record | None:
    """The record of an entry whose files are as they were stored; files that changed are read again."""
    record = _record(entry)
    if record is None:
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
        found = [_entry(f) for f in folders if is_sha256(f.name) and f.is_dir()]
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def damaged(self) -> list[Entry]:
        """The artifacts that are not as they were stored."""
        return [
            entry
            for entry in self.entries()
            if entry.record is None or not is_intact(entry.folder / "files", entry.record.files)
        ]

    def prune(self, older_than: datetime.timedelta | None, max_size: int | None) -> list[Entry]:
        """Remove artifacts unused for ``older_than``, and the longest unused beyond ``max_size`` bytes.

        Also what killed builds left in the folder more than a day ago.
        """
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
        self._remove_leftovers(datetime.datetime.now(datetime.timezone.utc) - _LEFTOVER_AGE)
        return self._remove(removed)

    def clear(self) -> list[Entry]:
        """Remove all artifacts, and everything else that builds wrote into the folder."""
        removed = self._remove(self.entries())
        self._remove_leftovers()
        for file in self._small_files(*_SMALL_FILES):
            file.unlink(missing_ok=True)
        for file in (self.root / "reports").glob("*.json"):
            if f'"generator": "{GENERATOR} ' in file.read_text(encoding="utf-8", errors="replace"):
                file.unlink(missing_ok=True)
        return removed

    def _small_files(self, *folders: str) -> Iterator[Path]:
        """The files that builds wrote into folders of the layout, named by hashes."""
        for folder in folders:
            found = (self.root / LAYOUT / folder).glob("*")
            yield from (file for file in found if is_sha256(file.name))

    def _remove_leftovers(self, before: datetime.datetime | None = None) -> None:
        """Remove what killed builds left in the cache's own folders, and did not change since ``before``."""
        for path in list(self._leftovers()):
            # It can be that of a running build, which removes it itself.
            with contextlib.suppress(OSError):
                if before is not None and _changed(path) >= before:
                    continue
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()

    def _leftovers(self) -> Iterator[Path]:
        layout = self.root / LAYOUT
        for folder in layout.glob("[0-9a-f][0-9a-f]"):
            yield from filter(_is_staging, folder.glob(".*"))
            found = filter(_is_temporary, folder.glob("*/.*.tmp"))
            yield from (file for file in found if is_sha256(file.parent.name))
        for folder in (*(layout / name for name in _SMALL_FILES), self.root / "reports"):
            yield from filter(_is_temporary, folder.glob(".*.tmp"))

    def _remove(self, entries: list[Entry]) -> list[Entry]:
        for entry in entries:
            # Renamed first: a build finds the whole entry or nothing.
            trash = Path(tempfile.mkdtemp(prefix=_TRASH, dir=entry.folder.parent))
            entry.folder.rename(trash / "entry")
            shutil.rmtree(trash, ignore_errors=True)
        return entries


def _is_staging(path: Path) -> bool:
    return path.name.startswith((_STAGED, _TRASH)) and path.is_dir() and not path.is_symlink()


def _is_temporary(file: Path) -> bool:
    """Whether `write_atomically` was writing ``file``."""
    return re.fullmatch(r"\..+\.\d+-\d+\.tmp", file.name) is not None


def _entry(folder: Path) -> Entry:
    record = _record(folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Entry(folder, record, size, _changed(folder))


def _changed(path: Path) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
