"""Compare the outputs of a model with its reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import onnxruntime as ort

from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.errors import RefusedError, Setting
from hatch_epcontext.graph.arrays import Arrays
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.text import count
from hatch_epcontext.worker.comparison.emulation import Emulator, Level
from hatch_epcontext.worker.comparison.measures import Comparison, compare, other_shape
from hatch_epcontext.worker.comparison.runs import Facts, Reference, ReferenceRun, run_steps
from hatch_epcontext.worker.comparison.selections import select
from hatch_epcontext.worker.results import (
    GAIN,
    NOTHING,
    SENSITIVE,
    Agreement,
    AgreementStatus,
    differences,
    worst_agreements,
)
from hatch_epcontext.worker.tensors import not_finite

SIMPLIFIED = Tolerance(snr=40, cosine=0.999)
"""A simplifier may change only the order of additions."""

_WRONG = 6.0
"""Signal-to-noise ratio in decibels below which no limit is suggested: the error is half of the signal."""

_WRONG_SLICE = 3.0
"""The same for a slice, such as all scores of one class."""


def compare_runs(
    session: ort.InferenceSession,
    expected: Reference,
    tolerance: Tolerance,
    model: Model,
    what: str,
    reference_name: str,
    *,
    runs: Sequence[ReferenceRun] | None = None,
    first: Arrays | None = None,
    only_target: str | None = None,
    emulator: Emulator | None = None,
    explain: Callable[[ReferenceRun], str] | None = None,
) -> ComparisonResult:
    """Run ``session``, the model ``what``, on ``runs`` of the reference, by default on those for a target.

    It ends with the first run that differs. ``first``: its outputs for the first sample, if that was run
    already. ``only_target``: the target whose limits a hint should relax, if not those of all. ``emulator``:
    of its number format; the runs correct it. ``explain``: without an emulator, it names where the model
    begins to differ. Raises ModelError when it takes too long.
    """
    compared: list[Agreement] = []
    warnings: list[str] = []
    ran: list[str] = []
    levels: list[Level] = []
    gap = None if emulator is None else 0.0
    if runs is None:
        runs = [run for run in expected.runs if run.on_target]
    longest = max(runs, key=lambda run: len(run.feeds))
    for run in runs:
        ran.append(run.name)
        if first is not None and run is expected.runs[0]:
            outputs: Iterable[Arrays] = (first,)
        else:
            outputs = run_steps(session, run.feeds, expected.facts.states, model, what)
        agreeing, differing = _until_different(
            compare_outputs(
                own,
                wanted,
                tolerance,
                model,
                reference_name,
                expected,
                _place(run, number),
                only_target,
                candidates,
                what,
            )
            for number, (own, (wanted, candidates)) in enumerate(
                zip(outputs, run.steps, strict=True)
            )
        )
        compared += agreeing
        if differing:
            differing, distance = _explained(differing, run, emulator, explain)
            # The app may never have unusual inputs; but if the number format does not explain the EP's error
            # there, the EP may be wrong elsewhere too.
            if run.usual or (emulator is not None and emulator.level(run).margin >= SENSITIVE):
                return ComparisonResult(differing, tuple(warnings), tuple(ran), distance)
            warnings.append(_warning(differing))
            continue
        if emulator is None or gap is None:
            continue
        of_outputs = [(a.margin, a.output) for a in agreeing if a.margin is not None]
        margin, output = min(of_outputs, default=(math.inf, ""))
        levels.append(Level(run, output, margin, margin + tolerance.of(output).snr, ran=True))
        emulated = emulator.level(run).margin
        gap = max(gap, min(emulated, _reachable(emulator)) - margin)
        is_longest = run is longest and len(run.feeds) > 1
        is_worst = (
            not is_longest and run is not expected.runs[0] and model.validate.inputs in SYNTHETIC
        )
        is_better = emulated < SENSITIVE <= margin
        if is_worst and margin >= emulated - GAIN and not is_better:
            # The emulation is right for the worst sample; the others are nearer, and simulators are slow.
            break
    if emulator is not None:
        emulator.correct(levels)
    return ComparisonResult(worst_agreements(compared), tuple(warnings), tuple(ran), gap)


@dataclass(frozen=True)
class ComparisonResult:
    """The worst agreement of each output, or those of the step that differs; disagreements on inputs that may
    never be so large; and the names of the samples. ``gap``: as in `Validation`, as far as it counts.
    """

    agreements: tuple[Agreement, ...]
    warnings: tuple[str, ...]
    samples: tuple[str, ...]
    gap: float | None


def refuse_differences(agreements: Iterable[Agreement]) -> None:
    """Raise RefusedError if some of the ``agreements``, of a form that a worker made, differ."""
    if problems := differences(agreements):
        raise RefusedError(*problems)


def _reachable(emulator: Emulator) -> float:
    """Decibels above which exact kernels gain nothing: it agrees, or the format leaves other samples less."""
    return SENSITIVE + GAIN if emulator.margin >= SENSITIVE else SENSITIVE


def _until_different(
    steps: Iterable[list[Agreement]],
) -> tuple[list[Agreement], tuple[Agreement, ...]]:
    """The agreements of the ``steps`` before the first one with a difference, and those of that one."""
    agreeing: list[Agreement] = []
    for agreements in steps:
        if any(agreement.differs for agreement in agreements):
            return agreeing, tuple(agreements)
        agreeing += agreements
    return agreeing, ()


def _explained(
    agreements: tuple[Agreement, ...],
    run: ReferenceRun,
    emulator: Emulator | None,
    explain: Callable[[ReferenceRun], str] | None,
) -> tuple[tuple[Agreement, ...], float | None]:
    """``agreements`` of ``run`` with the first diverging node, if that is known, in the reason of the first
    difference; and the gap, as in `Validation`.
    """
    gap, first = None, next(agreement for agreement in agreements if agreement.differs)
    if emulator is not None:
        margins = (a.margin for a in agreements if a.differs and a.margin is not None)
        margin = min(margins, default=NOTHING)
        distance = emulator.level(run).margin - margin
        # None if the emulation is equal: a reply cannot contain infinity.
        gap = max(0.0, distance) if distance < math.inf else None
        text = emulator.explanation(run, margin)
    else:
        text = explain(run) if explain else ""
    explained = replace(first, reason=f"{first.reason}\n{text}" if text else first.reason)
    return tuple(explained if a is first else a for a in agreements), gap


def _warning(agreements: Iterable[Agreement]) -> str:
    first, *others = (problem.message.splitlines()[0] for problem in differences(agreements))
    verb = "does" if len(others) == 1 else "do"
    more = f" So {verb} {count(len(others), 'other output')}." if others else ""
    return f"{first}{more} This matters only if the app can have such inputs."


def _place(run: ReferenceRun, number: int) -> str:
    if len(run.feeds) > 1:
        return f" in step {number + 1} of {run.name.replace(' steps', '', 1)}, with its own states"
    return "" if run.name in ("random", "given") else f" for the sample {run.name!r}"


def compare_outputs(
    outputs: Arrays,
    wanted: Arrays,
    tolerance: Tolerance,
    model: Model,
    reference_name: str,
    expected: Reference | None = None,
    place: str = "",
    only_target: str | None = None,
    candidates: Arrays = MappingProxyType({}),
    what: str = "the compiled model",
) -> list[Agreement]:
    """Compare ``outputs`` with ``wanted``, which messages call ``reference_name`` ("the CPU's").

    ``expected``: the reference that contains ``wanted``, and ``place`` where in it, for messages;
    ``only_target`` and ``what`` as in `compare_runs`; ``candidates``: see `ReferenceRun`.
    """
    facts = expected.facts if expected else Facts()
    outputs = {name: array for name, array in outputs.items() if name not in facts.random}
    if gaps := not_finite(outputs, {**candidates, **wanted}):
        return gaps
    agreements = [
        Agreement(name, 0.0, None, status=AgreementStatus.RANDOM, reason="it is random")
        for name in facts.random
    ]
    selected = select(facts.selections, outputs, wanted, candidates, tolerance.unit)
    for name, output in outputs.items():
        if name not in selected.wanted:
            continue
        if (reshaped := other_shape(name, output, selected.wanted[name])) is not None:
            agreements.append(reshaped)
            continue
        compared = compare(
            name,
            output,
            selected.wanted[name],
            tolerance.of(name),
            elsewhere=expected.elsewhere(name) if expected else None,
            nature=facts.natures.get(name, "any"),
            quantization_step=facts.quantization_steps.get(name, 0.0),
            rows=selected.rows.get(name),
            is_state=name in facts.states.values(),
        )
        agreement = compared.agreement
        if compared.excesses:
            agreement = _differing(compared, model, reference_name, place, facts, only_target, what)
        elif reason := facts.inconclusive.get(name):
            agreement = replace(agreement, status=AgreementStatus.INCONCLUSIVE, reason=reason)
        agreements.append(agreement)
    return agreements


def _differing(
    compared: Comparison,
    model: Model,
    reference_name: str,
    place: str,
    facts: Facts,
    only_target: str | None,
    what: str,
) -> Agreement:
    """The agreement of ``compared``, which is beyond a limit: how, and what to do."""
    agreement = compared.agreement
    # An index has no difference: only its score differs.
    largest = f"; the largest difference is {agreement.max_abs:.3g}" if agreement.max_abs else ""
    message = (
        f"the output {agreement.output!r} differs from {reference_name}{place}: "
        f"{' and '.join(compared.excesses)}{largest}."
    )
    hint, setting = _advice(compared, model, facts, only_target, what)
    return replace(
        agreement,
        status=AgreementStatus.DIFFERS,
        reason=message,
        hint=hint,
        settings=() if setting is None else (setting,),
    )


def _advice(
    compared: Comparison, model: Model, facts: Facts, only_target: str | None, what: str
) -> tuple[str, Setting | None]:
    """What to do about an output that is beyond a limit, and what to set."""
    key = model.key / "validate"
    are_given = model.validate.inputs not in SYNTHETIC
    if facts.guessed and not are_given:
        names = ", ".join(map(repr, facts.guessed))
        hint = f"Nothing in the graph bounds {names}, which got values up to 255. Give real inputs:"
        return hint, Setting(key / "inputs", "samples.npz")
    if _is_wrong(compared):
        wrong = f"{what[0].upper()}{what[1:]} is wrong there"
        if are_given:
            advice = ": do not ship it for this target" if what == "the compiled model" else ""
            return f"{wrong}{advice}.", None
        hint = f"{wrong}. If the app never has such inputs, give its real ones:"
        return hint, Setting(key / "inputs", "samples.npz")
    allowed = {name: _rounded(name, limit) for name, limit in compared.needed.items()}
    limits: dict[str, Any] = {"outputs": {compared.agreement.output: allowed}}
    if only_target is not None:
        limits = {"targets": {only_target: limits}}
    hint = "Find the cause, or allow more if that is acceptable (not tried: other inputs may need more):"
    return hint, Setting(key / "tolerance", limits)


def _is_wrong(compared: Comparison) -> bool:
    """Whether an output differs so much that no limit should allow it."""
    needed, worst = compared.needed, compared.agreement.worst
    if "snr" in needed:
        slice_is_wrong = worst is not None and worst.snr < _WRONG_SLICE
        return needed["snr"] < _WRONG or slice_is_wrong
    return needed.get("cosine", 1.0) <= 0


def _rounded(name: str, limit: float) -> float:
    """``limit``, rounded to few digits and never stricter."""
    if name != "atol":
        return math.floor(limit * 1000) / 1000
    exponent = math.floor(math.log10(limit))
    # As decimal text: multiplying by powers of ten would add digits.
    return float(f"{math.ceil(limit / 10.0**exponent * 100) / 100:.2f}e{exponent}")
