"""Values that the type and the graph allow, far from those of ordinary samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hatch_epcontext.graph.dtypes import Numbers, dtype_bounds, is_float, numpy_dtype
from hatch_epcontext.graph.facts import Far, Range, TensorFacts
from hatch_epcontext.graph.number_format import FLOAT16
from hatch_epcontext.graph.values.amounts import expected
from hatch_epcontext.graph.values.conventions import (
    DEVIATIONS,
    LARGEST_OF_32_BITS,
    MAX_OF_BYTES,
    SCALING,
    looks_like_image,
    looks_like_sound,
)
from hatch_epcontext.graph.values.uses import BESIDE, MAX_CENTERS, Center, Uses

_SMALL = 1000.0
"""Integers of both signs up to this one are small."""

_WITHIN = 4.0
"""The deviations within which nearly all floats are."""

FULL_SCALE, _OF_SOUND = 32768.0, 8000.0
"""That of int16, and the level of sound with this full scale."""

_WIDE, _NARROW = 1 / 8, 1 / 1000
"""The deviations around a constant, relative to it."""

_MAX_COORDINATES = 3
"""The most different numbers of one position: more are the means of features, which vary."""

_DIGITS = 5
"""The units of the last digit of a constant within which values around it are."""

_MORE_TURNS = tuple(4.0**exponent for exponent in range(5))
"""How many times as many turns as usual counts also have: days since 1900 are 6600 weeks. From one to the
next the steps of float16, in which a count loses where in a turn it is, are four times as large.
"""

_MAX_VALUES = 4
"""The most other values of a number that is compared."""

_SIZES = tuple(2.0**exponent for exponent in range(5, 20, 2))
"""The sizes of floats whose powers matter: from 32 to above the end of float16."""

_SMALLEST_SHARE, _SMALLEST_OF_WIDE = 1 / 4, 1 / 64
"""How small floats are beside the largest of a size: up to the size before. Those of whose differences a
logarithm is taken up to the third one before, so that some differences are as large as an operand.
"""

_WIDEST = 4095.0
"""The largest value of coordinates and sensors, which have up to 12 bits."""


def with_far(facts: TensorFacts, ordinary: Range, uses: Uses) -> Range:
    """``ordinary``, the range of an input with these ``uses``, with the values that are far from it."""
    dtype = numpy_dtype(facts.dtype)
    if uses.skipping is not None and ordinary.whole:
        return replace(ordinary, far=(Far(centers=(uses.skipping,), spreads=(0.0,)),))
    if dtype.kind in "bc":
        return ordinary
    if ordinary.usual is not None:
        return replace(ordinary, far=tuple(_larger(facts, uses)))
    shifted = uses.scale if uses.has_offset and not looks_like_image(facts) else 0.0
    ordinary = replace(
        ordinary,
        thresholds=uses.thresholds,
        constants=uses.constants,
        least=uses.least,
        shifted=shifted,
    )
    if not is_float(dtype):
        scaled = expected(uses.scale) if uses.scale < 1 else 0.0
        of_powers = uses.powers.size if math.isfinite(uses.powers.size) else 0.0
        reach = max(uses.reach, uses.divided.reach, uses.turns, scaled, of_powers)
        reach = 0.0 if ordinary.is_firm else reach
        ordinary = _as_scaled(facts, ordinary, uses)
        ordinary, allowed = _within_integers(ordinary, LARGEST_OF_32_BITS // uses.gain)
        ordinary, beyond_end = _within_exponents(facts, ordinary, uses)
        gain = max(uses.gain, uses.product)
        integers = replace(ordinary, floats=uses.floats, reach=reach, gain=gain)
        beyond = (*allowed, *beyond_end, *_far_integers(facts, integers, uses))
        return replace(integers, far=beyond)
    if not ordinary.is_open:
        larger = (*_larger(facts, uses), *_counted_on(facts, ordinary, uses, FLOAT16.largest))
        # What the range only guesses may be on either side of a threshold, and a divisor's far from it.
        centers = [] if ordinary.known else uses.centers
        beside = [center for center in centers if center.compared or not ordinary.picture]
        around = _around(facts, ordinary, replace(uses, centers=beside))
        # Beyond the limits of a clip values still have an effect in a comparison.
        loose = not all(ordinary.low <= number <= ordinary.high for number in uses.thresholds)
        return replace(ordinary, far=(*larger, *around), loose=loose)
    ordinary, uses = _around_means(facts, ordinary, uses)
    ordinary, beyond_end = _within_end(ordinary, uses)
    # A constant beyond full scale is beside other quantities.
    is_around = ordinary.standardized is not None or uses.beside > ordinary.high
    sound = uses.is_signal and looks_like_sound(facts) and not is_around
    far = [*_larger(facts, uses), *_counted_on(facts, ordinary, uses, FLOAT16.largest)]
    far += [*_around(facts, ordinary, uses), *beyond_end]
    if sound and not any(values.is_larger for values in far):
        far.append(Far(centers=(0.0,), spreads=(_OF_SOUND,)))
    elif not (far or ordinary.shifted or ordinary.standardized) and uses.scale < SCALING:
        far.append(Far(centers=(0.0,), spreads=(expected(uses.scale) / DEVIATIONS,)))
    return replace(ordinary, far=tuple(far), sound=sound)


def _as_scaled(facts: TensorFacts, ordinary: Range, uses: Uses) -> Range:
    """``ordinary``, if it is a guess, up to the integers that a graph scales to 1, as 1000 millimetres."""
    if ordinary.known or (uses.is_signal and not looks_like_image(facts)):
        return ordinary
    high = min(round(uses.one), dtype_bounds(facts)[1], FLOAT16.largest)
    return replace(ordinary, high=max(ordinary.high, high))


def _within_end(ordinary: Range, uses: Uses) -> tuple[Range, list[Far]]:
    """``ordinary`` with nearly all floats within the end of a power of them, and those beyond it."""
    size = abs(uses.end)
    if ordinary.standardized is not None or not 0 < size < _WITHIN:
        return ordinary, []
    high = size / _WITHIN * DEVIATIONS
    below = Far(centers=(-2 * size,), spreads=(size / 4,))
    beyond = Far(size, 4 * size) if uses.end > 0 else below
    return replace(ordinary, low=-high, high=high), [beyond]


def _within_exponents(facts: TensorFacts, ordinary: Range, uses: Uses) -> tuple[Range, list[Far]]:
    """``ordinary`` within the integers of which a power is a float16, and those beyond: powers of the others
    are too large, or all too small.
    """
    (least, most), (lowest, highest) = uses.exponents, dtype_bounds(facts)
    lowest = lowest if ordinary.signed else max(lowest, 0.0)
    low, high = max(least, ordinary.low), min(most, ordinary.high)
    if low >= high:
        # Beside a constant all of these are beyond.
        width = ordinary.high - ordinary.low
        low, high = (most - width, most) if most < ordinary.low else (least, least + width)
        low, high = max(low, lowest), min(high, highest)
    if ordinary.known or low >= high:
        return ordinary, []
    width, beyond = high - low, list[Far]()
    if high == most and high >= 0:
        beyond += [Far(high, min(max(4 * high, width), highest))] if high < highest else []
    elif high == most:
        beyond += _inside(high, min(highest, high + width))
    if low == least:
        beyond += _inside(max(lowest, low - width), low)
    beyond += _inside(low, min(uses.vanishing, high))
    return replace(ordinary, low=low, high=high), beyond if uses.has_powers else []


def _within_integers(ordinary: Range, most: float) -> tuple[Range, tuple[Far, ...]]:
    """``ordinary`` up to ``most``, and what the graph allows beyond, as rows of a table for first bytes of
    addresses.
    """
    low, high = max(ordinary.low, -most), min(ordinary.high, most)
    beyond = (*_inside(ordinary.low, low), *_inside(high, ordinary.high))
    if not (ordinary.known and beyond and low < high):
        return ordinary, ()
    return replace(ordinary, low=low, high=high, loose=True), beyond


def _inside(low: float, high: float) -> Iterator[Far]:
    """Integers between ``low`` and ``high``, if there are some."""
    if low < high:
        yield Far(low, high, centers=((low + high) / 2,), spreads=((high - low) / 4,))


def _around_means(facts: TensorFacts, ordinary: Range, uses: Uses) -> tuple[Range, Uses]:
    """``ordinary`` with the means, far from 0, and deviations by which a graph standardizes an input, and the
    other uses. Smaller deviations may be a conversion, such as that of kelvin.
    """
    for center in uses.centers:
        standardized = _standardized(facts, center)
        if standardized is None:
            continue
        means, deviations = np.abs(standardized.centers), np.array(standardized.spreads)
        is_far = ordinary.high < means.max() <= FLOAT16.largest
        if is_far and (BESIDE * deviations >= means).all():
            others = [other for other in uses.centers if other is not center]
            # Nearer values to a mean than usual are no quiet ones.
            ordinary = replace(ordinary, standardized=standardized, least=1.0)
            return ordinary, replace(uses, centers=others)
    return ordinary, uses


def _larger(facts: TensorFacts, uses: Uses) -> Iterator[Far]:
    """The sizes of floats whose powers matter, each with differences that are smaller than itself."""
    most = _WIDEST if math.isinf(uses.powers.size) else uses.powers.size
    if looks_like_image(facts):
        most = min(most, MAX_OF_BYTES)
    share = _SMALLEST_OF_WIDE if uses.powers.is_wide else _SMALLEST_SHARE
    yield from (Far(share * size, size) for size in _SIZES if size / 2 <= most)


def _counted_on(facts: TensorFacts, ordinary: Range, uses: Uses, most: float) -> Iterator[Far]:
    """Many turns, such as hours since a start, at ``most``."""
    sizes = dict.fromkeys(min(times * uses.turns, most) for times in _MORE_TURNS)
    least = max(-ordinary.low, ordinary.high)
    yield from (Far(size / 2, size, is_counted=True) for size in sizes if size / 2 > least)
    has_more = not ordinary.whole and numpy_dtype(facts.dtype).itemsize > 2
    if uses.turns > most and has_more:
        # Sums of floats beyond the format.
        yield Far(2 * most, max(4 * uses.turns, 8 * most), is_counted=True)


def _far_integers(facts: TensorFacts, ordinary: Range, uses: Uses) -> Iterator[Far]:
    lowest, highest = dtype_bounds(facts)
    lowest = lowest if ordinary.signed else max(lowest, 0.0)
    if ordinary.known and ordinary.loose and ordinary.low == ordinary.high:
        yield from _other_values(ordinary, uses)
        return
    if ordinary.known:
        is_index = ordinary.low == 0 and uses.indexed == ordinary.high + 1
        if is_index and lowest < 0:
            yield Far(-uses.indexed, ordinary.high)
        if ordinary.loose:
            yield from _counted_on(facts, ordinary, uses, min(highest, FLOAT16.largest))
        return
    if highest <= max(ordinary.high, MAX_OF_BYTES):
        return
    offset = uses.floats.offset if uses.floats else 0.0
    largest = min(highest, LARGEST_OF_32_BITS / ordinary.gain, uses.exponents[1])
    if uses.floats:
        # What overflows floats is no fault of integers: they are as large as the graph expects.
        largest = min(largest, abs(FLOAT16.largest / uses.floats.factor))
        largest = min(largest, max(_SMALL, 2 * ordinary.reach))
    if lowest < 0 and not offset:
        yield Far(max(-min(_SMALL, largest), uses.exponents[0]), min(_SMALL, largest))
    if lowest <= -FULL_SCALE and uses.is_signal and looks_like_sound(facts):
        yield Far(-FULL_SCALE, FULL_SCALE - 1, (0.0,), (_OF_SOUND,))
    yield from _around(facts, ordinary, uses)
    larger = (far for far in _larger(facts, uses) if far.low < FLOAT16.largest)
    yield from (far for far in larger if ordinary.high < far.high / 2)
    if uses.turns:
        yield from _counted_on(facts, ordinary, uses, largest)
    elif largest > _SMALL and not offset:
        yield Far(-largest if lowest < 0 else 0.0, largest)


def _other_values(ordinary: Range, uses: Uses) -> Iterator[Far]:
    """The other values with which a single number is compared, and one beside them all: they decide."""
    compared = [center.values for center in uses.centers if center.values.size == 1]
    values = dict.fromkeys(float(value.item()) for value in compared)
    others = [value for value in values if value != ordinary.low][:_MAX_VALUES]
    for value in (*others, max(values, default=ordinary.low) + 1):
        yield Far(centers=(value,), spreads=(0.0,))


def _around(facts: TensorFacts, ordinary: Range, uses: Uses) -> Iterator[Far]:
    """Values around constants outside of the ordinary range."""
    for center in uses.centers:
        sizes = np.abs(center.values)
        farthest = sizes.max()
        if center.compared and sizes.size > 1 and not _fits(facts, center.values.shape):
            # Each value is compared with all of them.
            if farthest < LARGEST_OF_32_BITS:
                yield from _among(center)
            continue
        is_far = farthest > ordinary.high and farthest < LARGEST_OF_32_BITS
        if not is_far or not _fits(facts, center.values.shape):
            yield from _within(facts, center.values) if is_far else ()
            continue
        if (standardized := _standardized(facts, center)) is not None:
            yield standardized
            continue
        least = np.maximum(sizes, 1e-3 * farthest)
        wide = _WIDE * least
        # A threshold is precise to its last digit, and so are the values beside it.
        unit = center.unit if center.compared else 0.0
        narrow = np.minimum(np.maximum(_NARROW * least, _DIGITS * unit), wide)
        yield _near(center.values, wide)
        if np.unique(center.values).size <= _MAX_COORDINATES:
            yield _near(center.values, narrow, unit)


def _standardized(facts: TensorFacts, center: Center) -> Far | None:
    """The means and deviations by which a graph standardizes an input."""
    deviation = center.deviation
    if deviation is None or not _fits(
        facts, np.broadcast_shapes(center.values.shape, deviation.shape)
    ):
        return None
    centers, spreads = np.broadcast_arrays(center.values, deviation)
    return _near(centers, spreads)


def _among(center: Center) -> Iterator[Far]:
    """The constants themselves; of floats up to the end of the format, and values beyond it."""
    most = FLOAT16.largest if center.rounded else LARGEST_OF_32_BITS
    if near := tuple(float(value) for value in center.values.ravel() if value <= most):
        yield Far(centers=near, spreads=(0.0,))
    if (highest := float(center.values.max())) > most:
        yield Far(most, max(highest, 2 * most))


def _within(facts: TensorFacts, table: Numbers) -> Iterator[Far]:
    """Values between the rows of a ``table``, all of which are subtracted from each."""
    # Aligned as in broadcasting.
    sizes = ((1,) * table.ndim + facts.sizes)[len(facts.sizes) :]
    axes = tuple(axis for axis, size in enumerate(sizes) if size == 1 < table.shape[axis])
    center, spread = (measure(table, axis=axes, keepdims=True) for measure in (np.mean, np.std))
    shape = center.shape[max(center.ndim - len(facts.sizes), 0) :]
    center, spread = center.reshape(shape), spread.reshape(shape)
    if _fits(facts, shape) and spread.any():
        yield _near(center, spread)


def _near(center: Numbers, spread: Numbers, unit: float = 0.0) -> Far:
    centers, spreads = (tuple(map(float, array.ravel())) for array in (center, spread))
    return Far(centers=centers, spreads=spreads, shape=center.shape, unit=unit)


def _fits(facts: TensorFacts, shape: Sequence[int]) -> bool:
    """Whether a constant of ``shape`` is for the elements of the input itself."""
    sizes = facts.sizes[len(facts.sizes) - len(shape) :]
    return (
        len(shape) <= len(facts.sizes)
        and math.prod(shape) <= MAX_CENTERS
        and all(one in (1, size) for one, size in zip(shape, sizes, strict=True))
    )
