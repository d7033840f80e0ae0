"""Read the facts of any ONNX file; needs onnx, but not ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx

from hatch_epcontext.errors import Kind, ModelError, Problem
from hatch_epcontext.files import is_regular, record_file, too_large
from hatch_epcontext.graph import external, graph
from hatch_epcontext.graph.reading import load
from hatch_epcontext.providers import HEADER
from hatch_epcontext.worker.requests import ContextFacts, InspectReply, InspectRequest


def handle(request: InspectRequest) -> InspectReply:
    """Return the facts of the request's file; raises ModelError when it is not an ONNX model."""
    path = Path(request.path)
    model = load(path)
    nodes = graph.compute_nodes(model.graph)
    contexts = [node for node in nodes if node.op_type == graph.CONTEXT_OP]
    operators = Counter(graph.operator(n) for n in nodes if n.op_type != graph.CONTEXT_OP)
    inside, outside = external.in_and_outside(model, path)
    return InspectReply(
        inputs=graph.input_facts(model.graph),
        outputs=graph.output_facts(model.graph),
        opsets={opset.domain or "ai.onnx": opset.version for opset in model.opset_import},
        operators=dict(operators.most_common()),
        contexts=tuple(_context(node, path) for node in contexts),
        external_data=inside,
        outside=outside,
        compatibility=graph.compatibility(model),
    )


def _context(node: onnx.NodeProto, path: Path) -> ContextFacts:
    main, embedded = graph.is_main(node), graph.is_embedded(node)
    sidecar = None if embedded or not main else graph.text(node, "ep_cache_context") or None
    record, blob = None, graph.blob(node, "ep_cache_context") if embedded and main else b""
    size = len(blob)
    if sidecar and external.stays_inside(path, sidecar) and is_regular(path.parent / sidecar):
        if reason := too_large((path.parent / sidecar).stat()):
            message = f"the sidecar {sidecar!r} {reason}."
            raise ModelError(Problem(Kind.EXTERNAL_DATA, "", message))
        record = record_file(path.parent / sidecar)
        size = record.size
        with (path.parent / sidecar).open("rb") as file:
            blob = file.read(HEADER)
    return ContextFacts(
        node=node.name,
        source=graph.text(node, "source"),
        partition=graph.text(node, "partition_name"),
        ep_sdk_version=graph.text(node, "ep_sdk_version"),
        main=main,
        sidecar=sidecar,
        size=size,
        header=blob[:HEADER].hex(),
        sha256=record.sha256 if record else None,
    )
