"""How near a model is to its source for each sample, and which samples a target runs because of that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.comparison.runs import (
    Facts,
    ReferenceRun,
    with_branches,
    with_changes,
    with_telling,
)
from hatch_epcontext.worker.results import FEW_SAMPLES, GAIN, NOTHING, SENSITIVE, Agreement

MAX_RARE = 1 / 8
"""The share of usual samples up to which wrong ones, or those near their limits, are rare. Measured with
float16: none, or all, of the samples of models with layers are wrong; 6 % where a hyperbolic cosine is large
for a few; 42 % where a logarithm is of powers that the format lacks.
"""

WORTH_RUNNING = 45.0
"""Decibels of an emulated sample above which a run on the target shows nothing more."""

_MOST_FAR = 3
"""The most samples of floats far from the ordinary that the target runs."""

_MOST_LARGER = 2
"""The most samples of larger floats of the same inputs that the target runs: it may be more exact than the
emulation.
"""

_MOST_RARE = 2
"""The most rare samples that the target runs: each is a warning."""

_SLOW, _SLOW_SEQUENCE = 0.5, 4.0
"""Seconds of a sample, and of the longest sequence of frames, on a simulator from which it runs as few as
possible.
"""

_WORST = 3
"""The number of worst samples, of different natures, that the target runs."""


@dataclass(frozen=True)
class Level:
    """How near ``run`` is to the source's: of its outputs the ``nearest`` to the limits, if any.

    ``limit``: the signal-to-noise ratio of its limits. ``ran``: whether the target ran it. ``rare``: whether
    it is one of few usual samples that the number format makes wrong. ``wrong``: the outputs that differ.
    """

    run: ReferenceRun
    nearest: Agreement | None
    limit: float
    ran: bool = False
    rare: bool = False
    wrong: frozenset[str] = frozenset()

    @staticmethod
    def of(
        run: ReferenceRun, agreements: Iterable[Agreement], facts: Facts, limits: Tolerance
    ) -> Level:
        """The level of ``run`` with these ``agreements`` of outputs with the ``limits``."""
        agreements = [*agreements]
        nearest = min(agreements, key=lambda agreement: agreement.above, default=None)
        name = "" if nearest is None else nearest.output
        wrong = frozenset(agreement.output for agreement in agreements if agreement.above < 0)
        return Level(run, nearest, facts.of(name).within(limits.of(name)).snr, wrong=wrong)

    @property
    def margin(self) -> float:
        """The decibels above the limits, negative below them; infinite if all outputs are equal."""
        return math.inf if self.nearest is None else self.nearest.above

    @property
    def snr(self) -> float:
        """The signal-to-noise ratio of a whole output with that margin."""
        return self.margin if self.margin == NOTHING else self.margin + self.limit

    @property
    def spare(self) -> float:
        """``margin``; infinite for inputs that an app may never have, which only warn."""
        return self.margin if self.counts else math.inf

    @property
    def counts(self) -> bool:
        """Whether an app has such inputs."""
        return self.run.usual and not self.rare


class Levels(tuple[Level, ...]):
    """The levels of all samples of a reference."""

    __slots__ = ()

    @property
    def ordinary(self) -> Levels:
        """Those without samples far from the ordinary, which say nothing of others."""
        return Levels(level for level in self if not level.run.far)

    @property
    def worst(self) -> Level:
        """The level of the sample that is nearest to the limits."""
        return min(self, key=lambda level: (level.spare, level.margin))

    @property
    def margin(self) -> float:
        """The smallest `Level.spare` of a sample, in decibels."""
        return max(min(level.spare for level in self), NOTHING)

    def of(self, run: ReferenceRun) -> Level:
        """The level of ``run``, one of the reference's."""
        return next(level for level in self if level.run is run)

    def corrected(self, ran: Sequence[Level]) -> Levels:
        """These, or those that samples had on the target. If the worst samples of different natures are right
        there, no other sample counts.
        """
        suffering = [level for level in ran if self.of(level.run).margin < SENSITIVE]
        if suffering and all(level.margin >= SENSITIVE for level in suffering):
            return Levels(ran)
        by_name = {level.run.name: level for level in ran}
        return Levels(by_name.get(level.run.name, level) for level in self)

    def are_seldom_near(self, corrected: Levels) -> bool:
        """Whether few samples, not the first, are near their limits, ``corrected`` by what the target ran,
        and it is no worse than the emulation: nothing speaks against the others.
        """
        near = [level for level in corrected if level.run.usual and level.margin < SENSITIVE]
        return len(near) <= MAX_RARE * sum(level.run.usual for level in self) and all(
            level.run is not self[0].run and level.margin >= self.of(level.run).margin - GAIN
            for level in near
        )


