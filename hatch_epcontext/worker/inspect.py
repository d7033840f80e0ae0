"""Read the facts of any ONNX file; needs onnx, but not ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from hatch_epcontext.errors import Kind, ModelError, Problem
from hatch_epcontext.files import record_file
from hatch_epcontext.ipc.protocol import ContextFacts, InspectReply, InspectRequest
from hatch_epcontext.worker import graph


def handle(request: InspectRequest) -> InspectReply:
    """Return the facts of the request's file; raises ModelError when it is not an ONNX model."""
    path = Path(request.path)
    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError:
        raise _invalid(path, "it cannot be read as one.") from None
    if not model.ir_version or not model.graph.node:
        raise _invalid(path, "it has no graph.")
    operators = Counter(
        graph.operator(node)
        for node in graph.compute_nodes(model.graph)
        if node.op_type != graph.CONTEXT_OP
    )
    data = graph.external_data_names(model)
    inside = tuple(name for name in data if graph.stays_inside(path.parent, name))
    return InspectReply(
        inputs=tuple(map(graph.facts, graph.inputs(model.graph))),
        outputs=tuple(map(graph.facts, model.graph.output)),
        opsets={opset.domain or "ai.onnx": opset.version for opset in model.opset_import},
        operators=dict(operators.most_common()),
        contexts=tuple(_context(node, path.parent) for node in graph.contexts(model.graph)),
        external_data=inside,
        outside=tuple(name for name in data if name not in inside),
        compatibility=graph.compatibility(model),
    )


def _invalid(path: Path, reason: str) -> ModelError:
    return ModelError(Problem(Kind.INVALID_MODEL, str(path), f"is not an ONNX model: {reason}"))


def _context(node: onnx.NodeProto, folder: Path) -> ContextFacts:
    main, embedded = graph.is_main(node), graph.is_embedded(node)
    sidecar = None if embedded or not main else graph.text(node, "ep_cache_context") or None
    record = None
    if sidecar and graph.stays_inside(folder, sidecar) and (folder / sidecar).is_file():
        record = record_file(folder / sidecar)
    size = len(graph.attribute(node, "ep_cache_context", b"")) if embedded and main else 0
    return ContextFacts(
        node=node.name,
        source=graph.text(node, "source"),
        partition=graph.text(node, "partition_name"),
        ep_sdk_version=graph.text(node, "ep_sdk_version"),
        main=main,
        sidecar=sidecar,
        size=record.size if record else size,
        sha256=record.sha256 if record else None,
    )
