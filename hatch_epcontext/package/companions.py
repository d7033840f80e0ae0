"""Companion wheels: how the app's extras pin them, their wheels, and those that were published before.

A companion is a whole, portable model package in an import package of its own. hatchling writes its wheel.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import (
    ConfigError,
    DownloadError,
    InspectionError,
    Key,
    Kind,
    Problem,
    RequirementError,
)
from hatch_epcontext.files import MAX_BYTES, file_sha256, temp_dir
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.artifact import Source
from hatch_epcontext.jobs.plan import jobs_of
from hatch_epcontext.jobs.requirements import GENAI, TOOLS, WINDOWS_ML
from hatch_epcontext.package.bundle import Bundle
from hatch_epcontext.package.folder import read
from hatch_epcontext.package.manifest import FILE
from hatch_epcontext.package.wheel import DAMAGED_ARCHIVE, ProjectMetadata, tag
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS
from hatch_epcontext.remote.index import IndexFile, files_of
from hatch_epcontext.remote.web import download
from hatch_epcontext.serialize import to_plain, value_sha256
from hatch_epcontext.shipped import METADATA
from hatch_epcontext.text import listing, near_name, to_toml

# In another process: back ends run code of the project.
_PREPARE = """
import sys, hatch_epcontext.backend
hatch_epcontext.backend.prepare_metadata_for_build_wheel(sys.argv[1])
"""


@dataclass(frozen=True)
class Companion:
    """A companion, of the ``version`` that the app pins; ``requirement`` installs it with the app.

    ``module``: its import package; ``key``: where the configuration names it.
    """

    name: str
    module: str
    version: str
    requirement: str
    key: Key


def project_metadata(root: Path, table: Mapping[str, Any], *, by_hatch: bool) -> ProjectMetadata:
    """What METADATA of the project in ``root`` says; ``table`` is its ``[project]``.

    Raises ConfigError if hatchling cannot read it, and RequirementError if only another build back end knows
    it, and cannot be asked.
    """
    if by_hatch or "optional-dependencies" in table:
        from hatchling.builders.wheel import WheelBuilder

        names = ("name", "dependencies", "optional-dependencies")
        static = {"version": "0", **{name: table[name] for name in names if name in table}}
        builder = WheelBuilder(str(root), config=None if by_hatch else {"project": static})
        try:
            text = builder.config.core_metadata_constructor(builder.metadata)
        except Exception as error:
            # Of any kind: hatchling runs plugins of the project.
            message = f"hatchling cannot read the project: {error}."
            raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(root), message)) from error
        return ProjectMetadata.read(text)
    with temp_dir() as folder:
        command = [sys.executable, "-c", _PREPARE, str(folder)]
        # Other programs may print in any encoding.
        done = subprocess.run(
            command, cwd=root, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
        for file in folder.glob("*.dist-info/METADATA"):
            return ProjectMetadata.read(file.read_text(encoding="utf-8"))
    message = "only the build back end knows the extras of the project, and it does not say them."
    hint = "Install what [build-system] requires into this environment."
    log = (done.stdout + done.stderr)[-2000:]
    raise RequirementError(Problem(Kind.MISSING_REQUIREMENT, str(root), message, hint, log=log))


def pinned(config: Config, project: ProjectMetadata, package: str = "") -> list[Companion]:
    """All companions of ``config``, as the app ``project`` with the import package ``package`` pins them.

    Raises ConfigError for those that it does not pin, or whose names others have, and for models of one
    sidecar in several wheels.
    """
    jobs_of(config)
    companions, problems = list[Companion](), list[Problem]()
    named: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, project.dependencies):
        named.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    for name, key in config.companions.items():
        own, marker, module = named.get(name, []), _marker(config.of_wheel(name)), _module(name)
        extras = [extra for requirement in own for extra in _extras(requirement)]
        versions = [s.version.removesuffix(".*") for r in own for s in r.specifier] or ["1"]
        install = f"{project.name}[{extras[0]}]" if extras else project.name
        near = near_name(name, named.keys() - config.companions.keys()) if not own else None
        hint = " ".join(filter(None, (near, _line(name, versions[0], marker, extras, project))))
        if owner := _owner(name, own, config, project, package):
            message, hint = f"{owner}.", "Give the companion another name."
        else:
            message = _wrong_pin(own, marker)
        if message:
            problems.append(Problem.at(key, Kind.INVALID_COMPANION, f"{name} {message}", hint))
        else:
            companions.append(Companion(name, module, versions[0], install, key))
    ConfigError.check(problems)
    return companions


def _module(name: str) -> str:
    """The import package of a companion."""
    return name.replace("-", "_")


def _extras(requirement: Requirement) -> list[str]:
    """The extras of the app that have ``requirement``."""
    # packaging has no other access to the parts of a marker.
    return re.findall(r'extra == "([^"]+)"', str(requirement.marker))


def _pin(requirement: Requirement) -> str | None:
    """The only version that ``requirement`` takes, by ==; else None."""
    specifiers = [*requirement.specifier]
    is_pin = len(specifiers) == 1 and specifiers[0].operator == "=="
    return specifiers[0].version if is_pin and specifiers[0].version[-1] != "*" else None


def _line(name: str, version: str, marker: str, extras: list[str], project: ProjectMetadata) -> str:
    """What to write in the app's ``pyproject.toml``."""
    text = f"{name}=={version}" + (f"; {marker}" if marker else "")
    app = canonicalize_name(project.name)
    extra = extras[0] if extras else name.removeprefix(f"{app}-").removeprefix("models-")
    return f"Write in [project.optional-dependencies]: {extra} = {to_toml([text])}"


