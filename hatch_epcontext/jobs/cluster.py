"""Jobs on a cluster of dask: one task is one job, which a worker runs as a build on its machine runs it.

Dask chooses workers by the resources of targets, and repeats the tasks of lost ones. Files go through the
shared cache, named by their content; tasks and what they return are JSON. Workers sign nothing: only the
build may have the key, and it checks and stores what they compiled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hatch_epcontext
from hatch_epcontext.cache.build import Cache, changed_error
from hatch_epcontext.cache.shared import Transport, TransportError, in_thread
from hatch_epcontext.cache.store import DamagedError, read_record
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.paths import default_root
from hatch_epcontext.config.settings import SYNTHETIC, BuildSettings
from hatch_epcontext.errors import BuildError, EpcontextError, Key, Kind, Problem
from hatch_epcontext.files import FileRecord, file_sha256, temp_dir
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.artifact import GENERATOR, PACKAGE, Built, Source
from hatch_epcontext.jobs.genai import is_due
from hatch_epcontext.jobs.job import run_job, store_result
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.jobs.processes.failures import interrupted
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import (
    check_environment,
    genai_requirements,
    requirements,
    versions_of,
)
from hatch_epcontext.jobs.search import Search
from hatch_epcontext.jobs.sources import input_files
from hatch_epcontext.jobs.steps import Build
from hatch_epcontext.serialize import from_json, to_json
from hatch_epcontext.system import writing
from hatch_epcontext.text import hide_credentials, pairs
from hatch_epcontext.worker.results import Answer

CONNECT_SECONDS = 10.0
"""Seconds in which the scheduler must answer."""

WORKER_SECONDS = 30.0
"""Seconds that a job waits until there is a worker with its resources."""

_POLL_SECONDS = 1.0
"""Seconds between looks at the cluster, and between a worker's looks whether its task is still wanted."""


@dataclass(frozen=True)
class _Task:
    """A job of a build, and what a worker needs to run it.

    ``files``: what the job reads, by path, in the shared cache at the URL ``cache``. ``needed``: what the
    build began with, see `look`. The others are those of `Workers`.
    """

    job: Job
    sources: Mapping[str, Source]
    files: Mapping[str, FileRecord]
    needed: Mapping[str, str]
    cache: str
    timeout: float
    memory_limit: int | None


