"""Open an artifact, away from where it was compiled, run it, and compare it with the CPU EP."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import onnxruntime as ort

from hatch_epcontext.config.settings import SYNTHETIC
from hatch_epcontext.errors import (
    Kind,
    ModelError,
    Problem,
    RefusedError,
    Setting,
    UnavailableError,
)
from hatch_epcontext.graph.dtypes import Arrays
from hatch_epcontext.graph.number_format import NumberFormat
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.advice import Explained, Subject, explain, problems_of, warning
from hatch_epcontext.worker.comparison.compare import (
    Baselines,
    Comparison,
    Difference,
    compare_runs,
    concluded,
)
from hatch_epcontext.worker.comparison.diverging import Divergence, describe
from hatch_epcontext.worker.comparison.effect import cause_of, effect, nearest
from hatch_epcontext.worker.comparison.emulation import (
    Decisions,
    FormattedModel,
    conditioned,
    decided,
    emulate,
    narrowed,
    with_rare,
    without_chance,
)
from hatch_epcontext.worker.comparison.levels import Level, Levels, choose, is_whole
from hatch_epcontext.worker.comparison.runs import (
    Reference,
    ReferenceRun,
    for_other_numbers,
    read_reference,
)
from hatch_epcontext.worker.comparison.selections import open_with_reads
from hatch_epcontext.worker.covered import compared_values, describe_values, with_arithmetic
from hatch_epcontext.worker.inputs import constant, dummy_inputs
from hatch_epcontext.worker.noise import within_noise
from hatch_epcontext.worker.ort_values import not_finite, run
from hatch_epcontext.worker.protocol import announce
from hatch_epcontext.worker.requests import ValidateRequest
from hatch_epcontext.worker.results import (
    GAIN,
    SENSITIVE,
    Agreement,
    AgreementStatus,
    Emulation,
    InputValues,
    Nearness,
    Validated,
    Validation,
    ValidationStatus,
)
from hatch_epcontext.worker.session import (
    context_options,
    cpu_options,
    incompatible,
    on_core,
    open_session,
    runs_on_simulator,
)
from hatch_epcontext.worker.source import check_ranges, ranges_of_app
from hatch_epcontext.worker.synthetic import assumed_range


def handle(request: ValidateRequest) -> Validated:
    """Validate the request's context: open it, run it, and compare.

    Outputs that differ are in the result. Raises BuildError when it cannot be opened without compiling, or
    fails; ModelError when the dummy inputs do not fit.
    """
    # A simulator's threads wait for one another in a loop, a quarter of their time.
    with contextlib.nullcontext() if request.core is None else on_core(request.core):
        return _validate(request)


def _validate(request: ValidateRequest) -> Validated:
    provider = request.target.provider
    unavailable = _unavailable(request)
    synthetic = request.model.validate.inputs in SYNTHETIC
    validation = Validation(ValidationStatus.RAN, reason=unavailable, synthetic=synthetic)
    if unavailable is not None:
        # An optimized graph is plain ONNX, which the CPU EP runs instead.
        on_cpu = provider.product == "optimized"
        status = ValidationStatus.RAN_ON_CPU if on_cpu else ValidationStatus.STRUCTURE
        validation = replace(validation, status=status)
        if provider.by_library:
            return Validated(validation)
    expected = _reference(request)
    announce("opening the compiled model")
    # In a group, sessions that are opened first must outlive the later ones.
    _others = [
        open_session(Path(request.folder) / other.model_file, _options(request))
        for other in request.sharing
        if other != request.context
    ]
    make_options = cpu_options if unavailable else partial(_options, request)
    session_options, path = make_options(), Path(request.folder) / request.context.model_file
    start = time.perf_counter()
    session = open_session(path, session_options)
    day = datetime.now(timezone.utc).date().isoformat()
    load = time.perf_counter() - start
    if unavailable is None:
        _check_assignment(request, session)
        validation = replace(validation, simulated=runs_on_simulator(request.target))
    if isinstance(expected, Reference):
        if (rest := expected.facts.selections.rest) is not None:
            session = open_with_reads(path, rest, make_options())
        validated = _compare(request, session, expected, validation)
        return replace(validated, load=load, day=day)
    announce("running the compiled model")
    gaps = tuple(not_finite(run(session, expected), {}))
    problems = problems_of([*map(Explained, gaps)])
    return Validated(replace(validation, agreements=gaps, problems=problems), {}, load, day, runs=1)


def _compare(
    request: ValidateRequest,
    session: ort.InferenceSession,
    expected: Reference,
    validation: Validation,
) -> Validated:
    """``validation`` with how near ``session`` is to the reference.

    What is not worth more than what is to be beaten, as emulated or run, is not run to its end.
    """
    assert request.tolerance is not None, "there is a reference to compare with"
    _check_outputs(request, expected)
    tolerance = within_noise(request.tolerance, expected.facts)
    divergence, emulated = _emulate(request, expected, tolerance)
    expected = divergence.reference if divergence else expected
    chosen = _chosen_runs(request, expected, divergence, emulated)
    runs = _with_worst_first(chosen, request.to_beat, emulated)
    if _may_be_wider(request, session, expected, tolerance, runs, emulated):
        request, runs = replace(request, to_beat=None), chosen
    if emulated and (beaten := _beaten(request, emulated.ordinary)):
        return Validated(replace(validation, emulation=beaten), beaten=True)
    if request.target.settings.changes_precision:
        expected = for_other_numbers(expected)
    subject = _subject(request, expected)
    report = partial(announce, f"running {subject.what}")
    baselines = Baselines(emulated, request.to_beat, _decisions(request, divergence, tolerance))
    compared = compare_runs(session, expected, tolerance, runs, baselines, report)
    if emulated:
        compared = concluded(compared, expected, emulated)
    validation = replace(
        validation,
        agreements=compared.agreements,
        samples=compared.samples,
        warnings=_warnings(compared, divergence, emulated, tolerance),
        inputs=_inputs(request, compared, expected),
        integers=expected.facts.integers,
    )
    if not compared.beaten and divergence:
        announce("looking for the first node that differs")
    if (difference := compared.difference) is not None:
        cause, culprit = "", None
        # Another recipe wins anyway, and a slow model takes seconds to explain.
        if divergence and emulated and request.to_beat is None:
            level = emulated.of(difference.run)
            cause, culprit = cause_of(divergence, level, difference.margin)
        explained = explain(difference, tolerance, subject, expected.facts, cause)
        differing = {item.agreement.output: item.agreement for item in explained}
        agreements = tuple(differing.get(a.output, a) for a in compared.agreements)
        problems = problems_of(explained)
        validation = replace(validation, agreements=agreements, problems=problems, culprit=culprit)
    elif not compared.beaten:
        validation = _judge(request, validation, compared.levels, divergence, emulated)
    return Validated(
        validation,
        expected.facts.batch,
        runs=compared.runs,
        beaten=compared.beaten,
        unusual=_unusual(compared, emulated),
        worst=compared.worst,
    )


def _subject(request: ValidateRequest, expected: Reference) -> Subject:
    reference = "the CPU's" if expected.facts.integers is None else "its float form's"
    return Subject(request.model, reference=reference)


def _decisions(
    request: ValidateRequest, divergence: Divergence | None, limits: Tolerance
) -> Decisions | None:
    """What rounding may flip in dummy inputs; None for inputs that the app has, which all count."""
    if divergence is None or request.model.validate.inputs not in SYNTHETIC:
        return None
    return Decisions(divergence.model, divergence.reference, limits)


def _warnings(
    compared: Comparison,
    divergence: Divergence | None,
    emulated: Levels | None,
    limits: Tolerance,
) -> tuple[str, ...]:
    """Of each difference in an unusual sample."""
    right = [level.run for level in emulated.ordinary if level.margin >= 0] if emulated else []
    texts = []
    for difference in compared.unusual:
        run = difference.run
        if divergence and run.is_larger:
            run = narrowed(run, divergence.model, divergence.reference, limits)
        values = describe_values(run, [*compared.agreed, *right])
        texts.append(warning(difference, values, _first_wrong(difference, divergence, emulated)))
    return tuple(texts)


def _inputs(
    request: ValidateRequest, compared: Comparison, expected: Reference
) -> tuple[InputValues, ...]:
    """What of each input was compared, and where the EP's arithmetic ends."""
    return with_arithmetic(
        compared_values(compared.agreed, expected.facts.states),
        request.context.inputs,
        expected.facts.ranges,
        request.target.provider,
        _format(request),
    )


