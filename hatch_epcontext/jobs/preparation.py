"""Preparing models as recipes require, once for all jobs that need the same."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, CrashError
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import Range
from hatch_epcontext.jobs.artifact import Preparation, Recipe
from hatch_epcontext.jobs.cache.fingerprint import value_sha256
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.jobs.processes.process import Worker, Workers
from hatch_epcontext.serialize import to_plain
from hatch_epcontext.system import writing
from hatch_epcontext.worker.results import Precision

if TYPE_CHECKING:
    from hatch_epcontext.worker.requests import RewriteReply


@dataclass(frozen=True)
class Prepared:
    """A prepared model: its absolute path, how it was prepared, and the ranges of its dummy inputs.

    ``reference``: the absolute path of the file with the outputs of its source, if there is one. ``changed``:
    whether the last step of its recipe changed it; ``dropped``: changes that were wrong and left out.
    """

    path: str
    preparation: Preparation
    ranges: Mapping[str, Range]
    reference: str | None = None
    changed: bool = True
    dropped: tuple[str, ...] = ()


class Preparations:
    """The prepared models of a build, in a folder each below ``folder``; ``jobs`` are all its jobs."""

    def __init__(self, workers: Workers, folder: Path, jobs: Iterable[Job]) -> None:
        self._workers = workers
        self._folder = folder
        self._lock = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}
        self._prepared: dict[str, Prepared] = {}
        self._failed: dict[str, list[BuildError]] = {}
        self._numbers = itertools.count()
        self._wanted = Counter[tuple[str, str]]()
        self._keys: dict[tuple[object, ...], str] = {}
        for job in jobs:
            for each in (job, *job.alone):
                self.want(each)

    def want(self, job: Job) -> None:
        """Keep what is prepared for ``job``, which was not among the first ``jobs``."""
        with self._lock:
            self._wanted.update(
                (self._key(form, model), job.folder) for form in job.forms for model in job.models
            )

    def get(self, job: Job, recipe: Recipe, worker: Worker | Workers) -> tuple[Prepared, ...]:
        """The models of ``job`` as ``recipe`` prepares and changes them.

        ``worker`` makes them; or a process of its own, if other jobs need the same. Raises BuildError when
        that fails. After a crash the next call tries again.
        """
        return tuple(self._get(job, index, recipe, worker) for index in range(len(job.models)))

    def reference(self, job: Job, model: Model) -> str | None:
        """The file with the outputs of the source model, if ``model`` was prepared and it has one."""
        folder = self._folder_of(job, model)
        found = (each.reference for each in list(self._prepared.values()) if each.reference)
        return next((each for each in found if Path(each).is_relative_to(folder)), None)

    def release(self, job: Job) -> None:
        """Remove what was prepared for ``job`` and no other job needs."""
        for form, model in itertools.product(job.forms, job.models):
            key, folder = self._key(form, model), self._folder_of(form, model)
            with self._lock:
                self._wanted[key, job.folder] -= 1
                if any(number > 0 for (other, _), number in self._wanted.items() if other == key):
                    continue
                for name, each in list(self._prepared.items()):
                    if Path(each.path).is_relative_to(folder):
                        del self._prepared[name]
            shutil.rmtree(folder, ignore_errors=True)

    def _is_shared(self, job: Job, model: Model) -> bool:
        """Whether several jobs need ``model`` as ``job`` does."""
        key = self._key(job, model)
        with self._lock:
            return sum(n for (other, _), n in self._wanted.items() if other == key) > 1

    def _folder_of(self, job: Job, model: Model) -> Path:
        return self._folder / self._key(job, model)[:16]

    def _key(self, job: Job, model: Model) -> str:
        """What identifies how ``job`` needs ``model`` prepared, whatever the recipe."""
        name = (job.folder, model.name, job.target.settings.dequantize)
        if name not in self._keys:
            plain = to_plain(model.on(job.target))
            self._keys[name] = value_sha256(
                [plain, model.is_compared, to_plain(_precision(job, model))]
            )
        return self._keys[name]

    def _get(self, job: Job, index: int, recipe: Recipe, worker: Worker | Workers) -> Prepared:
        changes: list[Any] = [
            (each.kind, None if each.refused is None else each.refused[index])
            for each in recipe.changes
        ]
        how = [
            *(recipe.simplifier, recipe.fuse, changes, recipe.remedies),
            job.target.settings.unroll_limit,
        ]
        key = value_sha256([self._key(job, job.models[index]), how])
        with self._lock:
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:
            failed = self._failed.setdefault(key, [])
            if failed and (len(failed) > 1 or not isinstance(failed[0], CrashError)):
                raise failed[-1]
            if key not in self._prepared:
                scratch = self._folder_of(job, job.models[index]) / str(next(self._numbers))
                try:
                    self._prepared[key] = self._make(job, index, recipe, scratch, worker)
                except BuildError as error:
                    failed.append(error)
                    raise
            return self._prepared[key]

    def _make(
        self, job: Job, index: int, recipe: Recipe, scratch: Path, worker: Worker | Workers
    ) -> Prepared:
        model = job.models[index]
        caller = self._workers if self._is_shared(job, model) else worker
        if recipe.remedies:
            before = self._get(job, index, replace(recipe, remedies=()), worker)
            made = change(job, index, before, recipe, scratch, caller)
            # The rewrites for all models may change nothing in this one.
            wanted = recipe.last_remedies
            done = made.changed and not wanted.isdisjoint(made.preparation.remedies)
            changed = done if wanted else before.changed
            return replace(made, changed=changed, dropped=(*before.dropped, *made.dropped))
        if recipe.changes:
            before = self._get(job, index, replace(recipe, changes=recipe.changes[:-1]), worker)
            return change(job, index, before, recipe, scratch, caller)
        if recipe.fuse:
            reference = self.reference(job, model)
            return prepare(job, model, recipe, scratch, caller, reference)
        fused = self._get(job, index, replace(recipe, fuse=True), worker)
        prepared = prepare(job, model, recipe, scratch, caller, fused.reference)
        rewrites = ("nothing folded into convolutions",)
        return replace(
            prepared,
            preparation=replace(prepared.preparation, rewrites=rewrites),
            changed=prepared.preparation.nodes != fused.preparation.nodes,
        )


def _precision(job: Job, model: Model) -> Precision | None:
    """How ``job`` changes the numbers of ``model``."""
    settings = job.target.settings
    if not (settings.dequantize or settings.quantize):
        return None
    tolerance = model.tolerance_for(job.target) if settings.changes_precision else None
    return Precision(settings.dequantize, settings.quantize, job.target.calibration, tolerance)


def prepare(
    job: Job,
    model: Model,
    recipe: Recipe,
    scratch: Path,
    worker: Workers | Worker,
    reference: str | None = None,
) -> Prepared:
    """Prepare ``model`` for the first step of ``recipe``, below ``scratch``, which is made.

    ``reference`` is the file with the outputs of its source, if there is one. Raises BuildError when the
    simplifier fails.
    """
    from hatch_epcontext.worker.requests import PrepareRequest

    folder = scratch / "result"
    with writing("a prepared model", folder):
        folder.mkdir(parents=True)
    request = PrepareRequest(
        model.on(job.target),
        recipe.simplifier,
        str(folder),
        model.is_compared,
        reference,
        precision=_precision(job, model),
        fuse=recipe.fuse,
    )
    reply = worker.call(request, scratch / "call", location=job.location, step="preparation")
    preparation = Preparation(
        recipe.simplifier,
        reply.nodes_before,
        reply.nodes,
        reply.control_flow,
        precision=reply.precision,
    )
    return Prepared(reply.path, preparation, reply.ranges, reply.reference)


def change(
    job: Job, index: int, before: Prepared, recipe: Recipe, scratch: Path, worker: Workers | Worker
) -> Prepared:
    """Apply the remedies or the last change of ``recipe`` to ``before``, the job's model with that index.

    Raises BuildError when the source model fails.
    """
    from hatch_epcontext.worker.requests import RewriteRequest

    last = None if recipe.remedies else recipe.changes[-1]
    refused = None if last is None or last.refused is None else last.refused[index]
    if refused == ():
        return replace(before, changed=False, dropped=())
    model, folder = job.models[index], scratch / "result"
    with writing("a rewritten model", folder):
        folder.mkdir(parents=True)
    request = RewriteRequest(
        model.on(job.target),
        before.path,
        refused,
        str(folder),
        simplify=before.preparation.simplifier != "none",
        compare=model.is_compared,
        reference=before.reference,
        precision=_precision(job, model) if before.preparation.precision else None,
        unroll_limit=job.target.settings.unroll_limit if last and last.kind == "unroll" else None,
        remedies=recipe.remedies,
        target=job.target if recipe.remedies else None,
    )
    reply = worker.call(request, scratch / "call", location=job.location, step="preparation")
    return _changed(before, reply)


def _changed(before: Prepared, reply: RewriteReply) -> Prepared:
    if reply.path is None:
        preparation = replace(before.preparation, remedies=reply.remedies)
        return replace(before, preparation=preparation, changed=False, dropped=reply.dropped)
    preparation = replace(
        before.preparation,
        nodes=reply.nodes,
        control_flow=reply.control_flow,
        rewrites=(*before.preparation.rewrites, *reply.rewrites),
        remedies=reply.remedies,
    )
    return replace(
        before, path=reply.path, preparation=preparation, changed=True, dropped=reply.dropped
    )
