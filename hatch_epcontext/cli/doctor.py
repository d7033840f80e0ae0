"""``epcontext doctor``: what this environment, or a library, can compile for."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import indent

import click

import hatch_epcontext
from hatch_epcontext.cli._common import echo
from hatch_epcontext.config.targets import is_path
from hatch_epcontext.errors import (
    ROOT,
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
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS
from hatch_epcontext.serialize import to_plain
from hatch_epcontext.text import file_name, quoted_key, to_toml
from hatch_epcontext.tools.environment import (
    TIMEOUT,
    ProviderState,
    describe_machine,
    provider_states,
    versions,
)
from hatch_epcontext.worker.requests import DevicesRequest, EpDevice


@click.command("doctor")
@click.option(
    "--library",
    metavar="PATH",
    help="Instead: show what this library of a plugin EP offers. A file, or a package with "
    "get_library_path().",
)
@click.option("--json", "as_json", is_flag=True, help="Print this machine as JSON.")
@click.pass_context
def command(ctx: click.Context, library: str | None, as_json: bool) -> None:
    """Show what this environment can compile for.

    Shows ONNX Runtime, and the EPs with their devices or the reason for none. The exit code is 1 if there are
    problems.

    With --json it prints the whole machine, for CI or to compare it with another: the system, Python, the
    packages with their versions, each provider's devices with all that ONNX Runtime knows of them, and the
    problems.

    With --library it lists the devices of any plugin EP, and prints the targets for pyproject.toml that use
    them.
    """
    if library is not None and as_json:
        raise click.UsageError("--json describes this machine, and not a library.")
    if library is None:
        states = provider_states()
        problems = _problems(states)
        if as_json:
            machine = to_plain(describe_machine(states, problems))
            click.echo(json.dumps(machine, indent=2))
            ctx.exit(1 if problems else 0)
        _show(states)
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
        ("ONNX Runtime", versions(DISTRIBUTIONS)),
        ("tools", versions(requirement.split(">=")[0] for requirement in TOOLS)),
    ):
        listed = ", ".join(f"{name} {version}" for name, version in packages.items())
        echo(f"{heading}: {listed or 'none'}")
    echo("providers:")
    for state in states:
        package = f" ({state.package})" if state.package else ""
        echo(f"  {state.provider}{package}")
        texts = [device.text for device in state.devices]
        for line in texts or (state.reason or "").splitlines():
            echo(f"    {line}")
        if state.simulated and not state.reason:
            title = PROVIDERS[state.provider].title
            echo(f"    compiles for {title}; a simulator runs the results here")


def _problems(states: Iterable[ProviderState]) -> list[Problem]:
    """What is wrong with this environment."""
    problems: list[Problem] = []
    try:
        check_environment((), TOOLS)
    except EpcontextError as error:
        problems += error.problems
    if not versions(DISTRIBUTIONS):
        hint = f"Install {' or '.join(DISTRIBUTIONS[:2])}, or another distribution."
        message = "No ONNX Runtime is installed."
        problems.append(Problem(Kind.MISSING_REQUIREMENT, "this environment", message, hint))
    problems += (
        Problem(Kind.UNLOADABLE_LIBRARY, state.provider, state.reason)
        for state in states
        if state.devices and state.reason
    )
    return problems


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
        reply = Workers(TIMEOUT).call(request, folder / "library", location=f"library {library}")
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
