"""How near the outputs of a model are to its reference: as a whole, and in each slice.

The measures are relative: the signal-to-noise ratio in decibels, 10 log10(sum ref^2 / sum (out - ref)^2),
and the cosine similarity. A whole output can be near its reference while a part of it is wrong, such as
the scores beside the boxes of a detector. So each slice of each axis is compared too.

Values near zero have more noise than signal. So the signal of an output, and of a slice, has a floor: a part
of the signal in other samples, a smaller part of the output's largest value, and 32 steps of a quantized
output. For one slice among many, such as a feature of an embedding, a part of the output's signal is a floor
too. `docs/validation.md` explains what that means for a user.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hatch_epcontext.graph.arrays import STRING, Array
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.results import NOTHING, Agreement, AgreementStatus, Slice

Nature = Literal["any", "unit", "probabilities", "indices"]
"""The nature of an output's values: any; between -1 and 1 (after a Sigmoid); probabilities that add up to 1
(after a Softmax); or indices (of ArgMax), which are equal or not."""

_COLUMN = 10.0
"""Decibels by which the ratio of a column of a table may be worse than that of the whole output."""

_SLICE = 7.0
"""The same for any other slice: it has a larger part of the output's signal."""

MANY = 100
"""One in this many slices of an axis may have any error. The floor of a slice's energy is one part in this
many of the whole output's, unless the slice is a column of a table: an axis with at most this many slices,
each with at least this many values.
"""

_OTHER_SAMPLES = 0.1
"""The part of the signal in other samples that counts as signal in this one."""

SIGNAL_PART = 1e-3
"""The part of an output's largest value that counts as signal in each place: twice float16's precision.

For values between -1 and 1 the `unit` of the limits replaces it.
"""

_QUANTIZATION_STEPS = 32.0
"""The steps of a quantized output that count as signal in each place: an error of one step is 30 dB."""

_SCORE = 5.0
"""The units that a single score counts as: on an NPU an error of 0.05 is 20 dB, whatever the threshold."""

_STATE = 6.0
"""Decibels that a state may have below the limit: if its error matters, outputs of later steps differ."""

_SHARES = 64
"""The number of places in a slice that can have that signal if all values are probabilities."""

Numbers = NDArray[np.float64]

_Axes = tuple[int, ...] | None


class Elsewhere:
    """An output of the reference in other ``samples``; its measures are computed once."""

    def __init__(self, samples: Sequence[Array] = ()) -> None:
        self._samples = samples
        self._numbers: dict[tuple[int, ...], list[Numbers]] = {}
        self._signals: dict[tuple[tuple[int, ...], _Axes], Numbers] = {}

    def largest(self, shape: tuple[int, ...]) -> float:
        """The largest magnitude in samples of this ``shape``."""
        return math.sqrt(float(self.signal(shape, ()).max(initial=0.0)))

    def signal(self, shape: tuple[int, ...], axes: _Axes) -> Numbers:
        """The largest of the mean squares over ``axes`` in samples of this ``shape``; empty without any."""
        key = shape, axes
        if key not in self._signals:
            means = [(each**2).mean(axis=axes) for each in self._of(shape)]
            self._signals[key] = np.asarray(np.maximum.reduce(means) if means else np.zeros(0))
        return self._signals[key]

    def _of(self, shape: tuple[int, ...]) -> list[Numbers]:
        if shape not in self._numbers:
            found = [_numbers(each) for each in self._samples if each.shape == shape]
            self._numbers[shape] = found
        return self._numbers[shape]


@dataclass(frozen=True)
class Comparison:
    """How near an output is to its reference; ``excesses`` is empty if all limits hold.

    ``needed``: for each exceeded limit, one that this output meets. ``margin``: the decibels by which its
    signal-to-noise ratios are above the limits, negative if one is below, and ``snr`` the ratio of the whole
    output with that margin.
    """

    agreement: Agreement
    excesses: tuple[str, ...]
    needed: Mapping[str, float]
    margin: float = math.inf
    snr: float = math.inf


