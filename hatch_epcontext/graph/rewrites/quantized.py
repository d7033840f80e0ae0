"""Operators of quantized values as arithmetic with integers, or as those of their floats."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.number_format import FUSING
from hatch_epcontext.graph.rewriting import corrects, rewrites
from hatch_epcontext.graph.scope import Scope

_SMALL = frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16})

_EXTREMES_OF_INTEGERS = 12

_QUANTIZING = ("DequantizeLinear", "QuantizeLinear")

_OF_ONE = ("AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid", "Softmax")
"""Operators of ONNX Runtime with one quantized input."""

_MOVING = operators.LAYOUT | {"MaxPool"}
"""Operators with the same result for integers, which EPs support for floats."""

_RESULTS: Mapping[str, int] = {
    **dict.fromkeys(operators.QUANTIZES, 1),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul"), 6),
    **dict.fromkeys((f"{graph.MICROSOFT}.QLinear{name}" for name in ("Add", "Mul")), 6),
    **dict.fromkeys((f"{graph.MICROSOFT}.QLinear{name}" for name in _OF_ONE), 3),
    f"{graph.MICROSOFT}.QGemm": 7,
}
"""Operators that make integers, with the number of the input that is their scale."""


@rewrites("com.microsoft.MatMulNBits")
def batch_matmul_nbits(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A product with quantized weights as that of a batch of one matrix, and a sum with the bias."""
    value, *operands, bias = graph.operands(node, 6)
    shape, columns = scope.fixed_shape(value), graph.number(node, "N", 0)
    is_batch = len(shape) == 3
    if is_batch and not bias:
        return None
    if not is_batch:
        value = builder.reshape(value, [1, -1, shape[-1]])
    (result,) = builder.add_like(node, node.op_type, [value, *operands], node.domain)
    if bias:
        result = builder.add("Add", result, bias)
    return [result if is_batch else builder.reshape(result, [*shape[:-1], columns])]