@dataclass(frozen=True)
class TaskResult:
    """The result of a job: its ``search``, of which the files of the winner are in the shared cache, and the
    answers of a language model; or its problems.
    """

    search: Search | None = None
    answers: tuple[Answer, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def files(self) -> Mapping[str, FileRecord]:
        """Those of the winner."""
        winner = self.search.winner if self.search else None
        return winner.record.files if winner and winner.record else {}


class Cluster:
    """The workers of the cluster at ``settings.scheduler``, for the jobs of one build.

    ``build`` has the models, the cache, and the limits of processes. Raises BuildError if the scheduler
    cannot be reached.
    """

    def __init__(self, settings: BuildSettings, build: Build) -> None:
        assert settings.scheduler is not None, "there is one"
        assert build.cache.shared is not None, "a cluster needs one"
        self._build, self._workers, self._sending = build, build.workers, threading.Lock()
        self._transport = build.cache.shared.transport
        self._client = _connect(settings.scheduler)
        threads = sum(self._client.nthreads().values())
        # Workers may come later.
        self.jobs_at_once = max(4, 2 * threads) if settings.jobs == "auto" else settings.jobs

    def run(self, job: Job) -> Built:
        """The job's result: from the cache, if it has that of the versions on a worker; or from a worker.

        Raises BuildError with the job's problems.
        """
        if job.target.from_cache:
            return run_job(self._build, job)
        try:
            needed = {GENERATOR: hatch_epcontext.__version__}
            if (plugin := job.target.provider.plugin) and plugin.path:
                needed[plugin.path] = str(job.target.settings.library_sha256)
            address = self._wait(job)
            versions = self._client.run(look, to_json(job), needed, workers=[address])[address]
            return self._known(job, versions) or self._run(job, {**needed, **versions})
        except Exception as error:
            if self._workers.stopped:
                raise job.located(interrupted()) from None
            problems = _problems(error, "the build", self._transport.url)
            raise job.located(BuildError(*problems)) from error

    def close(self) -> None:
        """End the connection; dask then cancels the tasks of the build."""
        with contextlib.suppress(Exception):
            self._client.close(CONNECT_SECONDS)

    def _known(self, job: Job, versions: Mapping[str, str]) -> Built | None:
        """The latest result in the cache, if it was compiled with ``versions`` and is good enough."""
        with contextlib.suppress(BuildError):
            cached = replace(job, target=replace(job.target, from_cache=True))
            built = run_job(self._build, cached)
            record = built.record
            if record.versions == versions and (built.answers or not is_due(self._build, built)):
                return replace(built, job=record.recipe.job_of(job))
        shutil.rmtree(self._build.staging / PACKAGE / job.folder, ignore_errors=True)
        return None

    def _run(self, job: Job, needed: Mapping[str, str]) -> Built:
        """The result of a worker that has what is ``needed``; it is stored in the cache of the build."""
        names = [model.name for model in job.models]
        # Of a language model the whole folder answers.
        names += [model.configured_name for model in job.models[:1] if job.may_answer]
        sources = {name: self._build.sources[name] for name in names}
        inputs = (*(model.validate.inputs for model in job.models), job.target.calibration)
        named = [path for path in inputs if path not in ("", *SYNTHETIC)]
        named += (file.path for file in job.target.files)
        files = [file for source in sources.values() for file in source.files]
        files += (file for path in named for file in input_files(path))
        sent = {str(file): self._send(file) for file in files}
        limits = self._workers.timeout, self._workers.memory_limit
        task = to_json(_Task(job, sources, sent, needed, self._transport.url, *limits))
        own = dict(job.target.resources) or None
        future = self._client.submit(run_task, task, [*sent, *named], resources=own, pure=False)
        ended = threading.Event()
        future.add_done_callback(lambda _: ended.set())
        try:
            self._wait(job, ended)
            outcome = read_record(future.result(), TaskResult)
        finally:
            future.cancel(force=True)
        if outcome.search is None:
            raise BuildError(*outcome.problems)
        folder = self._build.staging / PACKAGE / job.folder
        self._transport.fetch_files(outcome.files, folder)
        built = Built(job, folder, outcome.search, cached=False, answers=outcome.answers)
        built = replace(built, job=built.attempt.recipe.job_of(job))
        store_result(self._build, job, built)
        return built

    def _send(self, file: Path) -> FileRecord:
        """Send ``file`` to the shared cache, unless it is there."""
        record = self._build.cache.index.record(file)
        # One at a time: several jobs may need the same file.
        with self._sending, writing("a copy of a model", file), temp_dir() as scratch:
            if not self._transport.has_file(record):
                # The user may write the file now: a copy has one content.
                shutil.copyfile(file, scratch / "file")
                if self._transport.send_file(scratch / "file") != record:
                    raise changed_error(file)
        return record

    def _wait(self, job: Job, ended: threading.Event | None = None) -> str:
        """The address of a worker with the job's resources: of the first one, or when its task has ``ended``.

        Raises BuildError if there is none for some time: dask lets tasks wait for ever.
        """
        resources, workers, address = job.target.resources, self._workers, ""
        start = last = time.monotonic()
        while True:
            if workers.stopped:
                raise interrupted()
            present, now = self._client.scheduler_info(n_workers=-1)["workers"], time.monotonic()
            for name, worker in present.items():
                if all(worker["resources"].get(kind, 0) >= n for kind, n in resources.items()):
                    address, last = name, now
            if now > last + WORKER_SECONDS:
                needs = ",".join(f"{name}={number:g}" for name, number in resources.items())
                message = f"no worker with {needs or 'any resources'} came in {WORKER_SECONDS:g} s."
                hint = f'Start one: dask worker <scheduler> --resources "{needs}"'
                raise BuildError(Problem(Kind.NO_WORKER, "", message, hint))
            if ended and workers.is_report_due():
                workers.report(f"{job.location}: on the cluster for {now - start:.0f} s")
            if address and ended is None:
                return address
            if (ended or threading.Event()).wait(_POLL_SECONDS):
                return address


def _connect(address: str) -> Any:
    from distributed import Client

    # In a thread: despite its timeout it waits for ever for a server that accepts and never answers.
    connect = partial(Client, address, timeout=CONNECT_SECONDS, set_as_default=False)
    try:
        return in_thread(connect).result(CONNECT_SECONDS + 1)
    # Any exception: another kind of server may answer at that address.
    except Exception as error:
        text = f"the scheduler {address} cannot be reached: {str(error) or type(error).__name__}"
        hint = "Start it, or correct the address. An empty HATCH_EPCONTEXT_SCHEDULER builds here."
        key, kind = Key() / "build" / "scheduler", Kind.UNREACHABLE_SCHEDULER
        raise BuildError(Problem.at(key, kind, hide_credentials(text), hint)) from None


def _problems(error: Exception, who: str, url: str) -> tuple[Problem, ...]:
    """What ``error`` says of ``who``, which uses dask and the shared cache at ``url``."""
    if isinstance(error, EpcontextError):
        return error.problems
    if isinstance(error, (TransportError, DamagedError)):
        message = f"{who} cannot use the shared cache: {error}."
        hint = f"Let this machine and the workers read and write {url}, and remove what is damaged."
        return (Problem(Kind.UNUSABLE_CACHE, "", message, hint),)
    if worker := getattr(error, "last_worker", None):
        # Those before it were lost too.
        who = f"the worker {worker.name}"
    message = hide_credentials(f"{who} failed: {str(error) or type(error).__name__}")
    hint = "Read the logs of dask. Often a machine has too little memory."
    return (Problem(Kind.WORKER_LOST, "", message, hint),)


def look(text: str, needed: Mapping[str, str], dask_worker: Any) -> Mapping[str, str]:
    """The versions of what compiles a `Job` on this worker.

    ``needed``: versions, also of this package, and the sha256 of a library by its path. Raises BuildError if
    the worker cannot compile the job, or has not all of them.
    """
    job = from_json(text, Job)
    where = f"the worker {dask_worker.name} ({dask_worker.address})"
    try:
        needed_here = (
            *requirements((job.target,)),
            *(genai_requirements() if job.may_answer else ()),
        )
        installed = check_environment((job.target,), needed_here)
    except EpcontextError as error:
        raise BuildError(
            *(replace(p, location="", message=f"on {where}: {p.message}") for p in error.problems)
        ) from None
    versions = versions_of(job.target, installed)
    present = {GENERATOR: hatch_epcontext.__version__, **versions}
    if (plugin := job.target.provider.plugin) and (library := plugin.path):
        present[library] = file_sha256(Path(library)) if Path(library).is_file() else "missing"
    if not needed.items() <= present.items():
        message = f"{where} has {pairs(present)}, and the build began with {pairs(needed)}."
        raise BuildError(Problem(Kind.VERSION_MISMATCH, "", message))
    return versions


def run_task(text: str, paths: Sequence[str]) -> str:
    """The `TaskResult` of a `_Task`, in which ``paths`` are those on the machine of the build."""
    from distributed import get_worker

    worker = get_worker()
    with temp_dir() as folder:
        root = (folder / "files").as_posix()
        for path in paths:
            local = f"{root}/{path.lstrip('/')}".replace("\\", "/")
            text = text.replace(json.dumps(path), json.dumps(local))
        task = from_json(text, _Task)
        try:
            outcome = _run_job(task, worker, folder)
        except Exception as error:
            outcome = TaskResult(problems=_problems(error, f"the worker {worker.name}", task.cache))
        return to_json(outcome).replace(root, "")


def _run_job(task: _Task, worker: Any, folder: Path) -> TaskResult:
    def watch(key: str) -> None:
        """End what runs when dask forgets the task: the build has its result, needs none, or has ended."""
        while (state := worker.state.tasks.get(key)) and state.state != "cancelled":
            time.sleep(_POLL_SECONDS)
        workers.stop()
        transport.stopped = "the build needs no result"

    transport = Transport(task.cache)
    workers = Workers(task.timeout, memory_limit=task.memory_limit)
    threading.Thread(target=watch, args=[worker.get_current_task()], daemon=True).start()
    versions = look(to_json(task.job), task.needed, worker)
    transport.fetch_files(task.files, folder)
    root = os.environ.get(f"{PREFIX}CACHE_DIR")
    cache = Cache(Path(root) if root else default_root(), logging.getLogger(GENERATOR).warning)
    workers.expect([task.job.target.provider])
    with workers:
        by_target = {task.job.target.name: versions}
        build = Build(workers, cache, folder, by_target, task.sources)
        built = run_job(build, task.job)
    for name in built.record.files:
        transport.send_file(built.folder / name)
    return TaskResult(built.search, built.answers)
