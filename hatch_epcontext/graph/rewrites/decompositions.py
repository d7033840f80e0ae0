"""Operators that few EPs have, or have in all versions, as simpler ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.builder import MAX_VALUES, Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope

_SMALL = frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16})

_EXTREMES_OF_INTEGERS = 12

_SLICES_WITH_INPUTS = 10
"""The opset from which a Slice has its limits as inputs."""

_FAR = 2**31 - 1
"""An end of a Slice that is that of any axis."""

_QUANTIZING = ("DequantizeLinear", "QuantizeLinear")

_MOVING = operators.LAYOUT | {"MaxPool"}
"""Operators with the same result for integers, which EPs support for floats."""

_RESULTS: Mapping[str, int] = {"QuantizeLinear": 1, "QLinearConv": 6, "QLinearMatMul": 6}
"""Operators that make integers, with the number of the input that is their scale."""

_ERF = (4.51351884, 6.57699078, -0.188808943, -10.2517888, 23.5176118, -25.1057926, 10.6676264)
"""The polynomial p for which tanh(x p(x²)) is erf(4x) up to 1, where that is 1 in float32."""

_JOINS: Mapping[str, tuple[str, str, float | None]] = {
    "add": ("ReduceSum", "Add", 0),
    "max": ("ReduceMax", "Max", None),
    "min": ("ReduceMin", "Min", None),
    "mul": ("ReduceProd", "Mul", 1),
}
"""How values are joined along an axis, and two of them, and what changes none; None for the largest."""

_LEAST = {"max": -np.inf, "min": np.inf}

_CONV_ATTRIBUTES = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")

_NORMALIZATIONS: Mapping[str, Sequence[str]] = {
    "RMSNormalization": ("value", "scale"),
    # ONNX Runtime registers this operator in ONNX's domain.
    "SimplifiedLayerNormalization": ("value", "scale"),
    "com.microsoft.SkipSimplifiedLayerNormalization": ("value", "skip", "scale", "added"),
}
"""The inputs of each of these operators."""

_FUNCTIONS: Mapping[str, str] = {
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"), ""),
    "ReduceL1": "Abs",
    "ReduceL2": "Abs",
    "ReduceLogSum": "Log",
    "ReduceLogSumExp": "",
    "ReduceSumSquare": "Mul",
}
"""What each does with single values."""

_REDUCTIONS: Mapping[str, tuple[str, str]] = {
    "ReduceL1": ("Abs", ""),
    "ReduceL2": ("Mul", "Sqrt"),
    "ReduceLogSum": ("", "Log"),
    "ReduceSumSquare": ("Mul", ""),
}
"""What each does with the values before their sum, and with the sum."""


@rewrites("com.microsoft.FusedConv")
def decompose_fused_conv(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Conv, a sum and an activation."""
    value, weights, bias, added = graph.operands(node, 4)
    attributes = {name: graph.attribute(node, name, None) for name in _CONV_ATTRIBUTES}
    result = builder.add("Conv", value, weights, bias, **attributes)
    if added:
        result = builder.add("Add", result, added)
    activation = graph.text(node, "activation")
    parameters = list(graph.attribute(node, "activation_params", []))
    if not activation:
        return [result]
    if activation in ("Relu", "Sigmoid", "Tanh"):
        return [builder.add(activation, result)]
    if activation == "LeakyRelu":
        return [builder.add(activation, result, alpha=parameters[0] if parameters else None)]
    if activation == "HardSigmoid":
        alpha, beta = (*parameters, None, None)[:2]
        return [builder.add(activation, result, alpha=alpha, beta=beta)]
    if activation == "Clip" and len(parameters) == 2:
        return [builder.clip(result, *parameters)]
    return Declined(f"its activation {activation!r} is not known")


