"""Measures how long models take to open, compiled and not: in a fresh process each time, on one target."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import hatch_epcontext
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.jobs.artifact import GENERATOR, Artifact, Recipe
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.cut_models import cut_plan
from hatch_epcontext.jobs.plan import Job, Plan
from hatch_epcontext.jobs.preparation import Prepared, prepare
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.run import download_sources, job_runner
from hatch_epcontext.jobs.validation import reason_not_to_open
from hatch_epcontext.providers import Product
from hatch_epcontext.worker.requests import TimeOpeningReply, TimeOpeningRequest

Opened = Literal["cpu", "source", "artifact", "cache"]
"""The opened form: the source on the CPU, the prepared source on the target, the artifact, or the artifact
with the EP's runtime cache filled.
"""


@dataclass(frozen=True)
class Series:
    """Measured values, one for each run, in the order of the runs."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class Case:
    """One way to open a model.

    ``embedded``: whether the blob is inside the context model, None without a context; ``buffer``: whether
    it is opened from memory.
    """

    model: str
    opened: Opened
    embedded: bool | None
    buffer: bool

    def __str__(self) -> str:
        origin = "memory" if self.buffer else "disk"
        return f"{self.model}: {self.opened} from {origin}{_place(self.embedded)}"


@dataclass(frozen=True)
class Measured:
    """The result of one case: seconds to open and for the first inference, and the peak of memory in bytes.

    ``memory`` is None if the system does not report it. ``error``: why there are no values.
    """

    case: Case
    load: Series | None = None
    first: Series | None = None
    memory: Series | None = None
    error: str | None = None


@dataclass(frozen=True)
class Compiled:
    """The seconds that a model took to compile, and the size of its artifact in bytes."""

    model: str
    embedded: bool | None
    seconds: float
    size: int


@dataclass(frozen=True)
class Bench:
    """All measurements; ``failures`` are the problems of models that could not be compiled."""

    generator: str
    system: str
    provider: str
    versions: Mapping[str, str]
    runs: int
    compiled: tuple[Compiled, ...]
    measured: tuple[Measured, ...]
    failures: tuple[Problem, ...] = ()


@dataclass
class _Subject:
    """A model to measure: prepared once, and its artifacts by `Case.embedded`."""

    job: Job
    prepared: Prepared
    artifacts: dict[bool | None, Artifact] = field(default_factory=dict)


def bench(
    plans: Mapping[bool | None, Plan],
    staging: Path,
    runs: int,
    workers: Workers,
    log: Callable[[str], None],
) -> Bench:
    """Compile the models of ``plans``, which differ only in ``embed``, and open each ``runs`` times.

    The cache is not used. The cases take turns, so that changes on the machine affect all alike. ``log`` gets
    one line for each compilation and each case. Raises RequirementError when something is not installed, and
    BuildError when a model cannot be read; the problems of a model that cannot be compiled are in the
    result's ``failures``.
    """
    subjects: dict[str, _Subject] = {}
    compiled: list[Compiled] = []
    failures: list[Problem] = []
    versions: dict[str, str] = {}
    for embedded, plan in plans.items():
        folder = staging / str(embedded)
        cache = Cache(None, log)
        download_sources(plan.config, cache, workers)
        cut = cut_plan(plan, cache.index(), workers, folder)
        runner = job_runner(cut, folder, cache, workers)
        for job in cut.jobs:
            if reason := reason_not_to_open(job):
                hint = "Measure the chips one at a time."
                failures.append(Problem(Kind.NOT_RUN, job.location, f"{reason}.", hint))
                continue
            try:
                built = runner.run(job)
                if job.name not in subjects:
                    scratch = folder / "prepared" / job.name
                    recipe = Recipe(built.artifact.record.recipe.simplifier)
                    with job.locating():
                        prepared = prepare(job, job.models[0], recipe, scratch, workers)
                    subjects[job.name] = _Subject(job, prepared)
            except BuildError as error:
                failures += error.problems
                continue
            record = built.artifact.record
            subjects[job.name].artifacts[embedded] = built.artifact
            versions.update(record.versions)
            compiled.append(Compiled(job.name, embedded, record.times.compile, built.artifact.size))
            log(f"{job.location}: compiled in {record.times.compile:.2f} s{_place(embedded)}")
    measured = _measure(subjects, staging / "runs", runs, workers, log)
    first = next(iter(plans.values()))
    return Bench(
        f"{GENERATOR} {hatch_epcontext.__version__}",
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        first.jobs[0].target.provider.name,
        versions,
        runs,
        tuple(compiled),
        tuple(measured),
        # The same model fails once in each plan.
        tuple({(each.kind, each.location, each.message): each for each in failures}.values()),
    )


