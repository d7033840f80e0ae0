"""Files of web servers and of model hubs, with the standard library.

What identifies the user goes to the origin that it belongs to, encrypted or on this machine, and never to the
host of a redirect: a hub redirects to the servers with its large files.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hatch_epcontext
from hatch_epcontext.config.location import HubFile, is_local, is_safe
from hatch_epcontext.files import remove
from hatch_epcontext.jobs.cache.transport import netrc_headers
from hatch_epcontext.text import show_size

T = TypeVar("T")

HUB = "https://huggingface.co"
"""The model hub, unless ``HF_ENDPOINT`` names a mirror."""

_CHUNK = 1 << 20

_TRIES = 5
"""How often a request is sent that a server does not answer, or that brings no byte."""

_TIMEOUT = 30.0
"""Seconds without a byte after which a request is sent again."""

_PAUSE = 0.5
"""Half of the seconds after the first failed attempt; after each further one it is twice as long."""

_LONGEST_WAIT = 60.0
"""The most seconds between two requests, also if a server asks for more."""

_MAX_DOCUMENT = 32 << 20

_MAX_DIGITS = 18
"""The most digits of a length that a server sends."""

Progress = Callable[[int, "int | None"], None]
"""Gets the bytes that have arrived, and their number in all if it is known."""


class WebError(Exception):
    """A request that failed. The text is the reason; ``status`` is that of the answer, if there is one.

    ``code``: the hub's own word for the error, such as ``GatedRepo``. ``hint``: what to do, if that depends
    on neither.
    """

    def __init__(
        self, reason: str, status: int | None = None, code: str = "", hint: str = ""
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.code = code
        self.hint = hint

    def __str__(self) -> str:
        reason = super().__str__()
        return f"{reason} ({self.code})" if self.code else reason


def hub_endpoint() -> str:
    """The address of the model hub; raises WebError if ``HF_ENDPOINT`` is none, which it does not show."""
    given = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or HUB
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(given)
        if parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc:
            parts.port  # noqa: B018, raises for an invalid one
            return given
    raise WebError("HF_ENDPOINT is not the address of a hub", hint=f"Write it like {HUB}.")


def hub_url(file: HubFile) -> str:
    """The URL of a file on the hub."""
    path = urllib.parse.quote(file.path)
    return f"{hub_endpoint()}/{file.repo}/resolve/{quoted(file.revision or 'main')}/{path}"


def quoted(revision: str) -> str:
    """A revision as a part of a URL: a branch can have slashes."""
    return urllib.parse.quote(revision, safe="")


def hub_cached(file: HubFile) -> Path:
    """Where the hub's own library keeps a file."""
    folder = _path_in("HF_HUB_CACHE") or _hub_home() / "hub"
    repository = folder / f"models--{file.repo.replace('/', '--')}"
    return repository / "snapshots" / str(file.revision) / file.path


def hub_token() -> str | None:
    """The user's token for the hub, from the environment or the file of the hub's own library."""
    if token := os.environ.get("HF_TOKEN", "").strip():
        return token
    file = _path_in("HF_TOKEN_PATH") or _hub_home() / "token"
    with contextlib.suppress(OSError, UnicodeError):
        return file.read_text(encoding="utf-8").strip() or None
    return None


def _hub_home() -> Path:
    if given := _path_in("HF_HOME"):
        return given
    return (_path_in("XDG_CACHE_HOME") or _expanded("~/.cache")) / "huggingface"


def _path_in(variable: str) -> Path | None:
    given = os.environ.get(variable)
    return _expanded(given) if given else None


def _expanded(path: str) -> Path:
    # Without a home folder it stays as it is, and nothing is there.
    return Path(os.path.expanduser(path))  # noqa: PTH111, the other raises


def read(url: str) -> bytes:
    """The document at ``url``; raises WebError."""

    def document() -> bytes:
        with _open(url) as reply:
            data = bytearray()
            while chunk := _piece(reply):
                data += chunk
                if len(data) > _MAX_DOCUMENT:
                    raise WebError(f"the answer has more than {show_size(_MAX_DOCUMENT)}")
            _check_length(len(data), _length(reply))
            return bytes(data)

    return _patiently(document)


def download(url: str, part: Path, limit: int, progress: Progress, *, pinned: bool) -> None:
    """Download ``url`` to ``part``, and continue what is there, if the server can do that.

    ``pinned``: whether the hash of the file is known, so that a wrong continuation shows. Raises WebError,
    also for more than ``limit`` bytes, and OSError if the file cannot be written. What has arrived stays in
    ``part``.
    """
    transfer = _Transfer(url, part, limit, progress, pinned)
    _patiently(transfer.run, lambda: part.stat().st_size if part.exists() else 0)


class _UnfinishedError(Exception):
    """An answer that ended too early."""


@dataclass
class _Transfer:
    """A download. ``validator``: what its server said of the version of which a part has arrived."""

    url: str
    part: Path
    limit: int
    progress: Progress
    pinned: bool
    validator: str | None = None

    def run(self) -> None:
        """One attempt."""
        if not self.pinned and self.validator is None:
            remove(self.part)
        have = self.part.stat().st_size if self.part.exists() else 0
        headers = {"Range": f"bytes={have}-"} if have else {}
        if have and self.validator:
            headers["If-Range"] = self.validator
        try:
            opened = _open(self.url, headers)
        except urllib.error.HTTPError as error:
            if not have or error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            error.close()
            # All of it is there already, or it is no part of the file.
            if error.headers.get("Content-Range") == f"bytes */{have}":
                return
            self.part.unlink()
            raise _UnfinishedError("what had arrived is longer than the file") from None
        with opened as reply:
            self._receive(reply, have)

    def _receive(self, reply: Any, have: int) -> None:
        continues = f"bytes {have}-" in reply.headers.get("Content-Range", "") and have > 0
        arrived = have if continues else 0
        length = _length(reply)
        total = None if length is None else arrived + length
        etag = reply.headers.get("ETag", "")
        self.validator = etag if etag and not etag.startswith("W/") else None
        with self.part.open("ab" if continues else "wb") as file:
            while not (is_too_long := max(arrived, total or 0) > self.limit):
                self.progress(arrived, total)
                if not (chunk := _piece(reply)):
                    break
                file.write(chunk)
                arrived += len(chunk)
        if is_too_long:
            remove(self.part)
            hint = "Choose another file."
            raise WebError(f"it has more than {show_size(self.limit)}", hint=hint)
        _check_length(arrived, total)


