"""What runs on the workers of a dask cluster: the tasks of jobs, each by the worker machine's own executor.

A dask worker only starts the processes in which vendors' compilers run, as a build on one machine does. Files
come from the shared cache, and artifacts go there; only the build decides what it signs. What a worker keeps
for a build can be made again at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_epcontext.errors import BuildError, EpcontextError, Kind, Problem, UnavailableError
from hatch_epcontext.files import FileRecord, file_sha256, temp_dir
from hatch_epcontext.jobs.artifact import Artifact, Recipe, Record, Refused
from hatch_epcontext.jobs.cache.archive import pack, unpack
from hatch_epcontext.jobs.cache.fingerprint import value_sha256
from hatch_epcontext.jobs.cache.shared import Transport, TransportError
from hatch_epcontext.jobs.cache.store import DamagedError
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import check_environment, requirements, versions_of
from hatch_epcontext.jobs.steps import Steps
from hatch_epcontext.jobs.validation import reason_not_to_run
from hatch_epcontext.system import writing
from hatch_epcontext.text import pairs
from hatch_epcontext.worker.results import Context, Validation

TOPIC = "hatch-epcontext"
"""The topic of the events that workers log, one for all builds: the scheduler keeps the last events of each
topic as long as it runs."""

_IDLE_SECONDS = 300.0
"""Seconds that a worker keeps the files and the processes of a build after its last task."""

_WATCH_SECONDS = 1.0
"""Seconds between checks whether dask has cancelled running tasks."""


@dataclass(frozen=True)
class BuildInfo:
    """A build as its workers see it: its unique name, the URL of the shared cache and the seconds to wait for
    it, and how worker processes run.

    ``log`` and ``progress``: whether the workers send these lines to the build.
    """

    id: str
    cache: str
    timeout: float
    memory_limit: int | None
    verbose: bool
    log: bool
    progress: bool


@dataclass(frozen=True)
class SharedFiles:
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
    """``context``, in the artifact of ``record``, which is in the shared cache as ``archive``."""

    record: Record
    archive: FileRecord
    context: Context


@dataclass(frozen=True)
class RemoteTask:
    """Compile ``job`` with the recipe ``work``, or validate what ``work`` names.

    ``files``: by the paths that the job names. ``versions``: those in the job's fingerprint. ``number`` is
    the job's in its build, and all jobs with numbers below ``oldest`` have ended.
    """

    build: BuildInfo
    number: int
    oldest: int
    job: Job
    files: Mapping[str, SharedFiles]
    versions: Mapping[str, str]
    work: Recipe | ToValidate


@dataclass(frozen=True)
class Description:
    """A worker's report on a target: its versions, and why it cannot run artifacts."""

    versions: Mapping[str, str]
    reason_not_to_run: str | None


async def describe(data: bytes) -> Description | EpcontextError:
    """The `Description` for a pickled job, or the error that names what the worker lacks."""
    return await asyncio.to_thread(_describe, pickle.loads(data))


def _describe(job: Job) -> Description | EpcontextError:
    try:
        _check_library(job)
        return Description(versions_of(job.target, _installed(job)), reason_not_to_run(job))
    except EpcontextError as error:
        return error


def _installed(job: Job) -> Mapping[str, str]:
    return check_environment((job.target,), requirements((job.target,)))


def _check_library(job: Job) -> None:
    plugin = job.target.provider.plugin
    if plugin is None or not plugin.path:
        return
    path = Path(plugin.path)
    if not path.is_file() or file_sha256(path) != job.target.settings.library_sha256:
        message = f"the library {path} is missing, or differs from the build's."
        hint = "Install it at the same path, or use a package with get_library_path()."
        raise UnavailableError(Problem(Kind.UNLOADABLE_LIBRARY, "", message, hint))


Outcome = FileRecord | Refused | Validation
"""The outcome of a task: the archive of the artifact, which is in the shared cache, or why there is none; or
a validation."""


