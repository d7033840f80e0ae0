"""Documents of a cache: a name, a text, and a checksum over both; in a shared cache also a signature.

A document says itself which one it is, so one that was copied to the place of another is noticed. The
checksum finds damage. Only a signature says who wrote a document.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from hatch_epcontext.serialize import to_json

FORMAT = 1
"""The format of envelopes; others are refused."""


class DamagedError(ValueError):
    """A document, or what it describes, is not what was written; the text is the reason."""


@dataclass(frozen=True)
class Envelope:
    """A document as it is written. ``sha256`` is over the format, the name and the text.

    The text is in it as it is, and not as JSON inside JSON, so that the checksum is over these very
    characters. ``signature``: in base64, of the same bytes; None if there is none.
    """

    name: str
    text: str
    sha256: str
    format: int = FORMAT
    signature: str | None = None


def envelope_around(name: str, text: str, signature: str | None = None) -> str:
    """The JSON of the envelope for a document."""
    digest = hashlib.sha256(signed_bytes(name, text)).hexdigest()
    return to_json(Envelope(name, text, digest, signature=signature))


def read_envelope(data: str | bytes, name: str) -> Envelope:
    """The envelope of the document ``name``; raises DamagedError if ``data`` is no such envelope."""
    try:
        found: Any = json.loads(data)
        # By hand: cattrs would need some milliseconds to write a function for this class in each process.
        envelope = Envelope(**found)
        digest = hashlib.sha256(signed_bytes(envelope.name, envelope.text)).hexdigest()
    except (ValueError, TypeError, RecursionError):
        raise DamagedError("it is not a document of this cache") from None
    if envelope.format != FORMAT:
        raise DamagedError("it has the format of another version")
    if digest != envelope.sha256:
        raise DamagedError("its text was changed")
    if envelope.name != name or not isinstance(envelope.text, str):
        raise DamagedError("it belongs to something else")
    return envelope


def signed_bytes(name: str, text: str) -> bytes:
    """What the checksum and the signature of a document are over."""
    return f"hatch-epcontext cache {FORMAT}\n{name}\n{text}".encode()
