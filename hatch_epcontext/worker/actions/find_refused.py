"""Ask an EP which nodes of a model it refuses, without compiling."""

from __future__ import annotations

from pathlib import Path

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.worker.actions import prepare
from hatch_epcontext.worker.reasons import ask, explained
from hatch_epcontext.worker.requests import FindRefusedReply, FindRefusedRequest, PrepareRequest
from hatch_epcontext.worker.results import NodeFacts


def handle(request: FindRefusedRequest) -> FindRefusedReply:
    """Return the nodes that the EP refuses; raises ModelError and BuildError as a build does."""
    # Not compared with the source, which would have to run.
    wanted = PrepareRequest(request.model, "onnxruntime", request.folder, compare=False)
    prepared = Path(prepare.handle(wanted).path)
    logged = ask(prepared, request.target)
    main = onnx.load(prepared, load_external_data=False).graph
    nodes = graph.compute_nodes(main)
    refused = [NodeFacts(node.name, graph.operator(node)) for node in nodes if node.name in logged]
    return FindRefusedReply(
        len(nodes), explained(refused, logged, main, main, request.target.provider)
    )
