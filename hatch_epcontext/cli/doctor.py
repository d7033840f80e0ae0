"""``epcontext doctor``: what this environment can compile for, and its problems."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import click

import hatch_epcontext
from hatch_epcontext.cli._common import Verbosity, cache_option, find_store, verbose_option
from hatch_epcontext.cli._flag_errors import ExistingPath, use_flag_names
from hatch_epcontext.cli._flags import library_flags
from hatch_epcontext.cli._library import show_library
from hatch_epcontext.cli._output import echo
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.serialize import to_json
from hatch_epcontext.text import count
from hatch_epcontext.tools.configure import JobSettings
from hatch_epcontext.tools.examining import Diagnosis, examine
from hatch_epcontext.tools.plugin_library import Verdict, try_library
from hatch_epcontext.worker.requests import TRIALS

_EXAMPLES = """\b
Examples:
  epcontext doctor
  epcontext doctor --library build/libmy_ep.so --ep-name MyEP --option threads=2
"""


@click.command("doctor", epilog=_EXAMPLES)
@click.argument("project", type=ExistingPath(file_okay=False), default=Path())
@cache_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--library",
    metavar="PATH",
    help="Instead: try this library of a plugin EP. A file, or a package with get_library_path().",
)
@click.option("--ep-name", metavar="EP", help="The EP to try, where the library has several.")
@click.option(
    "--graph",
    "graphs",
    type=click.Choice([*TRIALS]),
    multiple=True,
    help="A graph to try the library with; repeatable. The default is all.",
)
@library_flags
@verbose_option
@click.pass_context
def command(
    ctx: click.Context,
    project: Path,
    cache_dir: Path | None,
    as_json: bool,
    library: str | None,
    ep_name: str | None,
    graphs: tuple[str, ...],
    job: JobSettings,
    verbose: int,
) -> None:
    """Show what this environment can compile for.

    Shows ONNX Runtime, the EPs with their devices or the reason for none, the cache, and the hook of
    PROJECT. The exit code is 1 if there are problems.

    With --library it tries a library of any plugin EP with small graphs: its EPs and devices, the operators
    that it supports, and whether its EP contexts open with compiling disabled and give the CPU's answers. It
    prints the table for pyproject.toml. The exit code is 1 if the EP writes no contexts, or a step failed.
    """
    if library is None:
        if ep_name or graphs or verbose or job != JobSettings():
            raise click.UsageError("These flags are for a library: give --library too.")
        diagnosis = examine(project.absolute(), find_store(cache_dir), os.environ)
        if as_json:
            click.echo(to_json(diagnosis), nl=False)
        else:
            _show(diagnosis)
        ctx.exit(1 if diagnosis.problems else 0)
    use_flag_names({}, "the library was not tried")
    verbosity = Verbosity.beside_json(False, verbose, as_json=as_json)
    names = graphs or tuple(TRIALS)
    with verbosity.progress("trying", len(names)) as log:
        found = try_library(
            library, ep_name, names, job, project.absolute(), verbosity.workers, log
        )
    if as_json:
        click.echo(to_json(found), nl=False)
    else:
        _show_head()
        show_library(found)
    ctx.exit(0 if found.verdict in (Verdict.WORKS, Verdict.NOT_RUN) else 1)


def _show_head() -> None:
    system = f"{platform.system()} {platform.machine()}"
    echo(
        f"hatch-epcontext {hatch_epcontext.__version__}, Python {platform.python_version()} "
        f"({sys.executable}), {system}"
    )


def _show(diagnosis: Diagnosis) -> None:
    _show_head()
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
        is_simulated = provider.simulates and provider.runs_on(sys.platform, platform.machine())
        if state.devices and not state.reason and is_simulated:
            echo(f"    compiles for {provider.title}; a simulator runs the results here")
    if diagnosis.problems:
        echo("problems:")
    for problem in diagnosis.problems:
        for index, line in enumerate(str(problem).splitlines()):
            echo(f"  {'- ' if index == 0 else '  '}{line}")
