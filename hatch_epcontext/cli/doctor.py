"""``epcontext doctor``: what this environment, or a library, can compile for."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import click

import hatch_epcontext
from hatch_epcontext.cli._common import echo
from hatch_epcontext.config.targets import is_path
from hatch_epcontext.errors import (
    ROOT,
    BuildError,
    ConfigError,
    EpcontextError,
    Kind,
    Problem,
    UnavailableError,
)
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import (
    INSPECTION,
    TOOLS,
    check_environment,
    installed,
    owners,
)
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS, Provider
from hatch_epcontext.text import file_name, quoted_key, to_toml
from hatch_epcontext.worker.requests import Devices, DevicesRequest, EpDevice

_TIMEOUT = 120.0
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


@click.command("doctor")
@click.option(
    "--library",
    metavar="PATH",
    help="Instead: show what this library of a plugin EP offers. A file, or a package with "
    "get_library_path().",
)
@click.pass_context
def command(ctx: click.Context, library: str | None) -> None:
    """Show what this environment can compile for.

    Shows ONNX Runtime, and the EPs with their devices or the reason for none. The exit code is 1 if there are
    problems.

    With --library it lists the devices of any plugin EP, and prints the targets for pyproject.toml that use
    them.
    """
    if library is None:
        states = provider_states()
        _show(states)
        problems = _problems(states)
        if problems:
            echo("problems:")
        for problem in problems:
            echo(f"  - {indent(str(problem), '    ').lstrip()}", lines=True)
        ctx.exit(1 if problems else 0)
    name, devices = _describe_library(library)
    echo(f"{library} is registered as {name}, and offers:")
    for device in devices:
        echo(f"  {device.text}")
    echo("These targets use it; compile a model with -p plugin to try it:")
    for table in _target_tables(library, devices):
        echo(f"\n{table}", lines=True)


def _show(states: Iterable[ProviderState]) -> None:
    echo(
        f"hatch-epcontext {hatch_epcontext.__version__}, Python {platform.python_version()} "
        f"({sys.executable}), {platform.system()} {platform.machine()}"
    )
    for heading, packages in (
        ("ONNX Runtime", _versions(DISTRIBUTIONS)),
        ("tools", _versions(requirement.split(">=")[0] for requirement in TOOLS)),
    ):
        listed = ", ".join(f"{name} {version}" for name, version in packages.items())
        echo(f"{heading}: {listed or 'none'}")
    echo("providers:")
    for state in states:
        package = f" ({state.package})" if state.package else ""
        echo(f"  {state.provider}{package}")
        for line in state.devices or (state.reason or "").splitlines():
            echo(f"    {line}")
        provider = PROVIDERS[state.provider]
        is_simulated = provider.simulator and provider.runs_on(sys.platform, platform.machine())
        if state.devices and not state.reason and is_simulated:
            echo(f"    compiles for {provider.title}; a simulator runs the results here")


def _problems(states: Iterable[ProviderState]) -> list[Problem]:
    """What is wrong with this environment."""
    problems: list[Problem] = []
    try:
        check_environment((), TOOLS)
    except EpcontextError as error:
        problems += error.problems
    if not _versions(DISTRIBUTIONS):
        hint = f"Install {' or '.join(DISTRIBUTIONS[:2])}, or another distribution."
        message = "No ONNX Runtime is installed."
        problems.append(Problem(Kind.MISSING_REQUIREMENT, "this environment", message, hint))
    problems += (
        Problem(Kind.UNLOADABLE_LIBRARY, state.provider, state.reason)
        for state in states
        if state.devices and state.reason
    )
    return problems


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


def _devices(providers: tuple[str, ...], folder: Path) -> Mapping[str, Devices]:
    """The devices of ``providers``, of one worker; of one each if a library ends that, to know which one."""
    request, location = DevicesRequest(providers), ", ".join(providers)
    try:
        return Workers(_TIMEOUT).call(request, folder / location, location=location)
    except BuildError as error:
        if len(providers) == 1:
            return {providers[0]: Devices(reason=error.problems[0].message)}
        return {name: _devices((name,), folder)[name] for name in providers}


def _versions(names: Iterable[str]) -> dict[str, str]:
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
    return next((f"{name} {version}" for name, version in _versions(names).items()), None)


def _describe_library(library: str) -> tuple[str, tuple[EpDevice, ...]]:
    """Register ``library``, the path of a file or a package, in a worker: its name there, and its devices.

    Raises ConfigError when there is no such file, RequirementError when ONNX Runtime is missing, and
    BuildError when the library cannot be loaded, crashes, hangs or offers no device.
    """
    path = str(Path(library).expanduser().absolute()) if is_path(library) else ""
    if path and not Path(path).is_file():
        message, hint = "is not a file.", "A path has a slash, or ends with .so, .dll or .dylib."
        raise ConfigError(Problem(Kind.FILE_NOT_FOUND, f"--library {library}", message, hint))
    check_environment((), INSPECTION)
    request = DevicesRequest(path=path, module="" if path else library)
    with temp_dir() as folder:
        reply = Workers(_TIMEOUT).call(request, folder / "library", location=f"library {library}")
    ((name, offered),) = reply.items()
    if not offered.devices:
        message = f"it was registered as {name}, and offers no device on this machine."
        message = "\n".join(filter(None, (message, offered.reason)))
        hint = "Try it on a machine that has one, or with another release of ONNX Runtime."
        raise UnavailableError(Problem(Kind.NO_DEVICE, f"library {library}", message, hint))
    return name, offered.devices


def _target_tables(library: str, devices: tuple[EpDevice, ...]) -> Iterator[str]:
    """The table of a target for each EP that the library offers, as it is written in ``pyproject.toml``."""
    for ep in dict.fromkeys(device.ep for device in devices):
        name = file_name(ep.removesuffix("ExecutionProvider").lower(), "-")
        keys: dict[str, object] = {"provider": "plugin", "library": library, "ep-name": ep}
        if not is_path(library):
            packages = sorted(owners(library.partition(".")[0]))
            keys["requirements"] = [f"{name}>={installed(name)}" for name in packages]
        keys["device"] = next(device.kind for device in devices if device.ep == ep)
        lines = [f"{key} = {to_toml(value)}" for key, value in keys.items()]
        yield "\n".join([f"[{ROOT}.targets.{quoted_key(name)}]", *lines])
