"""Unroll the loops and recurrent layers of a prepared model, and compare the result with the source."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.unrolling import UNROLLED, unroll
from hatch_epcontext.worker.actions.rewrite import RewriteSession, dropped
from hatch_epcontext.worker.progress import step
from hatch_epcontext.worker.requests import RewriteReply, UnrollRequest

_MAX_ROUNDS = 8
"""How often what was unrolled is simplified and looked at again."""


def handle(request: UnrollRequest) -> RewriteReply:
    """Write the request's model, unrolled, into its folder.

    It is dropped if it cannot be run then, or gives other results than the source. Raises ModelError when
    the source model cannot be run on the CPU.
    """
    step("unrolling what the EP refuses")
    work = RewriteSession.begin(request.rewrite)
    done: list[str] = []
    path = Path(request.rewrite.prepared)
    try:
        # The length of a loop can follow from what another one makes: it is constant only then.
        for _ in range(_MAX_ROUNDS if request.rewrite.simplify else 1):
            model = onnx.load(path, load_external_data=False)
            if not (names := unroll(model, work.refused, request.limit, work.types)):
                break
            done += names
            folder = Path(tempfile.mkdtemp(prefix="unrolled-", dir=request.rewrite.folder))
            path, session = work.write_model(model, path.parent, folder)
        if not done:
            return RewriteReply(None, dropped=_unknown_lengths(model, work.refused))
        work.compare(session)
    except Exception as error:
        return RewriteReply(None, dropped=(dropped("; ".join(done) or "Unrolling", error),))
    main = onnx.load(path, load_external_data=False).graph
    nodes = len(graph.compute_nodes(main))
    return RewriteReply(str(path), nodes, graph.control_flow(main), tuple(dict.fromkeys(done)))


def _unknown_lengths(model: onnx.ModelProto, refused: frozenset[str]) -> tuple[str, ...]:
    """Why the refused loops and layers in ``model``, if there are any, were not unrolled."""
    operators = {graph.operator(node) for node in graph.nodes(model.graph)}
    found = sorted(operators & refused & UNROLLED)
    if not found:
        return ()
    fixed = all(graph.facts(value).is_fixed for value in graph.inputs(model.graph))
    hint = (
        "" if fixed else ", because the shapes of inputs are open; static-shapes = true fixes them"
    )
    return (f"unrolling {' and '.join(found)}: no length is fixed{hint}",)
