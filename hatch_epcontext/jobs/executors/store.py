"""Files of a worker of a cluster by their sha256, which arrive in chunks and are kept for later jobs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hatch_epcontext.files import FileRecord, link_or_copy

_POLL_SECONDS = 0.5
"""Seconds between two looks at whether a job that waits for a file must end."""


SILENCE_SECONDS = 60.0
"""Seconds without a chunk of a file after which a job asks for it again: its sender may have given up."""


class ArrivalError(Exception):
    """A file did not arrive; the message says why."""


@dataclass
class _Arrival:
    """A file that is being received: its chunks come in order."""

    path: Path
    record: FileRecord
    received: int = 0
    reason: str | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._digest = hashlib.sha256()
        self.path.write_bytes(b"")

    @property
    def is_complete(self) -> bool:
        return self.received == self.record.size

    def receive(self, offset: int, chunk: bytes) -> bool:
        """Append ``chunk``; False if it is neither the next one nor the first one again."""
        with self.changed:
            if offset not in (0, self.received) or self.is_complete or self.reason is not None:
                return False
            try:
                with self.path.open("ab" if offset else "wb") as file:
                    file.write(chunk)
            except OSError as error:
                self._fail(f"{self.path.parent} cannot be written: {error.strerror or error}")
                return False
            if offset == 0:
                self._digest = hashlib.sha256()
            self._digest.update(chunk)
            self.received = offset + len(chunk)
            if self.is_complete and self._digest.hexdigest() != self.record.sha256:
                self._fail("it changed while the build was running")
            self.changed.notify_all()
            return self.reason is None

    def refuse(self, reason: str) -> None:
        with self.changed:
            if not self.is_complete:
                self._fail(reason)

    def wait(self, ask: Callable[[FileRecord], None], on_wait: Callable[[], None]) -> None:
        """Return when the file is complete; raises ArrivalError if it is refused or wrong."""
        received, last = 0, time.monotonic()
        if not self.is_complete:
            ask(self.record)
        with self.changed:
            while not self.is_complete and self.reason is None:
                if not self.changed.wait(_POLL_SECONDS):
                    on_wait()
                if received != self.received:
                    received, last = self.received, time.monotonic()
                elif time.monotonic() > last + SILENCE_SECONDS:
                    last = time.monotonic()
                    ask(self.record)
            if self.reason is not None:
                raise ArrivalError(self.reason)

    def _fail(self, reason: str) -> None:
        self.reason = reason
        self.changed.notify_all()


class Store:
    """Files in ``folder``, which is made, by their sha256: the last used ones, up to ``limit`` bytes.

    Threads may use it at the same time. A file that is placed somewhere is a hard link where the file system
    has them, so that it stays there when the store forgets it.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._busy: dict[str, threading.Lock] = {}
        self._arrivals: dict[str, _Arrival] = {}

    def place(
        self,
        record: FileRecord,
        path: Path,
        ask: Callable[[FileRecord], None],
        on_wait: Callable[[], None],
    ) -> None:
        """Put the file of ``record`` at ``path``, whose folder is made, unless it is there already.

        If the store does not have it, ``ask`` must have it sent to `receive`, from its beginning; it is
        called again when nothing has arrived for `SILENCE_SECONDS`. Meanwhile ``on_wait`` is called again
        and again; what it raises ends the waiting. Raises ArrivalError if it does not arrive as it is
        recorded.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._one_at_a_time(record.sha256):
            if not path.exists() and not self._link(record.sha256, path):
                self._wait(record, path, ask, on_wait)

    def adopt(self, path: Path, record: FileRecord) -> None:
        """Keep the file at ``path``, to which nothing writes any more."""
        with self._one_at_a_time(record.sha256):
            if record.sha256 not in self._sizes:
                link_or_copy(path, self._folder / record.sha256)
                self._add(record)

    def receive(self, sha256: str, offset: int, chunk: bytes) -> bool:
        """Take the next ``chunk`` of a file; False if nobody waits for it any more."""
        arrival = self._arrivals.get(sha256)
        return arrival is not None and arrival.receive(offset, chunk)

    def refuse(self, sha256: str, reason: str) -> None:
        """End the waiting for a file that cannot be sent, for ``reason``."""
        if arrival := self._arrivals.get(sha256):
            arrival.refuse(reason)

    @contextlib.contextmanager
    def _one_at_a_time(self, sha256: str) -> Iterator[None]:
        with self._lock:
            busy = self._busy.setdefault(sha256, threading.Lock())
        with busy:
            yield

    def _link(self, sha256: str, path: Path) -> bool:
        with self._lock:
            if sha256 not in self._sizes:
                return False
            if not (self._folder / sha256).is_file():
                # Somebody cleaned the folder.
                del self._sizes[sha256]
                return False
            self._sizes.move_to_end(sha256)
            link_or_copy(self._folder / sha256, path)
            return True

    def _wait(
        self,
        record: FileRecord,
        path: Path,
        ask: Callable[[FileRecord], None],
        on_wait: Callable[[], None],
    ) -> None:
        arrival = _Arrival(self._folder / f".{record.sha256}", record)
        self._arrivals[record.sha256] = arrival
        try:
            arrival.wait(ask, on_wait)
            # Other arrivals may make the store forget this file at once.
            link_or_copy(arrival.path, path)
            arrival.path.replace(self._folder / record.sha256)
            self._add(record)
        finally:
            del self._arrivals[record.sha256]
            arrival.path.unlink(missing_ok=True)

    def _add(self, record: FileRecord) -> None:
        with self._lock:
            self._sizes[record.sha256] = record.size
            while sum(self._sizes.values()) > self._limit and len(self._sizes) > 1:
                forgotten, _ = self._sizes.popitem(last=False)
                (self._folder / forgotten).unlink(missing_ok=True)


def room(folder: Path) -> int:
    """Bytes that a store in ``folder`` may use: a quarter of what is free there."""
    folder.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(folder).free // 4


def read_chunk(path: Path, offset: int, size: int) -> bytes:
    """At most ``size`` bytes of a file from ``offset``."""
    with path.open("rb") as file:
        file.seek(offset, os.SEEK_SET)
        return file.read(size)
