"""The providers in this environment: their packages, their devices, and the reasons for none.

And machines, of which a file has all this.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten

from packaging.requirements import Requirement
from packaging.tags import platform_tags

from hatch_epcontext.errors import BuildError, ConfigError, Kind, Problem
from hatch_epcontext.files import known_text, read_regular
from hatch_epcontext.jobs.artifact import GENERATED_BY
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import TOOLS, installed
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS, Provider
from hatch_epcontext.serialize import from_json
from hatch_epcontext.worker.requests import Devices, DevicesReply, DevicesRequest, EpDevice, Runtime

TIMEOUT = 120.0
"""Seconds for loading one EP's library."""

_MAX_REASON = 160
"""Characters of the reason why a file describes no machine."""

_NAMED = "The configuration names its library: epcontext doctor --library PATH shows one."


@dataclass(frozen=True)
class ProviderState:
    """A provider in this environment, of which ``ep`` is ONNX Runtime's name.

    ``simulated``: a simulator runs what is compiled, so its devices are no hardware.
    ``package``: the installed distribution that contains it, with its version; ``reason``: why there
    are no ``devices``, or why it cannot compile although there are some. ``module``: the import package of a
    plugin EP; ``is_all``: whether apps find no other devices.
    """

    provider: str
    ep: str
    package: str | None
    devices: tuple[EpDevice, ...] = ()
    reason: str | None = None
    simulated: bool = False
    module: str = ""
    is_all: bool = False


@dataclass(frozen=True)
class Machine:
    """A machine, as `doctor --json` writes it: ``platform`` is Python's ``sys.platform``.

    ``packages``: the installed distributions of ONNX Runtime, EPs and tools, with their versions. ``tags``:
    the platforms of the wheels that pip installs there; ``chip``: its name; ``runtime``: None if ONNX Runtime
    cannot be imported.
    """

    generator: str
    platform: str
    machine: str
    system: str
    python: str
    packages: Mapping[str, str]
    providers: tuple[ProviderState, ...]
    problems: tuple[Mapping[str, str | None], ...]
    tags: tuple[str, ...]
    chip: str | None
    runtime: Runtime | None


def describe_machine(
    runtime: Runtime | None, states: Iterable[ProviderState], problems: Iterable[Problem] = ()
) -> Machine:
    """This machine with its ONNX Runtime, and the providers in ``states``."""
    states = tuple(states)
    names = [state.package.partition(" ")[0] for state in states if state.package]
    tools = (Requirement(tool).name for tool in TOOLS)
    return Machine(
        GENERATED_BY,
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
        tuple(platform_tags()),
        chip_name(),
        runtime,
    )


def chip_name() -> str | None:
    """The name of this machine's chip, as the system knows it."""
    if sys.platform == "win32":
        import winreg

        path = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
                return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip() or None
        except OSError:
            return platform.processor() or None
    # A board's device tree, and else the processor.
    board = known_text(Path("/sys/devices/soc0/machine")) or known_text(
        Path("/proc/device-tree/model")
    )
    lines = (known_text(Path("/proc/cpuinfo")) or "").splitlines()
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return (board or next(names, platform.processor())).strip(" \n\0") or None


def read_machine(path: Path) -> Machine:
    """The machine that `doctor --json` wrote into ``path``; raises ConfigError for any other file."""
    try:
        return from_json(read_regular(path), Machine)
    except (OSError, ValueError) as error:
        message = f"epcontext doctor --json did not write it: {shorten(str(error), _MAX_REASON)}"
        hint = "Write it there anew: epcontext doctor --json > machine.json"
        problem = Problem(Kind.UNREADABLE_FILE, f"--devices {path}", message, hint)
        raise ConfigError(problem) from error


def examine(
    compatibility: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[Runtime | None, list[ProviderState]]:
    """The ONNX Runtime in this environment, and all providers.

    ``compatibility``: the strings of contexts, by provider, about which its EP is asked.
    """
    packages = {name: _package(p) for name, p in PROVIDERS.items() if not p.needs_library}
    asked = tuple(name for name, package in packages.items() if package or _is_there(name))
    devices, runtime = dict[str, Devices](), None
    if versions(DISTRIBUTIONS):
        request = DevicesRequest(asked, compatibility or {})
        runtime, devices = _devices(request)
    return runtime, [
        _state(provider, packages.get(name), devices.get(name))
        for name, provider in PROVIDERS.items()
    ]


def _is_there(provider: str) -> bool:
    """Whether the package of a plugin EP is there, by whatever distribution."""
    plugin = PROVIDERS[provider].plugin
    return plugin is not None and find_spec(plugin.module) is not None


def _devices(request: DevicesRequest) -> tuple[Runtime | None, dict[str, Devices]]:
    """ONNX Runtime and the devices, of one worker; of one each if a library ends that, to know which one."""
    location = ", ".join(request.providers)
    try:
        reply: DevicesReply = Workers(TIMEOUT).call(request, location=location)
    except BuildError as error:
        if len(request.providers) == 1:
            return None, {location: Devices(reason=error.problems[0].message)}
        replies = [
            _devices(DevicesRequest((name,), request.compatibility)) for name in request.providers
        ]
        runtimes = (runtime for runtime, _ in replies if runtime is not None)
        return next(runtimes, None), {n: d for _, devices in replies for n, d in devices.items()}
    return reply.runtime, dict(reply.devices)


def versions(names: Iterable[str]) -> dict[str, str]:
    """The installed ones of the distributions ``names``, with their versions."""
    return {name: version for name in names if (version := installed(name))}


def _state(provider: Provider, package: str | None, devices: Devices | None) -> ProviderState:
    plugin = provider.plugin
    if provider.needs_library:
        return ProviderState(provider.name, provider.ep, None, reason=_NAMED)
    if devices is None:
        needed = " and ".join(provider.requirements or (provider.distributions[0],))
        # There Windows ML may have it.
        devices = Devices((), f"{needed} is not installed.", sys.platform != "win32")
    is_simulated = bool(provider.simulator) and provider.runs_on(sys.platform, platform.machine())
    return ProviderState(
        provider.name,
        provider.ep,
        package,
        devices.devices,
        devices.reason,
        bool(devices.devices) and is_simulated,
        plugin.module if plugin else "",
        devices.is_all,
    )


def _package(provider: Provider) -> str | None:
    """The installed distribution that contains the EP, with its version."""
    names = [provider.plugin.package] if provider.plugin else list(provider.distributions)
    names += [
        name for conflicts in provider.conflicts for name in sorted(conflicts) if name not in names
    ]
    return next((f"{name} {version}" for name, version in versions(names).items()), None)
