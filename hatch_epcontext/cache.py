"""A content-addressed store of artifacts in the user's cache folder, safe for several builds at once.

Below its root: ``v1/<first two digits>/<fingerprint>/`` with ``files/``, ``record.json`` and
``proof-<digest>.json`` for each way in which the artifact was validated; ``v1/latest/<recipe>``, with the
fingerprint of what was last made of the same models and settings, by whatever versions; and
``reports/``, with the report of each project's last build.
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

from hatch_epcontext.artifact import (
    GENERATOR,
    Artifact,
    Proof,
    Record,
    is_intact,
    link_or_copy,
)
from hatch_epcontext.files import replace, sync
from hatch_epcontext.structure import from_json, to_json

LAYOUT = "v1"


def default_root() -> Path:
    """The user's cache folder for this package."""
    return Path(platformdirs.user_cache_dir("hatch-epcontext", appauthor=False))


class Cache:
    """Artifacts by fingerprint.

    ``root`` is None when the build is not to use the user's cache; ``overflow`` is a folder of the
    build's own, for what cannot be kept in ``root``. ``warn`` is told once when that happens.
    """

    def __init__(self, root: Path | None, overflow: Path, warn: Callable[[str], None]) -> None:
        self._root = root
        self._overflow = overflow
        self._warn = warn

    def get(self, fingerprint: str) -> Artifact | None:
        """The artifact of that fingerprint, if it is there with every byte as it was stored."""
        if self._root is None:
            return None
        entry = self._entry(self._root, fingerprint)
        artifact = self._intact(entry)
        if artifact is None and entry.exists():
            self._warn(f"the cached artifact in {entry} is damaged; compiling again")
        elif artifact is not None:
            # For those who remove what was not used for long.
            with contextlib.suppress(OSError):
                os.utime(entry)
        return artifact

    def note_latest(self, recipe: str, fingerprint: str) -> None:
        """Keep ``fingerprint`` as the last that was made of ``recipe``, if that can be written."""
        if self._root is None:
            return
        with contextlib.suppress(OSError):
            replace(self._latest(self._root, recipe), f"{fingerprint}\n")

    def latest(self, recipe: str) -> Artifact | None:
        """What was last made of ``recipe``, if it is there with every byte as it was stored."""
        if self._root is None:
            return None
        try:
            fingerprint = self._latest(self._root, recipe).read_text(encoding="utf-8").strip()
        except OSError:
            return None
        return self.get(fingerprint)

    def store(self, fingerprint: str, folder: Path, record: Record) -> Artifact:
        """Keep the files in ``folder``, which is not written to any more, under ``fingerprint``."""
        if self._root is not None:
            try:
                return self._store(self._root, fingerprint, folder, record)
            except OSError as error:
                self._warn(
                    f"the cache folder {self._root} cannot be written "
                    f"({error.strerror or error}); this build goes on without keeping its artifacts"
                )
                self._root = None
        return self._store(self._overflow, fingerprint, folder, record)

    def proof(self, artifact: Artifact, key: str) -> Proof | None:
        """The proof that was kept for ``artifact`` under ``key``."""
        try:
            return from_json(self._proof_file(artifact, key).read_bytes(), Proof)
        except (OSError, ValueError):
            return None

    def keep_proof(self, artifact: Artifact, key: str, proof: Proof) -> None:
        """Keep ``proof`` beside ``artifact``, if that can be written: it can be made again."""
        with contextlib.suppress(OSError):
            replace(self._proof_file(artifact, key), to_json(proof))

    def keep_report(self, name: str, text: str) -> Path | None:
        """Keep the report of the last build of ``name``; returns where, or None if nothing is kept."""
        if self._root is None:
            return None
        try:
            return replace(self._root / "reports" / f"{name}.json", text)
        except OSError:
            return None

    def _proof_file(self, artifact: Artifact, key: str) -> Path:
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        return artifact.folder.parent / f"proof-{digest}.json"

    def _latest(self, root: Path, recipe: str) -> Path:
        return root / LAYOUT / "latest" / recipe

    def _entry(self, root: Path, fingerprint: str) -> Path:
        return root / LAYOUT / fingerprint[:2] / fingerprint

    def _store(self, root: Path, fingerprint: str, folder: Path, record: Record) -> Artifact:
        entry = self._entry(root, fingerprint)
        entry.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".staged-", dir=entry.parent))
        try:
            shutil.copytree(folder, staged / "files", copy_function=link_or_copy)
            for file in (staged / "files").rglob("*"):
                if file.is_file():
                    sync(file)
            replace(staged / "record.json", to_json(record))
            return self._publish(staged, entry, record)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _publish(self, staged: Path, entry: Path, record: Record) -> Artifact:
        try:
            staged.rename(entry)
        except OSError:
            # Another build was first, or what is there is damaged and `get` refused it.
            existing = self._intact(entry)
            if existing is not None:
                return existing
            doomed = Path(tempfile.mkdtemp(prefix=".doomed-", dir=entry.parent))
            entry.rename(doomed / "entry")
            staged.rename(entry)
            shutil.rmtree(doomed, ignore_errors=True)
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
    """One artifact in a cache: its size in bytes, and when it was last stored or used.

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
    """A cache folder as a whole, for those who look after it. Builds may use it at the same time."""

    root: Path

    def entries(self) -> list[Entry]:
        """All artifacts, the last used first."""
        folders = (self.root / LAYOUT).glob("??/*")
        # Whatever folder was named: only what a build can have stored is ever touched.
        found = [_entry(f) for f in folders if re.fullmatch(r"[0-9a-f]{64}", f.name) and f.is_dir()]
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def damaged(self) -> list[Entry]:
        """Those that are not as they were stored."""
        return [
            entry
            for entry in self.entries()
            if entry.record is None or not is_intact(entry.folder / "files", entry.record.files)
        ]

    def prune(self, older_than: datetime.timedelta | None, max_size: int | None) -> list[Entry]:
        """Remove what was not used for ``older_than``, and the longest unused beyond ``max_size`` bytes."""
        oldest = datetime.datetime.now(datetime.timezone.utc) - older_than if older_than else None
        kept, doomed = 0, []
        for entry in self.entries():
            fits = max_size is None or kept + entry.size <= max_size
            if fits and (oldest is None or entry.used >= oldest):
                kept += entry.size
            else:
                doomed.append(entry)
        return self._remove(doomed)

    def clear(self) -> list[Entry]:
        """Remove all artifacts, and what else builds have written into the folder."""
        removed = self._remove(self.entries())
        for file in (self.root / LAYOUT / "latest").glob("*"):
            if re.fullmatch(r"[0-9a-f]{64}", file.name):
                file.unlink(missing_ok=True)
        for file in (self.root / "reports").glob("*.json"):
            if f'"generator": "{GENERATOR} ' in file.read_text(encoding="utf-8", errors="replace"):
                file.unlink(missing_ok=True)
        return removed

    def _remove(self, entries: list[Entry]) -> list[Entry]:
        for entry in entries:
            # Renamed first: a build finds it whole or not at all.
            doomed = Path(tempfile.mkdtemp(prefix=".doomed-", dir=entry.folder.parent))
            entry.folder.rename(doomed / "entry")
            shutil.rmtree(doomed, ignore_errors=True)
        return entries


def _entry(folder: Path) -> Entry:
    record = None
    with contextlib.suppress(OSError, ValueError):
        record = from_json((folder / "record.json").read_bytes(), Record)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    used = datetime.datetime.fromtimestamp(folder.stat().st_mtime, datetime.timezone.utc)
    return Entry(folder, record, size, used)
