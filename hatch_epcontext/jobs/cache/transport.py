"""Files at the URL of a shared cache: a bucket, a server or a folder, through the backends of fsspec.

Every request runs in a thread of its own, because backends may wait much longer than a build does.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import logging
import netrc
import os
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hatch_epcontext.config.shared_cache import REQUIREMENTS, SIGNATURES
from hatch_epcontext.files import FileRecord, is_regular, patiently, record_file, remove
from hatch_epcontext.jobs.cache import LAYOUT
from hatch_epcontext.jobs.cache.archive import DamagedError
from hatch_epcontext.jobs.requirements import pip_install
from hatch_epcontext.text import hide_credentials

T = TypeVar("T")

BLOBS = "blobs"
"""The folder with the files that are named by the sha256 of their content."""

_CHUNK = 4 << 20
"""Bytes of a file that are in memory at once; each is one request to a bucket."""

MAX_DOCUMENT = _CHUNK
"""Bytes of a document: one request for each."""

_PART = 5 << 20
"""Bytes of a file that are sent at once: the minimum of Amazon S3."""

_SLOWEST = 10_000
"""Bytes a second from which a transfer counts as progress: a byte from time to time does not."""

_CONNECT_SECONDS = 5
_READ_SECONDS = 30


class FailureReason(Enum):
    """Why a request failed."""

    MISSING = "missing"
    DENIED = "denied"
    NO_BACKEND = "no backend"
    FAILED = "failed"
    TOO_SLOW = "too slow"
    STOPPED = "stopped"


class TransportError(Exception):
    """A request that failed; the text is the reason."""

    def __init__(self, failure: FailureReason, reason: str) -> None:
        super().__init__(reason)
        self.failure = failure

    @property
    def may_be_missing(self) -> bool:
        """Whether the file may be missing: a bucket that cannot be listed reports no missing files."""
        return self.failure in (FailureReason.MISSING, FailureReason.DENIED)


_POLL_SECONDS = 0.5
"""Seconds after which a request without an answer is checked again for its timeout."""


@dataclass(frozen=True)
class _Backend:
    """How requests to one kind of URL are made.

    ``options`` are for opening that URL, ``download`` for getting a file, and ``upload`` for sending one of
    so many bytes. With ``streams`` a document is read in one request: servers need not support ranges.
    """

    options: Callable[[str], Mapping[str, Any]] = lambda _: {}
    download: Mapping[str, Any] = field(default_factory=dict)
    upload: Callable[[int], Mapping[str, Any]] = lambda _: {}
    streams: bool = False


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
    # Not aiohttp's own lookup, which sends the default entry of .netrc to any host that it is redirected to.
    # A redirect to another host drops this header.
    headers = netrc_headers(host)
    proxy = (
        None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(parts.scheme)
    )
    return {"client_kwargs": {"timeout": timeout, "headers": headers}, "proxy": proxy}


def netrc_headers(host: str) -> Mapping[str, str]:
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
    # In one request, whose bytes are counted as they arrive.
    {"max_concurrency": 1},
    lambda _: {"chunksize": _PART, "max_concurrency": 2},
)
_GCS = _Backend(upload=lambda _: {"chunksize": _PART})
_AZURE = _Backend(
    lambda _: {"connection_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS},
    upload=lambda _: {"overwrite": True, "max_concurrency": 2},
)
_HTTP = _Backend(_http_options, upload=_http_upload, streams=True)

_BACKENDS: Mapping[str, _Backend] = {
    "s3": _S3,
    "gs": _GCS,
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "http": _HTTP,
    "https": _HTTP,
    "file": _Backend(),
}


TIMEOUT = 20.0
"""Seconds that a build waits for a shared cache, before it goes on without it."""

_LOGGERS = ("aiobotocore", "asyncio", "azure", "botocore", "fsspec", "gcsfs", "google", "s3fs")
"""The backends' loggers; without configured logging a build shows nothing of them."""


class _Stopwatch:
    """How long a build has waited for its remote in all, without the time in which bytes arrived.

    Time counts while at least one request waits and no bytes arrive for any. Without ``in_all`` the count
    restarts when no request waits.
    """

    def __init__(self, limit: float, in_all: bool) -> None:
        self.limit = limit
        self._in_all = in_all
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
            if not self._waiting and not self._in_all:
                self._waited = 0.0

    def arrived(self, size: int) -> None:
        """So many bytes have arrived, or were sent."""
        with self._lock:
            self._count(size)

    @property
    def left(self) -> float:
        """Seconds that the build may still wait; 0 or less when it must stop waiting."""
        with self._lock:
            return self.limit - self._waited - (time.monotonic() - self._since)

    def _count(self, size: int) -> None:
        now = time.monotonic()
        self._waited += max(now - self._since - size / _SLOWEST, 0)
        self._since = now


class _FullError(OSError):
    """This machine has no room for what is downloaded."""


