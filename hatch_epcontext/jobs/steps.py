"""The steps of a job: its models are prepared, compiled and validated in workers on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import field, replace
from datetime import datetime, timezone
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
    Recipe,
    Record,
    Refused,
    Source,
    Times,
)
from hatch_epcontext.jobs.cache.build import Cache
from hatch_epcontext.jobs.plan import Job, with_options
from hatch_epcontext.jobs.processes.process import Worker, Workers
from hatch_epcontext.system import writing
from hatch_epcontext.worker.results import (
    Context,
    Preparation,
    Validation,
    ValidationStatus,
)

if TYPE_CHECKING:
    from hatch_epcontext.worker.requests import Prepared

_UNFUSED = "nothing folded into convolutions"
"""What a recipe without `Recipe.fuse` changes, as a rewrite."""

_SMALL = 10 * 10**6
"""The most bytes of a model with which starting a process takes a good part of the time."""

_DEVICES: dict[str, threading.Lock] = {}
"""The locks of exclusive devices, by the names of their EPs, for all builds of this process."""


@dataclass(frozen=True)
class Build:
    """What the ``jobs`` of one build share: the ``sources`` of models, by name, and files in ``staging``.

    ``versions``: of what can change what is compiled, by target. ``day``: the present one, as
    ``"2026-11-23"``.
    """

    workers: Workers
    cache: Cache
    staging: Path
    versions: Mapping[str, Mapping[str, str]]
    sources: Mapping[str, Source]
    jobs: tuple[Job, ...] = ()
    day: str = field(default_factory=lambda: datetime.now(timezone.utc).date().isoformat())
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def scratch(self, step: str) -> Path:
        """A new path for files of a ``step``."""
        return self.staging / "steps" / f"{next(self._numbers)}-{step}"

    def device(self, target: Target) -> AbstractContextManager[object]:
        """The lock of a step that uses the target's EP: other steps wait if its device is exclusive."""
        if not target.provider.exclusive_device:
            return contextlib.nullcontext()
        return _DEVICES.setdefault(target.provider.ep, threading.Lock())


