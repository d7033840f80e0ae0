"""What to compute instead of single operators that EPs' kernels compute wrong, or inexactly, in float16."""

from __future__ import annotations

import math

import numpy as np
import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.builder import BOUNDS_AS_INPUTS, Builder, Outputs
from hatch_epcontext.graph.number_format import FLOAT16, FUSING
from hatch_epcontext.graph.rewrites.integers import COMPARING
from hatch_epcontext.graph.rewrites.matching import number_beside
from hatch_epcontext.graph.rewriting import corrects
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.linear import ends

_LARGEST = float(np.finfo(np.float32).max)

_COMPARISONS = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual")

_SMALL_ANGLE = 2.0**-5
"""The angle up to which its sine and tangent are the angle itself, to half a unit of float16."""

_FUSING = FUSING | {"Add", "Sub"}
_FUSED_THROUGH = operators.RESHAPING | {"Mul", "Slice", "Split"}
"""Operators that EPs fuse with an activation, and those that may come between."""

_NOTHING = -80.0
"""The logarithm of a number that is 0 in float16 too."""

_LARGE_DIVISOR = 8192.0
"""The divisor from which a quotient is that of eighths: QNN makes 0 of those above 16384."""

_UNLIMITED = frozenset(
    {"Add", "CumSum", "Div", "Exp", "Mul", "Pow", "ReduceMean", "ReduceSum", "Sub"}
)
"""Operators whose results, also rewritten, EPs may keep beyond the end of float16."""


@corrects("square", "Pow")
def _power(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    value, name = node.input
    number = number_beside(value, scope.origin(name, ("Cast", "Identity")), scope)
    if number == 2:
        return [builder.add("Mul", value, value)]
    return [builder.add("Sqrt", value)] if number == 0.5 and scope.kind(value) == "f" else None


@corrects("clip-inputs", "Clip")
def _clip(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Clip of an opset in which the bounds are attributes."""
    if builder.opset >= BOUNDS_AS_INPUTS:
        return None
    value = node.input[0]
    for operator, bound in (("Max", "min"), ("Min", "max")):
        number = graph.attribute(node, bound, _LARGEST)
        if abs(number) < _LARGEST:
            value = builder.add(operator, value, builder.number(number))
    return [value]


@corrects("small-angle", "Atan", "Sin", "Tan")
def _small_angle(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A small angle itself in place of its sine or tangent, and a small tangent in place of its angle."""
    if builder.opset < COMPARING:
        return None
    value = node.input[0]
    is_small = builder.add("Less", builder.add("Abs", value), builder.number(_SMALL_ANGLE))
    return [builder.add("Where", is_small, value, builder.add(node.op_type, value))]


@corrects("unfuse-activation", "Sigmoid", "Tanh")
def _unfuse_activation(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Max between an activation and what computes its operand, so that an EP cannot fuse the two.

    At the number, and below it, the activation is 0 or -1: the result is the same.
    """
    value = node.input[0]
    maker = scope.maker(value)
    while maker is not None and graph.operator(maker) in _FUSED_THROUGH:
        computed = (name for name in maker.input if scope.stored.get(name) is None)
        maker = scope.maker(next(computed, ""))
    if maker is None or graph.operator(maker) not in _FUSING:
        return None
    return [builder.add(node.op_type, builder.add("Max", value, builder.number(-60000)))]


@corrects("floor", "Exp", "Mish", "Pow", "Softplus")
def _floor(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Of numbers from -80 on: for smaller ones the result is 0 in float16 too."""
    if node.op_type == "Pow":
        return _power_of_number(node, scope, builder)
    value = _limited(node.input[0], "Max", _NOTHING, scope, builder)
    return [builder.add(node.op_type, value)] if value else None


def _limited(name: str, operator: str, limit: float, scope: Scope, builder: Builder) -> str | None:
    """The larger or the smaller, by ``operator``, of a value and ``limit``; None if it is that already."""
    maker, limits = scope.maker(name, operator), (float(builder.dtype.type(limit)),)
    operands = () if maker is None else maker.input
    if any(ends(operand, scope) == limits for operand in operands):
        return None
    return builder.add(operator, name, builder.number(limit))


def _power_of_number(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """That of a stored positive number, as an Exp where float16 loses less of its logarithm."""
    base, exponent = node.input
    number = number_beside(exponent, base, scope)
    if number is None or number <= 0 or number == 1 or scope.dtype(base) != builder.dtype:
        return None
    if scope.dtype(exponent) != builder.dtype:
        exponent = builder.add("Cast", exponent, to=scope.elem_type(base))
    logarithm = math.log(number)
    by_logarithm = abs(logarithm) * (_lost(logarithm) + FLOAT16.unit / 2)
    if by_logarithm < _lost(number):
        exponent = builder.add("Mul", exponent, builder.number(logarithm))
        return [builder.add("Exp", builder.add("Max", exponent, builder.number(_NOTHING)))]
    operator = "Max" if number > 1 else "Min"
    limited = _limited(exponent, operator, _NOTHING / logarithm, scope, builder)
    return [builder.add("Pow", base, limited)] if limited else None


def _lost(number: float) -> float:
    """The share of ``number`` that float16 loses."""
    return abs(float(np.float16(number)) / number - 1)


def _is_quotient(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether floats are divided by computed ones, which are not scaled yet."""
    divisor = node.input[-1]
    if scope.kind(divisor) != "f" or scope.constant(divisor) is not None:
        return False
    product = scope.maker(divisor, "Mul")
    return product is None or scope.maker(product.input[-1], "Where") is None


@corrects("scaled-division", "Div", "Reciprocal", applies=_is_quotient)
def _scaled_division(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """That of an eighth by an eighth, where the divisor is large."""
    size = builder.add("Abs", node.input[-1])
    is_large = builder.add("Greater", size, builder.number(_LARGE_DIVISOR))
    scale = builder.add("Where", is_large, builder.number(1 / 8), builder.number(1))
    result = builder.add(node.op_type, *(builder.add("Mul", name, scale) for name in node.input))
    return [result if node.op_type == "Div" else builder.add("Mul", result, scale)]


def _limited_operands(node: onnx.NodeProto, scope: Scope) -> list[int]:
    """The numbers of the operands of a comparison that may be beyond the end of float16."""
    return [
        number
        for number, name in enumerate(node.input)
        if scope.kind(name) == "f"
        and scope.maker(scope.origin(name, operators.RESHAPING), *_UNLIMITED) is not None
    ]


@corrects(
    "comparison", *_COMPARISONS, applies=lambda node, scope: bool(_limited_operands(node, scope))
)
def _limit_operands(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The same of what is larger up to the end of float16, and of what is smaller from the other end on."""
    operands = [*node.input]
    for number in _limited_operands(node, scope):
        is_larger = node.op_type.startswith("Greater") == (number == 0)
        limit, end = ("Min", FLOAT16.largest) if is_larger else ("Max", -FLOAT16.largest)
        operands[number] = builder.add(limit, operands[number], builder.number(end))
    return builder.add_like(node, node.op_type, operands)
