"""Fused operators of ONNX Runtime, and functions of ONNX, decomposed into basic operators of ONNX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx.inliner
from onnx import helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope

_CONV_ATTRIBUTES = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")

_NORMALIZATIONS: Mapping[str, Sequence[str]] = {
    "LayerNormalization": ("value", "scale", "bias"),
    "RMSNormalization": ("value", "scale"),
    # ONNX Runtime registers this operator in ONNX's domain.
    "SimplifiedLayerNormalization": ("value", "scale"),
    "com.microsoft.SkipSimplifiedLayerNormalization": ("value", "skip", "scale", "added"),
}
"""The inputs of each of these operators. Those without a bias do not subtract the mean."""


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
    """A value, after the sum with others, less its mean and divided by its deviation."""
    names = _NORMALIZATIONS[graph.operator(node)]
    operands = dict(zip(names, graph.operands(node, len(names)), strict=True))
    value, mean = operands["value"], ""
    if (sizes := scope.sizes(value)) is None:
        return Declined(f"the rank of {value!r} is not known")
    for name in filter(None, map(operands.get, ("skip", "added"))):
        value = builder.add("Add", value, name)
    total, rank = value, len(sizes)
    axes = range(graph.number(node, "axis", -1) % rank, rank)
    if "bias" in operands:
        mean = builder.reduced("ReduceMean", value, axes, keepdims=1)
        value = builder.add("Sub", value, mean)
    square = builder.add("Mul", value, value)
    variance = builder.reduced("ReduceMean", square, axes, keepdims=1)
    epsilon = builder.number(graph.attribute(node, "epsilon", 1e-5))
    deviation = builder.add("Sqrt", builder.add("Add", variance, epsilon))
    result = builder.add("Mul", builder.add("Div", value, deviation), operands["scale"])
    if bias := operands.get("bias"):
        result = builder.add("Add", result, bias)
    inverse = builder.add("Reciprocal", deviation) if any(node.output[1:3]) else ""
    if "skip" in operands:
        return [result, mean, inverse, total]
    return [result, mean, inverse] if "bias" in operands else [result, inverse]


@rewrites("BatchNormalization")
def decompose_batch_normalization(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A BatchNormalization, whose mean and variance may be computed, by its formula."""
    value, scale, bias, mean, variance = node.input
    if (sizes := scope.sizes(value)) is None:
        return Declined(f"the rank of {value!r} is not known")
    if graph.number(node, "training_mode", 0) or any(node.output[1:]):
        return Declined("it is in training mode")
    if not graph.number(node, "spatial", 1):
        return Declined("it is not spatial")

    def per_channel(name: str) -> str:
        return builder.reshape(name, [-1, *[1] * (len(sizes) - 2)]) if len(sizes) > 2 else name

    epsilon = builder.number(graph.attribute(node, "epsilon", 1e-5))
    deviation = builder.add("Sqrt", builder.add("Add", variance, epsilon))
    factor = per_channel(builder.add("Div", scale, deviation))
    away = builder.add("Sub", value, per_channel(mean))
    return [builder.add("Add", builder.add("Mul", away, factor), per_channel(bias))]


@rewrites("com.microsoft.MatMulNBits")
def batch_matmul_nbits(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A product with quantized weights as that of a batch of one matrix, and a sum with the bias."""
    value, *operands, bias = graph.operands(node, 6)
    shape, columns = scope.shape(value), graph.number(node, "N", 0)
    if shape is None:
        return Declined(f"the shape of {value!r} is not fixed")
    is_batch = len(shape) == 3
    if is_batch and not bias:
        return None
    if not is_batch:
        value = builder.reshape(value, [1, -1, shape[-1]])
    (result,) = builder.add_like(node, node.op_type, [value, *operands], node.domain)
    if bias:
        result = builder.add("Add", result, bias)
    return [result if is_batch else builder.reshape(result, [*shape[:-1], columns])]


@rewrites("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare")
def decompose_reduction(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The function of a sum of a function of the values: Abs, Mul or Exp, ReduceSum, and Sqrt or Log."""
    operator, value = node.op_type, node.input[0]
    axes, keepdims = scope.axes(node), graph.number(node, "keepdims", 1)
    if axes is None:
        return Declined("its axes are not known")
    if builder.dtype.kind != "f" and operator not in ("ReduceL1", "ReduceSumSquare"):
        return Declined(f"it reduces {builder.dtype}")
    largest = ""
    if operator == "ReduceL1":
        value = builder.add("Abs", value)
    elif operator in ("ReduceL2", "ReduceSumSquare"):
        value = builder.add("Mul", value, value)
    elif operator == "ReduceLogSumExp":
        # Exp of other values than negative ones overflows.
        below = builder.add("Sub", value, builder.reduced("ReduceMax", value, axes, keepdims=1))
        largest = builder.reduced("ReduceMax", value, axes, keepdims)
        value = builder.add("Exp", below)
    total = builder.reduced("ReduceSum", value, axes, keepdims)
    if operator == "ReduceL2":
        total = builder.add("Sqrt", total)
    elif operator in ("ReduceLogSum", "ReduceLogSumExp"):
        total = builder.add("Log", total)
    return [builder.add("Add", total, largest) if largest else total]


@rewrites("Softplus")
def decompose_softplus(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The larger of x and 0, plus the rest, whose Exp cannot overflow."""
    value = node.input[0]
    power = builder.add("Exp", builder.add("Neg", builder.add("Abs", value)))
    rest = builder.add("Log", builder.add("Add", power, builder.number(1)))
    return [builder.add("Add", builder.add("Relu", value), rest)]


@rewrites("Attention", "RotaryEmbedding")
def inline_function(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A function of ONNX as the operators by which ONNX defines it."""
    operator = node.op_type
    types = {name: scope.types.get(name) for name in node.input if name}
    for name in types:
        if tensor := scope.stored.get(name):
            types[name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    known = {name: type_ for name, type_ in types.items() if type_ is not None}
    if missing := sorted(types.keys() - known.keys()):
        return Declined(f"the type of {missing[0]!r} is not known")
    alone = onnx.ModelProto(ir_version=builder.model.ir_version)
    alone.opset_import.extend(builder.model.opset_import)
    part = alone.graph
    part.name = operator
    part.node.append(_with_defaults(node, builder.opset))
    part.input.extend(onnx.ValueInfoProto(name=name, type=known[name]) for name in known)
    part.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
    # The inliner looks up the types of missing operands too.
    part.value_info.append(onnx.ValueInfoProto(name="", type=onnx.TypeProto()))
    try:
        inlined = onnx.inliner.inline_selected_functions(
            alone, [("", operator)], inline_schema_functions=True
        )
    except RuntimeError as error:
        # onnx cannot handle all models that ONNX Runtime opens.
        return Declined(f"onnx does not inline it: {' '.join(str(error).split())}")
    if any(new.op_type == operator for new in inlined.graph.node):
        return Declined(f"opset {builder.opset} does not define it by other operators")
    renamed: dict[str, str] = {}
    builder.copy(inlined.graph.node, renamed)
    return [renamed.get(name, "") for name in node.output]


def _with_defaults(node: onnx.NodeProto, opset: int) -> onnx.NodeProto:
    """A copy of ``node`` with all attributes that have a default, which the inliner does not look up."""
    result = onnx.NodeProto.FromString(node.SerializeToString())
    present = {attribute.name for attribute in node.attribute}
    result.attribute.extend(
        attribute.default_value
        for name, attribute in onnx.defs.get_schema(node.op_type, opset).attributes.items()
        if name not in present and attribute.default_value.type
    )
    return result
