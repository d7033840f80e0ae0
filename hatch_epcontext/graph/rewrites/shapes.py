"""Shapes that ONNX Runtime does not infer, written into the model: some EPs need them."""

from __future__ import annotations

from onnx import helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.base import Rewrite, Values

_OPERATORS = frozenset({"GreaterOrEqual", "LessOrEqual"})
"""Functions of ONNX, whose older versions ONNX Runtime infers no shape for."""


def _apply(values: Values, refused: frozenset[str]) -> int:
    main = values.model.graph
    known = {value.name for value in (*main.value_info, *main.output)}
    found = [
        helper.make_tensor_value_info(name, elem_type, shape)
        for node in main.node
        if graph.operator(node) in _OPERATORS & refused
        for name in node.output
        if name not in known
        and (elem_type := values.elem_type(name)) is not None
        and (shape := values.shape(name)) is not None
    ]
    main.value_info.extend(found)
    return len(found)


SHAPES = Rewrite("shapes of comparisons written down", _OPERATORS, _apply)
