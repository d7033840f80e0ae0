"""Files of web servers and of the model hub, with the standard library.

The user's token goes only to the hub, encrypted or on this machine, and never to the host of a redirect:
a hub redirects to the servers with its large files.
"""

from __future__ import annotations

import http.client
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

import hatch_epcontext
from hatch_epcontext.config.location import HUB, HubFile, check_url, is_local, is_safe
from hatch_epcontext.errors import DownloadError
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.text import show_size

_CHUNK = 1 << 20
_MAX_DOCUMENT = 32 << 20

_ATTEMPTS, _PAUSE = 3, 1.0
"""How often a file is asked for, and the seconds before the second time."""

_TIMEOUT = 30.0
"""Seconds without a byte after which an attempt ends."""

_SLOWEST, _WINDOW = 1000, 60.0
"""The fewest bytes a second, over so many seconds: a byte from time to time is no progress."""

_CHECK = "Check the location."

Progress = Callable[[int, "int | None"], None]
"""Gets the bytes that have arrived, and their number in all if it is known."""


class AbsentError(DownloadError):
    """A server that says that it has no such file."""


class _TransientError(DownloadError):
    """An attempt that failed, after which another one may succeed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, "Try again. If the network needs a proxy, set https_proxy.")


def hub_endpoint() -> str:
    """The address of the model hub; raises DownloadError if ``HF_ENDPOINT`` is none, and does not show it."""
    endpoint = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or HUB
    if check_url(f"{endpoint}/file") is not None:
        raise DownloadError("HF_ENDPOINT is not the address of a hub.", f"Write it like {HUB}.")
    return endpoint


def hub_url(file: HubFile, *, api: bool = False) -> str:
    """The URL of a file on the hub, or with ``api`` that of the facts of its repository."""
    revision = quote(file.revision or "main", safe="")
    if api:
        return f"{hub_endpoint()}/api/models/{file.repo}/revision/{revision}?blobs=true"
    return f"{hub_endpoint()}/{file.repo}/resolve/{revision}/{quote(file.path)}"


def hub_token() -> str:
    """The user's token for the hub, empty without one; raises DownloadError, and does not show it."""
    token = os.environ.get("HF_TOKEN", "").strip()
    if not (token.isascii() and token.isprintable()):
        hint = "Set HF_TOKEN again, or remove it."
        raise DownloadError("HF_TOKEN has characters that no token has", hint)
    return token


@dataclass(frozen=True)
class Document:
    """What a server sent: its ``url`` after redirects, its media ``type`` in small letters, and its bytes."""

    url: str
    type: str
    content: bytes


