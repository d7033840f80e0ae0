"""``epcontext doctor``: what this environment can compile for, and its problems."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

import hatch_epcontext
from hatch_epcontext.cli._common import ExistingPath, echo, find_store
from hatch_epcontext.config.build_hooks import NAME, hooks_of_project
from hatch_epcontext.config.load import load
from hatch_epcontext.config.paths import NO_HOME
from hatch_epcontext.config.pyproject import FILE, parse, tool_table
from hatch_epcontext.config.targets import is_path
from hatch_epcontext.errors import (
    HOOK,
    ROOT,
    ConfigError,
    EpcontextError,
    Kind,
    Problem,
    UnavailableError,
)
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import (
    INSPECTION,
    TOOLS,
    check_environment,
    installed,
    owners,
)
from hatch_epcontext.package.dependencies import check_app
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS
from hatch_epcontext.serialize import to_json
from hatch_epcontext.text import count, file_name, quoted_key, to_toml
from hatch_epcontext.tools.examining import (
    HATCHLING,
    TIMEOUT,
    Project,
    ProviderState,
    provider_states,
    versions,
)
from hatch_epcontext.worker.requests import DevicesRequest, LibraryDevices


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


_EXAMPLES = """\b
Examples:
  epcontext doctor
  epcontext doctor --library build/libmy_ep.so
"""


@click.command("doctor", epilog=_EXAMPLES)
@click.argument("project", type=ExistingPath(file_okay=False), default=Path())
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--library",
    metavar="PATH",
    help="Instead: show what this library of a plugin EP offers. A file, or a package with "
    "get_library_path().",
)
@click.pass_context
def command(ctx: click.Context, project: Path, as_json: bool, library: str | None) -> None:
    """Show what this environment can compile for.

    Shows ONNX Runtime, the EPs with their devices or the reason for none, the cache, and the hook of
    PROJECT. The exit code is 1 if there are problems.

    With --library it registers the library of any plugin EP in a process of its own, lists the devices of its
    EPs, and prints the targets for pyproject.toml that use them.
    """
    if library is None:
        diagnosis = _examine(project.absolute())
        if as_json:
            click.echo(to_json(diagnosis), nl=False)
        else:
            _show(diagnosis)
        ctx.exit(1 if diagnosis.problems else 0)
    reply = _describe_library(library)
    if as_json:
        click.echo(to_json(reply), nl=False)
        return
    echo(f"{library} is registered as {reply.name}, and offers:")
    for device in reply.devices:
        echo(f"  {device.text}")
    echo("These targets use it; compile a model with -p plugin to try it:")
    for table in _target_tables(library, reply):
        echo(f"\n{table}", lines=True)


def _show(diagnosis: Diagnosis) -> None:
    echo(
        f"hatch-epcontext {hatch_epcontext.__version__}, Python {platform.python_version()} "
        f"({sys.executable}), {platform.system()} {platform.machine()}"
    )
    for heading, found in (
        ("ONNX Runtime", diagnosis.distributions),
        ("tools", diagnosis.tools),
    ):
        listed = ", ".join(f"{name} {version}" for name, version in found.items())
        echo(f"{heading}: {listed or 'none'}")
    echo(f"cache: {diagnosis.cache}, {count(diagnosis.artifacts, 'artifact')}")
    echo(f"project: {diagnosis.project}")
    echo("providers:")
    for state in diagnosis.providers:
        package = f" ({state.package})" if state.package else ""
        echo(f"  {state.provider}{package}")
        for line in state.devices or (state.reason or "").splitlines():
            echo(f"    {line}")
        provider = PROVIDERS[state.provider]
        if state.library and provider.compiler_library:
            gpus = ", ".join(provider.compiler_library.capabilities)
            echo(f"    {state.library} compile without a GPU, for the compute capabilities {gpus}")
        is_simulated = provider.simulator and provider.runs_on(sys.platform, platform.machine())
        if state.devices and not state.reason and is_simulated:
            echo(f"    compiles for {provider.title}; a simulator runs the results here")
    if diagnosis.problems:
        echo("problems:")
    for problem in diagnosis.problems:
        for index, line in enumerate(str(problem).splitlines()):
            echo(f"  {'- ' if index == 0 else '  '}{line}")


def _examine(project: Path) -> Diagnosis:
    """Examine this environment, the cache, and the project in the folder ``project``."""
    distributions, store = versions(DISTRIBUTIONS), find_store()
    summary, problems = _examine_project(project)
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
        versions(requirement.split(">=")[0] for requirement in TOOLS),
        tuple(states),
        NO_HOME if store is None else str(store.root),
        0 if store is None else sum(entry.kind == "artifacts" for entry in store.entries()),
        summary,
        problems,
    )


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


def _examine_project(folder: Path) -> tuple[str, tuple[Problem, ...]]:
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
        planned = plan(load(folder, table, {}, os.environ))
        check_environment(planned.local_targets, planned.requirements)
        check_app(planned.config.targets, project.dependencies)
    except EpcontextError as error:
        return f"{state}.", error.problems
    return f"{state}, with {count(len(planned.jobs), 'job')}.", ()


def _describe_library(library: str) -> LibraryDevices:
    """Register ``library``, the path of a file or a package, in a worker, and list its devices.

    Raises ConfigError when there is no such file, RequirementError when ONNX Runtime is missing, and
    BuildError when the library cannot be loaded, crashes, hangs or offers no device.
    """
    path = os.path.abspath(os.path.expanduser(library)) if is_path(library) else ""  # noqa: PTH100, PTH111
    if path and not Path(path).is_file():
        message, hint = "is not a file.", "A path has a slash, or ends with .so, .dll or .dylib."
        raise ConfigError(Problem(Kind.FILE_NOT_FOUND, f"--library {library}", message, hint))
    check_environment((), INSPECTION)
    request = DevicesRequest(path=path, module="" if path else library)
    with temp_dir() as folder:
        reply = Workers(TIMEOUT).call(request, folder / "library", location=f"library {library}")
    offered = reply.library
    assert offered is not None, "it was asked for"
    if not offered.devices:
        reasons = "".join(f"\n{reason}" for reason in offered.reasons)
        message = (
            f"it was registered as {offered.name}, and offers no device on this machine.{reasons}"
        )
        hint = "Try it on a machine that has one, or with another release of ONNX Runtime."
        raise UnavailableError(Problem(Kind.NO_DEVICE, f"library {library}", message, hint))
    return offered


def _target_tables(library: str, offered: LibraryDevices) -> Iterator[str]:
    """The table of a target for each EP that the library offers, as it is written in ``pyproject.toml``."""
    for ep in dict.fromkeys(device.ep for device in offered.devices):
        name = file_name(ep.removesuffix("ExecutionProvider").lower(), "-")
        keys: dict[str, object] = {"provider": "plugin", "library": library, "ep-name": ep}
        if not is_path(library):
            packages = sorted(owners(library.partition(".")[0]))
            keys["requirements"] = [f"{name}>={installed(name)}" for name in packages]
        keys["device"] = next(device.kind for device in offered.devices if device.ep == ep)
        lines = [f"{key} = {to_toml(value)}" for key, value in keys.items()]
        yield "\n".join([f"[{ROOT}.targets.{quoted_key(name)}]", *lines])
