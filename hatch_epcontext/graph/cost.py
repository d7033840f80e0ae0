"""How much a graph computes."""

from __future__ import annotations

import math

import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.facts import Cost
from hatch_epcontext.graph.scope import Scope

_STEP = 10
"""The nodes as which each time step of a recurrent layer counts: simulators compute its gates one by one."""


def cost(main: onnx.GraphProto) -> Cost:
    """About what a run of ``main`` computes. Operators that multiply nothing count one multiply-add for each
    value. Inner graphs count once, and an unknown size is 1.
    """
    nodes = [
        (scope, node)
        for scope in map(Scope, graph.graphs(main))
        for node in scope.nodes
        if node.output
    ]
    return Cost(
        sum(_steps(node, scope) * _STEP or 1 for scope, node in nodes),
        sum(_size(scope, node.output[0]) * _products(node, scope) for scope, node in nodes),
        sum(_size(scope, name) for scope, node in nodes for name in node.output if name),
    )


def _steps(node: onnx.NodeProto, scope: Scope) -> int:
    """The time steps that ``node`` computes, of both directions; 0 if it is no recurrent layer."""
    if node.op_type not in operators.LAYERS:
        return 0
    axis = 1 if graph.number(node, "layout", 0) else 0
    sizes = scope.sizes(node.input[0]) or ()
    steps = (sizes[axis] if len(sizes) > axis else None) or 1
    return steps * (2 if graph.text(node, "direction") == "bidirectional" else 1)


def _products(node: onnx.NodeProto, scope: Scope) -> int:
    """The number of products whose sum is one value of the result of ``node``."""
    if node.op_type in ("Conv", "ConvInteger", "QLinearConv"):
        index = 3 if node.op_type == "QLinearConv" else 1
        return max(1, math.prod((scope.shape(graph.operand(node, index)) or (1,))[1:]))
    if "MatMul" in node.op_type or node.op_type == "Gemm":
        shape = scope.shape(node.input[0]) or (1,)
        return shape[0] if graph.number(node, "transA", 0) else shape[-1]
    if node.op_type == "ConvTranspose":
        weights, result = scope.shape(node.input[1]), _size(scope, node.output[0])
        return max(1, _size(scope, node.input[0]) * math.prod((weights or (1,))[1:]) // result)
    if node.op_type in operators.LAYERS:
        return sum(_size(scope, name) for name in node.input[1:3]) // max(
            1, (scope.shape(node.input[2]) or (1,))[-1]
        )
    return 1


def _size(scope: Scope, name: str) -> int:
    return max(1, math.prod(size or 1 for size in scope.sizes(name) or ()))
