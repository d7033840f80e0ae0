"""How a model is prepared: by the strongest way that works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hatch_epcontext.artifact import Preparation
from hatch_epcontext.config import Model
from hatch_epcontext.errors import BuildError, ModelError
from hatch_epcontext.plan import Job, model_spec
from hatch_epcontext.process import Workers
from hatch_epcontext.protocol import FOLDINGS, Folding, PrepareReply, PrepareRequest


@dataclass(frozen=True)
class Prepared:
    """A prepared model: its absolute path, how it came about, and for inputs that choose among things by
    an index how many there are.
    """

    path: str
    how: Preparation
    bounds: Mapping[str, int]


def prepare(job: Job, model: Model, scratch: Path, workers: Workers) -> Prepared:
    """Prepare ``model`` below ``scratch``.

    A way that leaves control flow, of which EPs with fixed shapes compile none, gives way to another that
    leaves less. Raises BuildError when none works.
    """
    best: tuple[Folding, PrepareReply] | None = None
    failures: list[tuple[Folding, BuildError]] = []
    for folding in FOLDINGS if job.target.optimization != "none" else FOLDINGS[-1:]:
        if best is not None and folding == "none":
            break
        try:
            reply = _fold(job, model, folding, scratch, workers)
        except ModelError:
            raise
        except BuildError as error:
            failures.append((folding, error))
            continue
        if best is None or len(reply.control_flow) < len(best[1].control_flow):
            best = folding, reply
        if not (best[1].control_flow and job.target.provider.static_shapes):
            break
    if best is None:
        raise failures[-1][1]
    folding, reply = best
    failed = tuple(f"{name}: {p.what}" for name, error in failures for p in error.problems)
    how = Preparation(folding, reply.nodes_before, reply.nodes, reply.control_flow, failed)
    return Prepared(reply.path, how, reply.bounds)


def _fold(
    job: Job, model: Model, folding: Folding, scratch: Path, workers: Workers
) -> PrepareReply:
    folder = scratch / f"prepared-{model.name}-{folding}"
    folder.mkdir()
    compare = model.tolerance is not False
    reply: PrepareReply = workers.call(
        PrepareRequest(model_spec(model), folding, str(folder), compare),
        scratch / f"prepare-{model.name}-{folding}",
        where=f"{job.where}: preparation",
    )
    return reply
