"""Runs a plan: reads all its models, and runs its jobs, several at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from hatch_epcontext.cache.build import Cache
from hatch_epcontext.config.genai import with_cache_sizes
from hatch_epcontext.config.paths import NO_HOME, default_root
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import BuildError, OutputError, merged
from hatch_epcontext.jobs.artifact import Built, FailureReport, Result, Source
from hatch_epcontext.jobs.genai import open_folders
from hatch_epcontext.jobs.hardware import read_reports, with_boards
from hatch_epcontext.jobs.job import run_job
from hatch_epcontext.jobs.plan import Job, Plan, jobs_of
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.report import (
    make_report,
    summarize,
    summarize_answers,
    validation_warnings,
)
from hatch_epcontext.jobs.requirements import check_environment, versions_of
from hatch_epcontext.jobs.sources import cut_and_read
from hatch_epcontext.jobs.steps import Build
from hatch_epcontext.serialize import to_json
from hatch_epcontext.system import cores, free_memory
from hatch_epcontext.text import count, listing, show_size

T = TypeVar("T")

_POLL = 0.5
"""Seconds that a build waits for a job before it checks for an interruption."""

_LARGE = 5 * 10**6
"""Bytes of all models from which a build says that it reads them."""

_JOB_MEMORY = 1 << 30
"""Bytes that a job needs besides its model: for ONNX Runtime, the EP's compiler, and its log."""

_MODEL_COPIES = 4
"""The most copies of its model that a job has in memory: read, simplified and compiled."""

_MAX_NAMED = 3
"""The most inputs that a line names."""


class IncompleteError(BuildError):
    """Some jobs failed; ``result`` has all jobs that were run."""

    def __init__(self, result: Result) -> None:
        super().__init__(*merged(p for failed in result.failures for p in failed.problems))
        self.result = result


def open_cache(config: Config, warn: Callable[[str], None]) -> Cache:
    """The cache for ``config``; ``warn`` gets its problems."""
    if config.environment.no_cache:
        return Cache(None, warn)
    root, settings = config.environment.cache_dir or default_root(), config.build
    if root is None:
        warn(f"{NO_HOME}; this build does not use one. Set HATCH_EPCONTEXT_CACHE_DIR to a folder.")
    if settings.shared_cache is None:
        return Cache(root, warn)
    # Imported here: few builds have a shared cache.
    from hatch_epcontext.cache.shared import SharedCache

    return Cache(root, warn, SharedCache(settings, warn))


def download_sources(config: Config, workers: Workers) -> None:
    """Download the models from elsewhere, unless they are in the user's cache."""
    if any(model.download for model in config.models):
        # Imported here: few models come from elsewhere.
        from hatch_epcontext.remote.downloads import download_models

        download_models(config, workers.report, workers.pulse)


def begin(plan: Plan, staging: Path, cache: Cache, workers: Workers) -> Build:
    """The build of ``plan``, whose models it downloads, cuts and reads.

    Raises RequirementError when the environment cannot build the plan, BuildError for invalid models.
    """
    installed = check_environment(plan.local_targets, plan.requirements)
    _announce(plan, workers)
    download_sources(plan.config, workers)
    workers.expect(target.provider for target in plan.local_targets)
    sources = {
        source.model.name: replace(
            source, model=with_cache_sizes(source.model, source.facts.own_inputs)
        )
        for source in _read(plan.config, cache, workers, staging)
    }
    models = tuple(source.model for source in sources.values())
    jobs = jobs_of(replace(plan.config, models=models))
    versions: dict[str, dict[str, str]] = {}
    for target in plan.local_targets:
        # Models may narrow a target: what can change any of its variants counts.
        if not target.from_cache:
            versions.setdefault(target.name, {}).update(versions_of(target, installed))
    return Build(workers, cache, staging, versions, sources, jobs)


def _read(config: Config, cache: Cache, workers: Workers, staging: Path) -> tuple[Source, ...]:
    """The models of ``config`` as they are compiled."""
    read = cut_and_read(config, cache, workers, staging)
    # What is compiled cannot have inputs with default values, and each target has the inputs of the source.
    # onnxruntime-genai feeds only those that it knows.
    defaults = {
        source.model.name: source.facts.optional
        for source in read
        if source.facts.optional and source.model.genai is None
    }
    if not defaults:
        return read
    return cut_and_read(config, cache, workers, staging / "defaults", defaults)


def _announce(plan: Plan, workers: Workers) -> None:
    """Say what is read and for which targets, if that takes long."""
    paths = {model.path for model in plan.config.models}
    size = sum(path.stat().st_size for path in paths if path.is_file())
    if size >= _LARGE:
        names = dict.fromkeys(target.name for target in plan.config.targets)
        targets = listing([*names], _MAX_NAMED)
        workers.report(
            f"reading {count(len(paths), 'model')} of {show_size(size)} for {targets} ..."
        )


