"""Casts of small integers, which some EPs take only as quantized values."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.base import MICROSOFT, Values, by_node

_OF_ONNX = frozenset({TensorProto.INT8, TensorProto.UINT8})
_OF_MICROSOFT = frozenset({TensorProto.INT16, TensorProto.UINT16})


def _dequantized(node: onnx.NodeProto, values: Values) -> list[onnx.NodeProto] | None:
    """A cast of a small integer to float32 as its dequantization with the scale 1."""
    (value,) = node.input
    elem_type, dtype = values.elem_type(value), values.dtype(value)
    if graph.attribute(node, "to", 0) != TensorProto.FLOAT or dtype is None:
        return None
    if elem_type not in _OF_ONNX | _OF_MICROSOFT:
        return None
    scale = values.store(f"{value}/scale", np.array(1, np.float32))
    zero = values.store(f"{value}/zero", np.array(0, dtype))
    domain = MICROSOFT if elem_type in _OF_MICROSOFT else ""
    return [helper.make_node("DequantizeLinear", [value, scale, zero], node.output, domain=domain)]


INTEGER_CASTS = by_node("Cast of small integers as DequantizeLinear", ("Cast",), _dequantized)
