"""What differs from the source and what to do about it, in words: problems, with settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnxruntime as ort

from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.config.tables import LimitsTable, ToleranceTable
from hatch_epcontext.errors import Advice, Kind, Problem, RefusedError, Setting
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.text import aligned, count
from hatch_epcontext.worker.comparison.compare import Difference, compare_runs
from hatch_epcontext.worker.comparison.runs import Facts, Reference
from hatch_epcontext.worker.results import GAIN, Agreement, AgreementStatus

SIMPLIFIED = Tolerance(snr=40, cosine=0.999)
"""A simplifier may change only the order of additions."""

_KINDS = {
    AgreementStatus.DIFFERS: Kind.OUTPUT_DIFFERS,
    AgreementStatus.NOT_FINITE: Kind.NOT_FINITE,
    AgreementStatus.OTHER_SHAPE: Kind.OUTPUT_SHAPE,
}

_ROWS = 5
"""The most rows of a table in a message."""


def simplified_tolerance(model: Model) -> Tolerance:
    """`SIMPLIFIED`, or what the configuration of ``model`` allows if that is more."""
    table = model.validate.tolerance or ToleranceTable()
    outputs = {output: _allowed(limits) for output, limits in table.outputs.items()}
    return replace(SIMPLIFIED, **_allowed(table), outputs=outputs)


def _allowed(limits: LimitsTable) -> dict[str, Any]:
    """The limits that are lower than those of `SIMPLIFIED`."""
    own = {"snr": SIMPLIFIED.snr, "cosine": SIMPLIFIED.cosine}
    return {name: limits.limits[name] for name in own if limits.limits.get(name, 1e9) < own[name]}


@dataclass(frozen=True)
class Subject:
    """What is compared, in messages: ``what``, made of ``model``, with the outputs of a ``reference``."""

    model: Model
    what: str = "the compiled model"
    reference: str = "the CPU's"


@dataclass(frozen=True)
class Explained:
    """The ``agreement`` of an output that differs, with the reason, its ``cause``, and what to do."""

    agreement: Agreement
    hint: str | None = None
    settings: tuple[Setting, ...] = ()
    cause: str = ""


def explain(
    difference: Difference, limits: Tolerance, subject: Subject, facts: Facts, cause: str = ""
) -> list[Explained]:
    """The outputs that differ, each with what to do. ``cause``: a sentence about the first one."""
    reason, explained = _where(difference, subject), list[Explained]()
    for agreement in (agreement for agreement in difference.agreements if agreement.differs):
        item = Explained(agreement)
        if agreement.status is AgreementStatus.DIFFERS:
            own = facts.of(agreement.output).within(limits.of(agreement.output))
            item = Explained(replace(agreement, reason=reason), *_advice(agreement, own, subject))
        explained.append(item if explained else replace(item, cause=cause))
    return explained


def problems_of(explained: Sequence[Explained]) -> tuple[Problem, ...]:
    """The problems of outputs: one of all that are beyond limits, the worst first."""
    of_limits = [i for i in explained if i.agreement.status is AgreementStatus.DIFFERS]
    problems = [_beyond_limits(of_limits)] if of_limits else []
    for item in (item for item in explained if item not in of_limits):
        message = "\n".join(filter(None, (item.agreement.reason, item.cause)))
        problems.append(Problem(_KINDS[item.agreement.status], "", message))
    return tuple(problems)


def _beyond_limits(explained: Sequence[Explained]) -> Problem:
    explained = sorted(explained, key=lambda item: item.agreement.above)
    agreements, more = [item.agreement for item in explained], len(explained) - 1
    others = f", and so {'does' if more == 1 else 'do'} {count(more, 'other output')}"
    rows = [
        (agreement.output, excess.measure, excess.value, excess.limit)
        for agreement in agreements
        for excess in agreement.excesses
    ]
    first, table = agreements[0], [f"  {line}" for line in aligned(rows[:_ROWS])]
    if len(rows) > _ROWS:
        table.append(f"  and {len(rows) - _ROWS} more")
    lines = [f"the output {first.output!r} {first.reason}{others if more else ''}:", *table]
    lines += [item.cause for item in explained if item.cause]
    hint, settings = explained[0].hint, explained[0].settings
    if _limits_in(settings):
        limits = {
            item.agreement.output: own
            for item in explained
            if (own := _limits_in(item.settings).get(item.agreement.output))
        }
        settings = _with_limits(settings[0], limits)
    return Problem(Kind.OUTPUT_DIFFERS, "", "\n".join(lines), hint, settings=settings)


def _limits_in(settings: Iterable[Setting]) -> dict[str, dict[str, float]]:
    """The limits of outputs that one of the ``settings`` allows, if any."""
    values = (setting.value for setting in settings if isinstance(setting.value, dict))
    return next((value["outputs"] for value in values), {})


def check_runs(
    session: ort.InferenceSession, reference: Reference, limits: Tolerance, subject: Subject
) -> None:
    """Raise RefusedError if ``session`` differs in one of the runs for a target.

    All are compared: what the message advises is enough for all of them.
    """
    worst: dict[str, Explained] = {}
    for run in (run for run in reference.runs if run.on_target):
        if difference := compare_runs(session, reference, limits, [run]).difference:
            for item in explain(difference, limits, subject, reference.facts):
                output = item.agreement.output
                worst[output] = _worse(worst[output], item) if output in worst else item
    refuse([*worst.values()])


def refuse(explained: Sequence[Explained]) -> None:
    """Raise RefusedError if there are outputs that differ, of a model that a worker made."""
    RefusedError.check(problems_of(explained))


def _worse(one: Explained, other: Explained) -> Explained:
    """The worse difference of an output, with the limits that both need."""
    first, second = sorted((one, other), key=lambda item: item.agreement.above)
    both = [_limits_in(item.settings) for item in (first, second)]
    if not all(both):
        return first
    output, limits = one.agreement.output, dict[str, float]()
    for name, limit in (item for own in both for item in own[output].items()):
        loosest = max if name == "atol" else min
        limits[name] = loosest(limit, limits.get(name, limit))
    return replace(first, settings=_with_limits(first.settings[0], {output: limits}))


def _with_limits(
    setting: Setting, limits: Mapping[str, Mapping[str, float]]
) -> tuple[Setting, ...]:
    """The ``setting`` of a table of limits, with these ``limits`` of outputs."""
    table: Any = setting.value
    return (replace(setting, value={**table, "outputs": {**table["outputs"], **limits}}),)


def warning(difference: Difference, values: str, cause: str = "") -> str:
    """What differs for inputs with these ``values``, which an app may never have.

    ``cause``: a sentence about the first node that is wrong, if that is known.
    """
    first, *others = (agreement for agreement in difference.agreements if agreement.differs)
    excess = first.excesses[0] if first.excesses else None
    text = f"{excess.measure} {excess.value} ({excess.limit})" if excess else first.reason
    more = f", and {count(len(others), 'other output')}" if others else ""
    sentence = f"{values} may give wrong answers: of {first.output!r}{more}, {text}"
    return f"{sentence}. {cause}" if cause else sentence


def _where(difference: Difference, subject: Subject) -> str:
    """From what the outputs differ, and in which sample."""
    run, text = difference.run, f"differs from {subject.reference}"
    if len(run.frames) > 1:
        name = run.name.replace(" frames", "", 1)
        return f"{text} in frame {difference.number + 1} of {name}, with its own states"
    return text if run.name in ("random", "given") else f"{text} for the sample {run.name!r}"


def _advice(agreement: Agreement, limits: Tolerance, subject: Subject) -> Advice:
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
    is_wrong = needed.get("cosine", 1) <= 0
    if "snr" in needed:
        worst = math.inf if agreement.worst_snr is None else agreement.worst_snr
        is_wrong = min(needed["snr"], worst) < GAIN
    if is_wrong:
        wrong = f"{what[0].upper()}{what[1:]} is wrong there"
        if are_given:
            advice = ": do not ship it for this target" if what == "the compiled model" else ""
            return f"{wrong}{advice}.", ()
        hint = f"{wrong}. If the app never has such inputs, give its real ones."
        return hint, (Setting(key / "inputs", "samples.npz"),)
    hint = "Find the cause, or allow more if that is acceptable (not tried: other inputs may need more)."
    # Instead of the whole table, whose other limits stay.
    table = validate.tolerance or ToleranceTable()
    outputs = {output: {**own.limits} for output, own in table.outputs.items()}
    outputs[agreement.output] = {**outputs.get(agreement.output, {}), **needed}
    return hint, (Setting(key / "tolerance", {**table.limits, "outputs": outputs}),)


def _floor(limit: float) -> float:
    """``limit``, rounded to a few digits and never stricter."""
    return math.floor(limit * 1000) / 1000
