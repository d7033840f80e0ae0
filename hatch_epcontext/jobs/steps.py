"""The steps of a job: its models are prepared, changed, compiled and validated in workers on this machine."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from hatch_epcontext.cache.build import Cache
from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import AccidentError, BuildError, CrashError, LimitError, RefusedError
from hatch_epcontext.files import patiently, record_files
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.artifact import Source
from hatch_epcontext.jobs.plan import Job, with_options
from hatch_epcontext.jobs.processes.process import Worker, Workers
from hatch_epcontext.jobs.recipe import Change, Recipe, Record, Stop, Times
from hatch_epcontext.jobs.search import Attempt
from hatch_epcontext.system import writing
from hatch_epcontext.worker.results import Nearness, Validated, ValidationStatus

if TYPE_CHECKING:
    from hatch_epcontext.worker.requests import CompileReply, Prepared, ValidateRequest

_UNFUSED = "nothing folded into convolutions"
"""What a recipe without `Recipe.fuse` changes, as a rewrite."""

_SMALL = 10 * 10**6
"""The most bytes of a model with which starting a process takes a good part of the time."""

T = TypeVar("T")

_LONG = 3.0
"""Seconds of a run from which a build says how long it takes."""

_SHARED = 8.0
"""Seconds of a run on a simulator up to which it has one core while other jobs need the others."""

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

    def scratch(self, name: str) -> Path:
        """A new path for a folder of temporary files, which ends with ``name``."""
        return self.staging / "scratch" / f"{next(self._numbers)}-{name}"

    def device_lock(self, target: Target) -> AbstractContextManager[object]:
        """The lock of a step that uses the target's EP: other steps wait if its device is exclusive."""
        if not target.provider.exclusive_device:
            return contextlib.nullcontext()
        return _DEVICES.setdefault(target.provider.ep, threading.Lock())


