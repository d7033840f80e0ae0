"""Jobs on the machines of a cluster of ``dask.distributed``.

The client, in the build process, submits each step of a job as a task. Files go through the shared cache,
named by their content: the client sends what models need, and fetches the archives that workers send.
Dask handles resources, lost workers, cancelled tasks and the order of tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, cast

from hatch_epcontext.config.settings import SYNTHETIC, BuildSettings, Model
from hatch_epcontext.errors import (
    AccidentError,
    BuildError,
    EpcontextError,
    InterruptedBuildError,
    Key,
    Kind,
    Problem,
)
from hatch_epcontext.files import FileRecord, record_file, temp_dir
from hatch_epcontext.jobs.artifact import Artifact, Recipe, Record, Refused, Source
from hatch_epcontext.jobs.cache.archive import pack, unpack
from hatch_epcontext.jobs.cache.fingerprint import value_sha256
from hatch_epcontext.jobs.cache.index import Index, changed_error
from hatch_epcontext.jobs.cache.shared import Transport, TransportError
from hatch_epcontext.jobs.cache.store import DamagedError
from hatch_epcontext.jobs.executors import dask_worker
from hatch_epcontext.jobs.executors.dask_worker import (
    TOPIC,
    BuildInfo,
    Description,
    Outcome,
    RemoteTask,
    SharedFiles,
    ToValidate,
)
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.jobs.processes.process import Heartbeat, Workers
from hatch_epcontext.jobs.validation import input_files, reason_not_to_run
from hatch_epcontext.system import writing
from hatch_epcontext.text import count, hide_credentials, pairs
from hatch_epcontext.worker.results import Context, Validation

CONNECT_SECONDS = 10.0
"""Seconds in which the scheduler must answer."""

WORKER_SECONDS = 30.0
"""Seconds to wait for a worker with the resources of a target: at first, and when the last one is lost."""

_POLL_SECONDS = 0.5
"""Seconds between polls of the cluster's workers."""

_WATCH_SECONDS = 5.0
"""Seconds between checks that the cluster still has workers for a submitted task."""

_END_SECONDS = 10.0
"""Seconds that the end of a build may take on the cluster."""

_MIN_JOBS, _MAX_JOBS = 4, 1000
"""The limits of the number of jobs at once. For each a thread waits."""

_FIRST = 10
"""The priority of validations: a worker has their artifact already."""

_PACKAGE = "hatch_epcontext"


@dataclass(frozen=True)
class _Fitting:
    """The workers that may compile for a target, with the versions that all of them have.

    ``able``: the addresses of those that can also run artifacts, None if all can; ``reason``: why none can.
    """

    versions: Mapping[str, str]
    able: tuple[str, ...] | None
    reason: str | None


@dataclass
class _RunningJob:
    """A job that has not ended: its number, its last task, and the address of the worker that runs it, None
    while it waits.
    """

    number: int
    future: Any = None
    place: str | None = None


