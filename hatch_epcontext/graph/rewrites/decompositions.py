"""Operators that few EPs have, or have in all versions, as simpler ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope

_SLICES_WITH_INPUTS = 10
"""The opset from which a Slice has its limits as inputs."""

_FAR = 2**31 - 1
"""An end of a Slice that is that of any axis."""

_ERF = (4.51351884, 6.57699078, -0.188808943, -10.2517888, 23.5176118, -25.1057926, 10.6676264)
"""The polynomial p for which tanh(x p(x²)) is erf(4x) up to 1, where that is 1 in float32."""

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