def _length(reply: Any) -> int | None:
    text = reply.headers.get("Content-Length", "")
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


def _check_length(arrived: int, total: int | None) -> None:
    # The standard library does not report a body that ends too early.
    if total is not None and arrived < total:
        raise _UnfinishedError(f"it ended after {arrived} of {total} bytes")


def _piece(reply: Any) -> bytes:
    try:
        data: bytes = reply.read(_CHUNK)
    except (http.client.HTTPException, OSError) as error:
        raise _UnfinishedError(_reason(error)) from error
    return data


def _patiently(request: Callable[[], T], arrived: Callable[[], int] = lambda: 0) -> T:
    """The result of ``request``, which is sent again if the network or the server fails for a moment.

    Attempts that bring bytes, which ``arrived`` counts, do not count.
    """
    attempt, most = 0, arrived()
    while True:
        attempt += 1
        wait = _PAUSE * 2.0**attempt
        try:
            return request()
        except urllib.error.HTTPError as error:
            error.close()
            failure = _refusal(error)
            if error.code == http.HTTPStatus.TOO_MANY_REQUESTS:
                wait = min(
                    _retry_after(error.headers.get("Retry-After", "")) or wait, _LONGEST_WAIT
                )
            elif error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
                raise failure from None
        except (_UnfinishedError, http.client.HTTPException, urllib.error.URLError) as error:
            failure = WebError(_reason(error))
            if _is_final(error):
                raise failure from None
        if (now := arrived()) > most:
            attempt, most = 0, now
        if attempt == _TRIES:
            raise failure
        time.sleep(wait)


def _is_final(error: Exception) -> bool:
    import ssl

    return isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError)


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    if isinstance(reason, TimeoutError):
        return f"no answer within {_TIMEOUT:g} s"
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__


def _refusal(error: urllib.error.HTTPError) -> WebError:
    code = error.headers.get("X-Error-Code", "") if error.headers else ""
    # What else the server says may be a page, with any text.
    return WebError(f"HTTP {error.code}", error.code, code)


def _retry_after(text: str) -> float | None:
    if text.isdecimal() and len(text) <= _MAX_DIGITS:
        return float(text)
    with contextlib.suppress(TypeError, ValueError):
        return max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    return None


def _open(url: str, headers: Mapping[str, str] | None = None) -> Any:
    agent = f"hatch-epcontext/{hatch_epcontext.__version__}"
    # No compression: ranges and lengths are those of the file.
    given = {"User-Agent": agent, "Accept-Encoding": "identity", **(headers or {})}
    request = urllib.request.Request(url, headers=given)  # noqa: S310, locations have http or https
    for name, value in _private_headers(url).items():
        request.add_unredirected_header(name, value)
    try:
        opener = urllib.request.build_opener(_Redirects, _Proxies)
        return opener.open(request, timeout=_TIMEOUT)
    except urllib.error.URLError:
        raise
    except OSError as error:
        # While it waits for the answer.
        raise _UnfinishedError(_reason(error)) from error
    except ValueError:
        hint = "Check the location."
        raise WebError("it leads to an invalid address", hint=hint) from None


def _private_headers(url: str) -> Mapping[str, str]:
    """What identifies the user to the origin of ``url``."""
    parts = urllib.parse.urlsplit(url)
    if not is_safe(parts):
        return {}
    if not _has_origin_of_hub(url):
        return netrc_headers(parts.hostname or "")
    token = hub_token()
    if token and not (token.isascii() and token.isprintable()):
        hint = "Set HF_TOKEN again, or remove it."
        raise WebError("the token for the hub has characters that no token has", hint=hint)
    return {"Authorization": f"Bearer {token}"} if token else {}


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"https": 443, "http": 80}.get(parts.scheme)


def _has_origin_of_hub(url: str) -> bool:
    try:
        return _origin(url) == _origin(hub_endpoint())
    except WebError:
        # Other servers need no hub.
        return False


class _Proxies(urllib.request.ProxyHandler):
    def proxy_open(self, req: Any, proxy: str, type: str) -> Any:  # noqa: A002, the name of the base
        # What is for this machine must not leave it.
        if is_local(urllib.parse.urlsplit(req.full_url)):
            return None
        return super().proxy_open(req, proxy, type)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        except ValueError:
            # An invalid address, with which the base leaves the connection open.
            fp.close()
            raise

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        # Only a mirror that is not encrypted itself may name others.
        if not new.hostname or not (is_safe(new) or (new.scheme == "http" and not is_safe(old))):
            fp.close()
            place = f"{new.scheme}://{new.hostname or ''}"
            hint = "Check the location."
            raise WebError(f"it redirects to {place}, which is not encrypted", hint=hint)
        same = _origin(newurl) == _origin(req.full_url)
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None and same:
            for name, value in req.unredirected_hdrs.items():
                made.add_unredirected_header(name, value)
        return made
