"""The wheel: what Hatch packs, where the package is in it, its tag, models that are in it twice, what its
metadata must allow; and checks of the finished one, whoever packed it.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import itertools
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from email.parser import Parser
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from hatch_epcontext.config.settings import Config, Target
from hatch_epcontext.errors import ConfigError, Key, Kind, Problem, Setting
from hatch_epcontext.files import RENAME, FileRecord, is_text
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.requirements import installed, oldest_releases
from hatch_epcontext.package.external_data import model_files
from hatch_epcontext.package.manifest import FILE
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS
from hatch_epcontext.text import MAX_NAMED, listing, show_size, to_toml

FOLDER = "epcontext"
"""The name of the package's folder in the app's import package, by default."""

OUTPUT = Key() / "output"
"""The configuration key of the package's folder in the wheel."""

DAMAGED_ARCHIVE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
"""What `zipfile` raises for contents that it cannot read."""

_MAX_MINOR = 40
"""Above the number of any minor release of ONNX Runtime or an EP."""

_RECORD = re.compile(r"[^/]+\.dist-info/RECORD")

MAX_SIZE = 100 * 10**6
"""The size in bytes above which package indexes reject a file by default (PyPI's documentation, "Storage
limits").
"""

Tree = Mapping[str, Path]
"""Files that Hatch packs, by their path in the archive, with forward slashes."""


@dataclass(frozen=True)
class ProjectMetadata:
    """What the build back end knows of the project.

    ``dependencies`` are all, those of extras with their markers. ``freezes``: it names hooks for PyInstaller.
    ``requires_python``: None if it is unknown.
    """

    name: str
    version: str
    license: str | None = None
    dependencies: tuple[str, ...] = ()
    freezes: bool = False
    requires_python: str | None = None

    @classmethod
    def read(cls, metadata: str, *, freezes: bool = False) -> ProjectMetadata:
        """What METADATA says."""
        fields = Parser().parsestr(metadata)
        dependencies = tuple(fields.get_all("Requires-Dist", []))
        about = fields["Name"], fields["Version"], fields["License-Expression"]
        return cls(*about, dependencies, freezes, fields["Requires-Python"] or "")


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


def check_names(tree: Tree) -> None:
    """Raise ConfigError for names that no wheel has: hatchling would fail after everything is compiled."""
    message = "has a name that is not UTF-8, which no wheel can have."
    names = [name for name in tree if not is_text(Path(name))]
    problems = [Problem(Kind.UNREADABLE_FILE, name, message, RENAME) for name in names]
    ConfigError.check(problems)


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
        raise output_error(message, hint, Setting(OUTPUT))
    return PurePosixPath(outermost[0], FOLDER)


def output_error(message: str, hint: str, *settings: Setting) -> ConfigError:
    """The error of a folder that the package cannot have."""
    return ConfigError(Problem.at(OUTPUT, Kind.NO_OUTPUT_PACKAGE, message, hint, *settings))


def import_packages(tree: Tree) -> set[PurePosixPath]:
    """The outermost import packages in the wheel."""
    packages = {PurePosixPath(path).parent for path in tree if path.endswith("/__init__.py")}
    return {package for package in packages if packages.isdisjoint(package.parents)}


def check_collisions(output: PurePosixPath, tree: Tree, own: frozenset[str]) -> None:
    """Raise ConfigError if the project has files of its own in the package's folder.

    ``own``: files in the project that an earlier editable install wrote, as paths in the wheel.
    """
    collisions = sorted(
        path
        for path in tree
        if path not in own
        and (PurePosixPath(path).is_relative_to(output) or path == f"{output}.py")
    )
    if collisions:
        folder = f"{output}/epcontext" if len(output.parts) == 1 else None
        message = (
            f'the project has files of its own in "{output}": {listing(collisions, MAX_NAMED)}.'
        )
        hint = "Choose a folder that has only the models."
        raise output_error(message, hint, Setting(OUTPUT, folder))


def tag(config: Config) -> str | None:
    """The wheel's tag, or None to leave it to Hatch.

    It names the platforms that the models are for, not the one that compiled them: ``"auto"`` joins the
    platforms of all targets, and leaves the tag to Hatch if one target is for any platform.
    """
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


