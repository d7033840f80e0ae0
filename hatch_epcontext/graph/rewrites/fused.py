"""ONNX Runtime's own fused operators, and functions of ONNX, taken apart into basic operators of ONNX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx.inliner
from onnx import TensorProto, helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs, Rewrite, by_node
from hatch_epcontext.graph.scope import Scope, Types

_SOFTMAX_OVER_ONE_AXIS = 13
"""The opset from which LogSoftmax is over one axis, instead of all from that axis on."""


def _activated(builder: Builder, value: str, name: str, numbers: list[float]) -> str | None:
    """``value`` after the activation ``name`` with the parameters ``numbers``; None for an unknown one."""
    if name in ("Relu", "Sigmoid", "Tanh"):
        return builder.add(name, value)
    if name == "LeakyRelu":
        return builder.add(name, value, alpha=numbers[0] if numbers else None)
    if name == "HardSigmoid":
        alpha, beta = (*numbers, None, None)[:2]
        return builder.add(name, value, alpha=alpha, beta=beta)
    if name == "Clip" and len(numbers) == 2:
        return builder.clip(value, numbers[0], numbers[1])
    return None


def _conv(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    value, weights, bias, added = graph.operands(node, 4)
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    attributes = {name: graph.attribute(node, name, None) for name in names}
    result = builder.add("Conv", value, weights, bias, **attributes)
    if added:
        result = builder.add("Add", result, added)
    return _with_activation(node, builder, result, graph.attribute(node, "activation_params", []))


def _with_activation(
    node: onnx.NodeProto, builder: Builder, value: str, numbers: list[float]
) -> list[str] | None:
    if not (name := graph.text(node, "activation")):
        return [value]
    activated = _activated(builder, value, name, list(numbers))
    return None if activated is None else [activated]


def _gemm(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    names = ("alpha", "beta", "transA", "transB")
    attributes = {name: graph.attribute(node, name, None) for name in names}
    result = builder.add("Gemm", *node.input, **attributes)
    numbers = [graph.attribute(node, f"activation_{name}", None) for name in ("alpha", "beta")]
    return _with_activation(node, builder, result, [each for each in numbers if each is not None])


def _matmul(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    operands = []
    for name, letter in zip(node.input, "AB", strict=True):
        sizes = scope.sizes(name)
        batch = graph.number(node, f"transBatch{letter}", 0)
        transposed = graph.number(node, f"trans{letter}", 0)
        if sizes is None or (len(sizes) < 2 and (batch or transposed)):
            return None
        order = list(range(len(sizes)))
        if batch:
            # The first dimension moves before the last.
            order = [*order[1:-1], order[0], order[-1]]
        if transposed:
            order[-2:] = reversed(order[-2:])
        operands.append(name if order == sorted(order) else builder.transpose(name, order))
    return [builder.scaled(builder.add("MatMul", *operands), graph.attribute(node, "alpha", 1.0))]


def _gelu(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    if graph.text(node, "approximate") == "tanh":
        return _fast_gelu(node, scope, builder)
    value = _biased(node, builder)
    half = builder.scaled(value, 0.5)
    error = builder.add("Erf", builder.scaled(value, np.sqrt(0.5)))
    return [builder.add("Mul", half, builder.add("Add", error, builder.number(1)))]


def _fast_gelu(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    value = _biased(node, builder)
    factor = builder.scaled(builder.add("Mul", value, value), np.sqrt(2 / np.pi) * 0.044715)
    factor = builder.add("Add", factor, builder.number(np.sqrt(2 / np.pi)))
    curved = builder.add("Tanh", builder.add("Mul", value, factor))
    half = builder.scaled(value, 0.5)
    return [builder.add("Mul", half, builder.add("Add", curved, builder.number(1)))]


def _quick_gelu(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    value = node.input[0]
    scaled = builder.scaled(value, graph.attribute(node, "alpha", 1.702))
    return [builder.add("Mul", value, builder.add("Sigmoid", scaled))]


def _biased(node: onnx.NodeProto, builder: Builder) -> str:
    value, bias = graph.operands(node, 2)
    return builder.add("Add", value, bias) if bias else value


_NORMALIZING: Mapping[str, Sequence[str]] = {
    "LayerNormalization": ("value", "scale", "bias"),
    "RMSNormalization": ("value", "scale"),
    # ONNX Runtime registers this operator in ONNX's domain.
    "SimplifiedLayerNormalization": ("value", "scale"),
    "com.microsoft.SkipLayerNormalization": ("value", "skip", "scale", "bias", "added"),
    "com.microsoft.SkipSimplifiedLayerNormalization": ("value", "skip", "scale", "added"),
}
"""The inputs of each of these operators. Those without a bias do not subtract the mean."""


def _normalized(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    operands = _NORMALIZING[graph.operator(node)]
    given = dict(zip(operands, graph.operands(node, len(operands)), strict=True))
    if (sizes := scope.sizes(node.input[0])) is None:
        return None
    total, rank = given["value"], len(sizes)
    for name in filter(None, map(given.get, ("skip", "added"))):
        total = builder.add("Add", total, name)
    axes = range(graph.number(node, "axis", -1) % rank, rank)
    epsilon = graph.attribute(node, "epsilon", 1e-5)
    result, mean, deviation = _normalize(
        builder, total, axes, epsilon, given["scale"], given.get("bias")
    )
    inverse = builder.add("Reciprocal", deviation) if any(node.output[1:]) else ""
    if "skip" in given:
        return [result, mean, inverse, total]
    return [result, mean, inverse] if "bias" in given else [result, inverse]


def _normalize(
    builder: Builder,
    value: str,
    axes: Sequence[int],
    epsilon: float,
    scale: str,
    bias: str | None,
) -> tuple[str, str, str]:
    """``value`` normalized over ``axes``, its mean and its deviation; with None as bias the mean is not
    subtracted, and empty.
    """
    mean = ""
    if bias is not None:
        mean = builder.reduced("ReduceMean", value, axes, keepdims=1)
        value = builder.add("Sub", value, mean)
    square = builder.add("Mul", value, value)
    variance = builder.reduced("ReduceMean", square, axes, keepdims=1)
    deviation = builder.add("Sqrt", builder.add("Add", variance, builder.number(epsilon)))
    result = builder.add("Mul", builder.add("Div", value, deviation), scale)
    return builder.add("Add", result, bias) if bias else result, mean, deviation


def _embedded(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The normalized sum of rows of tables: for words, places and segments."""
    names = graph.operands(node, 9)
    words, segments, *tables, scale, bias, mask, places = names
    shape = scope.shape(words)
    if shape is None:
        return None
    if not places:
        places = builder.store(np.arange(shape[1], dtype=np.int32).reshape(1, -1))
    total = builder.add("Gather", tables[0], words, axis=0)
    for table, indices in zip(tables[1:], (places, segments), strict=True):
        if table and indices:
            total = builder.add("Add", total, builder.add("Gather", table, indices, axis=0))
    epsilon = graph.attribute(node, "epsilon", 1e-12)
    value, _, _ = _normalize(builder, total, [2], epsilon, scale, bias)
    index = ""
    if any(node.output[1:2]):
        index = builder.store(np.zeros(shape[:1], np.int32))
        if mask:
            ones = builder.add("Equal", mask, builder.store(np.int32(1)))
            ones = builder.add("Cast", ones, to=TensorProto.INT32)
            index = builder.reduced("ReduceSum", ones, [1], keepdims=0)
    return [value, index, total]


