"""The second level of the cache, which teams and CI share: a bucket, a server or a folder.

Below its URL: ``v5/<kind>/<name>.json`` with signed statements (see `signing`), and ``v5/blobs/<sha256>``
with the archives of artifacts, and with the files that the machines of a cluster send each other. An archive
is sent before the statement that names it. A statement is compared with the request before its archive is
downloaded, and the archive with the signed hash before it is unpacked.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import hatch_epcontext
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.shared_cache import REQUIREMENTS, SIGNATURES
from hatch_epcontext.files import (
    FileRecord,
    is_regular,
    is_sha256,
    patiently,
    record_file,
    remove,
    temp_dir,
)
from hatch_epcontext.jobs.artifact import Record
from hatch_epcontext.jobs.cache import LAYOUT
from hatch_epcontext.jobs.cache.archive import pack, unpack
from hatch_epcontext.jobs.cache.signing import Kind, Statement, public_key, read, signed
from hatch_epcontext.jobs.cache.store import DamagedError, read_record
from hatch_epcontext.jobs.cache.store import Kind as EntryKind
from hatch_epcontext.jobs.requirements import pip_install
from hatch_epcontext.serialize import to_json
from hatch_epcontext.text import hide_credentials, show_size

T = TypeVar("T")

_TIMEOUT = 20.0
"""Seconds that a request waits for an answer, or for more bytes."""

_SLOWEST = 10_000
"""Bytes a second from which a transfer counts as progress: a byte from time to time does not."""

_POLL_SECONDS = 0.5

_MAX_DOCUMENT = 4 << 20

_PART = 5 << 20
"""Bytes that are sent at once: the minimum of Amazon S3."""

_UPLOAD: dict[str, dict[str, Any]] = {
    "s3": {"chunksize": _PART, "max_concurrency": 2},
    "gs": {"chunksize": _PART},
    **{name: {"overwrite": True, "max_concurrency": 2} for name in ("az", "abfs", "abfss")},
}

_LOGGERS = ("aiobotocore", "asyncio", "azure", "botocore", "fsspec", "gcsfs", "google", "s3fs")
"""The backends' loggers; without configured logging a build shows nothing of them."""


class Failure(Enum):
    """Why a request failed; the value says that of a shared cache."""

    MISSING = "lacks a file"
    DENIED = "does not allow reading"
    NO_BACKEND = "needs a package"
    FAILED = "cannot be reached"
    TOO_SLOW = "kept the build waiting for too long"
    STOPPED = "is not used"


class TransportError(Exception):
    """A request that failed; the text is the reason."""

    def __init__(self, failure: Failure, reason: str) -> None:
        super().__init__(reason)
        self.failure = failure
        # A bucket that cannot be listed reports no missing files.
        self.may_be_missing = failure in (Failure.MISSING, Failure.DENIED)


