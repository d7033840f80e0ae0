"""The package in the wheel: its place, the wheel's tag, and checks of the finished wheel."""

from __future__ import annotations

import base64
import contextlib
import csv
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from hatch_epcontext.config.settings import Config, Model
from hatch_epcontext.errors import (
    ConfigError,
    Key,
    Kind,
    Problem,
    Setting,
    WheelError,
    collect,
)
from hatch_epcontext.files import FileRecord, file_sha256, stream_sha256
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.package import manifest, model_package
from hatch_epcontext.package.selection import Tree
from hatch_epcontext.text import count, listing, show_size

FOLDER = "epcontext"
"""The name of the package's folder in the app's import package, by default."""

OUTPUT = Key() / "output"
"""The configuration key of the package's folder in the wheel."""

_RECORD = re.compile(r"[^/]+\.dist-info/RECORD")
_ALGORITHMS = ("sha256", "sha384", "sha512")
"""The hashes that the format of wheels allows, as far as Python has them everywhere."""

_MAX_NAMED = 5
"""Of more files than this, a message gives the number."""

_MAX_SIZE = Key() / "wheel" / "max-size"
"""The configuration key of the wheel's maximum size."""


def output_folder(configured: PurePosixPath | None, tree: Tree) -> PurePosixPath:
    """The package's folder in the wheel.

    By default ``<import package>/epcontext``, inside the outermost import package of the wheel. Raises
    ConfigError if there is none, or if there are several.
    """
    if configured is not None:
        return configured
    outermost = sorted(map(str, import_packages(tree)))
    if len(outermost) != 1:
        found = (
            f"several import packages ({listing(outermost)})" if outermost else "no import package"
        )
        raise ConfigError(
            Problem.at(
                OUTPUT,
                Kind.NO_OUTPUT_PACKAGE,
                f"the key is missing, and the wheel has {found}.",
                'Name a folder for the models in the wheel, such as "my_app/epcontext".',
                Setting(OUTPUT),
            )
        )
    return PurePosixPath(outermost[0], FOLDER)


def import_packages(tree: Tree) -> set[PurePosixPath]:
    """The outermost import packages in the wheel."""
    packages = {PurePosixPath(path).parent for path in tree if path.endswith("/__init__.py")}
    return {each for each in packages if packages.isdisjoint(each.parents)}


def check_collisions(output: PurePosixPath, tree: Tree, ours: frozenset[str]) -> None:
    """Raise ConfigError if the project has files of its own in the package's folder.

    ``ours``: files in the project that an earlier editable install wrote, as paths in the wheel.
    """
    taken = sorted(
        path
        for path in tree
        if path not in ours
        and (PurePosixPath(path).is_relative_to(output) or path == f"{output}.py")
    )
    if taken:
        folder = f"{output}/epcontext" if len(output.parts) == 1 else None
        raise ConfigError(
            Problem.at(
                OUTPUT,
                Kind.NO_OUTPUT_PACKAGE,
                f'the project has files of its own in "{output}": {listing(taken, _MAX_NAMED)}.',
                "Choose a folder for the models alone.",
                Setting(OUTPUT, folder),
            )
        )


def tag(config: Config) -> str | None:
    """The wheel's tag, or None to leave it to Hatch.

    It names the platforms that the models are for, not the one that compiled them: ``"auto"`` joins the
    platforms of all targets, and leaves the tag to Hatch if one target is for any platform.
    """
    if config.wheel.tag == "any":
        return "py3-none-any"
    if config.wheel.tag != "auto":
        return config.wheel.tag
    platforms = [target.platforms for target in config.targets]
    if not platforms or not all(platforms) or any("any" in each for each in platforms):
        return None
    return f"py3-none-{'.'.join(sorted({p for each in platforms for p in each}))}"


def verify(wheel: Path, output: PurePosixPath) -> int:
    """Read the package at ``output`` in a finished wheel, and compare it with its own manifest.

    Returns the number of files in the manifest. Raises WheelError if one is missing or differs, or if
    the wheel has a file that is not in the manifest.
    """
    with _opened(wheel, output) as (archive, location):
        files = model_package.ArchiveFiles(archive, output)
        package, invalid = collect(model_package.read(files, location))
        about = manifest.ours(package.metadata, manifest.PackageMetadata) if package else None
        if invalid or about is None:
            message = f"{model_package.FILE} has no record of its files."
            raise WheelError(*invalid or [Problem(Kind.INVALID_WHEEL, location, message)])
        _compare(archive, output, about.files, location, partial(_sha256, archive))
    return len(about.files)


def verify_record(wheel: Path, output: PurePosixPath, files: Mapping[str, FileRecord]) -> int:
    """Compare the package at ``output`` in a finished wheel with ``files``, without reading them.

    Sizes are those of the archive's directory, and hashes those of the wheel's RECORD, which whoever
    packed it made of what was written. Returns the number of files, without the manifest. Raises
    WheelError if one is missing or differs, or if the wheel has another file there.
    """
    with _opened(wheel, output) as (archive, location):
        _compare(archive, output, files, location, _record(archive).get)
    return len(files) - 1


