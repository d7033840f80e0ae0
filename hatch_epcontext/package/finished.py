"""Checks of a finished wheel, whoever packed it: the model packages in it, and its size."""

from __future__ import annotations

import base64
import csv
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from hatch_epcontext.errors import Key, Kind, Problem, Setting, WheelError
from hatch_epcontext.files import FileRecord
from hatch_epcontext.package.manifest import FILE
from hatch_epcontext.package.reader import DAMAGED_ARCHIVE
from hatch_epcontext.text import count, show_size

_RECORD = re.compile(r"[^/]+\.dist-info/RECORD")

_MAX_SIZE = Key() / "wheel" / "max-size"
"""The configuration key of the wheel's maximum size."""

_WARN_AT = 100 * 10**6
"""The size in bytes above which package indexes refuse a wheel by default."""

_LARGEST = 10
"""How many files the message about a large wheel lists."""


def verify(wheel: Path, folder: PurePosixPath, files: Mapping[str, FileRecord]) -> None:
    """Raise WheelError with all `differences`."""
    if problems := list(differences(wheel, folder, files)):
        raise WheelError(*problems)


def differences(
    wheel: Path, folder: PurePosixPath, files: Mapping[str, FileRecord]
) -> Iterator[Problem]:
    """What differs between the package in ``folder`` of a finished wheel and ``files``, its records by path.

    Hashes are those of RECORD, which whoever packed the wheel made of what was written, and sizes those of
    the archive's directory: the files are not read. Raises OSError and `zipfile.BadZipFile` if the archive
    cannot be opened.
    """
    location = wheel.name if not folder.parts else f"{wheel.name}: {folder}"
    with zipfile.ZipFile(wheel) as archive:
        try:
            hashes = _hashes(archive)
        except (*DAMAGED_ARCHIVE, ValueError, csv.Error) as error:
            yield Problem(Kind.INVALID_WHEEL, wheel.name, f"RECORD cannot be read: {error}.")
            return
        packed = {
            PurePosixPath(info.filename).relative_to(folder).as_posix(): FileRecord(
                info.file_size, hashes.get(info.filename, "")
            )
            for info in archive.infolist()
            if not info.is_dir() and PurePosixPath(info.filename).is_relative_to(folder)
        }
    for name, record in sorted(files.items()):
        if name not in packed:
            message = f"{name} is not in the wheel."
            hint = "The build backend did not pack it: add it to the wheel's package data."
            yield Problem(Kind.INVALID_WHEEL, location, message, hint)
        elif packed[name] != record:
            message = f"{name} differs from its record in the manifest."
            yield Problem(Kind.INVALID_WHEEL, location, message)
    for name in sorted(packed.keys() - {*files, FILE}):
        yield Problem(
            Kind.INVALID_WHEEL,
            location,
            f"{name} is in the wheel, but not in the manifest.",
            "Remove it from the project, or choose another folder for the models. If it is only in the build "
            "backend's folder build/, remove that, and build again.",
        )


def _hashes(archive: zipfile.ZipFile) -> dict[str, str]:
    """The sha256 in hex of each file for which RECORD has one; raises ValueError without one RECORD."""
    records = [name for name in archive.namelist() if _RECORD.fullmatch(name)]
    if len(records) != 1:
        raise ValueError(f"a wheel has one, and this one has {len(records)}")
    rows = csv.reader(archive.read(records[0]).decode("utf-8").splitlines())
    # RECORD leaves the padding out.
    return {
        row[0]: base64.urlsafe_b64decode(f"{row[1].removeprefix('sha256=')}==").hex()
        for row in rows
        if len(row) == 3 and row[1].startswith("sha256=")
    }


def check_size(wheel: Path, max_size: int | None) -> str | None:
    """A warning about a large wheel, with its largest files; None for a wheel that is not large.

    Raises WheelError if it is larger than ``max_size`` bytes.
    """
    size = wheel.stat().st_size
    if size <= (_WARN_AT if max_size is None else max_size):
        return None
    message = f"{wheel.name} has {show_size(size)}\n{_largest_files(wheel)}"
    if max_size is None:
        return (
            f"{message}\n  By default package indexes accept files of up to {show_size(_WARN_AT)}: "
            f"request a higher limit, ship fewer targets, or set {_MAX_SIZE} to the size that you expect."
        )
    raise WheelError(
        Problem.at(
            _MAX_SIZE,
            Kind.LARGE_WHEEL,
            f"{message}\nAt most {show_size(max_size)} are allowed.",
            "Ship fewer targets, share weights, or raise the limit.",
            Setting(_MAX_SIZE, f"{-(-size // 10**6)} MB"),
        )
    )


def _largest_files(wheel: Path) -> str:
    """A line for each of the largest files, with its compressed size, and one for the others."""
    with zipfile.ZipFile(wheel) as archive:
        files = sorted(archive.infolist(), key=lambda file: file.compress_size, reverse=True)
    lines = [f"  {show_size(file.compress_size)}  {file.filename}" for file in files[:_LARGEST]]
    if (more := len(files) - _LARGEST) > 0:
        lines.append(f"  and {count(more, 'smaller file')}")
    return "\n".join(lines)
