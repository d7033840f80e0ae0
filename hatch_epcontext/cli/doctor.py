"""``epcontext doctor``: what this environment can compile for, and what is wrong with it."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import click

import hatch_epcontext
from hatch_epcontext.cli.running import cache_option, store_at
from hatch_epcontext.structure import to_json
from hatch_epcontext.survey import Survey
from hatch_epcontext.survey import survey as look


@click.command()
@click.argument(
    "project", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path()
)
@cache_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_context
def doctor(ctx: click.Context, project: Path, cache_dir: Path | None, as_json: bool) -> None:
    """Show what this environment can compile for.

    That is: ONNX Runtime, EPs and their devices or why there are none, the cache, and PROJECT's hook.
    Ends with 1 when something has to be mended.
    """
    found = look(project.absolute(), store_at(cache_dir), os.environ)
    if as_json:
        click.echo(to_json(found), nl=False)
    else:
        _show(found)
    ctx.exit(1 if found.problems else 0)


def _show(found: Survey) -> None:
    system = f"{platform.system()} {platform.machine()}"
    click.echo(
        f"hatch-epcontext {hatch_epcontext.__version__}, Python {platform.python_version()} "
        f"({sys.executable}), {system}"
    )
    for heading, versions in (("ONNX Runtime", found.flavours), ("tools", found.tools)):
        told = ", ".join(f"{name} {version}" for name, version in versions.items())
        click.echo(f"{heading}: {told or 'none'}")
    noun = "artifact" if found.artifacts == 1 else "artifacts"
    click.echo(f"cache: {found.cache}, {found.artifacts} {noun}")
    click.echo(f"project: {found.project}")
    click.echo("providers:")
    for state in found.providers:
        package = f" ({state.package})" if state.package else ""
        click.echo(f"  {state.provider}{package}")
        for line in (*state.devices, *state.why.splitlines()):
            click.echo(f"    {line}")
    if found.problems:
        click.echo("to be mended:")
    for problem in found.problems:
        for index, line in enumerate(problem.splitlines()):
            click.echo(f"  {'- ' if index == 0 else '  '}{line}")
