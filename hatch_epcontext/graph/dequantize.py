"""Undo the quantization of a model: integer arithmetic becomes float arithmetic, with dequantized weights.

Dynamic quantization measures each activation when the model runs, which NPUs cannot do. It computes
``(q - zero_point) * scale`` of integers, an approximation of a float operator, which replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.arrays import STRING, is_float
from hatch_epcontext.graph.builder import Builder, Outputs, Rule, remove_unused
from hatch_epcontext.graph.limits import DYNAMIC_QUANTIZATION, QUANTIZED_WEIGHTS
from hatch_epcontext.graph.scope import Scope

Floats = np.ndarray[Any, np.dtype[np.float32]]

_QUANTIZATION = DYNAMIC_QUANTIZATION | QUANTIZED_WEIGHTS | {"QuantizeLinear"}

_SAME_NUMBERS = operators.MOVES | {"MaxPool"}
"""Operators that quantizers apply to integers, because the result is the same as with floats."""

_NUMBERS = frozenset(
    {
        TensorProto.FLOAT,
        TensorProto.INT8,
        TensorProto.UINT8,
        TensorProto.INT16,
        TensorProto.UINT16,
        TensorProto.INT32,
    }
)
"""The element types that a quantizer casts to."""


def is_dynamic(onnx_model: onnx.ModelProto) -> bool:
    """Whether a model is dynamically quantized, at least in parts."""
    nodes = graph.nodes(onnx_model.graph)
    return not DYNAMIC_QUANTIZATION.isdisjoint(map(graph.operator, nodes))


def is_noisy(onnx_model: onnx.ModelProto) -> bool:
    """Whether a model rounds values to integers: small errors in a value then change others more."""
    operators = {node.op_type for node in graph.nodes(onnx_model.graph)}
    return "QuantizeLinear" in operators or is_dynamic(onnx_model)


def dequantize(model: onnx.ModelProto, *, static: bool = False) -> int:
    """Undo dynamic quantization in ``model``, in place, and return the number of operators undone.

    Stored weights that are only dequantized become floats too, in all graphs, unless the model also has
    static quantization (QuantizeLinear), which NPUs support; with ``static`` that is undone as well. A node
    stays as it is unless a known quantizer writes it like this. All tensors must have their values.
    """
    before = _count(model)
    _replace(model, _Undoing(static=static).rules())
    if static or not any(node.op_type == "QuantizeLinear" for node in model.graph.node):
        # Nodes that only integers pass through are removed at the end.
        _replace(model, _WEIGHTS, nested=True)
    for part in graph.graphs(model.graph):
        remove_unused(part)
    return before - _count(model)


def _count(model: onnx.ModelProto) -> int:
    return sum(graph.operator(node) in _QUANTIZATION for node in graph.nodes(model.graph))


def _replace(model: onnx.ModelProto, rules: Mapping[str, Rule], *, nested: bool = False) -> None:
    builder = Builder(model)
    builder.replace(Scope(model.graph), rules, nested=nested)
    builder.write()


@dataclass(frozen=True)
class _Quantized:
    """An activation as integers: ``real`` are its floats, and ``scale`` the name of their scale."""

    real: str
    scale: str
    zero_point: str


@dataclass(frozen=True)
class _Scale:
    """A number that is ``factor`` times the scale ``scale``, which is known only when the model runs.

    Without a name it is ``factor`` alone.
    """

    scale: str
    factor: Floats


@dataclass(frozen=True)
class _Sum:
    """The integers of a product of an activation with ``weight`` (float, not scaled): real / ``scale``.

    ``bias`` is added to it after it is scaled, with the factor ``biased``.
    """

    node: onnx.NodeProto
    real: str
    scale: str
    weight: Floats
    bias: Floats | None = None
    biased: Floats | None = None


@dataclass(frozen=True)
class _Bias:
    """Integers: ``value`` divided by ``by``, rounded."""

    value: Floats
    by: _Scale


_Restored = _Quantized | _Scale | _Sum | _Bias


class _Undoing:
    """Adds floats beside integers whose scales are known; ``known``: by the names of values.

    With ``static`` the input of a QuantizeLinear also replaces the output of the DequantizeLinear after it.
    """

    def __init__(self, *, static: bool) -> None:
        self.static = static
        self.known: dict[str, _Restored] = {}

    def rules(self) -> Mapping[str, Rule]:
        static = {
            **dict.fromkeys(("Concat", "Resize"), self._move),
            **dict.fromkeys(operators.QUANTIZES, self._clip),
            "com.microsoft.DequantizeLinear": self._dequantize,
        }
        return {
            **(static if self.static else {}),
            **dict.fromkeys(_SAME_NUMBERS, self._move),
            "DynamicQuantizeLinear": self._quantize,
            "ConvInteger": self._product,
            "MatMulInteger": self._product,
            "Cast": self._same,
            "Floor": self._same,
            "Round": self._same,
            "Reshape": self._reshape,
            "Mul": self._multiply,
            "Div": self._divide,
            "Add": self._add,
            "DequantizeLinear": self._dequantize,
            "com.microsoft.DynamicQuantizeMatMul": self._quantize_and_multiply,
            "com.microsoft.MatMulIntegerToFloat": self._multiply_to_float,
            "com.microsoft.DynamicQuantizeLSTM": self._lstm,
            "com.microsoft.QAttention": self._attention,
        }

    def _quantize(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> None:
        quantized, scale, zero_point = node.output
        self.known[quantized] = _Quantized(node.input[0], scale, zero_point)
        self.known[scale] = _Scale(scale, np.ones((), np.float32))

    def _clip(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        """Keep the range of the integers: quantizers omit a Relu that it replaces."""
        value, scale, zero = graph.operands(node, 3)
        bounds = _bounds(scope, scale, zero)
        if bounds is None:
            return None
        self.known[node.output[0]] = _Quantized(builder.clip(value, *bounds), scale, zero)
        builder.append(node)
        return node.output

    def _move(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        """A copy of ``node`` for the floats of quantized integers; the node itself is removed if it becomes
        unused.
        """
        data = node.input if node.op_type == "Concat" else node.input[:1]
        known = {name: its for name in data if isinstance(its := self.known.get(name), _Quantized)}
        if not known or len(known) < len(set(data)):
            return None
        first = known[data[0]]
        if not all(_has(scope, its, first.scale, first.zero_point) for its in known.values()):
            return None
        renamed = {name: its.real for name, its in known.items()}
        builder.copy([node], renamed, _SUFFIX)
        builder.append(node)
        for name in filter(None, node.output):
            self.known[name] = replace(first, real=renamed[name])
        return node.output

    def _reshape(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        self._same(node, scope, builder)
        return self._move(node, scope, builder)

    def _dequantize(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        value, scale, zero = graph.operands(node, 3)
        real = self._activation(value, scale, zero, scope)
        return None if real is None else [real]

    def _product(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        left, right, left_zero, right_zero = graph.operands(node, 4)
        # The zero point of a convolution is that of each output channel.
        spread = _per_channel(0) if node.op_type == "ConvInteger" else _per_column
        one, offset = np.ones((), np.float32), _floats(scope, right_zero, 0)
        weight = _real(_floats(scope, right), one, offset, spread)
        known = self.known.get(left)
        if not isinstance(known, _Quantized) and (path := _to_stored(scope, left)):
            # Rows of a table of stored integers with a stored scale.
            offset, table = _floats(scope, left_zero), _floats(scope, path[1])
            if table is not None and offset is not None and offset.size == 1:
                real = _moved(path, table - offset.reshape(()), builder)
                known = _Quantized(real, "", left_zero)
        if not isinstance(known, _Quantized) or left_zero != known.zero_point or weight is None:
            return None
        self.known[node.output[0]] = _Sum(node, known.real, known.scale, weight)
        builder.append(node)
        return node.output

    def _same(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> None:
        if node.op_type == "Cast" and graph.attribute(node, "to", 0) not in _NUMBERS:
            return
        if (known := self.known.get(node.input[0])) is None or isinstance(known, _Quantized):
            return
        if node.op_type == "Reshape":
            if not isinstance(known, _Bias):
                return
            # Only sizes of 1 are added; `_as_floats` does the same.
            known = replace(known, value=known.value.reshape(-1))
        self.known[node.output[0]] = known

    def _multiply(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        for one, other in (node.input, reversed(node.input)):
            scale, product = self._scale_of(one, scope), self.known.get(other)
            if scale is not None and isinstance(product, _Sum):
                return _as_floats(product, scale, builder)
            factor = self._scale_of(other, scope)
            if scale and factor and not (scale.scale and factor.scale):
                name = scale.scale or factor.scale
                self.known[node.output[0]] = _Scale(name, scale.factor * factor.factor)
        return None

    def _scale_of(self, name: str, scope: Scope) -> _Scale | None:
        """The known scale ``name``: a stored one belongs to stored integers."""
        known, stored = self.known.get(name), _floats(scope, name)
        if isinstance(known, _Scale):
            return known
        return None if stored is None else _Scale("", stored)

    def _divide(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> None:
        value, by = _floats(scope, node.input[0]), self.known.get(node.input[1])
        if value is not None and isinstance(by, _Scale):
            self.known[node.output[0]] = _Bias(value, by)

    def _add(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> None:
        for one, other in (node.input, reversed(node.input)):
            product, bias = self.known.get(one), self.known.get(other)
            if not isinstance(product, _Sum) or not isinstance(bias, _Bias):
                continue
            if product.bias is None and bias.by.scale == product.scale:
                its = replace(product, bias=bias.value, biased=bias.by.factor)
                self.known[node.output[0]] = its

    def _quantize_and_multiply(
        self, node: onnx.NodeProto, scope: Scope, builder: Builder
    ) -> Outputs:
        real, weight, scale, zero, bias = graph.operands(node, 5)
        floats = _of_names(scope, weight, scale, zero)
        return None if floats is None else _matrix_product(real, floats, bias, builder)

    def _multiply_to_float(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        left, weight, scale, its_scale, zero, its_zero, bias = graph.operands(node, 7)
        real = self._activation(left, scale, zero, scope)
        floats = _of_names(scope, weight, its_scale, its_zero)
        if real is None or floats is None:
            return None
        return _matrix_product(real, floats, bias, builder)

    def _attention(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        left, weight, bias, scale, its_scale, mask, zero, its_zero, past = graph.operands(node, 9)
        real = self._activation(left, scale, zero, scope)
        floats = _of_names(scope, weight, its_scale, its_zero)
        if real is None or floats is None:
            return None
        inputs = [real, builder.store(floats), bias, mask, past]
        return builder.add_like(node, "Attention", inputs, domain=graph.MICROSOFT)

    def _activation(self, name: str, scale: str, zero: str, scope: Scope) -> str | None:
        """The floats of the integers ``name``, if these are their scale and their zero point."""
        known = self.known.get(name)
        if isinstance(known, _Quantized) and _has(scope, known, scale, zero):
            return known.real
        return None

    def _lstm(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        names = graph.operands(node, 12)
        weights = []
        for name, scale, zero in ((names[1], *names[8:10]), (names[2], *names[10:12])):
            floats = _of_names(scope, name, scale, zero, _per_direction)
            if floats is None:
                return None
            # Directions x inputs x gates here, directions x gates x inputs in LSTM.
            weights.append(builder.store(floats.transpose(0, 2, 1)))
        return builder.add_like(node, "LSTM", [names[0], *weights, *names[3:8]])


def _has(scope: Scope, known: _Quantized, scale: str, zero: str) -> bool:
    """Whether integers have this scale and this zero point."""
    return _is_equal(scope, known.scale, scale) and _is_equal(scope, known.zero_point, zero)


def _is_equal(scope: Scope, one: str, other: str) -> bool:
    """Whether two values are the same one, or are stored with equal numbers; without a name it is 0."""
    if one == other:
        return True
    left, right = (scope.constant(name) if name else np.zeros(()) for name in (one, other))
    if left is None or right is None:
        return False
    fits = left.shape == right.shape or 1 in (left.size, right.size)
    return fits and bool(np.all(left == right))


def _bounds(scope: Scope, scale: str, zero: str) -> tuple[float, float] | None:
    """The range of the quantized values; None if it is not the same for all."""
    factor, offset = _floats(scope, scale), _floats(scope, zero)
    if factor is None or factor.size != 1:
        return None
    low, high, middle = 0.0, 255.0, 0.0
    if zero:
        dtype = scope.dtype(zero)
        if offset is None or offset.size != 1 or dtype is None or is_float(dtype):
            return None
        info = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
        low, high, middle = info.min, info.max, offset.item()
    return (low - middle) * factor.item(), (high - middle) * factor.item()


def _dequantized(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The result of a DequantizeLinear as stored floats, if its integers are stored, perhaps moved later."""
    value, scale, zero = graph.operands(node, 3)
    path = _to_stored(scope, value)
    # Before the moves, another axis has the scales.
    if path is None or (path[0] and math.prod(scope.shape(scale) or ()) > 1):
        return None
    axis, block = graph.attribute(node, "axis", 1), graph.attribute(node, "block_size", 0)
    spread = _per_block(axis, block) if block else _per_channel(axis)
    floats = _of_names(scope, path[1], scale, zero, spread)
    if floats is None:
        return None
    dtype = scope.dtype(scale)
    if number := graph.attribute(node, "output_dtype", 0):
        dtype = helper.tensor_dtype_to_np_dtype(number)
    return [_moved(path, floats.astype(dtype), builder)]


