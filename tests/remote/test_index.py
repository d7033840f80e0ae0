"""What an index says of a distribution, in JSON and in HTML, and pages that are hostile."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from hatch_epcontext.errors import DownloadError
from hatch_epcontext.remote.index import IndexFile, files_of

SHA = "ab" * 32
JSON = "application/vnd.pypi.simple.v1+json"
WHEEL = "a-1-py3-none-any.whl"


@contextlib.contextmanager
def index(page: bytes, type_: str = "text/html", path: str = "/simple/a/") -> Iterator[str]:
    """The URL of an index with one page, to which it redirects; it has JSON only for who asks for it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_there = self.path in (path, "/old/a/") and (
                type_ != JSON or self.headers["Accept"].startswith(JSON)
            )
            self.send_response((302 if self.path == "/old/a/" else 200) if is_there else 404)
            self.send_header("Location", path)
            self.send_header("Content-Type", type_)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_json_comes_first_and_addresses_are_relative_to_the_page() -> None:
    files = [
        {"filename": WHEEL, "url": f"../../files/{WHEEL}", "hashes": {"sha256": SHA}},
        {"filename": "a-2.tar.gz", "url": "https://host/x", "hashes": {}},
    ]
    with index(json.dumps({"files": files}).encode(), JSON) as url:
        for root in (f"{url}/simple", f"{url}/simple/", f"{url}/old"):
            assert files_of("a", root) == [
                IndexFile(WHEEL, f"{url}/files/{WHEEL}", SHA),
                IndexFile("a-2.tar.gz", "https://host/x"),
            ]
        assert files_of("b", f"{url}/simple") == []


@pytest.mark.parametrize(
    ("head", "link", "file"),
    [
        ("", f"{WHEEL}#sha256={SHA}", IndexFile(WHEEL, f"simple/a/{WHEEL}", SHA)),
        ("", f"/f/{WHEEL}?x=1&amp;y=2#md5=1", IndexFile(WHEEL, f"f/{WHEEL}?x=1&y=2")),
        ("", "b%2B1.whl", IndexFile("b+1.whl", "simple/a/b%2B1.whl")),
        ("<base href='/f/'><base href='/g/'>", WHEEL, IndexFile(WHEEL, f"f/{WHEEL}")),
        ("<!-- <a href='x'> -->\n<a>b</a><a href='http://[x'>", "c", IndexFile("c", "simple/a/c")),
    ],
)  # fmt: skip
def test_html_is_read_as_browsers_do(head: str, link: str, file: IndexFile) -> None:
    for anchor in (f"<A rel=x HREF='{link}'>a</A>", f'<a\n data-yanked=""\thref = "{link}">a</a>'):
        with index(f"<!DOCTYPE html>{head}{anchor}".encode()) as url:
            (read,) = files_of("a", f"{url}/simple")
            assert read == IndexFile(file.name, f"{url}/{file.url}", file.sha256)


@pytest.mark.parametrize(
    "seed",
    ["<a ", "<a href='x", "<a href=", '<a b="', "<!--", "</a", "<![", "<!", "<?", "<", "&#", "<script>"],
)  # fmt: skip
def test_a_hostile_page_is_read_in_the_time_of_its_size(seed: str) -> None:
    # In quadratic time some of these take minutes.
    page = f"<a href='{WHEEL}'>" + seed * (100_000 // len(seed))
    with index(page.encode()) as url:
        assert files_of("a", f"{url}/simple")[0].name == WHEEL


@pytest.mark.parametrize(
    "page", [b"<html>", b"[" * 100_000, b"{}", b'{"files": [1]}', b'{"files": [{"filename": "a"}]}']
)
def test_json_that_is_none_of_an_index_is_an_error(page: bytes) -> None:
    with (
        index(page, JSON) as url,
        pytest.raises(DownloadError, match="does not answer as an index of packages"),
    ):
        files_of("a", f"{url}/simple")
