"""Checks of a finished wheel, whoever packed it: its RECORD, the model packages in it, and its size."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from hatch_epcontext.errors import Diagnosed, Key, Kind, Problem, Setting, WheelError, collect
from hatch_epcontext.files import FileRecord
from hatch_epcontext.package.manifest import FILE, ModelPackage
from hatch_epcontext.package.reader import DAMAGED_ARCHIVE
from hatch_epcontext.text import count, listing, show, show_size

_RECORD = "RECORD"

_REQUIRED = ("METADATA", "WHEEL", _RECORD)
"""The files that each wheel has in its ``.dist-info`` folder."""

_NOT_RECORDED = (_RECORD, "RECORD.jws", "RECORD.p7s")
"""The files that RECORD need not describe: itself, and signatures of it."""

_ALGORITHMS = ("sha256", "sha384", "sha512")
"""The hashes that the format of wheels allows, as far as Python has them everywhere."""

_CHUNK = 1 << 20

_AGAIN = "Build the wheel again."

_MAX_SIZE = Key() / "wheel" / "max-size"
"""The configuration key of the wheel's maximum size."""

_WARN_AT = 100 * 10**6
"""The size in bytes above which package indexes refuse a wheel by default."""

_LARGEST = 10
"""How many files the message about a large wheel lists."""


def verify(
    wheel: Path, output: PurePosixPath, files: Mapping[str, FileRecord], *, read: bool
) -> int:
    """Compare the package at ``output`` in a finished wheel with ``files``, which it should have.

    Hashes are those of RECORD, which whoever packed the wheel made of what was written; or with ``read``
    those of all bytes in the archive. Returns the number of files, without the manifest. Raises WheelError
    if one is missing or differs, or if the wheel has another file there.
    """
    location = f"{wheel.name}: {output}"
    with zipfile.ZipFile(wheel) as archive:
        names = _names(archive)
        if str(output / FILE) not in names:
            raise WheelError(_problem(location, f"{FILE} is missing."))
        rows, _ = collect(_rows(archive, wheel.name, names))
        if read:
            own = [name for name in names if PurePosixPath(name).is_relative_to(output)]
            found, _ = collect(_contents(archive, wheel.name, own, rows))
        else:
            found = {name: _recorded(archive, name, rows.get(name)) for name in names}
    if problems := list(_differences(output, files, found, location)):
        raise WheelError(*problems)
    return len(files) - 1


def check(path: Path, packages: Mapping[str, ModelPackage], *, is_wheel: bool) -> Diagnosed[int]:
    """Read all files of the wheel at ``path``; yield a problem for each that is not as recorded.

    ``packages``: those in it, by folder. Each file must be as the wheel's RECORD has it, and the files
    of a package also as its manifest has them; the model file of each variant must exist. Returns the
    number of files that RECORD describes. Without ``is_wheel`` it is any other zip archive, which has no
    RECORD. Raises OSError and `zipfile.BadZipFile` if the archive cannot be opened.
    """
    with zipfile.ZipFile(path) as archive:
        names = _names(archive)
        for name, times in sorted(names.items()):
            if times > 1:
                yield _problem(path.name, f"{name} is in the archive {times} times.")
        rows: Mapping[str, _Row] = {}
        if is_wheel:
            rows = yield from _rows(archive, path.name, names)
        found = yield from _contents(archive, path.name, names, rows)
        for name in sorted(rows.keys() - names.keys()):
            yield _problem(path.name, f"{name} is in RECORD, but not in the wheel.", _AGAIN)
    for folder, package in packages.items():
        location = path.name if folder == "." else f"{path.name}: {folder}"
        if package.about is not None:
            yield from _differences(PurePosixPath(folder), package.files, found, location)
        for file in package.unrecorded:
            if str(PurePosixPath(folder, file)) not in found:
                message = f"{file} is the model of a variant, and not in the wheel."
                yield _problem(location, message)
    return len(rows)


def _names(archive: zipfile.ZipFile) -> Counter[str]:
    """The files in the archive, and how often each is there."""
    return Counter(name for name in archive.namelist() if not name.endswith("/"))


@dataclass(frozen=True)
class _Row:
    """A row of RECORD: the file's hash in hex, and its size in bytes; None if that is left out."""

    algorithm: str
    digest: str
    size: int | None


