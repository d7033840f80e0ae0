"""``Clip`` with bounds that are computed, as ``Max`` and ``Min``."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from hatch_epcontext.graph.rewrites.base import Values, by_node

_FIRST_OF_INTEGERS = 12
"""The opset since which Max and Min take all integers."""


def _max_and_min(node: onnx.NodeProto, values: Values) -> list[onnx.NodeProto] | None:
    value, low, high = (*node.input, "", "")[:3]
    dtype = values.dtype(value)
    if len(node.input) < 2 or dtype is None:
        return None
    if dtype.kind != "f" and values.opset < _FIRST_OF_INTEGERS:
        return None
    bounds = [
        (operator, bound)
        for operator, bound, limit in (("Max", low, -np.inf), ("Min", high, np.inf))
        if bound and not _is(values, bound, limit)
    ]
    if not bounds:
        return [helper.make_node("Identity", [value], node.output)]
    result = []
    for index, (operator, bound) in enumerate(bounds):
        last = index == len(bounds) - 1
        output = node.output[0] if last else values.fresh(f"{node.output[0]}/{operator}")
        result.append(helper.make_node(operator, [value, bound], [output]))
        value = output
    return result


def _is(values: Values, bound: str, limit: float) -> bool:
    """Whether ``bound`` is stored as ``limit``, which is no bound."""
    array = values.constant(bound)
    return array is not None and array.size == 1 and array.dtype.kind == "f" and array == limit


COMPUTED_BOUNDS = by_node("Clip as Max and Min", ("Clip",), _max_and_min)
