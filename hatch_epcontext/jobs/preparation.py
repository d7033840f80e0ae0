"""Preparing models with the strongest simplifier that works, once for all jobs that want the same."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, Kind, ModelError, Problem
from hatch_epcontext.graph.facts import Range
from hatch_epcontext.jobs.artifact import Preparation
from hatch_epcontext.jobs.cache.fingerprint import value_sha256
from hatch_epcontext.jobs.plan import Form, Job, model_spec_for
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.serialize import to_plain
from hatch_epcontext.system import writing
from hatch_epcontext.worker.facts import SIMPLIFIERS, Precision, Simplifier

if TYPE_CHECKING:
    from hatch_epcontext.worker.requests import PrepareReply, RewriteReply


_CRASHES = frozenset({Kind.WORKER_CRASHED, Kind.INVALID_REPLY})
"""What can happen by chance: it is the simplifier's fault when it happens again."""

_FAULTS_OF_SIMPLIFIERS = _CRASHES | {
    Kind.COMPILE_FAILED,
    Kind.OUTPUT_DIFFERS,
    Kind.NOT_FINITE,
    Kind.OUTPUT_SHAPE,
}
"""The faults of a simplifier itself. After any other one, such as a worker that was killed, the result of
the next simplifier would stay in the cache, although it is weaker, and although this one works."""


@dataclass(frozen=True)
class Prepared:
    """A prepared model: its absolute path, how it was prepared, and the ranges of its dummy inputs.
    ``reference``: the absolute path of the outputs of its source, if there is a file of them.
    """

    path: str
    preparation: Preparation
    ranges: Mapping[str, Range]
    reference: str | None = None


@dataclass(frozen=True)
class Rewritten:
    """A model in another form, None if there is none; ``notes``: the rewrites that changed its results."""

    prepared: Prepared | None
    notes: tuple[str, ...] = ()


class Preparations:
    """The prepared models of a build, in a folder each below ``folder``; ``jobs`` are all its jobs."""

    def __init__(self, workers: Workers, folder: Path, jobs: Iterable[Job]) -> None:
        self._workers = workers
        self._folder = folder
        self._lock = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}
        self._prepared: dict[str, Prepared] = {}
        self._failed: dict[str, tuple[Job, BuildError]] = {}
        self._wanted = Counter[tuple[str, str]]()
        for job in jobs:
            for each in (job, *job.alone):
                self.want(each)

    def want(self, job: Job) -> None:
        """Keep what is prepared for ``job``, which is not one of those known from the beginning."""
        with self._lock:
            self._wanted.update((_key(job, model), job.folder) for model in job.models)

    def get(self, job: Job, model: Model) -> Prepared:
        """``model`` as ``job`` wants it prepared; raises BuildError when no simplifier works."""
        key = _key(job, model)
        with self._lock:
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:
            if key in self._failed:
                raise _for_job(job, *self._failed[key])
            if key not in self._prepared:
                scratch = self._folder / key[:16]
                scratch.mkdir(parents=True)
                try:
                    self._prepared[key] = self._prepare(job, model, scratch)
                except BuildError as error:
                    self._failed[key] = job, error
                    raise
            return self._prepared[key]

    def _prepare(self, job: Job, model: Model, scratch: Path) -> Prepared:
        if job.form is not Form.UNFUSED:
            return prepare(job, model, scratch, self._workers)
        plain = self.get(replace(job, form=Form.PLAIN), model)
        prepared = prepare(job, model, scratch, self._workers, plain.reference)
        if prepared.preparation.nodes == plain.preparation.nodes:
            message = "there is nothing that was folded into convolutions."
            raise BuildError(Problem(Kind.COMPILE_FAILED, job.location, message))
        rewrites = ("nothing folded into convolutions",)
        return replace(prepared, preparation=replace(prepared.preparation, rewrites=rewrites))

    def reference(self, job: Job, model: Model) -> str | None:
        """The file with the outputs of the source model, if ``model`` was prepared and it has one."""
        prepared = self._prepared.get(_key(job, model))
        return prepared.reference if prepared else None

    def release(self, job: Job) -> None:
        """Remove what was prepared for ``job`` and no other job wants."""
        for model in job.models:
            key = _key(job, model)
            with self._lock:
                if not self._wanted[key, job.folder]:
                    # Nothing is kept for a job that was not known, such as one that is unrolled.
                    continue
                self._wanted[key, job.folder] -= 1
                unwanted = not any(
                    number for (other, _), number in self._wanted.items() if other == key
                )
            if unwanted:
                self._prepared.pop(key, None)
                shutil.rmtree(self._folder / key[:16], ignore_errors=True)


def _for_job(job: Job, first: Job, error: BuildError) -> BuildError:
    """The ``error`` that ``first`` got, with the location of ``job``."""
    return type(error)(
        *(
            replace(each, location=each.location.replace(first.location, job.location, 1))
            for each in error.problems
        )
    )


def _key(job: Job, model: Model) -> str:
    """What identifies how ``job`` wants ``model`` prepared."""
    spec = to_plain(model_spec_for(model, job.target))
    return value_sha256(
        [
            spec,
            _simplifiers(job),
            _compare(model),
            _avoids_control_flow(job),
            to_plain(_precision(job, model)),
            job.form is Form.UNFUSED,
        ]
    )


def _precision(job: Job, model: Model) -> Precision | None:
    """How ``job`` wants the numbers of ``model`` changed."""
    settings = job.target.settings
    if not settings.changes_precision:
        return None
    tolerance = model.tolerance_for(job.target)
    return Precision(settings.dequantize, settings.quantize, job.target.calibration, tolerance)


