"""An artifact is loaded where nothing of its making is near, run, and compared with the CPU EP."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from hatch_epcontext.errors import BuildError, Problem
from hatch_epcontext.protocol import Agreement, ModelSpec, ValidateReply, ValidateRequest
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.inputs import Arrays, dummy_inputs
from hatch_epcontext.worker.session import open_session, options, provider_of

Array = NDArray[np.generic]


def validate(request: ValidateRequest) -> ValidateReply:
    """Prove the request's context by running it.

    Raises BuildError when it does not load as something precompiled, fails, gives NaN or Inf where the
    CPU EP does not, or leaves the tolerance; ModelError when the dummy inputs do not fit.
    """
    feeds = dummy_inputs(request.inputs, request.context.inputs, request.model)
    outputs = _run_artifact(request, feeds)
    if request.tolerance is None:
        _refuse_not_finite(outputs, {})
        return ValidateReply(())
    reference = _run_source(request.model, feeds)
    _refuse_not_finite(outputs, reference)
    agreements = []
    problems = []
    for name, output in outputs.items():
        agreement = compare(name, output, reference[name])
        agreements.append(agreement)
        if not within(output, reference[name], agreement, request.tolerance):
            problems.append(_disagreement(agreement, request.tolerance, request.model))
    if problems:
        raise BuildError(*problems)
    return ValidateReply(tuple(agreements))


def _run_artifact(request: ValidateRequest, feeds: Arrays) -> dict[str, Array]:
    provider = provider_of(request.target)
    session_options = options(request.target, request.target.load_options)
    precompiled = request.product == "context"
    if precompiled:
        # What would have to be compiled now was not compiled then.
        session_options.add_session_config_entry("session.disable_model_compile", "1")
    session_options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = open_session(Path(request.folder) / request.context.model_file, session_options)
    # Older releases cannot say which EP got which node.
    assignment = getattr(session, "get_provider_graph_assignment_info", None)
    if assignment is not None and precompiled:
        ran_on = {subgraph.ep_name for subgraph in assignment()}
        if provider.ep not in ran_on:
            raise BuildError(
                Problem("", f"the context was loaded, and no node of it went to {provider.ep}.")
            )
    return _run(session, feeds)


def _run_source(model: ModelSpec, feeds: Arrays) -> dict[str, Array]:
    session_options = ort.SessionOptions()
    session_options.add_provider("CPUExecutionProvider", {})
    session = open_session(Path(model.path), session_options)
    frozen = {}
    for each in session.get_inputs():
        if each.name in model.constants:
            like = np.asarray(model.constants[each.name], dtype=_NUMPY.get(each.type))
            rank = len(each.shape)
            frozen[each.name] = like.reshape([1] * rank) if like.size == 1 else like
    return _run(session, {**feeds, **frozen})


_NUMPY = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(int16)": np.int16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16,
    "tensor(uint32)": np.uint32,
    "tensor(uint64)": np.uint64,
    "tensor(bool)": np.bool_,
    "tensor(string)": np.object_,
}


def _run(session: ort.InferenceSession, feeds: Arrays) -> dict[str, Array]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _refuse_not_finite(outputs: dict[str, Array], reference: dict[str, Array]) -> None:
    problems = []
    for name, output in outputs.items():
        if output.dtype.kind != "f":
            continue
        bad = ~np.isfinite(output)
        if name in reference:
            same = reference[name].shape == output.shape
            bad &= np.isfinite(reference[name]) if same else True
        if bad.any():
            problems.append(
                Problem(
                    "",
                    f"the output {name!r} has NaN or Inf in {int(bad.sum())} of {bad.size} places"
                    + (" where the CPU has none." if name in reference else "."),
                )
            )
    if problems:
        raise BuildError(*problems)


def compare(name: str, output: Array, reference: Array) -> Agreement:
    """How near ``output`` is to ``reference``; places where both are not finite are left out.

    Raises BuildError when they differ in shape.
    """
    if output.shape != reference.shape:
        raise BuildError(
            Problem(
                "",
                f"the output {name!r} has the shape {list(output.shape)}, and "
                f"{list(reference.shape)} on the CPU.",
            )
        )
    a, b = _numbers(output), _numbers(reference)
    both = np.isfinite(a) & np.isfinite(b)
    a, b = a[both], b[both]
    if not a.size:
        return Agreement(name, 0.0, 1.0)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    # Without a direction there is nothing to compare: all zeros agree with all zeros only.
    cosine = float(a @ b) / norms if norms else float(np.array_equal(a, b))
    return Agreement(name, float(np.abs(a - b).max()), min(cosine, 1.0))


def within(output: Array, reference: Array, agreement: Agreement, tolerance: Tolerance) -> bool:
    """Whether ``output`` is as near to ``reference`` as ``tolerance`` wants."""
    a, b = _numbers(output), _numbers(reference)
    both = np.isfinite(a) & np.isfinite(b)
    a, b = a[both], b[both]
    scale = max(1.0, float(np.abs(b).max(initial=0.0)))
    near = np.abs(a - b) <= tolerance.atol * scale + tolerance.rtol * np.abs(b)
    return bool(near.all()) and agreement.cosine >= tolerance.cosine


def _numbers(array: Array) -> NDArray[np.float64]:
    return np.asarray(array, dtype=np.float64).ravel()


def _disagreement(agreement: Agreement, tolerance: Tolerance, model: ModelSpec) -> Problem:
    return Problem(
        "",
        f"the output {agreement.output!r} disagrees with the CPU's: the largest difference is "
        f"{agreement.max_abs:.3g}, the cosine similarity {agreement.cosine:.5f} (allowed: atol "
        f"{tolerance.atol:g}, rtol {tolerance.rtol:g}, cosine at least {tolerance.cosine:g}).",
        f"If that is good enough, say so in {model.key}.tolerance.",
    )
