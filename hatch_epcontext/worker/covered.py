"""Which values of inputs were compared, and where an EP's arithmetic ends, for reports and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hatch_epcontext.graph.dtypes import Array
from hatch_epcontext.graph.facts import Range, TensorFacts
from hatch_epcontext.graph.number_format import NumberFormat
from hatch_epcontext.graph.values.far import dtype_bounds
from hatch_epcontext.providers import Provider
from hatch_epcontext.text import listing, show_number
from hatch_epcontext.worker.comparison.runs import ReferenceRun
from hatch_epcontext.worker.results import InputValues


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
        _with_ends(value, _ends_of(facts[value.name], ranges[value.name], provider, format_))
        if value.whole and value.name in facts and value.name in ranges
        else value
        for value in values
    )


def _with_ends(value: InputValues, ends: Iterable[tuple[float, float, str]]) -> InputValues:
    """``value`` with the nearest of the ``ends``."""
    nearest = min(ends, key=lambda end: end[1], default=None)
    if nearest is None:
        return value
    least, most, arithmetic = nearest
    return replace(value, least=least, most=most, arithmetic=arithmetic)


def _ends_of(
    tensor: TensorFacts, range_: Range, provider: Provider, format_: NumberFormat | None
) -> Iterator[tuple[float, float, str]]:
    if range_.known and (not range_.loose or range_.low == range_.high):
        return
    lowest, highest = dtype_bounds(tensor)
    bits = provider.integer_bits
    text, end = f"{provider.name} computes integers in {bits} bits", 2.0 ** (bits - 1)
    if highest >= end:
        yield max(lowest, -end), end - 1, text
    if range_.floats is not None and format_ is not None and format_.seen:
        (scale, offset), largest = range_.floats, format_.largest_of_sums
        low, high = sorted((number - offset) / scale for number in (-largest, largest))
        if high < highest or low > lowest:
            text += f", and ends them in floats at {show_number(largest)}"
            yield max(lowest, math.ceil(low)), min(highest, math.floor(high)), text


def describe_values(run: ReferenceRun, agreed: Iterable[ReferenceRun]) -> str:
    """The values of ``run`` for a warning; those far from the ordinary only if no run ``agreed`` has them."""
    if not run.far:
        floats = [name for name, array in run.feeds.items() if array.dtype.kind not in "OSUbiu"]
        parts = [
            f"{name!r} {_from_to(ends)}" for name in floats if (ends := _ends(_arrays(run, name)))
        ]
        return f"inputs as in the sample {run.name!r}, {listing(parts, _MAX_NAMED)},"
    ordinary = {values.name: values for values in compared_values([*agreed], {})}
    parts = []
    for name in run.far:
        numbers = np.concatenate([array.ravel().astype(np.float64) for array in _arrays(run, name)])
        known = ordinary.get(name)
        below, above = (
            (numbers[numbers < known.low], numbers[numbers > known.high])
            if known
            else (numbers, numbers[:0])
        )
        outside = np.concatenate((below, above))
        if known and below.size and above.size:
            low, high = (show_number(float(end)) for end in (known.low, known.high))
            least, most = (show_number(float(end)) for end in (below.min(), above.max()))
            parts.append(f"{name!r} below {low}, such as {least}, or above {high}, such as {most},")
        elif outside.size:
            parts.append(f"{name!r} {_from_to((float(outside.min()), float(outside.max())))}")
    return listing(parts or run.far, _MAX_NAMED)


def _arrays(run: ReferenceRun, name: str) -> list[Array]:
    return [frame[name] for frame in run.frames if name in frame]


def _from_to(ends: tuple[float, float]) -> str:
    low, high = map(show_number, ends)
    return f"from {low} to {high}" if low != high else f"of {low}"


_MAX_NAMED = 3
"""The most inputs that a warning names."""
