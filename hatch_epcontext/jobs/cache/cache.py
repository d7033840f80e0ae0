"""What earlier builds compiled: in the user's cache folder, and after it in a shared cache."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.files import (
    is_generated,
    is_sha256,
    known_text,
    link_or_copy,
    mark_used,
    write_atomically,
)
from hatch_epcontext.jobs.artifact import Artifact, Record
from hatch_epcontext.jobs.cache import LAYOUT
from hatch_epcontext.jobs.cache.archive import DamagedError
from hatch_epcontext.jobs.cache.folder import (
    checked_record,
    entry_folder,
    untrusted,
    validation_file,
    write_entry,
)
from hatch_epcontext.jobs.cache.index import Index
from hatch_epcontext.serialize import from_json, to_json
from hatch_epcontext.system import refusal
from hatch_epcontext.worker.results import Validation

if TYPE_CHECKING:
    from hatch_epcontext.jobs.cache.shared import SharedCache

_POLL_SECONDS = 0.5
"""Seconds after which a build that waits for another one checks again whether it must end."""


class Cache:
    """Artifacts and their validations, each by a key that identifies it; see `folder` for their places.

    ``root`` is None when the build does not use the user's cache. ``warn`` gets a line for each damaged
    artifact, and one when the folder cannot be used; the build then goes on without it. What the
    folder lacks is read from ``shared``, and what is stored is also sent there if the build may write
    to it.
    """

    def __init__(
        self,
        root: Path | None,
        warn: Callable[[str], None],
        shared: SharedCache | None = None,
    ) -> None:
        self._root = root
        self._warn = warn
        self.shared = shared
        if root is not None and (reason := untrusted(root)):
            self._root = None
            warn(
                f"the cache folder {root} is not used, because {reason}. {PREFIX}CACHE_DIR names another."
            )
        self._index = self.index()
        self._damaged: set[Path] = set()

    def index(self) -> Index:
        """An index of files in the cache, if there is one, for one build."""
        folder = None if self._root is None else self._root / LAYOUT / "index"
        return Index(folder, self.shared)

    @property
    def trouble(self) -> str:
        """Why the build goes on without the shared cache, as a line of a message; empty if it uses it."""
        trouble = None if self.shared is None else self.shared.trouble
        return f"\n{trouble}" if trouble else ""

    def stop(self) -> None:
        """Stop waiting for the shared cache, and stop using it."""
        if self.shared is not None:
            self.shared.stop()

    def has(self, key: str) -> bool:
        """Whether the cache has the artifact of that key."""
        return self._find(key) is not None or (self.shared is not None and self.shared.has(key))

    def take(
        self, key: str, folder: Path, fits: Callable[[Record], bool] = lambda record: True
    ) -> Artifact | None:
        """The artifact of that key with its files in ``folder``, which is created; None for a miss.

        The files are hard links where possible: later changes of the cache do not matter. An artifact of the
        shared cache is used only if its record ``fits``.
        """
        artifact = self._take(key, folder)
        if self.shared is None:
            return artifact
        if artifact is not None:
            # Another build may have compiled it that could not write to the shared cache.
            self.shared.send(key, folder, artifact.record)
            return artifact
        record = self.shared.fetch(key, folder, fits)
        if record is None:
            return None
        self._keep(key, folder, record)
        return Artifact(folder, record)

    @contextlib.contextmanager
    def lock(self, fingerprint: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the right to compile ``fingerprint``, in this process and all others with this cache.

        While another build holds it, ``on_wait`` is called repeatedly; an exception from it ends the wait.
        The system releases the lock of a process that ends, however it ends. Without a cache that can be
        locked, nothing is held.
        """
        if self._root is None:
            yield
            return
        # Imported here because it imports asyncio, which builds from the cache do not need.
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
            # `store` reports a folder that cannot be written.
            yield
            return
        try:
            yield
        finally:
            held.release()

    def set_latest(self, what: str, key: str) -> None:
        """Store that the artifact of ``key`` is the latest of ``what``, a hex sha256."""
        if self._local_latest(what) != key:
            self._keep_latest(what, key)
        if self.shared is not None:
            self.shared.share("latest", what, key)

    def latest(self, what: str, *, own_first: bool = False) -> str | None:
        """The key of the latest artifact of ``what``.

        The shared cache wins, if there is one: others may have compiled a newer one than the user's folder
        has. With ``own_first`` it is read only for what that folder lacks, and its answer is stored there.
        """
        own = self._local_latest(what)
        if self.shared is None or (own_first and own is not None):
            return own
        found = self.shared.read("latest", what)
        if found is None or not is_sha256(found):
            return own
        if own_first:
            self._keep_latest(what, found)
        return found

    def store(self, key: str, folder: Path, record: Record) -> None:
        """Store the files in ``folder``, which no longer change, under ``key``."""
        self._keep(key, folder, record)
        if self.shared is not None:
            self.shared.send(key, folder, record)

    def validation(self, key: str, validation: str) -> Validation | None:
        """The validation under the key ``validation`` of the artifact of ``key``."""
        own = self._local_validation(key, validation)
        text = own
        if text is None and self.shared is not None:
            text = self.shared.read("validation", f"{key}/{validation}")
        if text is None:
            return None
        try:
            result = from_json(text, Validation)
        except ValueError:
            self._warn("a validation in the cache is damaged; validating again")
            return None
        if own is None:
            self._keep_validation(key, validation, text)
        elif self.shared is not None:
            self.shared.share("validation", f"{key}/{validation}", text)
        return result

    def store_validation(self, key: str, validation: str, result: Validation) -> None:
        """Store ``result`` beside the artifact, if the cache has that and can be written."""
        text = to_json(result, indent=None)
        self._keep_validation(key, validation, text)
        if self.shared is not None:
            self.shared.write("validation", f"{key}/{validation}", text)

    def store_report(self, name: str, text: str) -> Path | None:
        """Store the report of the last build of ``name``; returns its path, or None if it is not stored."""
        if self._root is None:
            return None
        file = self._root / "reports" / f"{name}.json"
        with contextlib.suppress(OSError):
            if file.exists() and not is_generated(file):
                return None
            # Builds without changes have equal reports, and replacing a file may wait for the disk.
            if file.is_file() and file.read_text(encoding="utf-8", errors="replace") == text:
                return file
            return write_atomically(file, text, durable=False)
        return None

    def _local_latest(self, what: str) -> str | None:
        if self._root is None:
            return None
        text = known_text(self._root / LAYOUT / "latest" / what)
        return text if text is not None and is_sha256(text) else None

    def _keep_latest(self, what: str, key: str) -> None:
        if self._root is not None:
            with contextlib.suppress(OSError):
                write_atomically(self._root / LAYOUT / "latest" / what, key, durable=False)

    def _local_validation(self, key: str, validation: str) -> str | None:
        if self._root is None:
            return None
        return known_text(validation_file(self._root, key, validation))

    def _keep_validation(self, key: str, validation: str, text: str) -> None:
        if self._root is not None and entry_folder(self._root, key).is_dir():
            with contextlib.suppress(OSError):
                write_atomically(validation_file(self._root, key, validation), text)

    def _take(self, key: str, folder: Path) -> Artifact | None:
        """As `take`, from the folder only."""
        record = self._find(key)
        if self._root is None or record is None:
            return None
        entry = entry_folder(self._root, key)
        try:
            for name in map(PurePosixPath, record.files):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(entry / "files" / name, folder / name)
        except OSError:
            # Another process cleaned the cache at this moment.
            shutil.rmtree(folder, ignore_errors=True)
            return None
        mark_used(entry)
        return Artifact(folder, record)

    def _keep(self, key: str, folder: Path, record: Record) -> None:
        """As `store`, into the folder only."""
        if self._root is None:
            return
        try:
            write_entry(self._root, key, folder, record, self._index)
        except OSError as error:
            self._warn(
                f"the cache folder {self._root} cannot be written ({refusal(error, self._root)}); this "
                f"build does not store its artifacts. {PREFIX}CACHE_DIR names another folder."
            )
            self._root = None

    def _find(self, key: str) -> Record | None:
        if self._root is None:
            return None
        entry = entry_folder(self._root, key)
        try:
            return checked_record(entry, self._index)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DamagedError as error:
            # If the entry is gone, another process cleaned the cache at this moment.
            if entry.exists() and entry not in self._damaged:
                self._damaged.add(entry)
                self._warn(f"the cached artifact in {entry} is damaged ({error}); compiling again")
        except OSError as error:
            reason = error.strerror or error
            self._warn(f"the cached artifact in {entry} cannot be read ({reason}); compiling again")
        return None
