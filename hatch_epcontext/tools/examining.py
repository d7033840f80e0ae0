"""Facts of this environment, its EPs, and of a project: its build backend and its requirements."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import BuildError
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import installed
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS, Provider
from hatch_epcontext.worker.requests import DevicesRequest, ProviderDevices

HATCHLING = "hatchling"

TIMEOUT = 120.0
"""Seconds for loading one EP's library."""

_NAMED = "The configuration names its library: epcontext doctor --library PATH shows one."


@dataclass(frozen=True)
class ProviderState:
    """A provider in this environment.

    ``package``: the installed distribution that contains it, with its version; ``reason``: why there
    are no ``devices``, or why it cannot compile although there are some; ``library``: the distribution of
    the vendor's library that compiles without the EP and its device, if it is installed.
    """

    provider: str
    package: str | None
    devices: tuple[str, ...] = ()
    reason: str | None = None
    library: str | None = None


def provider_states() -> list[ProviderState]:
    """All providers, as they are in this environment."""
    packages = {
        name: package
        for name, provider in PROVIDERS.items()
        if not provider.needs_library and (package := _package(provider))
    }
    with temp_dir() as folder:
        devices = _devices(tuple(packages), folder) if versions(DISTRIBUTIONS) else {}
    return [
        _state(provider, packages.get(name), devices.get(name))
        for name, provider in PROVIDERS.items()
    ]


def _devices(providers: tuple[str, ...], folder: Path) -> Mapping[str, ProviderDevices]:
    """The devices of ``providers``, of one worker; of one each if a library ends that, to know which one."""
    request, location = DevicesRequest(providers), ", ".join(providers)
    try:
        return Workers(TIMEOUT).call(request, folder / location, location=location).providers
    except BuildError as error:
        if len(providers) == 1:
            return {providers[0]: ProviderDevices((), error.problems[0].message)}
        return {name: _devices((name,), folder)[name] for name in providers}


def versions(names: Iterable[str]) -> dict[str, str]:
    """The installed ones of the distributions ``names``, with their versions."""
    return {name: version for name in names if (version := installed(name))}


def _state(
    provider: Provider, package: str | None, devices: ProviderDevices | None
) -> ProviderState:
    if provider.needs_library:
        return ProviderState(provider.name, None, reason=_NAMED)
    library = _library(provider)
    if devices is None:
        needed = " and ".join(provider.requirements or (provider.distributions[0],))
        reason = f"{needed} is not installed."
        return ProviderState(provider.name, None, reason=reason, library=library)
    return ProviderState(provider.name, package, devices.devices, devices.reason, library)


def _library(provider: Provider) -> str | None:
    """The installed distribution of the library that compiles without the EP, with its version."""
    needed = provider.compiler_library.requirements if provider.compiler_library else ()
    present = [
        f"{requirement.name} {version}"
        for requirement in map(Requirement, needed)
        if (version := installed(requirement.name)) and requirement.specifier.contains(version)
    ]
    return " and ".join(present) if present and len(present) == len(needed) else None


def _package(provider: Provider) -> str | None:
    """The installed distribution that contains the EP, with its version."""
    names = [provider.plugin.package] if provider.plugin else list(provider.distributions)
    names += [
        name for conflicts in provider.conflicts for name in sorted(conflicts) if name not in names
    ]
    found = (f"{name} {version}" for name in names if (version := installed(name)))
    return next(found, None)


@dataclass(frozen=True)
class Project:
    """The project in the folder ``root``; ``values`` are those of its ``pyproject.toml``."""

    root: Path
    values: Mapping[str, Any]

    def table(self, *names: str) -> Mapping[str, Any]:
        """The table with these ``names``; empty if there is none."""
        table: Any = self.values
        for name in names:
            table = table.get(name) if isinstance(table, dict) else None
        return table if isinstance(table, dict) else {}

    @property
    def dependencies(self) -> list[str]:
        """The valid requirements of the app and of its extras."""
        extras = self.table("project", "optional-dependencies").values()
        lists = self.table("project").get("dependencies"), *extras
        return [str(requirement) for listed in lists for requirement in requirements(listed)]

    @property
    def name(self) -> str:
        """The project's name, or that of its folder."""
        name = self.table("project").get("name")
        return name if isinstance(name, str) else self.root.name

    @property
    def backend(self) -> str:
        """The import name of the build backend; without any it is hatchling, for a new project."""
        name = self.table("build-system").get("build-backend")
        if isinstance(name, str):
            return re.split(r"[.:]", name)[0]
        old = any((self.root / file).is_file() for file in ("setup.py", "setup.cfg"))
        return "setuptools" if self.table("build-system") or old else HATCHLING


def project_name(root: Path) -> str:
    """The name in ``[project]``, or that of the folder if it has none; ``pyproject.toml`` was read before."""
    return Project(root, parse((root / "pyproject.toml").read_text(encoding="utf-8"))).name


def requirements(listed: Any) -> Iterator[Requirement]:
    """The valid requirements in a list of ``pyproject.toml``."""
    for text in listed if isinstance(listed, list) else ():
        with contextlib.suppress(InvalidRequirement, TypeError):
            yield Requirement(text)
