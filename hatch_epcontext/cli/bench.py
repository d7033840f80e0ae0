"""``epcontext bench``: how long models take to open, compiled and not, in a fresh process each time."""

from __future__ import annotations

import importlib.util
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import click

import hatch_epcontext
from hatch_epcontext.cli._common import Verbosity, verbosity_options
from hatch_epcontext.cli._flag_errors import use_flag_names
from hatch_epcontext.cli._flags import job_flags, models_argument
from hatch_epcontext.cli._output import echo, show_table
from hatch_epcontext.cli._project import project_config
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.files import temp_dir, write_atomically
from hatch_epcontext.jobs.artifact import GENERATOR, Artifact, Recipe
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.cut_models import cut_plan
from hatch_epcontext.jobs.plan import Job, Plan, plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.run import download_sources, job_runner
from hatch_epcontext.jobs.steps import Prepared, Steps
from hatch_epcontext.jobs.validation import reason_not_to_open
from hatch_epcontext.serialize import to_json
from hatch_epcontext.system import check_file
from hatch_epcontext.text import printable
from hatch_epcontext.tools.configure import JobSettings, configure, name_models
from hatch_epcontext.worker.requests import TimeOpeningRequest

Way = Literal["cpu", "source", "compiled", "cached"]

WAYS: Mapping[Way, str] = {
    "cpu": "source on the CPU",
    "source": "source on the EP",
    "compiled": "compiled",
    "cached": "+ runtime cache",
}
"""How a model is opened. On the EP the prepared source is compiled at each start."""


