"""Files of web servers and of model hubs, with the standard library.

What identifies the user goes to the origin that it belongs to, encrypted or on this machine, and never to the
host of a redirect: a hub redirects to the servers with its large files.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import netrc
import os
import re
import string
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hatch_epcontext
from hatch_epcontext.config.location import HubFile, is_local, is_safe
from hatch_epcontext.errors import DownloadError
from hatch_epcontext.files import remove
from hatch_epcontext.text import show_size

HUB = "https://huggingface.co"
"""The model hub, unless ``HF_ENDPOINT`` names a mirror."""

_CHUNK = 1 << 20
_MAX_DOCUMENT = 32 << 20

_ATTEMPTS, _PAUSE = 3, 1.0
"""How often a file is asked for, and the seconds before the second time."""

_TIMEOUT = 30.0
"""Seconds without a byte after which an attempt ends."""

_CHECK = "Check the location."

_SLOWEST, _WINDOW = 1000, 60.0
"""The fewest bytes a second, over so many seconds: a byte from time to time is no progress."""

Progress = Callable[[int, "int | None"], None]
"""Gets the bytes that have arrived, and their number in all if it is known."""


class _TransientError(DownloadError):
    """An attempt that failed, after which another one may succeed."""

    def __init__(self, reason: str, *, restarts: bool = False) -> None:
        super().__init__(reason, "Try again. If the network needs a proxy, set https_proxy.")
        self.restarts = restarts


def hub_endpoint() -> str:
    """The address of the model hub; raises DownloadError if ``HF_ENDPOINT`` is none, and does not show it."""
    endpoint = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or HUB
    if not re.fullmatch(r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:\d+)?(/[\w./-]*)?", endpoint):
        raise DownloadError("HF_ENDPOINT is not the address of a hub.", f"Write it like {HUB}.")
    return endpoint


def hub_url(file: HubFile, *, api: bool = False) -> str:
    """The URL of a file on the hub, or with ``api`` that of the facts of its repository."""
    revision = urllib.parse.quote(file.revision or "main", safe="")
    if api:
        return f"{hub_endpoint()}/api/models/{file.repo}/revision/{revision}?blobs=true"
    return f"{hub_endpoint()}/{file.repo}/resolve/{revision}/{urllib.parse.quote(file.path)}"


def read(url: str) -> bytes:
    """The document at ``url``; raises DownloadError."""
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, "document")
        download(url, part, _MAX_DOCUMENT, lambda *_: None, pinned=False)
        return part.read_bytes()


def download(url: str, part: Path, limit: int, progress: Progress, *, pinned: bool) -> None:
    """Download ``url`` to ``part``, which is missing or a regular file.

    ``pinned``: whether the hash of the file is known. Only then it continues what is there, because a
    wrong continuation shows. Raises DownloadError, also for more than ``limit`` bytes, and OSError if the
    file cannot be written. What has arrived stays in ``part``.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        if not pinned:
            remove(part)
        try:
            with _open(url, _size(part)) as reply:
                _receive(reply, part, limit, progress)
                return
        except DownloadError as error:
            if isinstance(error, _TransientError) and error.restarts:
                remove(part)
            if attempt == _ATTEMPTS or not isinstance(error, _TransientError):
                kept = _size(part) if pinned else 0
                more = f" {show_size(kept)} are kept for the next attempt." if kept else ""
                message = f"{url} cannot be downloaded: {error}.{more}"
                raise DownloadError(message, error.hint) from error
        time.sleep(_PAUSE * 2 ** (attempt - 1))


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _start(reply: Any, have: int) -> int:
    """The first byte of the answer, of which ``have`` bytes have arrived before."""
    if reply.status == http.HTTPStatus.OK:
        return 0
    if not have or reply.status != http.HTTPStatus.PARTIAL_CONTENT:
        raise DownloadError(f"HTTP {reply.status}, and not the whole file", _CHECK)
    if not reply.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
        raise _TransientError("it continues at another byte", restarts=True)
    return have


def _receive(reply: Any, part: Path, limit: int, progress: Progress) -> None:
    arrived = before = _start(reply, _size(part))
    since = time.monotonic()
    total = None if reply.length is None else arrived + reply.length
    with part.open("ab" if arrived else "wb") as file:
        while max(arrived, total or 0) <= limit:
            progress(arrived, total)
            if arrived == total:
                return
            most = _CHUNK if total is None else min(_CHUNK, total - arrived)
            try:
                # Only what is there: a connection that is reset loses what a longer read waits for.
                piece = reply.read1(most)
            except (http.client.HTTPException, OSError) as error:
                raise _TransientError(_reason(error)) from error
            if not piece and total is None:
                return
            if not piece:
                raise _TransientError(f"it ended after {arrived} of {total} bytes")
            file.write(piece)
            arrived += len(piece)
            if (seconds := time.monotonic() - since) >= _WINDOW:
                if arrived - before < _SLOWEST * seconds:
                    raise DownloadError(
                        f"it sends fewer than {_SLOWEST} bytes a second", "Try again."
                    )
                before, since = arrived, since + seconds
    remove(part)
    raise DownloadError(f"it has more than {show_size(limit)}", "Choose another file.")