class DaskExecutor:
    """Jobs on the workers of a cluster; see `Executor`. ``close`` ends the connection."""

    def __init__(
        self,
        client: Any,
        settings: BuildSettings,
        workers: Workers,
        sources: Mapping[str, Source],
        index: Index,
    ) -> None:
        assert settings.cache is not None, "a cluster needs one"
        threads = sum(client.nthreads().values())
        wanted, automatic = settings.jobs, min(max(_MIN_JOBS, 2 * threads), _MAX_JOBS)
        self.at_once = automatic if wanted == "auto" else wanted
        self.stopped = False
        self._client = client
        self._info = BuildInfo(
            uuid.uuid4().hex,
            settings.cache,
            workers.timeout,
            workers.memory_limit,
            workers.verbose,
            workers.log is not None,
            workers.progress is not None,
        )
        self._workers = workers
        self._sources = sources
        self._index = index
        self._transport = Transport(settings.cache)
        self._lock, self._looking, self._sending = (threading.Lock() for _ in range(3))
        self._numbers = itertools.count()
        # By the target's name and whether it needs the EP.
        self._fitting: dict[tuple[str, bool], Future[_Fitting]] = {}
        # The archives of fetched or sent artifacts, by their folders.
        self._archives: dict[Path, FileRecord] = {}
        # By their folders, which name them in this build.
        self._jobs: dict[str, _RunningJob] = {}
        # The addresses of the workers that this build has used.
        self._places: set[str] = set()
        # The workers of the cluster, and when the scheduler reported them.
        self._cluster_seen: tuple[float, Mapping[str, Any]] = (0.0, {})
        self._beat = Heartbeat()
        # The thread of the client's connection must never block.
        self._events = ThreadPoolExecutor(1, TOPIC)
        client.subscribe_topic(TOPIC, lambda event: self._events.submit(self._handle, event[1]))

    @staticmethod
    def connect(
        settings: BuildSettings, workers: Workers, sources: Mapping[str, Source], index: Index
    ) -> DaskExecutor:
        """An executor on the cluster of ``settings.scheduler``.

        ``workers`` are those of this machine: the cluster's workers get the same limits and logs.
        Raises BuildError when the scheduler cannot be reached or has other versions.
        """
        assert settings.scheduler is not None, "the executor is dask"
        client = _connect(settings.scheduler)
        try:
            _check_installations(client, {}, "the dask cluster")
            return DaskExecutor(client, settings, workers, sources, index)
        except BaseException:
            client.close(_END_SECONDS)
            raise

    def versions(self, job: Job) -> Mapping[str, str]:
        """The versions on the workers that may run ``job``.

        Raises BuildError when they differ, when a worker lacks a package, or when there is no such worker.
        """
        return self._find(job).versions

    def reason_not_to_run(self, job: Job) -> str | None:
        """Why none of the job's workers can run its result."""
        return reason_not_to_run(job) if job.target.from_cache else self._find(job).reason

    def compile(self, job: Job, recipe: Recipe, folder: Path) -> Record | Refused:
        """Compile ``job`` on a worker, and fetch its artifact into ``folder``."""
        compiled = cast("FileRecord | Refused", self._run(job, lambda: recipe))
        if isinstance(compiled, Refused):
            return compiled
        with (
            self._using_cache(job),
            writing("an artifact", folder),
            temp_dir() as made,
        ):
            self._transport.fetch_file(compiled.sha256, compiled.size, made / "archive")
            record = unpack(made / "archive", folder)
        self._archives[folder] = compiled
        return record

    def validate(self, job: Job, model: Model, artifact: Artifact, context: Context) -> Validation:
        """Validate on a worker: if possible on the one that compiled the artifact."""

        def work() -> ToValidate:
            return ToValidate(artifact.record, self._archive(job, artifact), context)

        return cast("Validation", self._run(job, work))

    def finished(self, job: Job) -> None:
        """Let workers free what they keep for ``job`` when they get their next task."""
        with self._lock:
            self._jobs.pop(job.folder, None)

    def stop(self) -> None:
        """Cancel all tasks, whose steps workers then end."""
        with self._lock:
            if self.stopped:
                return
            self.stopped = True
            tasks = [each.future for each in self._jobs.values() if each.future is not None]
        self._workers.stop()
        self._transport.stop()
        _limited(lambda: self._client.cancel(tasks, force=True))

    def close(self) -> None:
        """Free what workers keep for this build, and end the connection."""
        _limited(self._end)
        _limited(lambda: self._client.close(_END_SECONDS))
        self._events.shutdown()

    def _end(self) -> None:
        if places := self._places & self._cluster().keys():
            self._client.run(
                dask_worker.end, self._info.id, workers=list(places), on_error="ignore"
            )

    # The cluster's workers.

    def _find(self, job: Job) -> _Fitting:
        """The workers of the job's target, examined once."""
        name = (job.target.name, job.target.needs_ep)
        with self._lock:
            is_first = name not in self._fitting
            found = self._fitting.setdefault(name, Future())
        if is_first:
            try:
                found.set_result(self._examine(job))
            except BaseException as error:
                found.set_exception(error)
        return found.result()

    def _examine(self, job: Job) -> _Fitting:
        found: Mapping[str, Description | Exception] = {}
        while not found:
            names = self._wait_for_workers(job)
            _check_installations(self._client, names, "")
            answers = self._client.run(
                dask_worker.describe,
                pickle.dumps(_portable(job)),
                workers=list(names),
                on_error="return",
            )
            # A worker that was lost meanwhile does not count.
            cluster = self._cluster()
            found = {
                address: each
                for address, each in answers.items()
                if address in cluster or not isinstance(each, OSError)
            }
        problems = {names[a]: each for a, each in found.items() if isinstance(each, Exception)}
        if problems:
            raise BuildError(
                *(
                    replace(problem, message=f"on the {_workers(same)}: {problem.message}")
                    for problem, same in _grouped(problems)
                )
            )
        described = {a: each for a, each in found.items() if isinstance(each, Description)}
        if len({value_sha256(dict(each.versions)) for each in described.values()}) > 1:
            versions = {names[a]: pairs(each.versions) for a, each in described.items()}
            what = "the workers that may run the job have different versions"
            raise _unequal("", what, versions, _EQUAL_WORKERS)
        able = tuple(a for a, each in described.items() if each.reason_not_to_run is None)
        first = next(iter(described.values()))
        return _Fitting(
            first.versions,
            None if len(able) in (0, len(described)) else able,
            None if able else first.reason_not_to_run,
        )

    def _wait_for_workers(self, job: Job) -> Mapping[str, str]:
        """The names of the workers with the job's resources, by their address."""
        for names in self._fitting_workers(job):
            if names:
                break
            time.sleep(_POLL_SECONDS)
        return names

    def _fitting_workers(self, job: Job) -> Iterator[Mapping[str, str]]:
        """Yield the current names of the workers with the job's resources, by their address, again and again.

        Raises BuildError when there were none for too long: dask lets tasks wait for ever.
        """
        wanted, missing_since = job.target.resources, None
        while True:
            self._check_running(job)
            cluster = self._cluster(_POLL_SECONDS)
            names = {
                address: _name(address, each["name"])
                for address, each in cluster.items()
                if all(each["resources"].get(name, 0) >= n for name, n in wanted.items())
            }
            if names:
                missing_since = None
            elif missing_since is None:
                missing_since = time.monotonic()
                self._report(
                    f"{job.location}: the cluster has no {_wanted(wanted)}; waiting for one"
                )
            elif time.monotonic() >= missing_since + WORKER_SECONDS:
                raise _no_worker(job, cluster)
            yield names

    def _cluster(self, seconds: float = 0.0) -> Mapping[str, Any]:
        """The cluster's workers by their address, as they were at most ``seconds`` ago."""
        with self._looking:
            if time.monotonic() > self._cluster_seen[0] + seconds:
                try:
                    found = self._client.sync(self._client.scheduler.identity, n_workers=-1)
                except OSError as error:
                    raise _lost_scheduler(error) from None
                self._cluster_seen = (time.monotonic(), found["workers"])
            return self._cluster_seen[1]

    # The tasks.

    def _run(self, job: Job, work: Callable[[], Recipe | ToValidate]) -> Outcome:
        """The outcome of a task, which is submitted again if the shared cache has a damaged file of it."""
        with self._using_cache(job):
            try:
                return self._result(job, work())
            except DamagedError as error:
                if error.blob is None:
                    raise
                self._transport._intact[error.blob.sha256] = False  # noqa: SLF001
            return self._result(job, work())

    def _result(self, job: Job, work: Recipe | ToValidate) -> Outcome:
        """The outcome of a task when it has ended; raises DamagedError, and BuildError."""
        from distributed import CancelledError

        fitting = self._find(job)
        able = fitting.able if isinstance(work, ToValidate) else None
        future = self._submit(job, work, fitting.versions, able)
        try:
            self._wait(job, future, able)
            outcome: Outcome | DamagedError | BuildError = future.result()
        except BuildError:
            _limited(lambda: future.cancel(force=True))
            raise
        except CancelledError as error:
            self._check_running(job)
            raise _lost_scheduler(error) from None
        except Exception as error:
            self._check_running(job)
            message = f"a worker failed: {type(error).__name__}: {error}"
            hint = "Read the logs of the dask workers. Often their machine has too little memory."
            raise AccidentError(Problem(Kind.WORKER_LOST, "", message, hint)) from error
        if isinstance(outcome, Exception):
            self._check_running(job)
            raise outcome
        return outcome

    def _submit(
        self,
        job: Job,
        work: Recipe | ToValidate,
        versions: Mapping[str, str],
        able: tuple[str, ...] | None,
    ) -> Any:
        """Submit a task, after its files were sent to the shared cache; returns its future."""
        files = self._files(job)
        with self._lock:
            number = next(self._numbers)
            running = self._jobs.setdefault(job.folder, _RunningJob(number))
            oldest = min(each.number for each in self._jobs.values())
            # That worker has the artifact of the job's last task.
            last, running.place = running.place, None
        task = RemoteTask(self._info, running.number, oldest, _portable(job), files, versions, work)
        kind = "compile" if isinstance(work, Recipe) else "validate"
        future = self._client.submit(
            dask_worker.run_task,
            pickle.dumps(task),
            key=f"epcontext-{kind}-{self._info.id}-{number}",
            resources=dict(job.target.resources) or None,
            workers=able or last,
            allow_other_workers=not able and last is not None,
            priority=0 if kind == "compile" else _FIRST,
            pure=False,
        )
        with self._lock:
            running.future = future
        if self.stopped:
            # `stop` did not see this future.
            future.cancel(force=True)
        return future

    def _wait(self, job: Job, future: Any, able: tuple[str, ...] | None) -> None:
        """Return when the task has ended; raises BuildError when no worker is left for it."""
        ended = threading.Event()
        future.add_done_callback(lambda _: ended.set())
        looks = self._fitting_workers(job)
        while not ended.wait(_WATCH_SECONDS):
            names = next(looks)
            if able and names and names.keys().isdisjoint(able):
                message = "the workers that can run its artifact were lost."
                raise BuildError(Problem(Kind.NO_WORKER, "", message))
            if self._beat.due() and (waiting := self._waiting()):
                waits = "waits" if waiting == 1 else "wait"
                self._report(f"{count(waiting, 'job')} {waits} for a free worker")

    def _waiting(self) -> int:
        """The number of jobs whose task no worker has started, or whose worker was lost."""
        cluster = self._cluster(_POLL_SECONDS)
        with self._lock:
            return sum(
                each.future is not None and not each.future.done() and each.place not in cluster
                for each in self._jobs.values()
            )

    def _check_running(self, job: Job) -> None:
        if self.stopped:
            message = "the build was interrupted."
            raise InterruptedBuildError(Problem(Kind.INTERRUPTED, "", message))

    def _handle(self, event: Mapping[str, Any]) -> None:
        """Handle what a worker reports, to this build or to another one."""
        if event["build"] != self._info.id:
            return
        if "log" in event and self._workers.log is not None:
            self._workers.log(event["log"])
        elif "progress" in event:
            self._report(event["progress"])
        elif "started" in event:
            with self._lock:
                self._places.add(event["worker"])
                if job := self._jobs.get(event["started"]):
                    job.place = event["worker"]

    def _report(self, line: str) -> None:
        if self._workers.progress is not None:
            self._workers.progress(line)

    # Files.

    def _files(self, job: Job) -> Mapping[str, SharedFiles]:
        """Send the files that ``job`` names to the shared cache; returns them by their paths."""
        found = {
            str(model.path): self._offered(model.path, self._sources[model.name].files)
            for model in job.models
        }
        for given in (*(model.validate.inputs for model in job.models), job.target.calibration):
            if given and given not in SYNTHETIC:
                found[given] = self._offered(Path(given), input_files(given))
        return found

    def _offered(self, path: Path, files: Iterable[Path]) -> SharedFiles:
        records = {}
        for file in files:
            record = FileRecord(file.stat().st_size, self._index.sha256(file))
            self._send_input(file, record)
            records[file.relative_to(path.parent).as_posix()] = record
        return SharedFiles(str(path.parent), path.name, records)

    def _send_input(self, path: Path, record: FileRecord) -> None:
        # One at a time: several jobs may need the same file.
        with self._sending:
            if self._transport.has_file(record):
                return
            # A copy: if the user writes the file now, the cache must not get it under another content's name.
            with writing("a copy of a model", path), temp_dir() as made:
                shutil.copyfile(path, made / "file")
                if record_file(made / "file") != record:
                    raise changed_error(path)
                self._transport.send_file(made / "file")

    def _archive(self, job: Job, artifact: Artifact) -> FileRecord:
        """Send the archive of ``artifact`` to the shared cache, and return its record."""
        archive = self._archives.get(artifact.folder)
        if archive is None or not self._transport.has_file(archive):
            with writing("an archive", artifact.folder), temp_dir() as made:
                archive = pack(artifact.folder, artifact.record, made / "archive")
                self._transport.send_file(made / "archive")
            self._archives[artifact.folder] = archive
        return archive

    @contextlib.contextmanager
    def _using_cache(self, job: Job) -> Iterator[None]:
        """Raise BuildError when a file cannot be sent to the shared cache, or fetched from it."""
        try:
            yield
        except (TransportError, DamagedError) as error:
            self._check_running(job)
            message = f"the shared cache cannot be used: {error}."
            hint = f"Let this machine and the workers read and write {self._transport.url}."
            raise BuildError(Problem(Kind.UNUSABLE_CACHE, "", message, hint)) from None


