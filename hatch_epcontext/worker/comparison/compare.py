"""Check the outputs of a model against its reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import onnxruntime as ort

from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.errors import BuildError, Kind, ModelError, Problem, RefusedError, Setting
from hatch_epcontext.graph.arrays import Arrays
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.text import count
from hatch_epcontext.worker.comparison.emulation import Emulator, Level
from hatch_epcontext.worker.comparison.measures import Comparison, compare
from hatch_epcontext.worker.comparison.runs import Facts, Reference, ReferenceRun, run_steps
from hatch_epcontext.worker.comparison.selections import select
from hatch_epcontext.worker.results import (
    GAIN,
    NOTHING,
    SENSITIVE,
    Agreement,
    AgreementStatus,
    worst_agreements,
)
from hatch_epcontext.worker.tensors import refuse_not_finite

SIMPLIFIED = Tolerance(snr=40, cosine=0.999)
"""A simplifier may change only the order of additions."""

_WRONG = 6.0
"""Signal-to-noise ratio in decibels below which no limit is suggested: the error is half of the signal."""

_WRONG_SLICE = 3.0
"""The same for a slice, such as all scores of one class."""


def check_runs(
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

    ``first``: its outputs for the first sample, if that was run already. ``only_target``: the target whose
    limits a hint should relax, if not those of all. ``emulator``: of its number format; the runs correct it.
    ``explain``: without an emulator, it names where the model begins to differ. Raises BuildError when an
    output has NaN or Inf where the reference has none, or exceeds the tolerance; ModelError when it takes
    too long.
    """
    found: list[Agreement] = []
    warnings: list[str] = []
    ran: list[str] = []
    levels: list[Level] = []
    gap = 0.0
    if runs is None:
        runs = [each for each in expected.runs if each.on_target]
    longest = max(runs, key=lambda each: len(each.feeds))
    for each in runs:
        ran.append(each.name)
        if first is not None and each is expected.runs[0]:
            outputs: Iterable[Arrays] = (first,)
        else:
            outputs = run_steps(session, each.feeds, expected.facts.states, model, what)
        before = len(found)
        try:
            for number, (own, (wanted, candidates)) in enumerate(
                zip(outputs, each.steps, strict=True)
            ):
                place = _place(each, number)
                found += check_outputs(
                    own,
                    wanted,
                    tolerance,
                    model,
                    reference_name,
                    expected,
                    place,
                    only_target,
                    candidates,
                    what,
                )
        except ModelError:
            raise
        except BuildError as error:
            error = _explained(error, each, emulator, explain)
            # The app may never have unusual inputs; but if the number format does not explain the EP's error
            # there, the EP may be wrong elsewhere too.
            if each.usual or (emulator is not None and emulator.level(each).margin >= SENSITIVE):
                raise error from None
            warnings.append(_warning(error))
            continue
        if emulator is None:
            continue
        of_outputs = [(a.margin, a.output) for a in found[before:] if a.margin is not None]
        margin, output = min(of_outputs, default=(math.inf, ""))
        levels.append(Level(each, output, margin, margin + tolerance.of(output).snr, ran=True))
        emulated = emulator.level(each).margin
        gap = max(gap, min(emulated, _reachable(emulator)) - margin)
        is_longest = each is longest and len(each.feeds) > 1
        is_worst = (
            not is_longest and each is not expected.runs[0] and model.validate.inputs in SYNTHETIC
        )
        is_better = emulated < SENSITIVE <= margin
        if is_worst and margin >= emulated - GAIN and not is_better:
            # The emulation is right for the worst sample; the others are nearer, and simulators are slow.
            break
    if emulator is not None:
        emulator.correct(levels)
    return ComparisonResult(worst_agreements(found), tuple(warnings), tuple(ran), gap)


@dataclass(frozen=True)
class ComparisonResult:
    """The worst agreement of each output, disagreements on inputs that may never be so large, and the names
    of the samples. ``gap``: the decibels by which a sample was worse than its emulation, as far as they
    count.
    """

    agreements: tuple[Agreement, ...]
    warnings: tuple[str, ...]
    samples: tuple[str, ...]
    gap: float


def _reachable(emulator: Emulator) -> float:
    """Decibels above which exact kernels gain nothing: it agrees, or the format leaves other samples less."""
    return SENSITIVE + GAIN if emulator.margin >= SENSITIVE else SENSITIVE


