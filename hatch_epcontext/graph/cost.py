"""How much a graph computes."""

from __future__ import annotations

import math

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.scope import Scope


def multiply_adds(main: onnx.GraphProto) -> int:
    """About how many multiply-adds a run of ``main`` needs; other operators count one for each value. Inner
    graphs count once, and an unknown size is 1.
    """
    return sum(
        _size(scope, node.output[0]) * _products(node, scope)
        for scope in map(Scope, graph.graphs(main))
        for node in scope.nodes
        if node.output
    )


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
    if node.op_type in ("LSTM", "GRU", "RNN"):
        return sum(_size(scope, name) for name in node.input[1:3]) // max(
            1, (scope.shape(node.input[2]) or (1,))[-1]
        )
    return 1


def _size(scope: Scope, name: str) -> int:
    return max(1, math.prod(size or 1 for size in scope.sizes(name) or ()))
