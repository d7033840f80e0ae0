"""The wheel: what Hatch packs, the package's place in it, its tag, models that are in it twice; and checks of
the finished one, whoever packed it.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ConfigError, Key, Kind, Problem, Setting, WheelError
from hatch_epcontext.files import FileRecord
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.package.manifest import FILE
from hatch_epcontext.text import listing, show_size, to_toml

FOLDER = "epcontext"
"""The name of the package's folder in the app's import package, by default."""

OUTPUT = Key() / "output"
"""The configuration key of the package's folder in the wheel."""

DAMAGED_ARCHIVE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
"""What `zipfile` raises for contents that it cannot read."""

_MAX_NAMED = 5
"""Of more files than this, a message gives the number."""

_RECORD = re.compile(r"[^/]+\.dist-info/RECORD")

_WARN_AT = 100 * 10**6
"""The size in bytes above which package indexes refuse a file by default."""

Tree = Mapping[str, Path]
"""Files that Hatch packs, by their path in the archive, with forward slashes."""


@dataclass(frozen=True)
class ProjectMetadata:
    """What the build back end knows of the project.

    ``dependencies`` are all, also those of extras. ``freezes``: it names hooks for PyInstaller.
    """

    name: str
    version: str
    license: str | None = None
    dependencies: tuple[str, ...] = ()
    freezes: bool = False


def selected_files(builder_config: Any) -> dict[str, Path]:
    """The files of the project that the settings of a target select, without what build hooks add."""
    selected = []
    # Hatch raises ValueError for a project that ships nothing but models.
    with contextlib.suppress(ValueError):
        selected = list(builder_config.builder.recurse_selected_project_files())
    return _tree(selected)


def packed_files(builder_config: Any, build_data: dict[str, Any]) -> dict[str, Path]:
    """The same with what settings force into the archive, and with what hooks have added until now."""
    with builder_config.set_build_data(build_data):
        files = selected_files(builder_config)
        for source, path in builder_config.get_force_include().items():
            # A later hook can make it.
            with contextlib.suppress(FileNotFoundError):
                files |= _tree(builder_config.builder.recurse_forced_files({source: path}))
    return files


def _tree(files: Any) -> dict[str, Path]:
    return {Path(file.distribution_path).as_posix(): Path(file.path) for file in files}


def output_folder(configured: PurePosixPath | None, tree: Tree) -> PurePosixPath:
    """The package's folder in the wheel.

    By default ``<import package>/epcontext``, inside the outermost import package of the wheel. Raises
    ConfigError if there is none, or if there are several.
    """
    if configured is not None:
        return configured
    outermost = sorted(map(str, import_packages(tree)))
    if len(outermost) != 1:
        packages = (
            f"several import packages ({listing(outermost)})" if outermost else "no import package"
        )
        message = f"the key is missing, and the wheel has {packages}."
        hint = 'Name a folder for the models in the wheel, such as "my_app/epcontext".'
        raise ConfigError(
            Problem.at(OUTPUT, Kind.NO_OUTPUT_PACKAGE, message, hint, Setting(OUTPUT))
        )
    return PurePosixPath(outermost[0], FOLDER)


def import_packages(tree: Tree) -> set[PurePosixPath]:
    """The outermost import packages in the wheel."""
    packages = {PurePosixPath(path).parent for path in tree if path.endswith("/__init__.py")}
    return {package for package in packages if packages.isdisjoint(package.parents)}


def check_collisions(output: PurePosixPath, tree: Tree, ours: frozenset[str]) -> None:
    """Raise ConfigError if the project has files of its own in the package's folder.

    ``ours``: files in the project that an earlier editable install wrote, as paths in the wheel.
    """
    collisions = sorted(
        path
        for path in tree
        if path not in ours
        and (PurePosixPath(path).is_relative_to(output) or path == f"{output}.py")
    )
    if collisions:
        folder = f"{output}/epcontext" if len(output.parts) == 1 else None
        message = (
            f'the project has files of its own in "{output}": {listing(collisions, _MAX_NAMED)}.'
        )
        hint = "Choose a folder for the models alone."
        raise ConfigError(
            Problem.at(OUTPUT, Kind.NO_OUTPUT_PACKAGE, message, hint, Setting(OUTPUT, folder))
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
    if not platforms or not all(platforms) or any("any" in names for names in platforms):
        return None
    return f"py3-none-{'.'.join(sorted(set().union(*platforms)))}"


def unused_platforms(config: Config) -> str | None:
    """A line if ``platforms`` do not change the wheel's tag, because only some targets have them."""
    elsewhere = {target.name for target in config.targets if not target.platforms}
    if config.wheel.tag != "auto" or not elsewhere or not any(t.platforms for t in config.targets):
        return None
    names = listing(sorted(elsewhere))
    return (
        f'the wheel\'s tag stays "any", or that of the build back end: {names} '
        f"{'has' if len(elsewhere) == 1 else 'have'} no platforms"
    )


def repeated_models(result: Result, tree: Tree, selected: Tree, root: Path) -> Iterator[str]:
    """Warnings about the files of source models that are also package data of the project in ``root``.

    ``selected``: those files of ``tree`` that Hatch selects, and no build hook adds.
    """
    # Who ships a model in another way says so.
    shipped = {
        file.resolve()
        for source in result.sources
        if source.model.fallback != "none"
        for file in source.users_files
    }
    repeated = {name: path for name, path in tree.items() if path.resolve() in shipped}
    excluded = [path for name, path in repeated.items() if name in selected]
    exclude = to_toml([path.relative_to(root).as_posix() for path in excluded])
    for names, how in (
        (
            repeated.keys() & selected.keys(),
            f"Exclude them (exclude = {exclude} in [tool.hatch.build.targets.wheel])",
        ),
        (
            repeated.keys() - selected.keys(),
            "Leave them out where they are added (as package data, by a build hook, or by force-include)",
        ),
    ):
        if names:
            files = [f"{n} ({show_size(repeated[n].stat().st_size)})" for n in sorted(names)]
            yield (
                f"models are in the wheel as package data, beside what is shipped of them: {listing(files)}. "
                f"{how} if the app opens them only through the loader; otherwise set "
                'fallback = "none" for them.'
            )


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
            hint = "Build the wheel again, and change none of its models' files afterwards."
            yield Problem(Kind.INVALID_WHEEL, location, message, hint)
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


def check_size(archive: Path) -> str | None:
    """A warning about a large wheel or sdist; None for one that is not large."""
    size = archive.stat().st_size
    if size <= _WARN_AT:
        return None
    remedy = (
        "ship fewer targets" if archive.suffix == ".whl" else "let builds download models (url)"
    )
    return (
        f"{archive.name} has {show_size(size)}. By default package indexes accept files of up to "
        f"{show_size(_WARN_AT)}: request a higher limit, or {remedy}."
    )
