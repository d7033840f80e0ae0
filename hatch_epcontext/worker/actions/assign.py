"""Open a model on an EP without a context: which nodes the EP gets, and whether its results are right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import onnxruntime as ort

from hatch_epcontext.errors import EpcontextError, Kind, Problem
from hatch_epcontext.worker.comparison.compare import check_runs
from hatch_epcontext.worker.comparison.runs import read_reference
from hatch_epcontext.worker.progress import step
from hatch_epcontext.worker.requests import AssignedNode, AssignReply, AssignRequest
from hatch_epcontext.worker.results import Agreement
from hatch_epcontext.worker.session import LEVELS, open_session, options

_OTHER_LAYOUT = "com.ms.internal.nhwc"
"""The domain that ONNX Runtime gives nodes whose layout it changes for an EP."""

_ADDED = frozenset({"Transpose", "QuantizeLinear", "DequantizeLinear"})
"""The operators that ONNX Runtime adds around such nodes."""

_RECORD = {"session.record_ep_graph_assignment_info": "1"}


def handle(request: AssignRequest) -> AssignReply:
    """Return the nodes with their EPs; raises an error when no session can be opened."""
    settings = request.target.settings
    session_options = options(request.target, settings.provider_options, _RECORD)
    session_options.graph_optimization_level = LEVELS[settings.optimization]
    step(f"opening the model on {request.target.provider.ep}")
    session = open_session(Path(request.prepared), session_options)
    nodes = tuple(_nodes(session, Path(request.prepared)))
    try:
        return AssignReply(nodes, _compare(session, request))
    except EpcontextError as error:
        return AssignReply(nodes, problems=error.problems)
    except Exception as error:
        return AssignReply(nodes, problems=(Problem(Kind.COMPILE_FAILED, "", str(error)),))


def _nodes(session: ort.InferenceSession, prepared: Path) -> Iterator[AssignedNode]:
    """Yield the nodes of ``session``, without what ONNX Runtime adds for an EP with another layout."""
    # Older releases of ONNX Runtime do not report which EP got which node.
    assignment = getattr(session, "get_provider_graph_assignment_info", None)
    if assignment is None:
        return
    main = onnx.load(prepared, load_external_data=False).graph
    names = {node.name for node in main.node}
    for subgraph in assignment():
        for node in subgraph.get_nodes():
            domain = "" if node.domain == _OTHER_LAYOUT else node.domain
            op = f"{domain}.{node.op_type}" if domain else node.op_type
            if node.name in names or op not in _ADDED:
                yield AssignedNode(node.name, op, subgraph.ep_name)


def _compare(session: ort.InferenceSession, request: AssignRequest) -> tuple[Agreement, ...]:
    if request.reference is None or request.tolerance is None:
        return ()
    expected, what = read_reference(request.reference), "the model"
    checked = check_runs(session, expected, request.tolerance, request.model, what, "the CPU's")
    return checked.agreements
