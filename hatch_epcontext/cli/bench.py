"""``epcontext bench``: how long models take to open, compiled and not, in a fresh process each time."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import click

from hatch_epcontext.cli._common import make_workers, show_table, warn
from hatch_epcontext.cli._settings import (
    models_argument,
    project_config,
    provider_option,
    short_flags,
    use_flag_names,
)
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.artifact import Artifact
from hatch_epcontext.jobs.cache.build import Cache
from hatch_epcontext.jobs.job import run_job
from hatch_epcontext.jobs.plan import Job, Plan, plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.recipe import Recipe
from hatch_epcontext.jobs.run import begin
from hatch_epcontext.jobs.steps import Steps
from hatch_epcontext.system import check_folder
from hatch_epcontext.text import pairs
from hatch_epcontext.tools.configure import configure, name_models
from hatch_epcontext.worker.requests import Prepared, TimeOpeningRequest

WAYS = {
    "cpu": "source on the CPU",
    "source": "source on the EP",
    "compiled": "compiled",
    "cached": "+ runtime cache",
}
"""How a model is opened. On the EP the prepared source is compiled at each start."""


@dataclass
class Opening:
    """One way to open one model: seconds to open it and for its first run, one value for each process.

    ``compile``: the seconds of compiling it before. ``error``: why there are no values.
    """

    model: str
    way: str
    compile: float
    load: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    error: str | None = None


# Click keeps the lines of a paragraph that begins with a backspace.
_EXAMPLES = """\b
Examples:
  epcontext bench model.onnx -p qnn --set chip=snapdragon-x-elite --dim batch=1
  epcontext bench --target x-elite
"""


@click.command("bench", epilog=_EXAMPLES)
@models_argument(required=False)
@provider_option(required=False)
@short_flags
@click.option("--target", help="The target of the project, without MODEL.")
@click.option("-n", "--runs", type=click.IntRange(1), default=5, help="How often; 5 by default.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="F.png",
    help="Draw a bar chart: .png or .svg.",
)
@click.pass_context
def command(
    ctx: click.Context,
    models: tuple[Path, ...],
    provider: str | None,
    settings: dict[str, Any],
    target: str | None,
    runs: int,
    plot: Path | None,
) -> None:
    """Measure how much faster compiled models open.

    New processes open each MODEL and run it once: the source on the CPU; the prepared source on the EP,
    which compiles it at each start; and the compiled model. The table has the median, the least and the most
    of all runs. The cache is not used.

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
        use_flag_names(named, "nothing was measured")
        config = configure(named, provider, settings)
    elif not models and provider is None and not settings:
        config = project_config(Path().absolute(), (target,) if target else ())
    else:
        raise click.UsageError("Give MODEL and --provider, or neither and only --target.")
    planned = plan(config.on_this_machine)
    if len(names := dict.fromkeys(job.target.name for job in planned.jobs)) != 1:
        raise click.UsageError(f"Choose one target: --target {' or '.join(names) or 'NAME'}.")
    workers = make_workers(0, config.build.timeout)
    with temp_dir() as staging:
        openings, versions = measure(planned, staging, workers, runs)
    if plot is not None:
        draw(openings, f"{names.popitem()[0]}: {pairs(versions)}", plot)
    rows = (
        (
            *(o.model, WAYS[o.way], f"{o.compile:.2f} s" if o.compile else ""),
            *(_seconds(o.load), _seconds(o.first)),
        )
        for o in openings
    )
    show_table(("model", "opened", "compile", "load", "first run"), rows)
    ctx.exit(1 if any(opening.error for opening in openings) else 0)


