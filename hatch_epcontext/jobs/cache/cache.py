"""A content-addressed store of artifacts in the user's cache folder, safe for several builds at once.

`cache_folder` describes the folder. Behind it there can be a remote, which several machines share.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import platformdirs

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.files import Output, is_sha256, link_or_copy, write_atomically
from hatch_epcontext.jobs.artifact import Artifact, Record, ValidationRun
from hatch_epcontext.jobs.cache.cache_folder import (
    checked_record,
    entry_folder,
    read_document,
    validation_file,
    write_entry,
)
from hatch_epcontext.jobs.cache.entry import (
    LAYOUT,
    Check,
    latest_name,
    read_validation,
    validation_name,
)
from hatch_epcontext.jobs.cache.envelope import DamagedError, envelope_around
from hatch_epcontext.jobs.cache.index import Index
from hatch_epcontext.serialize import to_json
from hatch_epcontext.system import refusal

if TYPE_CHECKING:
    from hatch_epcontext.jobs.cache.remote import Remote

_POLL_SECONDS = 0.5
"""Seconds between two looks at whether a build that waits for another one must end."""

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
    may write to it. With ``read_all`` its index reads each file, whatever its status.
    """

    def __init__(
        self,
        root: Path | None,
        warn: Callable[[str], None],
        remote: Remote | None = None,
        *,
        read_all: bool = False,
    ) -> None:
        self._root = root
        self._warn = warn
        self._remote = remote
        self._read_all = read_all

    def index(self) -> Index:
        """An index of files in the cache, if there is one."""
        folder = None if self._root is None else self._root / LAYOUT / "index"
        return Index(folder, self._remote, self._read_all)

    @property
    def trouble(self) -> str:
        """Why the build goes on without the remote, as a line of a message; empty if it does not."""
        trouble = None if self._remote is None else self._remote.trouble
        return f"\n{trouble}" if trouble else ""

    def stop(self) -> None:
        """Wait no longer for the remote, and do not use it any more."""
        if self._remote is not None:
            self._remote.stop()

    def has(self, fingerprint: str, check: Check) -> bool:
        """Whether the cache has the artifact of that fingerprint as `take` wants it."""
        return self._find(fingerprint, check) is not None or (
            self._remote is not None and self._remote.has(fingerprint, check)
        )

    def take(self, fingerprint: str, folder: Path, check: Check) -> Artifact | None:
        """The artifact of that fingerprint with its files in ``folder``, which is made; None for a miss.

        Hard links where they are possible: what happens to the cache later does not matter. An artifact with
        a record that ``check`` refuses is damaged.
        """
        artifact = self._take(fingerprint, folder, check)
        if self._remote is None:
            return artifact
        if artifact is not None:
            # Another build may have made it, which could not write to the remote.
            self._remote.send(fingerprint, folder, artifact.record, check)
            return artifact
        record = self._remote.fetch(fingerprint, folder, check)
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
        name = latest_name(settings_key)
        if self._local_latest(name) != fingerprint:
            self._keep_latest(name, fingerprint)
        if self._remote is not None:
            self._remote.share(name, fingerprint)

    def latest(self, settings_key: str, *, own_first: bool = False) -> str | None:
        """The fingerprint of the latest artifact with these settings.

        The remote's, if there is one: the user's own folder can be older than what others compiled. With
        ``own_first`` the remote is asked only for what that folder does not have, which then has it.
        """
        name = latest_name(settings_key)
        own = self._local_latest(name)
        if self._remote is None or (own_first and own is not None):
            return own
        found = self._remote.read(name)
        if found is None or not is_sha256(found):
            return own
        if own_first:
            self._keep_latest(name, found)
        return found

    def store(self, fingerprint: str, folder: Path, record: Record, check: Check) -> None:
        """Store the files in ``folder``, to which nothing writes any more, under ``fingerprint``."""
        self._keep(fingerprint, folder, record)
        if self._remote is not None:
            self._remote.send(fingerprint, folder, record, check)

    def validation(self, fingerprint: str, key: str) -> ValidationRun | None:
        """The validation under ``key``, a hex sha256, of the artifact of that fingerprint."""
        name = validation_name(fingerprint, key)
        text = self._local_validation(fingerprint, key)
        known = text is not None
        if text is None and self._remote is not None:
            text = self._remote.read(name)
        if text is None:
            return None
        try:
            run = read_validation(text)
        except DamagedError as error:
            self._warn(f"a validation in the cache is damaged ({error}); validating again")
            return None
        if not known:
            self._keep_validation(fingerprint, key, text)
        elif self._remote is not None:
            self._remote.share(name, text)
        return run

    def store_validation(self, fingerprint: str, key: str, run: ValidationRun) -> None:
        """Store ``run`` beside the artifact, where the cache has it and can be written."""
        text = to_json(run)
        self._keep_validation(fingerprint, key, text)
        if self._remote is not None:
            self._remote.write(validation_name(fingerprint, key), text)

    def store_report(self, name: str, text: str) -> Path | None:
        """Store the report of the last build of ``name``; returns its path, or None if it is not stored."""
        if self._root is None:
            return None
        file = self._root / "reports" / f"{name}.json"
        with contextlib.suppress(OSError):
            if file.exists() and not Output.REPORT.is_at(file):
                return None
            # Builds without changes have equal reports, and replacing a file can wait for the disk.
            if file.is_file() and file.read_text(encoding="utf-8", errors="replace") == text:
                return file
            return write_atomically(file, text, durable=False)
        return None

    def _local_latest(self, name: str) -> str | None:
        if self._root is None:
            return None
        try:
            text = read_document(self._root / LAYOUT / name, name)
        except (OSError, DamagedError):
            return None
        return text if is_sha256(text) else None

    def _keep_latest(self, name: str, fingerprint: str) -> None:
        if self._root is not None:
            text = envelope_around(name, fingerprint)
            with contextlib.suppress(OSError):
                write_atomically(self._root / LAYOUT / name, text, durable=False)

    def _local_validation(self, fingerprint: str, key: str) -> str | None:
        if self._root is None:
            return None
        file = validation_file(self._root, fingerprint, key)
        try:
            return read_document(file, validation_name(fingerprint, key))
        except OSError:
            return None
        except DamagedError as error:
            self._warn(f"the cached validation {file} is damaged ({error}); validating again")
            return None

    def _keep_validation(self, fingerprint: str, key: str, text: str) -> None:
        if self._root is not None and entry_folder(self._root, fingerprint).is_dir():
            document = envelope_around(validation_name(fingerprint, key), text)
            with contextlib.suppress(OSError):
                write_atomically(validation_file(self._root, fingerprint, key), document)

    def _take(self, fingerprint: str, folder: Path, check: Check) -> Artifact | None:
        """As `take`, from the folder only."""
        record = self._find(fingerprint, check)
        if self._root is None or record is None:
            return None
        entry = entry_folder(self._root, fingerprint)
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
            write_entry(self._root, fingerprint, folder, record)
        except OSError as error:
            self._warn(
                f"the cache folder {self._root} cannot be written ({refusal(error, self._root)}); this "
                f"build does not store its artifacts. {PREFIX}CACHE_DIR names another folder."
            )
            self._root = None

    def _find(self, fingerprint: str, check: Check) -> Record | None:
        if self._root is None:
            return None
        entry = entry_folder(self._root, fingerprint)
        try:
            record = checked_record(entry)
            check(record)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DamagedError as error:
            # Without an entry somebody cleaned the cache at this moment.
            if entry.exists():
                self._warn(f"the cached artifact in {entry} is damaged ({error}); compiling again")
            return None
        except OSError as error:
            reason = error.strerror or error
            self._warn(f"the cached artifact in {entry} cannot be read ({reason}); compiling again")
            return None
        return record