def _unusual(compared: Comparison, emulated: Levels | None) -> int:
    """How many samples that an app may never have differ on the target, or would if it ran them."""
    ran = [*compared.agreed, *(difference.run for difference in compared.unusual)]
    others = (level for level in emulated or () if not any(level.run is run for run in ran))
    differing = [level for level in others if not level.counts and level.margin < 0]
    return len(differing) + len(compared.unusual)


def _may_be_wider(
    request: ValidateRequest,
    session: ort.InferenceSession,
    expected: Reference,
    limits: Tolerance,
    runs: Sequence[ReferenceRun] | None,
    emulated: Levels | None,
) -> bool:
    """Whether fewer of ``runs`` that an app may never have may differ than of what is to be beaten: then it
    is worth more if it is as near.
    """
    if request.to_beat is None or not request.to_beat.unusual:
        return False
    unusual = [run for run in runs or () if not run.usual]
    compared = compare_runs(session, expected, limits, unusual, Baselines(emulated))
    return _unusual(compared, emulated) < request.to_beat.unusual


def _chosen_runs(
    request: ValidateRequest,
    expected: Reference,
    divergence: Divergence | None,
    emulated: Levels | None,
) -> list[ReferenceRun] | None:
    """The runs whose emulation says most of the target; None for all that are for targets."""
    # Inputs that the app has count more than inputs that may be worse.
    if not (divergence and emulated and request.model.validate.inputs in SYNTHETIC):
        return None
    deciders, is_optimistic = expected.facts.deciders, divergence.model.optimistic is not None
    return choose(
        emulated,
        deciders,
        is_optimistic=is_optimistic,
        is_brief=request.is_brief,
        seconds=request.target.provider.seconds_of_run(expected.facts.cost),
    )


