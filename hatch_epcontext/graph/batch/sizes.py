"""Numbers of a graph that decide sizes, as far as they are known but for the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from hatch_epcontext.graph import graph, operators

ROWS = 998_244_353
"""The number of rows for which sizes are inferred: a prime, larger than the sizes that models have.

It is smaller than the numbers, from 10^9 on, that exporters write for the end of any axis.
"""

Array = NDArray[Any]
Shape = tuple[int, ...]


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
    node: onnx.NodeProto, operands: Sequence[Numbers], shapes: Sequence[Shape]
) -> list[Numbers] | None:
    """The results of ``node``, whose ``shapes`` were inferred; None if they are not known.

    ``operands``: without those that are missing.
    """
    operator = graph.operator(node)
    if all(numbers.is_fixed for numbers in operands):
        arrays = [numbers.fixed for numbers in operands]
        results = _move(node, arrays, shapes)
        if results is None and operator in _FUNCTIONS:
            results = [np.asarray(_FUNCTIONS[operator](*arrays)).reshape(shapes[0])]
        return None if results is None else [Numbers.of(array) for array in results]
    if operator in _LINEAR:
        return [_LINEAR[operator](*operands)]
    moved = operands if operator == "Concat" else operands[:1]
    others = [numbers.fixed for numbers in operands[len(moved) :] if numbers.is_fixed]
    if len(moved) + len(others) < len(operands):
        return None
    fixed = _move(node, [*(numbers.fixed for numbers in moved), *others], shapes)
    per_row = _move(node, [*(numbers.per_row for numbers in moved), *others], shapes)
    if fixed is None or per_row is None:
        return None
    return [Numbers(*parts) for parts in zip(fixed, per_row, strict=True)]


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


def _move(
    node: onnx.NodeProto, arrays: Sequence[Array], shapes: Sequence[Shape]
) -> list[Array] | None:
    """The results of an operator that moves numbers; None for another one."""
    operator = graph.operator(node)
    if operator in operators.RESHAPING:
        return [arrays[0].reshape(shapes[0])]
    if operator == "Split":
        axis = graph.number(node, "axis", 0)
        return np.split(arrays[0], np.cumsum([shape[axis] for shape in shapes])[:-1], axis)
    if (move := _MOVES.get(operator)) is None:
        return None
    return [np.asarray(move(node, shapes[0], *arrays))]


def _cut(node: onnx.NodeProto, shape: Shape, first: Array, *others: Array) -> Array:
    cut = [slice(None)] * first.ndim
    operands = iter([None, *map(Numbers.of, others)])
    present = [next(operands) if name else None for name in node.input]
    for axis, numbers in sections(node, present):
        cut[axis] = slice(*(int(number.fixed) for number in numbers))
    return np.asarray(first[tuple(cut)])


def _cast(node: onnx.NodeProto, shape: Shape, first: Array) -> Array:
    return first.astype(helper.tensor_dtype_to_np_dtype(graph.number(node, "to", 0)))


def _constant(node: onnx.NodeProto, shape: Shape, sizes: Array) -> Array:
    value = graph.array_of(graph.attribute(node, "value", None))
    return np.full(shape, np.float32(0) if value is None else value)


_MOVES: Mapping[str, Callable[..., Array]] = {
    "Cast": _cast,
    "Concat": lambda node, shape, *arrays: np.concatenate(arrays, graph.number(node, "axis", 0)),
    "ConstantOfShape": _constant,
    "Expand": lambda node, shape, first, sizes: np.broadcast_to(first, shape),
    "Gather": lambda node, shape, first, indices: np.take(
        first, indices, graph.number(node, "axis", 0)
    ),
    "Slice": _cut,
    "Tile": lambda node, shape, first, repeats: np.tile(first, repeats),
    "Transpose": lambda node, shape, first: first.transpose(graph.attribute(node, "perm", None)),
}
"""Operators that move numbers, as functions of the node, the shape of its result and its operands."""


def _divide(one: Array, other: Array) -> Array:
    if one.dtype.kind in "iu":
        quotient = np.abs(one) // np.abs(other)
        return np.asarray(np.sign(one) * np.sign(other) * quotient, one.dtype)
    return np.asarray(one / other)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Abs": np.abs,
    "Add": np.add,
    "And": np.logical_and,
    "Ceil": np.ceil,
    "Div": _divide,
    "Equal": np.equal,
    "Floor": np.floor,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Max": lambda *arrays: reduce(np.maximum, arrays),
    "Min": lambda *arrays: reduce(np.minimum, arrays),
    "Mod": np.mod,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Or": np.logical_or,
    "Pow": lambda base, exponent: np.power(base, exponent).astype(base.dtype),
    "Range": np.arange,
    "Sqrt": np.sqrt,
    "Sub": np.subtract,
    "Where": np.where,
    # Of several numbers only if one is left: `compute` refuses another shape.
    "ReduceProd": lambda array, *axes: np.prod(array, dtype=array.dtype),
    "ReduceSum": lambda array, *axes: np.sum(array, dtype=array.dtype),
}
"""Functions of numbers that do not depend on the number of rows."""


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