def _wrong_pin(own: list[Requirement], marker: str) -> str:
    """What is wrong with the requirements of a companion, which is for the machines of ``marker``."""
    pins = set(map(_pin, own))
    if not own:
        return "is not pinned by any extra of the app, and could not be installed with it."
    if len(pins) > 1 or None in pins:
        others = listing(str(requirement.specifier) or "any" for requirement in own)
        return f"must be pinned with == to one version, by which it is built, not {others}."
    if marker and not all(re.search("platform|os_name", str(r.marker)) for r in own):
        return "is for some platforms only, and without a marker the extra is for all."
    return ""


def _owner(
    name: str, own: list[Requirement], config: Config, project: ProjectMetadata, package: str
) -> str:
    """Who has the name of a companion already, as a distribution or an import package; empty for nobody.

    ``own``: the app's requirements of that name.
    """
    module = _module(name)
    if name == canonicalize_name(project.name) or module == package:
        return "is the app itself, or its package"
    if module in sys.stdlib_module_names:
        return "is a module of Python's standard library"
    providers = [*PROVIDERS.values(), *(target.provider for target in config.targets)]
    plugins = [provider.plugin for provider in providers if provider.plugin]
    runtime = [*DISTRIBUTIONS, *TOOLS, *GENAI, WINDOWS_ML, *(plugin.package for plugin in plugins)]
    runtime += (r for provider in providers for r in provider.requirements)
    runtime += (r for target in config.targets for r in target.requirements or ())
    runtimes = {canonicalize_name(Requirement(text).name) for text in filter(None, runtime)}
    modules = {_module(runtime) for runtime in runtimes} | {plugin.module for plugin in plugins}
    if name in runtimes or module in modules:
        return "is a package that opens or compiles models"
    outside = [requirement for requirement in own if not _extras(requirement)]
    if outside and (len(outside) < len(own) or None in map(_pin, outside)):
        return "is a dependency of the app"
    return "is another package, which is installed here" if _is_installed(name, module) else ""


