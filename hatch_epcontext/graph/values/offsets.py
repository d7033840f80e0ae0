"""Values that are near each other beside an offset, of inputs of which only differences count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from hatch_epcontext.graph.dtypes import dtype_bounds
from hatch_epcontext.graph.facts import Far, Range, TensorFacts
from hatch_epcontext.graph.number_format import FLOAT16
from hatch_epcontext.graph.values.conventions import (
    MAX_OF_BYTES,
    looks_like_image,
    looks_like_sound,
)

_OFFSET, _OF_INTEGERS = 1000.0, 48000.0
"""The offsets of values of which only differences count, such as prices, and of integers, such as clocks."""

_BESIDE_OFFSETS, _OF_WHOLE = (1 / 1000, 1 / 4000), (1 / 3000,)
"""The deviations beside an offset, relative to it: differences are lost in float16 from the first one on, and
means of their squares from the second one on.
"""

_OF_DOUBLES, _MOMENTS = 1e9, 10.0
"""The offset of doubles of which only differences count, and their deviation: seconds since 1970, whose
differences float32 loses.
"""

_OF_SQUARES = 1 / 50
"""The deviation, relative to values, below which the mean of squares less the square of the mean is lost."""


def with_offsets(ranges: Mapping[str, Range], inputs: Iterable[TensorFacts]) -> dict[str, Range]:
    """``ranges`` of the ``inputs``: those of which only differences count, or differences of squares, also
    have values that are near each other beside an offset, which is the same where ranges overlap.
    """
    counted = {name: r for name, r in ranges.items() if r.shifted or r.squared}
    known = [range_ for range_ in counted.values() if range_.known]
    return dict(ranges) | {
        facts.name: replace(range_, far=(*range_.far, *_offsets(facts, range_, known)))
        for facts in inputs
        if (range_ := counted.get(facts.name)) and (range_.low >= 0 or not looks_like_sound(facts))
    }


def _offsets(facts: TensorFacts, range_: Range, known: Iterable[Range]) -> Iterator[Far]:
    """Values that are near each other: beside the end of the common range that is farther from 0, if there
    is one, and else beside an offset that the type allows.
    """
    bounds = _common_range(facts, range_, known)
    # Beyond the end of the format an offset is wrong by itself.
    of_floats = min(_OFFSET / (range_.shifted or 1.0), FLOAT16.largest / 2)
    offset = _OF_INTEGERS if range_.whole else of_floats
    if bounds is None and range_.whole and dtype_bounds(facts)[1] <= offset:
        return
    low, high = bounds or (0.0, 0.0)
    if bounds is not None:
        offset = max(high, low, key=abs)
    shares: tuple[float, ...] = (_OF_SQUARES,) if range_.squared and bounds else ()
    if range_.shifted:
        shares += _OF_WHOLE if range_.whole else _BESIDE_OFFSETS
    for share in shares:
        spread = abs(share * offset)
        if spread >= 1 or not range_.whole:
            # Inside of the range.
            center = offset - math.copysign(4 * spread, offset) if bounds else offset
            yield Far(low, high, (center,), (spread,), is_offset=True)
    if range_.shifted and bounds is None and facts.dtype == "float64":
        yield Far(centers=(_OF_DOUBLES,), spreads=(_MOMENTS,), is_offset=True)


def _common_range(
    facts: TensorFacts, range_: Range, known: Iterable[Range]
) -> tuple[float, float] | None:
    """The lowest and the highest value that ``range_`` and those ``known`` of the same kind share, without
    those that do not overlap; None if nothing bounds the input ``facts``.
    """
    low, high = (range_.low, range_.high) if range_.known else (-math.inf, math.inf)
    for other in (other for other in known if other.whole == range_.whole):
        common = max(low, other.low), min(high, other.high)
        low, high = common if common[0] < common[1] else (low, high)
    if math.isinf(high):
        return (0.0, MAX_OF_BYTES) if looks_like_image(facts) else None
    return (low, high) if low < high else None
