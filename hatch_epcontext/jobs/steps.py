"""The steps of a job: its models are prepared, compiled and validated in workers on this machine."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
from hatch_epcontext.graph.number_format import ALWAYS
from hatch_epcontext.jobs.artifact import (
    Artifact,
    Preparation,
    Recipe,
    Record,
    Refused,
    Source,
    Times,
)
from hatch_epcontext.jobs.plan import Job, with_options
from hatch_epcontext.jobs.processes.process import Worker, Workers
from hatch_epcontext.jobs.requirements import versions_of
from hatch_epcontext.serialize import value_sha256
from hatch_epcontext.system import writing
from hatch_epcontext.worker.results import Context, Precision, Validation

if TYPE_CHECKING:
    from hatch_epcontext.worker.requests import Prepared, PrepareRequest, RewriteRequest

_SMALL = 10 * 10**6
"""The most bytes of a model with which starting a process takes a good part of the time."""


@dataclass(frozen=True)
class Steps:
    """The steps of jobs in ``workers``, with files below ``staging``; several threads take them.

    ``installed``: the versions of all build requirements. ``sources``: of all models, by name.
    ``devices``: the locks of exclusive devices, by the names of their EPs.

    What is prepared of a model is made by the first job that needs it, and the others wait: ``_prepared``, by
    what identifies it and the steps of a recipe; ``_references``: the outputs of its source. ``_users``: how
    many jobs have not ended that need it.
    """

    workers: Workers
    staging: Path
    installed: Mapping[str, str]
    sources: Mapping[str, Source]
    devices: dict[str, threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _prepared: dict[str, dict[Hashable, Future[Prepared]]] = field(default_factory=dict)
    _references: dict[str, str] = field(default_factory=dict)
    _users: Counter[str] = field(default_factory=Counter)
    _keys: dict[Hashable, str] = field(default_factory=dict)
    _versions: dict[Hashable, Mapping[str, str]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def expect(self, jobs: Iterable[Job]) -> None:
        """Keep what is prepared until all ``jobs`` that need it have ended."""
        for job in jobs:
            self._users.update(self._needs(job))

    def finished(self, job: Job) -> None:
        """Remove the models that were prepared for ``job``, which has ended, and that no other job needs."""
        for key in self._needs(job):
            with self._lock:
                self._users[key] -= 1
                if self._users[key] > 0 or not self._prepared.pop(key, None):
                    continue
                self._references.pop(key, None)
            shutil.rmtree(self._folder(key), ignore_errors=True)

    def versions(self, job: Job) -> Mapping[str, str]:
        """The versions of everything installed that can change what is compiled for ``job``."""
        # Once for all models of the target: looking them up is slow in a large environment.
        target = job.target
        key = (target.name, target.requirements, target.provider.plugin)
        if key not in self._versions:
            self._versions[key] = versions_of(target, self.installed)
        return self._versions[key]

    def scratch(self, step: str) -> Path:
        """A new path for files of a ``step``."""
        return self.staging / "steps" / f"{next(self._numbers)}-{step}"

    def compile(self, job: Job, recipe: Recipe, folder: Path) -> Record | Refused:
        """Prepare and compile ``job`` with ``recipe`` in one process into ``folder``, which is made.

        Raises BuildError for problems that no other recipe can avoid.
        """
        # Imported here: a build that finds everything in the cache makes no requests.
        from hatch_epcontext.worker.requests import CompileRequest

        start = time.monotonic()
        optimizes = job.target.provider.product == "optimized"
        purpose = self._purpose(job, recipe, "optimize" if optimizes else "run")
        with self.workers.process(purpose) as worker:
            prepared = self._prepare_all(job, recipe, worker)
            if isinstance(prepared, Refused):
                return prepared
            prepare_seconds = time.monotonic() - start
            preparations = _preparations(recipe, prepared)
            with writing("an artifact", folder):
                folder.mkdir(parents=True)
            target = with_options(job.target, dict(recipe.options))
            if not recipe.fuse:
                # ONNX Runtime would fuse what preparation has deliberately not fused.
                settings = replace(target.settings, optimization="none")
                target = replace(target, settings=settings)
            models = tuple(model.on(job.target) for model in job.models)
            paths = tuple(model.path for model in prepared)
            request = CompileRequest(models, paths, target, str(folder))
            call = self.scratch("compile")
            # Hashed and validated when it is complete, and the device is free.
            compiler: AbstractContextManager[Worker] = contextlib.closing(worker)
            if purpose is not None:
                # Compilers number what a process compiles, and blobs of QNN contain the numbers.
                compiler = contextlib.nullcontext(worker) if optimizes else self.workers.process()
            try:
                with self._device(job.target), compiler as compiling:
                    reply = compiling.call(request, call, location=job.location, step="")
            except BuildError as error:
                changes = (
                    name for done in preparations for name in (*done.options, *done.rewrites)
                )
                names = tuple(dict.fromkeys(changes))
                return replace(_refused("compile", error, recipe), rewrites=names)
        files, times = record_files(folder), Times(prepare_seconds, reply.seconds)
        versions = self.versions(job)
        return Record(recipe, reply.product, preparations, reply.contexts, files, versions, times)

    def validate(self, job: Job, model: Model, artifact: Artifact, context: Context) -> Validation:
        """Run a moved copy of the artifact in a process that has compiled nothing."""
        from hatch_epcontext.worker.requests import ValidateRequest

        target, record = job.target, artifact.record
        settings, prepared = target.settings, None
        # Its number format is emulated on the file that was compiled, which an earlier build may have done.
        if target.provider.number_format(settings.device, settings.provider_options) is not None:
            index = job.models.index(model)
            again = self.prepare(job, index, record.recipe)
            # With other samples, other rewrites are worthwhile.
            is_same = again.rewrites == record.preparations[index].rewrites
            prepared = again.path if is_same else None
        scratch = self.scratch("validate")
        moved = scratch.with_name(f"{scratch.name}-moved")
        with writing("a copy to validate", moved):
            shutil.copytree(artifact.folder, moved, copy_function=link_or_copy)
        to_run = model.to_run_on(target)
        # Other inputs give other outputs.
        has_reference = to_run == model.on(target)
        request = ValidateRequest(
            to_run,
            target,
            record.product,
            context,
            str(moved),
            model.tolerance_for(target),
            record.contexts if job.group else (),
            reference=self._references.get(self._key(job, model)) if has_reference else None,
            prepared=prepared,
        )
        purpose = self._purpose(job, record.recipe, "run")
        with self._device(target), self.workers.process(purpose) as worker:
            validation = worker.call(request, scratch, location=job.location, step="validation")
        shutil.rmtree(moved)
        return validation

    def prepare(
        self, job: Job, index: int, recipe: Recipe, worker: Worker | Workers | None = None
    ) -> Prepared:
        """The job's model with this ``index`` as ``recipe`` prepares and changes it, made by ``worker`` if no
        other job has made it, or makes it now.

        Raises BuildError when that fails.
        """
        changes = ((c.kind, c.refused and c.refused[index]) for c in recipe.changes)
        limit = job.target.settings.unroll_limit
        steps = (recipe.simplifier, recipe.fuse, *changes, limit, recipe.remedies)
        with self._lock:
            prepared = self._prepared.setdefault(self._key(job, job.models[index]), {})
            is_first = steps not in prepared
            future = prepared.setdefault(steps, Future())
        if is_first:
            try:
                future.set_result(self._make(job, index, recipe, worker or self.workers))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _prepare_all(
        self, job: Job, recipe: Recipe, worker: Worker
    ) -> tuple[Prepared, ...] | Refused:
        """The models of ``job``, prepared and changed; or why they are not."""
        remedies = tuple(name for name in recipe.remedies if name in ALWAYS)
        plain = replace(recipe, changes=(), fuse=True, remedies=remedies)
        numbers = range(len(job.models))
        try:
            prepared = [self.prepare(job, number, plain, worker) for number in numbers]
        except BuildError as error:
            return _refused("prepare", error, recipe)
        control_flow = dict.fromkeys(name for model in prepared for name in model.control_flow)
        if control_flow and not recipe.takes_control_flow:
            return Refused("prepare", control_flow=tuple(control_flow))
        try:
            changed = tuple(self.prepare(job, number, recipe, worker) for number in numbers)
        except BuildError as error:
            return _refused("change", error, recipe)
        is_other_form = not recipe.dequantize or any(model.precision for model in changed)
        if is_other_form and any(model.changed for model in changed):
            return changed
        problems = (Problem(Kind.COMPILE_FAILED, "", text) for text in _not_taken(changed))
        declined = (reason for model in changed for reason in model.declined)
        return Refused("change", tuple(problems), declined=tuple(declined))

    def _make(self, job: Job, index: int, recipe: Recipe, worker: Worker | Workers) -> Prepared:
        """Make the model, from that of a recipe without the last step of ``recipe``."""
        if recipe.remedies:
            before = self.prepare(job, index, replace(recipe, remedies=()), worker)
            last = recipe.last_remedies
            if frozenset(recipe.remedies).isdisjoint(before.applicable):
                return replace(before, changed=before.changed and not last)
            after = self._change(job, index, before, recipe, worker)
            is_new = after.changed and not last.isdisjoint(after.rewrites)
            # The rewrites for all models may change nothing in this one.
            changed = is_new if last else before.changed
            return replace(after, changed=changed, dropped=(*before.dropped, *after.dropped))
        if recipe.changes:
            shorter = replace(recipe, changes=recipe.changes[:-1])
            before = self.prepare(job, index, shorter, worker)
            return self._change(job, index, before, recipe, worker)
        try:
            prepared = self._simplify(job, index, recipe, worker)
        except CrashError:
            # It may be transient; a second one is the simplifier's own fault.
            prepared = self._simplify(job, index, recipe, worker)
        if recipe.fuse:
            return prepared
        fused = self.prepare(job, index, replace(recipe, fuse=True), worker)
        changed = prepared.nodes != fused.nodes
        return replace(prepared, rewrites=("nothing folded into convolutions",), changed=changed)

    def _simplify(self, job: Job, index: int, recipe: Recipe, worker: Worker | Workers) -> Prepared:
        """Fix and simplify the model."""
        from hatch_epcontext.worker.requests import PrepareRequest

        model = job.models[index]
        key = self._key(job, model)
        request = PrepareRequest(
            model.on(job.target),
            recipe.simplifier,
            str(self._folder(key) / str(next(self._numbers))),
            model.is_compared,
            self._references.get(key),
            precision=_precision(job, model),
            fuse=recipe.fuse,
        )
        prepared = self._call(job, request, worker)
        if prepared.reference is not None:
            self._references[key] = prepared.reference
        return prepared

    def _change(
        self, job: Job, index: int, before: Prepared, recipe: Recipe, worker: Worker | Workers
    ) -> Prepared:
        """Apply the remedies or the last change of ``recipe`` to ``before``."""
        from hatch_epcontext.worker.requests import RewriteRequest

        last = None if recipe.remedies else recipe.changes[-1]
        refused = None if last is None or last.refused is None else last.refused[index]
        if refused == ():
            return replace(before, changed=False, dropped=())
        model, limit = job.models[index], job.target.settings.unroll_limit
        request = RewriteRequest(
            model.on(job.target),
            before,
            refused,
            str(self._folder(self._key(job, model)) / str(next(self._numbers))),
            simplify=recipe.simplifier != "none",
            compare=model.is_compared,
            precision=_precision(job, model) if before.precision else None,
            unroll_limit=limit if last and last.kind == "unroll" else None,
            remedies=recipe.remedies,
            target=job.target if recipe.remedies else None,
        )
        return self._call(job, request, worker)

    def _call(
        self, job: Job, request: PrepareRequest | RewriteRequest, worker: Worker | Workers
    ) -> Prepared:
        # Which makes both folders.
        call = Path(request.folder) / "call"
        return worker.call(request, call, location=job.location, step="preparation")

    def _folder(self, key: str) -> Path:
        """The folder of everything that is prepared of a model; Windows has a limit for paths."""
        return self.staging / "prepared" / key[:16]

    def _key(self, job: Job, model: Model) -> str:
        """What identifies how ``job`` needs ``model`` prepared; others may need it alike."""
        name = (job.folder, model.name, job.target.settings.dequantize)
        if name not in self._keys:
            needed = [model.on(job.target), model.is_compared, _precision(job, model)]
            self._keys[name] = value_sha256(needed)
        return self._keys[name]

    def _needs(self, job: Job) -> set[str]:
        """The keys of the models that ``job``, or a job whose result is run instead, may need prepared."""
        forms = (form for needed in (job, *job.alone) for form in needed.forms)
        return {self._key(form, model) for form in forms for model in form.models}

    def _purpose(self, job: Job, recipe: Recipe, task: str) -> Hashable:
        """What small jobs of one target use the same processes for; None if this one has its own."""
        is_small = all(self.sources[model.name].size <= _SMALL for model in job.models)
        is_alone = job.target.provider.exclusive_device or job.group is not None
        return (task, job.target.name) if is_small and recipe.is_plain and not is_alone else None

    def _device(self, target: Target) -> AbstractContextManager[object]:
        """The lock of a step that uses the target's EP: other steps wait if its device is exclusive."""
        if not target.provider.exclusive_device:
            return contextlib.nullcontext()
        return self.devices.setdefault(target.provider.ep, threading.Lock())