def run_task(data: bytes) -> Outcome | DamagedError | BuildError:
    """Run a pickled `RemoteTask`; returns expected errors, because dask logs those that are raised."""
    from distributed import get_worker

    worker = get_worker()
    task: RemoteTask = pickle.loads(data)
    try:
        with _entered(task.build, worker) as build:
            return build.run(task)
    except (DamagedError, BuildError) as error:
        return error


async def end(build: str) -> None:
    """Stop everything that runs for a build, and free what is kept for it."""
    with _lock:
        ended = [_builds.pop(key) for key in list(_builds) if key[1] == build]
    for each in ended:
        await asyncio.to_thread(each.end)


_lock = threading.Lock()

_builds: dict[tuple[str, str], _Build] = {}
"""The builds that this process works for, by the id of a dask worker (a process can have several), and by
their own id."""

_device_locks: dict[str, threading.Lock] = {}


@contextlib.contextmanager
def _entered(info: BuildInfo, worker: Any) -> Iterator[_Build]:
    """The build that ``info`` describes, for which this thread runs a task."""
    key, task = (worker.id, info.id), worker.get_current_task()
    with _lock:
        if key not in _builds:
            _builds[key] = _Build(info, worker)
        build = _builds[key]
        build.tasks.add(task)
    try:
        yield build
    finally:
        with _lock:
            build.tasks.discard(task)
            build.used = time.monotonic()