def repeated_models(result: Result, tree: Tree, backend: str, root: Path) -> str | None:
    """A warning about the files of source models that ``backend`` packs too, as package data."""
    # Who ships a model in another way says so.
    shipped = {
        file.resolve()
        for source in result.sources
        if source.model.fallback != "none"
        for file in source.users_files
    }
    repeated = {name: path for name, path in tree.items() if path.resolve() in shipped}
    if not repeated:
        return None
    files = [
        f"{name} ({show_size(path.stat().st_size)})" for name, path in sorted(repeated.items())
    ]
    advice = excluding(backend, root, repeated)
    return (
        f"models are in the wheel as package data, beside what is shipped of them: {listing(files)}. "
        f"If the app opens them only through the loader, leave them out: {advice}. "
        'Otherwise set fallback = "none" for them.'
    )


def excluding(backend: str, root: Path, files: Tree) -> str:
    """How ``backend`` leaves ``files`` of the project in ``root`` out of a wheel."""
    own = sorted(
        file.relative_to(root).as_posix() if file.is_relative_to(root) else name
        for name, file in files.items()
    )
    names = sorted({PurePosixPath(name).name for name in files})
    inside = sorted({*names, *(name.partition("/")[2] or name for name in files)})
    advice = {
        "hatchling": (
            f"exclude = {to_toml(own)} in [tool.hatch.build.targets.wheel], unless a build hook or "
            "force-include adds them"
        ),
        "setuptools": (
            f"{_of_setuptools(root, inside)}, and remove the folder build/ with those of earlier builds. "
            "Without this key MANIFEST.in and an old *.egg-info/SOURCES.txt also add them"
        ),
        "poetry": f"exclude = {to_toml(own)} in [tool.poetry]",
        "pdm": f"excludes = {to_toml(own)} in [tool.pdm.build]",
        "uv_build": f"wheel-exclude = {to_toml(names)} in [tool.uv.build-backend]",
        "maturin": f"exclude = {to_toml([{'path': f, 'format': 'wheel'} for f in own])} in [tool.maturin]",
        "scikit_build_core": f"wheel.exclude = {to_toml(sorted(files))} in [tool.scikit-build]",
        "mesonpy": "remove them from what meson.build installs (install_subdir has exclude_files)",
        "flit_core": "move them out of the import package, of which flit packs all files",
    }
    return advice.get(backend.partition(".")[0], "where your build back end adds them")


def _of_setuptools(root: Path, files: list[str]) -> str:
    """The key for the project in ``root`` that leaves out ``files`` of any import package."""
    # A table of setuptools in pyproject.toml needs one with the project's version.
    if (root / "setup.py").is_file():
        return f"exclude_package_data={ {'': files} } in setup.py"
    if (root / "setup.cfg").is_file():
        return f"* = {', '.join(files)} below [options.exclude_package_data] in setup.cfg"
    return f"exclude-package-data = {to_toml({'*': files})} in [tool.setuptools]"


def check_app(targets: Iterable[Target], dependencies: Iterable[str]) -> None:
    """Raise ConfigError if the app's ``dependencies`` exclude the EPs that run what a library compiles."""
    problems = {}
    for target in targets:
        if (start := _release_of_ep(target)) is None:
            # Nobody knows which EP is of this release of the library.
            continue
        packages = frozenset[str]().union(*PROVIDERS[target.provider.name].conflicts)
        for dependency in map(Requirement, dependencies):
            name = canonicalize_name(dependency.name)
            # Those that it names may be pre-releases, for example.
            named = [part.version for part in dependency.specifier]
            own = [version for version in named if version.startswith(f"{start}.")]
            releases = (f"{start}.{number}" for number in range(100))
            fits = partial(dependency.specifier.contains, prereleases=True)
            if name in packages and not any(map(fits, (*own, *releases))):
                release = f"{name}=={start}.*"
                message = f"the project depends on {dependency}, and only {release} runs what is compiled."
                problems[target.name, name] = Problem.at(
                    target.key, Kind.CONFLICTING_REQUIREMENTS, message, f"Depend on {release}."
                )
    ConfigError.check(problems.values())


def loose_bounds(
    targets: Iterable[Target], dependencies: Iterable[str], requires_python: str | None
) -> Iterator[str]:
    """A line for each bound of the app's metadata that allows what opens no model, or only the CPU's."""
    if requires_python is not None:
        python, old = SpecifierSet(requires_python), [f"3.{minor}.99" for minor in range(6, 10)]
        if any(python.contains(version) for version in old):
            allows = "without requires-python the metadata allow"
            if requires_python:
                allows = f"requires-python ({requires_python}) allows"
            yield (
                f"{allows} versions of Python that cannot import the loader. "
                'Write: requires-python = ">=3.10"'
            )
    oldest = [(target, oldest_releases(target)) for target in targets]
    for requirement in _loosest(map(Requirement, dependencies)):
        missed = {
            target.name: bound
            for target, releases in oldest
            if (bound := releases.get(canonicalize_name(requirement.name)))
            and _allows_older(requirement, bound)
            and _is_for(requirement, target)
        }
        if missed:
            yield (
                f"the dependency {requirement} allows releases that cannot open what is compiled for "
                f"{listing(missed)}: there the app always gets the CPU. "
                f"Write: {requirement.name}>={max(missed.values())}"
            )


