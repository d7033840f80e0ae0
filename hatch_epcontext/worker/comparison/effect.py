"""What an EP's number format makes of a model, in words."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from hatch_epcontext.graph.dtypes import is_float
from hatch_epcontext.graph.facts import NodeFacts
from hatch_epcontext.graph.number_format import NumberFormat
from hatch_epcontext.worker.comparison.diverging import Divergence, describe
from hatch_epcontext.worker.comparison.emulation import FormattedModel
from hatch_epcontext.worker.comparison.levels import Level, Levels
from hatch_epcontext.worker.comparison.runs import Reference
from hatch_epcontext.worker.results import GAIN, NOTHING, SENSITIVE, Agreement, Emulation

_FLAT = 0.1
"""The share of an output's values that may change by less than the distance of the format's numbers."""


def effect(divergence: Divergence, emulated: Levels, levels: Levels) -> Emulation:
    """The effect of the format on samples, as ``emulated``; ``levels``: corrected by what the target ran."""
    model, reference = divergence.model, divergence.reference
    worst, margin, reason, hurt = levels.worst, levels.margin, None, None
    if margin < SENSITIVE and not emulated.are_seldom_near(levels):
        reason = _reason(divergence, worst)
    elif hurt := next(divergence.hurt(levels), None) or _flat(reference, model.format):
        reason = hurt
    elif reference.facts.is_lasting:
        reason = (
            f"its states last, and what {model.format.name} rounds off adds up in them from frame to "
            "frame, unless the app resets them"
        )
    inexact = {node.op_type for node in model.computed} & model.format.inexact
    return Emulation(
        model.format.name,
        model.format.seen,
        len(emulated),
        nearest(worst, margin),
        reason,
        inexact=tuple(sorted(inexact)),
        in_format=hurt is not None or min(level.spare for level in emulated) < SENSITIVE,
    )


def cause_of(divergence: Divergence, level: Level, margin: float) -> tuple[str, NodeFacts | None]:
    """Why the target may differ by ``margin`` from the source for the sample of ``level``: a sentence about
    the first diverging node, and `Divergence.culprit`.
    """
    model, limit = divergence.model, min(SENSITIVE, margin + GAIN)
    culprit = divergence.culprit(level.run)
    is_wrong = level.margin < limit
    node = divergence.first(level.run) if is_wrong else divergence.overflow(level.run)
    if first := node or culprit:
        return f"The first diverging node: {describe(first)}.", culprit
    text = f"{_describe(level, model)}, so the EP computes an operator wrong"
    return f"{text}{_perhaps(model.optimistic)}.", None


def nearest(worst: Level, margin: float) -> Agreement | None:
    """The agreement of the output of ``worst`` that is nearest to its limits, with this ``margin``."""
    if worst.nearest is None:
        return None
    # JSON has no infinity.
    snr, finite = (number if number < math.inf else None for number in (worst.snr, margin))
    return replace(worst.nearest, snr=snr, margin=finite)


def _reason(divergence: Divergence, worst: Level) -> str:
    """Why the model is sensitive: what ``worst`` is, the node that is wrong there, and what else may be."""
    model, node = divergence.model, divergence.first(worst.run)
    # The emulation does not have the error of such a node.
    optimistic = model.optimistic if worst.ran else None
    # What is wrong at the same node says more than its error.
    is_repeated = node and optimistic and node.name == optimistic.name
    where = f": {describe(node)}" if node and not is_repeated else ""
    return f"{_describe(worst, model)}{where}{_perhaps(optimistic)}"


def _perhaps(node: NodeFacts | None) -> str:
    """The sentence, behind another one, that ``node`` may be the cause; empty without a node."""
    return f". Perhaps the cause is that {describe(node)}" if node else ""


def _describe(level: Level, model: FormattedModel) -> str:
    snr = f"{level.snr:.0f} dB" if level.snr > NOTHING else "no number"
    where = f"for the sample {level.run.name!r}"
    who = "the target" if level.ran else f"{model.format.name}, emulated on the CPU,"
    if level.nearest is None or level.snr == math.inf:
        return f"{who} changes nothing {where}"
    return f"{who} leaves {snr} of {level.nearest.output!r} {where}"


def _flat(reference: Reference, format_: NumberFormat) -> str | None:
    """An output that changes between inputs by less than the distance of ``format_``'s numbers, in words."""
    facts, usual = reference.facts, reference.usual
    if any(range_.is_open and range_.far for range_ in facts.ranges.values()):
        # Ordinary samples are not where such inputs have their values.
        return None
    for name, first in reference.runs[0].outputs[0].items():
        is_any = facts.of(name).nature == "any" and not facts.of(name).is_random
        outputs = (run.outputs[0][name] for run in usual)
        arrays = [array.ravel() for array in outputs if array.shape == first.shape]
        if not is_any or not is_float(first.dtype) or not arrays:
            continue
        values = np.array(arrays, np.float64)
        # Values with Inf have no spread.
        with np.errstate(invalid="ignore"):
            middle, changes = values.mean(axis=0), values.std(axis=0)
        smallest = np.where(middle == 0, 0.0, np.ldexp(format_.unit, np.frexp(middle)[1] - 1))
        flat = np.flatnonzero((changes > 0) & (changes < smallest))
        if flat.size > _FLAT * changes.size:
            index = flat[np.argmin((changes / smallest)[flat])]
            return (
                f"{name!r} changes by {changes[index]:.2g} around {middle[index]:.6g}, where "
                f"{format_.name}'s numbers are {smallest[index]:.2g} apart"
            )
    return None
