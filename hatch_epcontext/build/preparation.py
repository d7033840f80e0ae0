"""Preparing a model with the strongest simplifier that works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hatch_epcontext.build.artifact import Preparation
from hatch_epcontext.build.plan import Job, model_spec_for
from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, ModelError
from hatch_epcontext.ipc.process import Workers
from hatch_epcontext.ipc.protocol import SIMPLIFIERS, PrepareReply, PrepareRequest, Simplifier


@dataclass(frozen=True)
class Prepared:
    """A prepared model: its absolute path, how it was prepared, and the bounds of inputs that are
    indices.
    """

    path: str
    preparation: Preparation
    bounds: Mapping[str, int]


def prepare(job: Job, model: Model, scratch: Path, workers: Workers) -> Prepared:
    """Prepare ``model`` below ``scratch``.

    EPs for fixed shapes compile no control flow: if a simplifier leaves some, the next one is tried,
    and the result with less of it is taken. Raises BuildError when no simplifier works.
    """
    best: tuple[Simplifier, PrepareReply] | None = None
    failures: list[tuple[Simplifier, BuildError]] = []
    simplifiers = SIMPLIFIERS if job.target.settings.optimization != "none" else SIMPLIFIERS[-1:]
    for simplifier in simplifiers:
        if best is not None and simplifier == "none":
            break
        try:
            reply = _simplify(job, model, simplifier, scratch, workers)
        except ModelError:
            raise
        except BuildError as error:
            failures.append((simplifier, error))
            continue
        if best is None or len(reply.control_flow) < len(best[1].control_flow):
            best = simplifier, reply
        if not (best[1].control_flow and job.target.provider.static_shapes):
            break
    if best is None:
        raise failures[-1][1]
    simplifier, reply = best
    failed = tuple(f"{name}: {p.message}" for name, error in failures for p in error.problems)
    preparation = Preparation(
        simplifier, reply.nodes_before, reply.nodes, reply.control_flow, failed
    )
    return Prepared(reply.path, preparation, reply.bounds)


def _simplify(
    job: Job, model: Model, simplifier: Simplifier, scratch: Path, workers: Workers
) -> PrepareReply:
    folder = scratch / f"prepared-{model.name}-{simplifier}"
    folder.mkdir()
    compare = model.validate.tolerance is not False
    return workers.call(
        PrepareRequest(model_spec_for(model, job.target), simplifier, str(folder), compare),
        scratch / f"prepare-{model.name}-{simplifier}",
        location=f"{job.location}: preparation",
    )
