"""What to compute of long integers that become floats: float16 has only parts of them, or their quotients."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper

from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.dtypes import Numbers
from hatch_epcontext.graph.number_format import FLOAT16
from hatch_epcontext.graph.rewriting import corrects
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.affine import (
    Affine,
    affine,
    is_last,
    is_long,
    is_shifted,
    is_split,
    logarithm,
    of_operand,
)

_PART = 3 * 2**14
"""By what integers of 32 bits are divided so that float16 has both parts; QNN rounds quotients by powers of
two down, which makes two large parts of a small negative number."""

_LIMITING = 12
"""The opset from which Min takes integers."""

_UNIT = 2.0**-15
"""What 1 is in the sum of both parts."""


def _is_wide(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether arithmetic ends here that scales large integers down, or subtracts a large one."""
    if node.op_type == "Log":
        return logarithm(node, scope) is not None
    value = affine(node, scope) if is_last(node, scope) else None
    return value is not None and (is_split(value, scope) or is_shifted(value))


@corrects("split-integers", "Add", "Div", "Log", "Mul", "Sub", beside=["Cast"], applies=_is_wide)
def _split(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The integers, moved by whole ones, as one or as two parts, times the factor, plus the rest."""
    if node.op_type == "Log":
        return _logarithm(node, scope, builder)
    value = affine(node, scope)
    if value is None:
        return None
    whole = _shifted(value, scope, builder)
    if not is_split(value, scope):
        result = _as_floats(whole, builder)
        if (value.scale != 1).any():
            result = builder.add("Mul", result, builder.number(value.scale))
    elif np.abs(value.scale).min() >= FLOAT16.least:
        result = _of_parts(whole, value.scale, scope.known_dtype(value.whole), builder)
    else:
        # The factor of one part would have few bits itself.
        result = _of_parts(whole, _UNIT, scope.known_dtype(value.whole), builder)
        result = builder.add("Mul", result, builder.number(value.scale / _UNIT))
    if value.rest.any():
        result = builder.add("Add", result, builder.number(value.rest))
    return [result]


def _shifted(value: Affine, scope: Scope, builder: Builder) -> str:
    """The integers, moved as ``value`` says, with the whole constant that is added to them."""
    whole = value.whole
    for move in reversed(value.moves):
        (whole,) = builder.add_like(move, move.op_type, [whole, *move.input[1:]])
    if not value.shift.any():
        return whole
    shift = value.shift.astype(scope.known_dtype(value.whole))
    return builder.add("Add", whole, builder.store(shift))


def _of_parts(whole: str, scale: Numbers | float, dtype: np.dtype[Any], builder: Builder) -> str:
    """``scale * whole``, as the sum of a scaled quotient and a scaled rest."""
    part = builder.store(np.array(_PART, dtype))
    quotient = builder.add("Div", whole, part)
    rest = builder.add("Sub", whole, builder.add("Mul", quotient, part))
    parts = (
        builder.add("Mul", _as_floats(name, builder), builder.number(scale * factor))
        for name, factor in ((quotient, _PART), (rest, 1.0))
    )
    return builder.add("Add", *parts)


def _logarithm(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The sum of that of the integer up to a limit, and that of how many times larger it is."""
    value = logarithm(node, scope)
    if value is None or builder.opset < _LIMITING:
        return None
    whole, dtype = _shifted(value, scope, builder), scope.known_dtype(value.whole)
    small = builder.add("Min", whole, builder.store(np.array(1 / _UNIT, dtype)))
    more = builder.add("Max", _of_parts(whole, _UNIT, dtype, builder), builder.number(1.0))
    logarithms = (builder.add("Log", part) for part in (_as_floats(small, builder), more))
    return [builder.add("Add", *logarithms)]


def _is_ratio(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether a Div has floats of integers, of which one is long."""
    values = [of_operand(node, operand, scope) for operand in (0, 1)]
    return all(value is not None and not value.rest.any() for value in values) and any(
        value is not None and is_long(value, scope) for value in values
    )


@corrects("ratio", "Div", beside=["Cast"], applies=_is_ratio)
def _divide(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The quotient of two small numbers that are in the same ratio."""
    parts, scales = [], []
    for operand in (0, 1):
        value = of_operand(node, operand, scope)
        if value is None:
            return None
        whole = _shifted(value, scope, builder)
        parts.append(_of_parts(whole, _UNIT, scope.known_dtype(value.whole), builder))
        scales.append(value.scale)
    quotient, scale = builder.add("Div", *parts), scales[0] / scales[1]
    return [builder.add("Mul", quotient, builder.number(scale)) if (scale != 1).any() else quotient]


def _as_floats(whole: str, builder: Builder) -> str:
    return builder.add("Cast", whole, to=helper.np_dtype_to_tensor_dtype(builder.dtype))