@rewrites(*_NORMALIZATIONS)
def decompose_normalization(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A value, after the sum with others, divided by the root of the mean of its squares."""
    names = _NORMALIZATIONS[graph.operator(node)]
    operands = dict(zip(names, graph.operands(node, len(names)), strict=True))
    value = operands["value"]
    if (sizes := scope.sizes(value)) is None:
        return Declined(f"the rank of {value!r} is not known")
    for name in filter(None, map(operands.get, ("skip", "added"))):
        value = builder.add("Add", value, name)
    rank = len(sizes)
    axes = range(graph.number(node, "axis", -1) % rank, rank)
    square = builder.add("Mul", value, value)
    mean = builder.reduced("ReduceMean", square, axes, keepdims=1)
    epsilon = builder.number(graph.attribute(node, "epsilon", 1e-5))
    root = builder.add("Sqrt", builder.add("Add", mean, epsilon))
    result = builder.add("Mul", builder.add("Div", value, root), operands["scale"])
    inverse = builder.add("Reciprocal", root) if any(node.output[1:3]) else ""
    return [result, "", inverse, value] if "skip" in operands else [result, inverse]


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
    begin = _RESULTS[maker.op_type]
    scale = [name for name in maker.input[begin : begin + 2] if name]
    axis = [attribute for attribute in maker.attribute if attribute.name == "axis"]
    if scope.shape(scale[0]) not in ((), (1,)) or (axis and maker.op_type not in _QUANTIZING):
        return Declined("its integers have several scales")
    value = builder.add("DequantizeLinear", node.input[0], *scale)
    (moved,) = builder.add_like(node, node.op_type, [value, *node.input[1:]])
    return [builder.add("QuantizeLinear", moved, *scale)]


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


@rewrites("Affine", "Crop", "ImageScaler")
def decompose_picture(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The operators of pictures that ONNX had before opset 10, and ONNX Runtime still has."""
    (value,) = node.input
    if node.op_type == "Crop":
        left, top, right, bottom = graph.attribute(node, "border", [0, 0, 0, 0])
        starts = [top, left]
        ends = [-bottom or _FAR, -right or _FAR]
        if sizes := graph.attribute(node, "scale", []):
            ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        if builder.opset < _SLICES_WITH_INPUTS:
            return [builder.add("Slice", value, axes=[2, 3], starts=starts, ends=ends)]
        return [builder.add("Slice", value, *map(builder.integers, (starts, ends, [2, 3])))]
    is_affine = node.op_type == "Affine"
    factor = graph.attribute(node, "alpha" if is_affine else "scale", 1.0)
    added = graph.attribute(node, "beta", 0.0) if is_affine else graph.attribute(node, "bias", [])
    product = builder.add("Mul", value, builder.number(factor))
    offset = np.asarray(added, builder.dtype)
    offset = offset if is_affine else offset.reshape(-1, 1, 1)
    return [builder.add("Add", product, builder.store(offset))]


@rewrites(*_FUNCTIONS)
def reduce_nothing(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A reduction along no axis, as the values, or a function of each."""
    value, axes = graph.operands(node, 2)
    if not graph.number(node, "noop_with_empty_axes", 0):
        return None
    if axes and scope.shape(axes) != (0,):
        return None
    function = _FUNCTIONS[node.op_type]
    if not function:
        return [value]
    return [builder.add(function, *[value] * (2 if function == "Mul" else 1))]


@rewrites(*_REDUCTIONS)
def decompose_reduction(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A function of a sum of a function of the values, as in the preprocessors of speech models."""
    before, after = _REDUCTIONS[node.op_type]
    value, axes = node.input[0], scope.fixed_axes(node)
    if builder.dtype.kind != "f":
        return Declined(f"it reduces {builder.dtype}")
    if before:
        value = builder.add(before, *[value] * (2 if before == "Mul" else 1))
    total = builder.reduced("ReduceSum", value, axes, graph.number(node, "keepdims", 1))
    return [builder.add(after, total) if after else total]


@rewrites("Clip")
def clip_as_max_min(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Clip with computed bounds, such as that of a mel spectrogram by its largest value."""
    value, low, high = graph.operands(node, 3)
    if len(node.input) < 2:
        return Declined("its bounds are attributes")
    if builder.dtype.kind != "f":
        return Declined(f"it clips {builder.dtype}")
    for operator, bound, limit in (("Max", low, -np.inf), ("Min", high, np.inf)):
        if bound and scope.constant(bound) != limit:
            value = builder.add(operator, value, bound)
    return [value]


@rewrites("Erf")
def erf_as_tanh(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """An Erf as the Tanh of a polynomial, whose factors float16 can represent.

    EPs without it fuse that of a Gelu in float32, but not that of a quantized transformer.
    """
    value = builder.add("Mul", node.input[0], builder.number(0.25))
    value = builder.clip(value, -1.0, 1.0)
    square = builder.add("Mul", value, value)
    *coefficients, factor = map(builder.number, _ERF)
    for coefficient in reversed(coefficients):
        factor = builder.add("Add", builder.add("Mul", square, factor), coefficient)
    return [builder.add("Tanh", builder.add("Mul", value, factor))]


@rewrites("Cast")
def cast_as_dequantize(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A cast of small integers to float32 as their dequantization with the scale 1.

    Some EPs support small integers only as quantized values.
    """
    (value,) = node.input
    is_small = scope.elem_type(value) in _SMALL
    if not is_small or graph.attribute(node, "to", 0) != TensorProto.FLOAT:
        return None
    scale, zero = builder.store(np.float32(1)), builder.store(np.array(0, scope.dtype(value)))
    # ONNX's own operator does not exist, or not for 16 bits, in all opsets.
    return [builder.add("DequantizeLinear", value, scale, zero, domain=graph.MICROSOFT)]


@rewrites("Slice")
def slice_as_gather(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Slice with a computed start and a known length, along one axis."""
    value, start, _, axes_name, strides = graph.operands(node, 5)
    if not start or scope.constant(start) is not None:
        return None
    starts, dtype = scope.shape(start), scope.known_dtype(start)
    stride = scope.stored_values(strides) if strides else np.array([1])
    axes = scope.stored_values(axes_name) if axes_name else np.arange(starts[0] if starts else 1)
    if axes.size != 1:
        return Declined(f"its start has {axes.size} axes")
    shape, result = scope.fixed_shape(value), scope.fixed_shape(node.output[0])
    axis = int(axes[0]) % len(shape)
    offsets = np.arange(result[axis], dtype=dtype) * stride.astype(dtype)
    # Starts may be negative: a slice beyond the end would be shorter.
    indices = builder.add("Add", start, builder.store(offsets))
    return [builder.add("Gather", value, indices, axis=axis)]


@rewrites("ScatterND")
def scatter_as_elements(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Parts of ``data`` at several indices as rows, and those at the number of each one."""
    data, indices, updates = node.input
    shape, index_shape = scope.fixed_shape(data), scope.fixed_shape(indices)
    rows = [math.prod(index_shape[:-1]), math.prod(shape[index_shape[-1] :])]
    index = builder.reshape(_flat_indices(indices, shape, scope, builder), [-1, 1])
    result = builder.add(
        "ScatterElements",
        builder.reshape(data, [-1, rows[1]]),
        builder.add("Expand", index, builder.integers(rows)),
        builder.reshape(updates, rows),
        axis=0,
        reduction=graph.text(node, "reduction") or None,
    )
    return [builder.reshape(result, shape)]


@rewrites("GatherND")
def gather_nd_as_gather(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Parts of ``data`` at several indices as rows at the number of each one."""
    data, indices = node.input
    shape, index_shape = scope.fixed_shape(data), scope.fixed_shape(indices)
    count = graph.number(node, "batch_dims", 0)
    rows = math.prod(shape[count + index_shape[-1] :])
    index = _flat_indices(indices, shape[count:], scope, builder)
    if count:
        size, dtype = math.prod(shape[count : count + index_shape[-1]]), scope.dtype(indices)
        firsts = np.arange(math.prod(shape[:count]), dtype=dtype).reshape(*shape[:count]) * size
        firsts = firsts.reshape(*shape[:count], *[1] * (len(index_shape) - count - 1))
        index = builder.add("Add", index, builder.store(firsts))
    flat = builder.reshape(data, [-1, rows])
    result = builder.add("Gather", flat, builder.reshape(index, [-1]), axis=0)
    return [builder.reshape(result, scope.fixed_shape(node.output[0]))]


def _flat_indices(name: str, shape: Sequence[int], scope: Scope, builder: Builder) -> str:
    """The number, among all parts of a ``shape``, of those that ``name`` has as indices of several axes."""
    dtype, depth = scope.known_dtype(name), scope.fixed_shape(name)[-1]
    sizes = np.array(shape[:depth], dtype)
    index = builder.from_start(name, sizes)
    factors = np.append(np.cumprod(sizes[:0:-1])[::-1], 1).astype(dtype)
    parts = builder.add("Mul", index, builder.store(factors)) if depth > 1 else index
    return builder.reduced("ReduceSum", parts, [len(scope.fixed_shape(name)) - 1], keepdims=0)


@rewrites("ScatterElements")
def scatter_as_matmul(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Values that are joined with those of ``data``, such as the rows of graph networks."""
    data, indices, updates = node.input
    if (expand := scope.maker(indices, "Expand")) is not None:
        indices = expand.input[0]
    kind = graph.text(node, "reduction") or "none"
    if kind not in _JOINS:
        return Declined(f"its reduction is {kind}")
    reduction, operator, neutral = _JOINS[kind]
    shape, rows, own = map(scope.fixed_shape, (data, updates, indices))
    dtype, axis = scope.known_dtype(indices), graph.number(node, "axis", 0) % len(shape)
    order = [axis, *(other for other in range(len(shape)) if other != axis)]
    if any(shape[other] != rows[other] for other in order[1:]):
        return Declined("it scatters into a part of the other axes")
    height, count, size = shape[axis], rows[axis], math.prod(rows) // max(rows[axis], 1)
    # All values of a row have one index.
    column = (count, *[1] * (len(rows) - 1))
    is_of_rows = not axis and (*[1] * (len(rows) - len(own)), *own) == column
    is_product = is_of_rows and kind == "add" and builder.dtype.kind == "f"
    mask = height * count * (1 if is_product else size)
    if not size or not 0 < mask <= MAX_VALUES:
        return Declined(f"its mask has {mask:,} values")

    def moved(name: str, sizes: Sequence[int]) -> str:
        """``name`` with the axis first."""
        return builder.reshape(builder.transpose(name, order), sizes)

    wide = [1, count, 1 if is_of_rows else size]
    index = moved(indices if is_of_rows else node.input[1], wide)
    numbers = np.arange(height, dtype=dtype).reshape(-1, 1, 1)
    # Indices may count from the end.
    sides = (numbers, numbers - height)
    hit = builder.add("Or", *(builder.add("Equal", index, builder.store(side)) for side in sides))
    start = moved(data, [height, 1, size])
    if is_product:
        ones = builder.add(
            "Cast", builder.reshape(hit, [height, count]), to=scope.elem_type(updates)
        )
        result = builder.add("MatMul", ones, builder.reshape(updates, [count, size]))
    else:
        other = start if neutral is None else builder.number(neutral)
        joined = builder.add("Where", hit, moved(updates, [1, count, size]), other)
        result = builder.reduced(reduction, joined, [1], keepdims=0)
    stored = scope.constant(data)
    if stored is None or not (stored == (_LEAST[kind] if neutral is None else neutral)).all():
        result = builder.add(operator, builder.reshape(start, [height, size]), result)
    result = builder.reshape(result, [shape[other] for other in order])
    return [builder.transpose(result, np.argsort(order).tolist())]