def build(
    plan: Plan,
    staging: Path,
    cache: Cache,
    log: Callable[[str], None],
    workers: Workers | None = None,
    warn: Callable[[str], None] | None = None,
) -> Result:
    """Compile and validate every job of the plan, except for those in the cache.

    ``staging`` is a folder of this build for the files of the result; ``log`` gets one line for each finished
    job, in the plan's order, and ``warn`` what a validation leaves open; ``workers`` default to the plan's
    limits. Raises RequirementError when the environment cannot build the plan, BuildError when a model
    cannot be read, and IncompleteError when jobs failed, after all others are finished and stored.
    """
    settings, reports, warn = plan.config.build, read_reports(plan.config), warn or log
    with workers or Workers(settings.timeout, memory_limit=settings.memory_limit) as started:
        begun = begin(plan, staging, cache, started)
        notes = [*open_folders(begun, only_known=plan.config.environment.only_from_cache)]
        # A build entirely from the cache contacts no scheduler.
        if settings.scheduler is None or all(job.target.from_cache for job in begun.jobs):
            largest = max((source.size for source in begun.sources.values()), default=0)
            at_once = jobs_at_once(settings.jobs, largest)
            result = _run(begun, partial(run_job, begun), at_once, log, warn)
        else:
            from hatch_epcontext.jobs.cluster import Cluster

            with contextlib.closing(Cluster(settings, begun)) as cluster:
                run, at_once = cluster.run, cluster.jobs_at_once
                result = _run(begun, run, at_once, log, warn)
    unused = (f"{key}: no model uses this target" for key in plan.config.unused)
    frozen = _frozen(begun.sources.values())
    chips = (
        f"{target.name}: {missing}"
        for target in (job.target for job in begun.jobs)
        if (missing := target.provider.missing_chip(target.settings.provider_options))
    )
    for warning in dict.fromkeys((*unused, *notes, *frozen, *chips)):
        warn(warning)
    result = with_boards(result, reports, log, warn)
    if result.failures:
        raise IncompleteError(result)
    return result


def build_with_report(
    plan: Plan,
    staging: Path,
    log: Callable[[str], None],
    workers: Workers,
    warn: Callable[[str], None],
    name: str,
    version: str = "",
) -> Result:
    """`build` with the cache of the plan's configuration, for the project ``name``.

    Its report, also when jobs fail, is where the configuration says, else in the cache. Raises OutputError
    if it cannot be written, if possible before anything is compiled.
    """
    path, cache = plan.config.report, open_cache(plan.config, warn)
    if path is not None:
        # Imported here: few builds write a page.
        from hatch_epcontext.jobs.report_file import check_report, write_report

        check_report(path)
    failed: IncompleteError | None = None
    try:
        result = build(plan, staging, cache, log, workers, warn)
    except IncompleteError as error:
        failed, result = error, error.result
    report = make_report(result)
    if path is not None:
        try:
            write_report(report, f"{name} {version}".rstrip(), path)
        except OutputError as error:
            if failed is None:
                raise
            warn(error.text())
            path = None
    else:
        path = cache.put_report(name, to_json(report))
    if path is not None:
        log(f"report: {path}")
    if failed is not None:
        raise failed
    return result


def _frozen(sources: Iterable[Source]) -> Iterator[str]:
    """What the build has frozen that apps could feed, and samples feed, in lines for each model."""
    for source in sources:
        model = source.model
        if source.facts.ignored:
            names = listing(map(repr, source.facts.ignored), _MAX_NAMED)
            yield (
                f"{model.configured_name}: validate.inputs has other values for {names}, which the model "
                "freezes: validation ignores them"
            )
        if model.defaults:
            noun = "input" if len(model.defaults) == 1 else "inputs"
            names = listing(map(repr, model.defaults), _MAX_NAMED)
            yield (
                f"{model.configured_name}: frozen to the default: the optional {noun} {names}; constants can "
                "give another value, and cut.inputs can name an input that the app feeds"
            )


def _run(
    begun: Build,
    run: Callable[[Job], Built],
    at_once: int,
    log: Callable[[str], None],
    warn: Callable[[str], None],
) -> Result:
    """``run`` all jobs, several ``at_once``."""

    def timed(job: Job) -> tuple[Built, float]:
        start = time.monotonic()
        return run(job), time.monotonic() - start

    built: list[Built] = []
    failures: list[FailureReport] = []
    # Its threads only wait for workers.
    with ThreadPoolExecutor(at_once) as pool:
        try:
            order = _largest_first(begun) if at_once > 1 else range(len(begun.jobs))
            running = {number: pool.submit(timed, begun.jobs[number]) for number in order}
            for number, job in enumerate(begun.jobs):
                try:
                    finished, seconds = _result(running[number])
                except BuildError as error:
                    failures.append(FailureReport.of(job, error.problems))
                    log(f"{job.location} ({job.target.provider.name}): FAILED")
                else:
                    built.append(finished)
                    log(summarize(finished, seconds))
                    if finished.answers:
                        log(summarize_answers(finished))
                    for line in _warnings(finished):
                        warn(line)
                begun.workers.pulse.mark_reported()
        except BaseException:
            # Start no waiting job, and end the running ones.
            pool.shutdown(wait=False, cancel_futures=True)
            begun.workers.stop()
            begun.cache.stop()
            raise
    return Result(tuple(begun.sources.values()), tuple(built), tuple(failures))


def _largest_first(begun: Build) -> list[int]:
    """The numbers of the jobs, the largest models first, so that no core waits for one of them at the end."""

    def size(number: int) -> int:
        return sum(begun.sources[model.name].size for model in begun.jobs[number].models)

    return sorted(range(len(begun.jobs)), key=size, reverse=True)


def _warnings(built: Built) -> Iterator[str]:
    """What the validations of a job leave open, in lines."""
    for name, validation in built.validations.items():
        yield from validation_warnings(f"{built.job.target.name}: {name}", validation)


def _result(future: Future[T]) -> T:
    # On Windows Ctrl-C does not interrupt a wait, and takes effect at its end.
    while not future.done():
        wait([future], _POLL)
    return future.result()


def jobs_at_once(configured: int | Literal["auto"], largest_model: int) -> int:
    """How many jobs to run at once: the ``configured`` number, or for "auto" as many as fit.

    ``largest_model``: bytes of the largest source model.
    """
    if configured != "auto":
        return configured
    memory = free_memory()
    fit = cores() if memory is None else memory // (_JOB_MEMORY + _MODEL_COPIES * largest_model)
    return max(1, min(cores(), fit))
