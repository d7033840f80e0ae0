"""Shapes that ONNX Runtime does not infer, written into the model: some EPs need them."""

from __future__ import annotations

import onnx
from onnx import helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.base import Rewrite, Values

_OPERATORS = frozenset({"GreaterOrEqual", "LessOrEqual"})
"""Functions of ONNX, whose older versions ONNX Runtime infers no shape for."""


def _apply(model: onnx.ModelProto, refused: frozenset[str]) -> int:
    if not any(graph.operator(node) in _OPERATORS & refused for node in model.graph.node):
        return 0
    values = Values(model)
    known = {value.name for value in (*model.graph.value_info, *model.graph.output)}
    found = [
        helper.make_tensor_value_info(name, elem_type, shape)
        for node in model.graph.node
        if graph.operator(node) in _OPERATORS & refused
        for name in node.output
        if name not in known
        and (elem_type := values.elem_type(name)) is not None
        and (shape := values.shape(name)) is not None
    ]
    model.graph.value_info.extend(found)
    return len(found)


SHAPES = Rewrite("shapes of comparisons written down", _OPERATORS, _apply)