@dataclass(frozen=True)
class Steps:
    """The steps of one job of ``build`` in workers, and of those whose results are run instead.

    They keep what they prepare in ``folder``, by source and the parts of a recipe; and by source only what
    has its inputs and outputs on the CPU.
    """

    build: Build
    folder: Path
    _prepared: dict[Hashable, Prepared] = field(default_factory=dict)
    _references: dict[Hashable, Prepared] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def attempt(self, job: Job, recipe: Recipe, folder: Path) -> Attempt:
        """Prepare, change and compile ``job`` with ``recipe`` into ``folder``, which is made.

        One process prepares the models, and compiles them too, or a fresh one if it serves several jobs.
        Raises BuildError for problems that no other recipe can avoid.
        """
        start = time.monotonic()
        optimizes = job.target.provider.product == "optimized"
        # What a rewrite makes wrong is an error, which would be repeated in another process.
        task = "optimize" if optimizes else "run"
        purpose = self._purpose(job, task) if recipe.is_plain else None
        with self.build.workers.process(purpose) as worker:
            prepared = self._prepare_and_change_all(job, recipe, worker)
            if isinstance(prepared, Attempt):
                return prepared
            seconds = time.monotonic() - start
            compiler = self._compiler(worker, purpose, optimizes=optimizes)
            attempt = _unfinished(recipe, prepared)
            options = tuple(f"{name} = {value}" for name, value in recipe.options)
            try:
                with self.build.device_lock(job.target), compiler as process:
                    reply = self._compile(job, recipe, prepared, folder, process)
            except BuildError as error:
                return replace(attempt, stop=_stop_of_compile(error, recipe, prepared, options))
        preparations = tuple(replace(model.preparation, options=options) for model in prepared)
        versions = self.build.versions[job.target.name]
        record = Record(recipe, preparations, reply.contexts, record_files(folder), versions)
        return replace(attempt, record=record, times=Times(seconds, reply.seconds))

    def _compiler(
        self, worker: Worker, purpose: Hashable, *, optimizes: bool
    ) -> AbstractContextManager[Worker]:
        """The process that compiles what ``worker`` has prepared, which serves this ``purpose``."""
        if purpose is None:
            # It ends before its device is free, and before what it wrote is hashed.
            return contextlib.closing(worker)
        # Compilers number what a process compiles, and blobs of QNN contain the numbers.
        return contextlib.nullcontext(worker) if optimizes else self.build.workers.process()

    def _compile(
        self, job: Job, recipe: Recipe, prepared: Sequence[Prepared], folder: Path, worker: Worker
    ) -> CompileReply:
        """Compile the ``prepared`` models into ``folder``."""
        # Imported here: a build that finds everything in the cache makes no requests.
        from hatch_epcontext.worker.requests import CompileRequest

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
        log = self.build.scratch("compile")
        return worker.call(request, log, location=job.location, step="compile")

    def validate(
        self,
        job: Job,
        index: int,
        folder: Path,
        record: Record,
        to_beat: Nearness | None = None,
    ) -> Validated:
        """Run the job's model with this ``index``, which was compiled into ``folder``, from another folder,
        in a process that has compiled nothing.

        ``record``: that of the whole artifact. It ends early if it is worth no more than ``to_beat``.
        """
        from hatch_epcontext.worker.requests import ValidateRequest

        target, model = job.target, job.models[index]
        prepared = None
        # Its number format is emulated on the file that was compiled, which an earlier build may have done.
        if _is_emulated(target):
            again = self.prepare_and_change(job, index, record.recipe)
            # With other samples, other rewrites are worthwhile.
            is_same = again.preparation.rewrites == record.preparations[index].rewrites
            prepared = again.path if is_same else None
        moved = self.build.scratch("moved")
        with writing("what is validated", moved):
            moved.parent.mkdir(parents=True, exist_ok=True)
            patiently(lambda: folder.rename(moved))
        to_run = model.to_run_on(target)
        request = ValidateRequest(
            to_run,
            target,
            record.contexts[index],
            str(moved),
            model.tolerance_for(target),
            record.contexts if job.group else (),
            prepared=prepared,
            to_beat=to_beat,
            # It was compared before without these, which may make it slower.
            is_brief=bool(record.recipe.last_corrections or record.recipe.left),
        )
        run = target.provider.seconds_of_run(record.preparations[index].cost)
        purpose = self._purpose(job, "run")

        def call(request: ValidateRequest) -> Validated:
            workers = self.build.workers
            with self.build.device_lock(target), workers.process(purpose) as worker:
                log = self.build.scratch("validate")
                # What lasts longer may be the last of the build, and gets all cores then.
                is_short = 0 < run < _SHARED and workers.is_busy
                with workers.one_core() if is_short else contextlib.nullcontext() as core:
                    request = replace(request, core=core)
                    return worker.call(request, log, location=job.location, step="validate")

        prepare = partial(self._prepare, job, to_run, Recipe("none"), self.build.workers)
        source = self._references.get(_source_key(job, to_run))
        try:
            return _call_again(lambda: validate_moved(request, call, prepare, source))
        finally:
            with writing("an artifact", folder):
                patiently(lambda: moved.rename(folder))

    def prepare_and_change(
        self, job: Job, index: int, recipe: Recipe, worker: Worker | Workers | None = None
    ) -> Prepared:
        """The job's model with this ``index`` as ``recipe`` prepares and changes it, made by ``worker``.

        What shorter recipes have in common with it is made once. Raises BuildError when that fails.
        """
        worker = worker or self.build.workers
        source = _source_key(job, job.models[index])
        key: tuple[Hashable, ...] = (source, recipe.simplifier, recipe.fuse)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = _call_again(partial(self._prepare, job, job.models[index], recipe, worker))
            if not recipe.fuse:
                preparation = replace(prepared.preparation, rewrites=(_UNFUSED,))
                prepared = replace(prepared, preparation=preparation)
            self._prepared[key] = prepared
        for change in recipe.all_changes:
            key = (*key, change)
            before, prepared = prepared, self._prepared.get(key)
            if prepared is None:
                prepared = self._change(job, index, before, change, recipe, worker)
                self._prepared[key] = prepared
        return prepared

    def _prepare_and_change_all(
        self, job: Job, recipe: Recipe, worker: Worker
    ) -> tuple[Prepared, ...] | Attempt:
        """The models of ``job``, prepared and changed; or the attempt that stops there."""
        numbers = range(len(job.models))

        def after(recipe: Recipe) -> tuple[Prepared, ...]:
            return tuple(self.prepare_and_change(job, number, recipe, worker) for number in numbers)

        try:
            plain = after(recipe.before_changes)
        except BuildError as error:
            return Attempt(recipe, stop=_stop("prepare", error, recipe))
        control_flow = dict.fromkeys(n for model in plain for n in model.preparation.control_flow)
        if control_flow and not recipe.takes_control_flow:
            return Attempt(recipe, stop=Stop("prepare", control_flow=tuple(control_flow)))
        try:
            changed = after(recipe.to_last_change)
            if _is_changed(recipe, plain, changed):
                return after(recipe)
        except BuildError as error:
            return Attempt(recipe, stop=_stop("change", error, recipe))
        return replace(_unfinished(recipe, changed), stop=Stop("change"))

    def _prepare(
        self, job: Job, model: Model, recipe: Recipe, worker: Worker | Workers
    ) -> Prepared:
        """Fix and simplify the model."""
        from hatch_epcontext.worker.requests import PrepareRequest

        folder, settings = self.folder / str(next(self._numbers)), job.target.settings
        source = self._references.get(_source_key(job, model))
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
        # The call makes both folders.
        call = folder / "call"
        start = time.monotonic()
        prepared = worker.call(request, call, location=job.location, step="prepare")
        if source is None:
            self._announce(job, prepared, time.monotonic() - start)
        self._references.setdefault(_source_key(job, model), prepared)
        return prepared

    def _announce(self, job: Job, prepared: Prepared, seconds: float) -> None:
        """Say how long a recipe takes if that is long; ``seconds``: the model took to prepare."""
        workers, provider = self.build.workers, job.target.provider
        run = provider.seconds_of_run(prepared.preparation.cost)
        if run >= _LONG:
            # To compile and to emulate take about as long as to prepare.
            total = 3 * seconds + run
            workers.report(
                f"{job.location}: about {total:.0f} s for the first recipe, {run:.0f} s of it for a run on "
                f"the simulator of {provider.ep}"
            )

    def _change(
        self,
        job: Job,
        index: int,
        before: Prepared,
        change: Change,
        recipe: Recipe,
        worker: Worker | Workers,
    ) -> Prepared:
        """The model ``before`` after one ``change`` of ``recipe``."""
        from hatch_epcontext.worker.requests import RewriteRequest

        nodes = None if change.nodes is None else change.nodes[index]
        unrolls, corrects = change.kind == "unroll", change.kind == "correct"
        is_idle = (unrolls and not before.unrolls) or (
            corrects and frozenset(change.names).isdisjoint(before.applicable)
        )
        if nodes == () or is_idle:
            return replace(before, changed=False, dropped=before.dropped if corrects else ())
        model, folder = job.models[index], self.folder / str(next(self._numbers))
        settings = job.target.settings
        is_other = settings.changes_precision and before.preparation.precision
        request = RewriteRequest(
            model,
            before,
            nodes,
            str(folder),
            simplify=recipe.simplifier != "none",
            tolerance=model.tolerance_for(job.target) if is_other else None,
            unroll_limit=settings.unroll_limit if unrolls else None,
            corrections=change.names,
            faults=job.target.provider.rewrites,
            leaves=change.kind == "leave",
        )
        log = folder / "call"
        after = worker.call(request, log, location=job.location, step="change")
        if corrects:
            after = replace(after, dropped=(*before.dropped, *after.dropped))
        return after

    def _purpose(self, job: Job, task: str) -> Hashable:
        """What small jobs of one target use the same processes for; None if this one has its own."""
        is_small = all(self.build.sources[model.name].size <= _SMALL for model in job.models)
        is_apart = job.target.provider.exclusive_device or job.group is not None
        return (task, job.target.name) if is_small and not is_apart else None


