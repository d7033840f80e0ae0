"""Which values of inputs were compared, and where an EP's arithmetic ends, for reports and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hatch_epcontext.graph.dtypes import Array, dtype_bounds
from hatch_epcontext.graph.facts import Far, Range, TensorFacts
from hatch_epcontext.graph.number_format import NumberFormat
from hatch_epcontext.graph.values.conventions import USUAL_UNITS
from hatch_epcontext.providers import Provider
from hatch_epcontext.text import listing, show_number
from hatch_epcontext.worker.comparison.runs import ReferenceRun
from hatch_epcontext.worker.results import InputValues

_MAX_NAMED = 3
"""The most inputs that a warning names."""


def compared_values(
    runs: Sequence[ReferenceRun], states: Mapping[str, str]
) -> tuple[InputValues, ...]:
    """The values that the inputs have in ``runs``, but for those of ``states`` and those without numbers."""
    names = dict.fromkeys(name for run in runs for name in run.feeds if name not in states)
    result = []
    for name in names:
        arrays = [frame[name] for run in runs for frame in run.frames if name in frame]
        if (ends := _ends(arrays)) is not None:
            result.append(InputValues(name, *ends, whole=arrays[0].dtype.kind in "iu"))
    return tuple(result)


def _ends(arrays: Iterable[Array]) -> tuple[float, float] | None:
    """The smallest and the largest number in ``arrays``."""
    numbers = [
        array.astype(np.float64)
        for array in arrays
        if array.size and array.dtype.kind not in "OSUbc"
    ]
    finite = [array[np.isfinite(array)] for array in numbers]
    lows, highs = ([float(end(a)) for a in finite if a.size] for end in (np.min, np.max))
    return (min(lows), max(highs)) if lows else None


def with_arithmetic(
    values: Iterable[InputValues],
    inputs: Iterable[TensorFacts],
    ranges: Mapping[str, Range],
    provider: Provider,
    format_: NumberFormat | None,
) -> tuple[InputValues, ...]:
    """``values``, with the ends of the arithmetic of ``provider`` for inputs that nothing bounds.

    ``format_``: that of its floats.
    """
    facts = {tensor.name: tensor for tensor in inputs}
    return tuple(
        _with_ends(value, facts[value.name], ranges[value.name], provider, format_)
        if value.whole and value.name in facts and value.name in ranges
        else value
        for value in values
    )


def _with_ends(
    value: InputValues,
    tensor: TensorFacts,
    range_: Range,
    provider: Provider,
    format_: NumberFormat | None,
) -> InputValues:
    """``value`` with the nearest of the ends."""
    if range_.is_firm:
        return value
    lowest, highest = dtype_bounds(tensor)
    end = 2.0 ** (provider.integer_bits - 1) // range_.gain
    if highest >= end:
        value = replace(value, least=max(lowest, -end), most=end - 1, bits=provider.integer_bits)
        lowest, highest = value.least, value.most
    if (floats := range_.floats) is not None and format_ is not None and format_.seen:
        largest = format_.largest_of_sums
        if floats.several:
            # The factor is for two of them.
            end = 2 * largest / abs(floats.factor)
            if end < max(highest, -lowest):
                value = replace(value, least=-end, most=end, in_floats=largest, several=True)
        else:
            ends = ((number - floats.offset) / floats.factor for number in (-largest, largest))
            low, high = sorted(ends)
            if high < highest or low > lowest:
                least, most = max(lowest, math.ceil(low)), min(highest, math.floor(high))
                value = replace(value, least=least, most=most, in_floats=largest)
    # Of one input the reach says how large what has a logarithm is.
    is_wide = floats is not None and floats.wide and floats.several and bool(value.in_floats)
    usual = USUAL_UNITS / abs(floats.factor) if floats is not None else 0.0
    is_reached = bool(value.most) and max(range_.reach, usual) > value.most
    return replace(value, expected=is_wide or is_reached)


def describe_values(run: ReferenceRun, agreed: Iterable[ReferenceRun]) -> str:
    """The values of ``run`` for a warning; those far from the ordinary only if no run ``agreed`` has them."""
    if not run.far:
        ends = {name: ends for name in run.feeds if (ends := _ends(_arrays(run, name)))}
        # Of several inputs floats differ more between samples.
        floats = [name for name in ends if run.feeds[name].dtype.kind not in "iu"]
        parts = [f"{name!r} {_from_to(ends[name])}" for name in floats or ends]
        sample = f"inputs as in the sample {run.name!r}"
        return f"{sample}, {listing(parts, _MAX_NAMED)}," if parts else sample
    ordinary = {values.name: values for values in compared_values([*agreed], {})}
    names: dict[str, list[str]] = {}
    for name, far in run.far.items():
        names.setdefault(_describe_far(run, name, far, ordinary.get(name)), []).append(repr(name))
    texts = (f"{listing(same, _MAX_NAMED)} {text}" for text, same in names.items())
    # A text may end with a comma, to which the list adds its own.
    return listing(texts, _MAX_NAMED).replace(",,", ",")


def _describe_far(run: ReferenceRun, name: str, far: Far, known: InputValues | None) -> str:
    """The values of the input ``name`` in ``run``, without those in the range that is ``known``."""
    if far.is_offset:
        share = 200 * far.spreads[0] / abs(far.centers[0])
        return f"with differences below {share:.2g} % of the values"
    if far.centers and any(far.centers):
        centers = listing(map(show_number, dict.fromkeys(far.centers)), _MAX_NAMED)
        spread = 2 * max(far.spreads)
        return f"within {spread:.2g} of {centers}" if spread else f"of {centers}"
    if far.is_larger:
        return f"above {show_number(far.low)}, such as {show_number(far.high)},"
    numbers = np.concatenate([array.ravel().astype(np.float64) for array in _arrays(run, name)])
    whole = _from_to((float(numbers.min()), float(numbers.max())))
    if known is None:
        return whole
    ends = known.low, known.high
    if far.centers:
        # Around 0 only the size counts, as that of sound.
        ends = -max(-known.low, known.high), max(-known.low, known.high)
    below, above = numbers[numbers < ends[0]], numbers[numbers > ends[1]]
    low, high = map(show_number, ends)
    parts = [f"below {low}, such as {show_number(float(below.min()))}"] if below.size else []
    if above.size:
        parts.append(f"above {high}, such as {show_number(float(above.max()))}")
    return f"{', or '.join(parts)}," if parts else whole


def _arrays(run: ReferenceRun, name: str) -> list[Array]:
    return [frame[name] for frame in run.frames if name in frame]


def _from_to(ends: tuple[float, float]) -> str:
    low, high = map(show_number, ends)
    return f"from {low} to {high}" if low != high else f"of {low}"