def _is_installed(name: str, module: str) -> bool:
    """Whether a package that is no companion has this ``name``, or the import package ``module``."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        record = metadata.distribution(name).read_text("RECORD") or ""
        if f"{module}/{FILE}," not in record:
            return True
    spec = importlib.util.find_spec(module)
    if spec is None:
        return False
    if spec.origin is None:
        # A folder without __init__.py may be any one, or that of several packages.
        # `packages_distributions` of Python 3.10 does not look at the files.
        files = (file for owner in metadata.distributions() for file in owner.files or ())
        return any(file.parts[0] == module for file in files)
    return not Path(spec.origin).with_name(FILE).is_file()


def _tag(config: Config) -> str:
    """The tag of the companion with the models of ``config``: a source is for any machine."""
    has_source = any(model.fallback == "source" for model in config.models)
    return (None if has_source else tag(config)) or "py3-none-any"


def _marker(config: Config) -> str:
    """The marker for the machines that the wheel of ``config`` is for; empty for all."""
    parts = dict[str, None]()
    for platform in _tag(config).rpartition("-")[2].split("."):
        names = {"any": "", "win": "win32", "mac": "darwin", "and": "android", "ios": "ios"}
        system = names.get(platform[:3], "linux")
        machine = re.search("(x86_64|aarch64|amd64|arm64)?$", platform)
        own = machine[0].upper() if machine and system == "win32" else machine and machine[0]
        both = [f"sys_platform == '{system}'", *([f"platform_machine == '{own}'"] if own else [])]
        parts[" and ".join(both) if system else ""] = None
    return " or ".join(f"({part})" if len(parts) > 1 else part for part in parts)


def write_wheel(
    companion: Companion,
    app: str,
    config: Config,
    sources: Iterable[Source],
    package: Bundle,
    sbom: Path | None,
    folder: Path,
) -> Path:
    """Write the wheel of ``companion`` of ``app``, with the models of ``config``, into ``folder``."""
    from hatchling.builders.wheel import WheelBuilder

    from hatch_epcontext.package.repack import FinishedWheel

    about = f"Models of {app}, compiled ahead of time"
    text = f"{about}. Install: pip install '{companion.requirement}'\n"
    with temp_dir() as root:
        licenses = dict(_license_files(config))
        for name, file in licenses.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, root / name)
        project = {
            "name": companion.name,
            "version": companion.version,
            "description": about,
            "readme": {"content-type": "text/plain", "text": text},
            "license-files": [*map(glob.escape, licenses)],
            **_license(sources),
        }
        hatch = {"build": {"targets": {"wheel": {"bypass-selection": True}}}}
        builder = WheelBuilder(str(root), config={"project": project, "tool": {"hatch": hatch}})
        data = builder.get_default_build_data()
        builder.set_build_data_defaults(data)
        data["sbom_files"] = [str(sbom)] if sbom else []
        with builder.config.set_build_data(data):
            built = Path(builder.build_standard(str(root), tag=_tag(config), **data))
        # Hatchling deflates all files.
        files = package.entries(PurePosixPath(companion.module))
        return FinishedWheel(built, "hatchling").write(folder, files)


def _license(sources: Iterable[Source]) -> dict[str, str]:
    """The licenses of all models as one SPDX expression; nothing if one is unknown."""
    try:
        texts = {canonicalize_license_expression(source.license or "") for source in sources}
    except InvalidLicenseExpression:
        return {}
    parts = (f"({t})" if " OR " in t and len(texts) > 1 else t for t in sorted(texts))
    return {"license": " AND ".join(parts)}


def _license_files(config: Config) -> Iterator[tuple[str, Path]]:
    """The files with licenses in the project's folder, and beside its models, by their path in it."""
    folders = {config.root, *(model.path.parent for model in config.models)}
    names = "LICEN[CS]E*", "COPYING*", "NOTICE*"
    for folder in folders:
        for file in (file for name in names for file in folder.glob(name)):
            if file.is_file() and file.is_relative_to(config.root):
                yield file.relative_to(config.root).as_posix(), file


def published_version(wheel: Path, companion: Companion, published: str) -> str | None:
    """The published version that has the models of ``wheel``; None if they are new.

    ``published``: a folder of wheels, or the URL of an index. Of it the version of ``wheel`` is compared, and
    the newest. Raises OSError for the folder, DownloadError for the index, and ConfigError if that version is
    there with other models, or unreadable.
    """
    own, wheels = Version(companion.version), _published(companion.name, published)
    for version in dict.fromkeys((own, *sorted(wheels, reverse=True)[:1])):
        if version in wheels and _is_same(wheel, companion, wheels[version]):
            return str(version)
    if own in wheels:
        message = f"version {own} of {companion.name} is published with other models."
        hint = "Pin a new version in the extra."
        raise ConfigError(Problem.at(companion.key, Kind.INVALID_COMPANION, message, hint))
    return None


def _published(name: str, published: str) -> dict[Version, Path | IndexFile]:
    """The published wheels of the distribution ``name``, by version."""
    files: Iterable[Path | IndexFile] = (
        files_of(name, published) if "://" in published else Path(published).iterdir()
    )
    wheels = dict[Version, Path | IndexFile]()
    for file in files:
        # Other files, and names that are not valid.
        with contextlib.suppress(ValueError):
            distribution, version, *_ = parse_wheel_filename(file.name)
            if distribution == name:
                wheels[version] = file
    return wheels


def _is_same(wheel: Path, companion: Companion, published: Path | IndexFile) -> bool:
    if isinstance(published, Path):
        return _content(published, companion) == _content(wheel, companion)
    # It saves a download.
    if published.sha256 == file_sha256(wheel):
        return True
    with temp_dir() as folder:
        earlier = folder / wheel.name
        try:
            download(published.url, earlier, MAX_BYTES, lambda *_: None)
        except DownloadError as error:
            problem = Problem.at(companion.key, error.kind, f"{error}", error.hint)
            raise ConfigError(problem) from error
        return _content(earlier, companion) == _content(wheel, companion)


def _content(wheel: Path, companion: Companion) -> str | None:
    """What identifies the models in a wheel, and how apps open them; None if it cannot be read."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            package = read(archive.read(f"{companion.module}/{FILE}"), wheel.name)
    except (OSError, KeyError, InspectionError, *DAMAGED_ARCHIVE):
        return None
    if package is None:
        return None
    components = to_plain(package.components)
    for component in components.values():
        for variant in component["variants"].values():
            # What builds and boards say, and no app reads.
            about = variant["additional_metadata"][METADATA]
            for name in ("boards", "compiled_with", "coverage", "preparation", "validation"):
                about.pop(name, None)
    files = {name: record for name, record in package.files.items() if "/" in name}
    return value_sha256([files, components])
