"""Artifacts as archives: an uncompressed tar file with the record, followed by its files in its order.

The same record gives the same bytes, and an archive is named by their sha256. An archive can come from an
untrusted machine: only what its record names is unpacked, into one folder.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import unicodedata
from pathlib import Path, PurePosixPath
from typing import IO

from hatch_epcontext.files import FileRecord, record_file
from hatch_epcontext.jobs.artifact import Record
from hatch_epcontext.jobs.cache.store import DamagedError
from hatch_epcontext.jobs.cache.store import read_record as read_entry
from hatch_epcontext.serialize import to_json

_RECORD = "record.json"
_CHUNK = 4 << 20

_MAX_RECORD = 64 << 20
"""Bytes of a record, which is read into memory."""


def pack(artifact: Path, record: Record, file: Path) -> FileRecord:
    """Write the artifact in the folder ``artifact`` to the archive ``file``; returns what identifies that."""
    with tarfile.open(file, "w") as archive:
        text = to_json(record, indent=None).encode()
        archive.addfile(_member(_RECORD, len(text)), io.BytesIO(text))
        for name, recorded in record.files.items():
            with (artifact / PurePosixPath(name)).open("rb") as content:
                archive.addfile(_member(f"files/{name}", recorded.size), content)
    return record_file(file)


def unpack(file: Path, artifact: Path) -> Record:
    """Put the files of an archive into the folder ``artifact``, which is made.

    Raises DamagedError if the archive is not as `pack` writes it, and OSError. What was unpacked before the
    error stays in the folder.
    """
    try:
        # Not compressed: what it contains cannot be larger than itself.
        with tarfile.open(file, "r:") as archive:
            return _unpack(archive, artifact)
    except DamagedError:
        raise
    # Also raised for headers with impossible numbers.
    except (tarfile.TarError, EOFError, OverflowError, ValueError) as error:
        raise DamagedError(f"its archive cannot be read: {error}") from None


def _unpack(archive: tarfile.TarFile, artifact: Path) -> Record:
    record = read_record(_next(archive, _RECORD).read(_MAX_RECORD))
    artifact.mkdir(parents=True)
    for name, recorded in record.files.items():
        target = artifact / PurePosixPath(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _next(archive, f"files/{name}") as content, target.open("xb") as written:
            shutil.copyfileobj(content, written, _CHUNK)
        if record_file(target) != recorded:
            raise DamagedError(f"its file {name} has other content")
    if archive.next() is not None:
        raise DamagedError("its archive has more than its record names")
    return record


def read_record(text: str | bytes) -> Record:
    """The record in ``text``; raises DamagedError if it is invalid, or names files outside of an artifact."""
    record = read_entry(text, Record)
    # A file system may treat names as equal that differ in case or in Unicode normalization.
    names = {unicodedata.normalize("NFC", name).casefold() for name in record.files}
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    if len(names) != len(record.files) or not names.isdisjoint(folders):
        raise DamagedError("its record has two files of one name")
    if len(record.preparations) != len(record.contexts):
        raise DamagedError("its record has models without a preparation")
    if any(context.model_file not in record.files for context in record.contexts):
        raise DamagedError("its record has a model without a file")
    return record


def _member(name: str, size: int) -> tarfile.TarInfo:
    """A member without a time and an owner, which differ between machines."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def _next(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    """The content of the next member; raises DamagedError if it is not the regular file ``name``."""
    member = archive.next()
    content = None
    # Sparse files can be of any size.
    if member is not None and member.type == tarfile.REGTYPE and not member.issparse():
        content = archive.extractfile(member) if member.name == name else None
    if content is None:
        raise DamagedError(f"its archive does not have {name} in its place")
    return content
