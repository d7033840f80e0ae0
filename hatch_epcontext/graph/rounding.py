"""Emulates an EP's number format with a float32 model: each result is rounded.

Sums inside Conv, MatMul and reductions stay exact, as NPUs compute them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence, Set

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.builder import BOUNDS_AS_INPUTS, Builder, copy_of, rename_values
from hatch_epcontext.graph.dtypes import Array, Numbers
from hatch_epcontext.graph.number_format import FUSING, Fault, NumberFormat
from hatch_epcontext.graph.scope import Scope

_SAME_VALUES = operators.MOVES | operators.PADS | operators.EXTREMES | operators.DEQUANTIZES
_SAME_VALUES |= {"Abs", "Concat", "Max", "Min", "Neg", "Relu", "Sign", "TopK", "Where"}
"""Operators whose results are values of their operands, or signs, or quantized: they need no rounding."""

_SCALING = frozenset({"Resize", "Upsample"})
"""Operators whose stored floats are sizes, not data."""

_WHERE = 9
"""The first opset with Where; most models of the two opsets before are also valid in it."""

_SELDOM_MET = 1e-3
"""The width of a range of values so small that a model seldom has them: that of a known fault that no
emulation shows is at most 3e-5, below divisors that float16 lacks, or at least 0.06.
"""

_TYPES: Mapping[str, int] = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def widen(model: onnx.ModelProto) -> None:
    """Let ``model`` compute in float32 what it computes in float16; the types of its inputs and
    outputs stay. The CPU does the same, but takes operators apart for which it has no kernel.
    """
    main, half = model.graph, TensorProto.FLOAT16
    outside = [*graph.inputs(main), *main.output]
    names = [value.name for value in outside if value.type.tensor_type.elem_type == half]
    for body in graph.graphs(main):
        _widen_types(body, names)
    builder = Builder(model)
    wide = {name: builder.fresh(f"{name}/float32") for name in names}
    inside = [copy_of(node) for node in main.node]
    rename_values(inside, wide)
    results = {name for node in inside for name in node.output}
    for name, inner in wide.items():
        if inner not in results:
            builder.append(helper.make_node("Cast", [name], [inner], to=TensorProto.FLOAT))
    for node in inside:
        builder.append(node)
    for name, inner in wide.items():
        if inner in results:
            builder.append(helper.make_node("Cast", [inner], [name], to=half))
    builder.write()


def _widen_types(body: onnx.GraphProto, kept: Container[str]) -> None:
    """Make float32 of float16 in ``body``, without the graphs inside it and the values ``kept``."""
    # Those of the graphs inside it are the same, whichever graph changes them.
    for tensor in graph.tensors(body):
        if tensor.data_type == TensorProto.FLOAT16:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for value in (*body.value_info, *body.input, *body.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16 and value.name not in kept:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for attribute in (attribute for node in body.node for attribute in node.attribute):
        if attribute.name in graph.TYPE_ATTRIBUTES and attribute.i == TensorProto.FLOAT16:
            attribute.i = TensorProto.FLOAT


def emulate(
    model: onnx.ModelProto, scope: Scope, format_: NumberFormat, skipped: Set[str] = frozenset()
) -> None:
    """Round the floats of ``model`` as ``format_`` does; its shapes are fixed.

    ``scope``: that of the model, which may have fewer outputs there. ``skipped``: the names of nodes that the
    EP does not compute: their results are rounded where other nodes read them, as inputs are. Not rounded are
    results that the EP computes with integers between quantized values, their scales, inner graphs, and
    stored numbers that a node without rounding also reads.
    """
    for opset in model.opset_import:
        if not opset.domain and opset.version in (_WHERE - 2, _WHERE - 1):
            opset.version = _WHERE
    emulated = _EmulatedGraph(model, scope, format_)
    for node in model.graph.node:
        emulated.add(node, rounds=node.name not in skipped or not node.name)
    emulated.write()


def rounded(values: Array, format_: NumberFormat) -> Array:
    """Float32 ``values``, rounded to ``format_``."""
    import ml_dtypes

    dtype = np.float16 if format_.name == "float16" else ml_dtypes.bfloat16
    inside: Array = np.clip(values, -format_.largest, format_.largest)
    return inside.astype(dtype).astype(np.float32)


def with_thresholds(
    model: onnx.ModelProto, factor: float, least: float = 0.0
) -> onnx.ModelProto | None:
    """A copy of ``model`` that compares with its stored floats times ``factor``, and instead of 0 with
    ``least``; None if there are none.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    scope, scaled = Scope(model.graph), dict[str, onnx.TensorProto]()
    for node in (node for node in copy.graph.node if node.op_type in operators.COMPARES):
        for index, name in enumerate(node.input):
            stored = scope.constant(name)
            if stored is not None and stored.dtype == np.float32:
                node.input[index] = f"{name} times {factor}"
                numbers = np.where(stored, stored * np.float32(factor), np.float32(least))
                scaled[name] = numpy_helper.from_array(numbers, node.input[index])
    copy.graph.initializer.extend(scaled.values())
    return copy if scaled else None


