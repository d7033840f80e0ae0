"""The body of a loop, computed with expressions instead of numbers.

Rows of a batch stay apart: an expression says how the columns of one row follow from states and items.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from numpy.typing import NDArray

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.dtypes import Array, Numbers
from hatch_epcontext.graph.evaluating import evaluate
from hatch_epcontext.graph.rewrites.recurrent import ACTIVATIONS


class NoRowsError(Exception):
    """The value of a node is no expression of a row; the message says why."""


@dataclass(frozen=True)
class Function:
    """An activation of an expression, with the values of its attributes. Those with one ``key`` are equal."""

    name: str
    of: Expression
    parameters: tuple[float, ...] = ()
    key: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", _digest(self.name, self.parameters, self.of.key))

    def select(self, columns: Columns) -> Function:
        """The function of some columns."""
        return Function(self.name, self.of.select(columns), self.parameters)


@dataclass(frozen=True)
class Expression:
    """The columns of a row: ``bias``, plus ``linear``'s sources times matrices, plus ``terms``.

    A source is a name or an expression, and its matrix is sources' columns x columns. A term is a product of
    factors, with a coefficient for each column. Expressions with one ``key`` are equal.
    """

    bias: Numbers
    linear: tuple[tuple[Source, Numbers], ...] = ()
    terms: tuple[tuple[Factors, Numbers], ...] = ()
    key: bytes = field(init=False)

    def __post_init__(self) -> None:
        parts = sorted((_key(source), _contents(matrix)) for source, matrix in self.linear)
        products = sorted(
            (sorted(factor.key for factor in factors), _contents(numbers))
            for factors, numbers in self.terms
        )
        object.__setattr__(self, "key", _digest(_contents(self.bias), parts, products))

    @property
    def size(self) -> int:
        """The number of columns."""
        return len(self.bias)

    @property
    def affine(self) -> Expression:
        """Its part without terms."""
        return Expression(self.bias, self.linear)

    def select(self, columns: Columns) -> Expression:
        """Some of its columns."""
        return Expression(
            self.bias[columns],
            tuple((source, matrix[:, columns]) for source, matrix in self.linear),
            tuple(
                (tuple(factor.select(columns) for factor in factors), numbers[columns])
                for factors, numbers in self.terms
            ),
        )

    def times(self, matrix: Numbers) -> Expression:
        """Its product with a matrix."""
        linear: list[tuple[Source, Numbers]] = [
            (source, own @ matrix) for source, own in self.linear
        ]
        if self.terms:
            linear.append((Expression(np.zeros(self.size), (), self.terms), matrix))
        return add([Expression(self.bias @ matrix, tuple(linear))])

    def scaled(self, numbers: Numbers | float) -> Expression:
        """Its columns times ``numbers``."""
        linear = tuple((source, matrix * numbers) for source, matrix in self.linear)
        terms = tuple((factors, own * numbers) for factors, own in self.terms)
        return add([Expression(self.bias * numbers, linear, terms)])


Columns = NDArray[np.intp]
Source = str | Expression
Factors = tuple[Function | Expression, ...]


def _digest(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def _contents(values: Numbers) -> bytes:
    # Adding 0 makes 0 of -0.
    return hashlib.sha256(str(values.shape).encode() + (values + 0.0).tobytes()).digest()


def _key(source: Source) -> bytes:
    return source.encode() if isinstance(source, str) else source.key


def state(name: str, size: int) -> Expression:
    """The value called ``name``, itself."""
    return Expression(np.zeros(size), ((name, np.eye(size)),))


def one(function: Function) -> Expression:
    """A function by itself."""
    ones = np.ones(function.of.size)
    return Expression(0 * ones, (), (((function,), ones),))


def add(parts: Iterable[Expression]) -> Expression:
    """The sum of ``parts``, with what is equal in them collected."""
    parts = [*parts]
    pairs: list[tuple[Source, Numbers]] = []
    for source, matrix in [pair for part in parts for pair in part.linear]:
        # What is multiplied by the unit matrix is a part itself.
        if isinstance(source, Expression) and np.array_equal(matrix, np.eye(len(matrix))):
            parts.append(source)
            pairs += source.linear
        else:
            pairs.append((source, matrix))
    linear: dict[bytes, tuple[Source, Numbers]] = {}
    for source, matrix in pairs:
        before = linear.get(_key(source))
        linear[_key(source)] = source, matrix if before is None else before[1] + matrix
    terms: dict[tuple[bytes, ...], tuple[Factors, Numbers]] = {}
    for factors, numbers in (pair for part in parts for pair in part.terms):
        ordered = tuple(sorted(factors, key=lambda factor: factor.key))
        key = tuple(factor.key for factor in ordered)
        terms[key] = ordered, numbers + terms[key][1] if key in terms else numbers
    return Expression(
        np.add.reduce([part.bias for part in parts]),
        tuple(pair for pair in linear.values() if pair[1].any()),
        tuple(pair for pair in terms.values() if pair[1].any()),
    )


def multiply(left: Expression, right: Expression) -> Expression:
    """The product of each column, with sums multiplied out, but for affine parts."""
    parts: list[Expression] = []
    for factors, numbers in _addends(left):
        for others, more in _addends(right):
            product, scale = (*factors, *others), numbers * more
            if len(product) == 1 and isinstance(product[0], Expression):
                parts.append(product[0].scaled(scale))
            elif product:
                parts.append(Expression(np.zeros(left.size), (), ((product, scale),)))
            else:
                parts.append(Expression(scale))
    return add(parts)


def _addends(value: Expression) -> list[tuple[Factors, Numbers]]:
    """The terms of ``value``, and its affine part as one of them."""
    if value.linear:
        return [*value.terms, ((value.affine,), np.ones(value.size))]
    is_needed = value.bias.any() or not value.terms
    return [*value.terms, *([((), value.bias)] if is_needed else [])]


@dataclass(frozen=True)
class Rows:
    """Rows of an expression, in an array whose dimensions but the last are ``batch``."""

    batch: tuple[int, ...]
    row: Expression

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        return (*self.batch, self.row.size)


Value = Rows | Array


@dataclass
class Body:
    """The ``values`` of a body by their names, as far as they are known; ``rows``: the size of the batch."""

    opset: int
    rows: int
    values: dict[str, Value]

    def compute(self, node: onnx.NodeProto) -> None:
        """Add the outputs of ``node``; those that depend on unknown values, or are no rows, stay unknown."""
        operands = {name: self.values[name] for name in node.input if name in self.values}
        if not {*graph.read_by(node)} <= {"", *self.values} or graph.is_random(node):
            return
        inputs = [self.values[name] for name in node.input if name]
        arrays = {name: v for name, v in operands.items() if not isinstance(v, Rows)}
        results: Sequence[Value] = ()
        if len(arrays) == len(operands):
            with contextlib.suppress(ValueError):
                results = evaluate(node, arrays, self.opset)
        elif node.op_type == "Shape" and isinstance(inputs[0], Rows):
            results = [np.array(inputs[0].shape, np.int64)]
        elif rule := _RULES.get(graph.operator(node)):
            try:
                results = rule(self, node, inputs)
            except NoRowsError:
                return
        self.values.update(zip(node.output, results, strict=False))

    def together(self, *values: Value) -> tuple[tuple[int, ...], list[Expression]]:
        """The common dimensions of ``values`` that are combined column by column, and their rows.

        Raises NoRowsError if rows are repeated, or differ in what is added to them.
        """
        size = next(value.row.size for value in values if isinstance(value, Rows))
        rows = [_as_rows(value, size) for value in values]
        batch = np.broadcast_shapes(*(value.batch for value in rows))
        if any(value.row.size != size for value in rows) or math.prod(batch) != self.rows:
            raise NoRowsError("rows or columns are repeated")
        return batch, [value.row for value in rows]


def _as_rows(value: Value, size: int) -> Rows:
    """``value`` as rows; stored numbers are the same in all rows."""
    if isinstance(value, Rows):
        return value
    columns = np.broadcast_to(value, (*value.shape[:-1], size)).reshape(-1, size)
    if not (columns == columns[:1]).all():
        raise NoRowsError("rows have different numbers")
    return Rows(value.shape[:-1], Expression(columns[0].astype(np.float64)))


def _rows(value: Value) -> Rows:
    if not isinstance(value, Rows):
        raise NoRowsError("its first operand is stored")
    return value


_Rule = Callable[[Body, onnx.NodeProto, Sequence[Value]], Sequence[Value]]


def _add(body: Body, node: onnx.NodeProto, inputs: Sequence[Value]) -> Sequence[Value]:
    batch, rows = body.together(*inputs)
    if node.op_type == "Sub":
        rows[1] = rows[1].scaled(-1)
    if node.op_type == "Neg":
        rows[0] = rows[0].scaled(-1)
    return [Rows(batch, add(rows))]


def _multiply(body: Body, node: onnx.NodeProto, inputs: Sequence[Value]) -> Sequence[Value]:
    first, second = inputs
    if node.op_type == "Div":
        if isinstance(second, Rows):
            raise NoRowsError("it divides by what it computes")
        second = 1 / second.astype(np.float64)
    batch, (left, right) = body.together(first, second)
    return [Rows(batch, multiply(left, right))]


def _multiply_matrices(
    body: Body, node: onnx.NodeProto, inputs: Sequence[Value]
) -> Sequence[Value]:
    left, right, *rest = inputs
    is_transposed = graph.number(node, "transA", 0)
    if not isinstance(left, Rows) or isinstance(right, Rows) or right.ndim != 2 or is_transposed:
        raise NoRowsError("it multiplies other matrices than rows and weights")
    matrix = right.astype(np.float64)
    if graph.number(node, "transB", 0):
        matrix = matrix.T
    product = Rows(left.batch, left.row.times(graph.attribute(node, "alpha", 1.0) * matrix))
    if not rest:
        return [product]
    batch, (row, bias) = body.together(product, rest[0])
    return [Rows(batch, add([row, bias.scaled(graph.attribute(node, "beta", 1.0))]))]


def _activate(body: Body, node: onnx.NodeProto, inputs: Sequence[Value]) -> Sequence[Value]:
    batch, (row,) = body.together(inputs[0])
    parameters: tuple[float, ...] = ()
    if node.op_type == "HardSigmoid":
        parameters = graph.attribute(node, "alpha", 0.2), graph.attribute(node, "beta", 0.5)
    return [Rows(batch, one(Function(node.op_type, row, parameters)))]


def _split(body: Body, node: onnx.NodeProto, inputs: Sequence[Value]) -> Sequence[Value]:
    value = _rows(inputs[0])
    if graph.number(node, "axis", 0) % len(value.shape) != len(value.batch):
        raise NoRowsError("it splits the batch")
    count, columns = len(node.output), np.arange(value.row.size)
    sizes = graph.attribute(node, "split", None)
    if len(inputs) > 1 and not isinstance(inputs[1], Rows):
        sizes = inputs[1].tolist()
    # Without sizes the last part may be smaller.
    size = -(-len(columns) // count)
    ends = np.cumsum(sizes) if sizes else size * np.arange(1, count + 1)
    parts = np.split(columns, ends[:-1])
    return [Rows(value.batch, value.row.select(part)) for part in parts]


def _setting(node: onnx.NodeProto, inputs: Sequence[Value], index: int, name: str) -> list[int]:
    """A list of integers, from an input or an attribute."""
    value = inputs[index] if len(inputs) > index else graph.attribute(node, name, [])
    return [] if isinstance(value, Rows) else [int(number) for number in np.ravel(value)]


def _slice(body: Body, node: onnx.NodeProto, inputs: Sequence[Value]) -> Sequence[Value]:
    value = _rows(inputs[0])
    names = ("starts", "ends", "axes", "steps")
    starts, ends, axes, strides = (
        _setting(node, inputs, index, name) for index, name in enumerate(names, start=1)
    )
    columns = np.arange(value.row.size)
    for index, axis in enumerate(axes or range(len(starts))):
        part = slice(starts[index], ends[index], strides[index] if strides else 1)
        size = value.shape[axis]
        if axis % len(value.shape) == len(value.batch):
            columns = columns[part]
        elif range(size)[part] != range(size):
            raise NoRowsError("it takes a part of the batch")
    return [Rows(value.batch, value.row.select(columns))]


def _concat(body: Body, node: onnx.NodeProto, inputs: Sequence[Value]) -> Sequence[Value]:
    rows = [_as_rows(value, value.shape[-1]) for value in inputs]
    if graph.number(node, "axis", 0) % len(rows[0].shape) != len(rows[0].batch):
        raise NoRowsError("it joins batches")
    size, start, parts = sum(value.row.size for value in rows), 0, list[Expression]()
    for value in rows:
        parts.append(value.row.times(np.eye(value.row.size, size, start)))
        start += value.row.size
    return [Rows(rows[0].batch, add(parts))]


def _reshape(body: Body, node: onnx.NodeProto, inputs: Sequence[Value]) -> Sequence[Value]:
    value = _rows(inputs[0])
    sizes = _setting(node, inputs, 1, "axes")
    stand_in = np.empty(value.shape, bool)
    if node.op_type == "Unsqueeze":
        shape = np.expand_dims(stand_in, tuple(sizes)).shape
    elif node.op_type == "Squeeze":
        shape = np.squeeze(stand_in, tuple(sizes) or None).shape
    else:
        shape = stand_in.reshape([size or value.shape[i] for i, size in enumerate(sizes)]).shape
    if shape[-1:] != value.shape[-1:]:
        raise NoRowsError("it reshapes columns")
    return [Rows(shape[:-1], value.row)]


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("Add", "Sub", "Sum", "Neg", "Identity"), _add),
    **dict.fromkeys(("Mul", "Div"), _multiply),
    **dict.fromkeys(("MatMul", "Gemm"), _multiply_matrices),
    **dict.fromkeys(ACTIVATIONS.values(), _activate),
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze"), _reshape),
    "Split": _split,
    "Slice": _slice,
    "Concat": _concat,
}
