"""``epcontext bench``: how long it takes to open models, compiled and not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import click
from rich import box
from rich.table import Table

from hatch_epcontext.bench import Bench, Compiled, Measured, Series, bench
from hatch_epcontext.cli import output
from hatch_epcontext.cli.flags import Flags, job_flags, models_argument
from hatch_epcontext.cli.running import Voice, voice_options, workplace
from hatch_epcontext.cli.tables import configuration, names_of
from hatch_epcontext.cli.told import told_in_flags
from hatch_epcontext.errors import BuildError
from hatch_epcontext.files import replace
from hatch_epcontext.plan import Plan, plan
from hatch_epcontext.providers import find
from hatch_epcontext.structure import show_size, to_json


@click.command("bench")
@models_argument
@job_flags
@click.option(
    "--embed/--no-embed",
    default=None,
    help="Only with the compiled blob inside the context model, or only beside it; both if left out.",
)
@click.option(
    "-n",
    "--runs",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="How often each is opened, in a fresh process each time.",
)
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
@click.option(
    "--json",
    "as_json",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="F.json",
    help="Write all figures of all runs.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="F.png",
    help="Draw a bar chart; needs matplotlib.",
)
@voice_options
@click.pass_context
def bench_(
    ctx: click.Context,
    models: tuple[Path, ...],
    flags: Flags,
    embed: bool | None,
    runs: int,
    markdown: bool,
    as_json: Path | None,
    plot: Path | None,
    quiet: bool,
    verbose: int,
) -> None:
    """Measure what compiling models gains.

    Opened are the source of each MODEL (shapes fixed, and folded) and what is compiled of it, from disk and
    from memory, with the blob beside and inside: each in a fresh process, which runs it once. What is shown
    is the median, and in parentheses the least and the most. Memory is the most that the process had once
    the session was open. Nothing comes from the cache.
    """
    _check_outputs(as_json, plot)
    named = names_of(models)
    voice = Voice(quiet, verbose)
    with told_in_flags(named, "not every model could be measured"), workplace() as staging:
        known = find(flags.provider)
        both = embed is None and known is not None and known.product == "context"
        plans: dict[bool | None, Plan] = {
            each: plan(configuration(named, flags, embed=each))
            for each in ((False, True) if both else (embed,))
        }
        timeout = next(iter(plans.values())).config.timeout
        with voice.progress("measuring", _steps(plans)) as tell:
            measured = bench(plans, staging, runs, voice.workers(timeout), tell)
        if as_json is not None:
            replace(as_json, to_json(measured))
        if plot is not None:
            from hatch_epcontext.plot import draw

            draw(measured, plot)
        output.show(_table(measured, markdown=markdown))
        for each in measured.measured:
            if each.failed:
                click.echo(f"epcontext: {each.case}: {each.failed}", err=True)
        if measured.failures:
            raise BuildError(*measured.failures)
    ctx.exit(1 if any(each.failed for each in measured.measured) else 0)


def _check_outputs(*paths: Path | None) -> None:
    """See beforehand that files can be written, for measuring takes long."""
    for path in filter(None, paths):
        if not path.absolute().parent.is_dir():
            raise click.UsageError(f"There is no folder {path.absolute().parent}.")
    plot = paths[1]
    if plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError('--plot needs matplotlib. Run: pip install "hatch-epcontext[plot]"')
    if plot.suffix not in (".png", ".svg", ".pdf"):
        raise click.UsageError(f"--plot writes .png, .svg or .pdf, and not {plot.name}.")


def _steps(plans: dict[bool | None, Plan]) -> int:
    """How many lines `bench` tells: one for each compilation, and one for each case."""
    first = next(iter(plans.values()))
    opened = [2 if job.target.provider.runtime_cache else 1 for job in first.jobs]
    return sum(len(plans) + 2 * (1 + len(plans) * count) for count in opened)


def _table(bench: Bench, *, markdown: bool) -> Table:
    """One row for each model, way of loading, and place of the blob."""
    cached = any(each.case.opened == "cache" for each in bench.measured)
    context = any(each.embedded is not None for each in bench.compiled)
    product = "EP-context load" if context else "optimized load"
    columns = ["model", "loaded from", "blob", "normal load", "compile", product]
    columns += ["+ runtime cache"] if cached else []
    columns += ["faster", "first inference", "memory"]
    table = Table(box=box.MARKDOWN) if markdown else Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    by_case = {
        (e.case.model, e.case.opened, e.case.embedded, e.case.buffer): e for e in bench.measured
    }
    order = list(dict.fromkeys(compiled.model for compiled in bench.compiled))
    for compiled in sorted(bench.compiled, key=lambda each: order.index(each.model)):
        for buffer in (False, True):
            source = by_case[compiled.model, "source", None, buffer]
            made = by_case[compiled.model, "artifact", compiled.embedded, buffer]
            with_cache = by_case.get((compiled.model, "cache", compiled.embedded, buffer))
            table.add_row(
                compiled.model,
                "memory" if buffer else "disk",
                {None: "-", True: "inside", False: "beside"}[compiled.embedded],
                *_figures(compiled, source, made, with_cache if cached else None),
            )
    return table


def _figures(
    compiled: Compiled, source: Measured, made: Measured, cached: Measured | None
) -> list[str]:
    faster = f"{source.load.median / made.load.median:.1f} x" if source.load and made.load else "-"
    return [
        _told(source, source.load, _seconds),
        f"{compiled.seconds:.2f} s",
        _told(made, made.load, _seconds),
        *([_told(cached, cached.load, _seconds)] if cached else []),
        faster,
        " -> ".join(_told(each, each.first, _plain_seconds) for each in (source, made)),
        " -> ".join(_told(each, each.memory, _bytes) for each in (source, made)),
    ]


def _told(measured: Measured, series: Series | None, say: Callable[[Series], str]) -> str:
    if measured.failed:
        return "failed"
    return "unknown" if series is None else say(series)


def _seconds(series: Series) -> str:
    return f"{series.median:.3f} s ({min(series.values):.3f} to {max(series.values):.3f})"


def _plain_seconds(series: Series) -> str:
    return f"{series.median:.3f} s"


def _bytes(series: Series) -> str:
    return show_size(series.median)
