"""Runs a plan: reads all its models, and runs its jobs, several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hatch_epcontext.build.artifact import Failure, Result, Source
from hatch_epcontext.build.cache import Cache, default_root
from hatch_epcontext.build.fingerprint import model_sha256
from hatch_epcontext.build.job import JobRunner
from hatch_epcontext.build.plan import Job, Plan, source_spec
from hatch_epcontext.build.report import summarize
from hatch_epcontext.build.requirements import check_environment
from hatch_epcontext.config.settings import Config, Model, Target
from hatch_epcontext.errors import BuildError
from hatch_epcontext.ipc.process import Workers
from hatch_epcontext.ipc.protocol import CheckRequest, ModelProfiles


class IncompleteError(BuildError):
    """Some jobs failed; ``result`` has all jobs."""

    def __init__(self, result: Result) -> None:
        super().__init__(*(each for failure in result.failures for each in failure.problems))
        self.result = result


def open_cache(config: Config, staging: Path, warn: Callable[[str], None]) -> Cache:
    """The cache for ``config``, with a folder in ``staging`` for artifacts that it cannot store."""
    root = (config.cache_dir or default_root()) if config.use_cache else None
    return Cache(root, staging / "cache", warn)


def check_models(plan: Plan, staging: Path, workers: Workers | None = None) -> tuple[Source, ...]:
    """Read all models of the plan; raises BuildError with all problems of all models."""
    static: dict[str, str] = {}
    left_open: dict[str, str] = {}
    for model, target in _pairs(plan.config):
        if target.provider.static_shapes:
            names = static if target.settings.static_shapes else left_open
            names[model.name] = target.provider.ep
    profiles = tuple(
        ModelProfiles(
            model.name, target.key / "profiles", target.profiles, target.settings.static_shapes
        )
        for model, target in _pairs(plan.config)
        if target.profiles
    )
    models = plan.config.models
    request = CheckRequest(tuple(map(source_spec, models)), static, profiles, left_open)
    workers = workers or Workers(plan.config.build.timeout)
    reply = workers.call(request, staging / "check", location="reading the models")
    # Models with several shapes have one file.
    sha256: dict[Path, str] = {}
    for model, facts in zip(models, reply.models, strict=True):
        if model.path not in sha256:
            sha256[model.path] = model_sha256(model.path, facts.external_data)
    return tuple(
        Source(model, facts, sha256[model.path])
        for model, facts in zip(models, reply.models, strict=True)
    )


def _pairs(config: Config) -> Iterator[tuple[Model, Target]]:
    return ((model, target) for model in config.models for target in model.targets)


@dataclass(frozen=True)
class DryRun:
    """A job that was not run: its fingerprint, and whether the cache has its artifact."""

    job: Job
    fingerprint: str
    cached: bool


def dry_run(plan: Plan, staging: Path, cache: Cache) -> tuple[DryRun, ...]:
    """All jobs of the plan without running them; models are read, and nothing is compiled.

    Raises as `build` does.
    """
    runner = job_runner(plan, staging, cache, Workers(plan.config.build.timeout))
    return tuple(DryRun(job, *runner.dry_run(job)) for job in plan.jobs)


def job_runner(plan: Plan, staging: Path, cache: Cache, workers: Workers) -> JobRunner:
    """The runner for the jobs of ``plan``, after a check of the environment and the models.

    Raises RequirementError when the environment cannot build the plan, and BuildError when a model is
    invalid.
    """
    versions = check_environment(plan.config.targets, plan.requirements)
    sources = {source.model.name: source for source in check_models(plan, staging, workers)}
    return JobRunner(sources, versions, cache, staging, workers)


def build(
    plan: Plan,
    staging: Path,
    cache: Cache,
    log: Callable[[str], None],
    workers: Workers | None = None,
) -> Result:
    """Compile and validate every job of the plan, except for those in the cache.

    ``staging`` is a folder of this build; ``log`` gets one line for each finished job; ``workers``
    have the plan's timeout by default. Raises RequirementError when the environment cannot build the
    plan, BuildError when a model cannot be read, and IncompleteError when jobs failed, after all
    others are finished and stored.
    """
    workers = workers or Workers(plan.config.build.timeout)
    runner = job_runner(plan, staging, cache, workers)
    built, failures = [], []
    with ThreadPoolExecutor(plan.config.build.jobs) as pool:
        try:
            for job, future in [(job, pool.submit(runner.run, job)) for job in plan.jobs]:
                try:
                    finished = future.result()
                except BuildError as error:
                    failures.append(Failure(job, error.problems))
                    log(f"{job.location} ({job.target.provider.name}): FAILED")
                else:
                    built.append(finished)
                    log(summarize(finished))
        except BaseException:
            # An interrupted build starts no waiting jobs, and stops the running ones.
            pool.shutdown(wait=False, cancel_futures=True)
            workers.stop()
            raise
    result = Result(tuple(runner.sources.values()), tuple(built), tuple(failures))
    if failures:
        raise IncompleteError(result)
    return result