def _product_of_blocks(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A product with quantized weights as that of a batch of one matrix, and a sum with the bias."""
    value, *operands, bias = graph.operands(node, 6)
    shape, columns = scope.shape(value), graph.number(node, "N", 0)
    if shape is None or (len(shape) == 3 and not bias):
        return None
    if len(shape) != 3:
        value = builder.reshape(value, [1, -1, shape[-1]])
    (result,) = builder.add_like(node, node.op_type, [value, *operands], node.domain)
    if bias:
        result = builder.add("Add", result, bias)
    return [result if len(shape) == 3 else builder.reshape(result, [*shape[:-1], columns])]


def _attention(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Attention with one product with ``weights`` for query, key and value."""
    value, weights, bias, mask, past, added, *others = graph.operands(node, 8)
    shape, wide = scope.shape(value), scope.shape(weights)
    if past or any(others) or shape is None or wide is None:
        return None
    sizes = graph.attribute(node, "qkv_hidden_sizes", None) or [wide[1] // 3] * 3
    product = builder.add("MatMul", value, weights)
    if bias:
        product = builder.add("Add", product, bias)
    parts = builder.split(product, 2, sizes)
    shapes = [[*shape[:2], size] for size in sizes]
    return _attended(node, scope, builder, parts, shapes, mask, added)


def _multi_head_attention(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    *parts, bias, mask, added = graph.operands(node, 10)[:6]
    shapes = [scope.shape(name) for name in parts]
    known = [[*each] for each in shapes if each is not None and len(each) == 3]
    if any(graph.operands(node, 10)[6:]) or len(known) < len(parts):
        return None
    if bias:
        biases = builder.split(bias, 0, [each[2] for each in known])
        parts = [builder.add("Add", *each) for each in zip(parts, biases, strict=True)]
    return _attended(node, scope, builder, parts, known, mask, added)


def _attended(
    node: onnx.NodeProto,
    scope: Scope,
    builder: Builder,
    parts: Sequence[str],
    shapes: Sequence[Sequence[int]],
    mask: str,
    added: str,
) -> Outputs:
    """The result of all heads, for query, key and value as three ``parts`` of three dimensions."""
    heads, masked = graph.number(node, "num_heads", 1), scope.shape(mask) if mask else None
    (batch, length, width), (_, keys, _), (*_, result) = shapes
    unknown = any(node.output[1:]) or any(
        graph.number(node, name, 0) for name in ("unidirectional", "do_rotary")
    )
    if unknown or (mask and masked not in ((batch, keys), (batch,))):
        return None
    if masked == (batch,):
        # The number of keys of each sequence.
        places = builder.store(np.arange(keys, dtype=np.int32).reshape(1, keys))
        mask = builder.add("Less", places, builder.reshape(mask, [batch, 1]))
    query, key, value = (
        builder.transpose(builder.reshape(part, [*shape[:2], heads, shape[2] // heads]), perm)
        for part, shape, perm in zip(
            parts, shapes, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True
        )
    )
    scale = graph.attribute(node, "scale", 0.0) or (width // heads) ** -0.5
    scores = builder.scaled(builder.add("MatMul", query, key), scale)
    if mask:
        kept = builder.add("Cast", builder.reshape(mask, [batch, 1, 1, keys]), to=TensorProto.BOOL)
        low = builder.number(graph.attribute(node, "mask_filter_value", -10000.0))
        scores = builder.add("Add", scores, builder.add("Where", kept, builder.number(0), low))
    if added:
        scores = builder.add("Add", scores, added)
    read = builder.add("MatMul", builder.add("Softmax", scores, axis=-1), value)
    return [builder.reshape(builder.transpose(read, [0, 2, 1, 3]), [batch, length, result])]


FUSED = by_node(
    "operators that ONNX Runtime has fused, taken apart",
    {
        "com.microsoft.FusedConv": _conv,
        "com.microsoft.FusedGemm": _gemm,
        "com.microsoft.FusedMatMul": _matmul,
        "com.microsoft.TransposeMatMul": _matmul,
        "com.microsoft.Attention": _attention,
        "com.microsoft.MultiHeadAttention": _multi_head_attention,
        "com.microsoft.QuickGelu": _quick_gelu,
        "com.microsoft.Gelu": _gelu,
        "com.microsoft.BiasGelu": _gelu,
        "com.microsoft.FastGelu": _fast_gelu,
        "com.microsoft.EmbedLayerNormalization": _embedded,
        "com.microsoft.MatMulNBits": _product_of_blocks,
        "com.microsoft.SkipLayerNormalization": _normalized,
        "com.microsoft.SkipSimplifiedLayerNormalization": _normalized,
        "SimplifiedLayerNormalization": _normalized,
    },
)


_SQUARED, _LOGARITHMS = ("ReduceL2", "ReduceSumSquare"), ("ReduceLogSum", "ReduceLogSumExp")


def _reduced(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The function of a sum of a function of the values: Abs, Mul or Exp, ReduceSum, and Sqrt or Log."""
    operator, value = node.op_type, node.input[0]
    axes, keepdims = scope.axes(node), graph.number(node, "keepdims", 1)
    is_real = builder.dtype.kind == "f"
    if axes is None or not (is_real or operator in ("ReduceL1", "ReduceSumSquare")):
        return None
    largest = ""
    if operator == "ReduceL1":
        value = builder.add("Abs", value)
    elif operator in _SQUARED:
        value = builder.add("Mul", value, value)
    elif operator == "ReduceLogSumExp":
        # Exp of other values than negative ones overflows.
        below = builder.add("Sub", value, builder.reduced("ReduceMax", value, axes, keepdims=1))
        largest = builder.reduced("ReduceMax", value, axes, keepdims)
        value = builder.add("Exp", below)
    total = builder.reduced("ReduceSum", value, axes, keepdims)
    if operator == "ReduceL2":
        total = builder.add("Sqrt", total)
    elif operator in _LOGARITHMS:
        total = builder.add("Log", total)
    return [builder.add("Add", total, largest) if largest else total]


def _softplus(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The larger of x and 0, plus the rest, whose Exp cannot overflow."""
    value = node.input[0]
    power = builder.add("Exp", builder.add("Neg", builder.add("Abs", value)))
    rest = builder.add("Log", builder.add("Add", power, builder.number(1)))
    return [builder.add("Add", builder.add("Relu", value), rest)]


def _log_softmax(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    value, is_old = node.input[0], builder.opset < _SOFTMAX_OVER_ONE_AXIS
    if not (sizes := scope.sizes(value)):
        return None
    axis = graph.number(node, "axis", 1 if is_old else -1) % len(sizes)
    axes = range(axis, len(sizes)) if is_old else [axis]
    below = builder.add("Sub", value, builder.reduced("ReduceMax", value, axes, keepdims=1))
    total = builder.reduced("ReduceSum", builder.add("Exp", below), axes, keepdims=1)
    return [builder.add("Sub", below, builder.add("Log", total))]


def _softsign(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    size = builder.add("Add", builder.add("Abs", node.input[0]), builder.number(1))
    return [builder.add("Div", node.input[0], size)]


def _prelu(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    value, slope = node.input
    if builder.dtype.kind != "f":
        return None
    negative = builder.add("Relu", builder.add("Neg", value))
    return [builder.add("Sub", builder.add("Relu", value), builder.add("Mul", slope, negative))]


def _batch_normalized(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A BatchNormalization, whose mean and variance may be computed, by its formula."""
    sizes = scope.sizes(node.input[0])
    is_training = graph.number(node, "training_mode", 0) or any(node.output[1:])
    if sizes is None or is_training or not graph.number(node, "spatial", 1):
        return None

    def per_channel(name: str) -> str:
        return builder.reshape(name, [-1, *[1] * (len(sizes) - 2)]) if len(sizes) > 2 else name

    value, scale, bias, mean, variance = node.input
    epsilon = builder.number(graph.attribute(node, "epsilon", 1e-5))
    deviation = builder.add("Sqrt", builder.add("Add", variance, epsilon))
    factor = per_channel(builder.add("Div", scale, deviation))
    away = builder.add("Sub", value, per_channel(mean))
    return [builder.add("Add", builder.add("Mul", away, factor), per_channel(bias))]


def _affine_grid(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The product of the places of all pixels, which are stored, with the matrices."""
    theta, size = node.input[0], scope.constant(node.input[1])
    if size is None:
        return None
    batch, _, *sizes = (int(each) for each in size)
    ends = [1 if graph.number(node, "align_corners", 0) else 1 - 1 / each for each in sizes]
    axes = [np.linspace(-end, end, each) for end, each in zip(ends, sizes, strict=True)]
    # The last dimension of an image is the first coordinate.
    places = np.stack([*np.meshgrid(*axes, indexing="ij")[::-1], np.ones(sizes)], -1)
    stored = builder.store(places.reshape(1, -1, len(sizes) + 1).astype(builder.dtype))
    product = builder.add("MatMul", stored, builder.transpose(theta, [0, 2, 1]))
    return [builder.reshape(product, [batch, *sizes, len(sizes)])]


FUNCTIONS = by_node(
    "functions as basic operators",
    {
        "AffineGrid": _affine_grid,
        "BatchNormalization": _batch_normalized,
        "Gelu": _gelu,
        "LayerNormalization": _normalized,
        "LogSoftmax": _log_softmax,
        "PRelu": _prelu,
        "RMSNormalization": _normalized,
        "Softplus": _softplus,
        "Softsign": _softsign,
        **dict.fromkeys(("ReduceL1", *_SQUARED, *_LOGARITHMS), _reduced),
    },
)

_NAMES = """
Attention Celu CenterCropPad GroupNormalization HardSwish Mish RotaryEmbedding SwiGLU Swish
"""
_DEFINED = frozenset(_NAMES.split())


def _inline_definitions(model: onnx.ModelProto, types: Types, refused: frozenset[str]) -> int:
    wanted = _DEFINED & refused
    if not (before := _count(model, wanted)):
        return 0
    names = [("", name) for name in sorted(wanted)]
    try:
        inlined = onnx.inliner.inline_selected_functions(
            _explicit(model, types, wanted), names, inline_schema_functions=True
        )
    except RuntimeError:
        # onnx cannot handle all models that ONNX Runtime opens.
        return 0
    model.CopyFrom(inlined)
    for part in graph.graphs(model.graph):
        named = [value for value in part.value_info if value.name]
        del part.value_info[:]
        part.value_info.extend(named)
    # An older opset may not define all of them.
    return before - _count(model, wanted)


def _explicit(model: onnx.ModelProto, types: Types, wanted: frozenset[str]) -> onnx.ModelProto:
    """A copy of ``model`` with what the inliner does not look up: types of stored tensors and of values, and
    the default attributes of the ``wanted`` operators.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for part in graph.graphs(result.graph):
        known = {value.name for value in (*part.input, *part.output, *part.value_info)}
        value_types = {
            tensor.name: helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
            for tensor in part.initializer
        }
        results = (name for node in part.node for name in node.output)
        value_types |= {name: types[name] for name in results if name in types}
        # The inliner looks up the types of missing operands too.
        value_types[""] = onnx.TypeProto()
        part.value_info.extend(
            onnx.ValueInfoProto(name=name, type=type_)
            for name, type_ in value_types.items()
            if name not in known
        )
    for node in graph.nodes(result.graph):
        if node.domain or node.op_type not in wanted:
            continue
        schema = onnx.defs.get_schema(node.op_type, graph.opset(model))
        present = {attribute.name for attribute in node.attribute}
        node.attribute.extend(
            attribute.default_value
            for name, attribute in schema.attributes.items()
            if name not in present and attribute.default_value.type
        )
    return result


def _count(model: onnx.ModelProto, wanted: frozenset[str]) -> int:
    return sum(not node.domain and node.op_type in wanted for node in model.graph.node)


DEFINITIONS = Rewrite("functions of ONNX as it defines them", _DEFINED, _inline_definitions)