def _with_worst_first(
    runs: Sequence[ReferenceRun] | None, to_beat: Nearness | None, emulated: Levels | None
) -> Sequence[ReferenceRun] | None:
    """``runs`` that the emulation chose, and the worst one of what is ``to_beat``, in the order that says
    soonest that a result is beaten.
    """
    if runs is None or to_beat is None or emulated is None:
        return runs
    if all(run.name != to_beat.sample for run in runs):
        runs = [*runs, *(level.run for level in emulated if level.run.name == to_beat.sample)]
    # One far from the ordinary never says it.
    return sorted(
        runs, key=lambda run: (bool(run.far), 0.0 if run.far else emulated.of(run).margin)
    )


def _judge(
    request: ValidateRequest,
    validation: Validation,
    levels: Sequence[Level],
    divergence: Divergence | None,
    emulated: Levels | None,
) -> Validation:
    """``validation``, where nothing differs, with what the number format explains of the errors."""
    is_near = True
    if divergence and emulated:
        ordinary = emulated.ordinary
        corrected = ordinary.corrected(levels)
        emulation = effect(divergence, ordinary, corrected)
        is_near = not ordinary.are_seldom_near(corrected)
    elif (format_ := _format(request)) is not None:
        emulation = Emulation(format_.name, format_.seen)
    else:
        return validation
    judged = tuple(_judged(item, emulation, is_near=is_near) for item in validation.agreements)
    return replace(validation, agreements=judged, emulation=emulation)


def _first_wrong(
    difference: Difference, divergence: Divergence | None, emulated: Levels | None
) -> str:
    """The first node that is wrong for the run of ``difference``, and why; empty if none is known.

    If the run is ``emulated`` as different too, it is one that the format makes wrong, and else one whose
    integers have more bits than the EP's. These are exact in the emulation: what is much worse than that has
    another cause.
    """
    if divergence is None or emulated is None:
        return ""
    margin, run = emulated.of(difference.run).margin, difference.run
    is_other = margin >= 0 or (is_whole(run) and difference.margin < margin - GAIN)
    node = divergence.overflow(run) if is_other else divergence.first(run)
    return describe(node) if node else ""


def _beaten(request: ValidateRequest, emulated: Levels) -> Emulation | None:
    """The emulation if it shows that the model is not worth more than what is to be beaten; else None.

    It shows nothing of kernels that are less exact than the number format.
    """
    format_, to_beat = _format(request), request.to_beat
    if to_beat is None or to_beat.gap >= GAIN or format_ is None or not format_.seen:
        return None
    if Nearness(emulated.margin).is_worth(to_beat):
        return None
    agreement = nearest(emulated.worst, emulated.margin)
    return Emulation(format_.name, format_.seen, len(emulated), agreement)


def _judged(agreement: Agreement, emulation: Emulation, *, is_near: bool) -> Agreement:
    """``agreement``, or a sensitive one if other inputs may disagree because of the EP's number format.

    ``is_near``: whether a small margin says something of these.
    """
    if agreement.status is not AgreementStatus.AGREES:
        return agreement
    reason = emulation.reason if emulation.seen else None
    if is_near and agreement.margin is not None and agreement.margin < SENSITIVE:
        reason = reason or f"it is only {agreement.margin:.0f} dB above its limit"
    if reason is None:
        return agreement
    return replace(agreement, status=AgreementStatus.SENSITIVE, reason=reason)


