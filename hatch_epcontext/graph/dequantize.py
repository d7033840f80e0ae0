"""Undo the quantization of a model: integer arithmetic becomes float arithmetic, with dequantized weights.

Dynamic quantization measures the scale of each activation when the model runs, which NPUs cannot do. Here
``x``, 1 and 0 replace the integers of ``x``, their scale and their zero point. What is computed of them is
then off by a power of the scale, and right where that cancels out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.builder import Builder, Outputs, Rule, remove_unused
from hatch_epcontext.graph.dtypes import is_float
from hatch_epcontext.graph.scope import Scope

Array = NDArray[Any]
Floats = NDArray[np.float32]
Numbers = NDArray[np.float64] | np.float64

_QUANTIZATION = operators.DYNAMIC_QUANTIZATION | operators.DEQUANTIZES | {"QuantizeLinear"}

_SAME_NUMBERS = operators.MOVES | {"Concat", "MaxPool", "Resize"}
"""Operators that quantizers apply to integers, because the result is the same as with floats."""

_SUFFIX = "_dequantized"

_WHOLE = frozenset({0, TensorProto.FLOAT, TensorProto.INT32})
"""The types to which quantizers cast sums of integers; 0 is that of an operator that keeps it."""

_ACCURACY, _FLOATS, _INTEGERS = "accuracy_level", 1, 4
"""An attribute of products with stored integers: activations stay float32, or become int8 while they run."""


def is_dynamic(onnx_model: onnx.ModelProto) -> bool:
    """Whether a model is dynamically quantized, at least in parts."""
    return any(
        graph.operator(node) in operators.DYNAMIC_QUANTIZATION or _rounds(node)
        for node in graph.nodes(onnx_model.graph)
    )


def _rounds(node: onnx.NodeProto) -> bool:
    """Whether the CPU computes ``node`` with activations of int8."""
    return bool(graph.attribute(node, _ACCURACY, 0) == _INTEGERS)


def is_quantized(onnx_model: onnx.ModelProto) -> bool:
    """Whether a model rounds values to integers: small errors in a value then change others more."""
    names = {node.op_type for node in graph.nodes(onnx_model.graph)}
    return "QuantizeLinear" in names or is_dynamic(onnx_model)


def static_format(onnx_model: onnx.ModelProto) -> operators.StaticFormat | None:
    """How a model is statically quantized; None if it is not."""
    names = {node.op_type for node in graph.nodes(onnx_model.graph)}
    if any(map(operators.is_of_integers, names)):
        return "QOperator"
    return "QDQ" if "QuantizeLinear" in names else None


def dequantize(model: onnx.ModelProto, *, static: bool = False) -> int:
    """Undo dynamic quantization in ``model``, and return the number of operators undone.

    Stored weights that are only dequantized become floats too, unless the model also has static quantization
    (QuantizeLinear), which NPUs support; with ``static`` that is undone as well. A node stays as it is unless
    a known quantizer writes it like this. All tensors must have their values.
    """
    before = _count(model)
    for node in filter(_rounds, graph.nodes(model.graph)):
        next(attr for attr in node.attribute if attr.name == _ACCURACY).i = _FLOATS
    is_static = any(node.op_type == "QuantizeLinear" for node in model.graph.node)
    builder = Builder(model)
    substitution = _Substitution(static=static, weights=static or not is_static)
    builder.replace(Scope(model.graph), substitution.rules())
    builder.write()
    # Nodes that only integers pass through are left.
    for body in graph.graphs(model.graph):
        remove_unused(body)
    return before - _count(model)


def _count(model: onnx.ModelProto) -> int:
    nodes = graph.nodes(model.graph)
    return sum(graph.operator(node) in _QUANTIZATION or _rounds(node) for node in nodes)


@dataclass(frozen=True)
class _Integers:
    """An activation as integers: the names of its floats, of its scale, and of its zero point."""

    real: str
    scale: str
    zero_point: str


class _Product(NamedTuple):
    """The product, as ``node`` computes it, of the floats called ``real`` and ``weight``."""

    node: onnx.NodeProto
    real: str
    weight: Floats

    def write(self, factor: Numbers, bias: Numbers, builder: Builder) -> Outputs:
        """Add ``factor`` times the product, plus ``bias``; None if the weight cannot hold the factor."""
        convolves = self.node.op_type == "ConvInteger"
        sizes = (1,) * (self.weight.ndim - factor.ndim) + factor.shape
        if len(sizes) > self.weight.ndim or factor.size != sizes[1 if convolves else -1]:
            return None
        # The channels are axis 1 of the result, and axis 0 of the weight.
        factor = np.reshape(factor, sizes).swapaxes(0, 1) if convolves else factor
        weight = builder.store(self.weight * factor.astype(np.float32))
        operator = "Conv" if convolves else "MatMul"
        (product,) = builder.add_like(self.node, operator, [self.real, weight])
        if bias.any():
            product = builder.add("Add", product, builder.store(bias.astype(np.float32)))
        return [product]


@dataclass(frozen=True)
class _Value:
    """What replaces a value: ``number``, plus ``factor`` times ``product`` if there is one.

    The value itself is that times the measured ``scale`` to the power of ``power``.
    """

    number: Numbers
    scale: str = ""
    power: int = 0
    product: _Product | None = None
    factor: Numbers = np.float64(1)

    def plus(self, other: _Value) -> _Value | None:
        """The sum with a number; None if that has another scale."""
        if (self.scale, self.power) != (other.scale, other.power):
            return None
        return replace(self, number=self.number + other.number)

    def times(self, other: _Value, exponent: int) -> _Value | None:
        """The product with a number, or its reciprocal if ``exponent`` is -1; None if that is unknown."""
        is_known = other.scale in ("", self.scale or other.scale)
        if not is_known or (exponent < 0 and not other.number.all()):
            return None
        power, factor = self.power + exponent * other.power, other.number**exponent
        scale = (self.scale or other.scale) if power else ""
        number, factor = self.number * factor, self.factor * factor
        return replace(self, number=number, scale=scale, power=power, factor=factor)


class _Substitution:
    """Replaces integers by floats; ``known``: what is known of the values of graphs by their names.

    ``static``: also where scales are stored; ``weights``: also stored integers that are only dequantized.
    """

    def __init__(self, *, static: bool, weights: bool) -> None:
        self.static, self.weights = static, weights
        self.known: dict[tuple[Scope, str], _Integers | _Value] = {}

    def rules(self) -> dict[str, Rule]:
        """The rules for operators, which are to be applied once, to the nodes of a model in their order."""
        rules: dict[str, Rule] = {
            **dict.fromkeys(_SAME_NUMBERS, self._move),
            "Reshape": self._reshape,
            **dict.fromkeys(("Add", "Div", "Mul"), self._compute),
            **dict.fromkeys(("Cast", "Floor", "Round"), self._keep),
            **dict.fromkeys(("ConvInteger", "MatMulInteger"), self._multiply),
            **dict.fromkeys(operators.DEQUANTIZES, self._restore),
            "DynamicQuantizeLinear": self._measure,
            "com.microsoft.DynamicQuantizeLSTM": _lstm,
        }
        if self.static:
            rules |= dict.fromkeys(operators.QUANTIZES, self._clip)
        return rules

    def _measure(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> None:
        quantized, scale, zero_point = node.output
        self.known[scope, quantized] = _Integers(node.input[0], scale, zero_point)
        self.known[scope, scale] = _Value(np.float64(1), scale, 1)

    def _clip(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        """Keep the range of the integers: quantizers omit a Relu that it replaces."""
        value, scale, zero = graph.operands(node, 3)
        factor, offset = _constant(scope, scale, 1), _constant(scope, zero, 0)
        dtype = scope.dtype(zero) if zero else np.dtype(np.uint8)
        if factor is None or offset is None or dtype is None or is_float(dtype):
            return None
        if factor.size != 1 or offset.size != 1:
            return None
        info = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
        bounds = ((limit - float(offset.item())) * factor.item() for limit in (info.min, info.max))
        self.known[scope, node.output[0]] = _Integers(builder.clip(value, *bounds), scale, zero)
        builder.append(node)
        return node.output

    def _move(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        """A copy of ``node`` for the floats of integers; the node itself is removed if it becomes unused."""
        first = self.known.get((scope, node.input[0]))
        if not isinstance(first, _Integers):
            return None
        names: dict[str, str] = {}
        for name in node.input if node.op_type == "Concat" else node.input[:1]:
            real = self._activation(name, first.scale, first.zero_point, scope)
            if real is None:
                return None
            names[name] = real
        builder.copy([node], names, _SUFFIX)
        builder.append(node)
        for name in filter(None, node.output):
            self.known[scope, name] = replace(first, real=names[name])
        return node.output

    def _reshape(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        known = self.known.get((scope, node.input[0]))
        if not isinstance(known, _Value):
            return self._move(node, scope, builder)
        sizes = scope.constant(graph.operand(node, 1))
        if not known.product and sizes is not None and sizes.all():
            number = known.number.reshape(sizes.tolist())
            self.known[scope, node.output[0]] = replace(known, number=number)
        return None

    def _keep(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> None:
        """Leave out the rounding of numbers that were divided by a scale; a product is one of integers."""
        known, type_ = self.known.get((scope, node.input[0])), graph.attribute(node, "to", 0)
        if isinstance(known, _Value) and (known.product or known.power < 0) and type_ in _WHOLE:
            self.known[scope, node.output[0]] = known

    def _multiply(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        left, right, left_zero, right_zero = graph.operands(node, 4)
        axis = 0 if node.op_type == "ConvInteger" else -1
        weight = _stored(scope, right, "", right_zero, (axis,))
        known = self.known.get((scope, left))
        if known is None and (real := _moved(scope, builder, (left, "", left_zero), -2)):
            # Rows of a table of stored integers, with a stored scale.
            known = _Integers(real, "", left_zero)
        if not isinstance(known, _Integers) or known.zero_point != left_zero:
            return None
        if weight is None or weight.ndim < 2:
            return None
        product, power = _Product(node, known.real, weight), -1 if known.scale else 0
        self.known[scope, node.output[0]] = _Value(np.float64(0), known.scale, power, product)
        builder.append(node)
        return node.output

    def _compute(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        """Compute with known values; a scaled product without a measured scale replaces the model's."""
        one, other = (self._value(name, scope) for name in node.input)
        if other is not None and other.product and node.op_type != "Div":
            one, other = other, one
        if one is None or other is None or other.product:
            return None
        if node.op_type == "Add":
            result = one.plus(other)
        else:
            result = one.times(other, -1 if node.op_type == "Div" else 1)
            if result is not None and result.product and not result.power:
                return result.product.write(result.factor, result.number, builder)
        if result is not None:
            self.known[scope, node.output[0]] = result
        return None

    def _value(self, name: str, scope: Scope) -> _Value | None:
        known = self.known.get((scope, name))
        if known is None and scope.elem_type(name) == TensorProto.FLOAT:
            number = scope.constant(name)
            return None if number is None else _Value(number.astype(np.float64))
        return known if isinstance(known, _Value) else None

    def _restore(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        value, scale, zero = graph.operands(node, 3)
        real = self._activation(value, scale, zero, scope)
        has_dtype = graph.attribute(node, "output_dtype", 0) in (0, scope.elem_type(scale))
        if real is None and self.weights and has_dtype:
            axis, block = graph.attribute(node, "axis", 1), graph.attribute(node, "block_size", 0)
            real = _moved(scope, builder, (value, scale, zero), axis, block)
        return [real] if real else None

    def _activation(self, name: str, scale: str, zero: str, scope: Scope) -> str | None:
        """The floats of the integers ``name``, if these are their scale and their zero point."""
        known = self.known.get((scope, name))
        if not isinstance(known, _Integers) or not _is_equal(scope, known.scale, scale):
            return None
        return known.real if _is_equal(scope, known.zero_point, zero) else None


def _is_equal(scope: Scope, one: str, other: str) -> bool:
    """Whether two values are the same one, or are stored with equal numbers; without a name it is 0."""
    left, right = _constant(scope, one, 0), _constant(scope, other, 0)
    if left is None or right is None:
        return one == other
    return np.array_equal(left.squeeze(), right.squeeze())


def _lstm(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    names = graph.operands(node, 12)
    weights = []
    for name, scale, zero in ((names[1], *names[8:10]), (names[2], *names[10:12])):
        # Scales of directions, or of directions x gates.
        floats = _stored(scope, name, scale, zero, (0, 2))
        if floats is None:
            return None
        # Directions x inputs x gates here, directions x gates x inputs in LSTM.
        weights.append(builder.store(floats.transpose(0, 2, 1)))
    return builder.add_like(node, "LSTM", [names[0], *weights, *names[3:8]])


def _moved(
    scope: Scope, builder: Builder, names: tuple[str, str, str], axis: int, block: int = 0
) -> str | None:
    """The name of the floats of `_stored`, if the integers are only moved after they were stored."""
    value, scale, zero = names
    name, moves = scope.origin_and_moves(value, operators.MOVES - {"Split"})
    # Before the moves, another axis has the scales.
    if moves and any(math.prod(scope.shape(other) or ()) > 1 for other in (scale, zero)):
        return None
    floats = _stored(scope, name, scale, zero, (axis,), block)
    if floats is None:
        return None
    copied = {name: builder.store(floats)}
    builder.copy(reversed(moves), copied, _SUFFIX)
    return copied[value]


def _constant(scope: Scope, name: str, default: float) -> Array | None:
    """The stored tensor ``name``, or ``default`` if it has no name."""
    return scope.constant(name) if name else np.asarray(default, np.float32)


def _stored(
    scope: Scope, name: str, scale: str, zero: str, axes: Sequence[int], block: int = 0
) -> Floats | None:
    """The floats of the stored integers ``name``, in the dtype of ``scale``; None if one is not stored.

    Without a name, the scale is 1 and the zero point 0. Both are one for all, or have all dimensions of the
    integers, or only the first ``axes``; with ``block`` there is one for so many integers along the first of
    ``axes``.
    """
    integers = scope.constant(name)
    factor, offset = _constant(scope, scale, 1), _constant(scope, zero, 0)
    if integers is None or factor is None or offset is None:
        return None
    shape = integers.shape

    def spread(array: Array) -> Floats:
        values = array.astype(np.float32)
        if values.size == 1:
            # The axis may be any.
            return values.reshape(())
        if block:
            return values.take(np.arange(shape[axes[0]]) // block, axes[0])
        if values.ndim == len(shape):
            return values
        sizes = [1] * len(shape)
        for axis, size in zip(axes, values.shape, strict=False):
            sizes[axis] = size
        return values.reshape(sizes)

    floats = (integers.astype(np.float32) - spread(offset)) * spread(factor)
    return floats.astype(factor.dtype, copy=False)