def _not_taken(prepared: Iterable[Prepared]) -> tuple[str, ...]:
    return tuple(f"{name} (not taken)" for model in prepared for name in model.dropped)


def _preparations(recipe: Recipe, prepared: Sequence[Prepared]) -> tuple[Preparation, ...]:
    """How ``prepared`` models were prepared, for the record of their artifact."""
    return tuple(
        Preparation(
            recipe.simplifier,
            model.nodes_before,
            model.nodes,
            model.control_flow,
            precision=model.precision,
            rewrites=model.rewrites,
            options=tuple(f"{name} = {value}" for name, value in recipe.options),
            tried=_not_taken(prepared),
            declined=model.declined,
        )
        for model in prepared
    )


def _precision(job: Job, model: Model) -> Precision | None:
    """How ``job`` changes the numbers of ``model``."""
    settings = job.target.settings
    if not (settings.dequantize or settings.quantize):
        return None
    tolerance = model.tolerance_for(job.target) if settings.changes_precision else None
    return Precision(settings.dequantize, settings.quantize, job.target.calibration, tolerance)


def _refused(
    step: Literal["prepare", "change", "compile"], error: BuildError, recipe: Recipe
) -> Refused:
    """The refusal of ``recipe``, which ended with ``error``; raises that if no other recipe may avoid it."""
    if not isinstance(error, RefusedError | CrashError):
        # The plain recipe has succeeded before: the cause is what this one adds. But after an accident that
        # does not depend on it, a weaker result would stay in the cache.
        is_of_recipe = isinstance(error, LimitError) or not isinstance(error, AccidentError)
        if recipe.is_plain or not is_of_recipe:
            raise error
    # Or too little memory may be the cause.
    is_accident = isinstance(error, AccidentError) or any(p.causes for p in error.problems)
    return Refused(step, error.problems, is_accident=is_accident)
