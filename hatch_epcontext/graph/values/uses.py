"""What a graph does with the values of its inputs, as far as that shows what these can be."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal

import numpy as np
import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.dtypes import MAX_EXACT, Numbers, is_float
from hatch_epcontext.graph.facts import InFloats
from hatch_epcontext.graph.number_format import FLOAT16
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.affine import scales
from hatch_epcontext.graph.values.amounts import (
    BUCKETS,
    LONG,
    Divided,
    are_long,
    full_scale,
    is_decimal,
    of_logarithm,
)
from hatch_epcontext.graph.values.conventions import (
    DEVIATIONS,
    LARGEST_OF_32_BITS,
    USUAL_UNITS,
)
from hatch_epcontext.graph.values.differences import (
    are_neighbours,
    finds_positions,
    is_own_mean,
    moved,
)
from hatch_epcontext.graph.values.linear import INVALID, LinearTerm, LinearTerms, ends
from hatch_epcontext.graph.values.periods import turn_of
from hatch_epcontext.graph.values.powers import SizeOfPowers

BESIDE = 200
"""How many times as large as floats a number beside them may be: float16, whose steps are 2⁻¹⁰ to 2⁻¹¹ of the
number, keeps 25 to 31 dB of them.
"""

_INDEXED = operators.GATHERS | {"ScatterElements", "ScatterND"}
"""Operators whose indices may be negative, and then count from the end."""

_PRODUCTS = frozenset({"Gemm", "MatMul", "Mul"})

_OF_SIGNALS = frozenset({"Conv", "DFT", "STFT"})

_ACTIVATIONS = frozenset({"Exp", "LogSoftmax", "Sigmoid", "Softmax", "Softplus", "Tanh"})

_SMALLEST = 2.0**-24
"""The smallest float16."""

_KEEPING = operators.LAYOUT | {"Cast", "Expand", "Where"}
"""Operators whose results are no larger than those of an operand."""

MAX_CENTERS = 4096
"""The most numbers of a constant that is a center."""


@dataclass
class Uses:
    """What a graph does with the values of an input.

    ``centers``: constants that it subtracts, or compares with. ``indexed``: the size of an axis in which they
    are indices. ``is_signal``: whether a filter reads them. ``scale``: the smallest factor by which it
    multiplies them; ``one``: the largest value that it scales to 1. ``gain``: as in `Range`, of what it
    multiplies by stored integers; ``product``: of what it multiplies by each other. ``floats`` and
    ``reach``: as in `Range`. ``divided``: by what it divides them. ``skipping``: the value for which a Loop
    has no iteration. ``is_shifted``: whether it subtracts them, as floats, from neighbours, their mean or
    another input; ``is_ordered``: whether it compares them, as floats, with each other, or finds where the
    largest are; ``is_activated``: whether an activation reads them. ``powers``: how large they may be because
    of their powers. ``beside``: the largest constant that it adds to them. ``turn``: the shortest turn of
    what they count, such as hours; infinite for angles.
    ``is_weight``: whether it multiplies stored numbers that differ, such as coordinates, by them.
    ``exponents``: between which integers, as exponents of a stored number, the power is a float16;
    ``vanishing``: up to which of these it is none, because it is too small; ``has_powers``: whether more than
    a quotient or a logarithm is left of it. ``end``: the float nearest to 0 of which a power is beyond
    float16; infinite without one.
    """

    centers: list[Center] = field(default_factory=list)
    indexed: float = 0.0
    is_signal: bool = False
    scale: float = 1.0
    one: float = 0.0
    gain: float = 1.0
    product: float = 1.0
    floats: InFloats | None = None
    reach: float = 0.0
    divided: Divided = field(default_factory=Divided)
    skipping: float | None = None
    is_shifted: bool = False
    is_ordered: bool = False
    is_activated: bool = False
    powers: SizeOfPowers = SizeOfPowers()
    beside: float = 0.0
    turn: float = math.inf
    is_weight: bool = False
    exponents: tuple[float, float] = (-math.inf, math.inf)
    has_powers: bool = False
    vanishing: float = -math.inf
    end: float = math.inf

    @property
    def turns(self) -> float:
        """The largest value that is usual where they are counted on, as days since a start; else 0."""
        return 0.0 if math.isinf(self.turn) else USUAL_UNITS * self.turn

    @property
    def has_offset(self) -> bool:
        """Whether any offset is lost, and nothing shows the unit of what is compared: scores have one."""
        are_units = any(0 < abs(threshold) <= DEVIATIONS for threshold in self.thresholds)
        return self.is_shifted or (self.is_ordered and not (are_units or self.is_activated))

    @property
    def least(self) -> float:
        """As in `Range`."""
        return max(self.beside / BESIDE, self.powers.least)

    @property
    def thresholds(self) -> tuple[float, ...]:
        """All floats with which they are compared, in order."""
        return _in_order(center for center in self.centers if center.rounded)

    @property
    def constants(self) -> tuple[float, ...]:
        """All numbers with which they are compared, or which are subtracted from them, in order."""
        return _in_order(self.centers)


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


def _in_order(centers: Iterable[Center]) -> tuple[float, ...]:
    values = [np.ravel(center.values) for center in centers]
    return tuple(map(float, np.unique(np.concatenate(values)))) if values else ()


class UsesOfInputs:
    """Collects the uses of all inputs, node by node, in the order in which ``terms`` follows them."""

    def __init__(self, terms: LinearTerms) -> None:
        self._terms, self.scope = terms, terms.scope
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
            dtype = self.scope.dtype(name)
            for term in self._own(name):
                is_plain = (term.scale, term.offset) == (1, 0)
                if dtype is not None and is_plain == (dtype.kind in "iu"):
                    # Identifiers are returned as they are, quantities in another unit.
                    self.of[term.input].reach = MAX_EXACT

    def _add_factors(self, name: str) -> None:
        for term in self._numbers(name):
            uses, factor = self.of[term.input], abs(term.scale)
            uses.scale = min(uses.scale, factor)
            if 0 < factor < 1:
                # What is subtracted may be the level of black; more than full scale are rows of a table.
                black = max(term.input_of(0.0), 0.0)
                uses.one = max(uses.one, 1 / factor + (black if black * factor <= 1 else 0.0))
            if self.scope.is_whole(name):
                uses.gain = max(uses.gain, factor)

    def _add(self, node: onnx.NodeProto) -> None:
        for name in node.input:
            self._add_factors(name)
        self._add_weights(node)
        self._add_product(node)
        self._add_exponent(node)
        self._add_end(node)
        self._add_sum(node)
        self._add_turn(node)
        self._add_summands(node)
        self._add_order(node)
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
            self._add_cast(node)
        elif operator == "Log":
            self._add_logarithm(node)
        elif operator in ("Div", "Mod"):
            self._add_division(node)
        elif operator in operators.COMPARES or operator in ("Add", "Sub"):
            self._add_centers(node)
        elif operator == "BatchNormalization":
            self._add_mean(node)
        if operator in ("Div", "Sub"):
            self._add_difference(node)

    def _add_cast(self, node: onnx.NodeProto) -> None:
        """That to floats: what is split has an end only in what it is scaled to."""
        factor = max((float(np.abs(of).max()) for of in scales(node, self.scope)), default=1.0)
        for term in self._numbers(node.input[0]):
            scaled = term.times(factor)
            floats = InFloats(scaled.scale, scaled.offset, term.several)
            self.of[term.input].floats = floats
            if graph.attribute(node, "to", 0) == onnx.TensorProto.DOUBLE:
                # They are more than float32 keeps, as amounts of money in cents.
                self.of[term.input].reach = MAX_EXACT

    def _add_weights(self, node: onnx.NodeProto) -> None:
        for one, other in ((0, 1), (1, 0)) if node.op_type in _PRODUCTS else ():
            if len(ends(node.input[other], self.scope)) > 1:
                for term in self._numbers(node.input[one]):
                    self.of[term.input].is_weight = True

    def _add_sum(self, node: onnx.NodeProto) -> None:
        """Integers of which many are added up are so small that the sum is one."""
        if node.op_type not in ("CumSum", "ReduceSum") or not self.scope.is_whole(node.input[0]):
            return
        sizes = self.scope.sizes(node.input[0]) or ()
        count = math.prod(sizes[axis] or 1 for axis in self.scope.axes(node) or ())
        for term in self._numbers(node.input[0]):
            uses = self.of[term.input]
            uses.gain = max(uses.gain, abs(term.scale) * count)

    def _add_turn(self, node: onnx.NodeProto) -> None:
        for term in self._numbers(node.input[0]):
            uses = self.of[term.input]
            uses.turn = min(uses.turn, turn_of(node, term, self.scope))

    def _add_exponent(self, node: onnx.NodeProto) -> None:
        bases = map(abs, ends(node.input[0], self.scope)) if node.op_type == "Pow" else ()
        growth = max((math.log(base) for base in bases if base), key=abs, default=0.0)
        if not growth:
            return
        of_inputs: defaultdict[str, list[LinearTerm]] = defaultdict(list)
        for term in self._numbers(node.input[1]):
            of_inputs[term.input].append(term)
        powers = (_SMALLEST, 1 / FLOAT16.largest, 1.0, self._largest_of(node))
        exponents = [math.log(power) / growth for power in powers]
        for name, terms in of_inputs.items():
            numbers = [[*map(term.input_of, exponents)] for term in terms]
            is_rising = numbers[0][0] < numbers[0][-1]
            # Beside one of several constants some power is too large.
            first = min if is_rising else max
            vanishing, smallest, one, largest = map(first, zip(*numbers, strict=True))
            # Small powers, of the lowest integers, are beside large ones.
            low = -math.inf if is_rising else min(math.ceil(largest), math.ceil(one) - 1)
            high = max(math.floor(largest if is_rising else smallest), math.floor(one) + 1)
            uses = self.of[name]
            uses.exponents = max(uses.exponents[0], low), min(uses.exponents[1], high)
            uses.vanishing = max(uses.vanishing, math.floor(vanishing) if is_rising else -math.inf)
            uses.has_powers |= not self._fades(node)

    def _largest_of(self, power: onnx.NodeProto) -> float:
        """The largest result of ``power`` of which the format has the sum too, and what divides by that."""
        scope, waiting, count = self.scope, [power.output[0]], 1
        for name in waiting:
            for node in scope.nodes_reading(name):
                if node.op_type == "ReduceSum":
                    sizes = scope.sizes(name) or ()
                    count = max(count, math.prod(sizes[n] or 1 for n in scope.axes(node) or ()))
                elif node.op_type in _KEEPING and node.output[0] not in waiting:
                    waiting.append(node.output[0])
        return FLOAT16.largest / (4 * count if count > 1 else 1)

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
        readers = self.scope.nodes_reading(name)
        return self._is_kept(name) or (
            bool(readers)
            and all(r.op_type in ("Add", "Sub") and self._is_kept(r.output[0]) for r in readers)
        )

    def _add_indices(self, node: onnx.NodeProto) -> None:
        scope, data = self.scope, node.input[0]
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
        mean, variance = (self.scope.constant(name) for name in node.input[3:5])
        if mean is not None and variance is not None:
            rank = len(self.scope.sizes(node.input[0]) or ())
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
        is_stored = any(self.scope.constant(name) is not None for name in node.input)
        if node.op_type != "Mul" or not self.scope.is_whole(node.output[0]) or is_stored:
            return
        for term in (term for name in node.input for term in self._numbers(name)):
            self.of[term.input].product = LARGEST_OF_32_BITS ** (2 / 3)

    def _add_logarithm(self, node: onnx.NodeProto) -> None:
        """That of numbers of all sizes, also of differences."""
        for term in self._numbers(node.input[0]):
            uses = self.of[term.input]
            if uses.floats:
                uses.floats = replace(uses.floats, wide=True)
            if not term.several:
                uses.reach = max(uses.reach, full_scale(term) or of_logarithm(term))

    def _add_division(self, node: onnx.NodeProto) -> None:
        """A remainder uses all digits of integers, also of those that a large factor hashes, and a division
        by a large integer is of larger ones.
        """
        divisors = self.scope.constant(node.input[1])
        if divisors is None or not self.scope.is_whole(node.input[0]):
            return
        is_modulo = node.op_type == "Mod"
        is_long = are_long(divisors, BUCKETS if is_modulo else LONG)
        largest = float(np.abs(divisors).max(initial=0))
        for term in self._numbers(node.input[0]):
            uses, is_plain = self.of[term.input], term.scale == 1 and not term.several
            if is_long and is_modulo and abs(term.scale) >= LONG:
                uses.reach = MAX_EXACT
            elif is_long and is_plain and is_modulo:
                uses.divided.modulus = max(uses.divided.modulus, largest)
            elif is_long and is_plain:
                uses.divided.divisor = max(uses.divided.divisor, largest)
            elif is_modulo and abs(term.scale) < 1 and not term.several:
                # As the bytes of an address.
                divisor = 1 / abs(term.scale)
                uses.reach = max(uses.reach, largest * divisor)
                uses.divided.has_digits |= is_decimal(largest) and is_decimal(divisor)

    def _add_summands(self, node: onnx.NodeProto) -> None:
        for operand, other in ((0, 1), (1, 0)) if node.op_type in ("Add", "Sub") else ():
            terms = [*self._numbers(node.input[operand])]
            largest = max(self._summands(node.input[other]), default=0.0) if terms else 0.0
            for term in terms:
                uses = self.of[term.input]
                uses.beside = max(uses.beside, largest / abs(term.scale))

    def _add_centers(self, node: onnx.NodeProto) -> None:
        for operand, other in ((0, 1), (1, 0)):
            value = self.scope.constant(node.input[other])
            if value is not None and 0 < value.size <= MAX_CENTERS and value.dtype.kind in "iuf":
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
        scope, seen, waiting = self.scope, set[str](), [(name, 1.0)]
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
        scope = self.scope
        dtype = scope.dtype(node.output[0])
        if dtype is None or not is_float(dtype):
            return
        one, other = node.input[:2]
        if node.op_type == "Sub" or self._is_of_logarithm(node.output[0]):
            self._add_two_inputs(one, other)
        root = moved(one, scope)
        if any(scope.shape(name) is None for name in (root, one, other)):
            return
        if is_own_mean(one, other, scope) or are_neighbours(one, other, scope):
            for term in self._own(one):
                self.of[term.input].is_shifted = True

    def _add_order(self, node: onnx.NodeProto) -> None:
        """That of floats of one input, as of each with the largest of its neighbours; and of activations."""
        dtype = self.scope.dtype(node.input[0])
        are_floats = dtype is not None and is_float(dtype)
        compared = node.input if node.op_type in operators.COMPARES and are_floats else [""] * 2
        for one, other in itertools.product(*map(self._own, compared)):
            if (one.input, one.scale) == (other.input, other.scale):
                self.of[one.input].is_ordered = True
        for term in self._numbers(node.input[0]) if node.op_type in _ACTIVATIONS else ():
            self.of[term.input].is_activated = True
        for term in (
            self._own(node.input[0]) if are_floats and finds_positions(node, self.scope) else ()
        ):
            self.of[term.input].is_ordered = True

    def _is_of_logarithm(self, name: str) -> bool:
        """Whether logarithms of ``name`` are taken: that of a quotient is a difference of two."""
        return any(node.op_type == "Log" for node in self.scope.nodes_reading(name))

    def _add_two_inputs(self, one: str, other: str) -> None:
        for left, right in itertools.product(self._numbers(one), self._numbers(other)):
            if left.input != right.input and left.scale == right.scale:
                self.of[left.input].is_shifted = self.of[right.input].is_shifted = True

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
    most = math.log(FLOAT16.largest)
    if node.op_type == "Exp":
        return 0, most
    if node.op_type != "Pow":
        return 0, 0.0
    if bases := ends(node.input[0], scope):
        growth = math.log(max(map(abs, bases)) or 1.0)
        return 1, most / growth if growth else 0.0
    power = max(ends(node.input[1], scope), key=abs, default=0.0)
    return 0, math.exp(most / power) if abs(power) >= 2 else 0.0


def _unit_of(constants: Numbers) -> float:
    """That of the last decimal digit of ``constants``, at most 1."""
    exponents = (Decimal(str(number)).as_tuple().exponent for number in constants.ravel())
    return 10.0 ** min(*(number for number in exponents if isinstance(number, int)), 0)


_FLOATS = frozenset(
    onnx.TensorProto.DataType.Value(name) for name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE")
)
