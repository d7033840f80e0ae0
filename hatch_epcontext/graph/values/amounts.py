"""How large integers are that a graph divides, scales, or takes a logarithm of."""

from __future__ import annotations

import math

import numpy as np

from hatch_epcontext.graph.dtypes import Numbers
from hatch_epcontext.graph.values.conventions import DEVIATIONS
from hatch_epcontext.graph.values.linear import LinearTerm

_MAX_AMOUNT, _MANY = 2.0**24, 1024.0
"""The same of float32, up to which a logarithm is of integers; and how many times what is usual in the unit
that a factor shows.
"""
LONG = 1000
"""The divisor from which a division is of large integers, as of times and identifiers."""

_FEWEST_LEVELS, _SLIGHT = 128.0, 0.01
"""The least full scale, and the part of it that only keeps values from 0."""

BUCKETS = 100
"""The modulus from which a remainder is that of identifiers."""

_SECONDS = frozenset({3600, 86400, 604800})
"""Hours, days and weeks in seconds: seconds since 1970 have 32 bits until 2038."""


def are_long(divisors: Numbers, least: int) -> bool:
    """Whether a division by these, of which one is ``least`` or more, is of large integers."""
    sizes = np.abs(divisors.astype(np.int64)).ravel()
    are_powers = (sizes > 0) & (sizes & (sizes - 1) == 0)
    of_clocks = [int(size) in _SECONDS for size in sizes]
    return bool((sizes >= least).any()) and not (are_powers.all() or all(of_clocks))


def of_logarithm(term: LinearTerm) -> float:
    """The largest integer of which a logarithm is usual, of all sizes."""
    return max(_MAX_AMOUNT, _MANY * expected(abs(term.scale)))


def full_scale(term: LinearTerm) -> float:
    """The largest integer of some bits that a graph scales to 1, as what a sensor has above black; else 0."""
    one = term.input_of(1.0)
    if one < _FEWEST_LEVELS:
        return 0.0
    full = 2.0 ** round(math.log2(one)) - 1
    is_full = abs(term.scale * full + term.offset - 1) < _SLIGHT
    return full if is_full else 0.0


def is_decimal(number: float) -> bool:
    """Whether ``number`` is 10 or a power of that."""
    exponent = round(math.log10(number)) if number >= 1 else 0
    return exponent > 0 and math.isclose(number, 10.0**exponent)


def expected(scale: float) -> float:
    """The largest number that a graph multiplies by ``scale``: 1 over a power of two is for full scale."""
    is_full = math.frexp(scale)[0] == 0.5
    return (1 if is_full else DEVIATIONS) / scale
