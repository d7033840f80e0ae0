"""Measures how long models take to open, compiled and not, in a fresh process each time."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import hatch_epcontext
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.jobs.artifact import GENERATOR, Artifact, Recipe
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.cut_models import cut_plan
from hatch_epcontext.jobs.plan import Job, Plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.run import download_sources, job_runner
from hatch_epcontext.jobs.steps import Prepared, Steps
from hatch_epcontext.jobs.validation import reason_not_to_open
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
    """All measurements. ``compiled``: the seconds that each model took to compile; ``failures``: the problems
    of models that could not be compiled.
    """

    generator: str
    system: str
    provider: str
    versions: Mapping[str, str]
    runs: int
    from_memory: bool
    compiled: Mapping[str, float]
    openings: tuple[Opening, ...]
    failures: tuple[Problem, ...] = ()


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
    model cannot be read.
    """
    failures: list[Problem] = []
    subjects = list(_compile(planned, staging, workers, log, failures.append))
    for run in range(-1, runs):
        for number, subject in enumerate(subjects):
            for way, opening in subject.openings.items():
                # The run before the first one only fills the runtime caches.
                if opening.error is None and (run >= 0 or way == "cached"):
                    request = _request(subject, way, staging / f"cache-{number}", from_memory)
                    folder = staging / f"{number}-{way}-{run}"
                    subject.openings[way] = _open(opening, request, folder, workers, keep=run >= 0)
    openings = [opening for subject in subjects for opening in subject.openings.values()]
    for opening in openings:
        took = f"{statistics.median(opening.load):.3f} s" if opening.error is None else "FAILED"
        log(f"{opening.model}: {opening.way}: {took}")
    records = {subject.job.name: subject.artifact.record for subject in subjects}
    return Bench(
        f"{GENERATOR} {hatch_epcontext.__version__}",
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        planned.jobs[0].target.provider.name,
        {name: text for each in records.values() for name, text in each.versions.items()},
        runs,
        from_memory,
        {name: record.times.compile for name, record in records.items()},
        tuple(openings),
        tuple(failures),
    )


def _compile(
    planned: Plan,
    staging: Path,
    workers: Workers,
    log: Callable[[str], None],
    report: Callable[[Problem], None],
) -> Iterator[_Subject]:
    cache = Cache(None, log)
    download_sources(planned.config, workers)
    cut = cut_plan(planned, cache, workers, staging)
    runner = job_runner(cut, staging, cache, workers)
    steps = Steps(workers, staging / "sources", 1, {})
    for job in cut.jobs:
        if reason := reason_not_to_open(job):
            hint = "Measure the chips one at a time."
            report(Problem(Kind.NOT_RUN, job.location, f"{reason}.", hint))
            continue
        try:
            artifact = runner.run(job).artifact
            recipe = Recipe(artifact.record.recipe.simplifier)
            with job.locating():
                prepared = steps.prepare(job, 0, recipe)
        except BuildError as error:
            for problem in error.problems:
                report(problem)
            continue
        log(f"{job.location}: compiled in {artifact.record.times.compile:.2f} s")
        ways: tuple[Way, ...] = ("cpu", "source", "compiled")
        if job.target.provider.runtime_cache is not None:
            ways = (*ways, "cached")
        openings = {way: Opening(job.name, way) for way in ways}
        yield _Subject(job, prepared, artifact, openings)


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


def _open(
    opening: Opening, request: TimeOpeningRequest, folder: Path, workers: Workers, *, keep: bool
) -> Opening:
    try:
        reply = workers.call(request, folder, location=f"{opening.model}: {opening.way}")
    except BuildError as error:
        message = "; ".join(problem.message for problem in error.problems)
        return replace(opening, error=message)
    if not keep:
        return opening
    return replace(opening, load=(*opening.load, reply.load), first=(*opening.first, reply.first))
