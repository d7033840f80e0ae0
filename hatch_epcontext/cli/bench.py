"""``epcontext bench``: how long models take to open, compiled and not."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
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
from hatch_epcontext.providers import find
from hatch_epcontext.serialize import to_json
from hatch_epcontext.system import check_file
from hatch_epcontext.text import show_size
from hatch_epcontext.tools.configure import JobSettings, configure, name_models
from hatch_epcontext.tools.measuring import Bench, Compiled, Measured, Series, bench

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
@click.option(
    "--embed/--no-embed",
    default=None,
    help="Only with the compiled blob inside the context model, or only beside it. The default is both.",
)
@click.option(
    "-n",
    "--runs",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="How often to open each, in a fresh process each time.",
)
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="F.json",
    help="Write the measurements of all runs; only such a file is overwritten.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="F.png",
    help="Draw a bar chart; only a chart is overwritten. Needs matplotlib.",
)
@verbosity_options
@click.pass_context
def command(
    ctx: click.Context,
    models: tuple[Path, ...],
    provider: str | None,
    job: JobSettings,
    target: str | None,
    embed: bool | None,
    runs: int,
    markdown: bool,
    json_path: Path | None,
    plot_path: Path | None,
    quiet: bool,
    verbose: int,
) -> None:
    """Measure how much faster compiled models open.

    Fresh processes open each MODEL, from disk and from memory, and run it once: the source on the CPU; the
    prepared source on the EP, which compiles it at each start; and the compiled form, with the blob beside
    and inside the context model. The table has medians with the range, and the peak memory of an open
    session. The cache is not used.

    Without MODEL: the models of the project in the current folder, as configured for the only target, or for
    --target.
    """
    _check_outputs(json_path, plot_path)
    verbosity = Verbosity(quiet, verbose)
    if not models:
        if provider is not None or job != JobSettings() or embed is not None:
            raise click.UsageError("These flags are for MODEL, and it is missing.")
        plans = _plan_of_project(target)
    elif provider is None or target is not None:
        raise click.UsageError("With MODEL give --provider, and not --target.")
    else:
        plans = _plans(models, provider, job, embed)
    workers = verbosity.workers(next(iter(plans.values())).config.build.timeout)
    with temp_dir() as staging, verbosity.progress("measuring", _steps(plans)) as log:
        measured = bench(plans, staging, runs, workers, log)
    if json_path is not None:
        write_atomically(json_path.resolve(), to_json(measured))
    if plot_path is not None:
        from hatch_epcontext.tools.plot import draw

        draw(measured, plot_path)
    if measured.measured:
        _show(measured, markdown=markdown)
    for each in measured.measured:
        if each.error is not None:
            echo(f"epcontext: {each.case}: {each.error}", err=True, lines=True)
    if measured.failures:
        raise BuildError(*measured.failures)
    ctx.exit(1 if any(each.error is not None for each in measured.measured) else 0)


def _plans(
    models: tuple[Path, ...], provider: str, job: JobSettings, embed: bool | None
) -> dict[bool | None, Plan]:
    """The plans for `bench`: with the blob beside and inside, or as in ``embed``."""
    named = name_models(models)
    use_flag_names(named, "not every model could be measured")
    known = find(provider)
    both = embed is None and known is not None and known.product == "context"
    return {
        each: plan(configure(named, provider, dataclasses.replace(job, embed=each)).on_this_machine)
        for each in ((False, True) if both else (embed,))
    }


def _plan_of_project(target: str | None) -> dict[bool | None, Plan]:
    """The plan for `bench` of the project in the current folder, for one target."""
    config = project_config(Path().absolute(), (target,) if target else (), ())
    targets = {each.name: each for each in config.targets}
    if len(targets) != 1:
        raise click.UsageError(f"Choose one target: --target {' or '.join(targets) or 'NAME'}.")
    (chosen,) = targets.values()
    is_context = chosen.provider.product == "context"
    return {chosen.settings.embed if is_context else None: plan(config.on_this_machine)}


def _check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """Check before the measurements, which take long, that the files can be written."""
    for path in (json_path, plot_path):
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            raise click.UsageError(f"There is no folder {path.absolute().parent}.")
        check_file(path)
    if plot_path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError('--plot needs matplotlib. Run: pip install "hatch-epcontext[plot]"')
    if plot_path.suffix not in (".png", ".svg"):
        raise click.UsageError(f"--plot writes .png or .svg, and not {plot_path.name}.")


def _steps(plans: dict[bool | None, Plan]) -> int:
    """The number of lines that `bench` logs: one for each compilation, and one for each case."""
    first = next(iter(plans.values()))
    opened = [2 if job.target.provider.runtime_cache else 1 for job in first.jobs]
    return sum(len(plans) + 2 * (2 + len(plans) * count) for count in opened)


def _show(bench: Bench, *, markdown: bool) -> None:
    """Print a row for each model, with its blob beside and inside, loaded from disk and from memory."""
    cached = any(each.case.opened == "cache" for each in bench.measured)
    context = any(each.embedded is not None for each in bench.compiled)
    product = "EP-context load" if context else "optimized load"
    columns = [
        "model",
        "loaded from",
        "blob",
        "source on the CPU",
        "source on the EP",
        "compile",
        product,
    ]
    columns += ["+ runtime cache"] if cached else []
    columns += ["faster than on the EP", "faster than on the CPU", "first inference", "memory"]
    rows = list(_rows(bench, cached=cached))
    if markdown:
        for row in (columns, ["---"] * len(columns), *rows):
            echo(f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |")
        echo("")
    else:
        made = table(*columns)
        for row in rows:
            add_row(made, *row)
        show(made)
    echo(f"First inference and memory: source on the CPU -> source on the EP -> {product}.")


def _rows(bench: Bench, *, cached: bool) -> Iterator[list[str]]:
    by_case = {
        (e.case.model, e.case.opened, e.case.embedded, e.case.buffer): e for e in bench.measured
    }
    order = list(dict.fromkeys(compiled.model for compiled in bench.compiled))
    for compiled in sorted(bench.compiled, key=lambda each: order.index(each.model)):
        for buffer in (False, True):
            cpu = by_case[compiled.model, "cpu", None, buffer]
            source = by_case[compiled.model, "source", None, buffer]
            artifact = by_case[compiled.model, "artifact", compiled.embedded, buffer]
            with_cache = by_case.get((compiled.model, "cache", compiled.embedded, buffer))
            yield [
                compiled.model,
                "memory" if buffer else "disk",
                {None: "-", True: "inside", False: "beside"}[compiled.embedded],
                *_cells(compiled, cpu, source, artifact, with_cache if cached else None),
            ]


def _cells(
    compiled: Compiled,
    cpu: Measured,
    source: Measured,
    artifact: Measured,
    cached: Measured | None,
) -> list[str]:
    return [
        _cell(cpu, cpu.load, _seconds),
        _cell(source, source.load, _seconds),
        f"{compiled.seconds:.2f} s",
        _cell(artifact, artifact.load, _seconds),
        *([_cell(cached, cached.load, _seconds)] if cached else []),
        _faster(source, artifact),
        _faster(cpu, artifact),
        " -> ".join(_cell(each, each.first, _plain_seconds) for each in (cpu, source, artifact)),
        " -> ".join(_cell(each, each.memory, _bytes) for each in (cpu, source, artifact)),
    ]


def _faster(before: Measured, after: Measured) -> str:
    if before.load is None or after.load is None:
        return "-"
    ratio = before.load.median / after.load.median
    return f"{ratio:.1f} x" if ratio >= 0.95 else f"{1 / ratio:.1f} x slower"


def _cell(measured: Measured, series: Series | None, text: Callable[[Series], str]) -> str:
    if measured.error is not None:
        return "failed"
    return "unknown" if series is None else text(series)


def _seconds(series: Series) -> str:
    return f"{series.median:.3f} s ({min(series.values):.3f} to {max(series.values):.3f})"


def _plain_seconds(series: Series) -> str:
    return f"{series.median:.3f} s"


def _bytes(series: Series) -> str:
    return show_size(series.median)