@dataclass(frozen=True)
class Opening:
    """One way to open one model: seconds to open it and for its first run, one value for each process.

    ``error``: why there are no values.
    """

    model: str
    way: Way
    load: tuple[float, ...] = ()
    first: tuple[float, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Bench:
    """All measurements. ``compiled``: the seconds that each model took to compile."""

    generator: str
    system: str
    provider: str
    versions: Mapping[str, str]
    runs: int
    from_memory: bool
    compiled: Mapping[str, float]
    openings: tuple[Opening, ...]


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
        use_flag_names(named, "nothing was measured")
        planned = plan(configure(named, provider, job).on_this_machine)
    verbosity = Verbosity(quiet, verbose)
    workers = verbosity.workers(planned.config.build.timeout)
    lines = sum(5 if job.target.provider.runtime_cache else 4 for job in planned.jobs)
    with temp_dir() as staging, verbosity.progress("measuring", lines) as log:
        bench = measure(planned, staging, runs, workers, log, from_memory=from_memory)
    if json_path is not None:
        write_atomically(json_path.resolve(), to_json(bench))
    if plot_path is not None:
        draw(bench, plot_path)
    _show(bench)
    failed = [opening for opening in bench.openings if opening.error is not None]
    for opening in failed:
        echo(f"epcontext: {opening.model}: {opening.way}: {opening.error}", err=True, lines=True)
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
        check_file(path)
    if plot_path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError('--plot needs matplotlib. Run: pip install "hatch-epcontext[plot]"')
    if plot_path.suffix not in (".png", ".svg"):
        raise click.UsageError(f"--plot writes .png or .svg, and not {plot_path.name}.")


@dataclass
class _Subject:
    """A compiled model, and how it can be opened."""

    job: Job
    prepared: Prepared
    artifact: Artifact
    openings: dict[Way, Opening] = field(default_factory=dict)


def measure(
    planned: Plan,
    staging: Path,
    runs: int,
    workers: Workers,
    log: Callable[[str], None],
    *,
    from_memory: bool,
) -> Bench:
    """Compile the models of ``planned`` without the cache, and open each of them ``runs`` times in each way.

    The ways take turns, so that changes on the machine affect all alike. ``log`` gets a line for each
    compilation and each way. Raises RequirementError when something is not installed, and BuildError when a
    model cannot be compiled, or its result cannot be opened on this machine.
    """
    subjects = list(_compile(planned, staging, workers, log))
    for run in range(-1, runs):
        for number, subject in enumerate(subjects):
            for way, opening in subject.openings.items():
                # The run before the first one only fills the runtime caches.
                if opening.error is None and (run >= 0 or way == "cached"):
                    request = _request(subject, way, staging / f"cache-{number}", from_memory)
                    folder = staging / f"{number}-{way}-{run}"
                    opened = _open(opening, request, folder, workers)
                    if run >= 0 or opened.error:
                        subject.openings[way] = opened
    openings = [opening for subject in subjects for opening in subject.openings.values()]
    for opening in openings:
        took = f"{statistics.median(opening.load):.3f} s" if opening.error is None else "FAILED"
        log(f"{opening.model}: {opening.way}: {took}")
    records = {subject.job.name: subject.artifact.record for subject in subjects}
    return Bench(
        f"{GENERATOR} {hatch_epcontext.__version__}",
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        planned.jobs[0].target.provider.name,
        {name: text for record in records.values() for name, text in record.versions.items()},
        runs,
        from_memory,
        {name: record.times.compile for name, record in records.items()},
        tuple(openings),
    )


def _compile(
    planned: Plan, staging: Path, workers: Workers, log: Callable[[str], None]
) -> Iterator[_Subject]:
    cache = Cache(None, log)
    download_sources(planned.config, workers)
    cut = cut_plan(planned, cache, workers, staging)
    runner = job_runner(cut, staging, cache, workers)
    steps = Steps(workers, staging / "sources", 1, {})
    for job in cut.jobs:
        if reason := reason_not_to_open(job):
            hint = "Measure the chips one at a time."
            raise BuildError(Problem(Kind.NOT_RUN, job.location, f"{reason}.", hint))
        artifact = runner.run(job).artifact
        with job.locating():
            prepared = steps.prepare(job, 0, Recipe(artifact.record.recipe.simplifier))
        log(f"{job.location}: compiled in {artifact.record.times.compile:.2f} s")
        has_cache = job.target.provider.runtime_cache is not None
        ways = [way for way in WAYS if way != "cached" or has_cache]
        yield _Subject(job, prepared, artifact, {way: Opening(job.name, way) for way in ways})


def _request(subject: _Subject, way: Way, cache: Path, from_memory: bool) -> TimeOpeningRequest:
    job, record = subject.job, subject.artifact.record
    context, target = record.contexts[0], job.target
    path = {"cpu": job.models[0].path, "source": Path(subject.prepared.path)}.get(
        way, subject.artifact.folder / context.model_file
    )
    if way == "cached":
        cache.mkdir(exist_ok=True)
        option = target.provider.runtime_cache
        assert option is not None, "only then there is this way"
        target = replace(target, load_options={**target.load_options, option: str(cache)})
    return TimeOpeningRequest(
        str(path),
        None if way == "cpu" else target,
        record.product if way in ("compiled", "cached") else None,
        from_memory,
        job.models[0].to_run_on(target),
        context.inputs,
        subject.prepared.ranges,
    )


def _open(opening: Opening, request: TimeOpeningRequest, folder: Path, workers: Workers) -> Opening:
    """``opening`` with the times of one more process, or with its error."""
    try:
        reply = workers.call(request, folder, location=f"{opening.model}: {opening.way}")
    except BuildError as error:
        message = "; ".join(problem.message for problem in error.problems)
        return replace(opening, error=message)
    return replace(opening, load=(*opening.load, reply.load), first=(*opening.first, reply.first))


def _show(bench: Bench) -> None:
    """Print a row for each model."""
    ways = [way for way in WAYS if any(opening.way == way for opening in bench.openings)]
    openings = {(opening.model, opening.way): opening for opening in bench.openings}
    rows = []
    for model, seconds in bench.compiled.items():
        row = [openings[model, way] for way in ways]
        load = [_seconds(opening.load) for opening in row]
        first = [_seconds(opening.first) for opening in row]
        faster = _faster(openings[model, "source"].load, openings[model, "compiled"].load)
        rows.append([model, "load", f"{seconds:.2f} s", *load, faster])
        rows.append(["", "first run", "", *first, ""])
    names = (WAYS[way] for way in ways)
    show_table(("model", "", "compile", *names, "faster than on the EP"), rows)


def _seconds(values: tuple[float, ...]) -> str:
    if not values:
        return "failed"
    return f"{statistics.median(values):.3f} s ({min(values):.3f} to {max(values):.3f})"


def _faster(before: tuple[float, ...], after: tuple[float, ...]) -> str:
    if not before or not after:
        return "-"
    ratio = statistics.median(before) / statistics.median(after)
    return f"{ratio:.1f} x" if ratio >= 0.95 else f"{1 / ratio:.1f} x slower"


_COLOURS = {"cpu": "#d9a441", "source": "#9aa5b1", "compiled": "#2f6fb3", "cached": "#1b7440"}

_THICKNESS = 0.36
"""The height of a bar in inches."""


def draw(bench: Bench, path: Path) -> None:
    """Write a bar chart to ``path``, in the format of its suffix: PNG or SVG.

    It has a group of bars for each model: medians, with the range of all runs.
    """
    from matplotlib.figure import Figure

    opened = [opening for opening in bench.openings if opening.load]
    models = list(dict.fromkeys(opening.model for opening in opened))
    ways = [way for way in WAYS if any(opening.way == way for opening in opened)]
    width = 0.8 / max(len(ways), 1)
    height = 1.6 + max(len(models), 1) * (len(ways) * _THICKNESS + 0.3)
    figure = Figure(figsize=(9, height), dpi=120, layout="constrained")
    axes = figure.subplots()
    for number, way in enumerate(ways):
        openings = [opening for opening in opened if opening.way == way]
        medians = [statistics.median(opening.load) for opening in openings]
        below = [median - min(o.load) for median, o in zip(medians, openings, strict=True)]
        above = [max(o.load) - median for median, o in zip(medians, openings, strict=True)]
        bars = axes.barh(
            [models.index(o.model) - 0.4 + width * (number + 0.5) for o in openings],
            medians,
            width * 0.9,
            xerr=[below, above],
            label=WAYS[way],
            color=_COLOURS[way],
            error_kw={"ecolor": "#444444", "elinewidth": 1, "capsize": 2},
        )
        axes.bar_label(bars, [f"{median:.3f} s" for median in medians], padding=6, fontsize=8)
    axes.set_yticks(range(len(models)), map(_label, models))
    place = "memory" if bench.from_memory else "disk"
    axes.set_xlabel(f"seconds until the session is open, from {place}")
    axes.spines[["top", "right"]].set_visible(False)
    # Space for the numbers beside the bars.
    axes.margins(x=0.18)
    if models:
        axes.invert_yaxis()
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    versions = ", ".join(f"{name} {version}" for name, version in bench.versions.items())
    title = f"{bench.provider}: {versions}; median of {bench.runs} runs"
    figure.suptitle(_label(title), fontsize=10)
    # Marks the chart, so that the next one may replace it; in SVG by the title.
    key = "Software" if path.suffix == ".png" else "Title"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={key: bench.generator})


def _label(text: str) -> str:
    # matplotlib reads text between two dollar signs as a formula.
    return printable(text).replace("$", r"\$")
