"""Jobs on the machines of a cluster of ``dask.distributed``.

The client, in the build process, submits each step of a job as a task. Files go through the shared cache,
named by their content: the client sends what models need, and fetches the archives that workers send.
Resources, lost workers and the order of tasks are dask's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, cast

from hatch_epcontext.config.settings import SYNTHETIC, BuildSettings, Model
from hatch_epcontext.errors import BuildError, EpcontextError, Key, Kind, Problem
from hatch_epcontext.files import FileRecord, record_file, temp_dir
from hatch_epcontext.jobs.artifact import Artifact, Recipe, Record, Refused, Source, ValidationRun
from hatch_epcontext.jobs.cache.archive import DamagedError, pack, unpack
from hatch_epcontext.jobs.cache.fingerprint import value_sha256
from hatch_epcontext.jobs.cache.index import Index, changed_error
from hatch_epcontext.jobs.cache.transport import Transport, TransportError
from hatch_epcontext.jobs.executors import dask_worker
from hatch_epcontext.jobs.executors.dask_worker import (
    TOPIC,
    BuildInfo,
    DamagedFileError,
    Description,
    Files,
    Outcome,
    RemoteTask,
    ToValidate,
)
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.validation import input_files, reason_not_to_run
from hatch_epcontext.system import writing
from hatch_epcontext.text import count, hide_credentials, pairs
from hatch_epcontext.worker.facts import Context

CONNECT_SECONDS = 10.0
"""Seconds in which the scheduler must answer."""

WORKER_SECONDS = 30.0
"""Seconds to wait for a worker with the resources of a target: at first, and when the last one is lost."""

_WATCH_SECONDS = 5.0
"""Seconds between two looks at whether the cluster still has workers for the tasks that were submitted."""

_BEAT_SECONDS = 30.0
"""Seconds between two signs of life to the workers, and between two lines about jobs that wait."""

_END_SECONDS = 10.0
"""Seconds that the end of a build may take on the cluster."""

_CLEANERS = 4
"""Threads that free what workers keep."""

_MIN_JOBS, _MAX_JOBS = 4, 1000
"""The limits of the number of jobs at once. Each has a thread, which waits."""

_FIRST = 10
"""The priority of validations: their artifact is on a worker already."""


@dataclass(frozen=True)
class _Fitting:
    """The workers that may compile for a target: their versions, which are all the same.

    ``able``: the addresses of those that can run artifacts too, None if that are all of them;
    ``reason``: why none of them can.
    """

    versions: Mapping[str, str]
    able: tuple[str, ...] | None
    reason: str | None


@dataclass
class _Running:
    """A task of ``job`` that was submitted, and may run on the workers ``able``; see `_Fitting`.

    ``place`` is the address of the worker that runs it, None while it waits; ``reason`` is why the build
    gave it up.
    """

    job: Job
    future: Any
    able: tuple[str, ...] | None
    place: str | None = None
    reason: BuildError | None = None


class DaskExecutor:
    """Jobs on the workers of a cluster; see `Executor`. ``close`` ends the connection."""

    def __init__(
        self,
        client: Any,
        info: BuildInfo,
        at_once: int,
        workers: Workers,
        sources: Mapping[str, Source],
        index: Index,
        transport: Transport,
    ) -> None:
        self.at_once = at_once
        self._client = client
        self._info = info
        self._workers = workers
        self._sources = sources
        self._index = index
        self._transport = transport
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._stopped = self._closing = False
        self._closed = threading.Event()
        self._numbers = itertools.count()
        # Those of the target names, with or without the need of an EP.
        self._fitting: dict[tuple[str, bool], _Fitting | BuildError] = {}
        self._target_locks: dict[tuple[str, bool], threading.Lock] = {}
        # What is in the shared cache.
        self._sent: set[FileRecord] = set()
        # The archives of the artifacts that were fetched, by their folders.
        self._archives: dict[Path, FileRecord] = {}
        # By the token of a job: its last task, and the workers that worked for it.
        self._running: dict[str, _Running] = {}
        self._places: dict[str, set[str]] = {}
        # Since when no worker has these resources.
        self._missing: dict[frozenset[tuple[str, float]], float] = {}
        self._addresses: set[str] = set()
        self._events: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._cleanup_pool = ThreadPoolExecutor(_CLEANERS, "hatch-epcontext-free")
        self._threads = [
            threading.Thread(target=each, name=TOPIC, daemon=True)
            for each in (self._handle_events, self._beat, self._watch)
        ]
        client.subscribe_topic(TOPIC, self._receive_event)
        for thread in self._threads:
            thread.start()

    @staticmethod
    def connect(
        settings: BuildSettings, workers: Workers, sources: Mapping[str, Source], index: Index
    ) -> DaskExecutor:
        """An executor on the cluster of ``settings.scheduler``.

        ``workers`` are those of this machine: their limits and their logs are also those of the cluster's.
        Raises BuildError when the scheduler cannot be reached or has other versions.
        """
        assert settings.scheduler is not None, "the executor is dask"
        assert settings.cache is not None, "it needs one"
        client = _connect(settings.scheduler)
        try:
            _check_scheduler(client)
            cluster = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
            threads = sum(each["nthreads"] for each in cluster.values())
            info = BuildInfo(
                uuid.uuid4().hex,
                settings.cache,
                settings.cache_timeout,
                workers.timeout,
                workers.memory_limit,
                workers.verbose,
                workers.log is not None,
                workers.progress is not None,
            )
            at_once = settings.jobs or min(max(_MIN_JOBS, 2 * threads), _MAX_JOBS)
            transport = Transport(settings.cache, settings.cache_timeout, in_all=False)
            return DaskExecutor(client, info, at_once, workers, sources, index, transport)
        except BaseException:
            client.close(_END_SECONDS)
            raise

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def versions(self, job: Job) -> Mapping[str, str]:
        """The versions on the workers that may take ``job``.

        Raises BuildError when they differ, when a worker misses something, or when there is no such worker.
        """
        return self._find(job).versions

    def reason_not_to_run(self, job: Job) -> str | None:
        """Why the job's result cannot be run on any worker that may take the job."""
        return reason_not_to_run(job) if job.target.from_cache else self._find(job).reason

    def compile(self, job: Job, recipe: Recipe, folder: Path) -> Record | Refused:
        """Compile ``job`` on a worker, and fetch its artifact into ``folder``."""
        versions = self.versions(job)
        compiled = cast(
            "FileRecord | Refused", self._run(job, lambda: self._task(job, versions, recipe))
        )
        if isinstance(compiled, Refused):
            return compiled
        with (
            self._using_cache(job),
            writing("an artifact", folder, job.location),
            temp_dir() as made,
        ):
            self._transport.fetch_blob(compiled, made / "archive")
            record = unpack(made / "archive", folder)
        self._archives[folder] = compiled
        return record

    def validate(
        self, job: Job, model: Model, artifact: Artifact, context: Context
    ) -> ValidationRun:
        """Validate on a worker, if possible on the one that compiled the artifact."""
        fitting = self._find(job)

        def task() -> RemoteTask:
            archive, number = self._archive(job, artifact), job.models.index(model)
            work = ToValidate(number, artifact.record, archive, context)
            return self._task(job, fitting.versions, work)

        return cast("ValidationRun", self._run(job, task, fitting.able))

    def finished(self, job: Job) -> None:
        """Free what workers keep for ``job``."""
        token = _token(job)
        with self._lock:
            self._running.pop(token, None)
            places = self._places.pop(token, set())
        for address in places if not self._closing else ():
            self._cleanup_pool.submit(self._forget, address, token)

    def stop(self) -> None:
        """Cancel all tasks, and end what runs."""
        with self._lock:
            first, self._stopped = not self._stopped, True
            running = [each.future for each in self._running.values()]
        self._workers.stop()
        self._transport.stop()
        if first:
            _limited(lambda: self._client.cancel(running, force=True))
            _limited(self._end_everywhere)

    def close(self) -> None:
        """End what runs on the cluster for this build, and the connection."""
        self._closing = True
        self._closed.set()
        self._cleanup_pool.shutdown(wait=False, cancel_futures=True)
        _limited(self._end_everywhere)
        with self._lock:
            self._running.clear()
        _limited(lambda: self._client.close(_END_SECONDS))
        self._events.put(None)
        for thread in self._threads:
            thread.join(_END_SECONDS)

    # The cluster's workers.

    def _find(self, job: Job) -> _Fitting:
        """The workers of the job's target, which are examined once."""
        name = (job.target.name, job.target.needs_ep)
        with self._lock:
            lock = self._target_locks.setdefault(name, threading.Lock())
        with lock:
            self._check_running(job)
            if name not in self._fitting:
                try:
                    self._fitting[name] = self._examine(job)
                except BuildError as error:
                    self._fitting[name] = error
        found = self._fitting[name]
        if isinstance(found, BuildError):
            raise BuildError(*(replace(each, location=job.location) for each in found.problems))
        return found

    def _examine(self, job: Job) -> _Fitting:
        found: Mapping[str, Description | Exception] = {}
        while not found:
            names = self._wait_for_workers(job)
            _check_installation(self._client.get_versions(packages=[_PACKAGE]), names, job)
            answers = self._client.run(
                dask_worker.describe,
                pickle.dumps(_portable(job)),
                workers=list(names),
                on_error="return",
            )
            # One that was lost meanwhile says nothing about the others.
            cluster = self._cluster(job.location)
            found = {
                address: each
                for address, each in answers.items()
                if address in cluster or not isinstance(each, OSError)
            }
        described = {
            address: each for address, each in found.items() if isinstance(each, Description)
        }
        problems = {
            names[address]: each if isinstance(each, Exception) else BuildError(*each.problems)
            for address, each in found.items()
            if isinstance(each, Exception) or each.problems
        }
        if problems:
            raise BuildError(
                *(
                    replace(problem, message=f"on the {_workers(same)}: {problem.message}")
                    for problem, same in _grouped(problems)
                )
            )
        if len({value_sha256(dict(each.versions)) for each in described.values()}) > 1:
            versions = {names[address]: pairs(each.versions) for address, each in described.items()}
            raise _unequal(job, "have different versions", versions)
        able = tuple(
            address for address, each in described.items() if each.reason_not_to_run is None
        )
        first = next(iter(described.values()))
        return _Fitting(
            first.versions,
            None if len(able) in (0, len(described)) else able,
            None if able else first.reason_not_to_run,
        )

    def _wait_for_workers(self, job: Job) -> Mapping[str, str]:
        """The names of the workers with the job's resources, by their address."""
        wanted = job.target.resources
        end = time.monotonic() + WORKER_SECONDS
        said = False
        while True:
            self._check_running(job)
            cluster = self._cluster(job.location)
            names = {
                address: _name(address, each["name"])
                for address, each in cluster.items()
                if _has(each, wanted)
            }
            if names:
                return names
            if time.monotonic() >= end:
                raise _no_worker(job, cluster)
            if not said and self._workers.progress is not None:
                said = True
                self._workers.progress(f"{job.location}: waiting for a {_wanted(wanted)}")
            time.sleep(_POLL_SECONDS)

    def _cluster(self, location: str) -> Mapping[str, Any]:
        try:
            identity = self._client.sync(self._client.scheduler.identity, n_workers=-1)
        except OSError as error:
            raise _lost_scheduler(location, error) from None
        workers: Mapping[str, Any] = identity["workers"]
        return workers

    # The tasks.

    def _run(
        self, job: Job, task: Callable[[], RemoteTask], able: tuple[str, ...] | None = None
    ) -> Outcome:
        """What comes out of a task, which is made again if a file of it is damaged in the shared cache."""
        found = self._result(self._submit(task(), able))
        if isinstance(found, DamagedFileError):
            self._transport.distrust(found.blob)
            self._sent.discard(found.blob)
            for folder, archive in list(self._archives.items()):
                if archive == found.blob:
                    del self._archives[folder]
            found = self._result(self._submit(task(), able))
        if isinstance(found, DamagedFileError):
            message = f"a worker cannot use a file of the shared cache: {found.reason}."
            raise BuildError(Problem(Kind.UNUSABLE_CACHE, job.location, message))
        return found

    def _submit(self, task: RemoteTask, able: tuple[str, ...] | None) -> _Running:
        kind = "compile" if isinstance(task.work, Recipe) else "validate"
        with self._lock:
            # They have what an earlier task of the job has left.
            places = tuple(self._places.get(task.token, ()))
        future = self._client.submit(
            dask_worker.run_task,
            pickle.dumps(task),
            key=f"epcontext-{kind}-{self._info.id}-{next(self._numbers)}",
            resources=dict(task.job.target.resources) or None,
            workers=able or places or None,
            allow_other_workers=not able and bool(places),
            priority=0 if kind == "compile" else _FIRST,
            pure=False,
        )
        running = _Running(task.job, future, able)
        with self._lock:
            self._running[task.token] = running
        return running

    def _result(self, running: _Running) -> Outcome | DamagedFileError:
        from distributed import CancelledError, KilledWorker

        job, future = running.job, running.future
        if self._stopped:
            # Too late for `stop`.
            future.cancel(force=True)
        try:
            outcome: Outcome | DamagedFileError | EpcontextError = future.result()
        except CancelledError as error:
            self._check_running(job)
            raise running.reason or _lost_scheduler(job.location, error) from None
        except KilledWorker as error:
            message = (
                f"{count(error.allowed_failures + 1, 'worker')} ended in the middle of the job; the last one "
                f"was {error.last_worker.address}."
            )
            hint = "Read the logs of the dask workers. Often their machine has too little memory."
            raise BuildError(Problem(Kind.WORKER_LOST, job.location, message, hint)) from None
        except Exception as error:
            self._check_running(job)
            message = f"a worker failed: {type(error).__name__}: {error}"
            raise BuildError(Problem(Kind.WORKER_LOST, job.location, message)) from error
        if isinstance(outcome, BuildError):
            self._check_running(job)
            raise outcome
        if isinstance(outcome, EpcontextError):
            raise BuildError(*outcome.problems)
        return outcome

    def _check_running(self, job: Job) -> None:
        if self._stopped:
            message = "the build was interrupted."
            raise BuildError(Problem(Kind.INTERRUPTED, job.location, message))

    # Files.

    def _task(self, job: Job, versions: Mapping[str, str], work: Recipe | ToValidate) -> RemoteTask:
        """A task of ``job``, whose files are in the shared cache then."""
        with self._using_cache(job):
            return RemoteTask(
                self._info,
                _token(job),
                _portable(job),
                tuple(self._model(self._sources[model.name]) for model in job.models),
                tuple(self._inputs(model.validate.inputs) for model in job.models),
                self._inputs(job.target.calibration),
                versions,
                work,
            )

    def _model(self, source: Source) -> Files:
        path = source.model.path
        return self._offered(path.parent, path.name, source.files)

    def _inputs(self, given: str) -> Files | None:
        if not given or given in SYNTHETIC:
            return None
        path = Path(given)
        return self._offered(path.parent, path.name, input_files(given))

    def _offered(self, folder: Path, name: str, paths: Iterable[Path]) -> Files:
        """Files that workers find in the shared cache from now on."""
        records = {}
        for path in paths:
            record = FileRecord(path.stat().st_size, self._index.sha256(path))
            self._send_input(path, record)
            records[path.relative_to(folder).as_posix()] = record
        return Files(str(folder), name, records)

    def _archive(self, job: Job, artifact: Artifact) -> FileRecord:
        """The archive of ``artifact``, which workers find in the shared cache from now on."""
        if artifact.folder not in self._archives:
            with (
                self._using_cache(job),
                writing("an archive", artifact.folder, job.location),
                temp_dir() as made,
            ):
                archive = pack(artifact.folder, artifact.record, made / "archive")
                self._transport.send_blob(made / "archive", archive)
                self._archives[artifact.folder] = archive
        return self._archives[artifact.folder]

    def _send_input(self, path: Path, record: FileRecord) -> None:
        # One after the other: several jobs can need the same file.
        with self._sending:
            if record in self._sent or self._transport.has_blob(record):
                self._sent.add(record)
                return
            # What the user writes at this moment must not stay there under the name of other content.
            with writing("a copy of a model", path), temp_dir() as made:
                shutil.copyfile(path, made / "file")
                if record_file(made / "file") != record:
                    raise changed_error(path)
                self._transport.send_blob(made / "file", record)
            self._sent.add(record)

    @contextlib.contextmanager
    def _using_cache(self, job: Job) -> Iterator[None]:
        """Raise BuildError when the shared cache does not take or give a file."""
        try:
            yield
        except (TransportError, DamagedError) as error:
            self._check_running(job)
            message = f"the shared cache cannot be used: {error}."
            hint = f"Let this machine and the workers read and write {self._transport.url}."
            raise BuildError(Problem(Kind.UNUSABLE_CACHE, job.location, message, hint)) from None

    # Messages from the workers, and signs of life to them.

    def _receive_event(self, event: tuple[float, Mapping[str, Any]]) -> None:
        # In the thread of the client's connection, which must not wait for anything.
        if event[1]["build"] == self._info.id:
            self._events.put(event[1])

    def _handle_events(self) -> None:
        while (event := self._events.get()) is not None:
            address = event["worker"]
            if "log" in event and self._workers.log is not None:
                self._workers.log(event["log"])
            elif "progress" in event and self._workers.progress is not None:
                self._workers.progress(event["progress"])
            elif "started" in event:
                with self._lock:
                    self._addresses.add(address)
                    if running := self._running.get(event["started"]):
                        running.place = address
                    self._places.setdefault(event["started"], set()).add(address)

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_SECONDS):
            self._everywhere(dask_worker.keep_alive)
            waiting = sum(each.place is None for each in self._submitted())
            if waiting and self._workers.progress is not None:
                self._workers.progress(f"{_who_waits(waiting)} a free worker")

    def _submitted(self) -> list[_Running]:
        with self._lock:
            return [each for each in self._running.values() if not each.future.done()]

    def _watch(self) -> None:
        """Give up the tasks for which there has been no worker for too long: dask lets them wait for ever."""
        while not self._closed.wait(_WATCH_SECONDS):
            # A worker that starts a task from now on may be missing in the answer of the scheduler.
            places = [(each, each.place) for each in self._submitted()]
            if not places and not self._missing:
                continue
            # The connection may be lost, and then the tasks end by themselves.
            with contextlib.suppress(Exception):
                cluster = self._cluster("")
                for each, place in places:
                    if place not in cluster and each.place == place:
                        each.place = None
                self._give_up([each for each, _ in places], cluster)

    def _give_up(self, tasks: Sequence[_Running], cluster: Mapping[str, Any]) -> None:
        by_resources: dict[frozenset[tuple[str, float]], list[_Running]]
        by_resources = {resources: [] for resources in self._missing}
        for task in tasks:
            by_resources.setdefault(frozenset(task.job.target.resources.items()), []).append(task)
        given_up = []
        for resources, same in by_resources.items():
            wanted = dict(sorted(resources))
            fitting = {address for address, each in cluster.items() if _has(each, wanted)}
            if fitting:
                self._missing.pop(resources, None)
                lost = [each for each in same if each.able and fitting.isdisjoint(each.able)]
                for each in lost:
                    message = "the workers that can run its artifact were lost."
                    problem = Problem(Kind.NO_WORKER, each.job.location, message)
                    each.reason = BuildError(problem)
                given_up += lost
            elif self._is_missing(
                resources, f"{_wanted(wanted)}; {_who_waits(len(same))} another one"
            ):
                for each in same:
                    each.reason = _no_worker(each.job, cluster)
                given_up += same
        if given_up:
            self._client.cancel([each.future for each in given_up], force=True)

    def _is_missing(self, resources: frozenset[tuple[str, float]], what: str) -> bool:
        """Whether no worker has had the resources for too long; says ``what`` when that begins."""
        now = time.monotonic()
        if resources not in self._missing and self._workers.progress is not None:
            self._workers.progress(f"the cluster has lost its last {what}")
        return now >= self._missing.setdefault(resources, now) + WORKER_SECONDS

    def _end_everywhere(self) -> None:
        self._everywhere(dask_worker.end)

    def _everywhere(self, function: Callable[..., Any]) -> None:
        """Run ``function`` with this build on all workers that have worked for it and still exist."""
        with self._lock:
            known = set(self._addresses)
        # The connection may be lost, and then there is nothing to do.
        with contextlib.suppress(Exception):
            addresses = known & self._cluster("").keys() if known else known
            if addresses:
                self._client.run(
                    function, self._info.id, workers=list(addresses), on_error="ignore"
                )

    def _forget(self, address: str, token: str) -> None:
        # A worker that is lost has nothing to free.
        with contextlib.suppress(Exception):
            self._client.run(dask_worker.forget, self._info.id, token, workers=[address])


