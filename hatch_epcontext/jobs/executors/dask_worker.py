"""What runs on the workers of a dask cluster: the steps of jobs, each by the worker machine's own executor.

A dask worker only starts the processes in which vendors' compilers run, as a build on one machine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, EpcontextError, Kind, Problem
from hatch_epcontext.files import FileRecord, file_sha256
from hatch_epcontext.jobs.artifact import Artifact, Recipe, Record, Refused, ValidationRun
from hatch_epcontext.jobs.cache.fingerprint import value_sha256
from hatch_epcontext.jobs.executors.local import LocalExecutor
from hatch_epcontext.jobs.executors.store import ArrivalError, Store, read_chunk, room
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import check_environment, requirements, versions_of
from hatch_epcontext.jobs.validation import reason_not_to_run
from hatch_epcontext.text import pairs
from hatch_epcontext.worker.facts import Context

TOPIC = "hatch-epcontext"
"""The topic of the events that workers log for the builds. One for all builds: the scheduler keeps the
last events of each topic for as long as it runs."""

ABANDONED_SECONDS = 300.0
"""Seconds after which a worker ends the steps of a build that it did not hear of."""

_WATCH_SECONDS = 5.0


@dataclass(frozen=True)
class BuildInfo:
    """A build as its workers see it: a name of its own, and how worker processes run.

    ``log`` and ``progress``: whether the build wants the lines of both.
    """

    id: str
    timeout: float
    memory_limit: int | None
    verbose: bool
    log: bool
    progress: bool


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, by their paths in its folder, and those of its dummy inputs.

    ``folder`` is their place on the machine of the build; ``name`` is the model's own file. ``inputs`` is
    the name of the inputs' file or folder; the path of a single file is empty.
    """

    folder: str
    name: str
    files: Mapping[str, FileRecord]
    inputs: str
    input_files: Mapping[str, FileRecord] = field(default_factory=dict)
    calibration: str = ""
    calibration_files: Mapping[str, FileRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class RemoteTask:
    """A step of ``job``. ``token`` names the job in this build; ``models`` are the files of its models.

    ``versions``: those that the job's fingerprint has.
    """

    build: BuildInfo
    token: str
    job: Job
    models: tuple[ModelFiles, ...]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class CompileTask(RemoteTask):
    """Compile the job with ``recipe``."""

    recipe: Recipe


@dataclass(frozen=True)
class ValidateTask(RemoteTask):
    """Validate ``context``, of the job's model with the index ``model``, in the artifact of ``record``."""

    model: int
    record: Record
    context: Context


@dataclass(frozen=True)
class Compiled:
    """What was compiled: ``artifact`` is its folder on the worker with the address ``worker``."""

    worker: str
    artifact: str
    record: Record


@dataclass(frozen=True)
class Description:
    """What a worker says of a target: its versions and why it cannot run artifacts, or its problems."""

    versions: Mapping[str, str] = field(default_factory=dict)
    reason_not_to_run: str | None = None
    problems: tuple[Problem, ...] = ()


def dump(value: object) -> bytes:
    """Pickle ``value``: the scheduler then carries it as it is."""
    from distributed.protocol import pickle as dask_pickle

    # Distributed's own, because some providers have functions that plain pickles cannot have.
    pickler: Any = dask_pickle
    data: bytes = pickler.dumps(value)
    return data


async def describe(data: bytes) -> Description:
    """The `Description` for a pickled job."""
    return await asyncio.to_thread(_describe, pickle.loads(data))


def _describe(job: Job) -> Description:
    try:
        _check_library(job)
        return Description(versions_of(job.target, _installed(job)), reason_not_to_run(job))
    except EpcontextError as error:
        return Description(problems=error.problems)


def _installed(job: Job) -> Mapping[str, str]:
    return check_environment((job.target,), requirements((job.target,)))


def _check_library(job: Job) -> None:
    plugin = job.target.provider.plugin
    if plugin is None or not plugin.path:
        return
    path = Path(plugin.path)
    if not path.is_file() or file_sha256(path) != job.target.settings.library_sha256:
        message = f"the library {path} is missing or another one there."
        hint = "Install it at the same path, or use a package with get_library_path()."
        raise BuildError(Problem(Kind.UNLOADABLE_LIBRARY, job.location, message, hint))


def run_step(
    data: bytes, after: object = None
) -> Compiled | Refused | ValidationRun | EpcontextError:
    """Run a pickled `RemoteTask`; foreseen errors are returned, because dask logs those that are raised.

    ``after`` is the result of an earlier step of the job: dask prefers the worker that has it.
    """
    from distributed import get_worker

    worker = get_worker()
    step: RemoteTask = pickle.loads(data)
    build = _Machine.of(worker).enter(step.build, worker)
    try:
        with build.running(step) as job:
            return job.run(step)
    except EpcontextError as error:
        return error


async def receive(build: str, sha256: str, offset: int, chunk: str, dask_worker: Any) -> bool:
    """Take a chunk of a file, which dask has under the key ``chunk``; False if nobody waits for it any more.

    Dask passes ``dask_worker``.
    """
    found = _Machine.find(build)
    return found is not None and await asyncio.to_thread(
        lambda: found.store.receive(sha256, offset, dask_worker.data[chunk])
    )


def refuse(build: str, sha256: str, reason: str) -> None:
    """End the waiting for a file that cannot be sent."""
    if found := _Machine.find(build):
        found.store.refuse(sha256, reason)


async def read(folder: str, name: str, offset: int, size: int) -> bytes:
    """A chunk of the file ``name`` in an artifact's folder."""
    return await asyncio.to_thread(read_chunk, Path(folder) / PurePosixPath(name), offset, size)


async def forget(build: str, token: str) -> None:
    """Free what is kept for a job."""
    if found := _Machine.find(build):
        await asyncio.to_thread(found.forget, token)


def keep_alive(build: str) -> None:
    """Note that the build still runs."""
    if found := _Machine.find(build):
        found.seen = time.monotonic()


async def end(build: str) -> None:
    """End all steps of a build, and free what is kept for it."""
    await asyncio.to_thread(_Machine.end, build)


class _Machine:
    """A dask worker process: the files that it keeps, and its builds."""

    _all: dict[str, _Machine] = {}  # noqa: RUF012
    _ended: set[str] = set()  # noqa: RUF012
    _lock = threading.Lock()

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.store = Store(folder / "files", room(folder))
        self.builds: dict[str, _Build] = {}
        self._device_locks: dict[str, threading.Lock] = {}
        threading.Thread(target=self._watch, name=TOPIC, daemon=True).start()

    @classmethod
    def of(cls, worker: Any) -> _Machine:
        """The machine of a dask worker; tests have several workers in a process."""
        with cls._lock:
            if worker.id not in cls._all:
                # Dask removes this folder when the worker ends, or when the next one starts.
                folder = Path(worker.local_directory).resolve() / TOPIC
                cls._all[worker.id] = cls(folder)
            return cls._all[worker.id]

    @classmethod
    def find(cls, build: str) -> _Build | None:
        """The build with this name, if this process works for it."""
        with cls._lock:
            found = (each.builds[build] for each in cls._all.values() if build in each.builds)
            return next(found, None)

    @classmethod
    def end(cls, build: str) -> None:
        """End all that runs for the build in this process, and start nothing more for it."""
        with cls._lock:
            cls._ended.add(build)
            ended = [each.builds.pop(build, None) for each in cls._all.values()]
        for each in filter(None, ended):
            each.end()

    def enter(self, info: BuildInfo, worker: Any) -> _Build:
        """The build that ``info`` describes, for which this machine works from now on."""
        with self._lock:
            if info.id in self._ended:
                raise BuildError(Problem(Kind.INTERRUPTED, "", "the build has ended."))
            if info.id not in self.builds:
                folder = self._folder / info.id
                self.builds[info.id] = _Build(info, worker, folder, self.store, self._device_locks)
            return self.builds[info.id]

    def _watch(self) -> None:
        while True:
            time.sleep(_WATCH_SECONDS)
            for name, build in list(self.builds.items()):
                if time.monotonic() > build.seen + ABANDONED_SECONDS:
                    self.end(name)


class _Build:
    """What a worker has for one build: an executor, and a folder for each of its jobs."""

    def __init__(
        self,
        info: BuildInfo,
        worker: Any,
        folder: Path,
        store: Store,
        locks: dict[str, threading.Lock],
    ) -> None:
        self.info = info
        self.address: str = worker.address
        self.folder = folder
        self.store = store
        self.seen = time.monotonic()
        self._log_event = worker.log_event
        self._stack = contextlib.ExitStack()
        self._workers = self._stack.enter_context(
            Workers(
                info.timeout,
                self._sender("log") if info.log else None,
                info.verbose,
                info.memory_limit,
                self._sender("progress") if info.progress else None,
            )
        )
        self.executor = LocalExecutor.make(self._workers, folder, 1, {}, (), locks)
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._users: Counter[Path] = Counter()
        self._installed: dict[tuple[str, bool], Mapping[str, str]] = {}

    @contextlib.contextmanager
    def running(self, step: RemoteTask) -> Iterator[_Job]:
        """The job of ``step``, which is kept until it is forgotten and no step of it runs."""
        with self._lock:
            if step.token not in self._jobs:
                self._jobs[step.token] = _Job(self, step)
                self._users.update(self._jobs[step.token].folders)
            job = self._jobs[step.token]
            job.running += 1
        self.send("started", step.token)
        try:
            yield job
        finally:
            with self._lock:
                job.running -= 1
            self._free(job)
            if self.executor.stopped:
                # The step may have written after the end of the build.
                shutil.rmtree(self.folder, ignore_errors=True)

    def forget(self, token: str) -> None:
        with self._lock:
            job = self._jobs.get(token)
        if job is not None:
            job.forgotten = True
            self._free(job)

    def end(self) -> None:
        self._workers.stop()
        self._stack.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def send(self, what: str, value: object) -> None:
        self._log_event(TOPIC, {"build": self.info.id, what: value, "worker": self.address})

    def ask(self, record: FileRecord) -> None:
        self.send("wants", record.sha256)

    def installed(self, job: Job) -> Mapping[str, str]:
        """What was installed for the job's target when the build began here, and imported."""
        target = (job.target.name, job.target.needs_ep)
        if target not in self._installed:
            self._installed[target] = _installed(job)
        return self._installed[target]

    def check_running(self) -> None:
        """Raise BuildError if the build has ended."""
        if self.executor.stopped:
            raise BuildError(Problem(Kind.INTERRUPTED, "", "the build was interrupted."))

    def _sender(self, what: str) -> Callable[[str], None]:
        return lambda line: self.send(what, line)

    def _free(self, job: _Job) -> None:
        with self._lock:
            if job.running or not job.forgotten or self._jobs.pop(job.token, None) is None:
                return
            self._users.subtract(job.folders)
            for folder in job.folders:
                # The store still has its files.
                if self._users[folder] <= 0:
                    shutil.rmtree(folder, ignore_errors=True)
        job.free()


class _Job:
    """A job on a worker: its models with the paths that they have here, and its artifact."""

    def __init__(self, build: _Build, step: RemoteTask) -> None:
        self.token = step.token
        self.running = 0
        self.forgotten = False
        self._build = build
        self._folder = build.folder / "jobs" / step.token
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._places = [_Places.of(build.folder / "models", each) for each in step.models]
        self._job = replace(
            step.job,
            models=tuple(
                place.moved(model)
                for place, model in zip(self._places, step.job.models, strict=True)
            ),
            target=replace(step.job.target, calibration=self._places[0].calibration),
        )
        build.executor.preparations.want(self._job)

    @property
    def folders(self) -> set[Path]:
        """The folders of its models and their inputs, which other jobs may use too."""
        return {folder for place in self._places for folder in place.folders}

    def run(self, step: RemoteTask) -> Compiled | Refused | ValidationRun:
        try:
            return self._run(step)
        except ArrivalError as error:
            message = f"a file did not arrive on {self._build.address}: {error}."
            raise BuildError(Problem(Kind.WORKER_LOST, step.job.location, message)) from None
        except BuildError as error:
            raise type(error)(*map(self._as_sent, error.problems)) from None

    def free(self) -> None:
        self._build.executor.finished(self._job)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, step: RemoteTask) -> Compiled | Refused | ValidationRun:
        for place in self._places:
            self._place(place.files)
        executor = replace(self._build.executor, installed=self._build.installed(step.job))
        if (found := executor.versions(self._job)) != step.versions:
            message = (
                f"the worker {self._build.address} has {pairs(found)}, and the build began with "
                f"{pairs(step.versions)}."
            )
            raise BuildError(Problem(Kind.VERSION_MISMATCH, step.job.location, message))
        if isinstance(step, ValidateTask):
            folder = self._folder / _digest(step.record.files)
            with self._lock:
                self._place(
                    (folder / PurePosixPath(name), record)
                    for name, record in step.record.files.items()
                )
            artifact = Artifact(folder, step.record)
            model = self._job.models[step.model]
            return executor.validate(self._job, model, artifact, step.context)
        assert isinstance(step, CompileTask), "there are two"
        folder = self._folder / f"{next(self._numbers)}"
        result = executor.compile(self._job, step.recipe, folder)
        if isinstance(result, Refused):
            shutil.rmtree(folder, ignore_errors=True)
            return replace(result, problems=tuple(map(self._as_sent, result.problems)))
        for name, file in result.files.items():
            self._build.store.adopt(folder / PurePosixPath(name), file)
        return Compiled(self._build.address, str(folder), result)

    def _place(self, files: Iterable[tuple[Path, FileRecord]]) -> None:
        for path, record in files:
            build = self._build
            build.store.place(record, path, build.ask, build.check_running)

    def _as_sent(self, problem: Problem) -> Problem:
        """``problem`` with the paths of the build's machine."""

        def text(value: str) -> str:
            for place in self._places:
                value = value.replace(str(place.folder), place.sent.folder)
            return value

        return replace(
            problem,
            location=problem.location or self._job.location,
            message=text(problem.message),
            hint=problem.hint and text(problem.hint),
            log=problem.log and text(problem.log),
        )


