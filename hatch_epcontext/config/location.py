"""Where models come from that are not in the project: locations in ``url``, and the hashes of files."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urlsplit

from hatch_epcontext.files import is_portable
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.text import HUB_REPO

LAYOUT = "v6"
"""The folder of this format, below the root of a user's cache and the URL of a shared one."""

BUCKETS = ("s3", "gs", "az")
"""The schemes of buckets, which are read as shared caches are."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_HUBS = tuple(f"https://{host}" for host in ("huggingface.co", "www.huggingface.co", "hf.co"))

_COMMIT = re.compile("[0-9a-f]{40}")

SDIST_FOLDER = "epcontext-models"
"""The folder with models from elsewhere in an sdist that contains them."""

_REVISION = r"refs/(?:pr|convert)/[\w.-]+|[^/\s?#@]+"

_HUB = re.compile(
    rf"hf://(?!(?:datasets|spaces|models)/)(?P<repo>{HUB_REPO})(?:@(?P<revision>{_REVISION}))?/(?P<path>[^?#@]+)"
)

_PAGE = re.compile(
    rf"(?P<origin>https?://[^/]+)/(?P<repo>{HUB_REPO})/(?:blob|resolve|raw)/(?P<revision>[^/?#]+)"
    r"/(?P<path>[^?#]+)(?:[?#].*)?"
)


@dataclass(frozen=True)
class HubFile:
    """A file in a repository of a model hub: ``path`` in ``repo``, such as ``org/name``.

    ``revision``: a commit, a branch or a tag; None for the default branch. As text it is a location in the
    hub's own grammar, ``hf://org/name@revision/path``.
    """

    repo: str
    revision: str | None
    path: str

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a whole commit, which never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{quote(self.revision, safe='')}"
        return f"hf://{self.repo}{revision}/{self.path}"


@dataclass(frozen=True)
class Download:
    """A model from elsewhere: its location, and the hex sha256 of its file and of its external data's files.

    ``data``: by their names in the model's folder. ``sdist``: whether sdists contain it.
    """

    url: str
    sha256: str
    data: Mapping[str, str] = field(default_factory=dict)
    sdist: bool = False

    @property
    def files(self) -> Mapping[str, str]:
        """The hex sha256 of each file, by its name in the model's folder; the model's own is the first."""
        return {file_of(self.url): self.sha256, **self.data}

    @property
    def key(self) -> str:
        """A hex sha256 that identifies the contents of all files, and their names."""
        return files_key(self.files)

    def folder(self, root: Path) -> Path:
        """The folder of the files in the user's cache at ``root``."""
        return root / LAYOUT / "models" / self.key / "files"

    @property
    def place_in_sdist(self) -> str:
        """The folder of the files in an sdist that contains them."""
        return f"{SDIST_FOLDER}/{self.key[:16]}"

    @property
    def hub(self) -> HubFile | None:
        """The file on a hub; None for other locations."""
        return hub_file(self.url)


def files_key(files: Mapping[str, str]) -> str:
    """A hex sha256 that identifies ``files``, hex sha256s by name."""
    return hashlib.sha256(json.dumps(dict(files), sort_keys=True).encode()).hexdigest()


def beside(url: str, name: str) -> str:
    """The location of the file ``name``, in the folder of the one at ``url``."""
    folder = url[: url.rindex("/") + 1]
    return folder + (quote(name) if url.startswith("http") else name)


def hub_file(url: str) -> HubFile | None:
    """The file that a location of a hub names; None for others."""
    found = _HUB.fullmatch(url)
    if found is None or not is_portable(found["path"]):
        return None
    return HubFile(found["repo"], found["revision"] and unquote(found["revision"]), found["path"])


def hub_link(url: str, endpoint: str) -> HubFile | None:
    """The file of a location of a hub, or of a link of a page on that at ``endpoint``; None for others."""
    page = _PAGE.fullmatch(url)
    if page is None or page["origin"] not in (*_HUBS, endpoint):
        return hub_file(url)
    return hub_file(f"hf://{page['repo']}@{page['revision']}/{unquote(page['path'])}")


def file_of(url: str) -> str:
    """The name of the file at a valid location."""
    path = url if hub_file(url) else urlsplit(url).path
    name = posixpath.basename(path)
    return unquote(name) if url.startswith("http") else name


def check_url(url: str) -> str | None:
    """A description of a valid location of a model; None if ``url`` is one."""
    if url.startswith("hf://"):
        return None if hub_file(url) else 'a location such as "hf://org/repo@commit/model.onnx"'
    schemes = "a URL with hf://, https://, s3://, gs:// or az://"
    try:
        parts, name = urlsplit(url), file_of(url)
        is_bucket, is_plain = parts.scheme in BUCKETS, not re.search(r"[\x00-\x20\x7f]", url)
        is_known = is_bucket or parts.scheme in ("http", "https")
        # In a name, %2F is a separator to some servers, and a character to others.
        has_name = (
            is_portable(name) and "/" not in name and ".." not in unquote(parts.path).split("/")
        )
        is_public = "@" not in parts.netloc and "?" not in url and "#" not in url
        rules = {
            schemes: is_known and url.startswith(f"{parts.scheme}://") and "::" not in url,
            "a URL without spaces (%20) and control characters": is_bucket or is_plain,
            "a URL with https://: http is for this machine only": is_bucket or is_safe(parts),
            "a URL without a user, a password, a query and a fragment: the project publishes it": is_public,
            "a URL that ends with the name of a file": bool(parts.hostname) and has_name,
            "a URL with a port that is a number": parts.port != 0,
        }
    except ValueError:
        return schemes
    return next((rule for rule, is_kept in rules.items() if not is_kept), None)


def is_local(parts: SplitResult) -> bool:
    """Whether this is an address of this machine."""
    return parts.hostname in _LOOPBACK


def is_safe(parts: SplitResult) -> bool:
    """Whether nobody else can read what is sent to this address: it is encrypted, or on this machine."""
    return parts.scheme == "https" or (parts.scheme == "http" and is_local(parts))