class Transport:
    """The files below ``folder`` at ``url``, a valid URL of `check_cache_url`, for all threads of one build.

    ``timeout``: seconds that the build waits without receiving a byte: in all, or without ``in_all`` each
    time. All methods raise TransportError. ``signs``: whether the build also needs the package for
    signatures, for the advice if a package is missing.
    """

    def __init__(
        self,
        url: str,
        timeout: float = TIMEOUT,
        *,
        in_all: bool = True,
        signs: bool = False,
        folder: str = LAYOUT,
    ) -> None:
        self.url = url.rstrip("/")
        self._folder = folder
        self._scheme = url.partition("://")[0]
        self._backend = _BACKENDS[self._scheme]
        self._signs = signs
        self._stopwatch = _Stopwatch(timeout, in_all)
        self._opening = threading.Lock()
        self._opened: tuple[Any, str] | None = None
        self._stopped = False
        # Whether a file is present and intact, if known.
        self._known: dict[FileRecord, bool] = {}

    def read(self, name: str) -> bytes:
        """The document ``name``, up to the size that one may have."""
        return self._ask(self._read_stream if self._backend.streams else _read, name)

    def write(self, name: str, data: bytes) -> None:
        """Write the document ``name``."""
        self._ask(lambda files, path: files.pipe_file(path, data), name)

    def has_blob(self, blob: FileRecord) -> bool:
        """Whether the file with this content is there with its size, and not known to be damaged.

        It lists nothing, which needs a permission of its own. Servers need not report the size.
        """
        if blob in self._known:
            return self._known[blob]
        try:
            size = self._ask(_size_of, _path(blob))
        except TransportError as error:
            if error.may_be_missing:
                return False
            raise
        if is_there := size is None or size == blob.size:
            self._known[blob] = True
        return is_there

    def send_blob(self, source: Path, blob: FileRecord) -> None:
        """Upload the file ``source`` under the name of its content, unless it is there."""
        if self.has_blob(blob):
            return
        options, progress = self._backend.upload(blob.size), self._progress(blob.size)

        def put(files: Any, path: str) -> None:
            files.put_file(str(source), path, callback=progress, **options)

        self._ask(put, _path(blob))
        self._known[blob] = True

    def fetch_blob(self, blob: FileRecord, target: Path) -> None:
        """Download the file with this content to ``target``, which must not exist.

        At most ``blob.size`` bytes are downloaded. Raises DamagedError if it is missing or has other content,
        and OSError if this machine has no room for it.
        """
        try:
            self._download(blob, target)
        except DamagedError as error:
            self.distrust(blob)
            error.blob = blob
            raise
        self._known[blob] = True

    def distrust(self, blob: FileRecord) -> None:
        """Send the file with this content again the next time, because a worker found it damaged."""
        self._known[blob] = False

    def stop(self) -> None:
        """End all requests of an interrupted build, and start no more."""
        self._stopped = True

    def fetch(
        self, name: str, target: Path, limit: int, arrived: Callable[[int], None] = lambda _: None
    ) -> None:
        """Download the file ``name`` to ``target``, which must not exist; ``arrived`` gets the bytes so far.

        Raises DamagedError for more than ``limit`` bytes, and OSError if this machine has no room for it.
        """
        target.touch(exist_ok=False)
        options = self._backend.download

        def get(files: Any, path: str) -> None:
            progress = self._progress(limit, arrived)
            try:
                files.get_file(path, str(target), callback=progress, **options)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise _FullError(error.errno, error.strerror, str(target)) from None
                raise

        self._ask(get, name)

    def _download(self, blob: FileRecord, target: Path) -> None:
        try:
            self.fetch(_path(blob), target, blob.size)
        except TransportError as error:
            if error.failure is FailureReason.MISSING:
                raise DamagedError(f"{self._place(blob)} is missing") from None
            raise
        if record_file(target) != blob:
            raise DamagedError(f"{self._place(blob)} has other content")

    def _place(self, blob: FileRecord) -> str:
        return f"{self.url}/{self._folder}/{_path(blob)}"

    def _progress(self, size: int, arrived: Callable[[int], None] = lambda _: None) -> Any:
        """A callback of fsspec that counts the bytes of a file, and ends a transfer of more than ``size``."""
        from fsspec.callbacks import Callback

        stopwatch = self._stopwatch

        class Progress(Callback):  # type: ignore[misc]
            def relative_update(self, inc: int = 1) -> None:
                stopwatch.arrived(inc)
                self.value += inc
                if self.value > size:
                    raise DamagedError("its file is larger than its record")
                arrived(self.value)

        return Progress()

    def _read_stream(self, files: Any, path: str) -> bytes:
        """A document of a server that need not support ranges."""
        # With a size, fsspec makes no request for it first.
        with contextlib.closing(files.open(path, block_size=0, size=MAX_DOCUMENT)) as stream:
            data = bytearray()
            while chunk := stream.read(MAX_DOCUMENT - len(data)):
                self._stopwatch.arrived(len(chunk))
                data += chunk
            return bytes(data)

    def _ask(self, request: Callable[[Any, str], T], name: str) -> T:
        """The result of ``request``, which gets the file system and the path of ``name``.

        Raises TransportError, and DamagedError if the request does.
        """
        outcome: futures.Future[T] = futures.Future()

        def run() -> None:
            try:
                files, root = self._files()
                place = "/".join(filter(None, (root, self._folder, name)))
                outcome.set_result(request(files, place))
            except BaseException as error:
                outcome.set_exception(error)

        self._stopwatch.begin()
        try:
            self._check()
            threading.Thread(target=run, daemon=True, name="shared cache").start()
            while not outcome.done():
                self._check()
                # In short waits: bytes that arrive extend the limit.
                futures.wait([outcome], min(self._stopwatch.left, _POLL_SECONDS))
            return outcome.result()
        except (DamagedError, _FullError):
            raise
        except Exception as error:
            raise self.classified(error) from None
        finally:
            self._stopwatch.end()

    def _check(self) -> None:
        """Raise TransportError if the build was interrupted or must stop waiting."""
        if self._stopped:
            raise TransportError(FailureReason.STOPPED, "the build was interrupted")
        if self._stopwatch.left <= 0:
            reason = f"{self._stopwatch.limit:g} s in all without receiving a byte"
            raise TransportError(FailureReason.TOO_SLOW, reason)

    def _files(self) -> tuple[Any, str]:
        """The file system, and the path of its root."""
        with self._opening:
            if self._opened is None:
                from fsspec.core import url_to_fs

                # Some log whole tracebacks, with the contents of requests.
                for logger in _LOGGERS:
                    logging.getLogger(logger).addHandler(logging.NullHandler())
                files, root = url_to_fs(
                    self.url,
                    skip_instance_cache=True,
                    use_listings_cache=False,
                    **self._backend.options(self.url),
                )
                files = _LocalFolder() if self._scheme == "file" else files
                self._opened = files, root.rstrip("/")
            return self._opened

    def classified(self, error: Exception) -> TransportError:
        """``error`` as the failure of a request."""
        if isinstance(error, TransportError):
            return error
        if isinstance(error, ImportError):
            command = pip_install(
                [REQUIREMENTS[self._scheme], *([SIGNATURES] if self._signs else [])]
            )
            return TransportError(FailureReason.NO_BACKEND, f"run: {command}")
        # Amazon's code; a missing bucket is not a missing file.
        response = getattr(error.__cause__, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
            return TransportError(FailureReason.MISSING, "it is missing")
        if isinstance(error, PermissionError) or _status(error) in (401, 403):
            return TransportError(FailureReason.DENIED, _reason(error))
        return TransportError(FailureReason.FAILED, _reason(error))


def _path(blob: FileRecord) -> str:
    return f"{BLOBS}/{blob.sha256}"


def _size_of(files: Any, path: str) -> int | None:
    size: int | None = files.info(path).get("size")
    return size


def _read(files: Any, path: str) -> bytes:
    # Without a limit some backends make a request for the size first.
    data: bytes = files.cat_file(path, start=0, end=MAX_DOCUMENT)
    return data


class _LocalFolder:
    """A folder, with the methods of fsspec that are used here. A file becomes visible when it is complete."""

    def info(self, path: str) -> Mapping[str, int]:
        return {"size": _regular(path).stat().st_size}

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        with _regular(path).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def pipe_file(self, path: str, data: bytes) -> None:
        with _replaced(Path(path)) as file:
            file.write_bytes(data)

    def get_file(self, path: str, target: str, callback: Any) -> None:
        _copy(_regular(path), Path(target), callback)

    def put_file(self, source: str, path: str, callback: Any) -> None:
        with _replaced(Path(path)) as file:
            _copy(Path(source), file, callback)


def _regular(path: str) -> Path:
    """A regular file; raises FileNotFoundError for anything else, such as a pipe, which would block."""
    if not is_regular(Path(path)):
        raise FileNotFoundError(path)
    return Path(path)


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A file to write, which replaces ``path`` at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(f"{path}.{os.urandom(8).hex()}.tmp")
    try:
        yield temporary
        patiently(lambda: temporary.replace(path))
    finally:
        remove(temporary)


def _copy(source: Path, target: Path, progress: Any) -> None:
    """Copy a file in pieces that ``progress`` counts."""
    with source.open("rb") as reading, target.open("wb") as writing:
        while chunk := reading.read(_CHUNK):
            writing.write(chunk)
            progress.relative_update(len(chunk))


def _status(error: Exception) -> int | None:
    """The status of an HTTP answer, which each backend names differently."""
    for name in ("status", "status_code", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
    return None


def _reason(error: Exception) -> str:
    """The first line of an error, without possible secrets."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    # aiohttp names its TLS setting for addresses without TLS too.
    refused = re.fullmatch(r"Cannot connect to host \S+ ssl:.*? \[(.+)\]", text)
    text = hide_credentials(refused[1] if refused else text)
    for name, value in os.environ.items():
        if len(value) >= 6 and re.search("KEY|SECRET|TOKEN|PASS|CREDENTIAL|SAS|CONNECTION", name):
            text = text.replace(value, "***")
    return text if len(text) <= 200 else f"{text[:197]}..."
