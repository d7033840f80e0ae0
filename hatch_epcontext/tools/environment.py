"""The providers in this environment: their packages, their devices, and the reasons for none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hatch_epcontext.errors import BuildError
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import installed
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS, Provider
from hatch_epcontext.worker.requests import Devices, DevicesRequest

TIMEOUT = 120.0
"""Seconds for loading one EP's library."""

_NAMED = "The configuration names its library: epcontext doctor --library PATH shows one."


@dataclass(frozen=True)
class ProviderState:
    """A provider in this environment.

    ``package``: the installed distribution that contains it, with its version; ``reason``: why there
    are no ``devices``, or why it cannot compile although there are some.
    """

    provider: str
    package: str | None
    devices: tuple[str, ...] = ()
    reason: str | None = None


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
        return ProviderState(provider.name, None, reason=_NAMED)
    if devices is None:
        needed = " and ".join(provider.requirements or (provider.distributions[0],))
        reason = f"{needed} is not installed."
        return ProviderState(provider.name, None, reason=reason)
    texts = tuple(device.text for device in devices.devices)
    return ProviderState(provider.name, package, texts, devices.reason)


def _package(provider: Provider) -> str | None:
    """The installed distribution that contains the EP, with its version."""
    names = [provider.plugin.package] if provider.plugin else list(provider.distributions)
    names += [
        name for conflicts in provider.conflicts for name in sorted(conflicts) if name not in names
    ]
    return next((f"{name} {version}" for name, version in versions(names).items()), None)