def with_moved_decisions(
    model: onnx.ModelProto, scope: Scope, unit: float, rng: np.random.Generator
) -> onnx.ModelProto | None:
    """A copy of ``model``, whose values ``scope`` knows, that decides by floats of which each is by a part
    ``unit`` larger or smaller, as ``rng`` chooses; None if it decides by no floats that it computes.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    builder, has_moved = Builder(copy), False
    for node in model.graph.node:
        moved = copy_of(node)
        for index, name in enumerate(node.input if _decides(node, scope) else ()):
            shape = scope.shape(name)
            if scope.dtype(name) != np.float32 or scope.constant(name) is not None or shape is None:
                continue
            factors = 1 + unit * rng.choice((-1.0, 1.0), shape)
            factor = builder.store(np.asarray(factors, np.float32))
            moved.input[index], has_moved = builder.add("Mul", name, factor), True
        builder.append(moved)
    builder.write()
    return copy if has_moved else None


def _decides(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether the results of ``node`` jump where its operands differ little."""
    is_rounded = node.op_type == "Cast" and scope.is_whole(node.output[0])
    return is_rounded or graph.operator(node) in operators.DECIDES


class _EmulatedGraph:
    def __init__(self, model: onnx.ModelProto, scope: Scope, format_: NumberFormat) -> None:
        self._format = format_
        self._scope = scope
        self._builder = Builder(model)
        self._outputs = {value.name for value in model.graph.output}
        self._constants: dict[float, str] = {}
        self._data: set[str] = set()
        self._exact: set[str] = set()
        self._outside = {value.name for value in graph.inputs(model.graph)}
        self._entered: dict[str, str] = {}

    def add(self, node: onnx.NodeProto, *, rounds: bool) -> None:
        """Add ``node``, and with ``rounds`` nodes that round its results."""
        copy = copy_of(node)
        if not rounds:
            self._outside.update(node.output)
        elif graph.operator(node) not in operators.QUANTIZES:
            copy.input[:] = map(self._enter, node.input)
        is_float = self._scope.elem_type(node.output[0]) == TensorProto.FLOAT
        if rounds and node.op_type == "Div" and is_float and self._format.has_reciprocals:
            self._multiply(copy)
        if rounds and node.op_type == "ReduceL2" and self._format.faults_of(node.op_type):
            self._square(copy)
        self._builder.append(copy)
        quantized = operators.QUANTIZES | operators.DEQUANTIZES
        is_data = rounds and graph.operator(node) not in quantized
        data = node.input[:1] if node.op_type in _SCALING else node.input
        self._data.update(data if is_data else ())
        self._exact.update(name for name in node.input if not is_data or name not in data)
        if not rounds or graph.operator(node) in _SAME_VALUES:
            return
        for index, name in enumerate(node.output):
            if self._scope.elem_type(name) != TensorProto.FLOAT or self._is_inside(node, name):
                continue
            exact = copy.output[index] = self._builder.fresh(f"{name}/exact")
            for fault in self._format.faults_of(graph.operator(node)) if index == 0 else ():
                exact = self._faulty(node, exact, fault)
            self._round(exact, name, wide=node.op_type in self._format.sums)

    def write(self) -> None:
        """Give the model the nodes, and rounded weights."""
        weights = self._data - self._exact
        for tensor in self._builder.model.graph.initializer:
            if tensor.data_type == TensorProto.FLOAT and tensor.name in weights:
                values = rounded(numpy_helper.to_array(tensor), self._format)
                tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        self._builder.write()

    def _enter(self, name: str) -> str:
        """``name`` as the EP reads it: rounded, if it is a float that comes from outside."""
        if name not in self._outside or self._scope.elem_type(name) != TensorProto.FLOAT:
            return name
        if name not in self._entered:
            self._entered[name] = self._builder.fresh(f"{name}/rounded")
            self._round(name, self._entered[name], wide=False)
        return self._entered[name]

    def _multiply(self, node: onnx.NodeProto) -> None:
        """Let a division multiply by the rounded reciprocal, so that 0 / 0 is 0."""
        divisor = node.input[1]
        inverse = self._builder.fresh(f"{divisor}/inverse")
        self._round(self._builder.add("Reciprocal", divisor), inverse, wide=False)
        node.op_type, node.input[1] = "Mul", inverse

    def _square(self, node: onnx.NodeProto) -> None:
        """Let a norm be the root of the rounded sum of squares."""
        squares, total = copy_of(node), self._builder.fresh(f"{node.output[0]}/total")
        squares.op_type, squares.name, squares.output[0] = "ReduceSumSquare", "", f"{total}/exact"
        self._builder.append(squares)
        self._round(squares.output[0], total, wide=True)
        node.CopyFrom(helper.make_node("Sqrt", [total], node.output, node.name))

    def _is_inside(self, node: onnx.NodeProto, name: str) -> bool:
        """Whether a value is never rounded to the format, because it is quantized or added to at once."""
        readers = self._scope.nodes_reading(name)
        if not readers or name in self._outputs:
            return False
        if all(graph.operator(reader) in operators.QUANTIZES for reader in readers):
            return True
        if len(readers) > 1 or node.op_type not in FUSING:
            return False
        (reader,) = readers
        has_constant = any(self._scope.constant(name) is not None for name in reader.input)
        return reader.op_type in ("Relu", "Clip") or (reader.op_type == "Add" and has_constant)

    def _round(self, value: str, name: str, *, wide: bool) -> None:
        """Add nodes that round ``value`` into ``name``."""
        builder, largest = self._builder, self._format.largest
        inside = self._limited(value, largest)
        short = builder.add("Cast", inside, to=_TYPES[self._format.name])
        if not wide or self._format.largest_of_sums == largest:
            builder.append(helper.make_node("Cast", [short], [name], to=TensorProto.FLOAT))
            return
        back = builder.add("Cast", short, to=TensorProto.FLOAT)
        more = builder.add("Sub", self._limited(value, self._format.largest_of_sums), inside)
        builder.append(helper.make_node("Add", [back, more], [name]))

    def _limited(self, value: str, largest: float) -> str:
        low, high = self._constant(-largest), self._constant(largest)
        if self._builder.opset >= BOUNDS_AS_INPUTS:
            return self._builder.add("Clip", value, low, high)
        return self._builder.add("Min", self._builder.add("Max", value, low), high)

    def _constant(self, value: float) -> str:
        if value not in self._constants:
            self._constants[value] = self._builder.store(np.float32(value))
        return self._constants[value]

    def _logarithm(self, node: onnx.NodeProto) -> str:
        """That of the size of a power, as `decisive` computes it."""
        base, exponent = node.input
        if self._scope.elem_type(exponent) != TensorProto.FLOAT:
            exponent = self._builder.add("Cast", exponent, to=TensorProto.FLOAT)
        size = self._builder.add("Abs", base)
        return self._builder.add("Mul", self._builder.add("Log", size), exponent)

    def _faulty(self, node: onnx.NodeProto, value: str, fault: Fault) -> str:
        """``value``, the result of ``node``, as the EP computes it with ``fault``."""
        if fault.gives is None or not applies(fault, node, self._scope):
            return value
        builder, operand = self._builder, node.input[fault.operand]
        if fault.logarithm:
            operand = self._logarithm(node)
        # Without GreaterOrEqual, which older opsets lack.
        below = builder.add("Less", operand, self._constant(fault.low))
        above = builder.add("Greater", operand, self._constant(fault.high))
        right = builder.add("Or", below, above)
        if math.copysign(1.0, fault.high) < 0 and not fault.high:
            # Comparisons treat -0.0 as 0.0; its reciprocal is -Inf.
            positive = builder.add(
                "Greater", builder.add("Reciprocal", operand), self._constant(0.0)
            )
            right = builder.add("Or", right, positive)
        return builder.add("Where", right, value, self._constant(fault.gives))


