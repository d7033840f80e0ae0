"""Statements of a shared cache, signed with Ed25519; only signatures need the package cryptography.

A statement contains its kind and its full name, so a statement in the place of another one is detected. That
of an artifact has the size and the sha256 of the archive; all others contain their text.
"""

from __future__ import annotations

import base64
import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from hatch_epcontext.config.shared_cache import (
    PRIVATE,
    PUBLIC,
    key_text,
    private_bytes,
    public_bytes,
)
from hatch_epcontext.files import FileRecord, is_sha256
from hatch_epcontext.jobs.cache.store import DamagedError
from hatch_epcontext.serialize import from_json, to_json

T = TypeVar("T")

_FORMAT = 1
"""The format of statements; others are refused."""

Kind = Literal["artifact", "validation", "facts", "latest"]
"""What a statement is about. `Statement.name` is an artifact's key, an artifact's and a validation's key,
the key of a model's facts, or the name of which an artifact is the latest.
"""


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Statement:
    """``archive``: that of an artifact; ``text``: the content of all others. ``versions``: of the packages
    that made it; ``time``: when it was signed.
    """

    kind: Kind
    name: str
    archive: FileRecord | None = None
    text: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    time: str = field(default_factory=_now)
    format: int = _FORMAT

    @property
    def blob(self) -> FileRecord:
        """The archive of an artifact."""
        assert self.archive is not None, "`read` checks that"
        return self.archive


@dataclass(frozen=True)
class _Signed:
    """A statement as it is written: its JSON, byte for byte, and its signature in base64."""

    statement: str
    signature: str = ""

    @property
    def signed_bytes(self) -> bytes:
        """The signed bytes; raises ValueError for lone surrogates, which JSON can have."""
        return f"hatch-epcontext statement\n{self.statement}".encode()


def signed(statement: Statement, private: str | None) -> bytes:
    """What is written for ``statement``, with a signature if there is a private key."""
    document = _Signed(to_json(statement, indent=None))
    if private is not None:
        signature = base64.b64encode(_private(private).sign(document.signed_bytes))
        document = _Signed(document.statement, signature.decode("ascii"))
    return to_json(document, indent=None).encode()


def read(data: bytes, kind: Kind, name: str, trust: tuple[str, ...] | None) -> Statement:
    """The statement of that kind and name, if one of the public keys ``trust`` signed it; None trusts all.

    Raises DamagedError.
    """
    document = _parsed(data.decode(errors="replace"), _Signed)
    if trust is not None and not _is_signed(document, trust):
        by = " by any of build.cache-keys" if document.signature else ""
        raise DamagedError(f"a statement is not signed{by}")
    statement = _parsed(document.statement, Statement)
    archive = statement.archive
    if statement.format != _FORMAT:
        raise DamagedError("a statement has the format of another version")
    if (statement.kind, statement.name) != (kind, name):
        raise DamagedError("a statement has another kind or name")
    is_complete = archive is None or (archive.size >= 0 and is_sha256(archive.sha256))
    if (archive is not None) != (kind == "artifact") or not is_complete:
        raise DamagedError("a statement is not complete")
    return statement


def _parsed(text: str, type_: type[T]) -> T:
    try:
        # JSON can have lone surrogates.
        return from_json(text.encode(), type_)
    except ValueError:
        raise DamagedError("a statement cannot be read") from None


def _is_signed(document: _Signed, trust: tuple[str, ...]) -> bool:
    from cryptography.exceptions import InvalidSignature

    for public in trust:
        key = _ed25519().Ed25519PublicKey.from_public_bytes(public_bytes(public))
        try:
            key.verify(base64.b64decode(document.signature, validate=True), document.signed_bytes)
        except (InvalidSignature, ValueError):
            continue
        return True
    return False


def new_keys() -> tuple[str, str]:
    """The texts of a new private key and of its public key."""
    private = _ed25519().Ed25519PrivateKey.generate().private_bytes_raw()
    text = key_text(PRIVATE, private)
    return text, public_key(text)


def public_key(private: str) -> str:
    """The text of the public key that belongs to the private key ``private``."""
    return key_text(PUBLIC, _private(private).public_key().public_bytes_raw())


def _private(text: str) -> Any:
    return _ed25519().Ed25519PrivateKey.from_private_bytes(private_bytes(text))


def _ed25519() -> Any:
    # Imported here: folders without keys do not need the package.
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return ed25519
