"""Rows of outputs, such as the boxes of a detector, as a set: each is compared with the source's nearest one.

Rounding swaps rows with nearly the same scores, and others come and go at a limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hatch_epcontext.graph.dtypes import Arrays, Numbers
from hatch_epcontext.graph.selections import Columns
from hatch_epcontext.worker.comparison.measures import SIGNAL_PART, TINY, Aligned

LOST = 0.01
"""The noise from which a row is another row."""

WRONG = 1e3
"""The noise of a whole number that is not the right one."""

_MAX_PAIRS = 2**24
"""The most pairs of rows and candidates that are compared."""

_NEIGHBOUR = 1e-9
"""The distance of neighbouring rows."""

_FAR = 1e100
"""How far NaN and Inf are from other numbers."""

Indices = NDArray[np.intp]
"""Those of rows."""


class Rows:
    """Rows of ``columns`` in outputs: batch x rows x all columns. The source's, in ``ref``, give the signal.

    ``unit``: that of the limits of scores. Without one each column has a signal of its own. ``elsewhere``:
    the source's outputs for other inputs.
    """

    def __init__(
        self,
        columns: Sequence[Columns],
        ref: Arrays,
        unit: float | None = None,
        elsewhere: Sequence[Arrays] = (),
    ) -> None:
        self.columns = columns
        parts = [span.of(ref) for span in columns]
        self._ends = np.cumsum([part.shape[2] for part in parts])[:-1]
        weights = [
            _weights(span, part, unit, _largest(part, *map(span.of, elsewhere)))
            for span, part in zip(columns, parts, strict=True)
        ]
        self._weights = np.concatenate(weights)

    def of(self, arrays: Arrays) -> Numbers:
        """The rows in ``arrays``."""
        return np.concatenate([span.of(arrays) for span in self.columns], axis=2)

    def split(self, rows: Numbers) -> list[Numbers]:
        """Views of ``rows``, one for each of the columns."""
        return np.split(rows, self._ends, axis=2)

    def noise(self, own: Numbers, ref: Numbers) -> Numbers:
        """That of each row of ``own``: columns x batch x rows."""
        is_same = (own == ref) | (np.isnan(own) & np.isnan(ref))
        with np.errstate(invalid="ignore"):
            differences = np.nan_to_num(own - ref, nan=_FAR, posinf=_FAR, neginf=_FAR)
        parts = self.split((np.where(is_same, 0.0, differences) * self._weights) ** 2)
        return np.stack([part.sum(axis=2) for part in parts])

    def match(self, own: Numbers, ref: Numbers) -> tuple[Indices, Numbers, Numbers]:
        """For each row of ``own`` one of ``ref``, the nearest pairs first: its index, its values, its noise.

        The index is -1, and the noise large, where none is left.
        """
        telling = (np.nan_to_num(rows, posinf=0, neginf=0) * self._weights for rows in (own, ref))
        indices = np.stack([_nearest(*rows) for rows in zip(*telling, strict=True)])
        values = np.take_along_axis(ref, indices[..., None], axis=1)
        return indices, values, np.where(indices < 0, WRONG, self.noise(own, values))

    def among(self, own: Numbers, candidates: Arrays) -> tuple[Numbers, bool]:
        """``own`` with the nearest values of the source, where it has rows of these; and whether any are."""
        others, is_known = own.copy(), False
        weights = self.split(self._weights[None, None])
        for span, part, weight in zip(self.columns, self.split(others), weights, strict=True):
            source, width = candidates.get(span.values), part.shape[2]
            if source is None or span.is_whole or width not in np.cumprod((1, *source.shape[::-1])):
                continue
            if part.size * source.size > _MAX_PAIRS * width**2 or not source.size:
                continue
            rows = np.asarray(source, np.float64).reshape(-1, width)
            own_rows, ref_rows = (
                np.nan_to_num(array.reshape(-1, width) * weight[0], posinf=0, neginf=0)
                for array in (part, rows)
            )
            part[...] = rows[_distances(own_rows, ref_rows).argmin(axis=1)].reshape(part.shape)
            is_known = True
        return others, is_known

    def put(self, result: Mapping[str, Aligned], rows: Numbers, noise: Numbers) -> None:
        """Compare the outputs in ``result`` with ``rows``, which have ``noise``."""
        for span, part, row_noise in zip(self.columns, self.split(rows), noise, strict=True):
            aligned = result[span.output]
            own, ref = aligned.output, aligned.reference
            ref = np.array(ref if ref.shape == own.shape else own, ref.dtype)
            ref[..., span.start : span.stop] = part.reshape(ref[..., span.start : span.stop].shape)
            aligned.reference = ref
            aligned.add(row_noise)


def _largest(*arrays: Numbers) -> float:
    """The largest finite magnitude in ``arrays``."""
    finite = (np.nan_to_num(array, posinf=0, neginf=0) for array in arrays)
    return max(float(np.abs(array).max(initial=0)) for array in finite)


def _weights(columns: Columns, ref: Numbers, unit: float | None, largest: float) -> Numbers:
    """The factor of the differences in each column, with which their squares add up to the noise."""
    count = ref.shape[2]
    if columns.is_whole:
        return np.full(count, math.sqrt(WRONG))
    power = np.nan_to_num(ref, posinf=0, neginf=0) ** 2
    signal = power.mean(axis=(0, 1)) if unit is None else np.full(count, count * power.mean())
    floor = floor_of(ref, unit) if unit and columns.is_score else SIGNAL_PART * largest
    return np.asarray(1 / np.sqrt(np.maximum(signal, max(floor**2, TINY))))


def _distances(own: Numbers, ref: Numbers) -> Numbers:
    squares = (own**2).sum(axis=1)[:, None] + (ref**2).sum(axis=1)
    return np.asarray(squares - 2 * own @ ref.T)


def _nearest(own: Numbers, ref: Numbers) -> Indices:
    # Of equal rows the one with the same index is the nearest.
    apart = np.abs(np.arange(len(own))[:, None] - np.arange(len(ref)))
    distances = _distances(own, ref) + _NEIGHBOUR * apart
    indices, rows, others = np.full(len(own), -1), np.arange(len(own)), np.arange(len(ref))
    while distances.size:
        # The nearest pair of all is one of those that are the nearest to each other.
        nearest = distances.argmin(axis=1)
        is_pair = distances.argmin(axis=0)[nearest] == np.arange(len(nearest))
        indices[rows[is_pair]] = others[nearest[is_pair]]
        rows, others = rows[~is_pair], np.delete(others, nearest[is_pair])
        distances = np.delete(distances[~is_pair], nearest[is_pair], axis=1)
    return indices


def floor_of(scores: Numbers, unit: float) -> float:
    """The floor of the signal: scores between 0 and 1 come from a Sigmoid or a Softmax."""
    finite = scores[np.isfinite(scores)]
    largest = float(np.abs(finite).max(initial=0))
    return unit if largest <= 1 and finite.min(initial=0) >= 0 else SIGNAL_PART * largest
