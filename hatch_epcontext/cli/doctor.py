"""``epcontext doctor``: what this environment, or a library, can compile for, and what a wheel does here."""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import indent

import click

import hatch_epcontext
from hatch_epcontext.cli._common import command_with_examples, echo, show_table, warn
from hatch_epcontext.cli._settings import key_and_value
from hatch_epcontext.config.targets import is_path
from hatch_epcontext.errors import ROOT, EpcontextError, Kind, Problem
from hatch_epcontext.jobs.requirements import TOOLS, check_environment, installed, owners
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS
from hatch_epcontext.serialize import to_plain
from hatch_epcontext.text import file_name, listing, quoted_key, to_toml
from hatch_epcontext.tools import environment, expecting
from hatch_epcontext.tools.libraries import describe_library, options_of, try_library
from hatch_epcontext.worker.requests import EpDevice


@command_with_examples(
    "doctor",
    "--json > board.json",
    "my_app-1.0-py3-none-any.whl --devices board.json --devices pc.json",
)
@click.argument("wheels", metavar="[WHEEL]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--devices",
    "files",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="With WHEEL: the machine that epcontext doctor --json described in FILE, instead of this one; "
    "repeatable.",
)
@click.option(
    "--library",
    metavar="PATH",
    help="Instead: show what this library of a plugin EP offers. A file, or a package with "
    "get_library_path().",
)
@click.option(
    "-O",
    "--option",
    "options",
    multiple=True,
    metavar="K=V",
    callback=lambda ctx, param, pairs: dict(map(key_and_value, pairs)),
    help="With --library: an option of its EP.",
)
@click.option("--json", "as_json", is_flag=True, help="Print this machine, or the table, as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    wheels: tuple[Path, ...],
    files: tuple[Path, ...],
    library: str | None,
    options: Mapping[str, str],
    as_json: bool,
) -> None:
    """Show what this machine can compile, and what a wheel does.

    Shows ONNX Runtime, and the EPs with their devices or the reason for none. The exit code is 1 if there are
    problems.

    With --json it prints the whole machine, for CI or to compare it with another: the system, Python, the
    packages with their versions, each provider's devices with all that ONNX Runtime knows of them, and the
    problems.

    With WHEEL it says what load does with each target of the wheel's models in this environment: it opens,
    cannot open, or that is unknown until it is opened. It runs no code of the wheel, and opens no session.
    Name those of companions too. Several --devices make a table of targets and machines. The exit code is
    1 if no target of some model can be opened on one of the machines, and 2 if a file describes no machine.

    With --library it lists the devices of any plugin EP, compiles a small model on each, says whether that
    becomes an EP context, and prints the targets for pyproject.toml. The exit code is 1 if none does.
    """
    if library is not None and (as_json or wheels):
        raise click.UsageError("--library takes neither a wheel nor --json.")
    if options and library is None:
        raise click.UsageError("--option needs --library.")
    if files and not wheels:
        raise click.UsageError("--devices needs a wheel.")
    if wheels:
        ctx.exit(_show_wheels(wheels, files, as_json))
    if library is not None:
        ctx.exit(_show_library(library, options))
    runtime, states = environment.examine()
    problems = _problems(states)
    if as_json:
        machine = to_plain(environment.describe_machine(runtime, states, problems))
        click.echo(json.dumps(machine, indent=2))
    else:
        _show(states)
        if problems:
            echo("problems:")
        for problem in problems:
            echo(f"  - {indent(str(problem), '    ').lstrip()}", lines=True)
    ctx.exit(1 if problems else 0)


def _show_library(library: str, options: Mapping[str, str]) -> int:
    """Print what ``library`` offers and compiles, with the EP's ``options``; the exit code."""
    name, devices = describe_library(library)
    echo(f"{library} is registered as {name}, and offers:")
    for device in devices:
        echo(f"  {device.text}")
    echo("A small model on each device:")
    compiling = list[EpDevice]()
    for device, trial in zip(devices, try_library(library, name, devices, options), strict=True):
        echo(f"  {device.ep} on {device.kind}: {trial.account}")
        compiling += [device] * trial.compiles
    if not compiling:
        echo(
            "Its EP may need options (-O NAME=VALUE). Without EP contexts ship the source model, or an "
            "optimized graph of the provider cpu.",
        )
        return 1
    echo("These targets use it; compile a model with -p plugin to try it:")
    for table in _target_tables(library, compiling, options):
        echo(f"\n{table}", lines=True)
    return 0