def _portable(job: Job) -> Job:
    """``job`` without `Path` objects of this system, which another system cannot unpickle."""
    models = tuple(
        replace(model, path=cast("Path", PurePosixPath(str(model.path)))) for model in job.models
    )
    return replace(job, models=models)


def _connect(address: str) -> Any:
    import distributed

    make_client: Any = distributed.Client
    try:
        # Checked first: a client waits for ever for a server that never answers, and may print a traceback if
        # its constructor fails. In a thread, because the caller may have an event loop.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: asyncio.run(_probe_scheduler(address))).result()
        return make_client(address, timeout=CONNECT_SECONDS, set_as_default=False, name=TOPIC)
    # Any exception, because another kind of server may answer at that address.
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
        # Only a client can make this call.
        return
    # Neither has types.
    security: Any = distributed.Security
    connect: Any = core.connect
    arguments = security().get_connection_args("client")
    connection = await connect(address, timeout=CONNECT_SECONDS, **arguments)
    await connection.close()


def _check_installations(client: Any, names: Mapping[str, str], location: str) -> None:
    """Raise BuildError if the scheduler or workers of ``names`` cannot unpickle what this process sends."""
    versions = client.get_versions(packages=[_PACKAGE])
    found = {"the scheduler": _installation(versions["scheduler"])}
    for address, each in versions["workers"].items():
        if address in names:
            found[names[address]] = _installation(each)
    ours = _installation(versions["client"])
    if others := {name: each for name, each in found.items() if each != ours}:
        raise _unequal(location, f"this machine has {ours}", others, _SAME_VERSIONS)


