"""Several dummy inputs that a model accepts, of different natures, which give different values inside it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TypeVar

import numpy as np

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.dtypes import Arrays
from hatch_epcontext.graph.facts import Far, Range, TensorFacts
from hatch_epcontext.worker.results import FEW_SAMPLES
from hatch_epcontext.worker.synthetic import (
    FAINT,
    QUIET,
    RANDOM,
    Pattern,
    assumed_range,
    far_values,
    generated_inputs,
    generator,
    patterns,
)

FRAMES = 8
"""How often a recurrent model runs with its own states, one frame a run: errors grow from frame to frame."""

_MANY_FRAMES = 16
"""The same for one of several natures, for lasting states: an EP's errors in each frame add up."""

MAX_BYTES = 2**25
"""Bytes of one sample above which there is only the first: all are in memory at once."""

MAX_FAR, _SHARE_FAR = 10, 8
"""The most samples with values far from the ordinary, and one of how many is such a one."""

MANY, SOME = 80, 12
"""The most synthetic samples; and those of a model whose number format is not emulated on them."""

BUDGET = 4e9
"""Multiply-adds of all samples of a model, from `FEW_SAMPLES` to `MANY` samples: about a second of CPU time,
and the same number of samples on all machines."""

_MAX_BY_CHANCE = 4
"""The most values of an input of which all may be right by chance in one sample, so that it gets several. Of
differences in float16 beside an offset of 1000 times their size, one has 20 dB in 28 % of samples, four have
it together in 10 %, and eight in 5 %.
"""

_LIMIT, _MIN_SAMPLES = 1e12, 2
"""The same for at most `FEW_SAMPLES`: some minutes, as simulators need. Larger models get fewer, but at least
two: one cannot show that an output changes."""


_ASCENDING = replace(RANDOM, signal="sorted", picture="sorted")
"""Beside larger numbers: the end of a span is behind its start, so that its size is not clipped to 0."""

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """Dummy inputs of one run, or of several ``frames``. The first has states, which are fed back then.

    ``name`` describes them, such as ``"tone at 0.01"``; a single sample from files is ``"given"``, and each
    of several has its name from `read_samples`. ``nature``: the name without the level. ``usual``: whether
    an app can have such values, as all values within bounds of the graph. Floats that nothing bounds may
    never be all zero, near silence, or very large. ``far``: the inputs whose values are far from ordinary
    ones; such a sample is not usual. ``changes``: the outputs that change only in such a sample, for which it
    was looked for, and the deciders.
    """

    name: str
    frames: tuple[Arrays, ...]
    nature: str = ""
    usual: bool = True
    far: Mapping[str, Far] = field(default_factory=dict)
    changes: frozenset[str] = frozenset()

    @property
    def feeds(self) -> Arrays:
        """The inputs of the first frame."""
        return self.frames[0]

    @property
    def is_larger(self) -> bool:
        """Whether it has numbers of a larger size than ordinary ones."""
        return bool(self.larger)

    @property
    def larger(self) -> frozenset[str]:
        """The inputs with such numbers."""
        return frozenset(name for name, far in self.far.items() if far.is_larger)

    @property
    def is_counted(self) -> bool:
        """Whether it has many turns of what numbers count, such as hours."""
        return any(far.is_counted for far in self.far.values())

    @property
    def has_offset(self) -> bool:
        """Whether it has values that are near each other beside an offset."""
        return any(far.is_offset for far in self.far.values())


def number_of_samples(multiply_adds: int) -> int:
    """The number of samples for a model that needs so many multiply-adds for one."""
    cost = max(multiply_adds, 1)
    few = min(FEW_SAMPLES, max(_MIN_SAMPLES, _LIMIT / cost))
    return int(min(MANY, max(few, BUDGET / cost)))


def number_of_frames(multiply_adds: int) -> int:
    """The number of frames in the longest sample of a recurrent model that needs so many for one frame."""
    return int(min(_MANY_FRAMES, max(FRAMES, BUDGET / FEW_SAMPLES / max(multiply_adds, 1))))