def _place(embedded: bool | None) -> str:
    return "" if embedded is None else f", blob {'inside' if embedded else 'beside'}"


def _cases(subject: _Subject) -> Iterator[Case]:
    kinds: list[Opened] = ["artifact"]
    if subject.job.target.provider.runtime_cache is not None:
        kinds.append("cache")
    for buffer in (False, True):
        yield Case(subject.job.name, "cpu", None, buffer)
        yield Case(subject.job.name, "source", None, buffer)
        for embedded in subject.artifacts:
            for opened in kinds:
                yield Case(subject.job.name, opened, embedded, buffer)


def _measure(
    subjects: Mapping[str, _Subject],
    staging: Path,
    runs: int,
    workers: Workers,
    log: Callable[[str], None],
) -> list[Measured]:
    staging.mkdir(parents=True)
    cases = [case for subject in subjects.values() for case in _cases(subject)]
    replies: dict[Case, list[TimeOpeningReply]] = {case: [] for case in cases}
    errors: dict[Case, str] = {}
    for run in range(-1, runs):
        for number, case in enumerate(cases):
            # The run before the first one only fills the runtime caches.
            if case in errors or (run < 0 and case.opened != "cache"):
                continue
            request = _request(subjects[case.model], case, staging / f"cache-{number}")
            try:
                reply = workers.call(request, staging / f"{number}-{run}", location=str(case))
            except BuildError as error:
                errors[case] = "; ".join(problem.message for problem in error.problems)
                log(f"{case}: FAILED")
                continue
            if run >= 0:
                replies[case].append(reply)
            if run == runs - 1:
                log(f"{case}: {statistics.median(r.load for r in replies[case]):.3f} s")
    return [
        Measured(case, error=errors[case]) if case in errors else _measured(case, replies[case])
        for case in cases
    ]


def _measured(case: Case, replies: Sequence[TimeOpeningReply]) -> Measured:
    memory = [reply.memory for reply in replies if reply.memory is not None]
    return Measured(
        case,
        Series(tuple(reply.load for reply in replies)),
        Series(tuple(reply.first for reply in replies)),
        Series(tuple(memory)) if memory else None,
    )


def _request(subject: _Subject, case: Case, cache: Path) -> TimeOpeningRequest:
    job, model = subject.job, subject.job.models[0]
    to_run = model.to_run_on(job.target)
    artifact = next(iter(subject.artifacts.values()))
    product: Product | None = None
    path, target = Path(subject.prepared.path), job.target
    if case.opened == "cpu":
        path = model.path
    elif case.opened != "source":
        artifact = subject.artifacts[case.embedded]
        product = artifact.record.product
        path = artifact.folder / artifact.record.contexts[0].model_file
    if case.opened == "cache":
        cache.mkdir(exist_ok=True)
        option = job.target.provider.runtime_cache
        assert option is not None
        target = replace(target, load_options={**target.load_options, option: str(cache)})
    inputs = artifact.record.contexts[0].inputs
    ranges = subject.prepared.ranges
    on = None if case.opened == "cpu" else target
    return TimeOpeningRequest(str(path), on, product, case.buffer, to_run, inputs, ranges)