def _loosest(dependencies: Iterable[Requirement]) -> list[Requirement]:
    """Those without an extra, and of extras those of packages that only they name."""
    packages: dict[str, list[Requirement]] = {}
    for dependency in dependencies:
        name = canonicalize_name(dependency.name)
        package = DISTRIBUTIONS[0] if name in DISTRIBUTIONS else name
        packages.setdefault(package, []).append(dependency)
    # An extra may be what brings the newer release.
    loosest = [
        [r for r in listed if "extra" not in str(r.marker)] or listed
        for listed in packages.values()
    ]
    return [requirement for requirements in loosest for requirement in requirements]


def _allows_older(requirement: Requirement, bound: Version) -> bool:
    """Whether it allows a release before ``bound``."""
    # From the major release before: those of a year are too many for all.
    majors = range(max(bound.major - 1, 0), bound.major + 1)
    numbers = itertools.product(majors, range(_MAX_MINOR), range(9))
    older = (Version(f"{x}.{y}.{z}") for x, y, z in numbers if (x, y, z) < bound.release)
    return any(requirement.specifier.contains(release, prereleases=True) for release in older)


def _is_for(requirement: Requirement, target: Target) -> bool:
    """Whether its marker can be true with a Python that has the loader and the target's EP."""
    # Requirements of the user's own say nothing of it.
    oldest = 10 if target.requirements is not None else target.provider.python[1]
    versions = [f"3.{minor}" for minor in range(oldest, 20)]
    extras = re.findall(r"extra == .([^\"']+)", str(requirement.marker)) or [""]
    return requirement.marker is None or any(
        requirement.marker.evaluate(
            {"python_version": version, "python_full_version": f"{version}.0", "extra": extra}
        )
        for version in versions
        for extra in extras
    )


def _release_of_ep(target: Target) -> str | None:
    """The release of the EP that runs what the installed library compiles for ``target``, if it is known."""
    library = target.provider.compiler_library if target.provider.by_library else None
    if library is None:
        return None
    release = installed(Requirement(library.requirements[0]).name) or ""
    known = library.ep_versions.items()
    return next((ep for start, ep in known if release.startswith(start)), None)


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
            hint = "The build back end did not pack it: add it to the wheel's package data."
            yield Problem(Kind.INVALID_WHEEL, location, message, hint)
        elif packed[name] != record:
            message = f"{name} differs from its record in the manifest."
            hint = "Build the wheel again, and change none of its models' files afterwards."
            yield Problem(Kind.INVALID_WHEEL, location, message, hint)
    for name in sorted(packed.keys() - {*files, FILE}):
        message = f"{name} is in the wheel, but not in the manifest."
        hint = (
            "Remove it from the project, or choose another folder for the models. If it is only in the build "
            "backend's folder build/, remove that, and build again."
        )
        yield Problem(Kind.INVALID_WHEEL, location, message, hint)


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


def check_models(config: Config) -> str | None:
    """A warning before compiling about models that are too large for a wheel; None for others."""
    files = set[Path]()
    for model in config.models:
        if model.targets or model.fallback != "none":
            beside = model.genai.beside if model.genai else ()
            others = (model.path.parent / name for name in beside)
            files.update(model_files(model.path), filter(Path.is_file, others))
    size = sum(file.stat().st_size for file in files)
    if size <= MAX_SIZE:
        return None
    return (
        f"the models for this wheel have {show_size(size)}, and what is compiled has their weights again. "
        f"Package indexes accept {show_size(MAX_SIZE)} a file: put targets and source models into companion "
        "wheels (companion)."
    )


def check_size(archive: Path) -> str | None:
    """A warning about a large wheel or sdist; None for one that is not large."""
    size = archive.stat().st_size
    if size <= MAX_SIZE:
        return None
    remedy = "let builds download models (url)"
    if archive.suffix == ".whl":
        remedy = "put targets into companion wheels (companion)"
    return (
        f"{archive.name} has {show_size(size)}. By default package indexes accept files of up to "
        f"{show_size(MAX_SIZE)}: request a higher limit, or {remedy}."
    )
