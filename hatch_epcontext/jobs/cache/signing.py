"""Ed25519 signatures of documents in a shared cache; needs the package cryptography."""

from __future__ import annotations

import base64
import binascii

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hatch_epcontext.config.cache_keys import (
    PRIVATE,
    PUBLIC,
    key_text,
    private_bytes,
    public_bytes,
)
from hatch_epcontext.jobs.cache.envelope import Envelope, signed_bytes


def new_keys() -> tuple[str, str]:
    """The texts of a new private key and of its public key."""
    key = Ed25519PrivateKey.generate()
    return key_text(PRIVATE, key.private_bytes_raw()), _public_text(key)


def public_key(private: str) -> str:
    """The text of the public key that belongs to the private key ``private``."""
    return _public_text(_private(private))


def sign(name: str, text: str, private: str) -> str:
    """The signature of a document in base64."""
    return base64.b64encode(_private(private).sign(signed_bytes(name, text))).decode("ascii")


def is_signed(envelope: Envelope, public: tuple[str, ...]) -> bool:
    """Whether one of the public keys signed the document."""
    try:
        signature = base64.b64decode(envelope.signature or "", validate=True)
    except (binascii.Error, ValueError, TypeError):
        return False
    return any(_fits(signature, envelope, key) for key in public)


def _fits(signature: bytes, envelope: Envelope, public: str) -> bool:
    key = Ed25519PublicKey.from_public_bytes(public_bytes(public))
    try:
        key.verify(signature, signed_bytes(envelope.name, envelope.text))
    except InvalidSignature:
        return False
    return True


def _private(text: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(private_bytes(text))


def _public_text(key: Ed25519PrivateKey) -> str:
    return key_text(PUBLIC, key.public_key().public_bytes_raw())