def validate_moved(
    request: ValidateRequest,
    call: Callable[[ValidateRequest], Validated],
    prepare: Callable[[], Prepared],
    source: Prepared | None = None,
) -> Validated:
    """Run an artifact by ``call``, and compare it with ``source``, or else with what ``prepare`` makes."""
    if source is None and request.target.provider.by_library:
        # Without its device nothing is run, and the source may be large.
        validated = call(replace(request, tolerance=None))
        if validated.validation.status is ValidationStatus.STRUCTURE:
            return validated
    source = source or prepare()
    return call(replace(request, reference=source.reference, ranges=source.ranges))


def _unfinished(recipe: Recipe, models: Sequence[Prepared]) -> Attempt:
    """The attempt to compile ``models``, with what rewriting says of them, and without an end."""
    dropped = tuple(text for model in models for text in model.dropped)
    declined = tuple(reason for model in models for reason in model.declined)
    return Attempt(recipe, dropped=dropped, declined=declined)


def _is_changed(recipe: Recipe, plain: Sequence[Prepared], changed: Sequence[Prepared]) -> bool:
    """Whether the last change of ``recipe`` has changed any of the models, which were ``plain`` before."""
    last = recipe.last_corrections
    # The float form of a model that has no quantization to undo is the model as it is.
    if recipe.dequantize and not any(model.preparation.precision for model in changed):
        return False
    # Corrections come after all changes. Those for all models are applied with them, and do not count.
    if last and not recipe.left:
        return any(not last.isdisjoint(model.preparation.rewrites) for model in changed)
    # `Prepared.changed` is that of the last change, which may be to leave nodes to the CPU.
    if recipe.changes or recipe.left:
        return any(model.changed for model in changed)
    # Where nothing is to be folded, a graph has as many nodes without fusing.
    if not recipe.fuse:
        pairs = zip(plain, changed, strict=True)
        return any(fused.preparation.nodes != model.preparation.nodes for fused, model in pairs)
    # A plain recipe has nothing to change, or only options.
    return True