def decisive(fault: Fault, operands: Sequence[Numbers]) -> Numbers:
    """The values that decide whether a node with these ``operands`` is wrong."""
    if not fault.logarithm:
        return operands[fault.operand]
    base, exponent = operands
    if not base.size or not exponent.size:
        return np.zeros(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(exponent * np.log(np.abs(base)))


def applies(fault: Fault, node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether ``node`` can have ``fault``, whatever its values."""
    names = (attribute.name for attribute in node.attribute if attribute.s)
    texts = {name: graph.text(node, name) for name in names}
    if not fault.concerns(graph.operator(node), len(node.input), texts):
        return False
    if fault.whole != scope.is_whole(node.input[fault.operand]):
        return False
    stored = scope.constant(node.input[fault.operand]) if fault.computed else None
    if stored is not None and stored.size == 1:
        return False
    if fault.exponent is not None:
        exponent = scope.constant(graph.operand(node, 1))
        return (
            exponent is not None and exponent.size > 0 and bool((exponent == fault.exponent).all())
        )
    if not fault.behind:
        return True
    return any(before.op_type in fault.behind for before in _before(node, scope))


def hidden_faults(format_: NumberFormat, node: onnx.NodeProto, scope: Scope) -> Iterator[Fault]:
    """The faults of ``node`` that the emulation cannot show, and that concern more than a few values."""
    for fault in format_.faults_of(graph.operator(node)):
        # Faults of integers all have a rewrite that is always applied.
        is_hidden = fault.gives is None and fault.high - fault.low > _SELDOM_MET and not fault.whole
        if is_hidden and applies(fault, node, scope):
            yield fault


def _before(node: onnx.NodeProto, scope: Scope) -> Iterator[onnx.NodeProto]:
    """The nodes directly before ``node``, and those before an Add or a Reshape."""
    for name in node.input:
        maker = scope.maker(name)
        if maker is None:
            continue
        yield maker
        if maker.op_type == "Add" or maker.op_type in operators.RESHAPING:
            yield from _before(maker, scope)


def exposed(model: onnx.ModelProto, scope: Scope) -> onnx.ModelProto:
    """A copy of ``model`` with all its floats and long integers as outputs; ``scope``: that of the model."""
    results = [name for node in model.graph.node for name in node.output if name]
    for elem_type in (TensorProto.FLOAT, TensorProto.INT64):
        names = (name for name in results if scope.elem_type(name) == elem_type)
        model = graph.with_outputs(model, names, elem_type)
    return model
