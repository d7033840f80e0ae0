"""Runs a plan: all its models are read, and its jobs are done, several at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hatch_epcontext.cache import Cache
from hatch_epcontext.errors import BuildError, Problem
from hatch_epcontext.fingerprint import model_sha256
from hatch_epcontext.job import Built, JobRunner, Source
from hatch_epcontext.plan import Job, Plan, model_spec
from hatch_epcontext.process import call
from hatch_epcontext.protocol import InspectReply, InspectRequest, ModelProfiles
from hatch_epcontext.report import describe
from hatch_epcontext.requirements import check_environment


@dataclass(frozen=True)
class Result:
    """What a plan came to, models and jobs in the plan's order."""

    sources: tuple[Source, ...]
    built: tuple[Built, ...]


def inspect(plan: Plan, staging: Path) -> tuple[Source, ...]:
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
    reply: InspectReply = call(
        request, staging / "inspect", where="reading the models", timeout=plan.config.timeout
    )
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
    _, runner = _runner(plan, staging, cache)
    return tuple(Peek(job, *runner.peek(job)) for job in plan.jobs)


def _runner(plan: Plan, staging: Path, cache: Cache) -> tuple[tuple[Source, ...], JobRunner]:
    versions = check_environment(plan.config.targets, plan.requirements)
    sources = inspect(plan, staging)
    by_name = {source.model.name: source for source in sources}
    return sources, JobRunner(by_name, versions, cache, staging, plan.config.timeout)


def build(plan: Plan, staging: Path, cache: Cache, report: Callable[[str], None]) -> Result:
    """Compile and prove every job of the plan, those that the cache has excepted.

    ``staging`` is a folder of this build's own; ``report`` is told one line for each finished job.
    Raises RequirementError when the environment lacks something, and BuildError with all the jobs
    that failed, once every other one is done and kept.
    """
    sources, runner = _runner(plan, staging, cache)
    built, problems = [], list[Problem]()
    with ThreadPoolExecutor(plan.config.jobs) as pool:
        try:
            for future in [pool.submit(runner.run, job) for job in plan.jobs]:
                try:
                    done = future.result()
                except BuildError as error:
                    problems += error.problems
                else:
                    built.append(done)
                    report(describe(done))
        finally:
            # An interrupted build is not to start what is still waiting.
            pool.shutdown(cancel_futures=True)
    if problems:
        raise BuildError(*problems)
    return Result(sources, tuple(built))
