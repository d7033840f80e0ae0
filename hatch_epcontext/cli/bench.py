"""``epcontext bench``: how long models take to open, compiled and not."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path

import click

from hatch_epcontext.cli._common import Verbosity, verbosity_options
from hatch_epcontext.cli._flag_errors import use_flag_names
from hatch_epcontext.cli._flags import job_flags, models_argument
from hatch_epcontext.cli._output import add_row, echo, show, table
from hatch_epcontext.cli._project import project_config
from hatch_epcontext.errors import BuildError
from hatch_epcontext.files import temp_dir, write_atomically
from hatch_epcontext.jobs.plan import Plan, plan
from hatch_epcontext.serialize import to_json
from hatch_epcontext.system import check_file
from hatch_epcontext.tools.configure import JobSettings, configure, name_models
from hatch_epcontext.tools.measuring import WAYS, Bench, measure

# Click keeps the lines of a paragraph that begins with a backspace.
_EXAMPLES = """\b
Examples:
  epcontext bench model.onnx -p qnn -O soc_model=60 -O htp_arch=73 --dim batch=1
  epcontext bench --target x-elite
"""


@click.command("bench", epilog=_EXAMPLES)
@models_argument(required=False)
@job_flags(required=False)
@click.option("-t", "--target", help="The target of the project, without MODEL.")
@click.option("--from-memory", is_flag=True, help="Open the models from memory, not from disk.")
@click.option(
    "-n",
    "--runs",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="How often to open each.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="F.json",
    help="Write the measurements of all runs.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="F.png",
    help="Draw a bar chart. Needs matplotlib.",
)
@verbosity_options
@click.pass_context
def command(
    ctx: click.Context,
    models: tuple[Path, ...],
    provider: str | None,
    job: JobSettings,
    target: str | None,
    from_memory: bool,
    runs: int,
    json_path: Path | None,
    plot_path: Path | None,
    quiet: bool,
    verbose: int,
) -> None:
    """Measure how much faster compiled models open.

    Fresh processes open each MODEL and run it once: the source on the CPU; the prepared source on the EP,
    which compiles it at each start; and the compiled form. The table has the median, and the least and the
    most of all runs. The cache is not used.

    Without MODEL: the models of the project in the current folder, for the only target or --target.
    """
    _check_outputs(json_path, plot_path)
    if not models:
        if provider is not None or job != JobSettings():
            raise click.UsageError("These flags are for MODEL, and it is missing.")
        planned = _plan_of_project(target)
    elif provider is None or target is not None:
        raise click.UsageError("With MODEL give --provider, and not --target.")
    else:
        named = name_models(models)
        use_flag_names(named, "not every model could be measured")
        planned = plan(configure(named, provider, job).on_this_machine)
    verbosity = Verbosity(quiet, verbose)
    workers = verbosity.workers(planned.config.build.timeout)
    lines = sum(5 if job.target.provider.runtime_cache else 4 for job in planned.jobs)
    with temp_dir() as staging, verbosity.progress("measuring", lines) as log:
        bench = measure(planned, staging, runs, workers, log, from_memory=from_memory)
    if json_path is not None:
        write_atomically(json_path.resolve(), to_json(bench))
    if plot_path is not None:
        from hatch_epcontext.cli._chart import draw

        draw(bench, plot_path)
    if bench.openings:
        _show(bench)
    failed = [opening for opening in bench.openings if opening.error is not None]
    for opening in failed:
        echo(f"epcontext: {opening.model}: {opening.way}: {opening.error}", err=True, lines=True)
    if bench.failures:
        raise BuildError(*bench.failures)
    ctx.exit(1 if failed else 0)


def _plan_of_project(target: str | None) -> Plan:
    """The plan of the project in the current folder, for one target."""
    config = project_config(Path().absolute(), (target,) if target else (), ())
    names = dict.fromkeys(target.name for target in config.targets)
    if len(names) != 1:
        raise click.UsageError(f"Choose one target: --target {' or '.join(names) or 'NAME'}.")
    return plan(config.on_this_machine)


def _check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """Check before the measurements, which take long, that the files can be written."""
    for path in filter(None, (json_path, plot_path)):
        if not path.absolute().parent.is_dir():
            raise click.UsageError(f"There is no folder {path.absolute().parent}.")
        check_file(path)
    if plot_path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError('--plot needs matplotlib. Run: pip install "hatch-epcontext[plot]"')
    if plot_path.suffix not in (".png", ".svg"):
        raise click.UsageError(f"--plot writes .png or .svg, and not {plot_path.name}.")


def _show(bench: Bench) -> None:
    """Print a row for each model."""
    ways = [way for way in WAYS if any(opening.way == way for opening in bench.openings)]
    openings = {(opening.model, opening.way): opening for opening in bench.openings}
    rows = table("model", "", "compile", *(WAYS[way] for way in ways), "faster than on the EP")
    for model, seconds in bench.compiled.items():
        row = [openings[model, way] for way in ways]
        load = [_seconds(opening.load) for opening in row]
        first = [_seconds(opening.first) for opening in row]
        faster = _faster(openings[model, "source"].load, openings[model, "compiled"].load)
        add_row(rows, model, "load", f"{seconds:.2f} s", *load, faster)
        add_row(rows, "", "first run", "", *first, "")
    show(rows)


def _seconds(values: tuple[float, ...]) -> str:
    if not values:
        return "failed"
    return f"{statistics.median(values):.3f} s ({min(values):.3f} to {max(values):.3f})"


def _faster(before: tuple[float, ...], after: tuple[float, ...]) -> str:
    if not before or not after:
        return "-"
    ratio = statistics.median(before) / statistics.median(after)
    return f"{ratio:.1f} x" if ratio >= 0.95 else f"{1 / ratio:.1f} x slower"
