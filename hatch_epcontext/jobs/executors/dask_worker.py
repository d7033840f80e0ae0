"""What runs on the workers of a dask cluster: the tasks of jobs, each by the worker machine's own executor.

A dask worker only starts the processes in which vendors' compilers run, as a build on one machine does. Files
come from the shared cache, and artifacts go there; what a build signs is decided by the build.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, EpcontextError, Kind, Problem
from hatch_epcontext.files import FileRecord, file_sha256, temp_dir
from hatch_epcontext.jobs.artifact import Artifact, Recipe, Record, Refused, ValidationRun
from hatch_epcontext.jobs.cache.archive import DamagedError, pack, unpack
from hatch_epcontext.jobs.cache.fingerprint import value_sha256
from hatch_epcontext.jobs.cache.transport import Transport, TransportError
from hatch_epcontext.jobs.executors.local import LocalExecutor
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import check_environment, requirements, versions_of
from hatch_epcontext.jobs.validation import reason_not_to_run
from hatch_epcontext.system import writing
from hatch_epcontext.text import pairs
from hatch_epcontext.worker.facts import Context

TOPIC = "hatch-epcontext"
"""The topic of the events that workers log for the builds. One for all builds: the scheduler keeps the
last events of each topic for as long as it runs."""

ABANDONED_SECONDS = 300.0
"""Seconds after which a worker ends the tasks of a build that it did not hear of."""

_WATCH_SECONDS = 5.0


@dataclass(frozen=True)
class BuildInfo:
    """A build as its workers see it: a name of its own, the URL of the shared cache and the seconds to wait
    for it, and how worker processes run.

    ``log`` and ``progress``: whether the build wants the lines of both.
    """

    id: str
    cache: str
    cache_timeout: float
    timeout: float
    memory_limit: int | None
    verbose: bool
    log: bool
    progress: bool


@dataclass(frozen=True)
class Files:
    """Files in the shared cache, by their paths below ``folder`` on the machine of the build.

    ``name``: the file or folder there that a job names.
    """

    folder: str
    name: str
    records: Mapping[str, FileRecord]

    @property
    def digest(self) -> str:
        """What identifies them on any machine."""
        return value_sha256({name: record.sha256 for name, record in self.records.items()})[:32]


@dataclass(frozen=True)
class ToValidate:
    """``context``, of the job's model with the index ``model``, in the artifact of ``record``, which is in
    the shared cache as ``archive``.
    """

    model: int
    record: Record
    archive: FileRecord
    context: Context


@dataclass(frozen=True)
class RemoteTask:
    """Compile ``job`` with the recipe ``work``, or validate what ``work`` says.

    ``token`` names the job in this build; ``models`` and ``inputs`` are the files of its models, and
    ``calibration`` those of its target, where it names some. ``versions``: those that the job's fingerprint
    has.
    """

    build: BuildInfo
    token: str
    job: Job
    models: tuple[Files, ...]
    inputs: tuple[Files | None, ...]
    calibration: Files | None
    versions: Mapping[str, str]
    work: Recipe | ToValidate


@dataclass(frozen=True)
class Description:
    """What a worker says of a target: its versions and why it cannot run artifacts, or its problems."""

    versions: Mapping[str, str] = field(default_factory=dict)
    reason_not_to_run: str | None = None
    problems: tuple[Problem, ...] = ()


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


class DamagedFileError(Exception):
    """A worker cannot use the file ``blob`` of the shared cache, for ``reason``."""

    def __init__(self, blob: FileRecord, reason: str) -> None:
        super().__init__(blob, reason)
        self.blob, self.reason = blob, reason


Outcome = FileRecord | Refused | ValidationRun
"""What comes out of a task: the archive of what was compiled, which is in the shared cache, or why there is
none; or a validation."""


def run_task(data: bytes) -> Outcome | DamagedFileError | EpcontextError:
    """Run a pickled `RemoteTask`; foreseen errors are returned, because dask logs those that are raised."""
    from distributed import get_worker

    worker = get_worker()
    task: RemoteTask = pickle.loads(data)
    try:
        return _Machine.of(worker).enter(task.build, worker).run(task)
    except (DamagedFileError, EpcontextError) as error:
        return error


async def forget(build: str, token: str) -> None:
    """Free what is kept for a job."""
    if found := _Machine.find(build):
        await asyncio.to_thread(found.forget, token)


def keep_alive(build: str) -> None:
    """Note that the build still runs."""
    if found := _Machine.find(build):
        found.seen = time.monotonic()


async def end(build: str) -> None:
    """End all tasks of a build, and free what is kept for it."""
    await asyncio.to_thread(_Machine.end, build)


class _Machine:
    """A dask worker process, and its builds."""

    _all: dict[str, _Machine] = {}  # noqa: RUF012
    _ended: set[str] = set()  # noqa: RUF012
    _lock = threading.Lock()

    def __init__(self, folder: Path) -> None:
        self._folder = folder
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
                with writing("the files of a build", folder):
                    folder.mkdir(parents=True, exist_ok=True)
                self.builds[info.id] = _Build(info, worker, folder, self._device_locks)
            return self.builds[info.id]

    def _watch(self) -> None:
        while True:
            time.sleep(_WATCH_SECONDS)
            for name, build in list(self.builds.items()):
                if time.monotonic() > build.seen + ABANDONED_SECONDS:
                    self.end(name)


class _Build:
    """What a worker has for one build: an executor, the files of models, and jobs with their artifacts."""

    def __init__(
        self, info: BuildInfo, worker: Any, folder: Path, locks: dict[str, threading.Lock]
    ) -> None:
        self.seen = time.monotonic()
        self._info = info
        self._address: str = worker.address
        self._folder = folder
        self._log_event = worker.log_event
        self._transport = Transport(info.cache, info.cache_timeout, in_all=False)
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
        self._executor = LocalExecutor.make(self._workers, folder, 1, {}, (), locks)
        self._lock = threading.Lock()
        self._making: dict[Path, threading.Lock] = {}
        self._installed: dict[tuple[str, bool], Mapping[str, str]] = {}
        # By the tokens of the jobs: as they are here, and how many tasks of them run.
        self._jobs: dict[str, Job] = {}
        self._running: Counter[str] = Counter()
        self._forgotten: set[str] = set()

    def run(self, task: RemoteTask) -> Outcome:
        """Run ``task``; raises DamagedFileError, and BuildError with paths of the machine of the build."""
        self._send("started", task.token)
        with self._lock:
            self._running[task.token] += 1
            self._forgotten.discard(task.token)
        try:
            with writing("the files of a job", self._folder, task.job.location):
                return self._run(task)
        except TransportError as error:
            self._check_running()
            message = f"the worker {self._address} cannot use the shared cache: {error}."
            hint = f"Let it read and write {self._info.cache}."
            problem = Problem(Kind.UNUSABLE_CACHE, task.job.location, message, hint)
            raise BuildError(problem) from None
        except BuildError as error:
            raise type(error)(*(self._as_sent(each, task) for each in error.problems)) from None
        finally:
            with self._lock:
                self._running[task.token] -= 1
            self._free(task.token)
            if self._executor.stopped:
                # The task may have written after the end of the build.
                shutil.rmtree(self._folder, ignore_errors=True)

    def forget(self, token: str) -> None:
        """Free what is kept for a job, when none of its tasks runs any more."""
        with self._lock:
            self._forgotten.add(token)
        self._free(token)

    def end(self) -> None:
        """End all that runs, and free all that is kept."""
        self._transport.stop()
        self._workers.stop()
        self._stack.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, task: RemoteTask) -> Outcome:
        job = self._placed(task)
        executor = replace(self._executor, installed=self._installed_for(task.job))
        if (found := executor.versions(job)) != task.versions:
            message = (
                f"the worker {self._address} has {pairs(found)}, and the build began with "
                f"{pairs(task.versions)}."
            )
            raise BuildError(Problem(Kind.VERSION_MISMATCH, task.job.location, message))
        artifacts = self._artifacts(task.token)
        artifacts.mkdir(parents=True, exist_ok=True)
        work = task.work
        if isinstance(work, ToValidate):
            artifact = Artifact(artifacts / work.archive.sha256, work.record)
            self._fetch(work.archive, artifact.folder)
            return executor.validate(job, job.models[work.model], artifact, work.context)
        with temp_dir(artifacts) as made:
            result = executor.compile(job, work, made / "artifact")
            if isinstance(result, Refused):
                problems = tuple(self._as_sent(each, task) for each in result.problems)
                return replace(result, problems=problems)
            archive = pack(made / "artifact", result, made / "archive")
            self._transport.send_blob(made / "archive", archive)
            with self._once(artifacts / archive.sha256) as staged:
                if staged:
                    (made / "artifact").rename(staged)
            return archive

    def _placed(self, task: RemoteTask) -> Job:
        """The task's job with the paths that its files have here."""
        for each in filter(None, (*task.models, *task.inputs, task.calibration)):
            with self._once(self._place(each)) as staged:
                if staged:
                    for name, record in each.records.items():
                        target = staged / PurePosixPath(name)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        self._download(record, target)
        with self._lock:
            if task.token not in self._jobs:
                self._jobs[task.token] = self._moved(task)
                self._executor.preparations.want(self._jobs[task.token])
            return self._jobs[task.token]

    def _moved(self, task: RemoteTask) -> Job:
        def path(files: Files | None) -> str:
            return "" if files is None else str(self._place(files) / files.name)

        def moved(model: Model, its: Files, inputs: Files | None) -> Model:
            given = model.validate.inputs if inputs is None else path(inputs)
            validate = replace(model.validate, inputs=given)
            return replace(model, path=Path(path(its)), validate=validate)

        models = map(moved, task.job.models, task.models, task.inputs)
        target = replace(task.job.target, calibration=path(task.calibration))
        return replace(task.job, models=tuple(models), target=target)

    def _fetch(self, archive: FileRecord, folder: Path) -> None:
        """Unpack an archive into ``folder``, unless it is there."""
        with self._once(folder) as staged:
            if staged:
                file = staged.with_name("archive")
                self._download(archive, file)
                try:
                    unpack(file, staged)
                except DamagedError as error:
                    raise DamagedFileError(archive, str(error)) from None

    def _download(self, blob: FileRecord, target: Path) -> None:
        try:
            self._transport.fetch_blob(blob, target)
        except DamagedError as error:
            raise DamagedFileError(blob, str(error)) from None

    @contextlib.contextmanager
    def _once(self, folder: Path) -> Iterator[Path | None]:
        """What to make in place of ``folder``, which others see when it is finished; None if it is there."""
        with self._lock:
            busy = self._making.setdefault(folder, threading.Lock())
        with busy:
            if folder.exists():
                yield None
                return
            with temp_dir(self._folder) as made:
                yield made / "made"
                folder.parent.mkdir(parents=True, exist_ok=True)
                (made / "made").rename(folder)

    def _place(self, files: Files) -> Path:
        return self._folder / "files" / files.digest

    def _artifacts(self, token: str) -> Path:
        return self._folder / "jobs" / token

    def _free(self, token: str) -> None:
        with self._lock:
            if self._running[token] or token not in self._forgotten:
                return
            job = self._jobs.pop(token, None)
        if job is not None:
            self._executor.finished(job)
        shutil.rmtree(self._artifacts(token), ignore_errors=True)

    def _installed_for(self, job: Job) -> Mapping[str, str]:
        """What was installed for the job's target when the build began here, and imported."""
        target = (job.target.name, job.target.needs_ep)
        if target not in self._installed:
            self._installed[target] = _installed(job)
        return self._installed[target]

    def _check_running(self) -> None:
        if self._executor.stopped:
            raise BuildError(Problem(Kind.INTERRUPTED, "", "the build was interrupted.")) from None

    def _sender(self, what: str) -> Callable[[str], None]:
        return lambda line: self._send(what, line)

    def _send(self, what: str, value: object) -> None:
        self._log_event(TOPIC, {"build": self._info.id, what: value, "worker": self._address})

    def _as_sent(self, problem: Problem, task: RemoteTask) -> Problem:
        """``problem`` with the paths of the machine of the build."""

        def text(value: str) -> str:
            for each in filter(None, (*task.models, *task.inputs, task.calibration)):
                value = value.replace(str(self._place(each)), each.folder)
            return value

        return replace(
            problem,
            location=problem.location or task.job.location,
            message=text(problem.message),
            hint=problem.hint and text(problem.hint),
            log=problem.log and text(problem.log),
        )