@contextlib.contextmanager
def _opened(wheel: Path, output: PurePosixPath) -> Iterator[tuple[zipfile.ZipFile, str]]:
    """The archive, which has a manifest at ``output``, and what problems are about; raises WheelError."""
    location = f"{wheel.name}: {output}"
    with zipfile.ZipFile(wheel) as archive:
        if str(output / model_package.FILE) not in archive.namelist():
            message = f"{model_package.FILE} is missing."
            raise WheelError(Problem(Kind.INVALID_WHEEL, location, message))
        yield archive, location


def _compare(
    archive: zipfile.ZipFile,
    output: PurePosixPath,
    files: Mapping[str, FileRecord],
    location: str,
    sha256_of: Callable[[str], str | None],
) -> None:
    """Raise WheelError unless the archive has exactly ``files`` at ``output``."""
    if problems := list(differences(archive, output, files, location, sha256_of)):
        raise WheelError(*problems)


def differences(
    archive: zipfile.ZipFile,
    output: PurePosixPath,
    files: Mapping[str, FileRecord],
    location: str,
    sha256_of: Callable[[str], str | None],
) -> Iterator[Problem]:
    """What differs between ``files``, as a manifest records them, and those of the archive at ``output``.

    ``sha256_of``: the hex sha256 of a file in the archive, by its whole name.
    """
    prefix = f"{output}/" if output.parts else ""
    inside = {name for name in archive.namelist() if name.startswith(prefix) and name[-1:] != "/"}
    for name, recorded in sorted(files.items()):
        path = prefix + name
        if path not in inside:
            yield Problem(
                Kind.INVALID_WHEEL,
                location,
                f"{name} is in the manifest, but not in the wheel.",
                "The build backend did not pack it: add it to the wheel's package data.",
            )
        elif FileRecord(archive.getinfo(path).file_size, sha256_of(path) or "") != recorded:
            message = f"{name} differs from its record in the manifest."
            yield Problem(Kind.INVALID_WHEEL, location, message)
    for path in sorted(inside - {prefix + name for name in (*files, model_package.FILE)}):
        yield Problem(
            Kind.INVALID_WHEEL,
            location,
            f"{path.removeprefix(prefix)} is in the wheel, but not in the manifest.",
            "Remove it from the project, or choose another folder for the models.",
        )


def _record(archive: zipfile.ZipFile) -> dict[str, str]:
    """The hex sha256 of each file that the wheel's RECORD has."""
    path = next(filter(_RECORD.fullmatch, archive.namelist()), None)
    if path is None:
        return {}
    lines = archive.read(path).decode("utf-8", "replace").splitlines()
    rows = ((line[0], record_row(line)) for line in csv.reader(lines) if line)
    return {name: row.digest for name, row in rows if row and row.algorithm == "sha256"}


@dataclass(frozen=True)
class RecordRow:
    """A row of RECORD: the file's hash in hex, and its size in bytes; None if that is left out."""

    algorithm: str
    digest: str
    size: int | None


def record_row(line: list[str]) -> RecordRow | None:
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
    return RecordRow(algorithm, digest.hex(), int(line[2]) if line[2] else None)


def repeated_models(
    result: Result, shipped: Collection[str], tree: Tree, selected: Tree, root: Path
) -> Iterator[str]:
    """A warning for each file of a source model that the wheel also holds as package data.

    ``shipped``: the names of the models whose sources are in the package; ``root``: the project.
    ``selected``: those files of the wheel that Hatch selects, and no build hook adds.
    """
    sizes: dict[int, list[tuple[str, Path]]] = {}
    for name, path in tree.items():
        sizes.setdefault(path.stat().st_size, []).append((name, path))
    # The shapes of one model have one source.
    sources = {source.model.path: source for source in result.sources}
    for source in sources.values():
        # Who ships the model in another way says so.
        for file in source.files if source.model.fallback != "none" else ():
            size = file.stat().st_size
            for name, path in sizes.get(size, ()):
                if _is_same_file(path, file):
                    inside = path.is_relative_to(root)
                    pattern = path.relative_to(root).as_posix() if inside else name
                    again = source.model.name in shipped
                    exclude = (
                        f'Exclude it (exclude = ["{pattern}"] in [tool.hatch.build.targets.wheel])'
                        if name in selected
                        else "Leave it out where it is added (by a build hook, or by force-include)"
                    )
                    yield _repeated(name, size, exclude, source.model, again=again)


def _is_same_file(path: Path, file: Path) -> bool:
    return path.samefile(file) or file_sha256(path) == file_sha256(file)


def _repeated(name: str, size: int, exclude: str, model: Model, *, again: bool) -> str:
    what = f"{name} ({show_size(size)}) is in the wheel as package data"
    if again:
        return (
            f"{what}, and again as the source of the model {model.configured_name}. {exclude}, or set "
            'fallback = "none" for that model.'
        )
    return (
        f"{what}, beside the compiled models of {model.configured_name}. {exclude} if the app opens it "
        'only through the loader; otherwise set fallback = "none" for that model.'
    )


_WARN_AT = 100 * 10**6
"""The size in bytes above which package indexes refuse a wheel by default."""

_LARGEST = 10
"""How many files the message about a large wheel lists."""


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


def _sha256(archive: zipfile.ZipFile, name: str) -> str:
    """The hex sha256 of a file in the archive; empty if it cannot be read."""
    with contextlib.suppress(*model_package.DAMAGED_ARCHIVE), archive.open(name) as file:
        return stream_sha256(file)
    return ""