def compare(
    name: str,
    output: Array,
    reference: Array,
    limits: Tolerance,
    *,
    elsewhere: Elsewhere | None = None,
    nature: Nature = "any",
    quantization_step: float = 0.0,
    rows: Numbers | None = None,
    is_state: bool = False,
) -> Comparison:
    """Compare ``output`` with ``reference``; places where either is NaN are left out.

    ``elsewhere``: the same output of the reference for other inputs. ``quantization_step``: the step between
    its values, if it is quantized. ``rows``: for selected rows, the signal-to-noise ratio of each in
    decibels. ``is_state``: whether only the model itself reads it: then single features mean nothing, and
    the limit is lower. Strings, booleans and other indices are equal or not. Both have the same shape.
    """
    if is_state:
        limits = replace(limits, snr=limits.snr - _STATE)
    exact = reference.dtype == STRING or reference.dtype.kind == "b" or nature == "indices"
    if exact:
        # One in ten may differ: near ties, an index changes with the rounding.
        limits = replace(limits, snr=limits.snr / (2 if rows is None else 1), cosine=0.0)
        ref: Numbers = np.ones(reference.shape)
        out: Numbers = (output == reference).astype(np.float64)
        nature, elsewhere = "any", None
    else:
        out, ref = _finite(output, reference)
    agreement = _measure(
        name, out, ref, elsewhere or Elsewhere(), nature, limits.unit, quantization_step, is_state
    )
    if exact:
        # Each place is right or wrong: slices show nothing more; for selected rows only their own ratios do.
        snr = agreement.snr if rows is None else None
        agreement = replace(agreement, worst=None, snr=snr)
    row = None if rows is None else _worst_row(rows, ref.shape)
    return _judge(agreement, out, ref, limits, row)


def other_shape(name: str, output: Array, reference: Array) -> Agreement | None:
    """The agreement of an ``output`` with another shape than ``reference``; None if the shapes are equal."""
    if output.shape == reference.shape:
        return None
    reason = (
        f"the output {name!r} has the shape {list(output.shape)}, but {list(reference.shape)} on the "
        "CPU."
    )
    return Agreement(name, 0.0, None, status=AgreementStatus.OTHER_SHAPE, reason=reason)


def _worst_row(rows: Numbers, shape: tuple[int, ...]) -> Slice | None:
    """The worst of ``rows``, batch x rows, of an output with ``shape``."""
    if shape and rows.shape[1] not in shape:
        return None
    ratios = rows.min(axis=0)
    index = int(ratios.argmin())
    axis = shape.index(rows.shape[1]) if shape else 0
    return Slice(axis, index, len(shape), float(ratios[index]))


def _judge(
    agreement: Agreement, out: Numbers, ref: Numbers, limits: Tolerance, row: Slice | None
) -> Comparison:
    excesses = []
    needed: dict[str, float] = {}
    margins = [math.inf]
    if agreement.snr is not None:
        margins.append(agreement.snr - limits.snr)
    if agreement.snr is not None and agreement.snr < limits.snr:
        excesses.append(
            f"a signal-to-noise ratio of {agreement.snr:.1f} dB (at least {limits.snr:g})"
        )
        needed["snr"] = agreement.snr
    for worst, least in (
        (agreement.worst, limits.snr - _less(ref.shape, agreement.worst)),
        (row, limits.snr),
    ):
        if worst is None:
            continue
        margins.append(worst.snr - least)
        if worst.snr < least:
            excesses.append(f"{worst.snr:.1f} dB in {worst.text} (at least {least:g})")
            needed["snr"] = min(needed.get("snr", limits.snr), limits.snr + worst.snr - least)
    if agreement.cosine is not None and agreement.cosine < limits.cosine:
        excesses.append(f"a cosine of {agreement.cosine:.5f} (at least {limits.cosine:g})")
        needed["cosine"] = agreement.cosine
    if limits.atol is not None or limits.rtol is not None:
        rtol, atol = limits.rtol or 0.0, limits.atol or 0.0
        beyond = np.abs(out - ref) - (atol + rtol * np.abs(ref))
        if beyond.size and beyond.max() > 0:
            excesses.append(
                f"a largest difference of {agreement.max_abs:.3g} (allowed: atol {atol:g}, rtol {rtol:g})"
            )
            needed["atol"] = atol + float(beyond.max())
    margin = min(margins)
    # JSON has no infinity.
    known = None if margin == math.inf else max(margin, NOTHING)
    agreement = replace(agreement, margin=known)
    return Comparison(agreement, tuple(excesses), needed, margin, margin + limits.snr)


def _is_column(slices: int, places: int) -> bool:
    """Whether an axis of ``slices`` with ``places`` each is that of the columns of a table."""
    return slices <= min(MANY, places)


