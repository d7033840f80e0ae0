"""Numbers of a graph that decide sizes, as far as they are known but for the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.evaluating import evaluate

ROWS = 998_244_353
"""The number of rows for which sizes are inferred: a prime, larger than the sizes that models have.

It is smaller than the numbers, from 10^9 on, that exporters write for the end of any axis.
"""

Array = NDArray[Any]


@dataclass(frozen=True)
class Numbers:
    """Numbers of the same shape: ``fixed + per_row * rows``."""

    fixed: Array
    per_row: Array

    @staticmethod
    def of(array: Array) -> Numbers:
        return Numbers(array, np.zeros_like(array))

    @property
    def is_fixed(self) -> bool:
        return not self.per_row.any()

    @property
    def of_rows(self) -> Array:
        """The numbers for `ROWS`."""
        return self.fixed if self.is_fixed else np.asarray(self.fixed + self.per_row * ROWS)


def compute(
    node: onnx.NodeProto, operands: Mapping[str, Numbers], opset: int
) -> list[Numbers] | None:
    """The results of ``node``, whose ``operands`` are given by their names; None if they are not known."""
    operator, values = graph.operator(node), [*operands.values()]
    if operator not in _MOVES and operator not in _COMPUTED.split():
        return None
    fixed = {name: numbers.fixed for name, numbers in operands.items()}
    if all(numbers.is_fixed for numbers in values):
        return [*map(Numbers.of, evaluate(node, fixed, opset))]
    if operator in _LINEAR:
        return [_LINEAR[operator](*(operands[name] for name in node.input))]
    if operator not in _MOVES:
        return None
    moved = [*operands] if operator == "Concat" else node.input[:1]
    if not all(numbers.is_fixed for name, numbers in operands.items() if name not in moved):
        return None
    if operator == "Cast":
        _rounded(*values)
    per_row = fixed | {name: operands[name].per_row for name in moved}
    parts = (evaluate(node, numbers, opset) for numbers in (fixed, per_row))
    return [Numbers(*pair) for pair in zip(*parts, strict=True)]


def sections(
    node: onnx.NodeProto, operands: Sequence[Numbers | None]
) -> Iterator[tuple[int, tuple[Numbers, Numbers, Numbers]]]:
    """Each axis that a Slice cuts, with start, end and stride. Raises ValueError if they are not known."""

    def numbers(name: str, number: int) -> Numbers | None:
        if number < len(node.input) and node.input[number]:
            if operands[number] is None:
                raise ValueError(name)
            return operands[number]
        values = graph.attribute(node, name, None)
        return None if values is None else Numbers.of(np.array(values, np.int64))

    starts, ends = numbers("starts", 1), numbers("ends", 2)
    if starts is None or ends is None:
        raise ValueError(node.name)
    count = starts.fixed.size
    axes = numbers("axes", 3) or Numbers.of(np.arange(count))
    strides = numbers("steps", 4) or Numbers.of(np.ones(count, np.int64))
    for i in range(count):
        cut = (Numbers(n.fixed.ravel()[i], n.per_row.ravel()[i]) for n in (starts, ends, strides))
        start, end, stride = cut
        yield int(axes.fixed.ravel()[i]), (start, end, stride)


_MOVES = operators.RESHAPING | {
    *("Cast", "Concat", "Expand", "Gather", "Slice", "Split", "Tile", "Transpose")
}
"""Operators that move numbers: what they do with a sum, they do with each part of it."""

_COMPUTED = """
Abs Add And Ceil ConstantOfShape Div Equal Floor Greater GreaterOrEqual Less LessOrEqual Max Min Mod Mul Neg
Not Or Pow Range ReduceProd ReduceSum Sqrt Sub Where
"""
"""Operators whose results are known for numbers that do not depend on the number of rows."""


def _divide(one: Array, other: Array) -> Array:
    if one.dtype.kind in "iu":
        quotient = np.abs(one) // np.abs(other)
        return np.asarray(np.sign(one) * np.sign(other) * quotient, one.dtype)
    return np.asarray(one / other)


def _product(one: Numbers, other: Numbers) -> Numbers:
    if np.logical_and(one.per_row, other.per_row).any():
        raise ValueError("a square of the number of rows")
    per_row = one.fixed * other.per_row + one.per_row * other.fixed
    return Numbers(one.fixed * other.fixed, per_row)


def _quotient(one: Numbers, other: Numbers) -> Numbers:
    """Exact quotients by fixed numbers, and of two multiples of the number of rows."""
    fixed, per_row, divisor, divisor_per_row = np.broadcast_arrays(
        one.fixed, one.per_row, other.fixed, other.per_row
    )
    by_rows = divisor_per_row != 0
    if (by_rows & ((divisor != 0) | (fixed != 0))).any():
        raise ValueError("not a multiple of the number of rows")
    divisors = np.where(by_rows, divisor_per_row, divisor)
    is_inexact = (per_row % divisors != 0) | ((per_row != 0) & (fixed % divisors != 0))
    if is_inexact.any():
        raise ValueError("a rounded number of rows")
    quotients, per_rows = _divide(fixed, divisors), _divide(per_row, divisors)
    return Numbers(
        np.where(by_rows, per_rows, quotients), np.where(by_rows, np.zeros_like(per_rows), per_rows)
    )


def _equal(one: Numbers, other: Numbers) -> Numbers:
    """-1, for an open size, is equal to no number of rows."""
    fixed, per_row = one.fixed - other.fixed, one.per_row - other.per_row
    is_never = ((per_row > 0) & (fixed >= 0)) | ((per_row < 0) & (fixed <= 0))
    if ((per_row != 0) & ~is_never).any():
        raise ValueError("compared with the number of rows")
    return Numbers.of((fixed == 0) & (per_row == 0))


def _where(condition: Numbers, one: Numbers, other: Numbers) -> Numbers:
    if not condition.is_fixed:
        raise ValueError("a condition on the number of rows")
    parts = ((one.fixed, other.fixed), (one.per_row, other.per_row))
    return Numbers(*(np.where(condition.fixed, *pair) for pair in parts))


def _rounded(numbers: Numbers) -> Numbers:
    if (numbers.fixed % 1).any() or (numbers.per_row % 1).any():
        raise ValueError("a rounded number of rows")
    return numbers


_LINEAR: Mapping[str, Callable[..., Numbers]] = {
    "Add": lambda a, b: Numbers(a.fixed + b.fixed, a.per_row + b.per_row),
    "Sub": lambda a, b: Numbers(a.fixed - b.fixed, a.per_row - b.per_row),
    "Mul": _product,
    "Div": _quotient,
    "Equal": _equal,
    "Where": _where,
    "Floor": _rounded,
    "Ceil": _rounded,
}
"""Functions whose results are known for any number of rows."""
