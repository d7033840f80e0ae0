"""Compare the outputs of a model with its reference, judge them, and explain what differs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnxruntime as ort

from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.config.tables import LimitsTable, ToleranceTable
from hatch_epcontext.errors import RefusedError, Setting
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.text import count
from hatch_epcontext.worker.comparison.emulation import Emulator, Level
from hatch_epcontext.worker.comparison.runs import Facts, Reference, ReferenceRun
from hatch_epcontext.worker.results import (
    GAIN,
    NOTHING,
    SENSITIVE,
    Agreement,
    AgreementStatus,
    Validation,
    ValidationStatus,
    differences,
    worst_agreements,
)

SIMPLIFIED = Tolerance(snr=40, cosine=0.999)
"""A simplifier may change only the order of additions."""


def simplified_tolerance(model: Model) -> Tolerance:
    """`SIMPLIFIED`, or what the configuration of ``model`` allows if that is more."""
    table = model.validate.tolerance or ToleranceTable()
    return replace(
        SIMPLIFIED,
        **_allowed(table),
        outputs={output: _allowed(limits) for output, limits in table.outputs.items()},
    )


def _allowed(limits: LimitsTable) -> dict[str, Any]:
    """The limits that are lower than those of `SIMPLIFIED`."""
    own = {"snr": SIMPLIFIED.snr, "cosine": SIMPLIFIED.cosine}
    return {name: limits.limits[name] for name in own if limits.limits.get(name, 1e9) < own[name]}


@dataclass(frozen=True)
class Subject:
    """What is compared, in messages: ``what``, a form of ``model``, with the outputs of a ``reference``."""

    model: Model
    what: str = "the compiled model"
    reference: str = "the CPU's"


def compare_runs(
    session: ort.InferenceSession,
    reference: Reference,
    limits: Tolerance,
    subject: Subject,
    *,
    runs: Sequence[ReferenceRun] | None = None,
    emulator: Emulator | None = None,
) -> Validation:
    """Run ``session`` on ``runs`` of the ``reference``, by default on those for a target.

    Returns the worst agreement of each output, or those of the first step that differs. ``emulator``: of its
    number format; the runs correct it. Raises ModelError when it takes too long.
    """
    compared: list[Agreement] = []
    levels: list[Level] = []
    result = Validation(ValidationStatus.RAN)
    if runs is None:
        runs = [run for run in reference.runs if run.on_target]
    for run in runs:
        result = replace(result, samples=(*result.samples, run.name))
        agreeing, differing = _compare_run(session, reference, run, limits, subject)
        if differing:
            compared += agreeing
            agreements = differing
            if emulator is not None:
                agreements = _with_cause(differing, run, emulator)
            # The app may never have unusual inputs; but if the number format does not explain the EP's error
            # there, the EP may be wrong elsewhere too.
            if run.usual or (emulator is not None and emulator.level(run).margin >= SENSITIVE):
                return replace(result, agreements=agreements)
            result = replace(result, warnings=(*result.warnings, _warning(agreements)))
        elif emulator is None:
            compared += agreeing
        else:
            level = replace(Level.of(run, agreeing, reference.facts, limits), ran=True)
            levels.append(level)
            emulated = emulator.level(run).margin
            # Above that exact kernels gain nothing: it agrees, or the format leaves other samples less.
            reachable = SENSITIVE + GAIN if emulator.margin >= SENSITIVE else SENSITIVE
            gap = max(0.0, min(emulated, reachable) - level.margin)
            compared += (replace(a, gap=gap) if a is level.nearest else a for a in agreeing)
            is_first = run is reference.runs[0]
            if not is_first and _is_as_emulated(level, emulated, runs, subject.model):
                # The others are nearer, and simulators are slow.
                break
    if emulator is not None:
        emulator.correct(levels)
    return replace(result, agreements=worst_agreements(compared))


def _compare_run(
    session: ort.InferenceSession,
    reference: Reference,
    run: ReferenceRun,
    limits: Tolerance,
    subject: Subject,
) -> tuple[list[Agreement], tuple[Agreement, ...]]:
    """The agreements of ``session`` in the steps of ``run`` before the first difference, and in that one."""
    agreeing: list[Agreement] = []
    steps = reference.compare_run(session, run, limits, subject.what)
    for number, measured in enumerate(steps):
        place = _place(run, number)
        agreements = tuple(
            explain(agreement, limits, subject, reference.facts, place) for agreement in measured
        )
        if any(agreement.differs for agreement in agreements):
            return agreeing, agreements
        agreeing += agreements
    return agreeing, ()


def _is_as_emulated(
    level: Level, emulated: float, runs: Sequence[ReferenceRun], model: Model
) -> bool:
    """Whether the run of ``level``, one of the worst, is about as near as the emulation, with that margin."""
    longest = max(runs, key=lambda run: len(run.steps))
    is_worst = model.validate.inputs in SYNTHETIC and not (
        level.run is longest and len(longest.steps) > 1
    )
    is_better = emulated < SENSITIVE <= level.margin
    return is_worst and level.margin >= emulated - GAIN and not is_better


def refuse_differences(agreements: Iterable[Agreement]) -> None:
    """Raise RefusedError if some of the ``agreements``, of a form that a worker made, differ."""
    if problems := differences(agreements):
        raise RefusedError(*problems)


def refuse_form(
    session: ort.InferenceSession, reference: Reference, limits: Tolerance, subject: Subject
) -> None:
    """Raise RefusedError if ``session`` differs in one of the runs for a target.

    All are compared: what the message advises is enough for all of them.
    """
    worst: dict[str, Agreement] = {}
    for run in (run for run in reference.runs if run.on_target):
        for agreement in compare_runs(session, reference, limits, subject, runs=[run]).agreements:
            if agreement.differs:
                other = worst.get(agreement.output, agreement)
                first, second = sorted((other, agreement), key=lambda item: item.above)
                worst[agreement.output] = replace(first, settings=_allowing_both(first, second))
    refuse_differences(worst.values())


def _allowing_both(first: Agreement, second: Agreement) -> tuple[Setting, ...]:
    """The settings of ``first``, the worse difference of an output, with the limits that both need."""
    output, limits = first.output, dict[str, float]()
    values = [setting.value for item in (first, second) for setting in item.settings]
    if not values or not all(isinstance(value, dict) for value in values):
        return first.settings
    for name, limit in (item for value in values for item in value["outputs"][output].items()):
        loosest = max if name == "atol" else min
        limits[name] = loosest(limit, limits.get(name, limit))
    return (replace(first.settings[0], value={"outputs": {output: limits}}),)


def _with_cause(
    agreements: tuple[Agreement, ...], run: ReferenceRun, emulator: Emulator
) -> tuple[Agreement, ...]:
    """``agreements`` of ``run``: the first difference has the gap, and names the first diverging node."""
    first = next(agreement for agreement in agreements if agreement.differs)
    margins = (a.margin for a in agreements if a.differs and a.margin is not None)
    margin = min(margins, default=NOTHING)
    cause = emulator.explanation(run, margin)
    distance = emulator.level(run).margin - margin
    # None if the emulation is equal: a reply cannot contain infinity.
    gap = max(0.0, distance) if distance < math.inf else None
    explained = replace(first, cause=cause, gap=gap)
    return tuple(explained if a is first else a for a in agreements)


def _warning(agreements: Iterable[Agreement]) -> str:
    first, *others = (agreement for agreement in agreements if agreement.differs)
    text = first.reason or ""
    if first.status is AgreementStatus.DIFFERS:
        text = f"the output {first.output!r} {first.reason}: {first.excess}."
    verb = "does" if len(others) == 1 else "do"
    more = f" So {verb} {count(len(others), 'other output')}." if others else ""
    return f"{text}{more} This matters only if the app can have such inputs."


def _place(run: ReferenceRun, number: int) -> str:
    if len(run.steps) > 1:
        return f" in step {number + 1} of {run.name.replace(' steps', '', 1)}, with its own states"
    return "" if run.name in ("random", "given") else f" for the sample {run.name!r}"


def explain(
    agreement: Agreement, limits: Tolerance, subject: Subject, facts: Facts, place: str = ""
) -> Agreement:
    """``agreement``; one that is beyond the ``limits`` says from what, at which ``place``, and what to do."""
    if agreement.status is not AgreementStatus.DIFFERS:
        return agreement
    reason = f"differs from {subject.reference}{place}"
    own = facts.of(agreement.output).within(limits.of(agreement.output))
    hint, setting = _advice(agreement, own, subject)
    return replace(agreement, reason=reason, hint=hint, settings=(setting,) if setting else ())


def _advice(
    agreement: Agreement, limits: Tolerance, subject: Subject
) -> tuple[str, Setting | None]:
    """What to do about an output that is beyond a limit, and what to set."""
    what, validate = subject.what, subject.model.validate
    key = subject.model.key / "validate"
    are_given = validate.inputs not in SYNTHETIC
    needed = {}
    if agreement.above < 0:
        needed["snr"] = _floor(agreement.within(limits.snr))
    if agreement.cosine is not None and agreement.cosine < limits.cosine:
        needed["cosine"] = _floor(agreement.cosine)
    is_absolute = limits.atol is not None or limits.rtol is not None
    if is_absolute and agreement.max_abs > (limits.atol or 0):
        needed["atol"] = float(f"{1.006 * agreement.max_abs:.3g}")
    # No limit should allow an output, or a slice such as one class, with an error of half of the signal.
    is_wrong = (
        needed["snr"] < GAIN or (agreement.worst_snr is not None and agreement.worst_snr < GAIN)
        if "snr" in needed
        else needed.get("cosine", 1) <= 0
    )
    if is_wrong:
        wrong = f"{what[0].upper()}{what[1:]} is wrong there"
        if are_given:
            advice = ": do not ship it for this target" if what == "the compiled model" else ""
            return f"{wrong}{advice}.", None
        hint = f"{wrong}. If the app never has such inputs, give its real ones."
        return hint, Setting(key / "inputs", "samples.npz")
    hint = "Find the cause, or allow more if that is acceptable (not tried: other inputs may need more)."
    return hint, Setting(key / "tolerance", {"outputs": {agreement.output: needed}})


def _floor(limit: float) -> float:
    """``limit``, rounded to a few digits and never stricter."""
    return math.floor(limit * 1000) / 1000