def _show_wheels(paths: tuple[Path, ...], files: tuple[Path, ...], as_json: bool) -> int:
    """Print what becomes of the targets of the wheels at ``paths``; the exit code."""
    wheels = [expecting.read_wheel(path) for path in paths]
    stems = Counter(file.stem for file in files)
    names = [file.stem if stems[file.stem] == 1 else str(file) for file in files]
    machines = dict(zip(names, map(environment.read_machine, files), strict=True))
    machines = machines or {"this machine": expecting.this_machine(wheels)}
    expected = {name: expecting.expect(wheels, machine) for name, machine in machines.items()}
    # For each target what is expected of it on each machine.
    rows = [*zip(*expected.values(), strict=True)]
    if as_json:
        targets = [
            {
                "package": row[0].package,
                "model": row[0].model,
                "target": row[0].target,
                "machines": {
                    name: {"answer": cell.answer, "reason": cell.reason}
                    for name, cell in zip(machines, row, strict=True)
                },
            }
            for row in rows
        ]
        click.echo(
            json.dumps({"wheels": [path.name for path in paths], "targets": targets}, indent=2)
        )
    else:
        _show_table(machines, rows)
    failed = {
        name: models for name, e in expected.items() if (models := expecting.opens_nothing(e))
    }
    for name, models in failed.items():
        warn(f"{name}: load raises an error for {listing(models)}, because no target opens")
    return 1 if failed else 0


def _show_table(
    machines: Mapping[str, environment.Machine], rows: Sequence[tuple[expecting.Expectation, ...]]
) -> None:
    for name, machine in machines.items():
        runtime = f"onnxruntime {machine.runtime.version}" if machine.runtime else ""
        facts = (machine.system, machine.chip or machine.machine, runtime)
        echo(f"{name}: {', '.join(filter(None, facts))}")
    several = len({first.package for first, *_ in rows}) > 1
    models = [f"{e.package}: {e.model}" if several else e.model for e, *_ in rows]
    cells = ((m, r[0].target, *(e.answer for e in r)) for m, r in zip(models, rows, strict=True))
    show_table(("model", "target", *machines), cells)
    for model, row in zip(models, rows, strict=True):
        # Machines that say the same are in one line.
        names: dict[tuple[str, str], list[str]] = {}
        for name, cell in zip(machines, row, strict=True):
            names.setdefault((cell.answer, cell.reason), []).append(name)
        for (answer, reason), same in names.items():
            where = f" on {listing(same)}" if len(machines) > 1 else ""
            echo(f"{model} for {row[0].target}: {answer}{where}, {reason}")


def _show(states: Iterable[environment.ProviderState]) -> None:
    echo(
        f"hatch-epcontext {hatch_epcontext.__version__}, Python {platform.python_version()} "
        f"({sys.executable}), {platform.system()} {platform.machine()}"
    )
    for heading, packages in (
        ("ONNX Runtime", environment.versions(DISTRIBUTIONS)),
        ("tools", environment.versions(requirement.split(">=")[0] for requirement in TOOLS)),
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


def _problems(states: Iterable[environment.ProviderState]) -> list[Problem]:
    """What is wrong with this environment."""
    problems: list[Problem] = []
    try:
        check_environment((), TOOLS)
    except EpcontextError as error:
        problems += error.problems
    if not environment.versions(DISTRIBUTIONS):
        hint = f"Install {' or '.join(DISTRIBUTIONS[:2])}, or another distribution."
        message = "No ONNX Runtime is installed."
        problems.append(Problem(Kind.MISSING_REQUIREMENT, "this environment", message, hint))
    problems += (
        Problem(Kind.UNLOADABLE_LIBRARY, state.provider, state.reason)
        for state in states
        if state.devices and state.reason
    )
    return problems


def _target_tables(
    library: str, devices: Sequence[EpDevice], options: Mapping[str, str]
) -> Iterator[str]:
    """The table of a target for each EP that the library offers, as it is written in ``pyproject.toml``."""
    for ep in dict.fromkeys(device.ep for device in devices):
        name = file_name(ep.removesuffix("ExecutionProvider").lower(), "-")
        keys: dict[str, object] = {"provider": "plugin", "library": library, "ep-name": ep}
        if not is_path(library):
            packages = sorted(owners(library.partition(".")[0]))
            keys["requirements"] = [f"{name}>={installed(name)}" for name in packages]
        keys["device"] = next(device.kind for device in devices if device.ep == ep)
        if options := options_of(ep, options):
            keys["provider-options"] = options
        lines = [f"{key} = {to_toml(value)}" for key, value in keys.items()]
        yield "\n".join([f"[{ROOT}.targets.{quoted_key(name)}]", *lines])
