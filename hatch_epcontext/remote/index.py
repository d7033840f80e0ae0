"""An index of packages: the files that it has of a distribution.

Its page is JSON (PEP 691) or HTML (PEP 503), as the index chooses.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from hatch_epcontext.errors import DownloadError
from hatch_epcontext.files import is_sha256
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.remote import web

_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
"""The types of the page, the best first, as PEP 691 recommends."""


@dataclass(frozen=True)
class IndexFile:
    """A file on an index: its ``name`` and ``url``, and its hex ``sha256``, empty if it is not known."""

    name: str
    url: str
    sha256: str = ""


def files_of(distribution: str, index: str) -> list[IndexFile]:
    """The files of ``distribution``, a normalized name, on the ``index`` at a URL; raises DownloadError.

    None if the index does not have it.
    """
    try:
        page = web.read(f"{index.rstrip('/')}/{distribution}/", accept=_ACCEPT)
    except web.AbsentError:
        # Nothing was published.
        return []
    if page.type == _JSON:
        try:
            return [*_files_in_json(page)]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            message = f"{page.url} does not answer as an index of packages does."
            raise DownloadError(message, "Check the address of the index.") from None
    return [*_files_in_html(page)]


def _files_in_json(page: web.Document) -> Iterator[IndexFile]:
    for file in json.loads(page.content)["files"]:
        sha256 = str(file["hashes"].get("sha256"))
        name, url = str(file["filename"]), urljoin(page.url, file["url"])
        yield IndexFile(name, url, sha256 if is_sha256(sha256) else "")


def _files_in_html(page: web.Document) -> Iterator[IndexFile]:
    links = _Links()
    # Of a tag without an end the parser asserts, or waits for more. It is not told that this is all, because
    # then old ones read the rest again for each such tag.
    with contextlib.suppress(AssertionError):
        links.feed(page.content.decode(errors="replace"))
    for link in links.links:
        # Some are no URLs.
        with contextlib.suppress(ValueError):
            url, fragment = urldefrag(urljoin(page.url, urljoin(links.base, link)))
            name = unquote(urlsplit(url).path.rpartition("/")[2])
            sha256 = fragment.removeprefix("sha256=")
            yield IndexFile(name, url, sha256 if is_sha256(sha256) else "")


class _Links(HTMLParser):
    """Reads the addresses of links, and the first one that they are relative to."""

    def __init__(self) -> None:
        super().__init__()
        self.base = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take the address of a tag."""
        if address := dict[str, Any](attrs).get("href"):
            if tag == "a":
                self.links.append(address)
            elif tag == "base":
                self.base = self.base or address