_PACKAGE = "hatch_epcontext"

_POLL_SECONDS = 0.5
"""Seconds between two looks at which workers there are."""


def _token(job: Job) -> str:
    return value_sha256(job.folder)[:16]


def _portable(job: Job) -> Job:
    """``job`` without paths of this machine, whose type another system may not have."""
    models = tuple(
        replace(model, path=cast("Path", PurePosixPath(model.path.name))) for model in job.models
    )
    return replace(job, models=models)


def _connect(address: str) -> Any:
    import distributed

    make_client: Any = distributed.Client
    try:
        # A client whose constructor fails holds up the end of the process for 20 seconds. This is done in a
        # thread, because the caller may have an event loop.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: asyncio.run(_probe_scheduler(address))).result()
        return make_client(address, timeout=CONNECT_SECONDS, set_as_default=False, name=TOPIC)
    # Anything, because another kind of server may answer at that address.
    except Exception as error:
        raise BuildError(
            Problem.at(
                Key() / "build" / "scheduler",
                Kind.UNREACHABLE_SCHEDULER,
                hide_credentials(
                    f"the scheduler {address} cannot be reached: {error or type(error).__name__}"
                ),
                "Start it, or correct the address. An empty HATCH_EPCONTEXT_SCHEDULER builds here.",
            )
        ) from None