class _Build:
    """A worker's state for one build: an executor, the files of models, and jobs with their artifacts."""

    def __init__(self, info: BuildInfo, worker: Any) -> None:
        # The running tasks by their dask keys, and when the last one ended.
        self.tasks: set[str] = set()
        self.used = time.monotonic()
        self._info = info
        self._worker = worker
        # Dask removes its folder when the worker ends, or when the next one starts.
        place = Path(worker.local_directory).resolve() / TOPIC
        with writing("the files of a build", place):
            place.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(dir=place))
        self._transport = Transport(info.cache)
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
        self._executor = Steps(self._workers, self._folder, 1, {}, _device_locks)
        self._lock = threading.Lock()
        self._making: dict[Path, threading.Lock] = {}
        # The jobs with their paths here, by their numbers.
        self._jobs: dict[int, Job] = {}
        threading.Thread(target=self._watch, name=TOPIC, daemon=True).start()

    def run(self, task: RemoteTask) -> Outcome:
        """Run ``task``; raises DamagedError, and BuildError with paths of the machine of the build."""
        self._send("started", task.job.folder)
        try:
            with writing("the files of a job", self._folder):
                outcome = self._run(task)
        except TransportError as error:
            message = f"the worker {self._worker.address} cannot use the shared cache: {error}."
            hint = f"Let it read and write {self._info.cache}."
            problem = Problem(Kind.UNUSABLE_CACHE, "", message, hint)
            raise BuildError(problem) from None
        except EpcontextError as error:
            kind = type(error) if isinstance(error, BuildError) else BuildError
            raise kind(*self._with_paths(error.problems, task)) from None
        finally:
            if self._executor.stopped:
                # The task may have written after the end of the build.
                shutil.rmtree(self._folder, ignore_errors=True)
        if isinstance(outcome, Refused):
            return replace(outcome, problems=self._with_paths(outcome.problems, task))
        return outcome

    def end(self) -> None:
        """Stop everything that runs, and free everything that is kept."""
        self._transport.stop()
        self._workers.stop()
        self._stack.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        """Stop what runs here when dask has cancelled a task: the build has ended, or needs no result.

        The client never cancels a single task of a build that goes on.
        """
        states = self._worker.state.tasks
        over = False
        while not over and not self._executor.stopped:
            time.sleep(_WATCH_SECONDS)
            with _lock:
                over = not self.tasks and time.monotonic() > self.used + _IDLE_SECONDS
                # A copy, because another thread changes them.
                found = map(states.get, self.tasks)
                over |= any(each is None or each.state == "cancelled" for each in found)
                if over:
                    _builds.pop((self._worker.id, self._info.id), None)
        self.end()

    def _run(self, task: RemoteTask) -> Outcome:
        self._free(task.oldest)
        job = self._placed(task)
        # The worker keeps the first versions of a target: those that its processes have imported.
        executor = replace(self._executor, installed=_installed(job))
        if (found := executor.versions(job)) != task.versions:
            message = (
                f"the worker {self._worker.address} has {pairs(found)}, and the build began with "
                f"{pairs(task.versions)}."
            )
            raise BuildError(Problem(Kind.VERSION_MISMATCH, "", message))
        artifacts = self._artifacts(task.number)
        artifacts.mkdir(parents=True, exist_ok=True)
        work = task.work
        if isinstance(work, ToValidate):
            folder = self._made(artifacts / work.archive.sha256, partial(self._fetch, work.archive))
            model = next(each for each in job.models if each.name == work.context.model)
            return executor.validate(job, model, Artifact(folder, work.record), work.context)
        with temp_dir(artifacts) as made:
            record = executor.compile(job, work, made / "artifact")
            if isinstance(record, Refused):
                return record
            archive = pack(made / "artifact", record, made / "archive")
            self._transport.send_file(made / "archive")
            self._made(artifacts / archive.sha256, (made / "artifact").rename)
            return archive

    def _placed(self, task: RemoteTask) -> Job:
        """The task's job with the paths that its files have here."""
        for each in task.files.values():
            self._made(self._place(each), partial(self._download, each.records))

        def path(given: str) -> str:
            files = task.files.get(given)
            return given if files is None else str(self._place(files) / files.name)

        models = (
            replace(
                model,
                path=Path(path(str(model.path))),
                validate=replace(model.validate, inputs=path(model.validate.inputs)),
            )
            for model in task.job.models
        )
        target = replace(task.job.target, calibration=path(task.job.target.calibration))
        job = replace(task.job, models=tuple(models), target=target)
        with self._lock:
            if task.number not in self._jobs:
                self._jobs[task.number] = job
                self._executor.expect([job])
        return job

    def _free(self, oldest: int) -> None:
        """Free what is kept for the jobs with numbers below ``oldest``."""
        with self._lock:
            ended = {
                number: self._jobs.pop(number) for number in list(self._jobs) if number < oldest
            }
        for number, job in ended.items():
            self._executor.finished(job)
            shutil.rmtree(self._artifacts(number), ignore_errors=True)

    def _download(self, records: Mapping[str, FileRecord], folder: Path) -> None:
        for name, record in records.items():
            target = folder / PurePosixPath(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            self._fetch_file(record, target)

    def _fetch(self, archive: FileRecord, folder: Path) -> None:
        file = folder.with_name("archive")
        self._fetch_file(archive, file)
        unpack(file, folder)

    def _fetch_file(self, file: FileRecord, target: Path) -> None:
        try:
            self._transport.fetch_file(file.sha256, file.size, target)
        except DamagedError as error:
            error.blob = file
            raise

    def _made(self, folder: Path, make: Callable[[Path], object]) -> Path:
        """``folder``, which ``make`` fills at another place; it appears when it is complete."""
        with self._lock:
            busy = self._making.setdefault(folder, threading.Lock())
        with busy:
            if not folder.exists():
                with temp_dir(self._folder) as made:
                    make(made / "made")
                    folder.parent.mkdir(parents=True, exist_ok=True)
                    (made / "made").rename(folder)
        return folder

    def _place(self, files: SharedFiles) -> Path:
        return self._folder / "files" / files.digest

    def _artifacts(self, number: int) -> Path:
        return self._folder / "jobs" / str(number)

    def _sender(self, what: str) -> Callable[[str], None]:
        return lambda line: self._send(what, line)

    def _send(self, what: str, value: str) -> None:
        event = {"build": self._info.id, what: value, "worker": self._worker.address}
        self._worker.log_event(TOPIC, event)

    def _with_paths(self, problems: Iterable[Problem], task: RemoteTask) -> tuple[Problem, ...]:
        """``problems`` with the paths of the machine of the build."""

        def text(value: str) -> str:
            for each in task.files.values():
                value = value.replace(str(self._place(each)), each.folder)
            return value

        return tuple(
            replace(
                each,
                message=text(each.message),
                hint=each.hint and text(each.hint),
                log=each.log and text(each.log),
            )
            for each in problems
        )
