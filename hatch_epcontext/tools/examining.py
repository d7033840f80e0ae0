"""Examines an environment: what it can compile for, and its problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from hatch_epcontext.config.build_hooks import NAME, hooks_of_project
from hatch_epcontext.config.load import load
from hatch_epcontext.config.paths import NO_HOME
from hatch_epcontext.config.pyproject import FILE, parse, tool_table
from hatch_epcontext.errors import (
    HOOK,
    ROOT,
    BuildError,
    ConfigError,
    EpcontextError,
    Kind,
    Problem,
)
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.cache.store import Store
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import TOOLS, check_environment, installed
from hatch_epcontext.package.dependencies import check_app
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS, Provider
from hatch_epcontext.text import count
from hatch_epcontext.tools.project import HATCHLING, Project
from hatch_epcontext.worker.requests import DevicesRequest, ProviderDevices

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


@dataclass(frozen=True)
class Diagnosis:
    """An environment.

    ``distributions`` (of ONNX Runtime) and ``tools``: the installed ones, with their versions;
    ``cache``: the cache's folder, or why there is none, and ``artifacts`` their number; ``project``: a
    sentence about the project.
    """

    distributions: Mapping[str, str]
    tools: Mapping[str, str]
    providers: tuple[ProviderState, ...]
    cache: str
    artifacts: int
    project: str
    problems: tuple[Problem, ...]


def examine(project: Path, store: Store | None, environ: Mapping[str, str]) -> Diagnosis:
    """Examine this environment, ``store``, and the project in the folder ``project``.

    ``store`` is None if the user has no cache folder.
    """
    distributions = _versions(DISTRIBUTIONS)
    tools = _versions(requirement.split(">=")[0] for requirement in TOOLS)
    summary, problems = _examine_project(project, environ)
    # A project's problems include its missing requirements.
    if not problems:
        problems = _examine_environment(distributions)
    states = provider_states()
    problems += tuple(
        Problem(Kind.UNLOADABLE_LIBRARY, state.provider, state.reason)
        for state in states
        if state.devices and state.reason
    )
    return Diagnosis(
        distributions,
        tools,
        tuple(states),
        NO_HOME if store is None else str(store.root),
        0 if store is None else sum(entry.kind == "artifacts" for entry in store.entries()),
        summary,
        problems,
    )


def provider_states() -> list[ProviderState]:
    """All providers, as they are in this environment."""
    packages = {
        name: package
        for name, provider in PROVIDERS.items()
        if not provider.needs_library and (package := _package(provider))
    }
    with temp_dir() as folder:
        devices = _devices(tuple(packages), folder) if _versions(DISTRIBUTIONS) else {}
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


def _versions(names: Iterable[str]) -> dict[str, str]:
    return {name: version for name in names if (version := installed(name))}


def _examine_environment(distributions: Mapping[str, str]) -> tuple[Problem, ...]:
    problems: tuple[Problem, ...] = ()
    try:
        check_environment((), TOOLS)
    except EpcontextError as error:
        problems = error.problems
    if distributions:
        return problems
    hint = f"Install {' or '.join(DISTRIBUTIONS[:2])}, or another distribution."
    message = "No ONNX Runtime is installed."
    return (*problems, Problem(Kind.MISSING_REQUIREMENT, "this environment", message, hint))


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


def _examine_project(folder: Path, environ: Mapping[str, str]) -> tuple[str, tuple[Problem, ...]]:
    """A sentence about the project in ``folder``, and its problems."""
    file = folder / FILE
    if not file.is_file():
        return "The folder has no pyproject.toml.", ()
    try:
        table = tool_table(folder)
    except ConfigError as error:
        return f"{file} cannot be read.", error.problems
    project = Project(folder, parse(file.read_text(encoding="utf-8")))
    is_on = NAME in hooks_of_project(folder).tables
    if table is None and not is_on:
        return "This project does not use hatch-epcontext.", ()
    state = "The hook is switched on"
    if (backend := project.backend) != HATCHLING:
        state = (
            f"{backend} builds this project and runs no hooks: epcontext export writes the models"
        )
    elif not is_on:
        message = "is configured, but the hook is not switched on."
        hint = f"Add [{HOOK}] to pyproject.toml."
        problem = Problem(Kind.INVALID_PYPROJECT, f"[{ROOT}]", message, hint)
        return "The hook is not switched on.", (problem,)
    try:
        planned = plan(load(folder, table, {}, environ))
        check_environment(planned.local_targets, planned.requirements)
        check_app(planned.config.targets, project.dependencies)
    except EpcontextError as error:
        return f"{state}.", error.problems
    return f"{state}, with {count(len(planned.jobs), 'job')}.", ()