async def _probe_scheduler(address: str) -> None:
    """Connect to the scheduler once; raises any exception if it does not answer as one."""
    import dask
    import distributed
    from distributed.comm import core

    if dask.config.get("distributed.client.security-loader", None):
        # Only the client knows how to call it.
        return
    # Both have no types.
    security: Any = distributed.Security
    connect: Any = core.connect
    arguments = security().get_connection_args("client")
    connection = await connect(address, timeout=CONNECT_SECONDS, **arguments)
    await connection.close()


def _check_scheduler(client: Any) -> None:
    versions = client.get_versions(packages=[_PACKAGE])
    wrong = _other_versions(versions["client"], versions["scheduler"])
    if wrong:
        message = f"the scheduler has {wrong}."
        raise BuildError(
            Problem(Kind.VERSION_MISMATCH, "the dask cluster", message, _SAME_VERSIONS)
        )


_SAME_VERSIONS = (
    "Install the same version of hatch-epcontext, with the same minor version of Python, on this machine, "
    "the scheduler and the workers."
)


def _check_installation(versions: Mapping[str, Any], names: Mapping[str, str], job: Job) -> None:
    """Raise BuildError if workers cannot unpickle what this process pickles."""
    wrong = {
        names[address]: found
        for address, each in versions["workers"].items()
        if address in names and (found := _other_versions(versions["client"], each))
    }
    if wrong:
        error = _unequal(job, "cannot work for this build", wrong)
        raise BuildError(*(replace(each, hint=_SAME_VERSIONS) for each in error.problems))


