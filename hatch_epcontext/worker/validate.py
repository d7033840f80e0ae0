"""An artifact is loaded where nothing of its making is near, run, and compared with the CPU EP."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from hatch_epcontext.errors import BuildError, Problem
from hatch_epcontext.protocol import ValidateReply, ValidateRequest
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.inputs import expected_outputs
from hatch_epcontext.worker.prepare import feeds_for, fix
from hatch_epcontext.worker.reference import check_outputs, reference
from hatch_epcontext.worker.session import context_options, open_session, provider_of
from hatch_epcontext.worker.tensors import refuse_not_finite, run


def validate(request: ValidateRequest) -> ValidateReply:
    """Prove the request's context by running it, loaded from disk and from memory.

    Raises BuildError when it does not load as something precompiled, fails, gives NaN or Inf where the
    CPU EP does not, or leaves the tolerance; ModelError when the dummy inputs do not fit.
    """
    spec = request.model
    source = graph.read(Path(spec.path), spec.key)
    fix(source, spec)
    feeds = feeds_for(source, spec)
    expected = {} if request.tolerance is None else reference(spec, feeds)
    # Opened and not run: what runs is the same, and simulators are slow.
    _check_assignment(request, _from_memory(request), "memory")
    session = _from_disk(request)
    _check_assignment(request, session, "disk")
    outputs = run(session, feeds)
    if request.tolerance is None:
        refuse_not_finite(outputs, {})
        return ValidateReply(())
    if recorded := expected_outputs(request.context.outputs, spec):
        check_outputs(outputs, recorded, request.tolerance, spec, "what was recorded")
    return ValidateReply(check_outputs(outputs, expected, request.tolerance, spec, "the CPU's"))


def _options(request: ValidateRequest) -> ort.SessionOptions:
    result = context_options(request.target, request.product)
    result.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return result


def _from_disk(request: ValidateRequest) -> ort.InferenceSession:
    return open_session(Path(request.folder) / request.context.model_file, _options(request))


def _from_memory(request: ValidateRequest) -> ort.InferenceSession:
    path = Path(request.folder) / request.context.model_file
    session_options = _options(request)
    # The bytes do not say where they came from, and what lies beside them has to be found.
    session_options.add_session_config_entry("ep.context_file_path", str(path))
    if request.product == "optimized":
        session_options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(path.parent)
        )
    return open_session(path.read_bytes(), session_options)


def _check_assignment(request: ValidateRequest, session: ort.InferenceSession, how: str) -> None:
    provider = provider_of(request.target)
    # Older releases cannot say which EP got which node.
    assignment = getattr(session, "get_provider_graph_assignment_info", None)
    if assignment is None or request.product != "context":
        return
    if provider.ep not in {subgraph.ep_name for subgraph in assignment()}:
        what = f"the context was loaded from {how}, and no node of it went to {provider.ep}."
        raise BuildError(Problem("", what))