def _less(shape: tuple[int, ...], of: Slice | None) -> float:
    """The decibels by which a slice's ratio may be worse than that of the whole output."""
    size = shape[of.axis] if of else 1
    return _COLUMN if _is_column(size, math.prod(shape) // max(size, 1)) else _SLICE


def _measure(
    name: str,
    out: Numbers,
    ref: Numbers,
    elsewhere: Elsewhere,
    nature: Nature,
    unit: float,
    quantization_step: float,
    is_state: bool,
) -> Agreement:
    if not ref.size:
        return Agreement(name, 0.0, 1.0)
    error = out - ref
    largest_error = float(np.abs(error).max())
    if not largest_error:
        return Agreement(name, 0.0, 1.0)
    largest = max(float(np.abs(ref).max()), elsewhere.largest(ref.shape))
    if nature in ("unit", "probabilities"):
        largest = max(largest, 1.0)
    measure = _Measure(error, ref, elsewhere, largest, nature, unit, quantization_step)
    slices = []
    for axis, size in enumerate(ref.shape):
        if size < 2 or (is_state and not _is_column(size, ref.size // size)):
            continue
        ratios = measure.decibels(tuple(each for each in range(ref.ndim) if each != axis))
        index = int(np.argsort(ratios)[size // MANY])
        if np.isfinite(ratios[index]):
            slices.append(Slice(axis, index, ref.ndim, float(ratios[index])))
    worst = min(slices, key=lambda each: each.snr + _less(ref.shape, each), default=None)
    return Agreement(
        name, largest_error, _cosine(out, ref, measure), float(measure.decibels(None)), worst
    )


def _cosine(out: Numbers, ref: Numbers, measure: _Measure) -> float | None:
    """The cosine similarity; None if the output is so near zero that its direction is only rounding."""
    norms = float(np.linalg.norm(out) * np.linalg.norm(ref))
    if not norms or float(np.mean(measure.power)) < measure.whole:
        return None
    return min(float(out.ravel() @ ref.ravel()) / norms, 1.0)


@dataclass(frozen=True)
class _Measure:
    """Signal and noise, as means over ``axes``: all axes for the whole output (None), or all but one."""

    error: Numbers
    ref: Numbers
    elsewhere: Elsewhere
    largest: float
    nature: Nature
    unit: float
    quantization_step: float

    @cached_property
    def power(self) -> Numbers:
        """The signal in each place."""
        return self.ref**2

    @cached_property
    def whole(self) -> float:
        """The signal of the whole output."""
        return float(self.signal(None))

    def signal(self, axes: _Axes) -> Numbers:
        own = np.asarray(self.power.mean(axis=axes))
        places = self.ref.size // own.size
        floor = max(
            self.largest**2 * self._part(places),
            (_QUANTIZATION_STEPS * self.quantization_step) ** 2,
        )
        if not _is_column(own.size, places):
            floor = max(floor, self.whole * own.size / MANY)
        elsewhere = self.elsewhere.signal(self.ref.shape, axes)
        found: Numbers = np.maximum(own, floor)
        if elsewhere.size:
            found = np.maximum(found, _OTHER_SAMPLES**2 * elsewhere)
        return found

    def decibels(self, axes: _Axes) -> Numbers:
        noise = np.asarray((self.error**2).mean(axis=axes))
        with np.errstate(divide="ignore"):
            return np.asarray(10 * np.log10(self.signal(axes) / noise))

    def _part(self, places: int) -> float:
        """The part of the largest value, squared, that counts as signal in each of ``places``."""
        if self.ref.size == 1 and self.nature in ("unit", "probabilities"):
            return (_SCORE * self.unit) ** 2
        if self.nature == "probabilities":
            return self.unit**2 * min(1.0, _SHARES / places)
        return (self.unit if self.nature == "unit" else SIGNAL_PART) ** 2


def _finite(output: Array, reference: Array) -> tuple[Numbers, Numbers]:
    """Both as numbers: zeros where either is NaN, and Inf limited to the largest finite value."""
    out, ref = np.asarray(output, np.float64), np.asarray(reference, np.float64)
    if np.isfinite(out).all() and np.isfinite(ref).all():
        return out, ref
    largest = max(float(np.abs(ref[np.isfinite(ref)]).max(initial=0.0)), 1.0)
    known = ~(np.isnan(out) | np.isnan(ref))
    ends = np.where(np.isinf(ref), largest, np.inf)
    out, ref = np.clip(out, -ends, ends), np.clip(ref, -ends, ends)
    known &= np.isfinite(out)
    return np.where(known, out, 0.0), np.where(known, ref, 0.0)


def _numbers(array: Array) -> Numbers:
    return np.nan_to_num(np.asarray(array, np.float64), nan=0.0, posinf=0.0, neginf=0.0)