def _other_versions(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """What differs in ``theirs``, in words; empty if nothing does."""

    def facts(versions: Mapping[str, Any]) -> dict[str, str]:
        python = ".".join(versions["host"]["python"].split(".")[:2])
        version = versions["packages"].get(_PACKAGE)
        return {"Python": python, "hatch-epcontext": version or "missing"}

    own, found = facts(ours), facts(theirs)
    return ", ".join(
        f"{name} {version} (here {own[name]})"
        for name, version in found.items()
        if version != own[name]
    )


def _unequal(job: Job, what: str, facts: Mapping[str, str]) -> BuildError:
    lines = "\n".join(f"{worker}: {fact}" for worker, fact in sorted(facts.items()))
    message = f"workers that may take the job {what}:\n{lines}"
    hint = (
        "Install the same versions on all of them, or give the target resources that only equal workers "
        "have."
    )
    return BuildError(Problem(Kind.VERSION_MISMATCH, job.location, message, hint))


def _has(worker: Mapping[str, Any], wanted: Mapping[str, float]) -> bool:
    return all(worker["resources"].get(name, 0) >= number for name, number in wanted.items())


def _wanted(resources: Mapping[str, float]) -> str:
    return f"worker with {_numbers(resources)}" if resources else "worker"


def _who_waits(jobs: int) -> str:
    return f"{count(jobs, 'job')} {'waits' if jobs == 1 else 'wait'} for"


def _no_worker(job: Job, cluster: Mapping[str, Any]) -> BuildError:
    offers: dict[str, int] = {}
    for each in cluster.values():
        offer = _numbers(each["resources"]) or "no resources"
        offers[offer] = offers.get(offer, 0) + 1
    offered = "; ".join(f"{count(n, 'worker')} with {offer}" for offer, n in sorted(offers.items()))
    return BuildError(
        Problem(
            Kind.NO_WORKER,
            job.location,
            f"the job needs a {_wanted(job.target.resources)}, and none came in {WORKER_SECONDS:.0f} s. "
            f"The cluster has {offered or 'no workers'}.",
            f'Start one: dask worker <scheduler> --resources "{_flag(job.target.resources)}"'
            if job.target.resources
            else "Start one: dask worker <scheduler>",
        )
    )


def _numbers(resources: Mapping[str, float]) -> str:
    return pairs({name: f"{number:g}" for name, number in resources.items()})


def _flag(resources: Mapping[str, float]) -> str:
    return ",".join(f"{name}={number:g}" for name, number in resources.items())


def _lost_scheduler(location: str, error: BaseException) -> BuildError:
    message = f"the connection to the scheduler was lost: {error or type(error).__name__}"
    return BuildError(Problem(Kind.UNREACHABLE_SCHEDULER, location, hide_credentials(message)))


def _name(address: str, name: object) -> str:
    return address if name == address else f"{name} ({address})"


def _workers(names: Sequence[str]) -> str:
    return f"worker {names[0]}" if len(names) == 1 else f"workers {', '.join(names)}"


def _grouped(
    errors: Mapping[str, Exception],
) -> Iterable[tuple[Problem, Sequence[str]]]:
    """Each different problem, with the workers that have it."""
    found: dict[str, tuple[Problem, list[str]]] = {}
    for worker, error in errors.items():
        message = f"{type(error).__name__}: {error}"
        unknown = (Problem(Kind.WORKER_LOST, "", message),)
        for problem in error.problems if isinstance(error, EpcontextError) else unknown:
            found.setdefault(str(problem), (problem, []))[1].append(worker)
    return found.values()


def _limited(work: Callable[[], object]) -> None:
    """Do ``work`` in a thread of its own, and wait for it for a limited time: the network may hang."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, name=TOPIC, daemon=True)
    thread.start()
    thread.join(_END_SECONDS)