class Transport:
    """The files below ``folder`` at ``url``, a valid URL of `check_cache_url`, for all threads of one build.

    ``timeout``: seconds that a request waits for an answer, or for more bytes. All methods raise
    TransportError. ``signs``: whether the build also needs the package for signatures.
    """

    def __init__(
        self, url: str, timeout: float = _TIMEOUT, *, signs: bool = False, folder: str = LAYOUT
    ) -> None:
        self.url = url.rstrip("/")
        self._scheme = url.partition("://")[0]
        self._timeout, self._signs, self._folder = timeout, signs, folder
        self._opening = threading.Lock()
        self._opened: tuple[Any, str] | None = None
        self._stopped = False
        # Whether a file is present and intact, if known.
        self._known: dict[FileRecord, bool] = {}

    def stop(self) -> None:
        """End all requests of an interrupted build, and start no more."""
        self._stopped = True

    def has_blob(self, blob: FileRecord) -> bool:
        """Whether the file with this content is there with its size, and not known to be damaged."""
        if blob not in self._known:
            try:
                size = self._ask(lambda files, path, _: files.info(path).get("size"), _path(blob))
            except TransportError as error:
                if error.may_be_missing:
                    return False
                raise
            # Servers need not report the size.
            if size not in (None, blob.size):
                return False
            self._known[blob] = True
        return self._known[blob]

    def distrust(self, blob: FileRecord) -> None:
        """Send the file with this content again the next time, because somebody found it damaged."""
        self._known[blob] = False

    def send_file(self, path: Path) -> FileRecord:
        """Upload the file ``path`` under its sha256, unless it is there; returns its size and sha256.

        The file must not change in the meantime: send a copy of what somebody else may write.
        """
        record = record_file(path)
        self.send_blob(path, record)
        return record

    def fetch_file(self, sha256: str, size: int, path: Path) -> None:
        """Download the file that `send_file` sent to ``path``, which must not exist, and no more bytes.

        Raises DamagedError if it is missing or has other content, and OSError as `fetch` does.
        """
        self.fetch_blob(FileRecord(size, sha256), path)

    def send_blob(self, source: Path, blob: FileRecord) -> None:
        """Upload the file ``source`` under the name of its content, unless it is there."""
        if not self.has_blob(blob):
            self.send(source, _path(blob))
            self._known[blob] = True

    def fetch_blob(self, blob: FileRecord, target: Path) -> None:
        """Download the file with this content, and no more bytes, to ``target``, which must not exist.

        Raises DamagedError if it is missing or has other content, and OSError as `fetch` does.
        """
        try:
            self.fetch(_path(blob), target, blob.size)
            damage = "" if record_file(target) == blob else "has other content"
        except DamagedError:
            damage = "is larger than its record"
        except TransportError as error:
            if error.failure is not Failure.MISSING:
                raise
            damage = "is missing"
        if damage:
            self.distrust(blob)
            damaged = DamagedError(f"{self.url}/{self._folder}/{_path(blob)} {damage}")
            damaged.blob = blob
            raise damaged
        self._known[blob] = True

    def send(self, source: Path, name: str) -> None:
        """Upload the file ``source`` as ``name``."""
        options = _UPLOAD.get(self._scheme, {})
        if self._scheme in ("http", "https"):
            # Many servers refuse a body of unknown length.
            options = {"method": "put", "headers": {"Content-Length": str(source.stat().st_size)}}

        def put(files: Any, path: str, callback: Any) -> None:
            files.put_file(str(source), path, callback=callback, **options)

        self._ask(put, name)

    def fetch(
        self, name: str, target: Path, limit: int, arrived: Callable[[int], None] = lambda _: None
    ) -> None:
        """Download the file ``name`` to ``target``, which must not exist; ``arrived`` gets the bytes so far.

        Raises DamagedError for more than ``limit`` bytes, and OSError if this machine has no room for it.
        """
        target.touch(exist_ok=False)
        # Parts at the same time would not be counted as they arrive.
        options = {"max_concurrency": 1} if self._scheme == "s3" else {}

        def get(files: Any, path: str, callback: Any) -> None:
            files.get_file(path, str(target), callback=callback, **options)

        def check(size: int) -> None:
            if size > limit:
                raise DamagedError(f"{name} has more than {show_size(limit)}")
            arrived(size)

        try:
            self._ask(get, name, check)
        except TransportError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                raise cause from None
            raise

    def _ask(
        self,
        request: Callable[[Any, str, Any], T],
        name: str,
        arrived: Callable[[int], None] = lambda _: None,
    ) -> T:
        """The result of ``request``, which gets the file system, the path of ``name`` and a callback.

        It runs in a thread of its own, because backends may wait much longer than a build does.
        """
        outcome: futures.Future[T] = futures.Future()
        size, before, since = 0, 0, time.monotonic()

        def count(_: int, value: int, **__: object) -> None:
            nonlocal size
            size = value
            arrived(value)

        def run() -> None:
            try:
                from fsspec.callbacks import Callback

                files, root = self._files()
                path = "/".join(filter(None, (root, self._folder, name)))
                outcome.set_result(request(files, path, Callback(hooks={"count": count})))
            except BaseException as error:
                outcome.set_exception(error)

        if not self._stopped:
            threading.Thread(target=run, daemon=True, name="shared cache").start()
        while not futures.wait([outcome], min(self._timeout, _POLL_SECONDS)).done:
            now = time.monotonic()
            if self._stopped:
                raise TransportError(Failure.STOPPED, "the build was interrupted")
            if size - before >= _SLOWEST * self._timeout:
                before, since = size, now
            elif now - since >= self._timeout:
                raise TransportError(Failure.TOO_SLOW, f"{self._timeout:g} s without an answer")
        try:
            return outcome.result()
        except DamagedError:
            raise
        except Exception as error:
            raise self.classified(error) from error

    def _files(self) -> tuple[Any, str]:
        """The file system, and the path of its root."""
        with self._opening:
            if self._opened is None:
                from fsspec.core import url_to_fs

                # Some log whole tracebacks, with the contents of requests.
                for logger in _LOGGERS:
                    logging.getLogger(logger).addHandler(logging.NullHandler())
                options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
                if self._scheme == "s3":
                    # The file system repeats requests itself.
                    options["config_kwargs"] = {"retries": {"max_attempts": 1}}
                elif self._scheme in ("http", "https"):
                    import aiohttp

                    # Not aiohttp's own look at the environment, which also reads .netrc.
                    if not urllib.request.proxy_bypass(urlsplit(self.url).hostname or ""):
                        options["proxy"] = urllib.request.getproxies().get(self._scheme)
                    options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=None)}
                files, root = url_to_fs(self.url, **options)
                self._opened = _Folder() if self._scheme == "file" else files, root.rstrip("/")
            return self._opened

    def classified(self, error: Exception) -> TransportError:
        """``error`` as the failure of a request."""
        if isinstance(error, TransportError):
            return error
        if isinstance(error, ImportError):
            packages = [REQUIREMENTS[self._scheme], *([SIGNATURES] if self._signs else [])]
            return TransportError(Failure.NO_BACKEND, f"run: {pip_install(packages)}")
        # Amazon's code; a missing bucket is not a missing file.
        response = getattr(error.__cause__, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
            return TransportError(Failure.MISSING, "it is missing")
        # Each backend names the status of an HTTP answer differently.
        names = ("status", "status_code", "code")
        status = next((getattr(error, name) for name in names if hasattr(error, name)), None)
        denied = isinstance(error, PermissionError) or status in (401, 403)
        return TransportError(Failure.DENIED if denied else Failure.FAILED, _reason(error))


def _path(blob: FileRecord) -> str:
    return f"blobs/{blob.sha256}"


def _reason(error: Exception) -> str:
    """The first line of an error, without possible secrets."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    # aiohttp names its TLS setting for addresses without TLS too.
    refused = re.fullmatch(r"Cannot connect to host \S+ ssl:.*? \[(.+)\]", text)
    text = hide_credentials(refused[1] if refused else text)
    for name, value in os.environ.items():
        if len(value) >= 6 and re.search("KEY|SECRET|TOKEN|PASS|CREDENTIAL|SAS|CONNECTION", name):
            text = text.replace(value, "***")
    return text if len(text) <= 200 else f"{text[:197]}..."


class _Folder:
    """A folder, with the methods of fsspec that are used here. A file becomes visible when it is complete."""

    def info(self, path: str) -> dict[str, int]:
        return {"size": _regular(path).stat().st_size}

    def get_file(self, path: str, target: str, callback: Any) -> None:
        _copy(_regular(path), Path(target), callback)

    def put_file(self, source: str, path: str, callback: Any) -> None:
        temporary = Path(f"{path}.{os.urandom(8).hex()}.tmp")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            _copy(Path(source), temporary, callback)
            patiently(lambda: temporary.replace(path))
        finally:
            remove(temporary)


def _regular(path: str) -> Path:
    """A regular file; raises FileNotFoundError for anything else, such as a pipe, which would block."""
    if not is_regular(Path(path)):
        raise FileNotFoundError(path)
    return Path(path)


def _copy(source: Path, target: Path, callback: Any) -> None:
    with source.open("rb") as reading, target.open("wb") as writing:
        while chunk := reading.read(_PART):
            writing.write(chunk)
            callback.relative_update(len(chunk))


class SharedCache:
    """The cache at ``url``, a valid URL of `check_cache_url`, for all threads of one build.

    A fault of it never fails a build: ``warn`` gets a line for each, once. Without ``can_write`` nothing is
    sent. ``trust``: the trusted public keys; None to use all statements. ``key``: the private key that signs
    what is sent. ``timeout``: as in `Transport`.
    """

    def __init__(
        self,
        url: str,
        warn: Callable[[str], None],
        *,
        can_write: bool = False,
        trust: tuple[str, ...] | None = None,
        key: str | None = None,
        timeout: float = _TIMEOUT,
    ) -> None:
        self.transport = Transport(url, timeout, signs=trust is not None or key is not None)
        self.trouble: str | None = None
        self.can_write = can_write
        self._readable = True
        self._warn, self._trust, self._key = warn, trust, key
        self._lock = threading.Lock()
        self._reported: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether it has a statement about the artifact of that key; only the statement is read."""
        return self._reading(lambda: self._statement("artifact", key)) is not None

    def get(
        self,
        kind: EntryKind,
        key: str,
        type_: type[T],
        folder: Path | None,
        fits: Callable[[Any], bool],
    ) -> T | None:
        """The record of an entry, whose files are then in ``folder``, which is created; None for a miss."""
        if kind == "artifacts" and folder is not None:
            return cast("T | None", self.fetch(key, folder, fits))
        if kind != "facts":
            return None
        return self._reading(lambda: read_record(self._statement("facts", key).text, type_))

    def put(self, kind: EntryKind, key: str, record: object, folder: Path | None) -> None:
        """Send an entry, if the build may write and the cache lacks it."""
        if kind == "artifacts" and folder is not None and isinstance(record, Record):
            self.send(key, folder, record)
        elif kind == "facts":
            self.share("facts", key, to_json(record, indent=None))

    def ref(self, name: str) -> str | None:
        """The key that ``name`` stands for."""
        key = self.read("latest", name)
        return key if key is not None and is_sha256(key) else None

    def set_ref(self, name: str, key: str) -> None:
        """Let ``name`` stand for ``key``, if the build may write."""
        self.share("latest", name, key)

    def fetch(self, key: str, folder: Path, fits: Callable[[Record], bool]) -> Record | None:
        """Download the artifact of that key into ``folder``, which is created.

        None, and no folder, if there is no artifact, if the cache cannot be read, if anything differs from
        what was signed, or if the record does not fit.
        """
        record = self._reading(lambda: self._fetch(key, folder, fits))
        if record is None:
            shutil.rmtree(folder, ignore_errors=True)
        return record

    def send(self, key: str, folder: Path, record: Record) -> None:
        """Upload the artifact in ``folder``, if the build may write and the cache lacks any part of it."""
        self._writing(lambda: self._send(key, folder, record))

    def read(self, kind: Kind, name: str) -> str | None:
        """The text of a statement, if there is one."""
        return self._reading(lambda: self._statement(kind, name).text)

    def write(self, kind: Kind, name: str, text: str) -> None:
        """Sign and send ``text``, if the build may write."""
        self._writing(lambda: self._state(Statement(kind, name, text=text)))

    def share(self, kind: Kind, name: str, text: str) -> None:
        """Sign and send ``text`` if the build may write and the cache has another text, or none."""
        if self.can_write and self.read(kind, name) != text:
            self.write(kind, name, text)

    def stop(self) -> None:
        """End all requests of an interrupted build, and start no more."""
        self._readable = self.can_write = False
        self.transport.stop()

    def _reading(self, operation: Callable[[], T]) -> T | None:
        if not self._readable:
            return None
        try:
            return operation()
        except DamagedError as error:
            self._report(f"has something damaged or forged, which is not used: {error}")
        except (TransportError, ImportError) as error:
            failed = self.transport.classified(error)
            if failed.failure is Failure.DENIED:
                self._report(f"{failed.failure.value} ({failed})", "read")
            elif failed.failure is not Failure.MISSING:
                self._switch_off(failed)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            self._report(f"is not used for what cannot be stored here ({reason})")
        return None

    def _writing(self, operation: Callable[[], None]) -> None:
        if not self.can_write:
            return
        try:
            self._check_key()
            operation()
        except (TransportError, ImportError) as error:
            failed = self.transport.classified(error)
            self.can_write = False
            if failed.failure in (Failure.NO_BACKEND, Failure.TOO_SLOW):
                self._switch_off(failed)
            elif failed.failure is not Failure.STOPPED and self._readable:
                self._report(
                    f"cannot be written ({failed}); this build does not write to it", "write"
                )
        except OSError:
            # Another process cleaned the user's cache at this moment.
            return

    def _check_key(self) -> None:
        """Raise TransportError if nobody would use what the build signs."""
        if self._key and self._trust is not None and public_key(self._key) not in self._trust:
            reason = f"{PREFIX}CACHE_KEY belongs to none of build.cache-keys"
            raise TransportError(Failure.FAILED, reason)

    def _switch_off(self, error: TransportError) -> None:
        self._readable = self.can_write = False
        if error.failure is not Failure.STOPPED:
            problem = f"{error.failure.value} ({error})"
            self.trouble = f"The shared cache {self.transport.url} {problem}."
            self._report(f"{problem}; this build goes on without it", "read")

    def _report(self, message: str, topic: str | None = None) -> None:
        """Warn, once about each topic."""
        topic = message if topic is None else topic
        with self._lock:
            is_new = topic not in self._reported
            self._reported.add(topic)
        if is_new:
            self._warn(f"the shared cache {self.transport.url} {message}")

    def _fetch(self, key: str, folder: Path, fits: Callable[[Record], bool]) -> Record:
        archive = self._statement("artifact", key).blob
        with temp_dir() as made:
            self.transport.fetch_blob(archive, made / "archive")
            damage = "belongs to another job"
            try:
                record = unpack(made / "archive", folder)
                if fits(record):
                    return record
            except DamagedError as error:
                damage = f"is damaged: {error}"
        self.transport.distrust(archive)
        raise DamagedError(f"the artifact {key[:12]} {damage}")

    def _send(self, key: str, folder: Path, record: Record) -> None:
        try:
            # A store that removes old files may remove an archive before its statement.
            if self.transport.has_blob(self._statement("artifact", key).blob):
                return
        except DamagedError:
            pass
        except TransportError as error:
            if not error.may_be_missing:
                raise
        with temp_dir() as made:
            archive = pack(folder, record, made / "archive")
            self.transport.send_blob(made / "archive", archive)
        self._state(Statement("artifact", key, archive, versions=record.versions))

    def _statement(self, kind: Kind, name: str) -> Statement:
        with temp_dir() as made:
            self.transport.fetch(f"{kind}/{name}.json", made / "statement", _MAX_DOCUMENT)
            return read((made / "statement").read_bytes(), kind, name, self._trust)

    def _state(self, statement: Statement) -> None:
        versions = {"hatch-epcontext": hatch_epcontext.__version__, **statement.versions}
        content = signed(replace(statement, versions=versions), self._key)
        if len(content) > _MAX_DOCUMENT:
            size = show_size(len(content))
            self._report(f"gets no statement of {size}, which is too large")
            return
        with temp_dir() as made:
            (made / "statement").write_bytes(content)
            self.transport.send(made / "statement", f"{statement.kind}/{statement.name}.json")