def _reason(error: Exception) -> str:
    cause = getattr(error, "reason", None) or error
    if isinstance(cause, TimeoutError):
        return f"no answer within {_TIMEOUT:g} s"
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> None:
        """Leave a redirect to `_open`, which knows what may be sent to another place."""

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _open(url: str, have: int) -> Any:
    """The answer of ``url`` from the byte ``have`` on, also after redirects; raises DownloadError."""
    # No compression: ranges and lengths are those of the file.
    agent = f"hatch-epcontext/{hatch_epcontext.__version__}"
    headers = {"User-Agent": agent, "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    place, private = url, _private_headers(url)
    for _ in range(10):
        try:
            parts = urllib.parse.urlsplit(place)
            own = private if _origin(place) == _origin(url) else {}
            # What is for this machine must not leave it through a proxy.
            proxies = [urllib.request.ProxyHandler({})] if is_local(parts) else []
            opener = urllib.request.build_opener(_NoRedirects, *proxies)
            request = urllib.request.Request(place, headers={**headers, **own})  # noqa: S310, checked
            return opener.open(request, timeout=_TIMEOUT)
        except urllib.error.HTTPError as error:
            error.close()
            location = error.headers.get("Location")
            if not location or error.code not in (301, 302, 303, 307, 308):
                raise _refusal(error, place) from None
            place = _redirected(place, location)
        except ValueError:
            raise DownloadError("it leads to an invalid address", _CHECK) from None
        except (http.client.HTTPException, OSError) as error:
            raise _TransientError(_reason(error)) from error
    raise DownloadError("it redirects too often", _CHECK)


def _refusal(error: urllib.error.HTTPError, place: str) -> DownloadError:
    # What else the server says may be a page, with any text.
    code = error.headers.get("X-Error-Code")
    reason = f"HTTP {error.code} ({code})" if code else f"HTTP {error.code}"
    if error.code in (408, 416, 429) or error.code >= 500:
        return _TransientError(reason, restarts=error.code == 416)
    hint = f"{_CHECK} Is the file still there?"
    if error.code in (401, 403):
        hint = "Put a user and a password for this host into .netrc, or choose a public location."
        if _is_hub(place):
            hint = "If it exists: accept its terms on its page, and set HF_TOKEN to a token that may read it."
    return DownloadError(reason, hint)


def _redirected(place: str, location: str) -> str:
    """The address to which ``place`` redirects, if what it sends cannot be read on the way."""
    try:
        quoted = urllib.parse.quote(location, safe=string.punctuation, encoding="iso-8859-1")
        new = urllib.parse.urljoin(place, quoted)
        parts, old = urllib.parse.urlsplit(new), urllib.parse.urlsplit(place)
        # Only a mirror that is not encrypted itself may name others.
        allowed = is_safe(parts) or (parts.scheme == "http" and not is_safe(old))
        if allowed and parts.hostname and parts.port != 0:
            return new
        reason = f"it redirects to {parts.scheme}://{parts.hostname or ''}, which is not encrypted"
    except ValueError:
        reason = "it redirects to an invalid address"
    raise DownloadError(reason, _CHECK)


def _private_headers(url: str) -> Mapping[str, str]:
    """What identifies the user to the origin of ``url``."""
    parts = urllib.parse.urlsplit(url)
    if not is_safe(parts):
        return {}
    if not _is_hub(url):
        return _netrc_headers(parts.hostname or "")
    token, cache = (
        os.environ.get("HF_TOKEN", "").strip(),
        os.environ.get("XDG_CACHE_HOME") or "~/.cache",
    )
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    # Without a home folder it raises a RuntimeError.
    with contextlib.suppress(OSError, UnicodeError, RuntimeError):
        file = Path(os.environ.get("HF_TOKEN_PATH") or f"{home}/token").expanduser()
        token = token or file.read_text(encoding="utf-8").strip()
    if not (token.isascii() and token.isprintable()):
        hint = "Set HF_TOKEN again, or remove it."
        raise DownloadError("the token for the hub has characters that no token has", hint)
    return {"Authorization": f"Bearer {token}"} if token else {}


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


def _is_hub(url: str) -> bool:
    # Other servers need no valid hub.
    with contextlib.suppress(DownloadError):
        return _origin(url) == _origin(hub_endpoint())
    return False


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc.lower()
