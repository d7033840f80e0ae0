"""Ed25519 signatures of the statements in a shared cache; needs the package cryptography."""

from __future__ import annotations

import base64
import binascii

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hatch_epcontext.config.shared_cache import (
    PRIVATE,
    PUBLIC,
    key_text,
    private_bytes,
    public_bytes,
)


def new_keys() -> tuple[str, str]:
    """The texts of a new private key and of its public key."""
    key = Ed25519PrivateKey.generate()
    return key_text(PRIVATE, key.private_bytes_raw()), _public_text(key)


def public_key(private: str) -> str:
    """The text of the public key that belongs to the private key ``private``."""
    return _public_text(_private(private))


def sign(data: bytes, private: str) -> str:
    """The signature of ``data`` in base64."""
    return base64.b64encode(_private(private).sign(data)).decode("ascii")


def is_signed(data: bytes, signature: str, public: tuple[str, ...]) -> bool:
    """Whether ``signature``, in base64, signs ``data`` with the key of one of ``public``."""
    try:
        decoded = base64.b64decode(signature, validate=True)
    except (binascii.Error, ValueError):
        return False
    return any(_fits(decoded, data, key) for key in public)


def _fits(signature: bytes, data: bytes, public: str) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_bytes(public)).verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _private(text: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(private_bytes(text))


def _public_text(key: Ed25519PrivateKey) -> str:
    return key_text(PUBLIC, key.public_key().public_bytes_raw())
