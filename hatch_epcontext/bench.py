"""How long it takes to open models, compiled and not: each time in a fresh process, on the same target."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import hatch_epcontext
from hatch_epcontext.artifact import GENERATOR, Artifact
from hatch_epcontext.build import runner_of
from hatch_epcontext.cache import Cache
from hatch_epcontext.errors import BuildError, Problem
from hatch_epcontext.plan import Job, Plan, model_spec_of, target_spec
from hatch_epcontext.preparation import Prepared, prepare
from hatch_epcontext.process import Workers
from hatch_epcontext.protocol import OpenReply, OpenRequest
from hatch_epcontext.providers import Product


@dataclass(frozen=True)
class Series:
    """Figures of several runs, in the order of the runs."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class Case:
    """One way to open a model.

    ``opened``: the prepared ``"source"``, the ``"artifact"``, or the artifact with the EP's runtime
    ``"cache"`` filled; ``embedded``: whether the blob is inside the context model, and None where there is
    none; ``buffer``: whether it is opened from memory.
    """

    model: str
    opened: str
    embedded: bool | None
    buffer: bool

    def __str__(self) -> str:
        origin = "memory" if self.buffer else "disk"
        return f"{self.model}: {self.opened} from {origin}{_place(self.embedded)}"


@dataclass(frozen=True)
class Measured:
    """What one case came to: seconds for opening and for the first inference, bytes of memory at most.

    ``memory`` is None where the system does not tell. ``failed``: why it has no figures.
    """

    case: Case
    load: Series | None = None
    first: Series | None = None
    memory: Series | None = None
    failed: str = ""


@dataclass(frozen=True)
class Compiled:
    """Seconds that it took to compile a model, once, and the bytes of what was made."""

    model: str
    embedded: bool | None
    seconds: float
    size: int


@dataclass(frozen=True)
class Bench:
    """All that was measured."""

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
    """A model on the bench: prepared once, and its artifacts by where their blob is."""

    job: Job
    prepared: Prepared
    artifacts: dict[bool | None, Artifact] = field(default_factory=dict)


def bench(
    plans: Mapping[bool | None, Plan],
    staging: Path,
    runs: int,
    workers: Workers,
    tell: Callable[[str], None],
) -> Bench:
    """Compile the models of ``plans``, which differ in where blobs are, and open them ``runs`` times.

    Nothing comes from the cache. Runs take turns, so that what changes on the machine meanwhile is in all
    figures. ``tell`` is told one line for each compilation and each case. Raises RequirementError when the
    environment lacks something, BuildError when a model cannot be read; a model that cannot be compiled is
    in the result's ``failures``.
    """
    subjects: dict[str, _Subject] = {}
    compiled: list[Compiled] = []
    failures: list[Problem] = []
    versions: dict[str, str] = {}
    for embedded, plan in plans.items():
        folder = staging / str(embedded)
        runner = runner_of(plan, folder, Cache(None, folder / "cache", tell), workers)
        for job in plan.jobs:
            try:
                built = runner.run(job)
                if job.name not in subjects:
                    scratch = folder / "prepared" / job.name
                    scratch.mkdir(parents=True)
                    subjects[job.name] = _Subject(
                        job, prepare(job, job.models[0], scratch, workers)
                    )
            except BuildError as error:
                failures += error.problems
                continue
            record = built.artifact.record
            subjects[job.name].artifacts[embedded] = built.artifact
            versions.update(record.versions)
            compiled.append(Compiled(job.name, embedded, record.times.compile, built.artifact.size))
            tell(f"{job.where}: compiled in {record.times.compile:.2f} s{_place(embedded)}")
    measured = _measure(subjects, staging / "runs", runs, workers, tell)
    first = next(iter(plans.values()))
    return Bench(
        f"{GENERATOR} {hatch_epcontext.__version__}",
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        first.jobs[0].target.provider.name,
        versions,
        runs,
        tuple(compiled),
        tuple(measured),
        tuple(failures),
    )


def _place(embedded: bool | None) -> str:
    return "" if embedded is None else f", blob {'inside' if embedded else 'beside'}"


def _cases(subject: _Subject) -> Iterator[Case]:
    opened = ["artifact", *(["cache"] if subject.job.target.provider.runtime_cache else [])]
    for buffer in (False, True):
        yield Case(subject.job.name, "source", None, buffer)
        for embedded in subject.artifacts:
            for what in opened:
                yield Case(subject.job.name, what, embedded, buffer)


def _measure(
    subjects: Mapping[str, _Subject],
    staging: Path,
    runs: int,
    workers: Workers,
    tell: Callable[[str], None],
) -> list[Measured]:
    staging.mkdir(parents=True)
    cases = [case for subject in subjects.values() for case in _cases(subject)]
    replies: dict[Case, list[OpenReply]] = {case: [] for case in cases}
    failed: dict[Case, str] = {}
    for run in range(-1, runs):
        for number, case in enumerate(cases):
            # The run before the first only fills the caches that are to be found filled.
            if case in failed or (run < 0 and case.opened != "cache"):
                continue
            request = _request(subjects[case.model], case, staging / f"cache-{number}")
            try:
                reply: OpenReply = workers.call(
                    request, staging / f"{number}-{run}", where=str(case)
                )
            except BuildError as error:
                failed[case] = "; ".join(problem.what for problem in error.problems)
                tell(f"{case}: FAILED")
                continue
            if run >= 0:
                replies[case].append(reply)
            if run == runs - 1:
                tell(f"{case}: {statistics.median(r.load for r in replies[case]):.3f} s")
    return [
        Measured(case, failed=failed[case]) if case in failed else _measured(case, replies[case])
        for case in cases
    ]


def _measured(case: Case, replies: Sequence[OpenReply]) -> Measured:
    memory = [reply.memory for reply in replies if reply.memory is not None]
    return Measured(
        case,
        Series(tuple(reply.load for reply in replies)),
        Series(tuple(reply.first for reply in replies)),
        Series(tuple(memory)) if memory else None,
    )


def _request(subject: _Subject, case: Case, cache: Path) -> OpenRequest:
    job, model = subject.job, subject.job.models[0]
    spec = model_spec_of(model, job.target)
    artifact = next(iter(subject.artifacts.values()))
    product: Product | None = None
    path, target = Path(subject.prepared.path), target_spec(job.target)
    if case.opened != "source":
        artifact = subject.artifacts[case.embedded]
        product = artifact.record.product
        path = artifact.folder / artifact.record.contexts[0].model_file
    if case.opened == "cache":
        cache.mkdir(exist_ok=True)
        option = job.target.provider.runtime_cache
        target = replace(target, load_options={**target.load_options, option: str(cache)})
    inputs = tuple(
        replace(tensor, shape=spec.shapes.get(tensor.name, tensor.shape))
        for tensor in artifact.record.contexts[0].inputs
    )
    bounds = subject.prepared.bounds
    return OpenRequest(str(path), target, product, case.buffer, spec, inputs, bounds)
