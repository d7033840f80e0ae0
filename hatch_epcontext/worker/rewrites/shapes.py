"""Shapes that ONNX Runtime does not infer, written into the model: some EPs need them."""

from __future__ import annotations

import onnx

from hatch_epcontext.worker import graph
from hatch_epcontext.worker.rewrites.base import Rewrite, inferred

_OPERATORS = frozenset({"GreaterOrEqual", "LessOrEqual"})
"""Functions of ONNX, whose older versions ONNX Runtime infers no shape for."""


def _apply(model: onnx.ModelProto, refused: frozenset[str]) -> int:
    known = {value.name for value in model.graph.value_info}
    missing = {
        name
        for node in model.graph.node
        if graph.operator(node) in _OPERATORS & refused
        for name in node.output
    } - known
    found = [v for v in inferred(model).graph.value_info if v.name in missing]
    found = [value for value in found if graph.facts(value).is_fixed]
    model.graph.value_info.extend(found)
    return len(found)


SHAPES = Rewrite("shapes of comparisons written down", _OPERATORS, _apply)
