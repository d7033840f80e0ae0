"""Unroll the loops and recurrent layers of a prepared model, and compare the result with the source."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx

from hatch_epcontext.errors import EpcontextError
from hatch_epcontext.ipc.protocol import RewriteReply, UnrollRequest
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.rewrite import Work
from hatch_epcontext.worker.step import step
from hatch_epcontext.worker.unrolling import unroll

_MOST_ROUNDS = 8
"""How often what was unrolled is simplified and looked at again."""


def handle(request: UnrollRequest) -> RewriteReply:
    """Write the request's model, unrolled, into its folder.

    It is dropped if it cannot be run then, or gives other results than the source. Raises ModelError when
    the source model cannot be run on the CPU.
    """
    step("unrolling what the EP refuses")
    work = Work.begin(request.rewrite)
    done: list[str] = []
    path = Path(request.rewrite.prepared)
    try:
        # The length of a loop can follow from what another one makes: it is constant only then.
        for _ in range(_MOST_ROUNDS if request.rewrite.simplify else 1):
            model = onnx.load(path, load_external_data=False)
            if not (names := unroll(model, work.refused, request.limit)):
                break
            done += names
            folder = Path(tempfile.mkdtemp(prefix="unrolled-", dir=request.rewrite.folder))
            path, session = work.write_model(model, path.parent, folder)
        if not done:
            return RewriteReply(None)
        work.compare(session)
    except Exception as error:
        # ONNX Runtime raises many things, for graphs that it cannot open.
        message = error.problems[0].message if isinstance(error, EpcontextError) else str(error)
        return RewriteReply(None, dropped=(f"{'; '.join(done) or 'Unrolling'}: {message}",))
    main = onnx.load(path, load_external_data=False).graph
    nodes = len(graph.compute_nodes(main))
    return RewriteReply(str(path), nodes, graph.control_flow(main), tuple(dict.fromkeys(done)))
