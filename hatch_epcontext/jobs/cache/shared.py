"""The second level of the cache, which teams and CI share: a bucket, a server or a folder.

Below its URL: ``v5/<kind>/<name>.json`` with signed statements (see `statement`), and ``v5/blobs/<sha256>``
with the archives of artifacts, and with the files that the machines of a cluster send each other. An archive
is sent before the statement that names it. A statement is compared with the request before its archive is
downloaded, and the archive with the signed hash before it is unpacked.

A fault of a shared cache never fails a build: the build warns once, and goes on without it.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import hatch_epcontext
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.files import FileRecord, temp_dir
from hatch_epcontext.jobs.artifact import Record
from hatch_epcontext.jobs.cache.archive import DamagedError, pack, unpack
from hatch_epcontext.jobs.cache.statement import (
    Kind,
    Signed,
    Statement,
    read_signed,
    read_statement,
    statement_path,
)
from hatch_epcontext.jobs.cache.transport import (
    MAX_DOCUMENT,
    TIMEOUT,
    FailureReason,
    Transport,
    TransportError,
)
from hatch_epcontext.serialize import to_json
from hatch_epcontext.text import show_size

T = TypeVar("T")

_TROUBLE = {
    FailureReason.NO_BACKEND: "needs a package",
    FailureReason.TOO_SLOW: "kept the build waiting for too long",
}


class _UntrustedError(Exception):
    """A statement that none of the trusted keys signed; the text is the reason."""


class SharedCache:
    """The cache at ``url``, a valid URL of `check_cache_url`, for all threads of one build.

    ``warn`` gets a line when it cannot be used, and one for each damaged artifact. Without ``can_write``
    nothing is sent. ``trust``: the trusted public keys; None to use all statements. ``key``: the private
    key that signs what is sent. ``timeout``: seconds in all that the build waits without receiving a byte.
    """

    def __init__(
        self,
        url: str,
        warn: Callable[[str], None],
        *,
        can_write: bool = False,
        trust: tuple[str, ...] | None = None,
        key: str | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        signs = trust is not None or key is not None
        self.transport = Transport(url, timeout, signs=signs)
        self.trouble: str | None = None
        self._warn = warn
        self._trust = trust
        self._key = key
        self._lock = threading.Lock()
        self._readable, self._writable = True, can_write
        self._reported: set[str] = set()
        # The keys of artifacts that must be sent again.
        self._damaged: set[str] = set()

    @property
    def can_write(self) -> bool:
        """Whether the build may write to it, and writing has not failed yet."""
        return self._writable

    def has(self, key: str) -> bool:
        """Whether it has a statement about the artifact of that key; only the statement is read."""
        return self._reading(lambda: self._archive(key), key) is not None

    def fetch(self, key: str, folder: Path, fits: Callable[[Record], bool]) -> Record | None:
        """Download the artifact of that key into ``folder``, which is created.

        None, and no folder, if there is no artifact, if the cache cannot be read, if anything differs from
        what was signed, or if the record does not fit.
        """
        record = self._reading(lambda: self._fetch(key, folder, fits), key)
        if record is None:
            shutil.rmtree(folder, ignore_errors=True)
        return record

    def send(self, key: str, folder: Path, record: Record) -> None:
        """Upload the artifact in ``folder``, if the build may write and the cache lacks any part of it."""
        self._writing(lambda: self._send(key, folder, record))

    def read(self, kind: Kind, name: str) -> str | None:
        """The text of a statement, if there is one."""
        statement = self._reading(lambda: self._statement(kind, name))
        return None if statement is None else statement.text

    def write(self, kind: Kind, name: str, text: str) -> None:
        """Sign and send ``text``, if the build may write."""
        self._writing(lambda: self._state(Statement(kind, name, text=text)))

    def share(self, kind: Kind, name: str, text: str) -> None:
        """Sign and send ``text`` if the build may write and the cache has another text, or none."""
        if self.can_write and self.read(kind, name) != text:
            self.write(kind, name, text)

    def stop(self) -> None:
        """End all requests of an interrupted build, and start no more."""
        self._readable = self._writable = False
        self.transport.stop()

    def _reading(self, operation: Callable[[], T], key: str | None = None) -> T | None:
        if not self._readable:
            return None
        try:
            return operation()
        except DamagedError as error:
            self._report_damaged(key, error)
        except _UntrustedError as error:
            self._report("trust", f"has statements that are not trusted ({error})")
        except TransportError as error:
            if error.failure is FailureReason.DENIED:
                self._report("read", f"does not allow reading ({error})")
            elif error.failure is not FailureReason.MISSING:
                self._switch_off(error)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            self._report(
                "store", f"is not used for an artifact that cannot be stored here ({reason})"
            )
        return None

    def _writing(self, operation: Callable[[], None]) -> None:
        if not self._writable:
            return
        try:
            self._check_key()
            operation()
        except TransportError as error:
            self._writable = False
            if error.failure in (FailureReason.NO_BACKEND, FailureReason.TOO_SLOW):
                self._switch_off(error)
            elif error.failure is not FailureReason.STOPPED and self._readable:
                self._report(
                    "write", f"cannot be written ({error}); this build does not write to it"
                )
        except OSError:
            # Another process cleaned the user's cache at this moment.
            return

    def _switch_off(self, error: TransportError) -> None:
        self._readable = self._writable = False
        if error.failure is not FailureReason.STOPPED:
            verb = _TROUBLE.get(error.failure, "cannot be reached")
            self.trouble = f"The shared cache {self.transport.url} {verb} ({error})."
            self._report("read", f"{verb} ({error}); this build goes on without it")

    def _report(self, topic: str, message: str) -> None:
        with self._lock:
            if topic in self._reported:
                return
            self._reported.add(topic)
        self._warn(f"the shared cache {self.transport.url} {message}")

    def _report_damaged(self, key: str | None, error: DamagedError) -> None:
        if key is None:
            self._report("statement", f"has damaged statements, which are not used ({error})")
        elif key not in self._damaged:
            self._damaged.add(key)
            what = f"the artifact {key[:12]} in the shared cache {self.transport.url}"
            self._warn(f"{what} is not used, because {error}")

    def _archive(self, key: str) -> FileRecord:
        archive = self._statement("artifact", key).archive
        assert archive is not None, "that of an artifact has one"
        return archive

    def _fetch(self, key: str, folder: Path, fits: Callable[[Record], bool]) -> Record:
        archive = self._archive(key)
        with temp_dir() as made:
            self.transport.fetch_blob(archive, made / "archive")
            record = unpack(made / "archive", folder)
        if not fits(record):
            raise DamagedError("its record belongs to another job")
        return record

    def _send(self, key: str, folder: Path, record: Record) -> None:
        try:
            # A store that removes old files may remove an archive before its statement.
            if key not in self._damaged and self.transport.has_blob(self._archive(key)):
                return
        except (DamagedError, _UntrustedError):
            pass
        except TransportError as error:
            if not error.may_be_missing:
                raise
        with temp_dir() as made:
            archive = pack(folder, record, made / "archive")
            self.transport.send_blob(made / "archive", archive)
        self._state(Statement("artifact", key, archive, versions=record.versions))
        self._damaged.discard(key)

    def _statement(self, kind: Kind, name: str) -> Statement:
        signed = read_signed(self.transport.read(statement_path(kind, name)))
        if self._trust is not None:
            if not signed.signature:
                raise _UntrustedError("a statement is not signed")
            if not self._signing().is_signed(signed.signed_bytes, signed.signature, self._trust):
                raise _UntrustedError("a statement is not signed by any of build.cache-keys")
        return read_statement(signed, kind, name)

    def _state(self, statement: Statement) -> None:
        own = {"hatch-epcontext": hatch_epcontext.__version__}
        statement = replace(statement, versions={**own, **statement.versions})
        signed = Signed(to_json(statement, indent=None))
        if self._key is not None:
            signature = self._signing().sign(signed.signed_bytes, self._key)
            signed = Signed(signed.statement, signature)
        content = to_json(signed, indent=None).encode()
        if len(content) > MAX_DOCUMENT:
            self._report(
                "large", f"gets no statement of {show_size(len(content))}, which is too large"
            )
            return
        self.transport.write(statement_path(statement.kind, statement.name), content)

    def _check_key(self) -> None:
        """Raise TransportError if the build's own key is not trusted: its artifacts would never be used."""
        if self._key is None or self._trust is None:
            return
        if self._signing().public_key(self._key) not in self._trust:
            reason = f"{PREFIX}CACHE_KEY belongs to none of build.cache-keys"
            raise TransportError(FailureReason.FAILED, reason)

    def _signing(self) -> ModuleType:
        """The module for signatures: projects without a shared cache do not need its package."""
        try:
            from hatch_epcontext.jobs.cache import signing
        except ImportError as error:
            raise self.transport.classified(error) from None
        return signing
