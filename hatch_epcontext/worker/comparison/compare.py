"""Compare the outputs of a model with its reference in several runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import onnxruntime as ort

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.comparison.emulation import Decisions
from hatch_epcontext.worker.comparison.levels import Level, Levels
from hatch_epcontext.worker.comparison.measures import worst_agreements
from hatch_epcontext.worker.comparison.runs import Reference, ReferenceRun, Side, sides, tells
from hatch_epcontext.worker.results import (
    GAIN,
    NOTHING,
    SENSITIVE,
    Agreement,
    AgreementStatus,
    Nearness,
)


@dataclass(frozen=True)
class Difference:
    """The ``agreements`` of all outputs, of which one differs, in the frame ``number`` of ``run``."""

    agreements: tuple[Agreement, ...]
    run: ReferenceRun
    number: int

    @property
    def margin(self) -> float:
        """The smallest margin of an output that differs, in decibels."""
        margins = (a.margin for a in self.agreements if a.differs and a.margin is not None)
        return min(margins, default=NOTHING)

    def beside(self, emulated: Level) -> Difference:
        """This difference with its gap to the ``emulated`` run."""
        first = next(agreement for agreement in self.agreements if agreement.differs)
        # None if the emulation is equal: a reply cannot contain infinity.
        gap = max(0.0, emulated.margin - self.margin) if emulated.margin < math.inf else None
        beside = (replace(a, gap=gap) if a is first else a for a in self.agreements)
        return replace(self, agreements=tuple(beside))


@dataclass(frozen=True)
class Comparison:
    """The worst agreement of each output in the ``samples`` that were run, or those of the ``difference``.

    ``unusual``: differences for inputs that an app may never have; ``undecided``: those that say nothing of
    others; ``agreed``: the runs that agree, and ``levels``: those of usual ones. ``runs``: how often the
    target ran; ``beaten``: whether the other runs cannot make it worth more than what is to be beaten.
    """

    agreements: tuple[Agreement, ...] = ()
    samples: tuple[str, ...] = ()
    difference: Difference | None = None
    unusual: tuple[Difference, ...] = ()
    undecided: tuple[Difference, ...] = ()
    levels: tuple[Level, ...] = ()
    agreed: tuple[ReferenceRun, ...] = ()
    runs: int = 0
    beaten: bool = False

    @property
    def worst(self) -> str:
        """The name of the usual sample that is nearest to the limits; empty if none agrees."""
        worst = min(self.levels, key=lambda level: level.margin, default=None)
        return "" if worst is None else worst.run.name

    @property
    def with_exceptions_only(self) -> Comparison:
        """This, or with a difference if more usual runs are undecided than agree: these are no exceptions."""
        usual = [difference for difference in self.undecided if difference.run.usual]
        if len(usual) <= len(self.levels):
            return self
        return replace(self, difference=usual[0], agreements=usual[0].agreements)


@dataclass(frozen=True)
class Baselines:
    """What a model is compared with besides its source: how near it is ``emulated`` in its number format,
    and which ``decisions`` its rounding flips; and how near the artifact is that it is ``to_beat``.
    """

    emulated: Levels | None = None
    to_beat: Nearness | None = None
    decisions: Decisions | None = None

    def flip(self, difference: Difference) -> bool:
        """Whether rounding flips what the source decides in the run of ``difference``."""
        differing = [a.output for a in difference.agreements if a.differs]
        return self.decisions is not None and self.decisions.flip(difference.run, differing)

    def have_won(
        self, before: Sequence[Agreement], run: ReferenceRun, agreeing: Sequence[Agreement]
    ) -> bool:
        """Whether no more frames can make results worth more than what is to be beaten, after those of other
        runs ``before`` and the ``agreeing`` ones of ``run``: the margin only falls, and the gap only grows.
        """
        if self.to_beat is None or not run.usual:
            return False
        nearness = nearness_of([*before, *_with_gap(agreeing, run, self.emulated)])
        return not nearness.is_worth(self.to_beat)


_NONE = Baselines()


def compare_runs(
    session: ort.InferenceSession,
    reference: Reference,
    limits: Tolerance,
    runs: Sequence[ReferenceRun] | None = None,
    baselines: Baselines = _NONE,
    report: Callable[[str], None] | None = None,
) -> Comparison:
    """Run ``session`` on ``runs`` of the ``reference``, by default on those for a target.

    It ends with the first difference that counts, or with the first frame after which it is not worth more
    than what is to be beaten, whose worst sample comes first. Of larger floats ``runs`` has the smallest
    first, and of those beside an offset the largest differences. If it is emulated: once two runs are
    compared, and one of chosen ones is as near as that, the others are not run. ``report`` gets the sample
    before each run.
    """
    emulated, to_beat = baselines.emulated, baselines.to_beat
    result, compared, taken = Comparison(), list[Agreement](), set[Side]()
    has_own_runs, is_enough = runs is not None, False
    if runs is None:
        runs = [run for run in reference.runs if run.on_target]
    if to_beat is not None:
        runs = sorted(runs, key=lambda run: run.name != to_beat.sample)
    for run in runs:
        new = sides(run, reference.facts.deciders) - taken
        is_rare = emulated is not None and emulated.of(run).rare
        if not (new or is_rare) and _adds_nothing(run, result, is_enough=is_enough):
            continue
        taken |= new
        names = (*result.samples, run.name)
        if report is not None:
            report(f"for the sample {run.name!r}, {len(names)} of {len(runs)}")
        frames = _compared(session, reference, run, limits)
        one = _compare_run(frames, run, partial(baselines.have_won, compared, run))
        result = replace(result, samples=names, runs=result.runs + one.frames)
        if (difference := one.difference) is not None:
            compared += one.agreeing
            if emulated is not None:
                difference = difference.beside(emulated.of(run))
            if baselines.flip(difference):
                result = replace(result, undecided=(*result.undecided, difference))
                continue
            if _counts(run, emulated):
                return replace(result, difference=difference, agreements=difference.agreements)
            result = replace(result, unusual=(*result.unusual, difference))
            continue
        result = replace(result, agreed=(*result.agreed, run))
        if not run.usual or is_rare:
            # It agrees: how nearly says nothing of usual values.
            continue
        compared += _with_gap(one.agreeing, run, emulated)
        level = replace(Level.of(run, one.agreeing, reference.facts, limits), ran=True)
        result = replace(result, levels=(*result.levels, level))
        if emulated is not None and has_own_runs and run is not reference.runs[0]:
            # The emulation of the runs that are left is nearer, and simulators are slow.
            is_enough |= _is_as_emulated(level, emulated, runs)
        if one.beaten:
            return replace(result, agreements=worst_agreements(compared), beaten=True)
    result = replace(result, agreements=worst_agreements(compared))
    return result.with_exceptions_only


def _adds_nothing(run: ReferenceRun, result: Comparison, *, is_enough: bool) -> bool:
    """Whether ``run``, which takes no new branch, may be left out after those of ``result``; ``is_enough``:
    one of these is as near as its emulation.
    """
    if run.far:
        return _is_known(run, result)
    return is_enough and len(result.samples) > 1


def _counts(run: ReferenceRun, emulated: Levels | None) -> bool:
    """Whether a difference for ``run`` counts: for usual inputs, or if the number format does not explain it,
    so that the EP may be wrong elsewhere too.
    """
    if emulated is None:
        return run.usual
    level = emulated.of(run)
    return level.counts or (level.margin >= SENSITIVE and not run.far)


def concluded(compared: Comparison, reference: Reference, emulated: Levels) -> Comparison:
    """``compared``; outputs that agree are inconclusive if they are the same in all runs that are right."""
    right = [*(level.run for level in emulated if not level.run.far), *compared.agreed]
    reason = "it changes only for inputs that are rounded too coarsely"
    agreements = (
        replace(agreement, status=AgreementStatus.INCONCLUSIVE, reason=reason)
        if agreement.status is AgreementStatus.AGREES
        and not tells(agreement.output, right)
        and tells(agreement.output, reference.runs)
        else agreement
        for agreement in compared.agreements
    )
    return replace(compared, agreements=tuple(agreements))


def _is_known(run: ReferenceRun, result: Comparison) -> bool:
    """Whether smaller numbers than those of ``run`` differ already, of no other inputs, or larger differences
    beside an offset: such runs come first.
    """
    others = [difference.run for difference in result.unusual]
    smaller = [other.larger for other in others if other.is_larger]
    return (run.is_larger and any(names <= run.larger for names in smaller)) or (
        run.has_offset and any(other.has_offset for other in others)
    )


def _with_gap(
    agreements: Sequence[Agreement], run: ReferenceRun, emulated: Levels | None
) -> Sequence[Agreement]:
    """``agreements`` in frames of ``run``; the nearest to the limits with its gap."""
    if emulated is None or not agreements:
        return agreements
    nearest = min(agreements, key=lambda agreement: agreement.above)
    gap = _gap(nearest, emulated, run)
    return [replace(a, gap=gap) if a is nearest else a for a in agreements]


def _gap(nearest: Agreement, emulated: Levels, run: ReferenceRun) -> float:
    """By how many dB exact kernels could be nearer than the ``nearest`` output for ``run``."""
    # Above that exact kernels gain nothing: it agrees, or the format leaves other samples less.
    reachable = SENSITIVE + GAIN if emulated.ordinary.margin >= SENSITIVE else SENSITIVE
    return max(0.0, min(emulated.of(run).margin, reachable) - nearest.above)


def nearness_of(agreements: Iterable[Agreement]) -> Nearness:
    """The smallest margin of ``agreements``, and their largest gap."""
    known = [*agreements]
    margin = min((a.margin for a in known if a.margin is not None), default=math.inf)
    return Nearness(margin, max((a.gap or 0.0 for a in known), default=0.0))


@dataclass(frozen=True)
class _ComparedRun:
    """The outputs of one run that are ``agreeing``, before a ``difference`` or until they are ``beaten``; and
    how many ``frames`` ran.
    """

    agreeing: Sequence[Agreement]
    frames: int
    difference: Difference | None = None
    beaten: bool = False


def _compare_run(
    frames: Iterable[list[Agreement]],
    run: ReferenceRun,
    is_beaten: Callable[[Sequence[Agreement]], bool],
) -> _ComparedRun:
    """Compare ``frames`` of ``run`` up to the first difference, or until it ``is_beaten``."""
    agreeing: list[Agreement] = []
    for number, agreements in enumerate(frames):
        if any(agreement.differs for agreement in agreements):
            difference = Difference(tuple(agreements), run, number)
            return _ComparedRun(agreeing, number + 1, difference)
        agreeing += agreements
        if is_beaten(agreeing):
            return _ComparedRun(agreeing, number + 1, beaten=True)
    return _ComparedRun(agreeing, len(run.frames))


def _compared(
    session: ort.InferenceSession, reference: Reference, run: ReferenceRun, limits: Tolerance
) -> Iterator[list[Agreement]]:
    """As `Reference.compare_run`; an EP may fail on values far from the ordinary, which is a difference."""
    try:
        yield from reference.compare_run(session, run, limits)
    except Exception as error:
        # ONNX Runtime raises many types.
        if not run.far:
            raise
        reason = f"the EP fails ({type(error).__name__})"
        output = next(iter(reference.facts.outputs), "")
        yield [Agreement(output, 0.0, None, status=AgreementStatus.DIFFERS, reason=reason)]


def _is_as_emulated(level: Level, emulated: Levels, runs: Sequence[ReferenceRun]) -> bool:
    """Whether the run of ``level``, one of the worst, is about as near as the emulation."""
    longest, margin = max(runs, key=lambda run: len(run.frames)), emulated.of(level.run).margin
    is_longest = level.run is longest and len(longest.frames) > 1
    is_better = margin < SENSITIVE <= level.margin
    return not is_longest and level.margin >= margin - GAIN and not is_better
