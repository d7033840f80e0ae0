"""What an ONNX file says, whoever made it; needs onnx, and no ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from hatch_epcontext.artifact import record_file
from hatch_epcontext.errors import ModelError, Problem
from hatch_epcontext.protocol import ContextFacts, DescribeReply, DescribeRequest
from hatch_epcontext.worker import graph

COMPATIBILITY = "ep_compatibility_info."
"""Under this and the EP's name the metadata has the EP's compatibility string."""


def describe(request: DescribeRequest) -> DescribeReply:
    """Read the request's file; raises ModelError when it is no ONNX model."""
    path = Path(request.path)
    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError:
        raise ModelError(
            Problem(str(path), "is not an ONNX model: it cannot be read as one.")
        ) from None
    if not model.ir_version or not model.graph.node:
        raise ModelError(Problem(str(path), "is not an ONNX model: it has no graph."))
    operators = Counter(
        graph.operator(node)
        for node in graph.compute_nodes(model.graph)
        if node.op_type != graph.CONTEXT_OP
    )
    named = graph.external_data_names(model)
    inside = tuple(name for name in named if graph.stays_inside(path.parent, name))
    return DescribeReply(
        inputs=tuple(map(graph.facts, graph.inputs(model.graph))),
        outputs=tuple(map(graph.facts, model.graph.output)),
        opsets={opset.domain or "ai.onnx": opset.version for opset in model.opset_import},
        operators=dict(operators.most_common()),
        contexts=tuple(_context(node, path.parent) for node in graph.contexts(model.graph)),
        external_data=inside,
        outside=tuple(name for name in named if name not in inside),
        compatibility={
            entry.key.removeprefix(COMPATIBILITY): entry.value
            for entry in model.metadata_props
            if entry.key.startswith(COMPATIBILITY)
        },
    )


def _context(node: onnx.NodeProto, folder: Path) -> ContextFacts:
    main, embedded = graph.is_main(node), graph.is_embedded(node)
    sidecar = "" if embedded or not main else graph.text(node, "ep_cache_context")
    found = folder / sidecar
    recorded = None
    if sidecar and graph.stays_inside(folder, sidecar) and found.is_file():
        recorded = record_file(found)
    size = len(graph.attribute(node, "ep_cache_context", b"")) if embedded and main else 0
    return ContextFacts(
        node=node.name,
        source=graph.text(node, "source"),
        partition=graph.text(node, "partition_name"),
        ep_sdk_version=graph.text(node, "ep_sdk_version"),
        main=main,
        sidecar=sidecar,
        size=recorded.size if recorded else size,
        sha256=recorded.sha256 if recorded else "",
    )
