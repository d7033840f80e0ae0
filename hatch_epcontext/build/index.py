"""An index of files: from a file's status to its sha256, and from that to the facts of a model.

So a build reads no file that did not change, and needs no worker for a model that it knows. An index is a
folder of small files, which are written whole or not at all, and which any number of builds may use. Each is
a document in an envelope: what is damaged is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hatch_epcontext.build.envelope import DamagedError, envelope_around, read_envelope
from hatch_epcontext.files import file_sha256, is_sha256, write_atomically
from hatch_epcontext.serialize import from_json, to_json

if TYPE_CHECKING:
    from hatch_epcontext.build.remote import Remote

T = TypeVar("T")

_SETTLED_NS = 2 * 10**9
"""Nanoseconds after which a changed file must have another status: the coarsest file systems count in
two seconds."""


@dataclass(frozen=True)
class Index:
    """An index in ``folder``; with None it only remembers what it read itself.

    Facts of models are also read from ``remote``, and written to it if the build may do that.
    """

    folder: Path | None = None
    remote: Remote | None = None
    _known: dict[str, str] = field(default_factory=dict)

    def sha256(self, path: Path) -> str:
        """The hex sha256 of the file ``path``, from the index if its status is known there."""
        status = path.stat()
        key = _digest_of(status)
        found = self._known.get(key) or self._read_sha256(key)
        if found is None:
            # A file that was written at this moment may be written again without another status.
            settled = _is_settled(status)
            found = file_sha256(path)
            if settled and _digest_of(path.stat()) == key:
                self._write(_status_name(key), found)
        self._known[key] = found
        return found

    def facts(self, key: str, type_: type[T]) -> T | None:
        """The facts that were stored under ``key``, a hex sha256."""
        known = self._read(_facts_name(key))
        text = known
        if known is None and self.remote is not None:
            text = self.remote.read(_facts_name(key))
        try:
            facts = from_json(text or "", type_)
        except ValueError:
            return None
        if text is not None:
            self._keep_facts(key, text, known)
        return facts

    def store_facts(self, key: str, facts: object) -> None:
        """Store ``facts`` under ``key``, a hex sha256, where that can be written and has others or none."""
        self._keep_facts(key, to_json(facts), self._read(_facts_name(key)))

    def _keep_facts(self, key: str, text: str, known: str | None) -> None:
        name = _facts_name(key)
        if text != known:
            self._write(name, text)
        if self.remote is not None:
            self.remote.share(name, text)

    def _read_sha256(self, key: str) -> str | None:
        found = self._read(_status_name(key))
        return found if found is not None and is_sha256(found) else None

    def _read(self, name: str) -> str | None:
        if self.folder is None:
            return None
        try:
            return read_envelope(self._file(self.folder, name).read_bytes(), name).text
        except (OSError, DamagedError):
            return None

    def _write(self, name: str, text: str) -> None:
        if self.folder is not None:
            with contextlib.suppress(OSError):
                document = envelope_around(name, text)
                write_atomically(self._file(self.folder, name), document, durable=False)

    def _file(self, folder: Path, name: str) -> Path:
        return folder / name.rpartition("/")[2]


def _facts_name(key: str) -> str:
    return f"index/{key}"


def _status_name(key: str) -> str:
    return f"status/{key}"


def _digest_of(status: os.stat_result) -> str:
    parts: Iterable[int] = (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
    return hashlib.sha256(":".join(map(str, parts)).encode()).hexdigest()


def _is_settled(status: os.stat_result) -> bool:
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    return changed < time.time_ns() - _SETTLED_NS
