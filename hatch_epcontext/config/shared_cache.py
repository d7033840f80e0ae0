"""Shared caches: valid URLs of `build.shared-cache`, the signing key, and the trusted public keys."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

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


def public_bytes(text: str) -> bytes:
    """The 32 bytes of a public key; raises ValueError with a description of a valid one."""
    if text.startswith(PRIVATE):
        raise ValueError(
            "a public key (this is a private one, which is no longer secret: make a new pair)"
        )
    return _bytes(text, PUBLIC, "public")


def private_bytes(text: str) -> bytes:
    """The 32 bytes of a private key; raises ValueError with a description of a valid one."""
    return _bytes(text, PRIVATE, "private")


def check_public_key(key: str) -> str | None:
    """A description of a valid public key; None if ``key`` is one."""
    try:
        public_bytes(key)
    except ValueError as allowed:
        return str(allowed)
    return None


def _bytes(text: str, prefix: str, kind: str) -> bytes:
    try:
        key = base64.b64decode(text.removeprefix(prefix), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not text.startswith(prefix) or len(key) != _BYTES:
        raise ValueError(f"a {kind} key as `epcontext cache new-key` prints it ({prefix}...)")
    return key
