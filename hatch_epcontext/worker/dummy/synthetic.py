"""Values of synthetic inputs: arrays of a range, the same in every run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from hatch_epcontext.graph.arrays import Array, is_float, numpy_dtype
from hatch_epcontext.graph.facts import Range, TensorFacts
from hatch_epcontext.graph.values.kinds import DEVIATIONS

SampleName = Literal["random", "zeros", "ones", "largest", "smallest", "scaled"]
"""The kinds of synthetic values."""

_WORDS = ("alpha", "beta")


def assumed_range(facts: TensorFacts) -> Range:
    """The range of an input of which no graph is known: 0 and 1 are indices in every table."""
    if facts.dtype == "string" or not _is_real(facts):
        return Range(0.0, 1.0, known=False, whole=True)
    return Range(-DEVIATIONS, DEVIATIONS, known=False)


def _is_real(facts: TensorFacts) -> bool:
    dtype = numpy_dtype(facts.dtype)
    return is_float(dtype) or dtype.kind == "c"


def values(name: SampleName, facts: TensorFacts, range_: Range, rng: np.random.Generator) -> Array:
    """Return an array for the input ``facts``, whose open dimensions have the size 1.

    What has a usual value, such as a length, always has it. Raises TypeError for a dtype that NumPy and
    ml_dtypes do not have.
    """
    shape = tuple(size if isinstance(size, int) else 1 for size in facts.shape)
    if facts.dtype == "string":
        return _strings(name, shape, rng)
    dtype = numpy_dtype(facts.dtype)
    if range_.usual is not None:
        found = np.full(shape, range_.usual)
        if name == "smallest" and _is_padding_mask(range_, shape):
            found[..., shape[-1] - shape[-1] // 2 :] = range_.low
        return found.astype(dtype)
    return np.asarray(_MAKERS[name](shape, range_, rng)).astype(dtype)


def _strings(name: SampleName, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    chosen = rng.integers(0, 2, shape) if name == "random" else np.zeros(shape, int)
    return np.asarray(np.array(_WORDS, dtype=object)[chosen], dtype=object)


def _is_padding_mask(range_: Range, shape: tuple[int, ...]) -> bool:
    is_mask = (range_.low, range_.high, range_.usual) == (0, 1, 1)
    return is_mask and len(shape) > 1 and shape[-1] > 1


_Maker = Callable[[tuple[int, ...], Range, np.random.Generator], Array]


def _random(shape: tuple[int, ...], range_: Range, rng: np.random.Generator) -> Array:
    if range_.is_open:
        return np.asarray(rng.standard_normal(shape) * (range_.high / DEVIATIONS))
    if range_.whole:
        return _integers(shape, int(range_.low), int(range_.high), rng)
    return np.asarray(rng.uniform(range_.low, range_.high, shape))


def _integers(shape: tuple[int, ...], low: int, high: int, rng: np.random.Generator) -> Array:
    """Integers from ``low`` to ``high``: each of them, where there is room for all."""
    found = rng.integers(low, high, shape, endpoint=True)
    flat = found.reshape(-1)
    if flat.size > high - low:
        flat[: high - low + 1] = np.arange(low, high + 1)
    elif flat.size > 1:
        flat[:2] = low, high
    rng.shuffle(flat)
    return flat.reshape(shape)


def _constant(number: float) -> _Maker:
    def make(shape: tuple[int, ...], range_: Range, rng: np.random.Generator) -> Array:
        return np.full(shape, min(max(number, range_.low), range_.high))

    return make


def _scaled(shape: tuple[int, ...], range_: Range, rng: np.random.Generator) -> Array:
    found = _random(shape, range_, rng)
    return np.multiply(found.astype(np.float64), DEVIATIONS) if range_.is_open else found


_MAKERS: Mapping[SampleName, _Maker] = {
    "random": _random,
    "zeros": _constant(0.0),
    "ones": _constant(1.0),
    "largest": lambda shape, range_, rng: np.full(shape, range_.high),
    "smallest": lambda shape, range_, rng: np.full(shape, range_.low),
    "scaled": _scaled,
}
