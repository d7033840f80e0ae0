"""A content-addressed store of artifacts in the user's cache folder, safe for several builds at once.

Below its root: ``v2/<first two digits>/<fingerprint>/`` with ``files/``, ``record.json`` and a
``validation-<digest>.json`` for each way in which the artifact was validated;
``v2/latest/<settings key>`` with the fingerprint of the last artifact of the same models and settings,
compiled by any versions; and ``reports/`` with the report of each project's last build.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from hatch_epcontext.build.artifact import GENERATOR, Artifact, Record, Validation
from hatch_epcontext.files import is_intact, link_or_copy, sync, write_atomically
from hatch_epcontext.serialize import from_json, to_json

_LAYOUT = "v2"


def default_root() -> Path:
    """The user's cache folder for this package."""
    return Path(platformdirs.user_cache_dir("hatch-epcontext", appauthor=False))


class Cache:
    """Artifacts by fingerprint.

    ``root`` is None when the build does not use the user's cache; ``overflow`` is a folder of the
    build, for artifacts that cannot be stored in ``root``. ``warn`` is called once when that happens.
    """

    def __init__(self, root: Path | None, overflow: Path, warn: Callable[[str], None]) -> None:
        self._root = root
        self._overflow = overflow
        self._warn = warn

    def get(self, fingerprint: str) -> Artifact | None:
        """The artifact of that fingerprint, if every byte of it is as it was stored."""
        if self._root is None:
            return None
        entry = self._entry(self._root, fingerprint)
        artifact = self._intact(entry)
        if artifact is None and entry.exists():
            self._warn(f"the cached artifact in {entry} is damaged; compiling again")
        elif artifact is not None:
            # `prune` removes artifacts by the time of their last use.
            with contextlib.suppress(OSError):
                os.utime(entry)
        return artifact

    def set_latest(self, settings_key: str, fingerprint: str) -> None:
        """Store ``fingerprint`` as the latest artifact with these settings, if the cache can be written."""
        if self._root is None:
            return
        with contextlib.suppress(OSError):
            write_atomically(self._latest(self._root, settings_key), f"{fingerprint}\n")

    def latest(self, settings_key: str) -> Artifact | None:
        """The latest artifact with these settings, if every byte of it is as it was stored."""
        if self._root is None:
            return None
        try:
            fingerprint = self._latest(self._root, settings_key).read_text(encoding="utf-8").strip()
        except OSError:
            return None
        return self.get(fingerprint)

    def store(self, fingerprint: str, folder: Path, record: Record) -> Artifact:
        """Store the files in ``folder``, to which nothing writes any more, under ``fingerprint``."""
        if self._root is not None:
            try:
                return self._store(self._root, fingerprint, folder, record)
            except OSError as error:
                self._warn(
                    f"the cache folder {self._root} cannot be written "
                    f"({error.strerror or error}); this build does not store its artifacts"
                )
                self._root = None
        return self._store(self._overflow, fingerprint, folder, record)

    def validation(self, artifact: Artifact, key: str) -> Validation | None:
        """The validation of ``artifact`` that was stored under ``key``."""
        try:
            return from_json(self._validation_file(artifact, key).read_bytes(), Validation)
        except (OSError, ValueError):
            return None

    def store_validation(self, artifact: Artifact, key: str, validation: Validation) -> None:
        """Store ``validation`` beside ``artifact``, if the cache can be written."""
        with contextlib.suppress(OSError):
            write_atomically(self._validation_file(artifact, key), to_json(validation))

    def store_report(self, name: str, text: str) -> Path | None:
        """Store the report of the last build of ``name``; returns its path, or None if it is not stored."""
        if self._root is None:
            return None
        try:
            return write_atomically(self._root / "reports" / f"{name}.json", text)
        except OSError:
            return None

    def _validation_file(self, artifact: Artifact, key: str) -> Path:
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        return artifact.folder.parent / f"validation-{digest}.json"

    def _latest(self, root: Path, settings_key: str) -> Path:
        return root / _LAYOUT / "latest" / settings_key

    def _entry(self, root: Path, fingerprint: str) -> Path:
        return root / _LAYOUT / fingerprint[:2] / fingerprint

    def _store(self, root: Path, fingerprint: str, folder: Path, record: Record) -> Artifact:
        entry = self._entry(root, fingerprint)
        entry.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".staged-", dir=entry.parent))
        try:
            shutil.copytree(folder, staged / "files", copy_function=link_or_copy)
            for file in (staged / "files").rglob("*"):
                if file.is_file():
                    sync(file)
            write_atomically(staged / "record.json", to_json(record))
            return self._publish(staged, entry, record)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _publish(self, staged: Path, entry: Path, record: Record) -> Artifact:
        try:
            staged.rename(entry)
        except OSError:
            # Another build was faster, or the existing entry is damaged and `get` refused it.
            existing = self._intact(entry)
            if existing is not None:
                return existing
            trash = Path(tempfile.mkdtemp(prefix=".trash-", dir=entry.parent))
            entry.rename(trash / "entry")
            staged.rename(entry)
            shutil.rmtree(trash, ignore_errors=True)
        return Artifact(entry / "files", record)

    def _intact(self, entry: Path) -> Artifact | None:
        try:
            record = from_json((entry / "record.json").read_bytes(), Record)
        except (OSError, ValueError):
            return None
        return (
            Artifact(entry / "files", record) if is_intact(entry / "files", record.files) else None
        )


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
        folders = (self.root / _LAYOUT).glob("??/*")
        # In any folder that a user names, only entries that a build can have stored are touched.
        found = [_entry(f) for f in folders if re.fullmatch(r"[0-9a-f]{64}", f.name) and f.is_dir()]
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
        return self._remove(removed)

    def clear(self) -> list[Entry]:
        """Remove all artifacts, and everything else that builds wrote into the folder."""
        removed = self._remove(self.entries())
        for file in (self.root / _LAYOUT / "latest").glob("*"):
            if re.fullmatch(r"[0-9a-f]{64}", file.name):
                file.unlink(missing_ok=True)
        for file in (self.root / "reports").glob("*.json"):
            if f'"generator": "{GENERATOR} ' in file.read_text(encoding="utf-8", errors="replace"):
                file.unlink(missing_ok=True)
        return removed

    def _remove(self, entries: list[Entry]) -> list[Entry]:
        for entry in entries:
            # Renamed first: a build finds the whole entry or nothing.
            trash = Path(tempfile.mkdtemp(prefix=".trash-", dir=entry.folder.parent))
            entry.folder.rename(trash / "entry")
            shutil.rmtree(trash, ignore_errors=True)
        return entries


def _entry(folder: Path) -> Entry:
    record = None
    with contextlib.suppress(OSError, ValueError):
        record = from_json((folder / "record.json").read_bytes(), Record)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    used = datetime.datetime.fromtimestamp(folder.stat().st_mtime, datetime.timezone.utc)
    return Entry(folder, record, size, used)
