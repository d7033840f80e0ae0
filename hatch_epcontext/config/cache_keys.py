"""Keys of shared caches: Ed25519, a public one for who reads and a private one for who writes."""

from __future__ import annotations

import base64
import binascii

PUBLIC, PRIVATE = "ed25519:", "ed25519-private:"
"""How the text of a key begins; its 32 bytes in base64 follow."""

_BYTES = 32


def key_text(prefix: str, key: bytes) -> str:
    """The text of a key of 32 bytes; ``prefix`` is PUBLIC or PRIVATE."""
    return prefix + base64.b64encode(key).decode("ascii")


def public_bytes(text: str) -> bytes:
    """The 32 bytes of a public key; raises ValueError with what is allowed."""
    if text.startswith(PRIVATE):
        raise ValueError(
            "a public key (this is a private one, which others may have seen here: make a new pair)"
        )
    return _bytes(text, PUBLIC, "public")


def private_bytes(text: str) -> bytes:
    """The 32 bytes of a private key; raises ValueError with what is allowed."""
    return _bytes(text, PRIVATE, "private")


def check_public_keys(keys: tuple[str, ...]) -> str | None:
    """What public keys must be, in words; None for valid ones."""
    try:
        for key in keys:
            public_bytes(key)
    except ValueError as allowed:
        return f"a list of public keys: each is {allowed}"
    return None


def _bytes(text: str, prefix: str, kind: str) -> bytes:
    try:
        key = base64.b64decode(text.removeprefix(prefix), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not text.startswith(prefix) or len(key) != _BYTES:
        raise ValueError(f"a {kind} key as `epcontext cache new-key` prints it ({prefix}...)")
    return key
