"""The cache that teams and CI share: a bucket, a server or a folder, which only the owners of keys can forge.

Below its URL: ``<LAYOUT>/<kind>/<key>`` with the signed record of an entry (see `signing`), and
``<LAYOUT>/blobs/<sha256>`` with the files of entries, and those that machines of a cluster send each other.
Files are sent before the record that names them. A reader verifies the signature, kind and key of a record;
then it downloads no more bytes than that names, and compares their hash.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hatch_epcontext.cache.signing import public_key, sign, verify
from hatch_epcontext.cache.store import DamagedError, Store, files_of, read_record
from hatch_epcontext.config.environ import CREDENTIALS, PREFIX
from hatch_epcontext.config.location import LAYOUT, REQUIREMENTS
from hatch_epcontext.config.settings import BuildSettings
from hatch_epcontext.files import FileRecord, is_regular, patiently, record_file, remove, temp_dir
from hatch_epcontext.serialize import to_json, value_sha256
from hatch_epcontext.system import pip_install
from hatch_epcontext.text import hide_credentials, hide_values, show_size

T = TypeVar("T")

_TIMEOUT = 20.0
"""Seconds that a request waits for an answer, or for more bytes."""

_SLOWEST = 10_000
"""Bytes a second from which a transfer counts as progress: a byte from time to time does not."""

_MAX_STATEMENT = 64 << 20

_PRESENT_SECONDS = 24 * 3600
"""For how long an entry is taken to be where it was sent: later the store may have removed it."""

_PART = 5 << 20
"""Bytes that are sent at once: the minimum of Amazon S3."""

_UPLOAD: dict[str, dict[str, Any]] = {
    "s3": {"chunksize": _PART, "max_concurrency": 2},
    "gs": {"chunksize": _PART},
    "az": {"overwrite": True, "max_concurrency": 2},
}

_FILES = f"{LAYOUT}/blobs"

_LOGGERS = ("aiobotocore", "asyncio", "azure", "botocore", "fsspec", "gcsfs", "google", "s3fs")


def in_thread(function: Callable[[], T]) -> futures.Future[T]:
    """The result of ``function``, which may never end: its thread keeps no process alive."""
    result: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


class TransportError(Exception):
    """A request that failed; the text is the reason."""


class AbsentError(TransportError):
    """There is no such file."""


class Transport:
    """The files at ``url``, a valid URL of `check_cache_url`, for all threads of one build.

    ``timeout``: seconds that a request waits for an answer, or for more bytes. ``stopped``: why all requests
    end and no more is made: the first one without an answer in time is also the last one. Methods raise
    TransportError.
    """

    def __init__(self, url: str, timeout: float = _TIMEOUT) -> None:
        self.url = url.rstrip("/")
        self.stopped = ""
        self._scheme = url.partition("://")[0]
        self.timeout = timeout
        # Whether the file with a hash is there and intact, if known.
        self._intact: dict[str, bool] = {}

    def has_file(self, file: FileRecord) -> bool:
        """Whether a file of that size has the name of this hash, and is not known to be damaged."""
        if file.sha256 not in self._intact:
            name, size = f"{_FILES}/{file.sha256}", -1
            with contextlib.suppress(AbsentError):
                size = self._ask(name, lambda fs, path, _: fs.info(path).get("size"))
            # Servers need not report it.
            self._intact[file.sha256] = size in (None, file.size)
        return self._intact[file.sha256]

    def send_file(self, path: Path) -> FileRecord:
        """Upload the file ``path`` under its sha256, unless it is there; returns its size and sha256.

        The file must not change in the meantime: send a copy of what somebody else may write.
        """
        file = record_file(path)
        if not self.has_file(file):
            self.send(path, f"{_FILES}/{file.sha256}")
            self._intact[file.sha256] = True
        return file

    def fetch_files(self, files: Mapping[str, FileRecord], folder: Path) -> None:
        """Download files that `send_file` sent, and no more bytes, to their paths in ``folder``; none exists.

        Raises OSError, and DamagedError if one is missing or has other content: then it is sent again.
        """
        for name, file in files.items():
            path, is_intact = folder / name, False
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(AbsentError):
                self.fetch(f"{_FILES}/{file.sha256}", path, file.size)
                is_intact = record_file(path) == file
            self._intact[file.sha256] = is_intact
            if not is_intact:
                raise DamagedError(
                    f"{self.url}/{_FILES}/{file.sha256} is missing or has other content"
                )

    def send(self, source: Path, name: str) -> None:
        """Upload the file ``source`` as ``name``."""
        options = _UPLOAD.get(self._scheme, {})
        if self._scheme in ("http", "https"):
            # Many servers reject a body of unknown length.
            options = {"method": "put", "headers": {"Content-Length": str(source.stat().st_size)}}
        file = str(source)
        self._ask(name, lambda fs, path, back: fs.put_file(file, path, callback=back, **options))

    def fetch(self, name: str, target: Path, limit: int) -> None:
        """Download the file ``name`` to ``target``, which must not exist.

        Raises OSError, and DamagedError for more than ``limit`` bytes.
        """
        target.touch(exist_ok=False)
        # Parts at the same time would not be counted as they arrive.
        options, file = {"max_concurrency": 1} if self._scheme == "s3" else {}, str(target)
        self._ask(
            name, lambda fs, path, back: fs.get_file(path, file, callback=back, **options), limit
        )

    def _ask(self, name: str, request: Callable[[Any, str, Any], T], limit: float = math.inf) -> T:
        """The result of ``request``, which gets the file system, the path of ``name`` and a callback.

        It runs in a thread of its own, because backends may wait much longer than a build does. Raises
        DamagedError for more than ``limit`` bytes.
        """
        if self.stopped:
            raise TransportError(self.stopped)
        # A busy machine may import a new backend for as long as a server may take: that does not count.
        size, size_before, since = 0, 0, math.inf

        def count(_: int, value: int, **__: object) -> None:
            nonlocal size
            size = value
            if size > limit:
                raise DamagedError(f"{name} has more than {show_size(limit)}")

        def run() -> T:
            nonlocal since
            from fsspec import get_filesystem_class
            from fsspec.callbacks import Callback

            get_filesystem_class(self._scheme)
            since = time.monotonic()
            fs, root = self._opened
            return request(fs, f"{root}/{name}", Callback(hooks={"count": count}))

        answer = in_thread(run)
        # Twice a second, because an interrupted build stops it.
        while not futures.wait([answer], min(self.timeout, 0.5)).done:
            if size - size_before >= _SLOWEST * self.timeout:
                size_before, since = size, time.monotonic()
            elif not self.stopped and time.monotonic() - since >= self.timeout:
                self.stopped = f"{self.timeout:g} s without an answer"
            if self.stopped:
                raise TransportError(self.stopped)
        try:
            return answer.result()
        except DamagedError:
            raise
        except Exception as error:
            raise self._classify(error) from error

    @functools.cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system, and the path of its root."""
        from fsspec.core import url_to_fs

        # Some log whole tracebacks with the contents of requests, unless logging is configured.
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
        fs, root = url_to_fs(self.url, **options)
        return _Folder() if self._scheme == "file" else fs, root.rstrip("/")

    def _classify(self, error: Exception) -> TransportError:
        if isinstance(error, ImportError):
            package = pip_install([REQUIREMENTS[self._scheme]])
            return TransportError(f"a package is missing, run: {package}")
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        secrets = (os.environ[name] for name in CREDENTIALS if name in os.environ)
        reason = hide_values(hide_credentials(line), secrets)[:200]
        # Amazon's code; a missing bucket is not a missing file.
        response = getattr(error.__cause__, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        is_missing = isinstance(error, FileNotFoundError) and code != "NoSuchBucket"
        return (AbsentError if is_missing else TransportError)(reason)


class _Folder:
    """A folder, with the methods of fsspec that are used here. A file becomes visible when it is complete."""

    def info(self, path: str) -> dict[str, int]:
        # Nothing else is a file here: a pipe, for example, would block.
        if not is_regular(Path(path)):
            raise FileNotFoundError(path)
        return {"size": Path(path).stat().st_size}

    def get_file(self, path: str, target: str, callback: Any) -> None:
        self.info(path)
        with Path(path).open("rb") as source, Path(target).open("wb") as copy:
            while chunk := source.read(_PART):
                copy.write(chunk)
                callback.relative_update(len(chunk))

    def put_file(self, source: str, path: str, callback: Any) -> None:
        temporary = Path(f"{path}.{os.urandom(8).hex()}.tmp")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.get_file(source, str(temporary), callback)
            patiently(lambda: temporary.replace(path))
        finally:
            remove(temporary)


class SharedCache:
    """The entries at ``settings.shared_cache``, for all threads of one build.

    A fault of it never fails a build: ``warn`` gets a line for each, once.
    ``sent``: the store of this machine, which knows for a day what is there, so that it costs no request.
    """

    def __init__(self, settings: BuildSettings, warn: Callable[[str], None]) -> None:
        assert settings.shared_cache is not None, "there is one"
        self.transport = Transport(settings.shared_cache)
        self.sent: Store | None = None
        self._can_write = settings.shared_cache_write
        self._warn, self._trust, self._key = warn, settings.trust, settings.shared_cache_key
        self._reported: dict[str, str] = {}
        # The records of entries that are there, as far as the build has asked; None for the others.
        self._known: dict[tuple[str, str], object] = {}

    def stop(self) -> None:
        """End all requests of an interrupted build, and start no more."""
        self._warn = lambda line: None
        self.transport.stopped = "the build was interrupted"

    def get(self, kind: str, key: str, type_: type[T], folder: Path | None = None) -> T | None:
        """The record of an entry; its files are then in ``folder``, which is created, if there is one.

        None, and no folder, if there is no entry, if it cannot be read, or if it is not what was signed.
        """
        with self._reported_faults():
            record = self._record(kind, key, type_)
            if folder is not None:
                self.transport.fetch_files(files_of(record), folder)
            self._known[kind, key] = record
            return record
        self._known.setdefault((kind, key), None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return None

    def put(self, kind: str, key: str, record: Any, folder: Path | None = None) -> None:
        """Send an entry with its files in ``folder``, if the build may write; a whole artifact stays."""
        record = record.to_share() if kind == "searches" else record
        files, text = files_of(record), to_json(record, indent=None)
        if not self._can_write or (files and folder is None):
            return
        mark = value_sha256([self.transport.url, kind, key, text])
        with contextlib.suppress(OSError, DamagedError):
            sent_at = self.sent.get("sent", mark, float) if self.sent else None
            if sent_at is not None and time.time() - sent_at < _PRESENT_SECONDS:
                return
        with self._reported_faults(writes=True):
            if self._trust and (self._key is None or public_key(self._key) not in self._trust):
                raise TransportError(
                    f"{PREFIX}SHARED_CACHE_KEY has no key of build.shared-cache-keys"
                )
            other = self._other(kind, key, type(record))
            if kind == "searches" and other is not None:
                record = record.joined(other)
            if other is None or (other != record and kind != "artifacts"):
                for file in [folder / name for name in files] if folder else ():
                    self.transport.send_file(file)
                with temp_dir() as scratch:
                    statement = sign(kind, key, to_json(record, indent=None), self._key)
                    (scratch / "statement").write_bytes(statement)
                    self.transport.send(scratch / "statement", f"{LAYOUT}/{kind}/{key}")
                self._known[kind, key] = record
            if self.sent:
                self.sent.put("sent", mark, time.time())

    def _record(self, kind: str, key: str, type_: type[T]) -> T:
        with temp_dir() as scratch:
            file = scratch / "statement"
            self.transport.fetch(f"{LAYOUT}/{kind}/{key}", file, _MAX_STATEMENT)
            return read_record(verify(file.read_bytes(), kind, key, self._trust), type_)

    def _other(self, kind: str, key: str, type_: type[object]) -> object:
        """The record of an entry that is there with its files; None if there is none."""
        # To some others may add at any time.
        if (kind, key) in self._known and kind != "searches":
            return self._known[kind, key]
        with contextlib.suppress(AbsentError, DamagedError):
            other = self._record(kind, key, type_)
            # A store that removes old files may remove some before the statement.
            if all(map(self.transport.has_file, files_of(other).values())):
                return other
        return None

    @contextlib.contextmanager
    def _reported_faults(self, *, writes: bool = False) -> Iterator[None]:
        """Warn, once about each fault, and go on."""
        try:
            yield
        except DamagedError as error:
            self._report(f"has something damaged or forged, which is not used: {error}")
        except (TransportError, ImportError) as error:
            if writes and not self.transport.stopped:
                self._can_write = False
                self._report(f"cannot be written ({error}); this build only reads it", "write")
            elif not isinstance(error, AbsentError):
                self.transport.stopped = self.transport.stopped or str(error)
                self._report(f"cannot be used ({error}); this build goes on without it", "use")
        except OSError as error:
            self._report(f"is not used for what cannot be stored here ({error.strerror or error})")

    def _report(self, message: str, topic: str = "") -> None:
        # Several threads may fail at the same time.
        if self._reported.setdefault(topic or message, message) is message:
            self._warn(f"the shared cache {self.transport.url} {message}")