def _rows(
    archive: zipfile.ZipFile, wheel: str, names: Mapping[str, int]
) -> Diagnosed[Mapping[str, _Row]]:
    """The rows of RECORD by file, without those of `_NOT_RECORDED`."""
    folders = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    folders = {each for each in folders if each.endswith(".dist-info")}
    if len(folders) != 1:
        found = f"has the folders {listing(sorted(folders))}" if folders else "has none"
        yield _problem(wheel, f"a wheel has one .dist-info folder, and this one {found}.")
        return {}
    (folder,) = folders
    yield from _name_problems(wheel, folder)
    missing = [name for name in _REQUIRED if f"{folder}/{name}" not in names]
    for name in missing:
        yield _problem(wheel, f"{folder}/{name} is missing.")
    if _RECORD in missing:
        return {}
    unrecorded = {f"{folder}/{name}" for name in _NOT_RECORDED}
    try:
        text = archive.read(f"{folder}/{_RECORD}").decode("utf-8")
        lines = list(csv.reader(text.splitlines()))
    except (*DAMAGED_ARCHIVE, ValueError, csv.Error) as error:
        yield _problem(wheel, f"{folder}/{_RECORD} cannot be read: {error}.")
        return {}
    rows: dict[str, _Row] = {}
    for line in lines:
        if line and line[0] not in unrecorded:
            row = _row(line)
            if row is None:
                yield _problem(wheel, f"RECORD has a row that cannot be read: {show(line)}.")
            else:
                rows[line[0]] = row
    for name in sorted(names.keys() - rows.keys() - unrecorded):
        yield _problem(wheel, f"{name} is in the wheel, but not in RECORD.", _AGAIN)
    return rows


def _row(line: list[str]) -> _Row | None:
    """The row of RECORD that the columns ``line`` are; None if they are none."""
    if len(line) != 3:
        return None
    algorithm, _, text = line[1].partition("=")
    if algorithm not in _ALGORITHMS or not re.fullmatch("[0-9]{0,18}", line[2]):
        return None
    try:
        # RECORD leaves the padding out.
        digest = base64.b64decode(text + "=" * (-len(text) % 4), altchars="-_", validate=True)
    except ValueError:
        return None
    return _Row(algorithm, digest.hex(), int(line[2]) if line[2] else None)


def _name_problems(wheel: str, folder: str) -> Iterator[Problem]:
    try:
        name, version, _, _ = parse_wheel_filename(wheel)
    except InvalidWheelFilename as error:
        yield _problem(wheel, f"pip does not install a wheel of this name: {error}.")
        return
    if canonicalize_name(folder.partition("-")[0]) != name:
        message = f"the name is that of {name} {version}, and the wheel contains {folder}."
        yield _problem(wheel, message)


def _contents(
    archive: zipfile.ZipFile, wheel: str, names: Collection[str], rows: Mapping[str, _Row]
) -> Diagnosed[dict[str, FileRecord]]:
    """The record of each file of ``names``, without a hash if it cannot be read.

    Yields those that cannot be read, or differ from RECORD.
    """
    found = {name: _recorded(archive, name, None) for name in names}
    for name, each in found.items():
        row = rows.get(name)
        try:
            found[name] = FileRecord(each.size, _hash(archive, name, "sha256"))
            hashed = found[name].sha256
            if row and row.algorithm != "sha256":
                hashed = _hash(archive, name, row.algorithm)
        except DAMAGED_ARCHIVE as error:
            yield _problem(wheel, f"{name} cannot be read: {error}.", _AGAIN)
            continue
        if row and (hashed != row.digest or row.size not in (None, each.size)):
            yield _problem(wheel, f"{name} differs from RECORD.", _AGAIN)
    return found


def _recorded(archive: zipfile.ZipFile, name: str, row: _Row | None) -> FileRecord:
    """The record of a file by the archive's directory and its row of RECORD, if that has a sha256."""
    digest = row.digest if row and row.algorithm == "sha256" else ""
    return FileRecord(archive.getinfo(name).file_size, digest)


def _hash(archive: zipfile.ZipFile, name: str, algorithm: str) -> str:
    """The hash of a file in the archive in hex."""
    digest = hashlib.new(algorithm)
    with archive.open(name) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _differences(
    folder: PurePosixPath,
    recorded: Mapping[str, FileRecord],
    found: Mapping[str, FileRecord],
    location: str,
) -> Iterator[Problem]:
    """What differs between the files that a manifest records, and those of the archive in its ``folder``."""
    prefix = f"{folder}/" if folder.parts else ""
    inside = {
        name.removeprefix(prefix): each for name, each in found.items() if name.startswith(prefix)
    }
    for name, each in sorted(recorded.items()):
        if name not in inside:
            yield _problem(
                location,
                f"{name} is in the manifest, but not in the wheel.",
                "The build backend did not pack it: add it to the wheel's package data.",
            )
        elif inside[name] != each:
            yield _problem(location, f"{name} differs from its record in the manifest.")
    for name in sorted(inside.keys() - {*recorded, FILE}):
        yield _problem(
            location,
            f"{name} is in the wheel, but not in the manifest.",
            "Remove it from the project, or choose another folder for the models. If it is only in the build "
            "backend's folder build/, remove that, and build again.",
        )


def _problem(location: str, message: str, hint: str | None = None) -> Problem:
    return Problem(Kind.INVALID_WHEEL, location, message, hint)


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
