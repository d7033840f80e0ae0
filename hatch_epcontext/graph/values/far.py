"""Values that the type and the graph allow, far from those of ordinary samples."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

import ml_dtypes
import numpy as np
import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.dtypes import Numbers, is_float, numpy_dtype
from hatch_epcontext.graph.facts import Far, InFloats, Range, TensorFacts
from hatch_epcontext.graph.number_format import FLOAT16
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.affine import scales
from hatch_epcontext.graph.values.conventions import DEVIATIONS, looks_like_image, looks_like_sound
from hatch_epcontext.graph.values.linear import INVALID, LinearTerm, LinearTerms, ends

_SMALL = 1000.0
"""Integers of both signs up to this one are small."""

_WITHIN = 4.0
"""The deviations within which nearly all floats are."""

_LARGE = 2.0**31 - 1
"""The largest integer of 32 bits: larger ones are left to what EPs declare."""

_IN_FLOATS = FLOAT16.largest
"""The largest float16: so are larger integers that become floats."""

_MAX_EXACT = 2.0**53
"""The integer up to which floats represent all integers."""

_MAX_AMOUNT, _MANY = 2.0**24, 1024.0
"""The same of float32, up to which a logarithm is of integers; and how many times what is usual in the unit
that a factor shows.
"""

FULL_SCALE, _OF_SOUND = 32768.0, 8000.0
"""That of int16, and the level of sound with this full scale."""

_SCALED = 64
"""The divisor from which floats that a graph scales are large."""

_WIDE, _NARROW = 1 / 8, 1 / 1000
"""The deviations around a constant, relative to it."""

_LEAST_DEVIATION = 1 / 200
"""The deviation relative to the mean that float16 represents at 26 dB."""

_MAX_CENTERS = 4096
"""The most numbers of a constant that is a center."""

_MAX_SENSORS = 8
"""The most series at one time: more are features."""

_MAX_COORDINATES = 3
"""The most different numbers of one position: more are the means of features, which vary."""

_DIGITS = 5
"""The units of the last digit of a constant within which values around it are."""

_LONG = 1000
"""The divisor from which a division is of large integers, as of times and identifiers."""

_FEWEST_LEVELS, _SLIGHT = 128.0, 0.01
"""The least full scale, and the part of it that only keeps values from 0."""

_BUCKETS = 100
"""The modulus from which a remainder is that of identifiers."""

_SECONDS = frozenset({3600, 86400, 604800})
"""Hours, days and weeks in seconds: seconds since 1970 have 32 bits until 2038."""

_ANGLES = (math.tau, 90.0, 120.0, 180.0, 360.0, 720.0)
"""The turns of angles in radians, and of halves and multiples of angles in degrees."""

_TURNS, _TIMES = 100.0, tuple(4.0**exponent for exponent in range(5))
"""How many turns counts have that are no angles, and how many times as many: days since 1900 are many weeks.
"""

_MAX_VALUES = 4
"""The most other values of a number that is compared."""

_OFFSET, _OF_INTEGERS = 1000.0, 48000.0
"""The offsets of values of which only differences count, such as prices, and of integers, such as clocks."""

_BESIDE_OFFSETS, _OF_WHOLE = (1 / 1000, 1 / 4000), (1 / 3000,)
"""The deviations beside an offset, relative to it: differences are lost in float16 from the first one on, and
means of their squares from the second one on.
"""

_OF_SQUARES = 1 / 50
"""The deviation, relative to values, below which the mean of squares less the square of the mean is lost."""

_SIZES = tuple(2.0**exponent for exponent in range(5, 20, 2))
"""The sizes of floats whose powers matter: from 32 to above the end of float16."""

_OF_DIFFERENT = 1 / 64
"""How small values may be beside those that they are subtracted from."""

_BRIGHTEST, _WIDEST = 255.0, 4095.0
"""The largest value of a pixel; and that of coordinates and sensors, which have up to 12 bits."""

_BESIDE = 200
"""A constant over the least level of floats beside it: float16 keeps 30 dB of these."""

_DEVIATION, _DIVISOR = 1 / 8, 2.0**-16
"""That of one value of 64 that is not 0, and the divisor from which reciprocals are float16s."""

_INDEXED = operators.GATHERS | {"ScatterElements", "ScatterND"}
"""Operators whose indices may be negative, and then count from the end."""

_PRODUCTS = frozenset({"Gemm", "MatMul", "Mul"})

_PERIODIC = frozenset({"Cos", "Sin", "Tan"})

_OF_SIGNALS = frozenset({"Conv", "DFT", "STFT"})


@dataclass
class Uses:
    """What a graph does with the values of an input.

    ``centers``: constants that it subtracts, or compares with. ``indexed``: the size of an axis in which they
    are indices. ``is_signal``: whether a filter reads them. ``scale``: the smallest factor by which it
    multiplies them. ``gain``: as in `Range`, of what it multiplies by stored integers; ``product``: of what
    it multiplies by each other. ``floats`` and ``reach``: as in `Range`. ``long`` and ``modulus``: the
    largest integers by which it divides them and of which it takes a remainder, if these show that they are
    large; ``has_digits``: whether it takes decimal digits out of their middle. ``skipping``: the value for
    which a Loop has no iteration. ``is_shifted``: whether it subtracts them, as floats, from neighbours,
    their mean or another input.
    ``size`` and ``degree``: up to which their powers matter, and the largest degree of these, see `powers`.
    ``is_wide``: whether such values differ in size. ``beside``: the largest constant that it adds to them.
    ``turn``: the shortest turn of what they count, such as hours; infinite for angles. ``is_weight``: whether
    it multiplies stored numbers that differ, such as coordinates, by them. ``exponent``: the largest integer
    of which, as the exponent of a stored number, the power is a float16. ``end``: the float nearest to 0 of
    which a power is beyond float16; infinite without one.
    """

    centers: list[Center] = field(default_factory=list)
    indexed: float = 0.0
    is_signal: bool = False
    scale: float = 1.0
    gain: float = 1.0
    product: float = 1.0
    floats: InFloats | None = None
    reach: float = 0.0
    long: float = 0.0
    modulus: float = 0.0
    has_digits: bool = False
    skipping: float | None = None
    is_shifted: bool = False
    size: float = 0.0
    degree: float = 0.0
    is_wide: bool = False
    beside: float = 0.0
    turn: float = math.inf
    is_weight: bool = False
    exponent: float = math.inf
    end: float = math.inf

    @property
    def turns(self) -> float:
        """The largest value that is usual where they are counted on, as days since a start; else 0."""
        return 0.0 if math.isinf(self.turn) else _TURNS * self.turn

    @property
    def divided(self) -> float:
        """How large integers are that the graph divides, or of which it takes a remainder; 0 if it does not.

        Of decimal digits the first part has as many as the others together: that of a date is the year.
        """
        are_decimal = _is_decimal(self.long) and _is_decimal(self.modulus)
        # Milliseconds have no digits between seconds and the rest.
        in_digits = self.has_digits or (are_decimal and self.modulus < self.long)
        largest = max(self.long, self.modulus)
        return largest**2 if in_digits or not largest else _MAX_EXACT

    @property
    def least(self) -> float:
        """As in `Range`."""
        of_powers = _DIVISOR ** (1 / self.degree) / _DEVIATION if self.degree else 0.0
        return max(self.beside / _BESIDE, of_powers)

    @property
    def thresholds(self) -> tuple[float, ...]:
        """All floats with which they are compared, in order."""
        compared = [np.ravel(center.values) for center in self.centers if center.rounded]
        return tuple(map(float, np.unique(np.concatenate(compared)))) if compared else ()


@dataclass(frozen=True)
class Center:
    """Constants ``values``, and the ``deviation`` by which their differences are divided, if they are.

    ``unit``: that of the last digits of the constants. ``compared``: whether these are thresholds;
    ``rounded``: those of floats.
    """

    values: Numbers
    deviation: Numbers | None = None
    unit: float = 0.0
    compared: bool = False
    rounded: bool = False


class UsesOfInputs:
    """Collects the uses of all inputs, node by node, in the order in which ``terms`` follows them."""

    def __init__(self, terms: LinearTerms) -> None:
        self._terms = terms
        self.scope = terms.scope
        self.of: defaultdict[str, Uses] = defaultdict(Uses)

    def add(self, node: onnx.NodeProto) -> None:
        """Add what ``node`` does; nothing for a malformed one."""
        try:
            self._add(node)
        except INVALID:
            return

    def add_outputs(self, names: Iterable[str]) -> None:
        """Add what outputs of the graph, called ``names``, have of inputs."""
        for name in names:
            self._add_factors(name)
            dtype = self._terms.scope.dtype(name)
            for term in self._own(name):
                is_plain = (term.scale, term.offset) == (1, 0)
                if dtype is not None and is_plain == (dtype.kind in "iu"):
                    # Identifiers are returned as they are, quantities in another unit.
                    self.of[term.input].reach = _MAX_EXACT

    def _add_factors(self, name: str) -> None:
        dtype = self._terms.scope.dtype(name)
        is_whole = dtype is not None and dtype.kind in "iu"
        for term in self._numbers(name):
            uses, factor = self.of[term.input], abs(term.scale)
            uses.scale = min(uses.scale, factor)
            uses.gain = max(uses.gain, factor if is_whole else 0.0)

    def _add(self, node: onnx.NodeProto) -> None:
        for name in node.input:
            self._add_factors(name)
        self._add_weights(node)
        self._add_product(node)
        self._add_exponent(node)
        self._add_end(node)
        self._add_sum(node)
        self._add_turn(node)
        operator = node.op_type if node.domain in graph.STANDARD else ""
        if operator in _OF_SIGNALS:
            for term in self._terms.of(node.input[0]):
                self.of[term.input].is_signal = True
        elif operator == "Loop":
            for term in self._own(node.input[0]):
                self.of[term.input].skipping = term.input_of(0)
        elif operator in _INDEXED:
            self._add_indices(node)
        elif operator == "Cast" and graph.attribute(node, "to", 0) in _FLOATS:
            # What is split has an end only in what it is scaled to.
            factor = max((float(np.abs(of).max()) for of in scales(node, self.scope)), default=1.0)
            for term in self._numbers(node.input[0]):
                scaled = term.times(factor)
                floats = InFloats(scaled.scale, scaled.offset, term.several)
                self.of[term.input].floats = floats
        elif operator in ("Div", "Log", "Mod"):
            self._add_reach(node)
            self._add_difference(node)
        elif operator in operators.COMPARES or operator in ("Add", "Sub"):
            self._add_centers(node)
            self._add_difference(node)
        elif operator == "BatchNormalization":
            self._add_mean(node)

    def _add_weights(self, node: onnx.NodeProto) -> None:
        for one, other in ((0, 1), (1, 0)) if node.op_type in _PRODUCTS else ():
            if len(ends(node.input[other], self.scope)) > 1:
                for term in self._numbers(node.input[one]):
                    self.of[term.input].is_weight = True

    def _add_sum(self, node: onnx.NodeProto) -> None:
        """Integers of which many are added up are so small that the sum is one."""
        dtype = self.scope.dtype(node.input[0]) if node.op_type in ("CumSum", "ReduceSum") else None
        if dtype is None or dtype.kind not in "iu":
            return
        sizes = self.scope.sizes(node.input[0]) or ()
        count = math.prod(sizes[axis] or 1 for axis in self.scope.axes(node) or ())
        for term in self._numbers(node.input[0]):
            uses = self.of[term.input]
            uses.gain = max(uses.gain, abs(term.scale) * count)

    def _add_turn(self, node: onnx.NodeProto) -> None:
        """Angles have a turn or two. What a graph scales otherwise before a sine, or before a remainder of
        floats, is counted on, as hours are.
        """
        period = self._period(node)
        for term in self._numbers(node.input[0]) if period else ():
            uses, turn = self.of[term.input], period * term.parts / abs(term.scale)
            is_angle = any(math.isclose(turn, angle, rel_tol=1e-2) for angle in _ANGLES)
            if not is_angle and not (node.op_type in _PERIODIC and turn < math.tau):
                uses.turn = min(uses.turn, turn)

    def _period(self, node: onnx.NodeProto) -> float:
        """That with which a result of the first operand repeats; 0 if none does."""
        scope, operator, operand = self.scope, node.op_type, node.input[0]
        if operator in _PERIODIC:
            return math.tau
        dtype = scope.dtype(operand)
        if operator == "Floor":
            return 1.0 if self._leaves_fraction(node) else 0.0
        factors = ends(node.input[1], scope) if operator in ("MatMul", "Mod") else ()
        largest = max(map(abs, factors), default=0.0)
        if operator == "Mod":
            return largest if dtype is not None and is_float(dtype) else 0.0
        # Each frequency times one number.
        is_outer = bool(largest) and (scope.sizes(node.input[1]) or (0,))[0] == 1
        is_sine = any(reader.op_type in _PERIODIC for reader in scope.nodes_reading(node.output[0]))
        return math.tau / largest if is_outer and is_sine else 0.0

    def _leaves_fraction(self, node: onnx.NodeProto) -> bool:
        """Whether the result of a Floor is subtracted from its operand, perhaps both times a divisor."""
        scope, operand = self.scope, node.input[0]
        readers = scope.nodes_reading(node.output[0])
        products = [reader for reader in readers if reader.op_type == "Mul"]
        for product in products:
            readers = [*readers, *scope.nodes_reading(product.output[0])]
        maker = scope.maker(operand)
        wholes = {operand, *(maker.input[:1] if maker is not None and products else ())}
        return any(reader.op_type == "Sub" and reader.input[0] in wholes for reader in readers)

    def _add_exponent(self, node: onnx.NodeProto) -> None:
        bases = map(abs, ends(node.input[0], self.scope)) if node.op_type == "Pow" else ()
        growth = max((abs(math.log(base)) for base in bases if base), default=0.0)
        for term in self._numbers(node.input[1]) if growth else ():
            uses, most = self.of[term.input], math.log(_IN_FLOATS) / growth / abs(term.scale)
            uses.exponent = min(uses.exponent, max(1.0, math.floor(most)))

    def _add_end(self, node: onnx.NodeProto) -> None:
        operand, end = _end_of_power(node, self.scope)
        for term in self._own(node.input[operand]) if end and not self._fades(node) else ():
            uses, number = self.of[term.input], term.input_of(end)
            # A number beside a constant, such as a rate, is small; powers of others have all sizes.
            is_rate = term.offset > (end if end < 1 else 0.0)
            is_beside = node.op_type == "Exp" or operand == 1 or is_rate
            if is_beside and abs(number) < abs(uses.end):
                uses.end = number

    def _fades(self, node: onnx.NodeProto) -> bool:
        """Whether only a quotient or a logarithm is left of a large result of ``node``, as of a sigmoid."""
        name = node.output[0]
        sums = [
            reader for reader in self.scope.nodes_reading(name) if reader.op_type in ("Add", "Sub")
        ]
        are_all = len(sums) == len(self.scope.nodes_reading(name)) > 0
        return self._is_kept(name) or (are_all and all(self._is_kept(n.output[0]) for n in sums))

    def _add_indices(self, node: onnx.NodeProto) -> None:
        scope, data = self._terms.scope, node.input[0]
        if node.op_type == "Gather" and scope.stored.get(data) is not None:
            # No app counts the rows of a table, such as words, from its end.
            return
        for term in self._own(node.input[1]):
            sizes = scope.sizes(data) or ()
            axis = 0 if node.op_type.endswith("ND") else int(graph.attribute(node, "axis", 0))
            if (term.scale, term.offset) == (1, 0) and sizes and (size := sizes[axis]):
                self.of[term.input].indexed = size

    def _add_mean(self, node: onnx.NodeProto) -> None:
        """That of a normalization."""
        mean, variance = (self._terms.scope.constant(name) for name in node.input[3:5])
        if mean is not None and variance is not None:
            rank = len(self._terms.scope.sizes(node.input[0]) or ())
            shape = (-1, *[1] * max(rank - 2, 0))
            deviation = np.sqrt(variance.astype(np.float64)).reshape(shape)
            self._add_center(node.input[0], Center(mean.reshape(shape), deviation))

    def _numbers(self, name: str) -> Iterator[LinearTerm]:
        """The terms of a value that are numbers."""
        return (term for term in self._terms.of(name) if not (term.truth or term.masked))

    def _own(self, name: str) -> Iterator[LinearTerm]:
        """The terms of a value that are numbers of only one input."""
        return (term for term in self._numbers(name) if not term.several)

    def _add_product(self, node: onnx.NodeProto) -> None:
        """Integers that a graph multiplies by each other are so small that three fit into 32 bits."""
        dtype = self.scope.dtype(node.output[0]) if node.op_type == "Mul" else None
        is_stored = any(self.scope.constant(name) is not None for name in node.input)
        if dtype is None or dtype.kind not in "iu" or is_stored:
            return
        for term in (term for name in node.input for term in self._numbers(name)):
            self.of[term.input].product = _LARGE ** (2 / 3)

    def _add_reach(self, node: onnx.NodeProto) -> None:
        """A logarithm is of numbers of all sizes, also of differences. A remainder uses all digits of
        integers, also of those that a large factor hashes, and a division by a large integer is of larger
        ones: small divisors are of digits and clocks, and powers of two of bits, which integers of fewer bits
        have too.
        """
        scope = self._terms.scope
        dtype, other = scope.dtype(node.input[0]), scope.constant(graph.operand(node, 1))
        is_whole = dtype is not None and dtype.kind in "iu"
        is_modulo = node.op_type == "Mod"
        divisors = np.zeros(0) if other is None else other
        is_long = is_whole and _is_long(divisors, _BUCKETS if is_modulo else _LONG)
        for term in self._numbers(node.input[0]):
            is_plain = is_long and term.scale == 1 and not term.several
            is_hash = is_long and is_modulo and abs(term.scale) >= _LONG
            uses = self.of[term.input]
            if node.op_type == "Log" and uses.floats:
                uses.floats = replace(uses.floats, wide=True)
            if is_hash:
                uses.reach = _MAX_EXACT
            elif is_plain and is_modulo:
                uses.modulus = max(uses.modulus, float(np.abs(divisors).max()))
            elif is_plain:
                uses.long = max(uses.long, float(np.abs(divisors).max()))
            elif node.op_type == "Log" and not term.several:
                uses.reach = max(uses.reach, _full_scale(term) or _of_logarithm(term))
            elif is_modulo and is_whole and abs(term.scale) < 1 and not term.several:
                # As the bytes of an address.
                modulus, divisor = float(np.abs(divisors).max(initial=0)), 1 / abs(term.scale)
                uses.reach = max(uses.reach, modulus * divisor)
                uses.has_digits |= _is_decimal(modulus) and _is_decimal(divisor)

    def _add_centers(self, node: onnx.NodeProto) -> None:
        for operand, other in ((0, 1), (1, 0)):
            value = self._terms.scope.constant(node.input[other])
            terms = (
                () if node.op_type in operators.COMPARES else [*self._numbers(node.input[operand])]
            )
            if terms and (summands := [*self._summands(node.input[other])]):
                for term in terms:
                    uses, beside = self.of[term.input], max(summands) / abs(term.scale)
                    uses.beside = max(uses.beside, beside)
            if value is not None and 0 < value.size <= _MAX_CENTERS and value.dtype.kind in "iuf":
                numbers = -value.astype(np.float64) if node.op_type == "Add" else value
                compared, unit = node.op_type in operators.COMPARES, _unit_of(value)
                rounded = compared and value.dtype.kind == "f"
                center = Center(numbers, self._deviation(node), unit, compared, rounded)
                # What is added makes a quantity larger, and is beside few of its values.
                is_more = node.op_type == "Add" and bool((value > 0).all())
                if not (is_more or self._is_kept(node.output[0])):
                    self._add_center(node.input[operand], center)

    def _summands(self, name: str) -> Iterator[float]:
        """The sizes of the constants of which ``name`` is a sum, also with other values."""
        scope, seen, waiting = self._terms.scope, set[str](), [(name, 1.0)]
        while waiting:
            name, factor = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            maker = scope.maker(name)
            if limits := ends(name, scope):
                yield max(map(abs, limits)) * factor
            elif maker is not None and maker.op_type in operators.MOVES:
                waiting.append((maker.input[0], factor))
            elif maker is not None and maker.op_type in ("Add", "Sub"):
                waiting += ((operand, factor) for operand in maker.input)
            elif maker is not None and maker.op_type in ("Div", "Mul"):
                scales = ends(maker.input[1], scope)
                if len(scales) == 1 and scales[0]:
                    scale = abs(scales[0])
                    by = 1 / scale if maker.op_type == "Div" else scale
                    waiting.append((maker.input[0], factor * by))

    def _is_kept(self, name: str) -> bool:
        """Whether all that reads a value needs it away from 0, so that a constant in it is a pole."""
        readers = self.scope.nodes_reading(name)
        return bool(readers) and all(
            node.op_type in ("Log", "Reciprocal", "Sqrt")
            or (node.op_type == "Div" and name not in node.input[:1])
            for node in readers
        )

    def _add_difference(self, node: onnx.NodeProto) -> None:
        """That of two inputs, of values and their mean, or of an input's own neighbours in a series: any
        offset is lost.
        """
        scope = self._terms.scope
        dtype = scope.dtype(node.output[0])
        if node.op_type not in ("Div", "Sub") or dtype is None or not is_float(dtype):
            return
        one, other = node.input[:2]
        if node.op_type == "Sub" or self._is_of_logarithm(node.output[0]):
            self._add_two_inputs(one, other)
        root = self._moved(one)
        if any(scope.shape(name) is None for name in (root, one, other)):
            return
        if self._is_own_mean(one, other) or self._are_neighbours(one, other):
            for term in self._own(one):
                self.of[term.input].is_shifted = True

    def _is_of_logarithm(self, name: str) -> bool:
        """Whether logarithms of ``name`` are taken: that of a quotient is a difference of two."""
        return any(node.op_type == "Log" for node in self.scope.nodes_reading(name))

    def _add_two_inputs(self, one: str, other: str) -> None:
        for left, right in itertools.product(self._numbers(one), self._numbers(other)):
            if left.input != right.input and left.scale == right.scale:
                self.of[left.input].is_shifted = self.of[right.input].is_shifted = True

    def _is_own_mean(self, one: str, other: str) -> bool:
        """Whether ``other`` is the mean of ``one``, a series."""
        scope = self._terms.scope
        mean = scope.maker(other)
        if mean is None or mean.op_type != "ReduceMean" or mean.input[0] != one:
            return False
        axes, sizes = scope.axes(mean) or (), scope.sizes(one) or ()
        others = [size or math.inf for axis, size in enumerate(sizes) if axis not in axes]
        # Of several rows it normalizes what a layer computes along the last axis, and features along others.
        return len(sizes) <= 2 or math.prod(others) <= _MAX_SENSORS

    def _are_neighbours(self, one: str, other: str) -> bool:
        """Whether ``one`` and ``other`` have neighbours in the same series, whose order is kept."""
        root = self._moved(one)
        if any(self._is_picked(name) for name in (one, other)):
            return False
        whole, *parts = (math.prod(self._terms.scope.shape(n) or ()) for n in (root, one, other))
        # Two parts that each have more than half overlap.
        return root == self._moved(other) and all(2 * part > whole for part in parts)

    def _moved(self, name: str) -> str:
        """The value of which ``name`` has values."""
        return self.scope.origin(name, operators.MOVES)

    def _is_picked(self, name: str) -> bool:
        """Whether ``name`` has values in an order of its own, as the parents of joints."""
        _, moves = self.scope.origin_and_moves(name, operators.MOVES)
        return any(node.op_type in operators.GATHERS for node in moves)

    def _add_center(self, name: str, center: Center) -> None:
        for term in self._own(name):
            values = (np.asarray(center.values, np.float64) - term.offset) / term.scale
            spread = center.deviation
            spread = None if spread is None else np.abs(spread / term.scale)
            if np.isfinite(values).all() and (spread is None or np.isfinite(spread).all()):
                uses, unit = self.of[term.input], center.unit / abs(term.scale)
                uses.centers.append(Center(values, spread, unit, center.compared, center.rounded))
                uses.reach = max(uses.reach, float(np.abs(values).max()))

    def _deviation(self, node: onnx.NodeProto) -> Numbers | None:
        """By what the result of ``node`` is divided at once, also in several steps; None if it is not."""
        scope, name = self.scope, node.output[0]
        deviation: Numbers | None = None
        while len(readers := scope.nodes_reading(name)) == 1:
            (reader,) = readers
            if reader.op_type not in ("Div", "Mul") or reader.input[0] == reader.input[1]:
                break
            operand = [*reader.input].index(name)
            value = scope.constant(reader.input[1 - operand])
            is_scaled = operand == 0 or reader.op_type == "Mul"
            if not is_scaled or value is None or not value.size or not np.all(value):
                break
            numbers = value.astype(np.float64)
            factor = numbers if reader.op_type == "Div" else np.asarray(1 / numbers)
            deviation = factor if deviation is None else np.asarray(deviation * factor)
            name = reader.output[0]
        return deviation


def _end_of_power(node: onnx.NodeProto, scope: Scope) -> tuple[int, float]:
    """The operand of a power ``node`` that makes it grow, and the number of which that is beyond the format;
    0 if none is.
    """
    most = math.log(_IN_FLOATS)
    if node.op_type == "Exp":
        return 0, most
    if node.op_type != "Pow":
        return 0, 0.0
    if bases := ends(node.input[0], scope):
        growth = math.log(max(map(abs, bases)) or 1.0)
        return 1, most / growth if growth else 0.0
    power = max(ends(node.input[1], scope), key=abs, default=0.0)
    return 0, math.exp(most / power) if abs(power) >= 2 else 0.0


def _is_long(divisors: Numbers, least: int) -> bool:
    """Whether a division by these, of which one is ``least`` or more, is of large integers."""
    sizes = np.abs(divisors.astype(np.int64)).ravel()
    are_powers = (sizes > 0) & (sizes & (sizes - 1) == 0)
    of_clocks = [int(size) in _SECONDS for size in sizes]
    return bool((sizes >= least).any()) and not (are_powers.all() or all(of_clocks))


def _of_logarithm(term: LinearTerm) -> float:
    """The largest integer of which a logarithm is usual, of all sizes."""
    return max(_MAX_AMOUNT, _MANY * _expected(abs(term.scale)))


def _full_scale(term: LinearTerm) -> float:
    """The largest integer of some bits that a graph scales to 1, as what a sensor has above black; else 0."""
    one = term.input_of(1.0)
    if one < _FEWEST_LEVELS:
        return 0.0
    full = 2.0 ** round(math.log2(one)) - 1
    is_full = abs(term.scale * full + term.offset - 1) < _SLIGHT
    return full if is_full else 0.0


def _is_decimal(number: float) -> bool:
    """Whether ``number`` is 10 or a power of that."""
    exponent = round(math.log10(number)) if number >= 1 else 0
    return exponent > 0 and math.isclose(number, 10.0**exponent)


def _unit_of(constants: Numbers) -> float:
    """That of the last decimal digit of ``constants``, at most 1."""
    exponents = (Decimal(str(number)).as_tuple().exponent for number in constants.ravel())
    return 10.0 ** min(*(number for number in exponents if isinstance(number, int)), 0)


_FLOATS = frozenset(
    onnx.TensorProto.DataType.Value(name) for name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE")
)


def dtype_bounds(facts: TensorFacts) -> tuple[float, float]:
    """The smallest and the largest integer of an input's dtype, as far as floats represent all integers."""
    info = ml_dtypes.iinfo(numpy_dtype(facts.dtype))  # type: ignore[no-untyped-call]
    return max(float(info.min), -_MAX_EXACT), min(float(info.max), _MAX_EXACT)


