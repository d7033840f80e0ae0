"""What earlier builds made: in the user's cache folder, and after it in a shared cache."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.files import is_generated, write_atomically
from hatch_epcontext.jobs.cache import LAYOUT
from hatch_epcontext.jobs.cache.index import Index
from hatch_epcontext.jobs.cache.store import DamagedError, Growing, Kind, Store, files_of, untrusted
from hatch_epcontext.system import refusal

if TYPE_CHECKING:
    from hatch_epcontext.jobs.cache.shared import SharedCache

T = TypeVar("T")


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