@dataclass(frozen=True)
class _Places:
    """Where the files of a model are on this machine: the same folder for equal files."""

    sent: ModelFiles
    folder: Path
    inputs: str
    calibration: str

    @staticmethod
    def of(root: Path, sent: ModelFiles) -> _Places:
        def place(name: str, files: Mapping[str, FileRecord]) -> str:
            return str(root / f"inputs-{_digest(files)}" / name) if files else name

        return _Places(
            sent,
            root / _digest(sent.files),
            place(sent.inputs, sent.input_files),
            place(sent.calibration, sent.calibration_files),
        )

    @property
    def folders(self) -> set[Path]:
        given = [self.inputs] if self.sent.input_files else []
        given += [self.calibration] if self.sent.calibration_files else []
        return {self.folder, *(Path(each).parent for each in given)}

    @property
    def files(self) -> Sequence[tuple[Path, FileRecord]]:
        own = [(self.folder / PurePosixPath(name), each) for name, each in self.sent.files.items()]
        return [
            *own,
            *_below(self.inputs, self.sent.input_files),
            *_below(self.calibration, self.sent.calibration_files),
        ]

    def moved(self, model: Model) -> Model:
        """``model`` with the paths on this machine."""
        return replace(
            model,
            path=self.folder / self.sent.name,
            validate=replace(model.validate, inputs=self.inputs),
        )


def _digest(files: Mapping[str, FileRecord]) -> str:
    return value_sha256({name: record.sha256 for name, record in files.items()})[:32]


def _below(folder: str, files: Mapping[str, FileRecord]) -> Sequence[tuple[Path, FileRecord]]:
    """The places of ``files`` in ``folder``, which is itself the file without a name."""
    return [(Path(folder) / PurePosixPath(name), each) for name, each in files.items()]