def read(url: str, token: str = "", accept: str = "*/*") -> Document:
    """The document at ``url``, which may know ``token``, of a type in ``accept``; raises DownloadError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "document")
        reply = download(url, file, _MAX_DOCUMENT, lambda *_: None, token, accept)
        return Document(reply.url, reply.headers.get_content_type(), file.read_bytes())


def download(
    url: str, file: Path, limit: int, progress: Progress, token: str = "", accept: str = "*/*"
) -> Any:
    """Download ``url`` to ``file``; ``token`` is what identifies the user to its origin.

    Returns the answer, whose address is that after redirects. Raises DownloadError, also for more than
    ``limit`` bytes, AbsentError if the server has no such file, and OSError if it cannot be written.
    """
    for attempt in range(_ATTEMPTS):
        time.sleep(_PAUSE * attempt)
        try:
            with _open(url, token, accept) as reply, file.open("wb") as target:
                _receive(reply, target, limit, progress)
                return reply
        except DownloadError as error:
            if isinstance(error, _TransientError) and attempt < _ATTEMPTS - 1:
                continue
            kind = AbsentError if isinstance(error, AbsentError) else DownloadError
            raise kind(f"{url} cannot be downloaded: {error}.", error.hint) from error
    raise AssertionError("the last attempt returns or raises")


def _open(url: str, token: str, accept: str) -> Any:
    """The answer of ``url``; raises DownloadError."""
    # No compression: lengths are those of the file.
    agent = f"hatch-epcontext/{hatch_epcontext.__version__}"
    headers = {"User-Agent": agent, "Accept-Encoding": "identity", "Accept": accept}
    try:
        if urlsplit(url).scheme not in ("http", "https"):
            raise DownloadError("it is no address of a web server", _CHECK)
        request = urllib.request.Request(url, headers=headers)  # noqa: S310, checked
        if token:
            # In a redirect only `_Redirects` repeats it.
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        opener = urllib.request.build_opener(_Redirects, _Proxies)
        reply = opener.open(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        raise _status_error(error) from None
    except (ValueError, http.client.InvalidURL):
        raise DownloadError("it leads to an invalid address", _CHECK) from None
    except (http.client.HTTPException, OSError) as error:
        raise _TransientError(_reason(error)) from error
    if reply.status == http.HTTPStatus.OK:
        return reply
    reply.close()
    raise _TransientError(f"HTTP {reply.status}, and not the file")


def _receive(reply: Any, target: BinaryIO, limit: int, progress: Progress) -> None:
    """Write the body of ``reply`` to ``target``."""
    arrived = before = 0
    since, total = time.monotonic(), reply.length
    while max(arrived, total or 0) <= limit:
        progress(arrived, total)
        try:
            # Only what is there: progress is reported, and a slow server noticed.
            piece = reply.read1(_CHUNK)
        except (http.client.HTTPException, OSError) as error:
            raise _TransientError(_reason(error)) from error
        if not piece:
            if total is not None and arrived < total:
                raise _TransientError(f"it ended after {arrived} of {total} bytes")
            return
        target.write(piece)
        arrived += len(piece)
        if (seconds := time.monotonic() - since) >= _WINDOW:
            if arrived - before < _SLOWEST * seconds:
                message = f"it sends fewer than {_SLOWEST} bytes a second"
                raise DownloadError(message, "Try again.")
            before, since = arrived, since + seconds
    raise DownloadError(f"it has more than {show_size(limit)}", "Choose another file.")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", error)) or type(error).__name__


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects that nobody can read on the way."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        """Follow a redirect without reading its body, which may be endless."""
        fp.close()
        return super().http_error_302(req, fp, code, msg, headers)

    # Python 3.10 does not know the last one.
    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        """The request to ``newurl``, with what identifies the user only if that has the same origin."""
        new = urlsplit(newurl)
        if not is_safe(new) or new.port == 0:
            reason = f"it redirects to {new.scheme}://{new.hostname or ''}, which is not encrypted"
            raise DownloadError(reason, _CHECK)
        request = super().redirect_request(req, fp, 307, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if request and token and _origin(newurl) == _origin(req.full_url):
            request.add_unredirected_header("Authorization", token)
        return request


class _Proxies(urllib.request.ProxyHandler):
    """The proxies of the environment, but not for this machine: what is for it must not leave it."""

    def proxy_open(self, req: Any, proxy: str, type: str) -> Any:  # noqa: A002, its name there
        return None if is_local(urlsplit(req.full_url)) else super().proxy_open(req, proxy, type)


def _status_error(error: urllib.error.HTTPError) -> DownloadError:
    # What else the server says may be a page, with any text.
    code = error.headers.get("X-Error-Code")
    reason = f"HTTP {error.code} ({code})" if code else f"HTTP {error.code}"
    if error.code in (408, 429) or error.code >= 500:
        return _TransientError(reason)
    hint = f"{_CHECK} Is the file still there?"
    if error.code == http.HTTPStatus.NOT_FOUND:
        return AbsentError(reason, hint)
    if error.code in (401, 403):
        hint = "On the hub: accept its terms on its page, and set HF_TOKEN to a token that may read it."
    return DownloadError(reason, hint)


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower()
