"""Remotes for shared caches, which tests start: an S3 server and a web server."""

from __future__ import annotations

import base64
import contextlib
import http.server
import os
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

S3_KEY = "AKIA-KEY-OF-THE-TEST"
S3_SECRET = "a-secret-of-the-test"

_S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The URL of an S3 server; it ends with the process that started it."""
    with subprocess.Popen(
        [sys.executable, "-c", _S3_SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            # Other lines are messages.
            port = next(int(line) for line in process.stdout if line.strip().isdigit())
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def s3_variables(server: str) -> dict[str, str]:
    """What points the backend to ``server``, and away from anything of the user's."""
    return {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": S3_KEY,
        "AWS_SECRET_ACCESS_KEY": S3_SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1,localhost",
    }


def use_s3(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set these variables, and no others of Amazon's."""
    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in s3_variables(server).items():
        monkeypatch.setenv(name, value)


def make_bucket(server: str) -> str:
    """The name of a new bucket."""
    name = f"bucket-{uuid.uuid4().hex}"
    request = urllib.request.Request(f"{server}/{name}", method="PUT")
    with urllib.request.urlopen(request):
        return name


@dataclass
class WebServer:
    """A web server for the files in ``folder``; ``requests`` has the method and path of each request, and
    ``authorizations`` its header for that.

    With ``password`` it serves nobody else than the user ``builder``. Without ``takes_files`` it
    refuses PUT. With ``elsewhere`` it sends readers there.
    """

    folder: Path
    url: str = ""
    password: str | None = None
    takes_files: bool = True
    elsewhere: str | None = None
    requests: list[tuple[str, str]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)


@contextlib.contextmanager
def web_server(folder: Path) -> Iterator[WebServer]:
    """A running web server."""
    folder.mkdir(parents=True, exist_ok=True)
    server = WebServer(folder)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def do_GET(self) -> None:
            if self.is_allowed():
                super().do_GET()

        def do_HEAD(self) -> None:
            if self.is_allowed():
                super().do_HEAD()

        def do_PUT(self) -> None:
            if not self.is_allowed():
                return
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if not server.takes_files:
                self.send_error(405)
                return
            file = Path(self.translate_path(self.path))
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(uuid.uuid4().hex)
            temporary.write_bytes(content)
            temporary.replace(file)
            self.send_response(201)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def is_allowed(self) -> bool:
            server.requests.append((self.command, self.path))
            server.authorizations.append(self.headers["Authorization"])
            if server.elsewhere is not None:
                self.send_response(302)
                self.send_header("Location", server.elsewhere + self.path.removeprefix("/cache"))
                self.end_headers()
                return False
            if server.password is None:
                return True
            wanted = base64.b64encode(f"builder:{server.password}".encode()).decode()
            if self.headers["Authorization"] == f"Basic {wanted}":
                return True
            self.send_error(401)
            return False

        def log_message(self, *_: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            # Builds end connections early.
            pass

    with Server(("127.0.0.1", 0), Handler) as running:
        # Shutting down waits for the next look.
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        server.url = f"http://127.0.0.1:{running.server_address[1]}/cache"
        try:
            yield server
        finally:
            running.shutdown()
            thread.join()