def samples(
    first: Sample,
    inputs: Sequence[TensorFacts],
    ranges: Mapping[str, Range],
    multiply_adds: int,
    states: Mapping[str, str],
    most: int,
) -> tuple[Sample, ...]:
    """Return different synthetic samples for ``inputs`` that have sizes: ``first``, and others.

    Their number follows from the ``multiply_adds`` of one frame, up to ``most``. There is only one if
    it is zeros or ones, or large. If there are ``states``, sequences of frames are
    added. ``ranges``: of the numeric inputs.
    """
    if first.nature != "random":
        frames = _same_frames(first.feeds, states, begin=True)
        same = Sample(f"{FRAMES} frames", frames, first.nature)
        return (first, same) if states else (first,)
    if sum(array.nbytes for array in first.feeds.values()) > MAX_BYTES:
        return (first,)
    number = min(most, number_of_samples(multiply_adds * (FRAMES if states else 1)))
    result = [first, *itertools.islice(_varied(first, inputs, ranges, states), number - 1)]
    if states:
        result[1:1] = _mixed(result, states, number_of_frames(multiply_adds))
    most_far = max(2, number // _SHARE_FAR)
    return (*result, *itertools.islice(_far(inputs, ranges, states), min(MAX_FAR, most_far)))


def given_samples(
    named: Sequence[tuple[str, Arrays]], states: Mapping[str, str]
) -> tuple[Sample, ...]:
    """The ``named`` samples of files, and the `sequences` of these if there are ``states``."""
    result = [Sample("given" if len(named) == 1 else name, (feeds,), name) for name, feeds in named]
    return (*result, *(sequences(result, states) if states else ()))


def _varied(
    first: Sample,
    inputs: Sequence[TensorFacts],
    ranges: Mapping[str, Range],
    states: Mapping[str, str],
) -> Iterator[Sample]:
    """Yield samples of all patterns that differ from ``first`` and from each other."""
    of_inputs = [ranges.get(tensor.name) or assumed_range(tensor) for tensor in inputs]
    is_open = any(range_.is_open and range_.usual is None for range_ in of_inputs)
    seen = {_digest(first.frames)}
    natures: set[str] = set()
    names: Counter[str] = Counter()
    least = _faintest([range_ for range_ in of_inputs if range_.is_open])
    open_sizes = (t.sizes for t, range_ in zip(inputs, of_inputs, strict=True) if range_.is_open)
    counts = (math.prod(n for n in sizes if isinstance(n, int)) for sizes in open_sizes)
    most = max([1, *counts])
    for index, pattern in enumerate(patterns()):
        if pattern.faintest(most) < least or (least and pattern.level < QUIET):
            continue
        if pattern == RANDOM and not states:
            continue
        nature = pattern.nature(of_inputs)
        # How errors grow depends on the nature; each level gets only one frame.
        count = 1 if nature in natures else FRAMES
        natures.add(nature)
        frames = _frames(pattern, inputs, ranges, generator(index), states, count)
        if (digest := _digest(frames)) in seen:
            continue
        seen.add(digest)
        name = f"{nature} at {pattern.level:g}" if is_open else nature
        names[name] += 1
        if names[name] > 1:
            name = f"{name} ({names[name]})"
        yield Sample(name, frames, nature, pattern.suits(of_inputs))


def _faintest(ranges: Sequence[Range]) -> float:
    """The least level of floats with these ``ranges``: of sound any; of others one that is not lost, as that
    of angles to which 180 is added.
    """
    if any(range_.sound for range_ in ranges):
        return 0.0
    return min(max([FAINT, *(range_.least for range_ in ranges)]), 1.0)


def _far(
    inputs: Sequence[TensorFacts], ranges: Mapping[str, Range], states: Mapping[str, str]
) -> Iterator[Sample]:
    """Yield samples with values far from the ordinary, of which several inputs share those of integers, the
    sizes of floats, and equal ones.
    """
    values_of = {
        tensor.name: ranges[tensor.name].far
        for tensor in inputs
        if tensor.name in ranges and tensor.name not in states
    }
    whole = {name: values for name, values in values_of.items() if ranges[name].whole}
    others = {name: values for name, values in values_of.items() if name not in whole}
    sizes = {name: [far for far in others[name] if not far.centers] for name in others}
    # In turn without and with each value that decides which branch runs.
    decided = itertools.cycle(({}, *_together(_deciding(whole, ranges))))
    larger = ({**group, **values} for group, values in zip(_together(sizes), decided, strict=False))
    groups = [*_together(whole), *larger]
    equal: dict[Far, dict[str, Far]] = {}
    for name, far in ((name, far) for name, values in others.items() for far in values):
        if far.centers:
            # Those with the same offset, of which only differences count, are in one sample.
            equal.setdefault(replace(far, low=0.0, high=0.0), {})[name] = far
    around = [*equal.values()]
    # Models with many inputs, such as a table's columns, have several in one sample.
    room = max(1, MAX_FAR - len(groups))
    separate = [
        dict(itertools.chain(*map(dict.items, around[number::room])))
        for number in range(min(room, len(around)))
    ]
    # A single difference may be right by chance, and so may one moment.
    few = [group for group in (*groups, *separate) if _may_be_right(group, inputs)]
    left = max(0, MAX_FAR - len(groups) - len(separate))
    repeated = itertools.islice(itertools.cycle(few), left)
    names: Counter[str] = Counter()
    for number, group in enumerate((*groups, *separate, *repeated)):
        rng = generator(MANY + number)
        pattern = _ASCENDING if any(far.is_larger for far in group.values()) else RANDOM
        (feeds,) = _frames(pattern, inputs, ranges, rng, states, 1)
        by_name = {tensor.name: tensor for tensor in inputs}
        feeds = {**feeds, **{n: far_values(by_name[n], far, rng) for n, far in group.items()}}
        values = {name: group[name] for name in by_name if name in group}
        name = f"other values of {', '.join(values)}"
        names[name] += 1
        name = f"{name} ({names[name]})" if names[name] > 1 else name
        yield Sample(name, (feeds,), "far", usual=False, far=values)


def _may_be_right(group: Mapping[str, Far], inputs: Sequence[TensorFacts]) -> bool:
    """Whether few values of the inputs in ``group`` may be right by chance: only their differences count, or
    where they are in a turn.
    """
    is_offset = all(far.is_offset for far in group.values())
    if not (is_offset or any(far.is_counted for far in group.values())):
        return False
    shapes = (tensor.sizes for tensor in inputs if tensor.name in group)
    counts = (math.prod(size for size in shape if isinstance(size, int)) for shape in shapes)
    return max(counts) <= _MAX_BY_CHANCE


def _deciding(
    values_of: Mapping[str, Sequence[Far]], ranges: Mapping[str, Range]
) -> dict[str, Sequence[Far]]:
    """Those of single numbers that are compared."""
    return {
        name: values for name, values in values_of.items() if ranges[name].low == ranges[name].high
    }


def _together(values_of: Mapping[str, Sequence[Far]]) -> Iterator[dict[str, Far]]:
    """The first values of all inputs, then the second ones, and so on."""
    for number in range(max(map(len, values_of.values()), default=0)):
        yield {n: values[number] for n, values in values_of.items() if number < len(values)}


def _mixed(samples: Sequence[Sample], states: Mapping[str, str], number: int) -> Iterator[Sample]:
    """One sample of ``number`` frames, with the natures that an app can have one after the other."""
    usual = [sample for sample in samples if sample.usual and len(sample.frames) > 1]
    frames = [frame for sample in usual for frame in sample.frames][:number]
    if len(frames) > FRAMES:
        rest = [{n: a for n, a in frame.items() if n not in states} for frame in frames[1:]]
        yield Sample(f"{len(frames)} frames", (frames[0], *rest), "mixed")


def _frames(
    pattern: Pattern,
    inputs: Sequence[TensorFacts],
    ranges: Mapping[str, Range],
    rng: np.random.Generator,
    states: Mapping[str, str],
    count: int,
) -> tuple[Arrays, ...]:
    if not states:
        return (generated_inputs(pattern, inputs, ranges, rng),)
    whole = generated_inputs(pattern, inputs, ranges, rng, frames=count)
    rest = {name: array for name, array in whole.items() if name not in states}
    # As an app starts.
    first = {name: np.zeros_like(array[0]) for name, array in whole.items() if name in states}
    return tuple(
        {**(first if frame == 0 else {}), **{name: array[frame] for name, array in rest.items()}}
        for frame in range(count)
    )


def _same_frames(first: Arrays, states: Mapping[str, str], *, begin: bool) -> tuple[Arrays, ...]:
    """The same inputs in each frame; with ``begin`` states start with zeros, as in an app."""
    rest = {name: array for name, array in first.items() if name not in states}
    zeros = {name: np.zeros_like(first[name]) for name in states if begin and name in first}
    return ({**first, **zeros}, *[rest] * (FRAMES - 1))


def sequences(samples: Sequence[Sample], states: Mapping[str, str]) -> list[Sample]:
    """Return the sequences of frames in ``samples``; if there are none, one sequence of the same inputs.

    ``speech-1`` and ``speech-2`` are consecutive frames of a recurrent model; ``speech-4`` starts a new
    sequence.
    """
    started: list[tuple[Sample, list[Arrays]]] = []
    before: tuple[str, int] | None = None
    for sample in samples:
        stem, _, number = sample.name.rpartition("-")
        numbered = (stem, int(number)) if stem and number.isdecimal() else None
        if numbered and before and numbered == (before[0], before[1] + 1):
            started[-1][1].append(sample.feeds)
        elif numbered:
            started.append((sample, [sample.feeds]))
        before = numbered
    frames = _same_frames(samples[0].feeds, states, begin=False)
    return [
        Sample(f"{len(frames)} frames from {first.name!r}", tuple(frames), first.name)
        for first, frames in started
        if len(frames) > 1
    ] or [Sample(f"{FRAMES} frames", frames, samples[0].nature)]


def _digest(frames: Sequence[Arrays]) -> int:
    return hash(
        tuple(
            array.tobytes() if array.dtype != object else str(array.tolist())
            for frame in frames
            for array in frame.values()
        )
    )


def run_samples(run: Callable[[Sample], T], feeds: Iterable[Sample], *, synthetic: bool) -> list[T]:
    """Return the result of ``run`` for each of ``feeds``.

    Raises what ``run`` raises, but not for ``synthetic`` samples after the first: they may be extremes that
    the graph rejects, although its ranges do not show it.
    """
    first, *others = feeds
    results = [run(first)]
    for sample in others:
        try:
            results.append(run(sample))
        except Exception:
            if not synthetic:
                raise
    return results