def _installation(versions: Mapping[str, Any]) -> str:
    python = ".".join(versions["host"]["python"].split(".")[:2])
    package = versions["packages"].get(_PACKAGE) or "is missing"
    return f"Python {python}, hatch-epcontext {package}"


def _unequal(location: str, what: str, facts: Mapping[str, str], hint: str) -> BuildError:
    lines = "\n".join(f"{name}: {fact}" for name, fact in sorted(facts.items()))
    return BuildError(Problem(Kind.VERSION_MISMATCH, location, f"{what}:\n{lines}", hint))


_SAME_VERSIONS = (
    "Install the same version of hatch-epcontext, with the same minor version of Python, on this machine, "
    "the scheduler and the workers."
)

_EQUAL_WORKERS = (
    "Install the same versions on all of them, or give the target resources that only equal workers "
    "have."
)


def _wanted(resources: Mapping[str, float]) -> str:
    return f"worker with {_numbers(resources)}" if resources else "worker"


def _no_worker(job: Job, cluster: Mapping[str, Any]) -> BuildError:
    offers = Counter(_numbers(each["resources"]) or "no resources" for each in cluster.values())
    offered = "; ".join(f"{count(n, 'worker')} with {offer}" for offer, n in sorted(offers.items()))
    resources = job.target.resources
    message = (
        f"the job needs a {_wanted(resources)}, and none came in {WORKER_SECONDS:.0f} s. The cluster has "
        f"{offered or 'no workers'}."
    )
    flag = ",".join(f"{name}={number:g}" for name, number in resources.items())
    hint = "Start one: dask worker <scheduler>" + (f' --resources "{flag}"' if flag else "")
    return BuildError(Problem(Kind.NO_WORKER, "", message, hint))


