"""Operators of integers (QOperator graphs) as those of floats between DequantizeLinear and QuantizeLinear.

EPs fuse these three into their own operator of integers. ONNX Runtime's `ContribOperators.md` and ONNX's
`Operators.md` define which operands have which scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.builder import Builder, Outputs, Rule, by_node
from hatch_epcontext.graph.scope import Scope

_AXIS = 13
"""The opset from which DequantizeLinear accepts a scale for each channel, and Softmax is over one axis."""

_BEGINS: Mapping[str, int] = {
    **dict.fromkeys(("QLinearAdd", "QLinearMul", "QLinearConv", "QLinearMatMul"), 6),
    "QGemm": 7,
    "QLinearConcat": 0,
}
"""The number of the input with the results' scale, if that is not 3; the zero point follows it."""

_BIASES: Mapping[str, int] = {"QLinearConv": 8, "QGemm": 6}
"""The operand that is added to a product."""

_MOVING = operators.LAYOUT | {"MaxPool"}
"""Operators with the same result for integers, which EPs support for floats."""

_OWN = frozenset({"channels_last", "opset"})
"""Attributes that only the operators of integers have."""


def _real(
    operands: Sequence[str], scope: Scope, builder: Builder, axis: int | None = None
) -> str | None:
    """The floats of ``operands``: integers, their scale and their zero point; with ``axis`` per channel."""
    scale = scope.constant(operands[1])
    if scale is None or scale.size == 1:
        return builder.add("DequantizeLinear", *operands)
    if axis is None or builder.opset < _AXIS:
        return None
    return builder.add("DequantizeLinear", *operands, axis=axis)


def _bias(node: onnx.NodeProto, scope: Scope, builder: Builder) -> str | None:
    """The bias of a product as floats, with the product's scale; empty without a bias."""
    name = graph.operand(node, _BIASES[node.op_type]) if node.op_type in _BIASES else ""
    if not name:
        return ""
    one, other = (scope.constant(node.input[each]) for each in (1, 4))
    array = scope.stored.get(name)
    if one is None or other is None or array is None:
        return None
    integers = graph.array_of(array)
    scale = one * other * graph.attribute(node, "alpha", 1.0)
    return None if integers is None else builder.store((integers * scale).astype(one.dtype))


def _product(
    operator: str, axis: int | None, node: onnx.NodeProto, scope: Scope, builder: Builder
) -> Outputs:
    """A product of integers with weights, which may have a scale per channel: along ``axis``, or the last."""
    if node.op_type == "QGemm":
        axis = 0 if graph.number(node, "transB", 0) else 1
    elif axis is None:
        axis = len(scope.sizes(node.input[3]) or (0,)) - 1
    operands = (
        _real(node.input[:3], scope, builder),
        _real(node.input[3:6], scope, builder, axis),
        _bias(node, scope, builder),
    )
    return _quantized(operator, operands, node, builder)


def _of_each(
    operator: str, count: int, node: onnx.NodeProto, scope: Scope, builder: Builder
) -> Outputs:
    """An operator of ``count`` operands, each with a scale and a zero point."""
    parts = (node.input[3 * each : 3 * each + 3] for each in range(count))
    return _quantized(operator, [_real(each, scope, builder) for each in parts], node, builder)


def _concat(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    parts = (node.input[each : each + 3] for each in range(2, len(node.input), 3))
    return _quantized("Concat", [_real(each, scope, builder) for each in parts], node, builder)


def _quantized(
    operator: str, operands: Sequence[str | None], node: onnx.NodeProto, builder: Builder
) -> Outputs:
    """The result of ``operator`` with the attributes of ``node``: integers, or floats without a scale."""
    is_old = operator == "Softmax" and graph.number(node, "opset", builder.opset) < _AXIS
    known = [each for each in operands if each is not None]
    if is_old or graph.number(node, "channels_last", 0) or len(known) < len(operands):
        return None
    made = builder.add(operator, *known)
    kept = [each for each in node.attribute if each.name not in _OWN]
    builder.nodes[-1].attribute.extend(kept)
    by = _scale_of_result(node)
    return [builder.add("QuantizeLinear", made, *by) if by else made]


def _moved(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """An operator that moves integers, as one that moves their floats."""
    by = _scale_of(node.input[0], scope)
    if not by or len(node.output) > 1:
        return None
    real = builder.add("DequantizeLinear", node.input[0], *by)
    (moved,) = builder.add_like(node, node.op_type, [real, *node.input[1:]])
    return [builder.add("QuantizeLinear", moved, *by)]


def _scale_of(name: str, scope: Scope) -> Sequence[str]:
    """The scale and the zero point of integers; empty if they are unknown, or for floats."""
    if (node := scope.maker(scope.origin(name, _MOVING))) is None:
        return ()
    if node.op_type == "QuantizeLinear":
        return node.input[1:3]
    return _scale_of_result(node) if graph.operator(node) in _RULES else ()


def _scale_of_result(node: onnx.NodeProto) -> Sequence[str]:
    begin = _BEGINS.get(node.op_type, 3)
    return [each for each in node.input[begin : begin + 2] if each]


_RULES: Mapping[str, Rule] = {
    "QLinearConv": partial(_product, "Conv", 0),
    "QLinearMatMul": partial(_product, "MatMul", None),
    f"{graph.MICROSOFT}.QGemm": partial(_product, "Gemm", None),
    f"{graph.MICROSOFT}.QLinearConcat": _concat,
    **{
        f"{graph.MICROSOFT}.QLinear{each}": partial(_of_each, each, count)
        for each, count in (
            *(("Add", 2), ("Mul", 2), ("Sigmoid", 1), ("LeakyRelu", 1), ("Softmax", 1)),
            *(("AveragePool", 1), ("GlobalAveragePool", 1)),
        )
    },
}

INTEGERS = by_node(
    "integers between QuantizeLinear and DequantizeLinear",
    {**_RULES, **dict.fromkeys(_MOVING, _moved)},
)
