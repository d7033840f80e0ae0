"""Checks of a finished wheel, whoever packed it: its RECORD, and the model packages in it."""

from __future__ import annotations

import csv
import hashlib
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from hatch_epcontext.errors import Diagnosed, Kind, Problem
from hatch_epcontext.files import FileRecord
from hatch_epcontext.package import manifest, model_package
from hatch_epcontext.package.wheel import RecordRow, differences, record_row
from hatch_epcontext.text import listing, show

_RECORD = "RECORD"

_REQUIRED = ("METADATA", "WHEEL", _RECORD)
"""The files that each wheel has in its ``.dist-info`` folder."""

_NOT_RECORDED = (_RECORD, "RECORD.jws", "RECORD.p7s")
"""The files that RECORD need not describe: itself, and signatures of it."""

_CHUNK = 1 << 20


def check(
    path: Path, packages: Mapping[str, model_package.ModelPackage], *, is_wheel: bool
) -> Diagnosed[int]:
    """Read all files of the wheel at ``path``; yield a problem for each that is not as recorded.

    ``packages``: those in it, by folder. Each file must be as the wheel's RECORD has it, and the files
    of a package also as its manifest has them; the model file of each variant must exist. Returns the
    number of files that RECORD describes. Without ``is_wheel`` it is any other zip archive, which has no
    RECORD. Raises OSError and `zipfile.BadZipFile` if the archive cannot be opened.
    """
    with zipfile.ZipFile(path) as archive:
        names = Counter(name for name in archive.namelist() if not name.endswith("/"))
        for name, times in sorted(names.items()):
            if times > 1:
                yield _problem(path.name, f"{name} is in the archive {times} times.")
        rows: Mapping[str, RecordRow] = {}
        if is_wheel:
            rows = yield from _rows(archive, path.name, names)
        found = yield from _contents(archive, path.name, names, rows)
        for folder, package in packages.items():
            yield from _package_problems(path.name, folder, package, archive, found)
    return len(rows)


def _rows(
    archive: zipfile.ZipFile, wheel: str, names: Mapping[str, int]
) -> Diagnosed[Mapping[str, RecordRow]]:
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
    except (*model_package.DAMAGED_ARCHIVE, ValueError, csv.Error) as error:
        yield _problem(wheel, f"{folder}/{_RECORD} cannot be read: {error}.")
        return {}
    rows: dict[str, RecordRow] = {}
    for line in lines:
        if line and line[0] not in unrecorded:
            row = record_row(line)
            if row is None:
                yield _problem(wheel, f"RECORD has a row that cannot be read: {show(line)}.")
            else:
                rows[line[0]] = row
    for name in sorted(names.keys() - rows.keys() - unrecorded):
        yield _problem(
            wheel, f"{name} is in the wheel, but not in RECORD.", "Build the wheel again."
        )
    return rows


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
    archive: zipfile.ZipFile, wheel: str, names: Mapping[str, int], rows: Mapping[str, RecordRow]
) -> Diagnosed[dict[str, FileRecord]]:
    """The size and the sha256 of each file that can be read; yields those that differ from RECORD."""
    found: dict[str, FileRecord] = {}
    for name in names:
        row = rows.get(name)
        try:
            size, digests = _read(archive, name, {"sha256", row.algorithm if row else "sha256"})
        except model_package.DAMAGED_ARCHIVE as error:
            yield _problem(wheel, f"{name} cannot be read: {error}.", "Build the wheel again.")
            continue
        found[name] = FileRecord(size, digests["sha256"])
        if row and (digests[row.algorithm] != row.digest or row.size not in (None, size)):
            yield _problem(wheel, f"{name} differs from RECORD.", "Build the wheel again.")
    for name in sorted(rows.keys() - names.keys()):
        yield _problem(
            wheel, f"{name} is in RECORD, but not in the wheel.", "Build the wheel again."
        )
    return found


def _read(
    archive: zipfile.ZipFile, name: str, algorithms: set[str]
) -> tuple[int, Mapping[str, str]]:
    """The size in bytes of a file in the archive, and its hashes in hex."""
    hashes = {each: hashlib.new(each) for each in algorithms}
    size = 0
    with archive.open(name) as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            for each in hashes.values():
                each.update(chunk)
    return size, {name: each.hexdigest() for name, each in hashes.items()}


def _package_problems(
    wheel: str,
    folder: str,
    package: model_package.ModelPackage,
    archive: zipfile.ZipFile,
    found: Mapping[str, FileRecord],
) -> Iterator[Problem]:
    location = wheel if folder == "." else f"{wheel}: {folder}"
    about = manifest.ours(package.metadata, manifest.PackageMetadata)
    recorded = about.files if about else {}
    if about is not None:

        def sha256_of(name: str) -> str | None:
            return found[name].sha256 if name in found else None

        yield from differences(archive, PurePosixPath(folder), recorded, location, sha256_of)
    for file in model_files(package):
        if file not in recorded and str(PurePosixPath(folder, file)) not in found:
            yield _problem(location, f"{file} is the model of a variant, and not in the wheel.")


def model_files(package: model_package.ModelPackage) -> tuple[str, ...]:
    """The files that ONNX Runtime opens, as paths from the package's folder."""
    files = (
        variant.model_file
        for component in package.components.values()
        for variant in component.variants.values()
    )
    return tuple(dict.fromkeys(file for file in files if file))


def _problem(location: str, message: str, hint: str | None = None) -> Problem:
    return Problem(Kind.INVALID_WHEEL, location, message, hint)
