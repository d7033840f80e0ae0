"""Operators that compute each element alone, of which few EPs support all forms, as simpler ones."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope

_ERF = (4.51351884, 6.57699078, -0.188808943, -10.2517888, 23.5176118, -25.1057926, 10.6676264)
"""The polynomial p for which tanh(x p(x²)) is erf(4x) up to 1, where that is 1 in float32."""

_EXTREMES_OF_INTEGERS = 12
"""The opset from which Max and Min accept all integers."""

_SMALL = frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16})


@rewrites("Clip")
def clip_as_max_min(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Clip whose bounds are computed."""
    value, low, high = graph.operands(node, 3)
    dtype = scope.dtype(value)
    if len(node.input) < 2:
        return Declined("its bounds are attributes")
    if dtype is None:
        return Declined(f"the dtype of {value!r} is not known")
    if dtype.kind != "f" and builder.opset < _EXTREMES_OF_INTEGERS:
        return Declined(f"Max and Min of opset {builder.opset} take no {dtype}")
    for operator, bound, limit in (("Max", low, -np.inf), ("Min", high, np.inf)):
        if bound and not _is(scope, bound, limit):
            value = builder.add(operator, value, bound)
    return [value]


def _is(scope: Scope, bound: str, limit: float) -> bool:
    """Whether ``bound`` is a stored ``limit``, which bounds nothing."""
    array = scope.constant(bound)
    return array is not None and array.size == 1 and array.dtype.kind == "f" and array == limit


@rewrites("Erf")
def erf_as_tanh(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """An Erf as the Tanh of a polynomial, whose factors float16 can represent."""
    value = builder.clip(builder.scaled(node.input[0], 0.25), -1.0, 1.0)
    square = builder.add("Mul", value, value)
    *coefficients, factor = map(builder.number, _ERF)
    for coefficient in reversed(coefficients):
        factor = builder.add("Add", builder.add("Mul", square, factor), coefficient)
    return [builder.add("Tanh", builder.add("Mul", value, factor))]


@rewrites("GreaterOrEqual", "LessOrEqual")
def decompose_comparison(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A function of ONNX, of whose older versions ONNX Runtime infers no shape, which some EPs need."""
    strict = builder.add(node.op_type.removesuffix("OrEqual"), *node.input)
    return [builder.add("Or", strict, builder.add("Equal", *node.input))]


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