def _format(request: ValidateRequest) -> NumberFormat | None:
    """The number format of the artifact; None if it computes as the CPU does, or with integers."""
    settings, provider = request.target.settings, request.target.provider
    if provider.product != "context" or settings.changes_precision:
        return None
    return provider.number_format(settings.device, settings.provider_options)


def _emulate(
    request: ValidateRequest, expected: Reference, tolerance: Tolerance
) -> tuple[Divergence, Levels] | tuple[None, None]:
    """The model in the target's number format, and how near that is; twice None if it cannot be
    emulated.
    """
    format_ = _format(request)
    if format_ is None or request.prepared is None:
        return None, None
    coverage = request.context.coverage
    skipped = frozenset(node.name for node in coverage.uncovered) if coverage else frozenset()
    announce(f"emulating {format_.name} on the CPU")
    try:
        bits = request.target.provider.integer_bits
        if model := FormattedModel.load(Path(request.prepared), format_, skipped, bits):
            levels = emulate(model, expected, tolerance)
            if request.model.validate.inputs in SYNTHETIC:
                levels, reasons = decided(levels, Decisions(model, expected, tolerance))
                expected = expected.with_inconclusive(reasons)
                levels = conditioned(levels, model, expected, tolerance)
                levels = with_rare(without_chance(levels, model, expected, tolerance))
            return Divergence(model, expected), levels
    except ModelError:
        raise
    except Exception:
        # ONNX Runtime raises many types for graphs that it cannot open without optimizing them.
        return None, None
    return None, None


def _reference(request: ValidateRequest) -> Reference | Arrays:
    """What to compare with; only inputs if nothing is compared."""
    model, own = request.model, request.context.inputs
    if request.tolerance is None or request.reference is None:
        constants = {i.name: constant(model, i) for i in own if i.name in model.constants}
        check_ranges(own, model)
        assumed = {tensor.name: assumed_range(tensor) for tensor in own}
        ranges = ranges_of_app({**assumed, **request.ranges}, model)
        return {**dummy_inputs(own, model, ranges), **constants}
    expected = read_reference(request.reference)
    if more := sorted(expected.feeds.keys() - {tensor.name for tensor in own}):
        message = f"the source model has the input {more[0]!r}, and the compiled model does not."
        hint = "Give the value to which it was frozen."
        setting = Setting(model.key / "constants")
        raise ModelError(Problem.at(model.key, Kind.VALUE_MISMATCH, message, hint, setting))
    return expected


def _check_outputs(request: ValidateRequest, expected: Reference) -> None:
    """Raise ModelError if the compiled model has other outputs: they would not be compared."""
    own = {tensor.name for tensor in request.context.outputs}
    if names := sorted(own ^ expected.runs[0].outputs[0].keys()):
        one, other = ("compiled", "source") if names[0] in own else ("source", "compiled")
        message = f"the {one} model has the output {names[0]!r}, and the {other} model does not."
        hint = "Compare with the model that it was compiled from."
        raise ModelError(Problem.at(request.model.key, Kind.VALUE_MISMATCH, message, hint))


def _unavailable(request: ValidateRequest) -> str | None:
    """Return the reason why an optimized graph cannot run on its EP; None if it can.

    The graph is plain ONNX, so the CPU EP can run it instead. A context always needs its EP, which has
    compiled it here, unless that was done by the vendor's library.
    """
    provider = request.target.provider
    if provider.product != "optimized" and not provider.by_library:
        return None
    try:
        _options(request)
    except UnavailableError as error:
        reason = error.problems[0].message.splitlines()[0].rstrip(".")
        return f"that needs {provider.needs}: {reason}" if provider.by_library else reason
    compatibility = request.context.compatibility
    return incompatible(request.target, compatibility) if provider.by_library else None


def _options(request: ValidateRequest) -> ort.SessionOptions:
    result = context_options(request.target, sharing=bool(request.sharing))
    result.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return result


def _check_assignment(request: ValidateRequest, session: ort.InferenceSession) -> None:
    provider = request.target.provider
    # Older releases of ONNX Runtime do not report which EP got which node.
    assignment = getattr(session, "get_provider_graph_assignment_info", None)
    if assignment is None:
        return
    assigned = {subgraph.ep_name for subgraph in assignment()}
    # An optimized graph may have no nodes left.
    if provider.ep not in assigned and (assigned or provider.product == "context"):
        message = (
            f"the {provider.product} graph was loaded, but ONNX Runtime assigned no node of it to "
            f"{provider.ep}."
        )
        raise RefusedError(Problem(Kind.WRONG_RESULT, "", message))
