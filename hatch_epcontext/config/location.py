"""What is outside of the project: of models, with the hashes of files, and of shared caches, with keys."""

from __future__ import annotations

import base64
import binascii
import contextlib
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

HUB = "https://huggingface.co"
"""The model hub, unless ``HF_ENDPOINT`` names a mirror."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_COMMIT = "[0-9a-f]{40}"

_HUB_FILE = (
    rf"(?:hf://|{HUB}/)(?!(?:datasets|spaces|models)/)(?P<repo>{HUB_REPO})"
    r"(?:(?:@|/(?:blob|resolve|raw)/)(?P<revision>[^/\s?#@]+))?/(?P<path>[^?#@]+)(?:\?download=true)?"
)

_NO_REVISION = (
    r"[\x00-\x20\x7f~^:?*\[\\\ud800-\udfff]|\.\.|@\{|//|(?:^|/)\.|\.(?:lock/|lock$|$)|^/|/$|^@$"
)
"""What no name of a branch or a tag has. Source: ``git check-ref-format``."""


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
        return self.revision is not None and re.fullmatch(_COMMIT, self.revision) is not None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{quote(self.revision, safe='')}"
        return f"hf://{self.repo}{revision}/{self.path}"


@dataclass(frozen=True)
class Download:
    """A model from elsewhere: its location, and the hex sha256 of its file and of its external data's files.

    ``data``: by their names in the model's folder.
    """

    url: str
    sha256: str
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> Mapping[str, str]:
        """The hex sha256 of each file, by its name in the model's folder; the model's own is the first."""
        return {file_of(self.url): self.sha256, **self.data}

    @property
    def key(self) -> str:
        """A hex sha256 that identifies the contents of all files, and their names."""
        return hashlib.sha256(json.dumps(dict(self.files), sort_keys=True).encode()).hexdigest()

    def path(self, root: Path) -> Path:
        """The model in the user's cache at ``root``; its data is beside it."""
        return root / LAYOUT / "models" / self.key / "files" / file_of(self.url)


def beside(url: str, name: str) -> str:
    """The location of the file ``name``, in the folder of the one at ``url``."""
    folder = url[: url.rindex("/") + 1]
    return folder + (name if url.startswith("hf://") else quote(name))


def hub_file(url: str) -> HubFile | None:
    """The file that ``url`` names in the hub's grammar, or as the link of its page; None for others."""
    if (match := re.fullmatch(_HUB_FILE, url)) is None:
        return None
    path = match["path"] if url.startswith("hf://") else unquote(match["path"])
    revision = match["revision"] and unquote(match["revision"])
    # Servers may decode them once more.
    if not all(map(is_portable, (path, unquote(path)))):
        return None
    if revision is not None and any(
        re.search(_NO_REVISION, text) for text in (revision, unquote(revision))
    ):
        return None
    return HubFile(match["repo"], revision, path)


def file_of(url: str) -> str:
    """The name of the file at a valid location."""
    hub = hub_file(url)
    return posixpath.basename(hub.path) if hub else unquote(posixpath.basename(urlsplit(url).path))


def check_url(url: str) -> str | None:
    """A description of a valid location of a model; None if ``url`` is one."""
    with contextlib.suppress(ValueError):
        parts, name = urlsplit(url), file_of(url)
        is_public = "@" not in parts.netloc and not re.search(r"[\x00-\x20\x7f?#]", url)
        # In a name, %2F is a separator to some servers, and a character to others.
        is_file = is_portable(name) and "/" not in name
        is_file = is_file and ".." not in unquote(parts.path).split("/")
        if hub_file(url) or (is_safe(parts) and parts.port != 0 and is_public and is_file):
            return None
    if url.startswith("hf://"):
        return (
            'a file in a repository of a model hub, such as "hf://org/repo@commit/onnx/model.onnx". org and '
            'repo have letters, digits, "-", "_" and ".", but no "--" or "..", and no "-" or "." at an end. '
            "The commit may be a branch or a tag, and no part of the path is a dot or two"
        )
    return (
        'a URL such as "hf://org/repo@commit/model.onnx" or "https://host/model.onnx", without a user, a '
        "password, a query and spaces"
    )


def is_local(parts: SplitResult) -> bool:
    """Whether this is an address of this machine."""
    return parts.hostname in _LOOPBACK


def is_safe(parts: SplitResult) -> bool:
    """Whether nobody else can read what is sent to this address: it is encrypted, or on this machine."""
    return bool(parts.hostname) and (
        parts.scheme == "https" or (parts.scheme == "http" and is_local(parts))
    )


_HTTP = "fsspec[http]>=2025.3"

REQUIREMENTS: Mapping[str, str] = {
    "s3": "s3fs>=2025.3",
    "gs": "gcsfs>=2025.3",
    "az": "adlfs>=2024.12",
    "http": _HTTP,
    "https": _HTTP,
    "file": "fsspec>=2025.3",
}
"""The requirement of the fsspec backend for each scheme."""

SIGNATURES = "cryptography>=44"
"""The requirement of signed documents."""


def check_cache_url(url: str) -> str | None:
    """A description of a valid URL of a shared cache; None if ``url`` is one."""
    known = ", ".join(f"{scheme}://" for scheme in REQUIREMENTS)
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"a URL with one of {known}"
    # fsspec chains URLs with "::".
    if not url.startswith(f"{parts.scheme}://") or "::" in url or parts.scheme not in REQUIREMENTS:
        return f"a URL with one of {known}"
    # A query may contain a token.
    if _has_credentials(parts) or "?" in url or "#" in url:
        return (
            "a URL without a user, a password, a query and a fragment (credentials come from the "
            "environment)"
        )
    if parts.scheme == "file":
        rooted = not parts.netloc and len(parts.path) > 1
        return None if rooted else "an absolute path after file://, such as file:///mnt/cache"
    return None if parts.netloc else f"a bucket, container or host after {parts.scheme}://"


def _has_credentials(parts: SplitResult) -> bool:
    # A secret key can contain slashes.
    has_user = "@" in f"{parts.netloc}{parts.path}"
    port = r"(:\d+)?" if parts.scheme.startswith("http") else ""
    is_host = re.fullmatch(rf"(\[[^]]*\]|[^:]*){port}", parts.netloc)
    return parts.scheme != "file" and (has_user or not is_host)


PUBLIC, PRIVATE = "ed25519:", "ed25519-private:"
"""The prefixes of keys as text; the 32 bytes in base64 follow."""

_BYTES = 32


def key_text(prefix: str, key: bytes) -> str:
    """The text of a key of 32 bytes; ``prefix`` is PUBLIC or PRIVATE."""
    return prefix + base64.b64encode(key).decode("ascii")


def key_bytes(prefix: str, text: str) -> bytes:
    """The 32 bytes of a key as text; raises ValueError with a description of a valid one."""
    if prefix == PUBLIC and text.startswith(PRIVATE):
        raise ValueError(
            "a public key (this is a private one, which is no longer secret: make a new pair)"
        )
    try:
        key = base64.b64decode(text.removeprefix(prefix), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not text.startswith(prefix) or len(key) != _BYTES:
        kind = "public" if prefix == PUBLIC else "private"
        raise ValueError(f"a {kind} key as `epcontext cache new-key` prints it ({prefix}...)")
    return key