def _numbers(resources: Mapping[str, float]) -> str:
    return pairs({name: f"{number:g}" for name, number in resources.items()})


def _lost_scheduler(error: BaseException) -> BuildError:
    message = f"the connection to the scheduler was lost: {error or type(error).__name__}"
    return BuildError(Problem(Kind.UNREACHABLE_SCHEDULER, "", hide_credentials(message)))


def _name(address: str, name: object) -> str:
    return address if name == address else f"{name} ({address})"


def _workers(names: Sequence[str]) -> str:
    return f"worker {names[0]}" if len(names) == 1 else f"workers {', '.join(names)}"


def _grouped(
    errors: Mapping[str, Exception],
) -> Iterable[tuple[Problem, Sequence[str]]]:
    """Each distinct problem, with the workers that have it."""
    found: dict[str, tuple[Problem, list[str]]] = {}
    for worker, error in errors.items():
        message = f"{type(error).__name__}: {error}"
        unknown = (Problem(Kind.WORKER_LOST, "", message),)
        for problem in error.problems if isinstance(error, EpcontextError) else unknown:
            found.setdefault(str(problem), (problem, []))[1].append(worker)
    return found.values()


def _limited(work: Callable[[], object]) -> None:
    """Do ``work`` in a thread, and wait for it for a limited time: the network may hang."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, name=TOPIC, daemon=True)
    thread.start()
    thread.join(_END_SECONDS)
