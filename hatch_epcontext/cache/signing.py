"""The statements of a shared cache, signed with Ed25519; only keys need the package cryptography.

A statement is text of three lines: a signature in base64, the kind and key of an entry, and its record, which
names its files with their hashes. So it is valid nowhere else, and vouches for all that a build uses.
"""

from __future__ import annotations

import base64
from typing import Any

from hatch_epcontext.cache.store import DamagedError
from hatch_epcontext.config.location import LAYOUT, PRIVATE, PUBLIC, SIGNATURES, key_bytes, key_text
from hatch_epcontext.system import pip_install

_PURPOSE = f"hatch-epcontext {LAYOUT} statement\n".encode()
"""Signed before each statement: nothing else that the key signs can be taken for one."""


def sign(kind: str, key: str, record: str, private: str | None) -> bytes:
    """The statement that an entry has the JSON ``record``; without a private key its signature is empty."""
    content = f"{kind}/{key}\n{record}".encode()
    signature = b"" if private is None else _private(private).sign(_PURPOSE + content)
    return base64.b64encode(signature) + b"\n" + content


def verify(statement: bytes, kind: str, key: str, trust: tuple[str, ...] | None) -> str:
    """The record in a statement about that entry, if one of the public keys ``trust`` signed it.

    With None everybody is trusted. Raises DamagedError.
    """
    signature, _, content = statement.partition(b"\n")
    if trust is not None and not any(_is_signed(content, signature, public) for public in trust):
        raise DamagedError("a statement is not signed by any of build.shared-cache-keys")
    name, _, record = content.partition(b"\n")
    if name != f"{kind}/{key}".encode():
        raise DamagedError("a statement is about another entry")
    try:
        return record.decode()
    except UnicodeError:
        raise DamagedError("a statement cannot be read") from None


def _is_signed(content: bytes, signature: bytes, public: str) -> bool:
    key = _ed25519().Ed25519PublicKey.from_public_bytes(key_bytes(PUBLIC, public))
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(base64.b64decode(signature, validate=True), _PURPOSE + content)
    except (InvalidSignature, ValueError):
        return False
    return True


def new_keys() -> tuple[str, str]:
    """The texts of a new private key and of its public key."""
    private = _ed25519().Ed25519PrivateKey.generate().private_bytes_raw()
    text = key_text(PRIVATE, private)
    return text, public_key(text)


def public_key(private: str) -> str:
    """The text of the public key that belongs to the private key ``private``."""
    return key_text(PUBLIC, _private(private).public_key().public_bytes_raw())


def _private(text: str) -> Any:
    return _ed25519().Ed25519PrivateKey.from_private_bytes(key_bytes(PRIVATE, text))


def _ed25519() -> Any:
    # Imported here: folders without keys do not need the package.
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ImportError(f"keys need a package, run: {pip_install([SIGNATURES])}") from None
    return ed25519
