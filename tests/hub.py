"""A model hub and a web server on this machine, with the faults that a test asks for."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_the-token-of-the-test"
REPO = "org/repo"
SIGNED = "?Signature=a-signed-secret"
"""The query of the addresses to which the hub redirects."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Hub:
    """A running server. ``files`` are those of the repository, and ``card`` is its model card.

    The hub's large files, all but text, are at a server of their own, as those of the real one. ``faults``
    of paths below ``/web/``, or of the hub's large files by their names: a status code, ``"cut"``,
    ``"cut-once"``, ``"reset-once"``, ``"slow"`` (a byte at a time), ``"wrong"`` (other bytes of the same
    size), ``"html"``, ``"no-length"``, ``"unasked"`` (a 206 to a request without a range), or a URL to
    redirect to. With ``private`` the hub wants the token. ``answer``: that to questions about the repository.
    ``requests``: the method, path and headers of each.
    """

    files: dict[str, bytes]
    card: dict[str, Any] = field(default_factory=lambda: {"license": "apache-2.0"})
    faults: dict[str, Any] = field(default_factory=dict)
    private: bool = False
    answer: bytes | None = None
    url: str = ""
    storage: str = ""
    site: str = ""
    requests: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)

    def location(self, name: str, revision: str | None = COMMIT) -> str:
        """The location of a file in the hub's grammar."""
        return f"hf://{REPO}{f'@{revision}' if revision else ''}/{name}"

    def web(self, name: str) -> str:
        """The location of a file on the web server."""
        return f"{self.site}/web/{name}"

    @property
    def downloads(self) -> list[str]:
        """The files that were sent, or begun to be."""
        sent = (urllib.parse.urlsplit(path).path for _, path, _ in self.requests)
        return [path.rpartition("/")[2] for path in sent if path.startswith(("/web/", "/large/"))]


@contextlib.contextmanager
def model_hub(files: Mapping[str, bytes]) -> Iterator[Hub]:
    """A running hub with these ``files``."""
    hub = Hub(dict(files))

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.requests.append((self.command, self.path, dict(self.headers)))
            _answer(self, hub)

        def log_message(self, *arguments: object) -> None:
            pass

    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(3)]
    # Another host name: what is sent to the hub must not be sent there.
    hub.url, hub.storage, hub.site = (
        f"http://{host}:{server.server_address[1]}"
        for host, server in zip(("127.0.0.1", "localhost", "127.0.0.1"), servers, strict=True)
    )
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def _answer(handler: http.server.BaseHTTPRequestHandler, hub: Hub) -> None:
    path = urllib.parse.unquote(urllib.parse.urlsplit(handler.path).path)
    if found := re.fullmatch(r"/(?:web|large)/(.+)", path):
        _send_file(handler, hub, found[1])
        return
    if path.startswith(("/org/old/", "/api/models/org/old/")):
        # A repository that was renamed, at the same place.
        _send(handler, 308, {"Location": handler.path.replace("org/old", REPO)})
        return
    allowed = not hub.private or handler.headers.get("Authorization") == f"Bearer {TOKEN}"
    api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path)
    file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
    named = api or file
    if named is None or named[1] != REPO:
        _send(handler, 401, {"X-Error-Code": "RepoNotFound"})
    elif not allowed:
        _send(handler, 401, {"X-Error-Code": "GatedRepo"})
    elif named[2] not in ("main", "refs/pr/1", COMMIT):
        _send(handler, 404, {"X-Error-Code": "RevisionNotFound"})
    elif api:
        siblings = [
            {"rfilename": name, "lfs": None if _is_small(name) else {"sha256": sha256(data)}}
            for name, data in hub.files.items()
        ]
        answer = {"sha": COMMIT, "cardData": hub.card, "siblings": siblings}
        text = hub.answer or json.dumps(answer).encode()
        _send(handler, 200, {"Content-Type": "application/json"}, text)
    elif file and file[3] not in hub.files:
        _send(handler, 404, {"X-Error-Code": "EntryNotFound"})
    elif file and _is_small(file[3]):
        _send(handler, 200, {}, hub.files[file[3]])
    elif file:
        _send(handler, 302, {"Location": f"{hub.storage}/large/{file[3]}{SIGNED}"})


def _is_small(name: str) -> bool:
    return not name.endswith((".onnx", "_data"))


def _send_file(handler: http.server.BaseHTTPRequestHandler, hub: Hub, name: str) -> None:
    fault, data = hub.faults.get(name), hub.files.get(name)
    if isinstance(fault, int) or data is None:
        _send(handler, fault if isinstance(fault, int) else 404, {})
        return
    if fault and "://" in fault:
        _send(handler, 302, {"Location": fault})
        return
    if fault == "wrong":
        data = bytes(len(data))
    if fault == "html":
        data = b"<!DOCTYPE html><title>Log in</title>"
    status, headers = 200, {}
    if fault == "unasked":
        status, headers["Content-Range"] = 206, f"bytes 0-{len(data) - 1}/{len(data)}"
    headers["ETag"] = f'"{sha256(data)}"'
    sent = data
    if fault != "no-length":
        headers["Content-Length"] = str(len(sent))
    if fault in ("cut", "cut-once", "reset-once"):
        sent = sent[: len(sent) // 2]
        if fault != "cut":
            del hub.faults[name]
    _send(
        handler,
        status,
        headers,
        sent,
        whole=fault not in _PARTIAL,
        byte_by_byte=fault == "slow",
    )
    if fault == "reset-once":
        # Only what the client has read by now has arrived.
        time.sleep(0.5)
        linger = struct.pack("ii", 1, 0)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        handler.connection.close()


_PARTIAL = ("cut", "cut-once", "reset-once", "no-length")
"""The faults of an answer with another length than it has, or without one."""


def _send(
    handler: http.server.BaseHTTPRequestHandler,
    status: int,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    whole: bool = True,
    byte_by_byte: bool = False,
) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    if whole and "Content-Length" not in headers:
        handler.send_header("Content-Length", str(len(body)))
    if not whole:
        handler.send_header("Connection", "close")
        handler.close_connection = True
    handler.end_headers()
    with contextlib.suppress(OSError):
        for size in [1] * 100 if byte_by_byte else []:
            handler.wfile.write(body[:size])
            time.sleep(0.02)
        if not byte_by_byte:
            handler.wfile.write(body)
