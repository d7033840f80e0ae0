"""Values that the type and the graph allow, far from those of ordinary samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.dtypes import Numbers, is_float, numpy_dtype
from hatch_epcontext.graph.facts import Far, Range, TensorFacts
from hatch_epcontext.graph.values.conventions import looks_like_sound
from hatch_epcontext.graph.values.linear import INVALID, LinearTerm, LinearTerms

_SMALL = 1000.0
"""Integers of both signs up to this one are small."""

_LARGE = 2.0**31 - 1
"""The largest integer of 32 bits; EPs declare what they do with larger ones."""

_IN_FLOATS = 65504.0
"""The largest float16: larger integers that become floats are left to what EPs declare."""

_MAX_EXACT = 2.0**53
"""The integer up to which floats represent all integers."""

_OF_SOUND = 8000.0
"""The level of sound whose full scale is that of int16."""

_WIDE, _NARROW = 1 / 8, 1 / 1000
"""The deviations around a constant, relative to it."""

_MAX_CENTERS = 4096
"""The most numbers of a constant that is a center."""

_MAX_VALUES = 4
"""The most other values of a number that is compared."""

_COMPARES = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})

_INDEXED = frozenset({"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"})
"""Operators whose indices may be negative, and then count from the end."""

_OF_SIGNALS = frozenset({"Conv", "DFT", "STFT"})


@dataclass
class Uses:
    """What a graph does with the values of an input.

    ``centers``: constants that it subtracts, or compares with, each with the deviation by which it then
    divides, if it does. ``indexed``: the size of an axis in which they are indices. ``is_signal``: whether a
    filter reads them. ``floats``: as in `Range`.
    """

    centers: list[tuple[Numbers, Numbers | None]] = field(default_factory=list)
    indexed: float = 0.0
    is_signal: bool = False
    floats: tuple[float, float] | None = None


class UsesOfInputs:
    """Collects the uses of all inputs, node by node, in the order in which ``terms`` follows them."""

    def __init__(self, terms: LinearTerms) -> None:
        self._terms = terms
        self.of: defaultdict[str, Uses] = defaultdict(Uses)

    def add(self, node: onnx.NodeProto) -> None:
        """Add what ``node`` does; nothing for a malformed one."""
        try:
            self._add(node)
        except INVALID:
            return

    def _add(self, node: onnx.NodeProto) -> None:
        if node.op_type in _OF_SIGNALS:
            for term in self._terms.of(node.input[0]):
                self.of[term.input].is_signal = True
        elif node.op_type in _INDEXED and node.domain in graph.STANDARD:
            for term in self._own(node.input[1]):
                sizes = self._terms.scope.sizes(node.input[0]) or ()
                axis = 0 if node.op_type.endswith("ND") else int(graph.attribute(node, "axis", 0))
                if (term.scale, term.offset) == (1, 0) and sizes and (size := sizes[axis]):
                    self.of[term.input].indexed = size
        elif node.op_type == "Cast" and graph.attribute(node, "to", 0) in _FLOATS:
            for term in self._own(node.input[0]):
                self.of[term.input].floats = term.scale, term.offset
        elif node.op_type in _COMPARES or node.op_type in ("Add", "Sub"):
            self._add_centers(node)
        elif node.op_type == "BatchNormalization":
            mean, variance = (self._terms.scope.constant(name) for name in node.input[3:5])
            if mean is not None and variance is not None:
                rank = len(self._terms.scope.sizes(node.input[0]) or ())
                shape = (-1, *[1] * max(rank - 2, 0))
                deviation = np.sqrt(variance.astype(np.float64))
                self._add_center(node.input[0], mean.reshape(shape), deviation.reshape(shape))

    def _own(self, name: str) -> Iterator[LinearTerm]:
        """The terms of a value that are numbers of only one input."""
        return (
            term for term in self._terms.of(name) if not (term.truth or term.masked or term.several)
        )

    def _add_centers(self, node: onnx.NodeProto) -> None:
        for operand, other in ((0, 1), (1, 0)):
            value = self._terms.scope.constant(node.input[other])
            if value is not None and 0 < value.size <= _MAX_CENTERS and value.dtype.kind in "iuf":
                center = -value.astype(np.float64) if node.op_type == "Add" else value
                self._add_center(node.input[operand], center, self._deviation(node))

    def _add_center(self, name: str, center: Numbers, deviation: Numbers | None) -> None:
        for term in self._own(name):
            values = (np.asarray(center, np.float64) - term.offset) / term.scale
            spread = None if deviation is None else np.abs(deviation / term.scale)
            if np.isfinite(values).all() and (spread is None or np.isfinite(spread).all()):
                self.of[term.input].centers.append((values, spread))

    def _deviation(self, node: onnx.NodeProto) -> Numbers | None:
        """By what the result of ``node`` is divided at once; None if it is not."""
        scope = self._terms.scope
        readers = [scope.nodes[index] for index in scope.readers.get(node.output[0], ())]
        if len(readers) != 1 or readers[0].op_type not in ("Div", "Mul"):
            return None
        reader = readers[0]
        other = reader.input[1] if reader.input[0] == node.output[0] else reader.input[0]
        value = scope.constant(other)
        if value is None or not value.size or not np.all(value):
            return None
        numbers = value.astype(np.float64)
        return numbers if reader.op_type == "Div" else np.asarray(1 / numbers)


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
    if dtype.kind in "bc" or ordinary.usual is not None:
        return ordinary
    if not is_float(dtype):
        integers = replace(ordinary, floats=uses.floats)
        return replace(integers, far=tuple(_far_integers(facts, integers, uses)))
    if not ordinary.is_open:
        return ordinary
    sound = uses.is_signal and looks_like_sound(facts)
    far = [*_around(facts, ordinary, uses)]
    if sound:
        far.append(Far(centers=(0.0,), spreads=(_OF_SOUND,)))
    return replace(ordinary, far=tuple(far), sound=sound)


def _far_integers(facts: TensorFacts, ordinary: Range, uses: Uses) -> Iterator[Far]:
    lowest, highest = dtype_bounds(facts)
    if ordinary.known and ordinary.loose and ordinary.low == ordinary.high:
        yield from _beside(ordinary, uses)
        return
    if ordinary.known:
        is_index = ordinary.low == 0 and uses.indexed == ordinary.high + 1
        if is_index and lowest < 0:
            yield Far(-uses.indexed, ordinary.high)
        return
    if highest <= ordinary.high:
        return
    factor, offset = uses.floats or (0.0, 0.0)
    largest = min(highest, _LARGE)
    if factor:
        largest = min(largest, abs(_IN_FLOATS / factor))
    least = -largest if lowest < 0 else 0.0
    if lowest < 0 and not offset:
        yield Far(-min(_SMALL, largest), min(_SMALL, largest))
    yield from _around(facts, ordinary, uses)
    if not offset:
        yield Far(least, largest)


def _beside(ordinary: Range, uses: Uses) -> Iterator[Far]:
    """The other values with which a single number is compared, and one beside them all: they decide."""
    compared = [center for center, _ in uses.centers if center.size == 1]
    values = dict.fromkeys(float(center.item()) for center in compared)
    others = [value for value in values if value != ordinary.low][:_MAX_VALUES]
    for value in (*others, max(values, default=ordinary.low) + 1):
        yield Far(centers=(value,), spreads=(0.0,))


def _around(facts: TensorFacts, ordinary: Range, uses: Uses) -> Iterator[Far]:
    """Values around constants outside of the ordinary range."""
    for center, deviation in uses.centers:
        farthest = np.abs(center).max()
        is_far = farthest > ordinary.high and farthest < _LARGE
        if not is_far or not _fits(facts, center.shape):
            continue
        least = np.maximum(np.abs(center), 1e-3 * farthest)
        if deviation is not None and _fits(
            facts, np.broadcast_shapes(center.shape, deviation.shape)
        ):
            yield _near(*np.broadcast_arrays(center, deviation))
        else:
            yield from (_near(center, part * least) for part in (_WIDE, _NARROW))


def _near(center: Numbers, spread: Numbers) -> Far:
    centers, spreads = (tuple(map(float, array.ravel())) for array in (center, spread))
    return Far(centers=centers, spreads=spreads, shape=center.shape)


def _fits(facts: TensorFacts, shape: Sequence[int]) -> bool:
    """Whether a constant of ``shape`` is for the elements of the input itself."""
    sizes = facts.sizes[len(facts.sizes) - len(shape) :]
    return (
        len(shape) <= len(facts.sizes)
        and math.prod(shape) <= _MAX_CENTERS
        and all(one in (1, size) for one, size in zip(shape, sizes, strict=True))
    )