@rewrites(
    "DequantizeLinear", "QuantizeLinear", *(f"{graph.MICROSOFT}.{name}" for name in _QUANTIZING)
)
def decompose_quantization(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Integers less the zero, times the scale, or the other way round, of any axis and any blocks."""
    value, scale, zero = graph.operands(node, 3)
    if scope.constant(scale) is not None and _is_between(node, scope):
        return None
    shape, scales = scope.fixed_shape(value), scope.fixed_shape(scale)
    type_, floats = scope.known_type(node.output[0]), scope.known_type(scale)
    axis = graph.number(node, "axis", 1)
    axis = axis % len(shape) if shape else 0

    def spread(name: str) -> str:
        """The scale or the zero of each value."""
        if math.prod(scales) == 1 or not scales:
            return builder.reshape(name, []) if scales else name
        if len(scales) == 1:
            return builder.reshape(name, [-1, *[1] * (len(shape) - axis - 1)])
        block = -(-shape[axis] // scales[axis])
        return builder.add(
            "Gather", name, builder.store(np.arange(shape[axis]) // block), axis=axis
        )

    offset = spread(builder.add("Cast", zero, to=TensorProto.INT32)) if zero else ""
    if node.op_type == "DequantizeLinear":
        number = builder.add("Cast", value, to=TensorProto.INT32)
        number = builder.add("Sub", number, offset) if offset else number
        number = builder.add("Cast", number, to=floats)
        result = builder.add("Mul", number, spread(scale))
        return [result if type_ == floats else builder.add("Cast", result, to=type_)]
    if type_ not in _SMALL:
        return Declined("it makes no integers of 8 or 16 bits")
    info = np.iinfo(helper.tensor_dtype_to_np_dtype(type_))
    divided = builder.add("Div", value, spread(scale))
    number = builder.add("Cast", builder.add("Round", divided), to=TensorProto.INT32)
    number = builder.add("Add", number, offset) if offset else number
    for operator, compare, limit in (("Max", "Less", info.min), ("Min", "Greater", info.max)):
        bound = builder.store(np.int32(limit))
        # Max and Min of older opsets have no integers.
        if builder.opset >= _EXTREMES_OF_INTEGERS:
            number = builder.add(operator, number, bound)
        else:
            number = builder.add("Where", builder.add(compare, number, bound), bound, number)
    return [builder.add("Cast", number, to=type_)]


@rewrites("com.microsoft.QLinearConcat")
def decompose_quantized_concat(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Concat of quantized values as that of their floats."""
    scale, zero, *parts = node.input
    floats = [
        builder.add("DequantizeLinear", *parts[at : at + 3]) for at in range(0, len(parts), 3)
    ]
    value = builder.add("Concat", *floats, axis=graph.number(node, "axis", 0))
    return [builder.add("QuantizeLinear", value, scale, zero)]


def _is_between(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether EPs may fuse ``node`` with operators that it is between: its integers are in the graph only."""
    if node.op_type == "DequantizeLinear":
        maker = scope.maker(node.input[0])
        return maker is not None or scope.stored.get(node.input[0]) is not None
    return any(
        reader.op_type in ("DequantizeLinear", *operators.LAYOUT, "MaxPool")
        or "QLinear" in reader.op_type
        for reader in scope.nodes_reading(node.output[0])
    )


@rewrites(*_MOVING)
def move_between_floats(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """An operator that moves quantized integers, or selects some, as one that moves their floats."""
    if scope.elem_type(node.input[0]) not in _SMALL or len(node.output) > 1:
        return None
    maker = scope.maker(scope.origin(node.input[0], _MOVING), *_RESULTS)
    if maker is None:
        return None
    begin = _RESULTS[graph.operator(maker)]
    scale = [name for name in maker.input[begin : begin + 2] if name]
    axis = [attribute for attribute in maker.attribute if attribute.name == "axis"]
    if scope.shape(scale[0]) not in ((), (1,)) or (axis and maker.op_type not in _QUANTIZING):
        return Declined("its integers have several scales")
    # ONNX's own operators do not take 16 bits in all opsets.
    domain = maker.domain if maker.op_type in _QUANTIZING else ""
    value = builder.add("DequantizeLinear", node.input[0], *scale, domain=domain)
    (moved,) = builder.add_like(node, node.op_type, [value, *node.input[1:]])
    return [builder.add("QuantizeLinear", moved, *scale, domain=domain)]


@rewrites("com.microsoft.GatherBlockQuantized")
def gather_blocks(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Rows of a quantized table, of which each block has a scale: their integers, less the zero, times it."""
    data, indices, scales, zeros = graph.operands(node, 4)
    shape, rows, result = map(scope.fixed_shape, (data, scales, node.output[0]))
    if len(shape) != 2:
        return Declined("its table has other than 2 dimensions")
    bits, is_of_bytes = graph.number(node, "bits", 4), scope.elem_type(data) == TensorProto.UINT8
    axes = graph.number(node, "gather_axis", 0), graph.number(node, "quantize_axis", 1) % 2
    if not is_of_bytes or bits not in (4, 8) or axes != (0, 1):
        return Declined("it gathers no rows of bytes")

    def unpacked(packed: str, count: int) -> str:
        """The ``count`` integers (int32) of each gathered row of bytes."""
        number = builder.add(
            "Cast", builder.add("Gather", packed, indices, axis=0), to=TensorProto.INT32
        )
        if bits == 8:
            return number
        high = builder.add("Div", number, builder.store(np.int32(16)))
        low = builder.add("Sub", number, builder.add("Mul", high, builder.store(np.int32(16))))
        both = builder.stack([low, high], len(result))
        size = 2 * (scope.shape(packed) or (0, 0))[1]
        number = builder.reshape(both, [*result[:-1], size])
        if size == count:
            return number
        return builder.split(number, len(result) - 1, [count, size - count])[0]

    blocks, count = rows[1], result[-1]
    value = builder.reshape(unpacked(data, count), [*result[:-1], blocks, count // blocks])
    if zeros:
        zero = builder.reshape(unpacked(zeros, blocks), [*result[:-1], blocks, 1])
    else:
        zero = builder.store(np.int32(2 ** (bits - 1)))
    value = builder.add("Cast", builder.add("Sub", value, zero), to=scope.elem_type(scales))
    scale = builder.add("Gather", scales, indices, axis=0)
    scale = builder.reshape(scale, [*result[:-1], blocks, 1])
    return [builder.reshape(builder.add("Mul", value, scale), result)]


@rewrites("Cast")
def cast_as_dequantize(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A cast of small integers to float32 as their dequantization with the scale 1.

    Some EPs support small integers only as quantized values.
    """
    (value,) = node.input
    is_small = scope.elem_type(value) in _SMALL
    if not is_small or graph.attribute(node, "to", 0) != TensorProto.FLOAT:
        return None
    if scope.maker(value, "Cast") is not None:
        # Two Casts are one.
        return None
    scale, zero = builder.store(np.float32(1)), builder.store(np.array(0, scope.dtype(value)))
    # ONNX's own operator does not exist, or not for 16 bits, in all opsets.
    return [builder.add("DequantizeLinear", value, scale, zero, domain=graph.MICROSOFT)]


_OTHER_SIGN = {
    np.dtype(one): np.dtype(other)
    for one, other in (("u1", "i1"), ("i1", "u1"), ("u2", "i2"), ("i2", "u2"))
}

_FUSED = ("Clip", "Relu")
"""What EPs fuse with a quantization behind it."""


def _has_other_sign(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether a quantized layer has a result of another sign than its input."""
    layer = scope.maker(scope.origin(node.input[0], _FUSED), *FUSING)
    maker = None if layer is None else scope.maker(layer.input[0], *operators.DEQUANTIZES)
    if maker is None or scope.stored.get(maker.input[0]) is not None:
        return False
    dtype = scope.dtype(node.output[0])
    return dtype is not None and _OTHER_SIGN.get(dtype) == scope.dtype(maker.input[0])


@corrects(
    "quantized-signs",
    *sorted(operators.QUANTIZES),
    beside=["DequantizeLinear"],
    applies=_has_other_sign,
)
def _quantize_as_input(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The quantization of floats that have been quantized before, with the sign of the layer's input: its
    integers are the same, less half of their number.
    """
    value, scale, zero = graph.operands(node, 3)
    dtype = scope.known_dtype(node.output[0])
    zeros = scope.stored_values(zero) if zero else np.zeros(scope.fixed_shape(scale), dtype)
    other = _OTHER_SIGN[dtype]
    moved = zeros.astype(np.int64) - np.iinfo(dtype).min + np.iinfo(other).min
    operands = [scale, builder.store(moved.astype(other))]
    kept = {entry.name: entry.i for entry in node.attribute if entry.name == "axis"}
    for operator in ("QuantizeLinear", "DequantizeLinear"):
        value = builder.add(operator, value, *operands, domain=node.domain, **kept)
    return builder.add_like(node, node.op_type, [value, *node.input[1:]], node.domain)
