"""How near the outputs of a model are to its reference: as a whole, and in each slice.

The measures are relative: the signal-to-noise ratio in decibels, 10 log10(sum ref^2 / sum (out - ref)^2),
and the cosine similarity. A whole output can be near its reference while a part of it is wrong, such as
the scores beside the boxes of a detector. So each slice of each axis is compared too.

Values near zero have more noise than signal. So the signal of an output, and of a slice, has a floor: a part
of the signal in other samples, a smaller part of the output's largest value, and 32 scales of a quantized
output. For one slice among many, such as a feature of an embedding, a part of the output's signal is a floor
too. An output that joins scores with other values is compared as two: its scores, and the others.
`docs/validation.md` explains what that means for a user.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from hatch_epcontext.graph.dtypes import STRING, Array, Numbers, is_float
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.results import GAIN, NOTHING, Agreement, AgreementStatus, Excess, Slice

Nature = Literal["any", "unit", "probabilities", "indices"]
"""The nature of an output's values: any; between -1 and 1 (after a Sigmoid); probabilities that add up to 1
(after a Softmax); or indices (of ArgMax), which are equal or not."""

_COLUMN = 10.0
"""Decibels by which the ratio of a column of a table may be worse than that of the whole output."""

_SLICE = 7.0
"""The same for any other slice: it has a larger part of the output's deviation."""

MANY = 100
"""One in this many slices of an axis may have any error. The floor of a slice's energy is one part in this
many of the whole output's, unless the slice is a column of a table: an axis with at most this many slices,
each with at least this many values.
"""

_OTHER_SAMPLES = 0.1
"""The part of the signal in other samples that counts as signal in this one."""

SIGNAL_PART = 1e-3
"""The part of an output's largest value that counts as signal in each value: twice float16's precision.

For values between -1 and 1 the `unit` of the limits replaces it.
"""

_SCALES = 32.0
"""The scales of a quantized output that count as signal in each value: an error of one scale is 30 dB."""

_SCORE = 5.0
"""The units that a single score counts as: on an NPU an error of 0.05 is 20 dB, whatever the threshold."""

_SHARES = 64
"""The number of values in a slice that can have that signal if all values are probabilities."""

_NOISE = 0.5
"""The part of a floor by which a score may differ without counting as lost or invented."""

TINY = 1e-30
"""The signal of zeros; smaller values are zeros."""

_Axes = tuple[int, ...] | None

_Row = tuple[float, Slice]

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True)
class Scores:
    """Which indices along ``axis`` of an output of this ``rank`` have scores."""

    rank: int
    axis: int
    are_scores: tuple[bool, ...]

    @staticmethod
    def at(is_score: NDArray[np.bool_]) -> Scores | None:
        """The scores where ``is_score``; None if there are none or no others, or if not along an axis."""
        for axis, size in enumerate(is_score.shape if is_score.size else ()):
            by_index = np.moveaxis(is_score, axis, 0).reshape(size, -1)
            if (by_index == by_index[:, :1]).all():
                are_scores = tuple(map(bool, by_index[:, 0]))
                return (
                    Scores(is_score.ndim, axis, are_scores) if len(set(are_scores)) == 2 else None
                )
        return None

    def fit(self, array: Array) -> bool:
        """Whether ``array`` can have scores there."""
        return array.ndim == self.rank and array.shape[self.axis] == len(self.are_scores)

    @cached_property
    def indices(self) -> Mapping[bool, NDArray[np.intp]]:
        """The indices of the scores (True), and of the other values."""
        are_scores = np.array(self.are_scores)
        return {True: np.flatnonzero(are_scores), False: np.flatnonzero(~are_scores)}

    def take(self, array: NDArray[_T], *, are_scores: bool) -> NDArray[_T]:
        """The scores in ``array``, or its other values."""
        return np.take(array, self.indices[are_scores], self.axis)


