"""Products of many values: Einsum, ReduceProd, CumProd and Det."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope

_MAX_DIMENSIONS = 4
"""The most dimensions of an operand that every EP multiplies; more are joined."""

_MAX_ROWS = 4
"""The most rows of a matrix whose determinant is expanded: 24 products."""


@dataclass(frozen=True)
class _Operand:
    """A value, and a letter for each of its dimensions, which are all different."""

    value: str
    labels: str


@dataclass(frozen=True)
class _Sums:
    """Adds the nodes; ``sizes`` are those of the letters."""

    builder: Builder
    sizes: Mapping[str, int]

    def summed(self, operand: _Operand, kept: str) -> _Operand:
        """``operand`` summed over the letters that are not in ``kept``."""
        axes = tuple(i for i, label in enumerate(operand.labels) if label not in kept)
        if not axes:
            return operand
        labels = "".join(label for label in operand.labels if label in kept)
        return _Operand(self.builder.reduced("ReduceSum", operand.value, axes, keepdims=0), labels)

    def ordered(self, operand: _Operand, labels: str) -> _Operand:
        """``operand`` with its dimensions in the order of ``labels``."""
        perm = [operand.labels.index(label) for label in labels]
        return _Operand(self.builder.transpose(operand.value, perm), labels)

    def grouped(self, operand: _Operand, groups: Sequence[str]) -> str:
        """``operand`` with one dimension for each of ``groups``, of size 1 for an empty one."""
        value = self.ordered(operand, "".join(groups)).value
        if all(len(group) == 1 for group in groups):
            return value
        return self.builder.reshape(value, [self.size(group) for group in groups])

    def size(self, labels: str) -> int:
        return math.prod(self.sizes[label] for label in labels)

    def diagonal(self, value: str, labels: str) -> _Operand:
        """``value`` with each of ``labels`` once: where one is repeated, its diagonal."""
        while repeated := next((label for label in labels if labels.count(label) > 1), ""):
            first = labels.index(repeated)
            second = labels.index(repeated, first + 1)
            others = [axis for axis in range(len(labels)) if axis not in (first, second)]
            size = self.sizes[repeated]
            value = self.builder.transpose(value, [*others, first, second])
            rest = [self.sizes[labels[axis]] for axis in others]
            value = self.builder.reshape(value, [*rest, size * size])
            indices = self.builder.integers([*range(0, size * size, size + 1)])
            value = self.builder.add("Gather", value, indices, axis=len(others))
            labels = "".join(labels[axis] for axis in others) + repeated
        return _Operand(value, labels)

    def multiplied(self, a: _Operand, b: _Operand, kept: str) -> _Operand:
        """The product of ``a`` and ``b``, summed over the letters that are not in ``kept``."""
        both = [label for label in a.labels if label in b.labels]
        a = self.summed(a, kept + b.labels)
        b = self.summed(b, kept + a.labels)
        shared = "".join(label for label in both if label in kept)
        inner = "".join(label for label in both if label not in kept)
        left = "".join(label for label in a.labels if label not in both)
        right = "".join(label for label in b.labels if label not in both)
        batch = list(shared) if len(shared) + 2 <= _MAX_DIMENSIONS else [shared]
        operands = self.grouped(a, [*batch, left, inner]), self.grouped(b, [*batch, inner, right])
        product = self.builder.add("MatMul" if inner else "Mul", *operands)
        labels = shared + left + right
        if not all(len(group) == 1 for group in [*batch, left, right]):
            product = self.builder.reshape(product, [self.sizes[label] for label in labels])
        return _Operand(product, labels)


@rewrites("Einsum")
def einsum_as_matmul(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A sum of products as MatMul, Mul and ReduceSum."""
    known = [*map(scope.fixed_shape, node.input)]
    equation = graph.text(node, "equation")
    terms, result = operators.einsum_terms(equation, [*map(len, known)])
    if len(set(result)) < len(result) or set(result) - set("".join(terms)):
        return Declined(f"its equation is {equation!r}")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, known, strict=True):
        for label, size in zip(term, shape, strict=True):
            if sizes.setdefault(label, size) != size:
                return Declined(f"{label!r} has two sizes")
    sums = _Sums(builder, sizes)
    first, *others = (sums.diagonal(n, term) for n, term in zip(node.input, terms, strict=True))
    while others:
        second, *others = others
        kept = result + "".join(operand.labels for operand in others)
        first = sums.multiplied(first, second, kept)
    return [sums.ordered(sums.summed(first, result), result).value]


@rewrites("ReduceProd")
def reduce_as_products(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The product of all values along axes, as those of two halves."""
    value = node.input[0]
    axes, shape = scope.fixed_axes(node), scope.fixed_shape(value)
    sizes = [*shape]
    for axis in axes:
        rest = []
        while sizes[axis] > 1:
            half, odd = divmod(sizes[axis], 2)
            parts = builder.split(value, axis, [half, half, *[odd] * odd])
            value = builder.add("Mul", *parts[:2])
            rest += parts[2:]
            sizes[axis] = half
        for part in rest:
            value = builder.add("Mul", value, part)
    if graph.number(node, "keepdims", 1):
        return [value]
    return [builder.reshape(value, [size for i, size in enumerate(shape) if i not in axes])]


@rewrites("CumProd")
def cumulate_as_products(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Products with what is 1, 2, 4 and more indices before."""
    value, axis_name = node.input
    shape, reverse = scope.fixed_shape(value), graph.number(node, "reverse", 0)
    axis = int(scope.stored_values(axis_name).item()) % len(shape)
    size = shape[axis]

    def moved(value: str, distance: int) -> str:
        """``value`` after ``distance`` ones, or before them, and of its size."""
        kept, rest = (size - distance, distance) if not reverse else (distance, size - distance)
        parts = builder.split(value, axis, [kept, rest]) if distance < size else ["", ""]
        ones = [*shape]
        ones[axis] = min(distance, size)
        filler = builder.store(np.ones(ones, scope.dtype(node.input[0])))
        if distance >= size:
            return filler
        return builder.concat([parts[1], filler] if reverse else [filler, parts[0]], axis)

    if graph.number(node, "exclusive", 0):
        value = moved(value, 1)
    distance = 1
    while distance < size:
        value = builder.add("Mul", value, moved(value, distance))
        distance *= 2
    return [value]


@rewrites("Det")
def det_as_products(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The determinant of small matrices, expanded along the first row."""
    shape = scope.fixed_shape(node.input[0])
    if shape[-1] > _MAX_ROWS:
        return Declined(f"its matrices have more than {_MAX_ROWS} rows")
    rows = [builder.item(node.input[0], len(shape) - 2, row) for row in range(shape[-1])]
    values = [
        [builder.item(row, len(shape) - 2, column) for column in range(shape[-1])] for row in rows
    ]

    def expanded(row: int, columns: Sequence[int]) -> str:
        if len(columns) == 1:
            return values[row][columns[0]]
        total = ""
        for index, column in enumerate(columns):
            minor = expanded(row + 1, [other for other in columns if other != column])
            product = builder.add("Mul", values[row][column], minor)
            total = builder.add("Sub" if index % 2 else "Add", total, product) if total else product
        return total

    return [expanded(0, range(shape[-1]))]
