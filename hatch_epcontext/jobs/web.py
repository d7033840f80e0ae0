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
from pathlib import Path
from typing import IO, Any, TypeVar

import hatch_epcontext
from hatch_epcontext.config.location import HubFile, is_safe
from hatch_epcontext.jobs.cache.transport import netrc_headers

_CHUNK = 1 << 20

_TRIES = 5
"""How often a request is sent that a server does not answer, or does not finish."""

_TIMEOUT = 30.0
"""Seconds without a byte after which a request is sent again."""

_PAUSE = 0.5
"""Half of the seconds after the first failed attempt; after each further one it is twice as long."""

_LONGEST_WAIT = 60.0
"""The most seconds between two requests, also if a server asks for more."""

_MAX_DOCUMENT = 32 << 20

T = TypeVar("T")

Progress = Callable[[int, "int | None"], None]
"""Gets the bytes that have arrived, and their number in all if it is known."""


class WebError(Exception):
    """A request that failed. The text is the reason; ``status`` is that of the answer, if there is one.

    ``code``: the hub's own word for the error, such as ``GatedRepo``.
    """

    def __init__(self, reason: str, status: int | None = None, code: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.code = code


def hub_endpoint() -> str:
    """The address of the model hub."""
    return os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"


def hub_url(file: HubFile) -> str:
    """The URL of a file on the hub."""
    path = urllib.parse.quote(file.path)
    return f"{hub_endpoint()}/{file.repo}/resolve/{quoted(file.revision or 'main')}/{path}"


def quoted(revision: str) -> str:
    """A revision as a part of a URL: a branch can have slashes."""
    return urllib.parse.quote(revision, safe="")


def hub_cache() -> Path:
    """The folder in which the hub's own library keeps files."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given)
    return _hub_home() / "hub"


def hub_token() -> str | None:
    """The user's token for the hub, from the environment or the file of the hub's own library."""
    if token := os.environ.get("HF_TOKEN", "").strip():
        return token
    file = Path(os.environ.get("HF_TOKEN_PATH") or _hub_home() / "token")
    with contextlib.suppress(OSError, UnicodeError):
        return file.read_text(encoding="utf-8").strip() or None
    return None


def _hub_home() -> Path:
    if given := os.environ.get("HF_HOME"):
        return Path(given)
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path("huggingface")


def read(url: str) -> bytes:
    """The document at ``url``; raises WebError."""
    return _patiently(lambda: _document(url))


def download(url: str, part: Path, limit: int, progress: Progress) -> None:
    """Download ``url`` to ``part``: what is there already is continued, if the server can do that.

    Raises WebError, also for more than ``limit`` bytes, and OSError if the file cannot be written. What has
    arrived stays in ``part``.
    """
    _patiently(lambda: _download(url, part, limit, progress))


def _document(url: str) -> bytes:
    with _open(url) as reply:
        return _piece(reply, _MAX_DOCUMENT)


class _UnfinishedError(Exception):
    """An answer that ended too early."""


def _download(url: str, part: Path, limit: int, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    try:
        opened = _open(url, {"Range": f"bytes={have}-"} if have else {})
    except urllib.error.HTTPError as error:
        if not have or error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        # All of it is there already, or it is no part of the file.
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return
        part.unlink()
        raise _UnfinishedError("what had arrived is longer than the file") from None
    with opened as reply:
        continues = f"bytes {have}-" in reply.headers.get("Content-Range", "") and have > 0
        arrived = have if continues else 0
        length = reply.headers.get("Content-Length", "")
        total = arrived + int(length) if length.isdecimal() else None
        with part.open("ab" if continues else "wb") as file:
            while True:
                if max(arrived, total or 0) > limit:
                    raise WebError(f"it has more than {limit} bytes")
                progress(arrived, total)
                if not (chunk := _piece(reply, _CHUNK)):
                    break
                file.write(chunk)
                arrived += len(chunk)
    # The standard library does not report a body that ends too early.
    if total is not None and arrived < total:
        raise _UnfinishedError(f"it ended after {arrived} of {total} bytes")


def _piece(reply: IO[bytes], size: int) -> bytes:
    try:
        return reply.read(size)
    except (http.client.HTTPException, OSError) as error:
        raise _UnfinishedError(_reason(error)) from error


def _patiently(request: Callable[[], T]) -> T:
    """The result of ``request``, which is sent again if the network or the server fails for a moment."""
    for attempt in range(1, _TRIES + 1):
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
        if attempt == _TRIES:
            raise failure
        time.sleep(wait)
    raise AssertionError("the last attempt raises")


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
    # What else the server says may be a page.
    return WebError(f"HTTP {error.code} {error.reason}".strip(), error.code, code)


def _retry_after(text: str) -> float | None:
    if text.isdecimal():
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
        return urllib.request.build_opener(_Redirects).open(request, timeout=_TIMEOUT)
    except urllib.error.URLError:
        raise
    except OSError as error:
        # While it waits for the answer.
        raise _UnfinishedError(_reason(error)) from error


def _private_headers(url: str) -> Mapping[str, str]:
    """What identifies the user to the origin of ``url``."""
    parts = urllib.parse.urlsplit(url)
    if not is_safe(parts):
        return {}
    if _origin(url) == _origin(hub_endpoint()):
        token = hub_token()
        return {"Authorization": f"Bearer {token}"} if token else {}
    return netrc_headers(parts.hostname or "")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"https": 443, "http": 80}.get(parts.scheme)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        # Only a mirror that is not encrypted itself may name others.
        if not is_safe(new) and (is_safe(old) or new.scheme != "http"):
            place = f"{new.scheme}://{new.hostname or ''}"
            fp.close()
            raise WebError(f"it redirects to {place}, which is not encrypted")
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None and _origin(newurl) == _origin(req.full_url):
            for name, value in req.unredirected_hdrs.items():
                made.add_unredirected_header(name, value)
        return made