@dataclass(frozen=True)
class OutputFacts:
    """The ``nature`` of an output's values, and their ``scale`` if it is quantized, else 0.

    ``scores``: where it has scores, if these are joined with other values. ``is_state``: whether only the
    model itself reads it. ``is_random``: whether it depends on chance. ``inconclusive``: why a comparison
    with the source proves nothing, if so. ``noise``: the decibels that other rounding leaves of a quantized
    source.
    """

    nature: Nature = "any"
    scale: float = 0.0
    scores: Scores | None = None
    is_state: bool = False
    is_random: bool = False
    inconclusive: str = ""
    noise: float = math.inf

    def within(self, limits: Tolerance) -> Tolerance:
        """The ``limits`` for this output: lower ones if it is a state."""
        # If the error of a state matters, outputs of later frames differ.
        return replace(limits, snr=limits.snr - GAIN) if self.is_state else limits

    def scores_of(self, array: Array) -> Array | None:
        """The scores in ``array``, values of this output; None if it has none."""
        if not is_float(array.dtype):
            return None
        if self.scores is not None and self.scores.fit(array):
            return self.scores.take(array, are_scores=True)
        return array if self.nature in ("unit", "probabilities") else None


class Elsewhere:
    """An output of the reference in other ``samples``; its measures are computed once."""

    def __init__(self, samples: Sequence[Array] = ()) -> None:
        self._samples = samples
        self._signals: dict[tuple[tuple[int, ...], _Axes], Numbers] = {}
        self._largest: dict[tuple[int, ...], float] = {}
        self._parts: dict[bool, Elsewhere] = {}

    def largest(self, shape: tuple[int, ...]) -> float:
        """The largest magnitude in samples of this ``shape``."""
        if shape not in self._largest:
            powers = (float(power.max(initial=0.0)) for power in self._of(shape))
            self._largest[shape] = math.sqrt(max(powers, default=0.0))
        return self._largest[shape]

    def signal(self, shape: tuple[int, ...], axes: _Axes) -> Numbers:
        """The largest of the mean squares over ``axes`` in samples of this ``shape``; empty without any."""
        key = shape, axes
        if key not in self._signals:
            means = [power.mean(axis=axes) for power in self._of(shape)]
            self._signals[key] = np.asarray(np.maximum.reduce(means) if means else np.zeros(0))
        return self._signals[key]

    def part(self, scores: Scores, *, are_scores: bool) -> Elsewhere:
        """The scores in the samples, or their other values."""
        if are_scores not in self._parts:
            samples = filter(scores.fit, self._samples)
            own = [scores.take(sample, are_scores=are_scores) for sample in samples]
            self._parts[are_scores] = Elsewhere(own)
        return self._parts[are_scores]

    def _of(self, shape: tuple[int, ...]) -> list[Numbers]:
        """The signals of the values in samples of this ``shape``."""
        return [power for power in self._powers if power.shape == shape]

    @cached_property
    def _powers(self) -> list[Numbers]:
        numbers = (np.asarray(sample, np.float64) for sample in self._samples)
        return [np.nan_to_num(array, nan=0.0, posinf=0.0, neginf=0.0) ** 2 for array in numbers]


@dataclass
class Aligned:
    """An ``output`` and the ``reference`` values to compare it with, with selected rows in the same order.

    ``rows``: the signal-to-noise ratio of each selected row in decibels, batch x rows.
    """

    output: Array
    reference: Array
    rows: Numbers | None = None

    def add(self, noise: Numbers) -> None:
        """Add the ``noise`` of rows, batch x rows, in parts of the deviation."""
        ratios: Numbers = -10 * np.log10(np.clip(noise, TINY, 1 / TINY))
        self.rows = ratios if self.rows is None else np.minimum(self.rows, ratios)


