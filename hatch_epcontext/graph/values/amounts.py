"""How large integers are that a graph divides, scales, or takes a logarithm of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hatch_epcontext.graph.dtypes import MAX_EXACT, Array
from hatch_epcontext.graph.values.conventions import DEVIATIONS
from hatch_epcontext.graph.values.linear import LinearTerm

_EXACT_IN_FLOAT32, _LONGEST = 2.0**24, 1024.0
"""How large integers are of which a logarithm is taken: as far as float32 has all, and so many times what is
expected in the unit that a factor shows. A judgment: durations in ms that are scaled to minutes, of which 8
are expected, reach six days.
"""

LONG = 1000
"""The divisor from which a division is of large integers, as of times and identifiers."""

_FEWEST_LEVELS, _KEPT_FROM_0 = 128.0, 0.01
"""The least full scale, and the part of it that only keeps values from 0: 1 of 256 levels is 0.004, and half
of all would still tell one full scale from the next, which is twice as large.
"""

BUCKETS = 100
"""The modulus from which a remainder is that of identifiers."""

_SECONDS = frozenset({3600, 86400, 604800})
"""Hours, days and weeks in seconds: seconds since 1970 have 32 bits until 2038."""


@dataclass
class Divided:
    """The largest ``divisor`` of integers that shows that these are large, and the largest ``modulus``; 0
    without one. ``has_digits``: whether decimal digits are taken out of their middle.
    """

    divisor: float = 0.0
    modulus: float = 0.0
    has_digits: bool = False

    @property
    def reach(self) -> float:
        """How large the integers are; 0 if nothing shows it.

        Of decimal digits the first part has as many as the others together: that of a date is the year.
        """
        are_decimal = is_decimal(self.divisor) and is_decimal(self.modulus)
        # Milliseconds have no digits between seconds and the rest.
        in_digits = self.has_digits or (are_decimal and self.modulus < self.divisor)
        largest = max(self.divisor, self.modulus)
        return largest**2 if in_digits or not largest else MAX_EXACT


def are_long(divisors: Array, least: int) -> bool:
    """Whether a division by these, of which one is ``least`` or more, is of large integers: small divisors
    are of digits and clocks, and powers of two of bits, which integers of fewer bits have too.
    """
    sizes = np.abs(divisors.astype(np.int64)).ravel()
    are_powers = (sizes > 0) & (sizes & (sizes - 1) == 0)
    of_clocks = [int(size) in _SECONDS for size in sizes]
    return bool((sizes >= least).any()) and not (are_powers.all() or all(of_clocks))


def of_logarithm(term: LinearTerm) -> float:
    """The largest integer of which a logarithm is usual, of all sizes."""
    return max(_EXACT_IN_FLOAT32, _LONGEST * expected(abs(term.scale)))


def full_scale(term: LinearTerm) -> float:
    """The largest integer of some bits that a graph scales to 1, as what a sensor has above black; else 0."""
    one = term.input_of(1.0)
    if one < _FEWEST_LEVELS:
        return 0.0
    full = 2.0 ** round(math.log2(one)) - 1
    is_full = abs(term.scale * full + term.offset - 1) < _KEPT_FROM_0
    return full if is_full else 0.0


def is_decimal(number: float) -> bool:
    """Whether ``number`` is 10 or a power of that."""
    exponent = round(math.log10(number)) if number >= 1 else 0
    return exponent > 0 and math.isclose(number, 10.0**exponent)


def expected(scale: float) -> float:
    """The largest number that a graph multiplies by ``scale``: 1 over a power of two is for full scale."""
    is_full = math.frexp(scale)[0] == 0.5
    return (1 if is_full else DEVIATIONS) / scale