def _simplifiers(job: Job) -> tuple[Simplifier, ...]:
    return SIMPLIFIERS if job.target.settings.optimization != "none" else SIMPLIFIERS[-1:]


def _compare(model: Model) -> bool:
    return model.validate.tolerance is not None


def _avoids_control_flow(job: Job) -> bool:
    # EPs for fixed shapes compile none.
    return job.target.provider.static_shapes


def prepare(
    job: Job, model: Model, scratch: Path, workers: Workers, reference: str | None = None
) -> Prepared:
    """Prepare ``model`` below ``scratch``; ``reference`` is the file with the outputs of its source, if any.

    EPs for fixed shapes compile no control flow: if a simplifier leaves some, the next one is tried,
    and the result with less of it is taken. Raises BuildError when no simplifier works, or when one fails
    for a reason that is not its own.
    """
    best: tuple[Simplifier, PrepareReply] | None = None
    failures: list[tuple[Simplifier, BuildError]] = []
    for simplifier in _simplifiers(job):
        if best is not None and simplifier == "none":
            break
        try:
            reply = _simplify(job, model, simplifier, scratch, workers, reference)
            # Other simplifiers are compared with the same.
            reference = reply.reference
        except ModelError:
            raise
        except BuildError as error:
            if not _is_only(error, _FAULTS_OF_SIMPLIFIERS):
                raise
            failures.append((simplifier, error))
            continue
        if best is None or len(reply.control_flow) < len(best[1].control_flow):
            best = simplifier, reply
        if not (best[1].control_flow and _avoids_control_flow(job)):
            break
    if best is None:
        raise failures[-1][1]
    simplifier, reply = best
    failed = tuple(_describe(name, each) for name, error in failures for each in error.problems)
    preparation = Preparation(
        simplifier, reply.nodes_before, reply.nodes, reply.control_flow, failed, reply.precision
    )
    return Prepared(reply.path, preparation, reply.ranges, reply.reference)


def _describe(simplifier: Simplifier, problem: Problem) -> str:
    # The model is whole, and so is the build: no signal must alarm who reads this.
    if problem.kind is Kind.WORKER_CRASHED:
        return f"{simplifier} crashes on this model, in a process of its own"
    return f"{simplifier} failed: {problem.message}"


def _is_only(error: BuildError, kinds: Container[Kind]) -> bool:
    return all(problem.kind in kinds for problem in error.problems)


def _simplify(
    job: Job,
    model: Model,
    simplifier: Simplifier,
    scratch: Path,
    workers: Workers,
    reference: str | None,
) -> PrepareReply:
    """The reply of ``simplifier``; after a crash that of a second try."""
    try:
        return _try(job, model, simplifier, scratch / simplifier, workers, reference)
    except BuildError as error:
        if not _is_only(error, _CRASHES):
            raise
    return _try(job, model, simplifier, scratch / f"{simplifier}-again", workers, reference)


def _try(
    job: Job,
    model: Model,
    simplifier: Simplifier,
    scratch: Path,
    workers: Workers,
    reference: str | None,
) -> PrepareReply:
    from hatch_epcontext.worker.requests import PrepareRequest

    folder = scratch / "result"
    with writing("a prepared model", folder, job.location):
        folder.mkdir(parents=True)
    return workers.call(
        PrepareRequest(
            model_spec_for(model, job.target),
            simplifier,
            str(folder),
            _compare(model),
            reference,
            precision=_precision(job, model),
            fuse=job.form is not Form.UNFUSED,
        ),
        scratch / "call",
        location=f"{job.location}: preparation",
    )


def rewrite(
    job: Job,
    model: Model,
    prepared: Prepared,
    refused: frozenset[str] | None,
    scratch: Path,
    workers: Workers,
    *,
    unroll: bool = False,
) -> Rewritten:
    """``prepared``, which is ``model`` as ``job`` wants it, without the operators that its EP refuses.

    ``refused`` is None where that is not known. With ``unroll``, the refused loops and recurrent layers are
    unrolled. Raises BuildError when the source model fails.
    """
    from hatch_epcontext.worker.requests import RewriteRequest, UnrollRequest

    folder = scratch / "result"
    with writing("a rewritten model", folder, job.location):
        folder.mkdir(parents=True)
    request = RewriteRequest(
        model_spec_for(model, job.target),
        prepared.path,
        None if refused is None else tuple(sorted(refused)),
        str(folder),
        simplify=prepared.preparation.simplifier != "none",
        compare=_compare(model),
        reference=prepared.reference,
        tolerance=model.tolerance_for(job.target) if prepared.preparation.precision else None,
    )
    limit = job.target.settings.unroll_limit
    reply = workers.call(
        UnrollRequest(request, limit) if unroll else request,
        scratch / "call",
        location=f"{job.location}: preparation",
    )
    return _rewritten(prepared, reply)


def _rewritten(prepared: Prepared, reply: RewriteReply) -> Rewritten:
    notes = tuple(f"{each} (not taken)" for each in reply.dropped)
    if reply.path is None:
        return Rewritten(None, notes)
    before = prepared.preparation
    preparation = replace(
        before,
        nodes=reply.nodes,
        control_flow=reply.control_flow,
        rewrites=(*before.rewrites, *reply.rewrites),
    )
    return Rewritten(replace(prepared, path=reply.path, preparation=preparation), notes)
