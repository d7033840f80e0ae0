"""Signed statements of a shared cache, about an artifact, a validation or a model.

A statement contains its kind and its full name, so a statement in the place of another one is detected. That
of an artifact has the size and the sha256 of the archive; all others contain their text.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hatch_epcontext.files import FileRecord, is_sha256
from hatch_epcontext.jobs.cache.archive import DamagedError
from hatch_epcontext.serialize import from_json

FORMAT = 1
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
    format: int = FORMAT


@dataclass(frozen=True)
class Signed:
    """A statement as it is written: its JSON, byte for byte, and its signature in base64."""

    statement: str
    signature: str = ""

    @property
    def signed_bytes(self) -> bytes:
        """The signed bytes."""
        return f"hatch-epcontext statement\n{self.statement}".encode()


def statement_path(kind: Kind, name: str) -> str:
    """Where a statement is in a shared cache."""
    return f"{kind}/{name}.json"


def read_signed(data: str | bytes) -> Signed:
    """The statement in ``data`` with its signature, which is not verified yet; raises DamagedError."""
    try:
        signed = from_json(data, Signed)
        # JSON can have lone surrogates.
        signed.statement.encode()
    except ValueError:
        raise DamagedError("it is not a statement") from None
    return signed


def read_statement(signed: Signed, kind: Kind, name: str) -> Statement:
    """The statement of that kind and name; raises DamagedError if it is another one."""
    try:
        statement = from_json(signed.statement, Statement)
    except ValueError:
        raise DamagedError("it is not a statement") from None
    archive = statement.archive
    if archive is not None and (archive.size < 0 or not is_sha256(archive.sha256)):
        raise DamagedError("it is not a statement")
    if statement.format != FORMAT:
        raise DamagedError("it has the format of another version")
    if (statement.kind, statement.name) != (kind, name):
        raise DamagedError("it has another kind or name")
    if (archive is not None) != (kind == "artifact"):
        raise DamagedError("it is not complete")
    return statement