def with_far(facts: TensorFacts, ordinary: Range, uses: Uses) -> Range:
    """``ordinary``, the range of an input with these ``uses``, with the values that are far from it."""
    dtype = numpy_dtype(facts.dtype)
    if uses.skipping is not None and ordinary.whole:
        return replace(ordinary, far=(Far(centers=(uses.skipping,), spreads=(0.0,)),))
    if dtype.kind in "bc":
        return ordinary
    if ordinary.usual is not None:
        return replace(ordinary, far=tuple(_larger(facts, uses)))
    shifted = uses.scale if uses.is_shifted and not looks_like_image(facts) else 0.0
    ordinary = replace(ordinary, thresholds=uses.thresholds, least=uses.least, shifted=shifted)
    if not is_float(dtype):
        scaled = _expected(uses.scale) if uses.scale < 1 else 0.0
        reach = max(uses.reach, uses.divided, uses.turns, scaled)
        reach = 0.0 if ordinary.is_firm else reach
        ordinary, allowed = _within_integers(ordinary, _LARGE // uses.gain)
        gain = max(uses.gain, uses.product)
        integers = replace(ordinary, floats=uses.floats, reach=reach, gain=gain)
        return replace(integers, far=(*allowed, *_far_integers(facts, integers, uses)))
    if not ordinary.is_open:
        larger = (*_larger(facts, uses), *_counted_on(facts, ordinary, uses, _IN_FLOATS))
        # What the range only guesses may be on either side of a threshold, and a divisor's far from it.
        is_image = ordinary.picture or ordinary.usual is not None
        beside = [c for c in uses.centers if not ordinary.known and (c.compared or not is_image)]
        beyond = _around(facts, ordinary, replace(uses, centers=beside))
        return replace(ordinary, far=(*larger, *beyond))
    ordinary, uses = _around_means(facts, ordinary, uses)
    ordinary, beyond_end = _within_end(ordinary, uses)
    sound = uses.is_signal and looks_like_sound(facts)
    far = [*_larger(facts, uses), *_counted_on(facts, ordinary, uses, _IN_FLOATS)]
    far += [*_around(facts, ordinary, uses), *beyond_end]
    if sound and not any(values.is_larger for values in far):
        far.append(Far(centers=(0.0,), spreads=(_OF_SOUND,)))
    elif not (far or ordinary.shifted or ordinary.standardized) and uses.scale < 1 / _SCALED:
        far.append(Far(centers=(0.0,), spreads=(_expected(uses.scale) / DEVIATIONS,)))
    return replace(ordinary, far=tuple(far), sound=sound)


def _within_end(ordinary: Range, uses: Uses) -> tuple[Range, list[Far]]:
    """``ordinary`` with nearly all floats within the end of a power of them, and those beyond it."""
    size = abs(uses.end)
    if ordinary.standardized is not None or not 0 < size < _WITHIN:
        return ordinary, []
    high = size / _WITHIN * DEVIATIONS
    below = Far(centers=(-2 * size,), spreads=(size / 4,))
    beyond = Far(size, 4 * size) if uses.end > 0 else below
    return replace(ordinary, low=-high, high=high), [beyond]


def _within_integers(ordinary: Range, most: float) -> tuple[Range, tuple[Far, ...]]:
    """``ordinary`` up to ``most``, and what the graph allows beyond, as rows of a table for first bytes of
    addresses.
    """
    low, high = max(ordinary.low, -most), min(ordinary.high, most)
    spans = [(ordinary.low, low), (high, ordinary.high)]
    beyond = [
        Far(*span, centers=(sum(span) / 2,), spreads=((span[1] - span[0]) / 4,))
        for span in spans
        if span[0] < span[1]
    ]
    if not (ordinary.known and ordinary.usual is None and beyond and low < high):
        return ordinary, ()
    return replace(ordinary, low=low, high=high, loose=True), tuple(beyond)


def _around_means(facts: TensorFacts, ordinary: Range, uses: Uses) -> tuple[Range, Uses]:
    """``ordinary`` with the means, far from 0, and deviations by which a graph standardizes an input, and the
    other uses. Smaller deviations may be a conversion, such as that of kelvin.
    """
    for center in uses.centers:
        standardized = _standardized(facts, center)
        if standardized is None:
            continue
        means, deviations = np.abs(standardized.centers), np.array(standardized.spreads)
        is_far = ordinary.high < means.max() <= _IN_FLOATS
        if is_far and (deviations >= _LEAST_DEVIATION * means).all():
            others = [other for other in uses.centers if other is not center]
            # Nearer values to a mean than usual are no quiet ones.
            ordinary = replace(ordinary, standardized=standardized, least=1.0)
            return ordinary, replace(uses, centers=others)
    return ordinary, uses


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
    of_floats = min(_OFFSET / (range_.shifted or 1.0), _IN_FLOATS / 2)
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
        return (0.0, _BRIGHTEST) if looks_like_image(facts) else None
    return (low, high) if low < high else None


def _larger(facts: TensorFacts, uses: Uses) -> Iterator[Far]:
    """The sizes of floats whose powers matter, each with differences that are smaller than itself."""
    most = _WIDEST if math.isinf(uses.size) else uses.size
    if looks_like_image(facts):
        most = min(most, _BRIGHTEST)
    share = _OF_DIFFERENT if uses.is_wide else 1 / 4
    yield from (Far(share * size, size) for size in _SIZES if size / 2 <= most)


def _counted_on(facts: TensorFacts, ordinary: Range, uses: Uses, most: float) -> Iterator[Far]:
    """Many turns, such as hours since a start, at ``most``."""
    sizes = dict.fromkeys(min(times * uses.turns, most) for times in _TIMES)
    least = max(-ordinary.low, ordinary.high)
    yield from (Far(size / 2, size, is_counted=True) for size in sizes if size / 2 > least)
    has_more = not ordinary.whole and numpy_dtype(facts.dtype).itemsize > 2
    if uses.turns > most and has_more:
        # Sums of floats beyond the format.
        yield Far(2 * most, max(4 * uses.turns, 8 * most), is_counted=True)


def _expected(scale: float) -> float:
    """The largest number that a graph multiplies by ``scale``: 1 over a power of two is for full scale."""
    is_full = math.frexp(scale)[0] == 0.5
    return (1 if is_full else DEVIATIONS) / scale


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
            yield from _counted_on(facts, ordinary, uses, min(highest, _IN_FLOATS))
        return
    if highest <= ordinary.high:
        return
    offset = uses.floats.offset if uses.floats else 0.0
    largest = min(highest, _LARGE / ordinary.gain, uses.exponent)
    if uses.floats:
        # What overflows floats is no fault of integers: they are as large as the graph expects.
        largest = min(largest, abs(_IN_FLOATS / uses.floats.factor))
        largest = min(largest, max(_SMALL, 2 * ordinary.reach))
    if lowest < 0 and not offset:
        yield Far(-min(_SMALL, largest), min(_SMALL, largest))
    if lowest <= -FULL_SCALE and uses.is_signal and looks_like_sound(facts):
        yield Far(-FULL_SCALE, FULL_SCALE - 1, (0.0,), (_OF_SOUND,))
    yield from _around(facts, ordinary, uses)
    larger = (far for far in _larger(facts, uses) if far.low < _IN_FLOATS)
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
            if farthest < _LARGE:
                yield from _among(center)
            continue
        is_far = farthest > ordinary.high and farthest < _LARGE
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
    most = _IN_FLOATS if center.rounded else _LARGE
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
        and math.prod(shape) <= _MAX_CENTERS
        and all(one in (1, size) for one, size in zip(shape, sizes, strict=True))
    )
