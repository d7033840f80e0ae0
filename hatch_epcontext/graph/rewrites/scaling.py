"""What to compute instead of floats that are in the range of float16 only in the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper

from hatch_epcontext.graph.builder import Builder, Outputs, Rule
from hatch_epcontext.graph.dtypes import Numbers
from hatch_epcontext.graph.number_format import RewriteName
from hatch_epcontext.graph.rewriting import Applies
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.affine import affine, is_last, is_shifted, is_split

_PART = 3 * 2**14
"""By what integers of 32 bits are divided so that float16 has both parts; QNN rounds quotients by powers of
two down, which makes two large parts of a small negative number."""

_UNIT = 2.0**-15
"""What 1 is in the sum of both parts."""

_SMALLEST = 2.0**-14
"""The smallest number of which float16 has all bits."""


def _is_wide(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether arithmetic ends here that scales large integers down, or subtracts a large one."""
    value = affine(node, scope) if is_last(node, scope) else None
    return value is not None and (is_split(value, scope) or is_shifted(value))


def _scale(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The integers, moved by whole ones and split into two parts, each times the factor."""
    value = affine(node, scope)
    if value is None:
        return None
    whole, dtype = value.whole, scope.known_dtype(value.whole)
    for move in reversed(value.moves):
        (whole,) = builder.add_like(move, move.op_type, [whole, *move.input[1:]])
    if value.shift.any():
        whole = builder.add("Add", whole, builder.store(value.shift.astype(dtype)))
    if is_split(value, scope):
        result = _of_parts(whole, value.scale, dtype, builder)
    else:
        result = _as_floats(whole, builder)
        if (value.scale != 1).any():
            result = builder.add("Mul", result, _floats(value.scale, builder))
    return [
        builder.add("Add", result, _floats(value.rest, builder)) if value.rest.any() else result
    ]


def _of_parts(whole: str, scale: Numbers, dtype: np.dtype[Any], builder: Builder) -> str:
    """``scale * whole``."""
    part = builder.store(np.array(_PART, dtype))
    quotient = builder.add("Div", whole, part)
    rest = builder.add("Sub", whole, builder.add("Mul", quotient, part))
    # A smaller factor of the rest would lose bits itself.
    is_direct = np.abs(scale).min() >= _SMALLEST
    unit = scale if is_direct else np.array(_UNIT)
    parts = (
        builder.add("Mul", _as_floats(name, builder), _floats(unit * factor, builder))
        for name, factor in ((quotient, _PART), (rest, 1))
    )
    total = builder.add("Add", *parts)
    return total if is_direct else builder.add("Mul", total, _floats(scale / _UNIT, builder))


def _as_floats(whole: str, builder: Builder) -> str:
    return builder.add("Cast", whole, to=helper.np_dtype_to_tensor_dtype(builder.dtype))


def _floats(values: Numbers, builder: Builder) -> str:
    return builder.store(values.astype(builder.dtype))


RULES: Mapping[RewriteName, tuple[Rule, tuple[str, ...], Applies | None]] = {
    "split-integers": (_scale, ("Add", "Div", "Mul", "Sub"), _is_wide),
}
"""Rules with their operators, and whether a node needs one: others stay as they are."""
