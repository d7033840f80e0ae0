"""A second level behind the user's cache, which teams and CI share: a bucket, a server or a folder.

Below its URL: ``v4/blobs/<first two digits>/<sha256>`` with the files of artifacts,
``v4/entries/<first two digits>/<fingerprint>.json`` with the record of each artifact, and other documents
that a build also has in the user's cache. A remote renames no folders, so everything is named after its
content or written last: an entry is sent after its files. What comes from a remote was written elsewhere,
and is checked when it arrives.

Nothing that a remote does fails a build: a build warns once, and goes on without it.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import netrc
import os
import re
import shutil
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hatch_epcontext.config.cache_url import REQUIREMENTS, SIGNATURES
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.files import FileRecord, record_file
from hatch_epcontext.jobs.artifact import Record
from hatch_epcontext.jobs.cache.entry import LAYOUT, Check, entry_name, read_record
from hatch_epcontext.jobs.cache.envelope import (
    DamagedError,
    Envelope,
    envelope_around,
    read_envelope,
)
from hatch_epcontext.jobs.requirements import pip_install
from hatch_epcontext.serialize import to_json
from hatch_epcontext.text import hide_credentials, show_size

T = TypeVar("T")

_CHUNK = 4 << 20
"""Bytes of a file that are in memory at once; each is one request to a bucket."""

_MAX_DOCUMENT = _CHUNK
"""Bytes of a document: one request for each."""

_PART = 5 << 20
"""Bytes of a file that are sent at once: the least that Amazon takes."""

_SLOWEST = 10_000
"""Bytes a second from which a transfer counts as progress: a byte from time to time is as good as none."""

_CONNECT_SECONDS = 5
_READ_SECONDS = 30


class _Failure(Enum):
    MISSING = "missing"
    DENIED = "denied"
    NO_BACKEND = "no backend"
    FAILED = "failed"
    TOO_SLOW = "too slow"
    STOPPED = "stopped"


_MAY_BE_MISSING = (_Failure.MISSING, _Failure.DENIED)
"""A bucket that cannot be listed does not say what is missing."""


class _RemoteError(Exception):
    """A request that failed, with the reason for a message."""

    def __init__(self, failure: _Failure, reason: str) -> None:
        super().__init__(reason)
        self.failure = failure


_TROUBLE = {
    _Failure.NO_BACKEND: "needs a package",
    _Failure.TOO_SLOW: "kept the build waiting for too long",
}

_POLL_SECONDS = 0.5
"""Seconds between two looks at whether a request that does not answer must be given up."""


def _interrupted() -> _RemoteError:
    return _RemoteError(_Failure.STOPPED, "the build was interrupted")


class _UntrustedError(Exception):
    """A document that none of the trusted keys signed; the text is the reason."""


@dataclass(frozen=True)
class _Backend:
    """How requests of one kind of URL are made.

    ``options`` are for opening that URL, ``download`` for getting a file, and ``upload`` for sending one of
    so many bytes. With ``streams`` a document is read in one request, because servers need not know ranges;
    with ``local`` the files are in a folder.
    """

    options: Callable[[str], Mapping[str, Any]] = lambda _: {}
    download: Mapping[str, Any] = field(default_factory=dict)
    upload: Callable[[int], Mapping[str, Any]] = lambda _: {}
    streams: bool = False
    local: bool = False


def _s3_options(_: str) -> Mapping[str, Any]:
    timeouts = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS}
    # The file system repeats requests itself.
    return {"config_kwargs": {**timeouts, "retries": {"max_attempts": 1}}}


def _http_options(url: str) -> Mapping[str, Any]:
    import aiohttp

    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS
    )
    parts = urlsplit(url)
    host = parts.hostname or ""
    # Not aiohttp's own lookup, which sends the default entry of .netrc to whatever host it is redirected to.
    # From a request to another host it removes this header.
    headers = _netrc_headers(host)
    proxy = (
        None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(parts.scheme)
    )
    return {"client_kwargs": {"timeout": timeout, "headers": headers}, "proxy": proxy}


def _netrc_headers(host: str) -> Mapping[str, str]:
    """The header with the user and the password that .netrc has for ``host``."""
    file = os.environ.get("NETRC") or Path("~", "_netrc" if sys.platform == "win32" else ".netrc")
    try:
        found = netrc.netrc(Path(file).expanduser()).authenticators(host)
    except (OSError, RuntimeError, UnicodeError, netrc.NetrcParseError):
        return {}
    if found is None:
        return {}
    credentials = base64.b64encode(f"{found[0]}:{found[2]}".encode()).decode()
    return {"Authorization": f"Basic {credentials}"}


def _http_upload(size: int) -> Mapping[str, Any]:
    # Many servers refuse a body of unknown length.
    return {"method": "put", "headers": {"Content-Length": str(size)}}


_S3 = _Backend(
    _s3_options,
    # In one request, whose bytes are counted as they come.
    {"max_concurrency": 1},
    lambda _: {"chunksize": _PART, "max_concurrency": 2},
)
_GCS = _Backend(upload=lambda _: {"chunksize": _PART})
_AZURE = _Backend(
    lambda _: {"connection_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS},
    upload=lambda _: {"overwrite": True, "max_concurrency": 2},
)
_HTTP = _Backend(_http_options, upload=_http_upload, streams=True)
_FILE = _Backend(lambda _: {"auto_mkdir": True}, local=True)

_BACKENDS: Mapping[str, _Backend] = {
    "s3": _S3,
    "gs": _GCS,
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "http": _HTTP,
    "https": _HTTP,
    "file": _FILE,
}


_LOGGERS = ("aiobotocore", "asyncio", "azure", "botocore", "fsspec", "gcsfs", "google", "s3fs")
"""What the backends log to; nobody sees it in a build that configures no logging."""


@dataclass
class _State:
    """What a build has learned about its remote.

    ``fits``: whether the build's own key is one that others trust. ``damaged``: fingerprints and hashes that
    have to be sent again. ``waiting``: the requests that the build waits for.
    """

    readable: bool = True
    writable: bool = True
    stopped: bool = False
    fits: bool = False
    reported: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    waiting: set[futures.Future[Any]] = field(default_factory=set)


class _Stopwatch:
    """How long a build has waited for its remote in all, without the time in which bytes arrived.

    Several requests may wait at once: what counts is that one waits, and that nothing arrives for any.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._waiting = 0
        self._waited = self._since = 0.0

    def begin(self) -> None:
        """A request begins."""
        with self._lock:
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting += 1

    def end(self) -> None:
        """A request has ended."""
        with self._lock:
            self._count(0)
            self._waiting -= 1

    def arrived(self, size: int) -> None:
        """So many bytes have arrived, or were sent."""
        with self._lock:
            self._count(size)

    @property
    def left(self) -> float:
        """Seconds that the build still waits; at most 0 when it waits no longer."""
        with self._lock:
            return self.limit - self._waited - (time.monotonic() - self._since)

    def _count(self, size: int) -> None:
        now = time.monotonic()
        self._waited += max(now - self._since - size / _SLOWEST, 0)
        self._since = now


