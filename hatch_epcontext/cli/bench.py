"""``epcontext bench``: how long models take to open and to run, compiled and not, in fresh processes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import click

from hatch_epcontext.cache.build import Cache
from hatch_epcontext.cli import _common, _settings
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.artifact import Built
from hatch_epcontext.jobs.job import run_job
from hatch_epcontext.jobs.plan import Plan, plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.recipe import Recipe
from hatch_epcontext.jobs.run import begin
from hatch_epcontext.jobs.steps import Steps
from hatch_epcontext.serialize import to_plain
from hatch_epcontext.system import check_folder
from hatch_epcontext.text import pairs
from hatch_epcontext.tools.configure import configure, name_models
from hatch_epcontext.worker.requests import Prepared, TimeOpeningRequest

WAYS = {
    "cpu": "source on the CPU",
    "source": "source on the EP",
    "compiled": "compiled",
    "buffer": "compiled, from a buffer",
    "cached": "+ runtime cache",
}
"""How a model is opened. On the EP the prepared source is compiled at each start."""


@dataclass
class Opening:
    """One way to open one model: seconds to open it and for its first run, one value for each process.

    ``later``: the seconds of all runs after the warm-up. ``compile``: those of compiling it before.
    ``error``: why there are no values. ``simulated``: whether a simulator stood in for the device. What it
    takes to run says nothing about the device, and is left out.
    """

    model: str
    way: str
    compile: float
    load: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    simulated: bool = False
    error: str | None = None

    @property
    def title(self) -> str:
        """How it was opened, and on what if that is not the device."""
        return f"{WAYS[self.way]}, simulator" if self.simulated else WAYS[self.way]


@_common.command_with_examples(
    "bench",
    "model.onnx -p qnn --set chip=snapdragon-x-elite --dim batch=1",
    "--target x-elite",
)
@_settings.models_argument(required=False)
@_settings.provider_option(required=False)
@_settings.short_flags
@click.option("--target", help="The target of the project, without MODEL.")
@click.option(
    "--starts", type=click.IntRange(1), default=5, help="How many processes open it; 5 by default."
)
@click.option(
    "-n",
    "--runs",
    type=click.IntRange(1),
    default=100,
    help="How many runs, of all processes, are measured after the warm-up; 100 by default.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all times as JSON, in seconds.")
@click.option(
    "--plot", type=_common.new_file, metavar="F.png", help="Draw a bar chart: .png or .svg."
)
@click.pass_context
def command(
    ctx: click.Context,
    models: tuple[Path, ...],
    provider: str | None,
    settings: dict[str, Any],
    target: str | None,
    starts: int,
    runs: int,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Measure how fast compiled models open and run.

    New processes open each MODEL and run it: the source on the CPU; the prepared source on the EP, which
    compiles it at each start; and the compiled model, from its file and from a buffer. The table has the
    median, the least and the most of all starts, and of the runs after the warm-up the median, and what 95 %
    and 99 % of them do not exceed. Runs on a simulator are not measured. The cache is not used.

    Without MODEL: the models of the project in the current folder, for the only target or --target.
    """
    # Before the measurements, which take long.
    if plot is not None:
        check_folder(plot.parent)
        if plot.suffix not in (".png", ".svg"):
            raise click.UsageError(f"--plot writes .png or .svg, and not {plot.name}.")
        if importlib.util.find_spec("matplotlib") is None:
            raise click.UsageError(
                '--plot needs matplotlib. Run: pip install "hatch-epcontext[plot]"'
            )
    if models and provider is not None and target is None:
        named = name_models(models)
        _settings.use_flag_names(named, "nothing was measured")
        config = configure(named, provider, settings)
    elif not models and provider is None and not settings:
        config = _settings.project_config(Path().absolute(), (target,) if target else ())
    else:
        raise click.UsageError("Give MODEL and --provider, or neither and only --target.")
    planned = plan(config.on_this_machine)
    if len(names := dict.fromkeys(job.target.name for job in planned.jobs)) != 1:
        raise click.UsageError(f"Choose one target: --target {' or '.join(names) or 'NAME'}.")
    workers = _common.make_workers(0, config.build.timeout)
    with temp_dir() as staging:
        openings, versions = measure(planned, staging, workers, starts, -(-runs // starts))
    if plot is not None:
        draw(openings, f"{names.popitem()[0]}: {pairs(versions)}", plot)
    if as_json:
        listed = [{**to_plain(o), "latency": _latency(o) or None} for o in openings]
        report = {"versions": versions, "openings": listed}
        click.echo(json.dumps(report, indent=2))
    else:
        _common.show_table(_COLUMNS, map(_row, openings))
        if any(opening.simulated for opening in openings):
            _common.echo(
                "The simulator's load times are not those of a device, and its runs are not measured."
            )
    ctx.exit(1 if any(opening.error for opening in openings) else 0)


def measure(
    planned: Plan, staging: Path, workers: Workers, starts: int, runs: int
) -> tuple[list[Opening], Mapping[str, str]]:
    """Compile the models of ``planned`` without the cache, and open each ``starts`` times in each way.

    Each time it runs once, and ``runs`` times after a warm-up. Returns the measurements, and the versions of
    the packages.

    The ways take turns, so that changes on the machine affect all alike, after a run that only fills caches.
    Raises RequirementError when something is not installed, and BuildError when a model cannot be compiled,
    or its result cannot be opened on this machine.
    """
    cache = Cache(None, _common.warn)
    build = begin(planned, staging, cache, workers)
    versions = dict[str, str]()
    requests = list[tuple[Opening, TimeOpeningRequest]]()
    for job in build.jobs:
        if reason := job.reason_not_to_open:
            hint = "Measure the chips one at a time."
            raise BuildError(Problem(Kind.NOT_RUN, job.location, f"{reason}.", hint))
        built = run_job(build, job)
        times, recipe = built.attempt.times, Recipe(built.record.recipe.simplifier)
        try:
            prepared = Steps(build, build.scratch("prepared")).prepare_and_change(job, 0, recipe)
        except BuildError as error:
            raise job.located(error) from error
        versions |= built.record.versions
        folder = staging / f"cache-{len(requests)}"
        folder.mkdir()
        for way, request in _requests(built, prepared, folder, runs):
            seconds = times.compile if times and way not in ("cpu", "source") else 0.0
            requests.append((Opening(job.name, way, seconds), request))
    numbers = itertools.count()
    for start, (opening, request) in itertools.product(range(starts + 1), requests):
        if opening.error is None:
            folder, location = staging / str(next(numbers)), f"{opening.model}: {opening.way}"
            try:
                reply = workers.call(request, folder, location=location)
            except BuildError as error:
                opening.error = "; ".join(
                    " ".join(filter(None, (problem.message, problem.hint)))
                    for problem in error.problems
                )
                _common.warn(f"{location}: {opening.error}")
                continue
            if start > 0:
                opening.load.append(reply.load)
                opening.simulated = reply.simulated
                opening.first += [] if reply.simulated else [reply.first]
                opening.later += reply.later
    return [opening for opening, _ in requests], versions


def _requests(
    built: Built, prepared: Prepared, cache: Path, runs: int
) -> Iterator[tuple[str, TimeOpeningRequest]]:
    """Each way to open the model of ``built``, with the request to do it."""
    model, target = built.job.models[0], built.job.target
    context, option = built.record.contexts[0], target.provider.runtime_cache
    compiled = str(built.folder / context.model_file)
    inputs = model.to_run_on(target), context.inputs, prepared.ranges, runs
    yield "cpu", TimeOpeningRequest(str(model.path), None, False, False, *inputs)
    yield "source", TimeOpeningRequest(prepared.path, target, False, False, *inputs)
    yield "compiled", TimeOpeningRequest(compiled, target, True, False, *inputs)
    yield "buffer", TimeOpeningRequest(compiled, target, True, True, *inputs)
    if option is not None:
        target = replace(target, load_options={**target.load_options, option: str(cache)})
        yield "cached", TimeOpeningRequest(compiled, target, True, False, *inputs)


_COLUMNS = "model", "opened", "compile", "load", "first run", "run: median", "95 %", "99 %"


def _row(opening: Opening) -> tuple[str, ...]:
    compiling = f"{opening.compile:.2f} s" if opening.compile else ""
    runs = [f"{1000 * seconds:.3f} ms" for seconds in _latency(opening).values()] or [""] * 3
    loading = "failed" if opening.error else _seconds(opening.load)
    first = _seconds(opening.first) if opening.first else ""
    return (opening.model, opening.title, compiling, loading, first, *runs)


def _seconds(values: Sequence[float]) -> str:
    return f"{median(values):.3f} s ({min(values):.3f} to {max(values):.3f})"


def _latency(opening: Opening) -> dict[str, float]:
    """The median, 95th and 99th percentile of the runs after the warm-up; nothing if none was measured."""
    if not (runs := sorted(opening.later)):
        return {}
    # By nearest rank: a time that a run took.
    later = {name: runs[math.ceil(share * len(runs)) - 1] for name, share in _SHARES.items()}
    return {"median": median(runs), **later}


_SHARES = {"p95": 0.95, "p99": 0.99}


def draw(openings: Sequence[Opening], title: str, path: Path) -> None:
    """Write a bar chart to ``path``, in the format of its suffix: medians, with ranges.

    Below the times of opening are those of runs, where a device or the CPU ran, up to the 99th percentile.
    """
    from matplotlib.figure import Figure

    opened, run = [o for o in openings if o.load], [o for o in openings if o.later]
    parts = [("seconds until the session is open", "s", opened, [o.load for o in opened])]
    if run:
        latencies = [_latency(o) for o in run]
        times = [
            [1000 * n for n in (min(o.later), latency["median"], latency["p99"])]
            for o, latency in zip(run, latencies, strict=True)
        ]
        parts.append(("milliseconds of a run, to the 99th percentile", "ms", run, times))
    heights = [0.5 + 0.4 * len(part[2]) for part in parts]
    figure = Figure((9, 1 + sum(heights)), dpi=120, layout="constrained")
    rows = figure.subplots(len(parts), height_ratios=heights, squeeze=False)
    for axes, (label, unit, bars, values) in zip(rows[:, 0], parts, strict=True):
        for opening, seconds in zip(bars, values, strict=True):
            middle = median(seconds)
            drawn = axes.barh(
                f"{opening.model}: {opening.title}",
                middle,
                xerr=[[middle - min(seconds)], [max(seconds) - middle]],
                color=f"C{list(WAYS).index(opening.way)}",
                capsize=2,
            )
            axes.bar_label(drawn, [f"{middle:.3f} {unit}"], padding=6)
        axes.set_xlabel(label)
        # Space for the numbers beside the bars.
        axes.margins(x=0.18)
        axes.invert_yaxis()
    figure.suptitle(f"{title}; medians and ranges", fontsize=10)
    figure.savefig(path)
