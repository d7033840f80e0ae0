"""URLs of shared caches: the schemes that `build.cache` takes, and what a URL must not contain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

_HTTP = "fsspec[http]>=2025.3"
_AZURE = "adlfs>=2024.12"

REQUIREMENTS: Mapping[str, str] = {
    "s3": "s3fs>=2025.3",
    "gs": "gcsfs>=2025.3",
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "http": _HTTP,
    "https": _HTTP,
    "file": "fsspec>=2025.3",
}
"""The requirement of the fsspec backend for each scheme."""

SIGNATURES = "cryptography>=44"
"""The requirement of signed documents."""


def check_cache_url(url: str) -> str | None:
    """What the URL of a shared cache must be, in words; None for a valid one."""
    known = ", ".join(f"{scheme}://" for scheme in REQUIREMENTS)
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"a URL with one of {known}"
    # fsspec takes a chain of URLs behind "::".
    if not url.startswith(f"{parts.scheme}://") or "::" in url or parts.scheme not in REQUIREMENTS:
        return f"a URL with one of {known}"
    # A query can be a token too.
    if _has_credentials(parts) or "?" in url or "#" in url:
        return (
            "a URL without a user, a password, a query and a fragment (credentials come from the "
            "environment)"
        )
    if parts.scheme == "file":
        rooted = not parts.netloc and len(parts.path) > 1
        return None if rooted else "an absolute path behind file://, such as file:///mnt/cache"
    return None if parts.netloc else f"a bucket, container or host behind {parts.scheme}://"


def _has_credentials(parts: SplitResult) -> bool:
    # A secret key can contain slashes.
    user, at, host = f"{parts.netloc}{parts.path}".rpartition("@")
    if parts.scheme in ("az", "abfs", "abfss"):
        # abfs://container@account.dfs.core.windows.net names no user.
        return ":" in parts.netloc or "/" in user or (bool(at) and "." not in host.split("/")[0])
    if parts.scheme in ("http", "https"):
        return bool(at) or not _is_host(parts.netloc)
    return parts.scheme != "file" and (bool(at) or ":" in parts.netloc)


def _is_host(netloc: str) -> bool:
    return re.fullmatch(r"(\[[^]]*\]|[^:]*)(:\d+)?", netloc) is not None
