"""What an EP cannot compile of a model, from the file alone; needs onnx, but not ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from hatch_epcontext.errors import Kind, Problem, Setting
from hatch_epcontext.graph import graph, reading
from hatch_epcontext.graph.dependencies import Dependencies
from hatch_epcontext.graph.limits import DYNAMIC_QUANTIZATION, Limits
from hatch_epcontext.graph.refusals import known_limits as refusals
from hatch_epcontext.graph.refusals.conditions import advice
from hatch_epcontext.worker.actions.check import check_fixed, not_compilable
from hatch_epcontext.worker.configured import fix_inputs
from hatch_epcontext.worker.requests import UNDO, PreviewReply, PreviewRequest
from hatch_epcontext.worker.results import NodeFacts


def _likely(
    flow: Dependencies, onnx_model: onnx.ModelProto, request: PreviewRequest
) -> Iterator[Problem]:
    """What keeps EPs from compiling all of a model, unless preparation removes it."""
    model = request.model
    if found := advice(onnx_model.graph, model.key):
        hint, settings = found
        message = "a condition depends on an input, and few EPs compile branches."
        yield Problem.at(model.key, Kind.LOW_COVERAGE, message, hint, *settings)
    lacks = request.target.provider.lacks
    # Some EPs compile parts of it; an EP of which nothing is known is expected to compile none.
    refused = DYNAMIC_QUANTIZATION & lacks if lacks else DYNAMIC_QUANTIZATION
    dynamic = any(graph.operator(node) in refused for node in flow.counted)
    if dynamic and not request.target.settings.dequantize:
        yield Problem.at(
            model.key,
            Kind.LOW_COVERAGE,
            "the model quantizes its activations while it runs, which NPUs cannot do.",
            UNDO,
            Setting(model.key / "dequantize", True),
        )


def handle(request: PreviewRequest) -> PreviewReply:
    """Return what the package knows; raises ModelError when the model does not fit its configuration."""
    model = request.model
    onnx_model = reading.read(model.path, model.key)
    fix_inputs(onnx_model, model)
    provider = request.target.provider
    limits = provider.limits or Limits(frozenset(), kinds=frozenset())
    findings = refusals.find(onnx_model, limits)
    refused = {id(each.node): each.reason for each in findings.refused}
    lacks = provider.lacks - (DYNAMIC_QUANTIZATION if request.target.settings.dequantize else set())
    for node in findings.flow.counted:
        if graph.operator(node) in lacks:
            refused.setdefault(id(node), "the EP does not have this operator")
    inputs = tuple(map(graph.facts, graph.inputs(onnx_model.graph)))
    fixed_for = provider.ep if provider.static_shapes else None
    problems = [
        *check_fixed(inputs, model, fixed_for, left_open=not model.static_shapes),
        *not_compilable(onnx_model, model, [request.target]),
        *(_likely(findings.flow, onnx_model, request) if provider.product == "context" else ()),
    ]
    return PreviewReply(
        len(findings.flow.counted),
        tuple(
            NodeFacts(node.name, graph.operator(node), refused[id(node)])
            for node in findings.flow.counted
            if id(node) in refused
        ),
        tuple(problems),
    )