def choose(
    levels: Levels,
    deciders: Sequence[str] = (),
    *,
    is_optimistic: bool = False,
    is_brief: bool = False,
    seconds: float = 0.0,
) -> list[ReferenceRun]:
    """The first sample, and those that may differ on the target: for large models only the worst of them, and
    if it ``is_brief``, not the first.

    ``is_optimistic``: whether the emulation cannot show all that the target computes less exactly.
    ``deciders``: as in `Facts`. ``seconds``: that a simulator runs one frame.
    """
    every, levels = levels, levels.ordinary
    first, *others = levels
    chosen = [first.run]
    sequences = [level for level in others if len(level.run.frames) > 1]
    is_slow = seconds >= _SLOW
    if sequences:
        longest = max((level.run for level in sequences), key=lambda run: len(run.frames))
        is_slow = seconds * len(longest.frames) >= _SLOW_SEQUENCE
        # The emulation does not show what kernels add to the states.
        chosen.append(_worst_short(sequences) if is_slow else longest)
    natures = {run.nature for run in chosen}
    # Each frame of a recurrent model is a run, and simulators run large models for long.
    is_large = not sequences and (is_slow or len(levels) <= FEW_SAMPLES)
    most = len(chosen)
    if not (sequences and is_slow):
        most += 1 if is_large or sequences else _WORST
    # Unusual samples come last: they only warn.
    for level in sorted(others, key=lambda level: (not level.counts, level.margin)):
        worth = level.snr < WORTH_RUNNING or is_optimistic
        if len(chosen) == most:
            break
        if worth and level.run.nature not in natures:
            natures.add(level.run.nature)
            chosen.append(level.run)
    if is_large:
        chosen = sorted(chosen, key=lambda run: levels.of(run).margin)[: 1 if is_brief else 2]
    runs = [level.run for level in every]
    far = [*_rare(every, is_large=is_large), *_far(every, is_large=is_large)]
    right = [run for run in far if every.of(run).margin >= 0]
    changing = with_changes(chosen, runs, right)
    telling = with_branches(with_telling(changing, runs), runs, deciders)
    return [*telling, *(run for run in far if all(run is not other for other in telling))]


def _worst_short(sequences: Sequence[Level]) -> ReferenceRun:
    """The worst one of the shortest of ``sequences``, if possible a usual one."""
    shortest = min(len(level.run.frames) for level in sequences)
    short = (level for level in sequences if len(level.run.frames) == shortest)
    return min(short, key=lambda level: (level.spare, level.margin)).run


def _rare(levels: Levels, *, is_large: bool) -> list[ReferenceRun]:
    """The worst of the rare ones."""
    rare = sorted((level for level in levels if level.rare), key=lambda level: level.margin)
    return [level.run for level in rare[: 1 if is_large else _MOST_RARE]]


def _far(levels: Levels, *, is_large: bool) -> list[ReferenceRun]:
    """Those far from the ordinary that may differ on the target, and of floats the worst one: the emulation
    shows nothing of integers, nor all that kernels do to large values.
    """
    own = [level for level in levels if level.run.far and not level.run.changes]
    far = sorted(own, key=lambda level: level.margin)
    wrong = [level.run for level in own if level.margin < 0]
    worst_first = [level.run for level in far if level.margin < 0]
    # Of numbers that only become larger, the smallest that differ say where that begins; the first beside an
    # offset have the largest differences.
    larger = [run for run in wrong if run.is_larger]
    offsets = [run for run in wrong if run.has_offset]
    differing = [
        *_smallest(larger),
        *offsets,
        *(run for run in worst_first if not (run.is_larger or run.has_offset)),
    ]
    if is_large:
        return differing[:1]
    others = [level.run for level in far if level.margin >= 0]
    whole = [run for run in others if is_whole(run)]
    # The emulation does not show how inexact a sine of many turns is.
    floats = [run for run in others if not is_whole(run) and (not differing or run.is_counted)]
    return [*differing[:_MOST_FAR], *floats[:1], *whole]


def _smallest(larger: Iterable[ReferenceRun]) -> list[ReferenceRun]:
    """The first of the ``larger`` ones, and of those without the inputs that others have."""
    first: list[ReferenceRun] = []
    for run in larger:
        if sum(other.larger <= run.larger for other in first) < _MOST_LARGER:
            first.append(run)
    return first


def is_whole(run: ReferenceRun) -> bool:
    """Whether ``run`` has values far from the ordinary, all of them integers that are not only larger."""
    whole = bool(run.far) and all(run.feeds[name].dtype.kind in "iu" for name in run.far)
    return whole and not run.is_larger
