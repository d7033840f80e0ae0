"""Constants that shapes decide: what has no numbers, and what is computed of that, and EyeLike."""

from __future__ import annotations

import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.scope import Scope

_ZEROS = frozenset({"MatMul", "ReduceL1", "ReduceL2", "ReduceSum", "ReduceSumSquare"})
"""Operators whose result is zero if they sum nothing."""


def has_constants(main: onnx.GraphProto) -> bool:
    """Whether shapes decide a value inside ``main``, which has the types of its values."""
    if any(node.op_type == "EyeLike" for node in main.node):
        return True
    return any(0 in (graph.sizes(value.type) or ()) for value in main.value_info)


def fold_constants(model: onnx.ModelProto) -> bool:
    """Replace such nodes of the main graph of ``model`` by their values; False if none are."""
    builder, scope = Builder(model), Scope.of(model)
    operators = {graph.operator(node) for node in model.graph.node}
    if not builder.replace(scope, dict.fromkeys(operators, _folded), nested=False):
        return False
    builder.write()
    return True


def _folded(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    if node.op_type == "EyeLike":
        sizes, dtype = scope.shape(node.input[0]), scope.dtype(node.output[0])
        if sizes is None or dtype is None:
            return None
        return [builder.store(np.eye(sizes[0], sizes[1], graph.number(node, "k", 0), dtype))]
    shapes = {name: scope.shape(name) for name in (*node.input, *node.output)}
    empty = {name for name, shape in shapes.items() if name and shape is not None and 0 in shape}
    if not empty or node.op_type == "Constant" or graph.inner_graphs(node):
        return None
    return _without(node, empty, scope, builder)


def _without(node: onnx.NodeProto, empty: set[str], scope: Scope, builder: Builder) -> Outputs:
    """The results of ``node``, some of whose values are ``empty``."""
    outputs = [name for name in node.output if name]
    stored = {name: _filled(name, scope, builder) for name in outputs if name in empty}
    if len(stored) == len(outputs):
        return [stored.get(name, "") for name in node.output]
    if node.op_type in _ZEROS and scope.shape(outputs[0]) is not None:
        return [_filled(outputs[0], scope, builder)]
    if node.op_type == "Concat":
        kept = [name for name in node.input if name not in empty]
        return kept if len(kept) == 1 else builder.add_like(node, "Concat", kept)
    if node.op_type == "Split":
        axis, known = graph.number(node, "axis", 0), [scope.shape(name) or () for name in outputs]
        full = [shape[axis] for shape in known if 0 not in shape]
        parts = iter(builder.split(node.input[0], axis, full))
        return [stored.get(name) or next(parts) for name in node.output]
    return None


def _filled(name: str, scope: Scope, builder: Builder) -> str:
    return builder.store(np.zeros(scope.shape(name) or (), scope.dtype(name)))
