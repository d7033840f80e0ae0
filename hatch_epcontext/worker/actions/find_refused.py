"""Ask an EP which nodes of a model it refuses, without compiling."""

from __future__ import annotations

from pathlib import Path

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.worker.actions import prepare
from hatch_epcontext.worker.facts import NodeFacts
from hatch_epcontext.worker.reasons import ask, explained
from hatch_epcontext.worker.requests import FindRefusedReply, FindRefusedRequest, PrepareRequest


def handle(request: FindRefusedRequest) -> FindRefusedReply:
    """Return the nodes that the EP refuses; raises ModelError and BuildError as a build does."""
    # Not compared with the source, which would have to run.
    wanted = PrepareRequest(request.model, "onnxruntime", request.folder, compare=False)
    prepared = Path(prepare.handle(wanted).path)
    _name_nodes(prepared)
    logged = ask(prepared, request.target)
    main = onnx.load(prepared, load_external_data=False).graph
    nodes = graph.compute_nodes(main)
    refused = [NodeFacts(node.name, graph.operator(node)) for node in nodes if node.name in logged]
    return FindRefusedReply(
        len(nodes), explained(refused, logged, main, main, request.target.provider)
    )


def _name_nodes(path: Path) -> None:
    """Give the nodes of the model at ``path`` that have no name that of their first output.

    The EP says by their names which nodes it refuses.
    """
    model = onnx.load(path, load_external_data=False)
    nodes = graph.compute_nodes(model.graph)
    taken = {node.name for node in nodes}
    for node in nodes:
        if not node.name:
            name = next(filter(None, node.output), node.op_type)
            while name in taken:
                name += "_"
            node.name = name
            taken.add(name)
    onnx.save(model, path)