@dataclass(frozen=True)
class Steps:
    """The steps of one job of ``build`` in workers, and of those whose results are run instead.

    They keep what they prepare in ``folder``, by source and the steps of a recipe; and by source alone what
    has its inputs and outputs on the CPU.
    """

    build: Build
    folder: Path
    _prepared: dict[Hashable, Prepared] = field(default_factory=dict)
    _sources: dict[Hashable, Prepared] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def compile(self, job: Job, recipe: Recipe, folder: Path) -> Record | Refused:
        """Prepare and compile ``job`` with ``recipe`` in one process into ``folder``, which is made.

        Raises BuildError for problems that no other recipe can avoid.
        """
        # Imported here: a build that finds everything in the cache makes no requests.
        from hatch_epcontext.worker.requests import CompileRequest

        start = time.monotonic()
        options = tuple(f"{name} = {value}" for name, value in recipe.options)
        optimizes = job.target.provider.product == "optimized"
        purpose = self._purpose(job, recipe, "optimize" if optimizes else "run")
        with self.build.workers.process(purpose) as worker:
            prepared = self._prepare_all(job, recipe, worker)
            if isinstance(prepared, Refused):
                return prepared
            prepare_seconds = time.monotonic() - start
            with writing("an artifact", folder):
                folder.mkdir(parents=True)
            target = job.target
            if recipe.options:
                target = with_options(target, dict(recipe.options))
            if not recipe.fuse:
                # ONNX Runtime would fuse what preparation has deliberately not fused.
                settings = replace(target.settings, optimization="none")
                target = replace(target, settings=settings)
            paths = tuple(model.path for model in prepared)
            request = CompileRequest(job.models, paths, target, str(folder))
            call = self.build.scratch("compile")
            # Hashed and validated when it is complete, and the device is free.
            compiler: AbstractContextManager[Worker] = contextlib.closing(worker)
            if purpose is not None:
                # Compilers number what a process compiles, and blobs of QNN contain the numbers.
                compiler = (
                    contextlib.nullcontext(worker) if optimizes else self.build.workers.process()
                )
            try:
                with self.build.device(job.target), compiler as compiling:
                    reply = compiling.call(request, call, location=job.location, step="")
            except BuildError as error:
                changes = (name for model in prepared for name in (*options, *model.rewrites))
                names = tuple(dict.fromkeys(changes))
                return replace(_refused("compile", error, recipe), rewrites=names)
        facts = [item.name for item in dataclasses.fields(Preparation)]
        preparations = tuple(
            Preparation(**{name: getattr(model, name) for name in facts} | {"options": options})
            for model in prepared
        )
        files, times = record_files(folder), Times(prepare_seconds, reply.seconds)
        versions = self.build.versions[job.target.name]
        return Record(recipe, preparations, reply.contexts, files, versions, times)

    def validate(self, job: Job, model: Model, artifact: Artifact, context: Context) -> Validation:
        """Run a moved copy of the artifact in a process that has compiled nothing."""
        from hatch_epcontext.worker.requests import ValidateRequest

        target, record = job.target, artifact.record
        prepared = None
        # Its number format is emulated on the file that was compiled, which an earlier build may have done.
        if _is_emulated(target):
            index = job.models.index(model)
            again = self.prepare(job, index, record.recipe)
            # With other samples, other rewrites are worthwhile.
            is_same = again.rewrites == record.preparations[index].rewrites
            prepared = again.path if is_same else None
        moved = self.build.scratch("moved")
        with writing("a copy to validate", moved):
            shutil.copytree(artifact.folder, moved, copy_function=link_or_copy)
        to_run = model.to_run_on(target)
        request = ValidateRequest(
            to_run,
            target,
            context,
            str(moved),
            model.tolerance_for(target),
            record.contexts if job.group else (),
            prepared=prepared,
        )
        purpose = self._purpose(job, record.recipe, "run")

        def call(request: ValidateRequest) -> Validation:
            with self.build.device(target), self.build.workers.process(purpose) as worker:
                folder = self.build.scratch("validate")
                return worker.call(request, folder, location=job.location, step="validation")

        source, validation = self._sources.get(_source_key(job, to_run)), None
        if source is None and target.provider.by_library:
            # Without its device nothing is run, and the source may be large.
            validation = call(replace(request, tolerance=None))
        if validation is None or validation.status is not ValidationStatus.STRUCTURE:
            source = source or self._simplify(job, to_run, Recipe("none"), self.build.workers)
            validation = call(replace(request, reference=source.reference, ranges=source.ranges))
        shutil.rmtree(moved)
        return validation

    def prepare(
        self, job: Job, index: int, recipe: Recipe, worker: Worker | Workers | None = None
    ) -> Prepared:
        """The job's model with this ``index`` as ``recipe`` prepares and changes it, made by ``worker``.

        It is made of what the recipe without its last step makes. Raises BuildError when that fails.
        """
        worker = worker or self.build.workers
        changes = ((c.kind, c.refused and c.refused[index]) for c in recipe.changes)
        source = _source_key(job, job.models[index])
        steps = (source, recipe.simplifier, recipe.fuse, *changes, recipe.corrections)
        if steps in self._prepared:
            return self._prepared[steps]
        if recipe.corrections:
            before = self.prepare(job, index, replace(recipe, corrections=()), worker)
            last = recipe.last_corrections
            if frozenset(recipe.corrections).isdisjoint(before.applicable):
                prepared = replace(before, changed=before.changed and not last)
            else:
                after = self._change(job, index, before, recipe, worker)
                is_new = after.changed and not last.isdisjoint(after.rewrites)
                # The rewrites for all models may change nothing in this one.
                changed, tried = is_new if last else before.changed, (*before.tried, *after.tried)
                prepared = replace(after, changed=changed, tried=tried)
        elif recipe.changes:
            shorter = replace(recipe, changes=recipe.changes[:-1])
            before = self.prepare(job, index, shorter, worker)
            prepared = self._change(job, index, before, recipe, worker)
        else:
            try:
                prepared = self._simplify(job, job.models[index], recipe, worker)
            except CrashError:
                # It may be transient; a second one is the simplifier's own fault.
                prepared = self._simplify(job, job.models[index], recipe, worker)
            if not recipe.fuse:
                fused = self.prepare(job, index, replace(recipe, fuse=True), worker)
                rewrites, changed = (_UNFUSED,), prepared.nodes != fused.nodes
                prepared = replace(prepared, rewrites=rewrites, changed=changed)
        return self._prepared.setdefault(steps, prepared)

    def _prepare_all(
        self, job: Job, recipe: Recipe, worker: Worker
    ) -> tuple[Prepared, ...] | Refused:
        """The models of ``job``, prepared and changed; or why they are not."""
        corrections = tuple(name for name in recipe.corrections if name in ALWAYS)
        plain = replace(recipe, changes=(), fuse=True, corrections=corrections)
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
        tried = (text for model in changed for text in model.tried)
        problems = (Problem(Kind.COMPILE_FAILED, "", text) for text in tried)
        declined = (reason for model in changed for reason in model.declined)
        return Refused("change", tuple(problems), declined=tuple(declined))

    def _simplify(
        self, job: Job, model: Model, recipe: Recipe, worker: Worker | Workers
    ) -> Prepared:
        """Fix and simplify the model."""
        from hatch_epcontext.worker.requests import PrepareRequest

        folder, settings = self.folder / str(next(self._numbers)), job.target.settings
        source = self._sources.get(_source_key(job, model))
        tolerance = model.tolerance_for(job.target) if settings.changes_precision else None
        request = PrepareRequest(
            model,
            recipe.simplifier,
            str(folder),
            model.is_compared,
            source.reference if source else None,
            dequantize=settings.dequantize,
            quantize=settings.quantize,
            calibration=job.target.calibration,
            tolerance=tolerance,
            fuse=recipe.fuse,
            emulated=_is_emulated(job.target),
        )
        # Which makes both folders.
        call = folder / "call"
        prepared = worker.call(request, call, location=job.location, step="preparation")
        self._sources.setdefault(_source_key(job, model), prepared)
        return prepared

    def _change(
        self, job: Job, index: int, before: Prepared, recipe: Recipe, worker: Worker | Workers
    ) -> Prepared:
        """Apply the corrections or the last change of ``recipe`` to ``before``."""
        from hatch_epcontext.worker.requests import RewriteRequest

        last = None if recipe.corrections else recipe.changes[-1]
        refused = None if last is None or last.refused is None else last.refused[index]
        if refused == ():
            return replace(before, changed=False, tried=())
        model, folder = job.models[index], self.folder / str(next(self._numbers))
        settings = job.target.settings
        is_other = settings.changes_precision and before.precision
        request = RewriteRequest(
            model,
            before,
            refused,
            str(folder),
            simplify=recipe.simplifier != "none",
            tolerance=model.tolerance_for(job.target) if is_other else None,
            unroll_limit=settings.unroll_limit if last and last.kind == "unroll" else None,
            corrections=recipe.corrections,
        )
        call = folder / "call"
        return worker.call(request, call, location=job.location, step="preparation")

    def _purpose(self, job: Job, recipe: Recipe, task: str) -> Hashable:
        """What small jobs of one target use the same processes for; None if this one has its own."""
        is_small = all(self.build.sources[model.name].size <= _SMALL for model in job.models)
        is_alone = job.target.provider.exclusive_device or job.group is not None
        return (task, job.target.name) if is_small and recipe.is_plain and not is_alone else None


def _is_emulated(target: Target) -> bool:
    """Whether a validation emulates a number format on the model that is compiled for ``target``."""
    settings = target.settings
    return target.provider.number_format(settings.device, settings.provider_options) is not None


def _source_key(job: Job, model: Model) -> Hashable:
    """Identifies what ``model`` is to ``job`` before any recipe: other inputs give other outputs."""
    return model.name, tuple(model.shapes.items()), job.target.settings.dequantize


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
