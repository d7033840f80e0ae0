"""Runs a plan: all its models are read, and its jobs are done, several at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hatch_epcontext.cache import Cache, default_root
from hatch_epcontext.config import Config
from hatch_epcontext.errors import BuildError
from hatch_epcontext.fingerprint import model_sha256
from hatch_epcontext.job import JobRunner
from hatch_epcontext.plan import Job, Plan, model_spec
from hatch_epcontext.process import Workers
from hatch_epcontext.protocol import InspectReply, InspectRequest, ModelProfiles
from hatch_epcontext.report import describe
from hatch_epcontext.requirements import check_environment
from hatch_epcontext.result import Failure, Result, Source


class IncompleteError(BuildError):
    """Some jobs failed; ``result`` has what became of all of them."""

    def __init__(self, result: Result) -> None:
        super().__init__(*(each for failure in result.failures for each in failure.problems))
        self.result = result


def cache_of(config: Config, staging: Path, warn: Callable[[str], None]) -> Cache:
    """The cache that ``config`` wants, with a folder in ``staging`` for what cannot be kept."""
    root = (config.cache_dir or default_root()) if config.use_cache else None
    return Cache(root, staging / "cache", warn)


def inspect(plan: Plan, staging: Path, workers: Workers | None = None) -> tuple[Source, ...]:
    """All models of the plan as their files are; raises BuildError with all that is wrong with them."""
    models = plan.config.models
    static = {
        model.name: target.provider.ep
        for model in models
        for target in model.targets
        if target.provider.static_shapes
    }
    profiles = tuple(
        ModelProfiles(model.name, f"{target.key}.profiles", target.profiles)
        for model in models
        for target in model.targets
        if target.profiles
    )
    request = InspectRequest(tuple(map(model_spec, models)), static, profiles)
    workers = workers or Workers(plan.config.timeout)
    reply: InspectReply = workers.call(request, staging / "inspect", where="reading the models")
    return tuple(
        Source(model, facts, model_sha256(model.path, facts.external_data))
        for model, facts in zip(models, reply.models, strict=True)
    )


@dataclass(frozen=True)
class Peek:
    """What is known of a job before it is run: its fingerprint, and whether the cache has its artifact."""

    job: Job
    fingerprint: str
    cached: bool


def peek(plan: Plan, staging: Path, cache: Cache) -> tuple[Peek, ...]:
    """Look ahead at all jobs of the plan; models are read, and nothing is compiled.

    Raises as `build` does.
    """
    runner = runner_of(plan, staging, cache, Workers(plan.config.timeout))
    return tuple(Peek(job, *runner.peek(job)) for job in plan.jobs)


def runner_of(plan: Plan, staging: Path, cache: Cache, workers: Workers) -> JobRunner:
    """What runs the jobs of ``plan``, once the environment was checked and its models were read.

    Raises RequirementError when the environment lacks something, and BuildError when a model is wrong.
    """
    versions = check_environment(plan.config.targets, plan.requirements)
    sources = {source.model.name: source for source in inspect(plan, staging, workers)}
    return JobRunner(sources, versions, cache, staging, workers)


def build(
    plan: Plan,
    staging: Path,
    cache: Cache,
    report: Callable[[str], None],
    workers: Workers | None = None,
) -> Result:
    """Compile and prove every job of the plan, those that the cache has excepted.

    ``staging`` is a folder of this build's own; ``report`` is told one line for each job that ends;
    ``workers`` are those of the plan's timeout if left out. Raises RequirementError when the
    environment lacks something, BuildError when a model cannot be read, and IncompleteError when jobs
    failed, once every other one is done and kept.
    """
    workers = workers or Workers(plan.config.timeout)
    runner = runner_of(plan, staging, cache, workers)
    built, failures = [], []
    with ThreadPoolExecutor(plan.config.jobs) as pool:
        try:
            for job, future in [(job, pool.submit(runner.run, job)) for job in plan.jobs]:
                try:
                    done = future.result()
                except BuildError as error:
                    failures.append(Failure(job, error.problems))
                    report(f"{job.where} ({job.target.provider.name}): FAILED")
                else:
                    built.append(done)
                    report(describe(done))
        except BaseException:
            # An interrupted build neither starts what is waiting nor ends what has begun.
            pool.shutdown(wait=False, cancel_futures=True)
            workers.stop()
            raise
    result = Result(tuple(runner.sources.values()), tuple(built), tuple(failures))
    if failures:
        raise IncompleteError(result)
    return result
