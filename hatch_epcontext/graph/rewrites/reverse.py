"""``ReverseSequence`` with constant lengths that are the same for all, as ``Gather``."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.base import Values, by_node


def _gather(node: onnx.NodeProto, values: Values) -> list[onnx.NodeProto] | None:
    shape, lengths = values.shape(node.input[0]), values.constant(node.input[1])
    if shape is None or lengths is None or not lengths.size or (lengths != lengths[0]).any():
        return None
    axis = graph.number(node, "time_axis", 0) % len(shape)
    length = int(lengths[0])
    indices = np.arange(shape[axis], dtype=np.int64)
    indices[:length] = indices[:length][::-1]
    name = values.store(f"{node.output[0]}/indices", indices)
    return [helper.make_node("Gather", [node.input[0], name], node.output, axis=axis)]


REVERSED = by_node("ReverseSequence as Gather", ("ReverseSequence",), _gather)