def measure(
    planned: Plan, staging: Path, workers: Workers, runs: int
) -> tuple[list[Opening], Mapping[str, str]]:
    """Compile the models of ``planned`` without the cache, and open each of them ``runs`` times in each way.

    Returns the measurements, and the versions of the packages.

    The ways take turns, so that changes on the machine affect all alike, after a run that only fills caches.
    Raises RequirementError when something is not installed, and BuildError when a model cannot be compiled,
    or its result cannot be opened on this machine.
    """
    cache = Cache(None, warn)
    build = begin(planned, staging, cache, workers)
    versions = dict[str, str]()
    requests = list[tuple[Opening, TimeOpeningRequest]]()
    for job in build.jobs:
        if reason := job.reason_not_to_open:
            hint = "Measure the chips one at a time."
            raise BuildError(Problem(Kind.NOT_RUN, job.location, f"{reason}.", hint))
        built = run_job(build, job)
        artifact, times = built.artifact, built.attempt.times
        recipe = Recipe(artifact.record.recipe.simplifier)
        try:
            prepared = Steps(build, build.scratch("prepared")).prepare(job, 0, recipe)
        except BuildError as error:
            raise job.located(error) from error
        versions |= artifact.record.versions
        folder = staging / f"cache-{len(requests)}"
        folder.mkdir()
        for way, request in _requests(job, prepared, artifact, folder):
            seconds = times.compile if times and way in ("compiled", "cached") else 0.0
            requests.append((Opening(job.name, way, seconds), request))
    numbers = itertools.count()
    for run, (opening, request) in itertools.product(range(runs + 1), requests):
        if opening.error is None:
            folder, location = staging / str(next(numbers)), f"{opening.model}: {opening.way}"
            try:
                reply = workers.call(request, folder, location=location)
            except BuildError as error:
                opening.error = "; ".join(
                    " ".join(filter(None, (problem.message, problem.hint)))
                    for problem in error.problems
                )
                warn(f"{location}: {opening.error}")
                continue
            if run > 0:
                opening.load.append(reply.load)
                opening.first.append(reply.first)
    return [opening for opening, _ in requests], versions


def _requests(
    job: Job, prepared: Prepared, artifact: Artifact, cache: Path
) -> Iterator[tuple[str, TimeOpeningRequest]]:
    """Each way to open the model of ``job``, with the request to do it."""
    model, target = job.models[0], job.target
    context, option = artifact.record.contexts[0], target.provider.runtime_cache
    compiled = str(artifact.folder / context.model_file)
    inputs = model.to_run_on(target), context.inputs, prepared.ranges
    yield "cpu", TimeOpeningRequest(str(model.path), None, False, *inputs)
    yield "source", TimeOpeningRequest(prepared.path, target, False, *inputs)
    yield "compiled", TimeOpeningRequest(compiled, target, True, *inputs)
    if option is not None:
        target = replace(target, load_options={**target.load_options, option: str(cache)})
        yield "cached", TimeOpeningRequest(compiled, target, True, *inputs)


def _seconds(values: Sequence[float]) -> str:
    if not values:
        return "failed"
    return f"{median(values):.3f} s ({min(values):.3f} to {max(values):.3f})"


def draw(openings: Sequence[Opening], title: str, path: Path) -> None:
    """Write a bar chart to ``path``, in the format of its suffix: medians, with the range of all runs."""
    from matplotlib.figure import Figure

    opened = [opening for opening in openings if opening.load]
    figure = Figure((9, 1.6 + 0.4 * len(opened)), dpi=120, layout="constrained")
    axes = figure.subplots()
    for opening in opened:
        middle = median(opening.load)
        bars = axes.barh(
            f"{opening.model}: {WAYS[opening.way]}",
            middle,
            xerr=[[middle - min(opening.load)], [max(opening.load) - middle]],
            color=f"C{list(WAYS).index(opening.way)}",
            capsize=2,
        )
        axes.bar_label(bars, [f"{middle:.3f} s"], padding=6)
    axes.set_xlabel("seconds until the session is open")
    # Space for the numbers beside the bars.
    axes.margins(x=0.18)
    axes.invert_yaxis()
    figure.suptitle(f"{title}; medians and ranges", fontsize=10)
    figure.savefig(path)