def compare_values(
    name: str,
    aligned: Aligned,
    limits: Tolerance,
    facts: OutputFacts = OutputFacts(),
    elsewhere: Elsewhere | None = None,
) -> Agreement:
    """Compare an output with its reference; values are left out where either is NaN.

    ``elsewhere``: the same output of the reference for other inputs. A state has a lower limit, and its
    single features mean nothing. Strings, booleans and other indices are equal or not.
    """
    limits = facts.within(limits)
    shape, own_shape = list(aligned.reference.shape), list(aligned.output.shape)
    if own_shape != shape:
        reason = f"the output {name!r} has the shape {own_shape}, but {shape} on the CPU."
        status = AgreementStatus.OTHER_SHAPE
        return Agreement(name, 0.0, None, status=status, reason=reason)
    dtype, row = aligned.reference.dtype, _worst_row(aligned)
    if dtype == STRING or dtype.kind == "b" or facts.nature == "indices":
        return _compare_exact(name, aligned, limits, row)
    out, ref = _finite(aligned.output, aligned.reference)
    scores, elsewhere = facts.scores, elsewhere or Elsewhere()
    if scores is None or not scores.fit(ref):
        deviation = _Deviation(out, ref, facts, limits.unit, elsewhere)
        return _judge(_agreement_of(name, deviation), deviation, limits, row)
    parts: list[Agreement] = []
    for are_scores, part in ((True, " of its scores"), (False, " of its other values")):
        own, own_ref = (scores.take(array, are_scores=are_scores) for array in (out, ref))
        own_facts = replace(facts, nature="unit") if are_scores else facts
        own_elsewhere = elsewhere.part(scores, are_scores=are_scores)
        deviation = _Deviation(own, own_ref, own_facts, limits.unit, own_elsewhere, scores.axis)
        agreement = _agreement_of(name, deviation)
        agreement = _judge(agreement, deviation, limits, None if parts else row, part)
        if (worst := agreement.worst) is not None and worst.axis == scores.axis:
            worst = replace(worst, index=int(scores.indices[are_scores][worst.index]))
            agreement = replace(agreement, worst=worst)
        parts.append(agreement)
    (agreement,) = worst_agreements(parts)
    excesses = tuple(excess for part in parts for excess in part.excesses)
    return replace(agreement, excesses=excesses) if excesses else agreement


def _compare_exact(name: str, aligned: Aligned, limits: Tolerance, row: _Row | None) -> Agreement:
    """Compare values that are equal or not."""
    # One in ten may differ: near ties, an index changes with the rounding.
    limits = replace(limits, snr=limits.snr / (2 if aligned.rows is None else 1))
    ref: Numbers = np.ones(aligned.reference.shape)
    out: Numbers = (aligned.output == aligned.reference).astype(np.float64)
    deviation = _Deviation(out, ref, OutputFacts(), limits.unit, Elsewhere())
    agreement = _agreement_of(name, deviation)
    # Each value is right or wrong: slices show nothing more; for selected rows only their own ratios do.
    snr = agreement.snr if aligned.rows is None else None
    agreement = replace(agreement, worst=None, worst_snr=None, snr=snr, cosine=None)
    return _judge(agreement, deviation, limits, row)


def _worst_row(aligned: Aligned) -> _Row | None:
    """The worst of the selected rows, batch x rows, and its ratio."""
    rows, shape = aligned.rows, aligned.reference.shape
    if rows is None or (shape and rows.shape[1] not in shape):
        return None
    ratios = rows.min(axis=0)
    index = int(ratios.argmin())
    axis = shape.index(rows.shape[1]) if shape else 0
    return float(ratios[index]), Slice(axis, index, len(shape))


def _judge(
    agreement: Agreement, deviation: _Deviation, limits: Tolerance, row: _Row | None, part: str = ""
) -> Agreement:
    """Judge an ``agreement`` as measured, that of ``part`` of an output, if not of all of it."""
    excesses = []
    # Ratios, what they are at least, and their names.
    ratios: list[tuple[float, float, str]] = []
    if (snr := agreement.snr) is not None:
        ratios.append((snr, limits.snr, f"signal to noise{part}"))
    if agreement.worst is not None and agreement.worst_snr is not None:
        least = limits.snr - deviation.allowance(agreement.worst.axis)
        text = f"signal to noise in {agreement.worst.text}{part}"
        ratios.append((agreement.worst_snr, least, text))
    if row is not None:
        ratios.append((row[0], limits.snr, f"signal to noise in {row[1].text}"))
    for ratio, least, text in ratios:
        if ratio < least:
            excesses.append(Excess(text, f"{ratio:.1f} dB", f"at least {least:g} dB"))
    if agreement.cosine is not None and agreement.cosine < limits.cosine:
        value, limit = f"{agreement.cosine:.5f}", f"at least {limits.cosine:g}"
        excesses.append(Excess(f"cosine{part}", value, limit))
    if limits.atol is not None or limits.rtol is not None:
        rtol, atol = limits.rtol or 0.0, limits.atol or 0.0
        beyond = np.abs(deviation.error) - (atol + rtol * np.abs(deviation.ref))
        if beyond.size and beyond.max() > 0:
            value, limit = f"{agreement.max_abs:.3g}", f"at most atol {atol:g}, rtol {rtol:g}"
            excesses.append(Excess("largest difference", value, limit))
    # JSON has no infinity.
    margin = max(min(r - least for r, least, _ in ratios), NOTHING) if ratios else None
    if not excesses:
        return replace(agreement, margin=margin)
    status = AgreementStatus.DIFFERS
    return replace(agreement, margin=margin, status=status, excesses=tuple(excesses))


