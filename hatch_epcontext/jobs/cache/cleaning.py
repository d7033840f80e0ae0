"""Lists and cleans the folder of a cache, while builds and other cleanups may use it."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hatch_epcontext.config.location import DOWNLOADS
from hatch_epcontext.files import is_generated, is_sha256, patiently, remove, sweep
from hatch_epcontext.jobs.artifact import Record
from hatch_epcontext.jobs.cache import LAYOUT
from hatch_epcontext.jobs.cache.archive import DamagedError
from hatch_epcontext.jobs.cache.folder import STAGING, discard, stored_record
from hatch_epcontext.jobs.cut_models import FOLDER as CUT_MODELS
from hatch_epcontext.jobs.downloads import PINNING, locked, record_file, recorded_files

_LEFTOVER_AGE = datetime.timedelta(days=1)
"""After this time a build that has not finished a file no longer runs."""

_SMALL_FILES = ("latest", "locks", "index")
"""The folders of the layout with small files that are named by hashes."""


@dataclass(frozen=True)
class Entry:
    """One artifact in a cache: its size in bytes, and the time of its last use.

    ``record`` is None if it cannot be read. ``files``: of a model from elsewhere, which has no record, their
    hex sha256s by name; None if they are unknown.
    """

    folder: Path
    record: Record | None
    size: int
    used: datetime.datetime
    is_model: bool = False
    files: Mapping[str, str] | None = None

    @property
    def key(self) -> str:
        return self.folder.name


@dataclass(frozen=True)
class Store:
    """A whole cache folder, to list and clean. Builds may use it at the same time."""

    root: Path

    def entries(self) -> list[Entry]:
        """All artifacts, the most recently used first."""
        found = filter(None, map(_entry, self._entry_folders()))
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def models(self) -> list[Entry]:
        """All models from elsewhere, the most recently used first."""
        found = [
            replace(entry, is_model=True, files=recorded_files(entry.folder))
            for folder in _inside(self.root / DOWNLOADS)
            if is_sha256(folder.name) and (entry := _entry(folder)) is not None
        ]
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def prune(self, older_than: datetime.timedelta | None) -> list[Entry]:
        """Remove the artifacts and the models from elsewhere that are unused for ``older_than``.

        Also removes what killed builds left in the folder more than a day ago. With None it removes all
        that builds wrote into the folder.
        """
        now = datetime.datetime.now(datetime.timezone.utc)
        oldest = now - older_than if older_than else None
        removed = [
            entry
            for entry in (*self.entries(), *self.models())
            if oldest is None or entry.used < oldest
        ]
        with _removals() as remove:
            for entry in removed:
                remove(partial(_discard, entry))
            self._remove_cut_models(oldest)
            self._remove_leftovers(now - _LEFTOVER_AGE if older_than else None)
            for file in self._small_files(*_SMALL_FILES if oldest is None else ("locks", "index")):
                with contextlib.suppress(FileNotFoundError):
                    if oldest is None or _changed(file.lstat()) < oldest:
                        remove(file.unlink)
            for file in _inside(self.root / "reports") if oldest is None else ():
                with contextlib.suppress(FileNotFoundError):
                    if file.suffix == ".json" and is_generated(file):
                        remove(file.unlink)
        return _gone(removed)

    def _entry_folders(self) -> Iterator[Path]:
        # The user may name any folder: only entries that a build can have stored are touched.
        for group in _inside(self.root / LAYOUT):
            if re.fullmatch("[0-9a-f]{2}", group.name):
                yield from (folder for folder in _inside(group) if is_sha256(folder.name))

    def _small_files(self, *folders: str) -> Iterator[Path]:
        """The files that builds wrote into folders of the layout, named by hashes."""
        for folder in folders:
            found = _inside(self.root / LAYOUT / folder)
            yield from (file for file in found if is_sha256(file.name))

    def _remove_cut_models(self, oldest: datetime.datetime | None) -> None:
        """Remove the cut models from before ``oldest``, or all: a build makes them again."""
        for folder in _inside(self.root / LAYOUT / CUT_MODELS):
            with contextlib.suppress(OSError):
                if is_sha256(folder.name) and (oldest is None or _changed(folder.lstat()) < oldest):
                    shutil.rmtree(folder)

    def _remove_leftovers(self, before: datetime.datetime | None) -> None:
        """Remove what killed builds left: unused folders, and files unchanged since ``before``."""
        sweep(self.root / LAYOUT / STAGING)
        self._remove_parts(before)
        for path in list(self._leftovers()):
            _remove_old(path, before)

    def _leftovers(self) -> Iterator[Path]:
        layout = self.root / LAYOUT
        small = (*(layout / name for name in _SMALL_FILES), self.root / "reports")
        for folder in (*small, *self._entry_folders()):
            yield from filter(_is_temporary, _inside(folder))

    def _remove_parts(self, before: datetime.datetime | None) -> None:
        """Remove what is left of downloads that nobody continues, and beside models that were removed."""
        store = self.root / DOWNLOADS
        names = [PINNING, *(each.name for each in _inside(store) if is_sha256(each.name))]
        for name in names if store.is_dir() else ():
            with locked(store / name) as is_free:
                parts = (
                    store.glob(".*.part") if name == PINNING else (store / name).rglob(".*.part")
                )
                for part in list(parts) if is_free else ():
                    _remove_old(part, before)
        for path in _inside(store):
            if is_sha256(path.stem) and path.suffix and not path.with_suffix("").exists():
                _remove_old(path, before)


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


def _remove_old(path: Path, before: datetime.datetime | None) -> None:
    """Remove a file that was not changed since ``before``; with None any."""
    # It may belong to a running build, which removes it itself.
    with contextlib.suppress(OSError):
        if before is None or _changed(path.lstat()) < before:
            path.unlink()


def _gone(entries: list[Entry]) -> list[Entry]:
    """Those of ``entries`` that were removed: models that somebody downloads are kept."""
    return [each for each in entries if not (each.is_model and each.folder.exists())]


def _discard(entry: Entry) -> None:
    if not entry.is_model:
        discard(entry.folder)
        return
    # What somebody is downloading stays.
    with locked(entry.folder) as is_free:
        if is_free:
            shutil.rmtree(entry.folder)
            remove(record_file(entry.folder))


def _is_temporary(file: Path) -> bool:
    """Whether `write_atomically` was writing ``file``."""
    return re.fullmatch(r"\..+\.\d+-\d+\.tmp", file.name) is not None


def _inside(folder: Path) -> list[Path]:
    """The contents of ``folder``; none if it is missing, a link or no folder."""
    try:
        return [] if folder.is_symlink() else sorted(folder.iterdir())
    except OSError:
        return []


def _entry(folder: Path) -> Entry | None:
    """The entry in ``folder``; None if that is no folder, or is being removed."""
    record: Record | None = None
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return None
        with contextlib.suppress(DamagedError, PermissionError):
            record = stored_record(folder)
    except OSError:
        return None
    return Entry(folder, record, _size(folder), _changed(status))


def _size(folder: Path) -> int:
    size = 0
    for inside, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += (Path(inside) / name).lstat().st_size
    return size


def _changed(status: os.stat_result) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(status.st_mtime, datetime.timezone.utc)