def _is_emulated(target: Target) -> bool:
    """Whether a validation emulates a number format on the model that is compiled for ``target``."""
    settings = target.settings
    return target.provider.number_format(settings.device, settings.provider_options) is not None


def _source_key(job: Job, model: Model) -> Hashable:
    """Identifies what ``model`` is to ``job`` before any recipe: other inputs give other outputs."""
    return model.name, tuple(model.shapes.items()), job.target.settings.dequantize


def may_avoid(error: BuildError, recipe: Recipe) -> bool:
    """Whether another recipe may avoid the ``error`` of this one."""
    if isinstance(error, RefusedError | CrashError):
        return True
    # The plain recipe has succeeded before: the cause is what this one adds. But after an accident that does
    # not depend on it, a weaker result would stay in the cache.
    is_of_recipe = isinstance(error, LimitError) or not isinstance(error, AccidentError)
    return is_of_recipe and not recipe.is_plain


def _call_again(call: Callable[[], T]) -> T:
    """What ``call`` returns; it is called again if a worker crashes, which may be transient."""
    try:
        return call()
    except CrashError:
        return call()


def _stop(step: Literal["prepare", "change", "compile"], error: BuildError, recipe: Recipe) -> Stop:
    """Why ``recipe`` stopped, which ended with ``error``; raises that if no other recipe may avoid it."""
    if not may_avoid(error, recipe):
        raise error
    # Or too little memory may be the cause.
    is_accident = isinstance(error, AccidentError) or any(p.causes for p in error.problems)
    return Stop(step, error.problems, is_accident=is_accident)


def _stop_of_compile(
    error: BuildError, recipe: Recipe, prepared: Sequence[Prepared], options: Sequence[str]
) -> Stop:
    """Why ``recipe`` stopped when the ``prepared`` models were compiled, with additional ``options``.

    It has the nodes that the EP names if there is one model. Raises ``error`` as `_stop` does.
    """
    changes = (name for model in prepared for name in (*options, *model.preparation.rewrites))
    named = tuple(problem.nodes for problem in error.problems if problem.nodes)
    return replace(
        _stop("compile", error, recipe),
        rewrites=tuple(dict.fromkeys(changes)),
        quantized=next((model.quantized for model in prepared if model.quantized), None),
        nodes=named if len(prepared) == len(named) == 1 else None,
    )