def _agreement_of(name: str, deviation: _Deviation) -> Agreement:
    """How near an output is, without any limits."""
    ref = deviation.ref
    largest_error = float(np.abs(deviation.error).max(initial=0.0))
    if not largest_error:
        return Agreement(name, 0.0, 1.0)
    slices: list[_Row] = []
    for axis, size in enumerate(ref.shape):
        are_columns = deviation.are_columns(axis)
        if size < 2 or (deviation.facts.is_state and not are_columns):
            continue
        ratios = deviation.decibels(axis)
        index = int(np.argsort(ratios)[0 if are_columns else size // MANY])
        if np.isfinite(ratios[index]):
            slices.append((float(ratios[index]), Slice(axis, index, ref.ndim)))
    ratio, worst = min(
        slices, key=lambda item: item[0] + deviation.allowance(item[1].axis), default=(None, None)
    )
    # Of values that are all 0 there is no signal.
    snr = max(float(deviation.decibels(None)), NOTHING)
    return Agreement(name, largest_error, deviation.cosine, snr, worst, ratio)


@dataclass(frozen=True)
class _Deviation:
    """Signal and noise of the whole output (for the axis None), or of each slice of an ``axis``.

    ``joined``: the axis along which scores are joined with other values. Its slices, such as classes, are the
    columns of a table, however many they are.
    """

    out: Numbers
    ref: Numbers
    facts: OutputFacts
    unit: float
    elsewhere: Elsewhere
    joined: int | None = None

    @cached_property
    def error(self) -> Numbers:
        """The difference of each value."""
        return self.out - self.ref

    @cached_property
    def power(self) -> Numbers:
        """The signal of each value."""
        return self.ref**2

    @cached_property
    def noise(self) -> Numbers:
        """The noise of each value."""
        return self.error**2

    @cached_property
    def mean(self) -> float:
        """The mean signal of a value."""
        return float(self._mean(self.power, None))

    @cached_property
    def whole(self) -> float:
        """The signal of the whole output."""
        return float(self.signal(None))

    @cached_property
    def largest(self) -> float:
        """The largest value, also in other samples."""
        largest = max(float(np.abs(self.ref).max()), self.elsewhere.largest(self.ref.shape))
        return max(largest, 1.0) if self.facts.nature in ("unit", "probabilities") else largest

    @property
    def cosine(self) -> float | None:
        """The cosine similarity; None if the output is so near zero that its direction is only rounding."""
        if self.mean < self.whole:
            return None
        out, ref = self.out.ravel(), self.ref.ravel()
        norms = math.sqrt(out @ out) * math.sqrt(ref @ ref)
        return min(float(out @ ref) / norms, 1.0) if norms else None

    def are_columns(self, axis: int | None) -> bool:
        """Whether the slices of ``axis`` are the columns of a table."""
        size = self._size(axis)
        slices = self.ref.size // size
        return slices <= size and (slices <= MANY or axis == self.joined)

    def allowance(self, axis: int) -> float:
        """The decibels by which the ratio of a slice may be worse than that of the whole output."""
        return _COLUMN if self.are_columns(axis) else _SLICE

    def signal(self, axis: int | None) -> Numbers:
        """That of the output or of each slice, with its floor."""
        size = self._size(axis)
        floor = max(self.largest**2 * self._part(size), self._quantized**2)
        if not self.are_columns(axis):
            floor = max(floor, self.whole * (self.ref.size // size) / MANY)
        return self._above(floor, axis)

    def decibels(self, axis: int | None) -> Numbers:
        """The signal-to-noise ratio of the output or of each slice."""
        noise = self._mean(self.noise, axis)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = (self.whole if axis is None else self.signal(axis)) / noise
            are_many = self._size(axis) > _SHARES
            if self.facts.nature == "unit" and are_many and self.are_columns(axis):
                ratio = np.minimum(ratio, self._peaks(axis))
            return np.asarray(10 * np.log10(ratio))

    def _mean(self, values: Numbers, axis: int | None) -> Numbers:
        """The mean of ``values`` in the output, or in each slice: as NumPy's own, which takes twice as long
        for few values.
        """
        size = self._size(axis)
        if axis is not None and size == 1:
            return values.reshape(-1)
        return np.asarray(np.add.reduce(values, self._others(axis)) / size)

    def _others(self, axis: int | None) -> _Axes:
        """The axes of a slice."""
        return None if axis is None else tuple(n for n in range(self.ref.ndim) if n != axis)

    def _size(self, axis: int | None) -> int:
        """The number of values of the output, or of a slice."""
        return self.ref.size // (1 if axis is None else self.ref.shape[axis])

    def _peaks(self, axis: int | None) -> Numbers:
        """The ratio of what is beyond the rounding of small scores, with a floor in a few values.

        Otherwise the floors of thousands of values that are no score would hide a score that is missing.
        """
        small = max(self.largest * self.unit, self._quantized)
        noise = np.maximum(np.abs(self.error) - _NOISE * small, 0.0)
        # As in a column, a few values are nearer to the limit than the whole output.
        more = 10 ** (_COLUMN / 10) if axis is None else 1.0
        signal = self._above(small**2 * _SHARES / self._size(axis), axis)
        return np.asarray(more * signal / self._mean(noise**2, axis))

    def _above(self, floor: float, axis: int | None) -> Numbers:
        """The signal, at least the ``floor`` and a part of that in other samples."""
        own = self.mean if axis is None else self._mean(self.power, axis)
        signal: Numbers = np.maximum(own, floor)
        elsewhere = self.elsewhere.signal(self.ref.shape, self._others(axis))
        return np.maximum(signal, _OTHER_SAMPLES**2 * elsewhere) if elsewhere.size else signal

    @property
    def _quantized(self) -> float:
        """The size of values of a quantized output that are mostly rounding."""
        return _SCALES * self.facts.scale

    def _part(self, size: int) -> float:
        """The part of the largest value, squared, that counts as signal in each of ``size`` values."""
        nature = self.facts.nature
        if self.ref.size == 1 and nature in ("unit", "probabilities"):
            return (_SCORE * self.unit) ** 2
        if nature == "probabilities":
            return self.unit**2 * min(1.0, _SHARES / size)
        return (self.unit if nature == "unit" else SIGNAL_PART) ** 2


def _finite(output: Array, reference: Array) -> tuple[Numbers, Numbers]:
    """Both as numbers: tiny ones as zeros, zeros where either is NaN, and Inf as the largest finite value."""
    out, ref = np.array(output, np.float64), np.array(reference, np.float64)
    for array in (out, ref):
        array[np.abs(array) < TINY] = 0.0
    if np.isfinite(out).all() and np.isfinite(ref).all():
        return out, ref
    largest = max(float(np.abs(ref[np.isfinite(ref)]).max(initial=0.0)), 1.0)
    known = ~(np.isnan(out) | np.isnan(ref))
    ends = np.where(np.isinf(ref), largest, np.inf)
    out, ref = np.clip(out, -ends, ends), np.clip(ref, -ends, ends)
    known &= np.isfinite(out)
    return np.where(known, out, 0.0), np.where(known, ref, 0.0)


def worst_agreements(agreements: Iterable[Agreement]) -> tuple[Agreement, ...]:
    """The worst of the ``agreements`` of each output."""
    worst: dict[str, Agreement] = {}
    for agreement in agreements:
        other = worst.get(agreement.output)
        worst[agreement.output] = _worst_of(other, agreement) if other else agreement
    return tuple(worst.values())


def _worst_of(one: Agreement, other: Agreement) -> Agreement:
    """The worst of two agreements of the same output."""
    by_slice = one, other
    if one.worst_snr is None or (other.worst_snr is not None and other.worst_snr < one.worst_snr):
        by_slice = other, one
    gaps = [gap for gap in (one.gap, other.gap) if gap is not None]
    statuses = (one, other) if one.status is not AgreementStatus.AGREES else (other, one)
    return replace(
        statuses[0],
        max_abs=max(one.max_abs, other.max_abs),
        cosine=_least(one.cosine, other.cosine),
        snr=_least(one.snr, other.snr),
        margin=_least(one.margin, other.margin),
        worst=by_slice[0].worst,
        worst_snr=by_slice[0].worst_snr,
        gap=max(gaps, default=None),
    )


def _least(one: float | None, other: float | None) -> float | None:
    return min((number for number in (one, other) if number is not None), default=None)
