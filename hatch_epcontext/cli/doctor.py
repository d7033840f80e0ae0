"""``epcontext doctor``: what this environment can compile for, and its problems."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import click

import hatch_epcontext
from hatch_epcontext.cli._common import cache_option, find_store
from hatch_epcontext.cli._output import echo
from hatch_epcontext.serialize import to_json
from hatch_epcontext.text import count
from hatch_epcontext.tools.doctor import Diagnosis, examine


@click.command()
@click.argument(
    "project", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path()
)
@cache_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_context
def doctor(ctx: click.Context, project: Path, cache_dir: Path | None, as_json: bool) -> None:
    """Show what this environment can compile for.

    It shows ONNX Runtime, the EPs with their devices or the reason for none, the cache, and the hook of
    PROJECT. The exit code is 1 if there are problems.
    """
    diagnosis = examine(project.absolute(), find_store(cache_dir), os.environ)
    if as_json:
        click.echo(to_json(diagnosis), nl=False)
    else:
        _show(diagnosis)
    ctx.exit(1 if diagnosis.problems else 0)


def _show(diagnosis: Diagnosis) -> None:
    system = f"{platform.system()} {platform.machine()}"
    echo(
        f"hatch-epcontext {hatch_epcontext.__version__}, Python {platform.python_version()} "
        f"({sys.executable}), {system}"
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
        for line in (*state.devices, *(state.reason or "").splitlines()):
            echo(f"    {line}")
    if diagnosis.problems:
        echo("problems:")
    for problem in diagnosis.problems:
        for index, line in enumerate(str(problem).splitlines()):
            echo(f"  {'- ' if index == 0 else '  '}{line}")
