"""``epcontext doctor``: what this environment can compile for, and its problems."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import click

import hatch_epcontext
from hatch_epcontext.cli._common import ExistingPath, find_store
from hatch_epcontext.cli._output import echo
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.serialize import to_json
from hatch_epcontext.text import count
from hatch_epcontext.tools.examining import TIMEOUT, Diagnosis, examine
from hatch_epcontext.tools.plugin_library import describe_library, target_tables

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
        diagnosis = examine(project.absolute(), find_store(), os.environ)
        if as_json:
            click.echo(to_json(diagnosis), nl=False)
        else:
            _show(diagnosis)
        ctx.exit(1 if diagnosis.problems else 0)
    reply = describe_library(library, Workers(TIMEOUT))
    if as_json:
        click.echo(to_json(reply), nl=False)
        return
    echo(f"{library} is registered as {reply.name}, and offers:")
    for device in reply.devices:
        echo(f"  {device.text}")
    echo("These targets use it; compile a model with -p plugin to try it:")
    for table in target_tables(library, reply):
        echo(f"\n{table}", lines=True)


def _show(diagnosis: Diagnosis) -> None:
    echo(
        f"hatch-epcontext {hatch_epcontext.__version__}, Python {platform.python_version()} "
        f"({sys.executable}), {platform.system()} {platform.machine()}"
    )
    for heading, versions in (
        ("ONNX Runtime", diagnosis.distributions),
        ("tools", diagnosis.tools),
    ):
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
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
