"""Artifacts of earlier builds: in the user's folder, and in a cache that machines share.

Both have entries: a record, which is a dataclass in JSON, and the files that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from hatch_epcontext.config.location import LAYOUT as LAYOUT
from hatch_epcontext.files import FileRecord, is_portable
from hatch_epcontext.serialize import from_json

T = TypeVar("T")


class DamagedError(ValueError):
    """Something in a cache is not what was written; the text is the reason."""


@runtime_checkable
class Growing(Protocol):
    """A record to which each build may add something."""

    def joined(self, other: Any) -> Any:
        """This record, with what only the ``other`` one of the same entry has."""


def read_record(text: str | bytes, type_: type[T]) -> T:
    """The record of an entry; raises DamagedError if it is invalid, or names files outside of the entry."""
    try:
        record = from_json(text, type_)
    except ValueError:
        raise DamagedError("its record cannot be read") from None
    if not all(map(is_portable, files_of(record))):
        raise DamagedError("its record has a file outside of its folder")
    return record


def files_of(record: object) -> Mapping[str, FileRecord]:
    """The files of an entry, by name; none for a record without such a field."""
    files: Mapping[str, FileRecord] = getattr(record, "files", {})
    return files