def _product_of_blocks(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A MatMulNBits, which stores each column of its weight in blocks, as a product of floats."""
    value, weight, scale, zero, groups, bias = graph.operands(node, 6)
    # ONNX Runtime itself is not consistent with groups of rows, an input that is deprecated.
    if groups or graph.attribute(node, "weight_prepacked", 0):
        return None
    rows, columns = graph.attribute(node, "K", 0), graph.attribute(node, "N", 0)
    integers, factor, offset = (
        _unpacked(node, scope, name, columns) for name in (weight, scale, zero)
    )
    spread = _per_block(1, graph.attribute(node, "block_size", 0))
    floats = _real(None if integers is None else integers[:, :rows], factor, offset, spread)
    if floats is None:
        return None
    return _matrix_product(value, floats.T.astype(scope.dtype(scale)), bias, builder)


def _rows_of_blocks(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A GatherBlockQuantized as a Gather of floats."""
    data, indices, scale, zero = graph.operands(node, 4)
    integers, factor, offset = (_unpacked(node, scope, name) for name in (data, scale, zero))
    if not zero and scope.dtype(data) != np.uint8:
        offset = np.zeros((), np.float32)
    axis, block = (
        graph.attribute(node, "quantize_axis", 1),
        graph.attribute(node, "block_size", 128),
    )
    floats = _real(integers, factor, offset, _per_block(axis, block))
    if floats is None:
        return None
    table = builder.store(floats.astype(scope.dtype(scale)))
    return [builder.add("Gather", table, indices, axis=graph.attribute(node, "gather_axis", 0))]


_WEIGHTS: Mapping[str, Rule] = {
    **dict.fromkeys(operators.DEQUANTIZES, _dequantized),
    "com.microsoft.GatherBlockQuantized": _rows_of_blocks,
    "com.microsoft.MatMulNBits": _product_of_blocks,
}
"""How stored weights that are only dequantized become floats."""


def _unpacked(
    node: onnx.NodeProto, scope: Scope, name: str, columns: int | None = None
) -> Floats | None:
    """The stored numbers ``name`` of ``node``, several in each byte; a missing zero point is in the middle.

    With ``columns`` it is a matrix of so many rows.
    """
    bits = graph.attribute(node, "bits", 4)
    array = scope.constant(name) if name else np.array(2.0 ** (bits - 1))
    if array is None or bits not in (2, 4, 8):
        return None
    if columns and name:
        array = array.reshape(columns, -1)
    if array.dtype == np.uint8:
        parts = array[..., np.newaxis] >> np.arange(0, 8, bits, dtype=np.uint8) & (2**bits - 1)
        array = parts.reshape(*array.shape[:-1], -1)
    return np.asarray(array, np.float32)


_Path = tuple[list[onnx.NodeProto], str]
"""The nodes that move a stored tensor, the first one first, and its name."""


def _to_stored(scope: Scope, name: str) -> _Path | None:
    """The nodes that move a stored tensor into the value ``name``."""
    origin, moves = scope.trace(name, operators.MOVES - {"Split"})
    return None if scope.stored.get(origin) is None else (moves[::-1], origin)


def _moved(path: _Path, values: Floats, builder: Builder) -> str:
    """``values``, which replace the stored tensor of ``path``, after the moves."""
    moves, name = path
    renamed = {name: builder.store(values)}
    builder.copy(moves, renamed, _SUFFIX)
    return renamed[moves[-1].output[0] if moves else name]


_SUFFIX = "_dequantized"


def _floats(scope: Scope, name: str, default: float | None = None) -> Floats | None:
    """The stored tensor ``name`` as floats, None if it is not stored, or is of strings.

    Without a name it is ``default``.
    """
    if not name:
        return None if default is None else np.full((), default, np.float32)
    array = scope.constant(name)
    return None if array is None or array.dtype == STRING else np.asarray(array, np.float32)


_Spread = Callable[[Floats, tuple[int, ...]], Floats]
"""Gives scales and zero points the dimensions of integers of this shape, or such that broadcast to it."""


def _per_column(values: Floats, shape: tuple[int, ...]) -> Floats:
    """``values`` of one matrix, of each column, or of each column of each matrix."""
    return values if values.size == 1 or values.ndim > 1 else values[..., np.newaxis, :]


def _per_direction(values: Floats, shape: tuple[int, ...]) -> Floats:
    """``values`` (directions, or directions x gates) for a weight of directions x inputs x gates."""
    return values.reshape(len(values), 1, -1) if values.ndim else values


def _per_channel(axis: int) -> _Spread:
    """Values of all channels, or of each one along ``axis``."""

    def spread(values: Floats, shape: tuple[int, ...]) -> Floats:
        if values.size == 1:
            # The axis may be any.
            return values.reshape(())
        sizes = [1] * len(shape)
        sizes[axis] = -1
        return values.reshape(sizes)

    return spread


def _per_block(axis: int, size: int) -> _Spread:
    """Values of all blocks of ``size`` along ``axis``; 0 for a single one."""

    def spread(values: Floats, shape: tuple[int, ...]) -> Floats:
        if values.size == 1:
            return values.reshape(())
        return values.take(np.arange(shape[axis]) // (size or shape[axis]), axis)

    return spread


def _real(
    integers: Floats | None,
    factor: Floats | None,
    offset: Floats | None,
    spread: _Spread,
) -> Floats | None:
    """The floats of stored ``integers``, with a scale and a zero point; None if one of them is not stored."""
    if integers is None or factor is None or offset is None:
        return None
    return (integers - spread(offset, integers.shape)) * spread(factor, integers.shape)


def _of_names(
    scope: Scope, integers: str, scale: str, zero: str, spread: _Spread = _per_column
) -> Floats | None:
    """`_real` of stored tensors; without a name the zero point is 0."""
    return _real(_floats(scope, integers), _floats(scope, scale), _floats(scope, zero, 0), spread)


def _as_floats(product: _Sum, scale: _Scale, builder: Builder) -> list[str] | None:
    """The float operator for ``product`` times ``scale``."""
    if scale.scale != product.scale:
        return None
    factor, weight = scale.factor, product.weight
    is_convolution = product.node.op_type == "ConvInteger"
    if is_convolution:
        factor = _per_channel(0)(factor, weight.shape)
    floats, bias = weight * factor, ""
    if product.bias is not None and product.biased is not None:
        # It was divided by one factor, and is multiplied by another.
        values = product.bias * (scale.factor.reshape(-1) / product.biased.reshape(-1))
        bias = builder.store(np.broadcast_to(values, len(weight)) if is_convolution else values)
    if is_convolution:
        return builder.add_like(product.node, "Conv", [product.real, builder.store(floats), bias])
    return _matrix_product(product.real, floats, bias, builder)


def _matrix_product(real: str, weight: Floats, bias: str, builder: Builder) -> list[str]:
    product = builder.add("MatMul", real, builder.store(weight))
    return [builder.add("Add", product, bias) if bias else product]