def _explained(
    error: BuildError,
    run: ReferenceRun,
    emulator: Emulator | None,
    explain: Callable[[ReferenceRun], str] | None,
) -> BuildError:
    """``error`` of ``run`` with the first diverging node after its first message, if that is known."""
    first, *others = error.problems
    gap = None
    if emulator is not None:
        margins = [each.margin for each in error.problems if each.margin is not None]
        margin = min(margins, default=NOTHING)
        distance = emulator.level(run).margin - margin
        # None if the emulation is equal: a reply cannot contain infinity.
        gap = max(0.0, distance) if distance < math.inf else None
        text = emulator.explanation(run, margin)
    else:
        text = explain(run) if explain else ""
    message = f"{first.message}\n{text}" if text else first.message
    return type(error)(replace(first, message=message, gap=gap), *others)


def _warning(error: BuildError) -> str:
    first, *others = (problem.message.splitlines()[0] for problem in error.problems)
    verb = "does" if len(others) == 1 else "do"
    more = f" So {verb} {count(len(others), 'other output')}." if others else ""
    return f"{first}{more} This matters only if the app can have such inputs."


def _place(each: ReferenceRun, number: int) -> str:
    if len(each.feeds) > 1:
        return f" in step {number + 1} of {each.name.replace(' steps', '', 1)}, with its own states"
    return "" if each.name in ("random", "given") else f" for the sample {each.name!r}"


def check_outputs(
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
    ``only_target`` and ``what`` as in `check_runs`; ``candidates``: see `ReferenceRun`. Raises BuildError
    when an output has NaN or Inf where ``wanted`` has none, or exceeds the tolerance.
    """
    facts = expected.facts if expected else Facts()
    outputs = {name: array for name, array in outputs.items() if name not in facts.random}
    refuse_not_finite(outputs, {**candidates, **wanted})
    agreements = [
        Agreement(name, 0.0, None, status=AgreementStatus.RANDOM, reason="it is random")
        for name in facts.random
    ]
    problems = []
    selected = select(facts.selections, outputs, wanted, candidates, tolerance.unit)
    for name, output in outputs.items():
        if name not in selected.wanted:
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
        if reason := facts.inconclusive.get(name):
            agreement = replace(agreement, status=AgreementStatus.INCONCLUSIVE, reason=reason)
        agreements.append(agreement)
        if compared.excesses:
            problem = _differs(compared, model, reference_name, place, facts, only_target, what)
            problems.append(replace(problem, margin=max(compared.margin, NOTHING)))
    if problems:
        raise RefusedError(*problems)
    return agreements


def _differs(
    compared: Comparison,
    model: Model,
    reference_name: str,
    place: str,
    facts: Facts,
    only_target: str | None,
    what: str,
) -> Problem:
    agreement = compared.agreement
    # An index has no difference: only its score differs.
    largest = f"; the largest difference is {agreement.max_abs:.3g}" if agreement.max_abs else ""
    message = (
        f"the output {agreement.output!r} differs from {reference_name}{place}: "
        f"{' and '.join(compared.excesses)}{largest}."
    )
    key = model.key / "validate"
    are_given = model.validate.inputs not in SYNTHETIC
    if facts.guessed and not are_given:
        names = ", ".join(map(repr, facts.guessed))
        return Problem(
            Kind.OUTPUT_DIFFERS,
            "",
            message,
            f"Nothing in the graph bounds {names}, which got values up to 255. Give real inputs:",
            settings=(Setting(key / "inputs", "samples.npz"),),
        )
    if _is_wrong(compared):
        wrong = f"{what[0].upper()}{what[1:]} is wrong there"
        if are_given:
            advice = ": do not ship it for this target" if what == "the compiled model" else ""
            return Problem(Kind.OUTPUT_DIFFERS, "", message, f"{wrong}{advice}.")
        hint = f"{wrong}. If the app never has such inputs, give its real ones:"
        return Problem(
            Kind.OUTPUT_DIFFERS,
            "",
            message,
            hint,
            settings=(Setting(key / "inputs", "samples.npz"),),
        )
    allowed = {name: _rounded(name, limit) for name, limit in compared.needed.items()}
    limits: dict[str, Any] = {"outputs": {agreement.output: allowed}}
    if only_target is not None:
        limits = {"targets": {only_target: limits}}
    hint = "Find the cause, or allow more if that is acceptable (not tried: other inputs may need more):"
    return Problem(
        Kind.OUTPUT_DIFFERS, "", message, hint, settings=(Setting(key / "tolerance", limits),)
    )


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
