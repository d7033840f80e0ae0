"""Values of many sizes and shapes, among which those are looked for that change an output."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hatch_epcontext.graph.dtypes import Array, Numbers, dtype_bounds, is_float, numpy_dtype
from hatch_epcontext.graph.facts import Range, TensorFacts
from hatch_epcontext.graph.values.conventions import DEVIATIONS, LARGEST_OF_32_BITS
from hatch_epcontext.worker.synthetic import standardized

GROWTH = 20.0
"""The largest size relative to that of ordinary values, as a power of two."""

_LARGEST = 32768.0
"""The largest float: half of the largest of float16, so that it may be doubled."""

_NARROWEST = 10.0
"""The smallest spread of values, relative to their size or their range, as a power of one half."""


def candidate(
    facts: TensorFacts, range_: Range, count: int, growth: float, rng: np.random.Generator
) -> Array:
    """Return ``count`` arrays of the input ``facts``, which has sizes, along a first axis.

    Values are inside ``range_``, or up to two to the power of ``growth`` times as large as usual ones if
    nothing bounds them.
    """
    shape = (count, *(size if isinstance(size, int) else 1 for size in facts.sizes))
    dtype = numpy_dtype(facts.dtype)
    low, high = _ends(facts, range_, growth, rng)
    if range_.usual is not None and rng.random() < 0.5:
        low = high = range_.usual
    shares = _SHAPES[rng.integers(len(_SHAPES))](shape, rng)
    if rng.random() < 0.5:
        shares = 1 - shares
    if rng.random() < 0.5:
        shares = np.clip(shares + 0.02 * rng.standard_normal(shape), 0, 1)
    numbers = standardized(low + shares * (high - low), range_)
    if range_.whole or not is_float(dtype):
        numbers = np.rint(numbers)
    return np.asarray(numbers).astype(dtype)


def around_constants(
    facts: TensorFacts, range_: Range, count: int, rng: np.random.Generator
) -> Array:
    """Return such arrays, each of whose values is around any of the constants of ``range_``, which has some,
    or one of these.
    """
    shape = (count, *(size if isinstance(size, int) else 1 for size in facts.sizes))
    spread = rng.choice((0.0, 2.0 ** -rng.uniform(1, _NARROWEST)))
    numbers = rng.choice(range_.constants, shape) * (1 + spread * rng.standard_normal(shape))
    numbers = np.clip(numbers, *_bounds(facts, range_))
    dtype = numpy_dtype(facts.dtype)
    return np.asarray(numbers if is_float(dtype) else np.rint(numbers)).astype(dtype)


def _ends(
    facts: TensorFacts, range_: Range, growth: float, rng: np.random.Generator
) -> tuple[float, float]:
    """The smallest and the largest value of one candidate."""
    low, high = _bounds(facts, range_)
    if range_.is_firm:
        span = (high - low) * 2.0 ** -rng.uniform(0, _NARROWEST)
        start = rng.choice((low, high - span, rng.uniform(low, high - span)))
        return float(start), float(start + span)
    usual = range_.high / DEVIATIONS if range_.is_open else max(range_.high, 1.0)
    size = min(usual * 2.0 ** rng.uniform(-growth / 2, growth), high)
    constants = [*range_.thresholds, *(n for far in range_.far for n in far.centers)]
    if constants and rng.random() < 0.25:
        offset = float(rng.choice(constants))
    else:
        offset = float(rng.choice((0.0, 0.0, size, -size)))
    spread = size * 2.0 ** -rng.uniform(0, _NARROWEST) if offset else size
    ends = offset - spread * (rng.random() < 0.5), offset + spread
    start, end = np.clip(ends, low, high)
    return float(start), float(end)


def _bounds(facts: TensorFacts, range_: Range) -> tuple[float, float]:
    """The smallest and the largest value that type and graph allow."""
    dtype = numpy_dtype(facts.dtype)
    if range_.is_firm:
        return range_.low, range_.high
    if is_float(dtype) or dtype.kind == "c":
        return (-_LARGEST if range_.signed and range_.low < 0 else 0.0), _LARGEST
    low, high = dtype_bounds(facts)
    most = LARGEST_OF_32_BITS / range_.gain
    if range_.floats:
        most = min(most, abs(_LARGEST / range_.floats.factor))
    return max(low, -most), min(high, most)


_Shares = Callable[[tuple[int, ...], np.random.Generator], Numbers]


def _along(
    make: Callable[[int, np.random.Generator], Numbers],
) -> _Shares:
    """What ``make`` draws along one axis, in all rows or in some."""

    def shares(shape: tuple[int, ...], rng: np.random.Generator) -> Numbers:
        axes = [axis for axis, size in enumerate(shape) if size > 1] or [0]
        axis = int(rng.choice(axes))
        profile = make(shape[axis], rng)
        wide = profile.reshape([-1 if index == axis else 1 for index in range(len(shape))])
        others = [1 if index == axis else size for index, size in enumerate(shape)]
        rows = rng.random(others) < 0.5 if rng.random() < 0.5 else np.ones(others)
        return np.asarray(wide * rows)

    return shares


def _one(count: int, rng: np.random.Generator) -> Numbers:
    """One stands out: the last, the first, or any."""
    result = np.zeros(count)
    result[rng.choice((-1, 0, int(rng.integers(count))))] = 1.0
    return result


def _step(count: int, rng: np.random.Generator) -> Numbers:
    return np.where(np.arange(count) < rng.integers(count + 1), 0.0, 1.0)


def _blocks(count: int, rng: np.random.Generator) -> Numbers:
    length = int(rng.integers(1, max(count // 2, 2)))
    return np.asarray(np.arange(count) // length % 2, np.float64)


_SHAPES: tuple[_Shares, ...] = (
    lambda shape, rng: rng.random(shape),
    # As many small ones as large ones.
    lambda shape, rng: 2.0 ** -rng.uniform(0, _NARROWEST, shape),
    lambda shape, rng: np.where(rng.random(shape) < 1 / 8, 1.0, 0.0),
    lambda shape, rng: np.ones(shape),
    _along(_one),
    _along(_step),
    _along(_blocks),
    _along(lambda count, rng: np.sort(rng.random(count))),
)
"""Shares of a range, from 0 to 1."""
