"""Jobs in workers on this machine."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import (
    AccidentError,
    BuildError,
    CrashError,
    Kind,
    LimitError,
    Problem,
    RefusedError,
)
from hatch_epcontext.files import link_or_copy, record_files
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.artifact import Artifact, Recipe, Record, Refused, Times
from hatch_epcontext.jobs.plan import Job, with_options
from hatch_epcontext.jobs.preparation import Preparations, Prepared
from hatch_epcontext.jobs.processes.process import Worker, Workers
from hatch_epcontext.jobs.requirements import versions_of
from hatch_epcontext.jobs.validation import reason_not_to_run
from hatch_epcontext.system import writing
from hatch_epcontext.worker.results import Context, Validation

if TYPE_CHECKING:
    from hatch_epcontext.worker.requests import CompileReply


@dataclass(frozen=True)
class LocalExecutor:
    """Jobs in ``workers``, ``at_once`` of them at the same time, below ``staging``.

    ``installed``: the versions of all build requirements. ``jobs`` are all jobs of the build.
    """

    workers: Workers
    staging: Path
    at_once: int
    installed: Mapping[str, str]
    preparations: Preparations
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _versions: dict[object, Mapping[str, str]] = field(default_factory=dict)

    @staticmethod
    def make(
        workers: Workers,
        staging: Path,
        at_once: int,
        installed: Mapping[str, str],
        jobs: Iterable[Job],
        locks: dict[str, threading.Lock] | None = None,
    ) -> LocalExecutor:
        """An executor for ``jobs``, which prepares a model once for all jobs that need it prepared alike.

        Executors with the same ``locks`` wait for each other where a device is exclusive.
        """
        preparations = Preparations(workers, staging / "prepared", jobs)
        own = {} if locks is None else locks
        return LocalExecutor(workers, staging, at_once, installed, preparations, _locks=own)

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self.workers.stopped

    def versions(self, job: Job) -> Mapping[str, str]:
        """The versions of everything installed that can change what is compiled for ``job``."""
        # Once for all models of the target: looking them up is slow in a large environment.
        target = job.target
        key = (target.name, target.requirements, target.provider.plugin)
        if key not in self._versions:
            self._versions[key] = versions_of(target, self.installed)
        return self._versions[key]

    def reason_not_to_run(self, job: Job) -> str | None:
        """Why the job's result cannot be run on this machine, if that is known without the EP."""
        return reason_not_to_run(job)

    def compile(self, job: Job, recipe: Recipe, folder: Path) -> Record | Refused:
        """Prepare and compile ``job`` in one process into ``folder``, which it makes."""
        with self.workers.process() as worker:
            return self._compiled(job, recipe, folder, worker)

    def _compiled(self, job: Job, recipe: Recipe, folder: Path, worker: Worker) -> Record | Refused:
        start = time.monotonic()
        prepared = self._prepared(job, recipe, worker)
        if isinstance(prepared, Refused):
            return prepared
        dropped = tuple(f"{name} (not taken)" for each in prepared for name in each.dropped)
        is_other_form = not recipe.dequantize or any(p.preparation.precision for p in prepared)
        if not is_other_form or not any(each.changed for each in prepared):
            return Refused("change", _problems(dropped))
        prepare_seconds = time.monotonic() - start
        options = tuple(f"{name} = {value}" for name, value in recipe.options)
        preparations = tuple(
            replace(each.preparation, options=options, tried=dropped) for each in prepared
        )
        try:
            reply = self._compile(job, recipe, prepared, folder, worker)
        except BuildError as error:
            if not _may_be_avoided(error, recipe):
                raise
            rewrites = dict.fromkeys(n for e in preparations for n in (*e.options, *e.rewrites))
            return Refused("compile", error.problems, rewrites=tuple(rewrites))
        return Record(
            recipe,
            reply.product,
            preparations,
            reply.contexts,
            record_files(folder),
            self.versions(job),
            Times(prepare_seconds, reply.seconds),
        )

    def _prepared(self, job: Job, recipe: Recipe, worker: Worker) -> tuple[Prepared, ...] | Refused:
        """The models of ``job``, prepared and changed; or why they are not."""
        plain = replace(recipe, changes=(), fuse=True)
        try:
            prepared = self.preparations.get(job, plain, worker)
        except BuildError as error:
            if not _may_be_avoided(error, recipe):
                raise
            return Refused("prepare", error.problems)
        control_flow = dict.fromkeys(n for each in prepared for n in each.preparation.control_flow)
        if control_flow and not recipe.takes_control_flow:
            return Refused("prepare", control_flow=tuple(control_flow))
        try:
            return self.preparations.get(job, recipe, worker)
        except BuildError as error:
            if not _may_be_avoided(error, recipe):
                raise
            return Refused("change", error.problems)

    def _compile(
        self,
        job: Job,
        recipe: Recipe,
        prepared: Sequence[Prepared],
        folder: Path,
        worker: Worker,
    ) -> CompileReply:
        """Compile the ``prepared`` models of ``job`` into ``folder``, which it makes."""
        # Imported here: a build that finds everything in the cache makes no requests.
        from hatch_epcontext.worker.requests import CompileRequest

        with writing("an artifact", folder):
            folder.mkdir(parents=True)
        target = with_options(job.target, dict(recipe.options))
        if not recipe.fuse:
            # ONNX Runtime would fuse what preparation has deliberately not fused.
            target = replace(target, settings=replace(target.settings, optimization="none"))
        request = CompileRequest(
            models=tuple(model.on(job.target) for model in job.models),
            prepared=tuple(each.path for each in prepared),
            target=target,
            folder=str(folder),
        )
        # Hashed and validated when it is complete, and the device is free.
        with self._device(job.target), contextlib.closing(worker):
            return worker.call(request, self._scratch("compile"), location=job.location, step="")

    def validate(self, job: Job, model: Model, artifact: Artifact, context: Context) -> Validation:
        """Run a moved copy of the artifact in a process that has compiled nothing."""
        from hatch_epcontext.worker.requests import ValidateRequest

        scratch = self._scratch("validate")
        moved = scratch.with_name(f"{scratch.name}-moved")
        with writing("a copy to validate", moved):
            shutil.copytree(artifact.folder, moved, copy_function=link_or_copy)
        to_run = model.to_run_on(job.target)
        request = ValidateRequest(
            to_run,
            job.target,
            artifact.record.product,
            context,
            str(moved),
            model.tolerance_for(job.target),
            artifact.record.contexts if job.group else (),
            # Other inputs give other outputs.
            reference=self.preparations.reference(job, model)
            if to_run == model.on(job.target)
            else None,
            prepared=self._prepared_path(job, model, artifact),
            only_target=job.target.name if model.has_other_limits(job.target) else None,
        )
        with self._device(job.target):
            call = self.workers.call
            validation = call(request, scratch, location=job.location, step="validation")
        shutil.rmtree(moved)
        return validation

    def _prepared_path(self, job: Job, model: Model, artifact: Artifact) -> str | None:
        """The file that was compiled, for EPs whose number format is known.

        It is prepared again if an earlier build compiled it; None if the result differs.
        """
        settings, provider = job.target.settings, job.target.provider
        if provider.number_format(settings.device, settings.provider_options) is None:
            return None
        index = job.models.index(model)
        found = self.preparations.get(job, artifact.record.recipe, self.workers)[index]
        # With other samples, other rewrites are worthwhile.
        same = found.preparation.rewrites == artifact.record.preparations[index].rewrites
        return found.path if same else None

    def finished(self, job: Job) -> None:
        """Remove prepared models that no other job needs: they are copies of whole models."""
        self.preparations.release(job)

    def stop(self) -> None:
        """Kill all workers, and start no more."""
        self.workers.stop()

    def close(self) -> None:
        """Do nothing: the workers belong to the caller."""

    def _scratch(self, step: str) -> Path:
        return self.staging / "steps" / f"{next(self._numbers)}-{step}"

    def _device(self, target: Target) -> AbstractContextManager[object]:
        """The lock of a step that uses the target's EP: other steps wait if its device is exclusive."""
        if not target.provider.exclusive_device:
            return contextlib.nullcontext()
        return self._locks.setdefault(f"{target.provider.ep}: device", threading.Lock())


def _problems(messages: Iterable[str]) -> tuple[Problem, ...]:
    return tuple(Problem(Kind.COMPILE_FAILED, "", message) for message in messages)


def _may_be_avoided(error: BuildError, recipe: Recipe) -> bool:
    """Whether another recipe may avoid ``error``, which ended an attempt with ``recipe``."""
    if isinstance(error, RefusedError | CrashError):
        return True
    # The plain recipe has succeeded before: the cause is what this one adds. But after an accident that does
    # not depend on it, a weaker result would stay in the cache.
    is_of_recipe = isinstance(error, LimitError) or not isinstance(error, AccidentError)
    return is_of_recipe and not recipe.is_plain
