"""The providers in this environment: their packages, their devices, and the reasons for none."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

import hatch_epcontext
from hatch_epcontext.errors import BuildError, Problem
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.artifact import GENERATOR
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import TOOLS, installed
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS, Provider
from hatch_epcontext.worker.requests import Devices, DevicesRequest, EpDevice

TIMEOUT = 120.0
"""Seconds for loading one EP's library."""

_NAMED = "The configuration names its library: epcontext doctor --library PATH shows one."


@dataclass(frozen=True)
class ProviderState:
    """A provider in this environment, of which ``ep`` is ONNX Runtime's name.

    ``simulated``: a simulator runs what is compiled, so its devices are no hardware.
    ``package``: the installed distribution that contains it, with its version; ``reason``: why there
    are no ``devices``, or why it cannot compile although there are some.
    """

    provider: str
    ep: str
    package: str | None
    devices: tuple[EpDevice, ...] = ()
    reason: str | None = None
    simulated: bool = False


@dataclass(frozen=True)
class Machine:
    """This machine, as `doctor --json` writes it: ``platform`` is Python's ``sys.platform``.

    ``packages``: the installed distributions of ONNX Runtime, EPs and tools, with their versions.
    """

    generator: str
    platform: str
    machine: str
    system: str
    python: str
    packages: Mapping[str, str]
    providers: tuple[ProviderState, ...]
    problems: tuple[Mapping[str, str | None], ...]


def describe_machine(states: Iterable[ProviderState], problems: Iterable[Problem]) -> Machine:
    """This machine with the providers in ``states``."""
    states = tuple(states)
    names = [state.package.partition(" ")[0] for state in states if state.package]
    tools = (Requirement(tool).name for tool in TOOLS)
    return Machine(
        f"{GENERATOR} {hatch_epcontext.__version__}",
        sys.platform,
        platform.machine(),
        platform.platform(),
        platform.python_version(),
        versions((*DISTRIBUTIONS, *names, *tools)),
        states,
        tuple(
            {"id": p.kind.id, "location": p.location, "message": p.message, "hint": p.hint}
            for p in problems
        ),
    )


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


def _devices(providers: tuple[str, ...], folder: Path) -> Mapping[str, Devices]:
    """The devices of ``providers``, of one worker; of one each if a library ends that, to know which one."""
    request, location = DevicesRequest(providers), ", ".join(providers)
    try:
        return Workers(TIMEOUT).call(request, folder / location, location=location)
    except BuildError as error:
        if len(providers) == 1:
            return {providers[0]: Devices(reason=error.problems[0].message)}
        return {name: _devices((name,), folder)[name] for name in providers}


def versions(names: Iterable[str]) -> dict[str, str]:
    """The installed ones of the distributions ``names``, with their versions."""
    return {name: version for name in names if (version := installed(name))}


def _state(provider: Provider, package: str | None, devices: Devices | None) -> ProviderState:
    if provider.needs_library:
        return ProviderState(provider.name, provider.ep, None, reason=_NAMED)
    if devices is None:
        needed = " and ".join(provider.requirements or (provider.distributions[0],))
        reason = f"{needed} is not installed."
        return ProviderState(provider.name, provider.ep, None, reason=reason)
    is_simulated = bool(provider.simulator) and provider.runs_on(sys.platform, platform.machine())
    own = provider.name, provider.ep, package, devices.devices, devices.reason
    return ProviderState(*own, bool(devices.devices) and is_simulated)


def _package(provider: Provider) -> str | None:
    """The installed distribution that contains the EP, with its version."""
    names = [provider.plugin.package] if provider.plugin else list(provider.distributions)
    names += [
        name for conflicts in provider.conflicts for name in sorted(conflicts) if name not in names
    ]
    return next((f"{name} {version}" for name, version in versions(names).items()), None)
