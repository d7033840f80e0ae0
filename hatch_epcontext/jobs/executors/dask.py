"""Jobs on the machines of a cluster of ``dask.distributed``.

The client, in the build process, submits each step of a job as a task. Files go both ways in chunks, one
message each, so that no process has a large model in memory: a worker asks for the files that it does not
have by an event, and the client fetches an artifact's files from the worker that compiled it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, cast

from hatch_epcontext.config.settings import SYNTHETIC, BuildSettings, Model
from hatch_epcontext.errors import BuildError, EpcontextError, Key, Kind, Problem
from hatch_epcontext.files import FileRecord
from hatch_epcontext.jobs.artifact import Artifact, Recipe, Record, Refused, Source, ValidationRun
from hatch_epcontext.jobs.cache.fingerprint import value_sha256
from hatch_epcontext.jobs.cache.index import Index
from hatch_epcontext.jobs.executors import dask_worker
from hatch_epcontext.jobs.executors.dask_worker import (
    TOPIC,
    BuildInfo,
    Compiled,
    CompileTask,
    Description,
    ModelFiles,
    RemoteTask,
    ValidateTask,
    dump,
)
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.validation import reason_not_to_run
from hatch_epcontext.text import count, hide_credentials, pairs
from hatch_epcontext.worker.facts import Context

CHUNK = 4 << 20
"""Bytes of a file that one message has."""

CONNECT_SECONDS = 10.0
"""Seconds in which the scheduler must answer."""

WORKER_SECONDS = 30.0
"""Seconds to wait for a worker with the resources of a target: at first, and when the last one is lost."""

_WATCH_SECONDS = 5.0
"""Seconds between two looks at whether the cluster still has workers for the steps that were submitted."""

_BEAT_SECONDS = 30.0
"""Seconds between two signs of life to the workers, and between two lines about jobs that wait."""

_END_SECONDS = 10.0
"""Seconds that the end of a build may take on the cluster."""

_TRANSFERS = 4
"""Chunks that are sent or fetched at the same time."""

_MIN_JOBS, _MAX_JOBS = 4, 1000
"""The limits of the number of jobs at once. Each has a thread, which waits."""

_ATTEMPTS = 3
"""How often a job is given to a worker, if its worker is lost before its artifact is fetched."""

_FIRST = 10
"""The priority of validations: their artifact is on a worker already."""


class _LostError(Exception):
    """A worker cannot be reached, or does not have what it had."""


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
    """A step of ``job`` that was submitted, and may run on the workers ``able``; see `_Fitting`.

    ``place`` is the address of the worker that runs it, None while it waits; ``reason`` is why the build
    gave it up.
    """

    job: Job
    future: Any
    able: tuple[str, ...] | None
    place: str | None = None
    reason: Exception | None = None


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
    ) -> None:
        self.at_once = at_once
        self._client = client
        self._info = info
        self._workers = workers
        self._sources = sources
        self._index = index
        self._lock = threading.Lock()
        self._stopped = self._closing = False
        self._closed = threading.Event()
        self._numbers = itertools.count()
        # Those of the target names, with or without the need of an EP.
        self._fitting: dict[tuple[str, bool], _Fitting | BuildError] = {}
        self._target_locks: dict[tuple[str, bool], threading.Lock] = {}
        # What workers may ask for by its sha256: its path, and its size in bytes.
        self._files: dict[str, tuple[Path, int]] = {}
        # The files that are being sent, with the addresses of their workers: these may ask again meanwhile.
        self._sending: set[tuple[str, str]] = set()
        # By the token of a job: its last step, the one that compiled it, and the workers that have it.
        self._running: dict[str, _Running] = {}
        self._compiled: dict[str, Any] = {}
        self._places: dict[str, set[str]] = {}
        # Since when no worker has these resources.
        self._missing: dict[frozenset[tuple[str, float]], float] = {}
        self._addresses: set[str] = set()
        self._events: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._transfers = threading.BoundedSemaphore(_TRANSFERS)
        self._senders = ThreadPoolExecutor(_TRANSFERS, "hatch-epcontext-send")
        self._cleanup_pool = ThreadPoolExecutor(_TRANSFERS, "hatch-epcontext-free")
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
        client = _connect(settings.scheduler)
        try:
            _check_scheduler(client)
            cluster = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
            threads = sum(each["nthreads"] for each in cluster.values())
            info = BuildInfo(
                uuid.uuid4().hex,
                workers.timeout,
                workers.memory_limit,
                workers.verbose,
                workers.log is not None,
                workers.progress is not None,
            )
            at_once = settings.jobs or min(max(_MIN_JOBS, 2 * threads), _MAX_JOBS)
            return DaskExecutor(client, info, at_once, workers, sources, index)
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
        reason = ""
        for _ in range(_ATTEMPTS):
            step = CompileTask(
                self._info, _token(job), _portable(job), self._models(job), versions, recipe
            )
            # If possible where an earlier recipe has left what this one starts from.
            running = self._submit(step, self._compiled.get(step.token))
            compiled = cast("Compiled | Refused", self._result(running))
            place = running.place if isinstance(compiled, Refused) else compiled.worker
            with self._lock:
                self._compiled[step.token] = running.future
                self._places.setdefault(step.token, set()).update(filter(None, [place]))
            if isinstance(compiled, Refused):
                return compiled
            try:
                self._fetch(compiled, folder)
            except _LostError as error:
                reason = str(error)
                self._check_running(job)
                shutil.rmtree(folder, ignore_errors=True)
                with self._lock:
                    self._compiled.pop(step.token, None)
                continue
            return compiled.record
        message = f"the worker was lost {_ATTEMPTS} times before its artifact was fetched: {reason}"
        raise BuildError(Problem(Kind.WORKER_LOST, job.location, message))

    def validate(
        self, job: Job, model: Model, artifact: Artifact, context: Context
    ) -> ValidationRun:
        """Validate on a worker, if possible on the one that compiled the artifact."""
        fitting = self._find(job)
        for name, file in artifact.record.files.items():
            self._files[file.sha256] = artifact.folder / PurePosixPath(name), file.size
        step = ValidateTask(
            self._info,
            _token(job),
            _portable(job),
            self._models(job),
            fitting.versions,
            job.models.index(model),
            artifact.record,
            context,
        )
        after = self._compiled.get(step.token)
        for _ in range(_ATTEMPTS):
            try:
                running = self._submit(step, after, fitting.able)
                return cast("ValidationRun", self._result(running))
            except _LostError:
                fitting, after = self._find(job, lost=fitting), None
            if fitting.reason is not None:
                message = f"the workers that can run its artifact were lost: {fitting.reason}"
                raise BuildError(Problem(Kind.NO_WORKER, job.location, message))
        message = f"the workers that can run its artifact were lost {_ATTEMPTS} times."
        raise BuildError(Problem(Kind.WORKER_LOST, job.location, message))

    def finished(self, job: Job) -> None:
        """Free what workers keep for ``job``."""
        token = _token(job)
        with self._lock:
            self._compiled.pop(token, None)
            self._running.pop(token, None)
            places = self._places.pop(token, set())
        for address in places if not self._closing else ():
            self._cleanup_pool.submit(self._forget, address, token)

    def stop(self) -> None:
        """Cancel all tasks, and end the steps that run."""
        with self._lock:
            first, self._stopped = not self._stopped, True
            running = [each.future for each in self._running.values()]
        self._workers.stop()
        if first:
            _limited(lambda: self._client.cancel(running, force=True))
            _limited(self._end_everywhere)

    def close(self) -> None:
        """End what runs on the cluster for this build, and the connection."""
        self._closing = True
        self._closed.set()
        for pool in (self._senders, self._cleanup_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        _limited(self._end_everywhere)
        with self._lock:
            self._running.clear()
            self._compiled.clear()
        _limited(lambda: self._client.close(_END_SECONDS))
        self._events.put(None)
        for thread in self._threads:
            thread.join(_END_SECONDS)

    # The cluster's workers.

    def _find(self, job: Job, *, lost: _Fitting | None = None) -> _Fitting:
        """The workers of the job's target; they are examined again if they still are ``lost``."""
        name = (job.target.name, job.target.needs_ep)
        with self._lock:
            lock = self._target_locks.setdefault(name, threading.Lock())
        with lock:
            self._check_running(job)
            if self._fitting.get(name) is lost:
                try:
                    self._fitting[name] = self._examine_again(job) if lost else self._examine(job)
                except BuildError as error:
                    self._fitting[name] = error
        found = self._fitting[name]
        if isinstance(found, BuildError):
            raise BuildError(*(replace(each, location=job.location) for each in found.problems))
        return found

    def _examine_again(self, job: Job) -> _Fitting:
        """The workers, when the last one that can run artifacts was lost: another one may come."""
        end = time.monotonic() + WORKER_SECONDS
        while (found := self._examine(job)).reason is not None and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return found

    def _examine(self, job: Job) -> _Fitting:
        found: Mapping[str, Description | Exception] = {}
        while not found:
            names = self._wait_for_workers(job)
            _check_installation(self._client.get_versions(packages=[_PACKAGE]), names, job)
            answers = self._client.run(
                dask_worker.describe, dump(_portable(job)), workers=list(names), on_error="return"
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

    # The steps.

    def _submit(
        self, step: RemoteTask, after: Any = None, able: tuple[str, ...] | None = None
    ) -> _Running:
        kind = "compile" if isinstance(step, CompileTask) else "validate"
        future = self._client.submit(
            dask_worker.run_step,
            dump(step),
            after,
            key=f"epcontext-{kind}-{self._info.id}-{next(self._numbers)}",
            resources=dict(step.job.target.resources) or None,
            workers=able,
            priority=0 if kind == "compile" else _FIRST,
            pure=False,
        )
        running = _Running(step.job, future, able)
        with self._lock:
            self._running[step.token] = running
        return running

    def _result(self, running: _Running) -> Compiled | Refused | ValidationRun:
        from distributed import CancelledError, KilledWorker

        job, future = running.job, running.future
        if self._stopped:
            # Too late for `stop`.
            future.cancel(force=True)
        try:
            outcome: Compiled | Refused | ValidationRun | EpcontextError = future.result()
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

    def _models(self, job: Job) -> tuple[ModelFiles, ...]:
        calibration = job.target.calibration
        return tuple(
            self._model_files(self._sources[model.name], model, calibration) for model in job.models
        )

    def _model_files(self, source: Source, model: Model, calibration: str) -> ModelFiles:
        folder = model.path.parent
        names = (model.path.name, *source.facts.external_data)
        inputs = model.validate.inputs
        return ModelFiles(
            str(folder),
            model.path.name,
            {name: self._offer(folder / PurePosixPath(name)) for name in names},
            Path(inputs).name,
            {} if inputs in SYNTHETIC else self._offer_inputs(Path(inputs)),
            Path(calibration).name,
            self._offer_inputs(Path(calibration)) if calibration else {},
        )

    def _offer_inputs(self, inputs: Path) -> dict[str, FileRecord]:
        """The records of a file of inputs, which has no name, or of all files in a folder."""
        if not inputs.is_dir():
            return {"": self._offer(inputs)}
        paths = (each for each in sorted(inputs.rglob("*")) if each.is_file())
        return {each.relative_to(inputs).as_posix(): self._offer(each) for each in paths}

    def _offer(self, path: Path) -> FileRecord:
        """The record of a file that workers may ask for from now on."""
        record = FileRecord(path.stat().st_size, self._index.sha256(path))
        self._files[record.sha256] = path, record.size
        return record

    def _send(self, sha256: str, address: str) -> None:
        path, size = self._files[sha256]
        offset = 0
        try:
            with path.open("rb") as file:
                while offset < size and not self._closed.is_set():
                    with self._transfers:
                        chunk = file.read(CHUNK)
                        if not self._send_chunk(sha256, address, offset, chunk):
                            return
                    offset += len(chunk)
        except (_LostError, OSError) as error:
            self._note_sent(sha256, address)
            # If the worker itself is lost, dask gives its job to another one. If only this message is lost,
            # the worker asks again.
            with contextlib.suppress(_LostError):
                self._call(address, dask_worker.refuse, self._info.id, sha256, f"{path}: {error}")
        finally:
            self._note_sent(sha256, address)

    def _note_sent(self, sha256: str, address: str) -> None:
        with self._lock:
            self._sending.discard((sha256, address))

    def _send_chunk(self, sha256: str, address: str, offset: int, chunk: bytes) -> bool:
        """Send a chunk to a worker; False if it does not wait for it any more."""
        if not chunk:
            raise _LostError("it changed while the build was running")
        try:
            # Five times as fast as an argument of a function.
            [sent] = self._client.scatter([chunk], workers=[address], hash=False)
        except Exception as error:
            raise _LostError(f"{address}: {error}") from error
        wanted: bool = self._call(
            address, dask_worker.receive, self._info.id, sha256, offset, sent.key
        )
        sent.release()
        return wanted

    def _fetch(self, compiled: Compiled, folder: Path) -> None:
        """Fetch the files of an artifact into ``folder``, which is made; raises _LostError."""
        folder.mkdir(parents=True)
        for name, record in compiled.record.files.items():
            path = folder / PurePosixPath(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256()
            with path.open("wb") as file:
                while (offset := file.tell()) < record.size:
                    with self._transfers:
                        chunk: bytes = self._call(
                            compiled.worker,
                            dask_worker.read,
                            compiled.artifact,
                            name,
                            offset,
                            CHUNK,
                        )
                        if not chunk:
                            raise _LostError(f"{name} is shorter on {compiled.worker}")
                        digest.update(chunk)
                        file.write(chunk)
            if digest.hexdigest() != record.sha256:
                raise _LostError(f"{name} has changed on {compiled.worker}")

    def _call(self, address: str, function: Callable[..., Any], *arguments: object) -> Any:
        """The result of ``function`` on the worker with that address; raises _LostError."""
        try:
            return self._client.run(function, *arguments, workers=[address])[address]
        except Exception as error:
            raise _LostError(f"{address}: {error}") from error

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
            elif "wants" in event:
                wanted = (event["wants"], address)
                with self._lock:
                    is_sent = wanted in self._sending
                    self._sending.add(wanted)
                # A closed pool takes nothing more.
                with contextlib.suppress(RuntimeError):
                    if not is_sent:
                        self._senders.submit(self._send, *wanted)

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
        """Give up the steps for which there has been no worker for too long: dask lets them wait for ever."""
        while not self._closed.wait(_WATCH_SECONDS):
            # A worker that starts a step from now on may be missing in the answer of the scheduler.
            places = [(each, each.place) for each in self._submitted()]
            if not places and not self._missing:
                continue
            # The connection may be lost, and then the steps end by themselves.
            with contextlib.suppress(Exception):
                cluster = self._cluster("")
                for each, place in places:
                    if place not in cluster and each.place == place:
                        each.place = None
                self._give_up([each for each, _ in places], cluster)

    def _give_up(self, steps: Sequence[_Running], cluster: Mapping[str, Any]) -> None:
        by_resources: dict[frozenset[tuple[str, float]], list[_Running]]
        by_resources = {resources: [] for resources in self._missing}
        for step in steps:
            by_resources.setdefault(frozenset(step.job.target.resources.items()), []).append(step)
        given_up = []
        for resources, same in by_resources.items():
            wanted = dict(sorted(resources))
            fitting = {address for address, each in cluster.items() if _has(each, wanted)}
            if fitting:
                self._missing.pop(resources, None)
                lost = [each for each in same if each.able and fitting.isdisjoint(each.able)]
                for each in lost:
                    each.reason = _LostError("no worker that can run the artifact")
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
        with contextlib.suppress(_LostError):
            self._call(address, dask_worker.forget, self._info.id, token)


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
