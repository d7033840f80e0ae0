"""Companion wheels: what the app's extras say of them, their wheels, and whether two have the same models.

A companion is a whole, portable model package in an import package of its own. hatchling writes its wheel.
"""

from __future__ import annotations

import glob
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hatch_epcontext.config.settings import Config, module_of
from hatch_epcontext.errors import (
    ConfigError,
    Diagnosed,
    InspectionError,
    Key,
    Kind,
    Problem,
    collect,
)
from hatch_epcontext.files import temp_dir
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.artifact import Source
from hatch_epcontext.jobs.plan import jobs_of
from hatch_epcontext.package.bundle import Bundle
from hatch_epcontext.package.folder import read
from hatch_epcontext.package.manifest import FILE
from hatch_epcontext.package.wheel import DAMAGED_ARCHIVE, ProjectMetadata, tag
from hatch_epcontext.serialize import to_plain, value_sha256
from hatch_epcontext.shipped import METADATA
from hatch_epcontext.text import listing, show, suggestion, to_toml

_EXTRA = re.compile(r"extra == [\"']([^\"']+)[\"']")

_PLATFORM = re.compile("sys_platform|platform_|os_name")
"""What a marker has that depends on the machine."""

_LICENSES = ("LICEN[CS]E*", "COPYING*", "NOTICE*")

_ANY = "py3-none-any"


@dataclass(frozen=True)
class Companion:
    """A companion, of the ``version`` that the app pins; ``requirement`` installs it with the app.

    ``key``: where the configuration names it.
    """

    name: str
    version: str
    requirement: str
    key: Key

    @property
    def module(self) -> str:
        """Its import package."""
        return module_of(self.name)


def pinned(config: Config, project: ProjectMetadata) -> list[Companion]:
    """All companions of ``config``, as the app ``project`` pins them.

    Raises ConfigError for those that it does not pin, and for models of one sidecar in several wheels.
    """
    jobs_of(config)
    companions, problems = collect(_pinned(config, project))
    if problems:
        raise ConfigError(*problems)
    return companions


def _pinned(config: Config, project: ProjectMetadata) -> Diagnosed[list[Companion]]:
    named: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, project.dependencies):
        named.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    companions = []
    for name, key in config.companions.items():
        own, marker = named.get(name, []), _marker(config.of_wheel(name))
        extras = [extra for r in own for extra in _EXTRA.findall(str(r.marker or ""))]
        versions = {_pin(requirement) for requirement in own}
        version = next((v.version for r in own for v in r.specifier if "*" not in v.version), "1")
        text = f"{name}=={version}" + (f"; {marker}" if marker else "")
        extra = next(iter(extras), name.removeprefix(f"{canonicalize_name(project.name)}-"))
        line = f"Write in [project.optional-dependencies]: {extra} = {to_toml([text])}"
        message = ""
        if name == canonicalize_name(project.name):
            message, line = "is the app itself.", "Give the companion a name of its own."
        elif not own:
            message = "is not pinned by any extra of the app, and could not be installed with it."
            line = " ".join(filter(None, (suggestion(name, named), line)))
        elif len(versions) > 1 or None in versions:
            others = listing(show(str(requirement)) for requirement in own)
            message = f"must be pinned with == to one version, by which it is built: {others}."
        elif marker and not all(_PLATFORM.search(str(r.marker)) for r in own):
            message = "is for some platforms only, and without a marker the extra is for all."
        if message:
            yield Problem.at(key, Kind.INVALID_COMPANION, f"{name} {message}", line)
        else:
            install = f"{project.name}[{extras[0]}]" if extras else project.name
            companions.append(Companion(name, version, install, key))
    return companions


def _pin(requirement: Requirement) -> str | None:
    """The version to which ``requirement`` pins its package, if it does."""
    specifiers = list(requirement.specifier)
    is_pin = [s.operator for s in specifiers] == ["=="] and "*" not in specifiers[0].version
    return specifiers[0].version if is_pin else None


def _tag(config: Config) -> str:
    """The tag of the companion with the models of ``config``: a source is for any machine."""
    has_source = any(model.fallback == "source" for model in config.models)
    return _ANY if has_source else tag(config) or _ANY


def _marker(config: Config) -> str:
    """The marker for the machines that the wheel of ``config`` is for; empty for all."""
    parts = dict.fromkeys(map(_marker_of, _tag(config).rpartition("-")[2].split(".")))
    return " or ".join(f"({part})" if len(parts) > 1 else part for part in parts if part)


def _marker_of(platform: str) -> str:
    if platform == "any":
        return ""
    systems = {"win": "win32", "macosx": "darwin"}
    start = re.split(r"[\d_]", platform)[0]
    system = systems.get(start, "linux")
    machines = (m for m in ("x86_64", "aarch64", "amd64", "arm64") if platform.endswith(m))
    machine = next(machines, "")
    machine = machine.upper() if system == "win32" else machine
    return f"sys_platform == '{system}'" + (machine and f" and platform_machine == '{machine}'")


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
    # Imported here: hatchling's builder takes time, and other back ends do without.
    from hatchling.builders.wheel import WheelBuilder

    expression, install = _license(sources), f"Install: pip install '{companion.requirement}'"
    description = f"Models of {app}, compiled ahead of time"
    with temp_dir() as root:
        licenses = dict(_license_files(config))
        for name, file in licenses.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, root / name)
        project = {
            "name": companion.name,
            "version": companion.version,
            "description": description,
            "readme": {"content-type": "text/plain", "text": f"{description}. {install}\n"},
            "license-files": [*map(glob.escape, licenses)],
            **({"license": expression} if expression else {}),
        }
        wheel = {"bypass-selection": True}
        builder = WheelBuilder(
            str(root),
            config={
                "project": project,
                "tool": {"hatch": {"build": {"targets": {"wheel": wheel}}}},
            },
        )
        data = builder.get_default_build_data()
        builder.set_build_data_defaults(data)
        data["force_include"] = package.entries(PurePosixPath(companion.module))
        data["sbom_files"] = [str(sbom)] if sbom else []
        with builder.config.set_build_data(data):
            return Path(builder.build_standard(str(folder), tag=_tag(config), **data))


def _license(sources: Iterable[Source]) -> str:
    """The licenses of all models as one SPDX expression; empty if one is unknown."""
    licenses = {source.license or "" for source in sources}
    try:
        parts = sorted(map(canonicalize_license_expression, licenses))
    except InvalidLicenseExpression:
        return ""
    return " AND ".join(f"({p})" if " OR " in p and len(parts) > 1 else p for p in parts)


def _license_files(config: Config) -> Iterator[tuple[str, Path]]:
    """The files with licenses in the project's folder, and beside its models, by their path in it."""
    folders = {config.root, *((model.origin or model.path).parent for model in config.models)}
    for folder in sorted(folders):
        if folder.is_relative_to(config.root):
            for pattern in _LICENSES:
                for file in filter(Path.is_file, sorted(folder.glob(pattern))):
                    yield file.relative_to(config.root).as_posix(), file


def content_of(wheel: Path, companion: Companion) -> str | None:
    """What identifies the models in a wheel of ``companion``, and how apps open them.

    None for a wheel that cannot be read, such as one of another version of this package.
    """
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
            # What a build says of itself, and no app reads.
            about = variant["additional_metadata"][METADATA]
            for name in ("compiled_with", "coverage", "preparation", "validation"):
                about.pop(name, None)
    files = {name: record for name, record in package.files.items() if "/" in name}
    return value_sha256([files, components])