class Remote:
    """The cache at ``url``, a valid URL of `check_cache_url`, for all threads of one build.

    ``warn`` gets a line when the remote cannot be used, and one for each damaged artifact. Without
    ``can_write`` nothing is sent. ``trust``: the public keys of those whose documents are used; with None
    those of everybody. ``key``: the private key that signs what is sent. ``timeout``: seconds that the build
    waits for it without a byte, in all.
    """

    def __init__(
        self,
        url: str,
        warn: Callable[[str], None],
        *,
        can_write: bool = False,
        trust: tuple[str, ...] | None = None,
        key: str | None = None,
        timeout: float = 20,
    ) -> None:
        self._url = url.rstrip("/")
        self._scheme = url.partition("://")[0]
        self._backend = _BACKENDS[self._scheme]
        self._warn = warn
        self._trust = trust
        self._key = key
        self._stopwatch = _Stopwatch(timeout)
        self.trouble: str | None = None
        self._state = _State(writable=can_write)
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._opened: tuple[Any, str] | None = None

    @property
    def can_write(self) -> bool:
        """Whether the build may write to the remote, and could until now."""
        return self._state.writable

    def has(self, fingerprint: str, check: Check) -> bool:
        """Whether the remote has an artifact of that fingerprint; its files are not downloaded."""
        return self._reading(lambda: self._record(fingerprint, check), fingerprint) is not None

    def fetch(self, fingerprint: str, folder: Path, check: Check) -> Record | None:
        """Download the artifact of that fingerprint into ``folder``, which is made.

        None, and nothing is left in the folder's place, if the remote has none or cannot be read, if
        ``check`` refuses its record, or if anything in it is not as its record says.
        """
        record = self._reading(lambda: self._fetch(fingerprint, folder, check), fingerprint)
        if record is None:
            shutil.rmtree(folder, ignore_errors=True)
        return record

    def send(self, fingerprint: str, folder: Path, record: Record, check: Check) -> None:
        """Upload the artifact in ``folder``, if the remote may be written and has none that is complete.

        One in the remote that ``check`` refuses is replaced.
        """
        self._writing(lambda: self._send(fingerprint, folder, record, check))

    def read(self, name: str) -> str | None:
        """The text of the document ``name``, if there is one."""
        return self._reading(lambda: self._document(name))

    def write(self, name: str, text: str) -> None:
        """Write the document ``name``, if the remote may be written."""
        self._writing(lambda: self._upload_text(name, text))

    def share(self, name: str, text: str) -> None:
        """Write the document ``name`` if the remote has another one, or none, and may be written."""
        if self.can_write and self.read(name) != text:
            self.write(name, text)

    def stop(self) -> None:
        """End all requests of an interrupted build, and begin no others."""
        with self._lock:
            self._state.readable = self._state.writable = False
            self._state.stopped = True
            waiting = list(self._state.waiting)
        for outcome in waiting:
            with contextlib.suppress(futures.InvalidStateError):
                outcome.set_exception(_interrupted())

    def _reading(self, operation: Callable[[], T], fingerprint: str | None = None) -> T | None:
        if not self._state.readable:
            return None
        try:
            return operation()
        except DamagedError as error:
            self._report_damaged(fingerprint, error)
        except _UntrustedError as error:
            self._report("trust", f"has documents that are not trusted ({error})")
        except _RemoteError as error:
            if error.failure is _Failure.DENIED:
                self._report("read", f"does not allow reading ({error})")
            elif error.failure is not _Failure.MISSING:
                self._switch_off(error)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            self._report(
                "store", f"is not used for an artifact that cannot be stored here ({reason})"
            )
        return None

    def _writing(self, operation: Callable[[], None]) -> None:
        if not self._state.writable:
            return
        try:
            self._check_key()
            operation()
        except _RemoteError as error:
            self._state.writable = False
            if error.failure in (_Failure.NO_BACKEND, _Failure.TOO_SLOW):
                self._switch_off(error)
            elif error.failure is not _Failure.STOPPED and self._state.readable:
                self._report(
                    "write", f"cannot be written ({error}); this build does not write to it"
                )
        except OSError:
            # The user's cache was cleaned at this moment.
            return

    def _switch_off(self, error: _RemoteError) -> None:
        self._state.readable = self._state.writable = False
        if error.failure is not _Failure.STOPPED:
            verb = _TROUBLE.get(error.failure, "cannot be reached")
            self.trouble = f"The shared cache {self._url} {verb} ({error})."
            self._report("read", f"{verb} ({error}); this build goes on without it")

    def _report(self, topic: str, message: str) -> None:
        with self._lock:
            if topic in self._state.reported:
                return
            self._state.reported.add(topic)
        self._warn(f"the shared cache {self._url} {message}")

    def _report_damaged(self, fingerprint: str | None, error: DamagedError) -> None:
        if fingerprint is None:
            self._report("document", f"has damaged documents, which are not used ({error})")
        elif fingerprint not in self._state.damaged:
            self._state.damaged.add(fingerprint)
            what = f"the artifact {fingerprint[:12]}"
            self._warn(
                f"{what} in the shared cache {self._url} is damaged ({error}); it is not used"
            )

    def _fetch(self, fingerprint: str, folder: Path, check: Check) -> Record:
        record = self._record(fingerprint, check)
        for name, file in record.files.items():
            target = folder / PurePosixPath(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            self._download(name, file, target)
        return record

    def _record(self, fingerprint: str, check: Check) -> Record:
        record = read_record(self._document(entry_name(fingerprint)))
        check(record)
        return record

    def _download(self, name: str, file: FileRecord, target: Path) -> None:
        # Not an existing file, which another name on this file system can be the same as.
        target.touch(exist_ok=False)
        progress, options = self._progress(file.size), self._backend.download

        def get(files: Any, path: str) -> None:
            if self._backend.local:
                _copy(Path(path), target, progress)
            else:
                files.get_file(path, str(target), callback=progress, **options)

        try:
            self._ask(get, _blob(file.sha256))
        except _RemoteError as error:
            if error.failure is _Failure.MISSING:
                self._state.damaged.add(file.sha256)
                raise DamagedError(f"its file {name} is missing") from None
            raise
        except DamagedError:
            self._state.damaged.add(file.sha256)
            raise
        if record_file(target) != file:
            self._state.damaged.add(file.sha256)
            raise DamagedError(f"its file {name} has other content")

    def _progress(self, size: int) -> Any:
        """A callback of fsspec that counts the bytes of a file, and ends a transfer of more than ``size``."""
        from fsspec.callbacks import Callback

        stopwatch = self._stopwatch

        class Progress(Callback):  # type: ignore[misc]
            def relative_update(self, inc: int = 1) -> None:
                stopwatch.arrived(inc)
                self.value += inc
                if self.value > size:
                    raise DamagedError("it is larger than its record says")

        return Progress()

    def _document(self, name: str) -> str:
        """The text of a document, which is its own and as it was sent."""
        read = self._read_stream if self._backend.streams else _read
        data = self._ask(read, name)
        envelope = read_envelope(data, name)
        self._check_signature(envelope)
        return envelope.text

    def _read_stream(self, files: Any, path: str) -> bytes:
        """A document of a server that need not know ranges, and at most one byte more than it may have."""
        # With a size it does not ask for one first.
        with contextlib.closing(files.open(path, block_size=0, size=_MAX_DOCUMENT)) as stream:
            data = bytearray()
            while chunk := stream.read(_MAX_DOCUMENT + 1 - len(data)):
                self._stopwatch.arrived(len(chunk))
                data += chunk
            return bytes(data)

    def _check_signature(self, envelope: Envelope) -> None:
        """Raises _UntrustedError if the build trusts none of those who may have written the document."""
        if self._trust is None:
            return
        if envelope.signature is None:
            raise _UntrustedError("a document is not signed")
        if not self._signing().is_signed(envelope, self._trust):
            raise _UntrustedError("a document is not signed by any of build.cache-keys")

    def _check_key(self) -> None:
        """Raises _RemoteError if nobody would use what the build's own key signs."""
        if self._key is None or self._trust is None or self._state.fits:
            return
        if self._signing().public_key(self._key) not in self._trust:
            reason = f"{PREFIX}CACHE_KEY belongs to none of build.cache-keys"
            raise _RemoteError(_Failure.FAILED, reason)
        self._state.fits = True

    def _signing(self) -> ModuleType:
        """The module with the signatures, whose package a project without a shared cache does not need."""
        try:
            from hatch_epcontext.jobs.cache import signing
        except ImportError as error:
            raise self._classified(error) from None
        return signing

    def _send(self, fingerprint: str, folder: Path, record: Record, check: Check) -> None:
        sent = self._sent(fingerprint, check)
        # A store that removes files by age can remove one of an artifact that it keeps.
        if sent is not None and all(map(self._has_blob, sent.files.values())):
            return
        for name, file in record.files.items():
            if not self._has_blob(file):
                self._upload(folder / PurePosixPath(name), _blob(file.sha256), file.size)
                self._state.damaged.discard(file.sha256)
        if sent != record:
            self._upload_text(entry_name(fingerprint), to_json(record))
        self._state.damaged.discard(fingerprint)

    def _sent(self, fingerprint: str, check: Check) -> Record | None:
        """The record in the remote, which can name other files than another machine compiled."""
        try:
            return self._record(fingerprint, check)
        except (DamagedError, _UntrustedError):
            return None
        except _RemoteError as error:
            if error.failure in _MAY_BE_MISSING:
                return None
            raise

    def _has_blob(self, file: FileRecord) -> bool:
        """Whether ``file`` is there with its size, and not known to be damaged.

        No listing, which needs a right of its own. Servers need not know the size.
        """
        if file.sha256 in self._state.damaged:
            return False
        try:
            size = self._ask(_size_of, _blob(file.sha256))
        except _RemoteError as error:
            if error.failure in _MAY_BE_MISSING:
                return False
            raise
        return size is None or size == file.size

    def _upload(self, source: Path, name: str, size: int) -> None:
        options, progress = self._backend.upload(size), self._progress(size)

        def put(files: Any, path: str) -> None:
            if self._backend.local:
                files.makedirs(str(Path(path).parent), exist_ok=True)
                _copy(source, Path(path), progress)
            else:
                files.put_file(str(source), path, callback=progress, **options)

        self._put(name, put)

    def _upload_text(self, name: str, text: str) -> None:
        signature = self._signing().sign(name, text, self._key) if self._key else None
        content = envelope_around(name, text, signature).encode()
        if len(content) > _MAX_DOCUMENT:
            self._report("large", f"does not get a document of {show_size(len(content))}")
            return
        self._put(name, lambda files, path: files.pipe_file(path, content))

    def _put(self, name: str, put: Callable[[Any, str], object]) -> None:
        def request(files: Any, path: str) -> None:
            # Others see a file of a folder while it grows.
            if not self._backend.local:
                put(files, path)
                return
            temporary = f"{path}.{os.urandom(8).hex()}.tmp"
            try:
                put(files, temporary)
                Path(temporary).replace(path)
            finally:
                Path(temporary).unlink(missing_ok=True)

        self._ask(request, name)

    def _ask(self, request: Callable[[Any, str], T], name: str) -> T:
        """The result of ``request``, which gets the file system and the path of ``name``.

        It runs in a thread of its own, because backends can wait for much longer than the build does.
        Raises _RemoteError, and DamagedError if the request does.
        """
        outcome: futures.Future[T] = futures.Future()

        def run() -> None:
            try:
                files, root = self._files()
                result = request(files, f"{root}/{LAYOUT}/{name}")
            except BaseException as error:
                with contextlib.suppress(futures.InvalidStateError):
                    outcome.set_exception(error)
            else:
                with contextlib.suppress(futures.InvalidStateError):
                    outcome.set_result(result)

        with self._lock:
            if self._state.stopped:
                raise _interrupted()
            self._state.waiting.add(outcome)
        self._stopwatch.begin()
        threading.Thread(target=run, daemon=True, name="shared cache").start()
        try:
            return self._wait_for(outcome)
        except DamagedError:
            raise
        except Exception as error:
            raise self._classified(error) from None
        finally:
            self._stopwatch.end()
            with self._lock:
                self._state.waiting.discard(outcome)

    def _wait_for(self, outcome: futures.Future[T]) -> T:
        while (left := self._stopwatch.left) > 0:
            # Not all of it at once: bytes that arrive prolong it.
            futures.wait([outcome], min(left, _POLL_SECONDS))
            if outcome.done():
                return outcome.result()
        reason = f"{self._stopwatch.limit:g} s without a byte in all; see build.cache-timeout"
        raise _RemoteError(_Failure.TOO_SLOW, reason)

    def _files(self) -> tuple[Any, str]:
        """The file system, and the path of its root."""
        with self._opening:
            if self._opened is None:
                from fsspec.core import url_to_fs

                # Some log whole tracebacks, with all that is in a request.
                for logger in _LOGGERS:
                    logging.getLogger(logger).addHandler(logging.NullHandler())
                files, root = url_to_fs(
                    self._url,
                    skip_instance_cache=True,
                    use_listings_cache=False,
                    **self._backend.options(self._url),
                )
                self._opened = files, root.rstrip("/")
            return self._opened

    def _classified(self, error: Exception) -> _RemoteError:
        if isinstance(error, _RemoteError):
            return error
        if isinstance(error, ImportError):
            signed = self._trust is not None or self._key is not None
            command = pip_install([REQUIREMENTS[self._scheme], *([SIGNATURES] if signed else [])])
            return _RemoteError(_Failure.NO_BACKEND, f"run: {command}")
        # Amazon's code; a bucket that does not exist is no missing file.
        response = getattr(error.__cause__, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
            return _RemoteError(_Failure.MISSING, "it is missing")
        if isinstance(error, PermissionError) or _status(error) in (401, 403):
            return _RemoteError(_Failure.DENIED, _reason(error))
        return _RemoteError(_Failure.FAILED, _reason(error))


def _size_of(files: Any, path: str) -> int | None:
    size: int | None = files.info(path).get("size")
    return size


def _read(files: Any, path: str) -> bytes:
    # Without a limit some backends ask for the size first.
    data: bytes = files.cat_file(path, start=0, end=_MAX_DOCUMENT)
    return data


def _copy(source: Path, target: Path, progress: Any) -> None:
    """Copy a file in pieces, which ``progress`` counts."""
    with source.open("rb") as reading, target.open("wb") as writing:
        while chunk := reading.read(_CHUNK):
            writing.write(chunk)
            progress.relative_update(len(chunk))


def _blob(sha256: str) -> str:
    return f"blobs/{sha256[:2]}/{sha256}"


def _status(error: Exception) -> int | None:
    """The status of an HTTP answer, which each backend names differently."""
    for name in ("status", "status_code", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
    return None


def _reason(error: Exception) -> str:
    """The first line of an error, without anything that can be a secret."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    # aiohttp names its TLS setting for addresses without TLS too.
    refused = re.fullmatch(r"Cannot connect to host \S+ ssl:.*? \[(.+)\]", text)
    text = hide_credentials(refused[1] if refused else text)
    for name, value in os.environ.items():
        if len(value) >= 6 and re.search("KEY|SECRET|TOKEN|PASS|CREDENTIAL|SAS|CONNECTION", name):
            text = text.replace(value, "***")
    return text if len(text) <= 200 else f"{text[:197]}..."
