"""Values of a graph as linear terms of its inputs, where they are linear."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import onnx

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.dtypes import is_float
from hatch_epcontext.graph.scope import Scope

_MAX_TERMS = 8
"""The most paths to one value that are followed."""

INVALID = (ValueError, TypeError, IndexError, KeyError, ArithmeticError)
"""The errors of malformed nodes: opening a session reports the reason."""


@dataclass(frozen=True)
class LinearTerm:
    """A value that is ``scale`` times the input called ``input``, plus ``offset``.

    ``whole``: it was rounded on the path. ``truth``: whether it became a boolean, by ``"itself"`` or because
    it was ``"compared"``. ``masked``: it is 0 where a boolean is false. ``parts``: of how many values it is a
    sum, by which ``scale`` and ``offset`` are multiplied: it is within limits if each of these is.
    """

    input: str
    scale: float = 1.0
    offset: float = 0.0
    whole: bool = False
    truth: Literal["", "itself", "compared"] = ""
    masked: bool = False
    parts: int = 1

    def plus(self, number: float) -> LinearTerm:
        return replace(self, offset=self.offset + number)

    def times(self, factor: float) -> LinearTerm:
        """The product with ``factor``, which is not 0."""
        return replace(self, scale=self.scale * factor, offset=self.offset * factor)

    def summed(self, count: int) -> LinearTerm:
        """That of a sum of ``count`` such values."""
        return replace(self.times(count), parts=self.parts * count)

    def input_of(self, value: float) -> float:
        """The value of the input for which the term is ``value``."""
        return (value - self.offset) / self.scale

    @property
    def several(self) -> bool:
        """Whether it is a part of a sum."""
        return self.parts > 1

    @property
    def is_finite(self) -> bool:
        """Whether it depends on the input at all, and no factor on the path is beyond all numbers."""
        return 0 < abs(self.scale) < math.inf and math.isfinite(self.offset)


class LinearTerms:
    """The linear terms of the values of ``main``, from the ``terms`` of its inputs by their names.

    ``scope``: the shapes and constants of its values.
    """

    def __init__(self, main: onnx.GraphProto, terms: Mapping[str, LinearTerm]) -> None:
        self.scope = Scope(main, nested=True)
        self._terms: dict[str, tuple[LinearTerm, ...]] = {
            name: (term,) for name, term in terms.items()
        }

    def of(self, name: str) -> tuple[LinearTerm, ...]:
        """The terms of the value ``name``, none if it is not linear."""
        return self._terms.get(name, ())

    def follow(self, body: graph.Body | None = None) -> Iterator[onnx.NodeProto]:
        """Add the terms of all values in ``body``, by default the main graph, and the graphs inside it.

        Yields each node that reads a value with terms, when the terms of its operands are complete.
        """
        for node in (self.scope.body if body is None else body).node:
            is_followed = any(name in self._terms for name in node.input)
            if is_followed:
                yield node
            inner_graphs = graph.inner_graphs(node)
            for inner in inner_graphs:
                if node.op_type in ("Loop", "Scan"):
                    # A Loop counts its iterations itself; all other values have the same position as outside.
                    self._pass(node.input, [value.name for value in inner.input])
                yield from self.follow(inner)
                results = [value.name for value in inner.output]
                self._pass(results[node.op_type == "Loop" :], node.output)
            if is_followed and not inner_graphs and node.domain in graph.STANDARD:
                self._add_results(node)

    def _pass(self, names: Sequence[str], others: Sequence[str]) -> None:
        """Give the values called ``others`` the terms of those called ``names``."""
        for name, other in zip(names, others, strict=False):
            if name in self._terms:
                self._terms[other] = self._terms[name]

    def _add_results(self, node: onnx.NodeProto) -> None:
        if (rule := _RULES.get(node.op_type)) is None:
            return
        try:
            operands = [self.of(name) for name in node.input]
            results = rule(node, operands, self.scope)
            terms = tuple(dict.fromkeys(term for term in results if term.is_finite))
        except INVALID:
            return
        if terms:
            outputs = node.output if node.op_type == "Split" else node.output[:1]
            self._terms.update(dict.fromkeys(outputs, terms[:_MAX_TERMS]))


_Operands = Sequence[Sequence[LinearTerm]]
"""The terms of each operand of a node."""

_Rule = Callable[[onnx.NodeProto, _Operands, Scope], Iterable[LinearTerm]]


def _any(operands: _Operands) -> Iterable[LinearTerm]:
    """The terms of all operands: the result has values of each."""
    return (term for terms in operands for term in terms)


def _cast(node: onnx.NodeProto, operands: _Operands, scope: Scope) -> Iterator[LinearTerm]:
    to = graph.attribute(node, "to", 0)
    for term in operands[0]:
        if to == onnx.TensorProto.BOOL:
            yield replace(term, truth=term.truth or "itself")
        else:
            yield replace(term, whole=term.whole or to in _WHOLE)


def _equal(node: onnx.NodeProto, operands: _Operands, scope: Scope) -> Iterator[LinearTerm]:
    """Booleans: the terms of all operands, if the others are 0, 1 or booleans too."""
    constants = [scope.constant(name) for name in node.input]
    if any(
        value is not None and (value.size != 1 or value.item() not in (0, 1)) for value in constants
    ):
        return
    # That two numbers are equal says what neither is.
    of_numbers = node.op_type == "Equal" and all(value is None for value in constants)
    for term in _any(operands):
        if term.truth or not of_numbers:
            yield replace(term, truth=term.truth or "itself")


def _added(node: onnx.NodeProto, operands: _Operands, scope: Scope) -> Iterator[LinearTerm]:
    sign = -1.0 if node.op_type == "Sub" else 1.0
    first, second = (ends(name, scope) for name in node.input[:2])
    left, right = operands[0], [term.times(sign) for term in operands[1]]
    if second:
        yield from (term.plus(sign * number) for term in left for number in second)
    elif first:
        yield from (term.plus(number) for term in right for number in first)
    elif left and right:
        # Masked summands take turns.
        masked = all(term.masked for term in (*left, *right))
        yield from (term if masked else term.summed(2) for term in (*left, *right))


def _accumulated(node: onnx.NodeProto, operands: _Operands, scope: Scope) -> Iterator[LinearTerm]:
    """Of floats, such as the angles of joints: sums of integers are positions of what a mask keeps."""
    dtype, axis = scope.dtype(node.input[0]), scope.constant(node.input[1])
    sizes = scope.sizes(node.input[0])
    size = sizes[int(axis.item())] if axis is not None and sizes else None
    if size and dtype is not None and is_float(dtype):
        yield from (term.summed(size) for term in operands[0])


def _multiplied(node: onnx.NodeProto, operands: _Operands, scope: Scope) -> Iterator[LinearTerm]:
    for one, other in ((0, 1), (1, 0)):
        yield from _scaled(operands[one], ends(node.input[other], scope))
        if any(term.truth for term in operands[other]):
            yield from (replace(term, masked=True) for term in operands[one])


def _divided(node: onnx.NodeProto, operands: _Operands, scope: Scope) -> Iterator[LinearTerm]:
    divisors = ends(node.input[1], scope)
    if 0 not in divisors:
        yield from _scaled(operands[0], [1 / number for number in divisors])


def _scaled(terms: Iterable[LinearTerm], factors: Sequence[float]) -> Iterator[LinearTerm]:
    """The products with the smallest and the largest of ``factors``, if these have the same sign."""
    if factors and min(factors) * max(factors) > 0:
        yield from (term.times(factor) for term in terms for factor in factors)


_KEEPING = operators.MOVES | operators.PADS | operators.EXTREMES | operators.MEANS
_KEEPING |= {"Abs", "DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear", "TopK"}
"""Operators whose results are within the values of their first operand, or nearly."""

_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_KEEPING, lambda node, operands, scope: operands[0]),
    **dict.fromkeys(
        ("Floor", "Ceil", "Round"),
        lambda node, operands, scope: (replace(term, whole=True) for term in operands[0]),
    ),
    **dict.fromkeys(
        ("ScatterElements", "ScatterND", "Scatter"),
        # The data and the updates.
        lambda node, operands, scope: (*operands[0], *operands[2]),
    ),
    **dict.fromkeys(("Equal", "Not", "And", "Or"), _equal),
    **dict.fromkeys(
        ("Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
        lambda node, operands, scope: (replace(term, truth="compared") for term in _any(operands)),
    ),
    **dict.fromkeys(("Add", "Sub"), _added),
    **dict.fromkeys(("Clip", "Concat", "Max", "Min"), lambda node, operands, scope: _any(operands)),
    "Cast": _cast,
    "CumSum": _accumulated,
    "Where": lambda node, operands, scope: (*operands[1], *operands[2]),
    "Mul": _multiplied,
    "Div": _divided,
    "Neg": lambda node, operands, scope: (term.times(-1) for term in operands[0]),
    "Range": lambda node, operands, scope: (term.plus(-1) for term in operands[1]),
}

_WHOLE = frozenset(
    onnx.TensorProto.DataType.Value(f"{sign}INT{bits}")
    for sign in ("", "U")
    for bits in (8, 16, 32, 64)
)


def ends(name: str, scope: Scope) -> tuple[float, ...]:
    """The smallest and the largest value of the constant ``name``; none if it is not a finite constant."""
    value = scope.constant(name)
    if value is None or not value.size:
        return ()
    both = (float(value.min()), float(value.max()))
    return tuple(dict.fromkeys(both)) if all(map(math.isfinite, both)) else ()
