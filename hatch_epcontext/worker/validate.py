"""An artifact is loaded where nothing of its making is near, run, and compared with the CPU EP."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import onnxruntime as ort

from hatch_epcontext.errors import BuildError, ModelError, Problem
from hatch_epcontext.protocol import ValidateReply, ValidateRequest
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.inputs import dummy_inputs, expected_outputs
from hatch_epcontext.worker.libraries import AbsentError
from hatch_epcontext.worker.prepare import feeds_for, fix
from hatch_epcontext.worker.reference import check_outputs, reference
from hatch_epcontext.worker.session import (
    context_options,
    cpu_options,
    open_session,
    provider_of,
    use_bytes_of,
)
from hatch_epcontext.worker.tensors import Array, refuse_not_finite, run


def validate(request: ValidateRequest) -> ValidateReply:
    """Prove the request's context by running it, loaded from disk and from memory.

    Raises BuildError when it does not load as something precompiled, fails, gives NaN or Inf where the
    CPU EP does not, or leaves the tolerance; ModelError when the dummy inputs do not fit.
    """
    spec = request.model
    feeds = _feeds(request)
    expected = {} if request.tolerance is None else reference(spec, feeds)
    # What was opened first has to outlive the others.
    _others = [
        open_session(Path(request.folder) / other.model_file, _options(request))
        for other in request.sharing
        if other != request.context
    ]
    absent = _absent(request)
    make = cpu_options if absent else partial(_options, request)
    # Opened and not run: what runs is the same, and simulators are slow.
    from_memory = _from_memory(request, make())
    session = open_session(_file(request), make())
    if not absent:
        _check_assignment(request, from_memory, "memory")
        _check_assignment(request, session, "disk")
    outputs = run(session, feeds)
    if request.tolerance is None:
        refuse_not_finite(outputs, {})
        return ValidateReply((), absent)
    if recorded := expected_outputs(request.context.outputs, spec):
        check_outputs(outputs, recorded, request.tolerance, spec, "what was recorded")
    agreements = check_outputs(outputs, expected, request.tolerance, spec, "the CPU's")
    return ValidateReply(agreements, absent)


def _feeds(request: ValidateRequest) -> dict[str, Array]:
    spec = request.model
    taken = {tensor.name for tensor in request.context.inputs}
    if not request.has_source:
        return dummy_inputs(request.context.inputs, spec)
    source = graph.read(Path(spec.path), spec.key)
    fix(source, spec)
    feeds = feeds_for(source, spec)
    if more := sorted(feeds.keys() - taken):
        raise ModelError(
            Problem(
                spec.key,
                f"the source takes {', '.join(map(repr, more))}, and what was compiled of it does not.",
                "Say in constants to which values they were frozen.",
            )
        )
    return feeds


def _absent(request: ValidateRequest) -> str:
    """Why the EP of an optimized graph is not here; the graph is ONNX, so the CPU can stand in for it.

    A context was compiled by its EP, so that one has to be here.
    """
    if request.product != "optimized":
        return ""
    try:
        _options(request)
    except AbsentError as error:
        return error.problems[0].what.splitlines()[0].rstrip(".")
    return ""


def _options(request: ValidateRequest) -> ort.SessionOptions:
    result = context_options(request.target, request.product, sharing=bool(request.sharing))
    result.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return result


def _file(request: ValidateRequest) -> Path:
    return Path(request.folder) / request.context.model_file


def _from_memory(
    request: ValidateRequest, session_options: ort.SessionOptions
) -> ort.InferenceSession:
    path = _file(request)
    use_bytes_of(path, session_options)
    return open_session(path.read_bytes(), session_options)


def _check_assignment(request: ValidateRequest, session: ort.InferenceSession, how: str) -> None:
    provider = provider_of(request.target)
    # Older releases cannot say which EP got which node.
    assignment = getattr(session, "get_provider_graph_assignment_info", None)
    if assignment is None:
        return
    took = {subgraph.ep_name for subgraph in assignment()}
    # Of an optimized graph nothing may be left to run.
    if provider.ep not in took and (took or request.product == "context"):
        what = f"the {request.product} graph was loaded from {how}, and no node of it went to "
        raise BuildError(Problem("", f"{what}{provider.ep}."))
