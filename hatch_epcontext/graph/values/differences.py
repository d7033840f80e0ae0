"""Differences of values of one series, in which any offset is lost."""

from __future__ import annotations

import math

import onnx

from hatch_epcontext.graph import operators
from hatch_epcontext.graph.scope import Scope

_OF_SERIES = frozenset({"ReduceMean", "ReduceMin", "TopK"})

_SELECTING = frozenset({"ArgMax", "ArgMin", "TopK"})

_OF_PLACES = frozenset({"Div", "Mod", "Mul"})
"""Operators that make coordinates of indices."""

_MAX_SENSORS = 8
"""The most series at one time: more are features."""


def is_own_mean(one: str, other: str, scope: Scope) -> bool:
    """Whether ``other`` is the mean of ``one``, a series, or its lowest value, its median or another one."""
    _, moves = scope.origin_and_moves(other, operators.MOVES)
    mean = scope.maker(moves[-1].input[0] if moves else other)
    if (
        mean is None
        or mean.op_type not in _OF_SERIES
        or moved(mean.input[0], scope) != moved(one, scope)
    ):
        return False
    if mean.op_type == "TopK":
        # One of many values.
        whole, part = (math.prod(scope.shape(name) or ()) for name in (one, other))
        return part < whole
    axes, sizes = scope.axes(mean) or (), scope.sizes(one) or ()
    others = [size or math.inf for axis, size in enumerate(sizes) if axis not in axes]
    # Of several rows it normalizes what a layer computes along the last axis, and features along others.
    return len(sizes) <= 2 or math.prod(others) <= _MAX_SENSORS


def are_neighbours(one: str, other: str, scope: Scope) -> bool:
    """Whether ``one`` and ``other`` have neighbours in the same series, whose order is kept."""
    root = moved(one, scope)
    if any(_is_picked(name, scope) for name in (one, other)):
        return False
    whole, *parts = (math.prod(scope.shape(n) or ()) for n in (root, one, other))
    # Two parts that each have more than half overlap.
    return root == moved(other, scope) and all(2 * part > whole for part in parts)


def finds_positions(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether ``node`` finds the largest or smallest numbers of a map that is flattened, or of a series, as
    the graph calculates with their indices: those of classes are only names.
    """
    if node.op_type not in _SELECTING:
        return False
    flat, indices = node.input[0], [node.output[-1]]
    axes, of_flat = (
        sum(size != 1 for size in scope.sizes(name) or ())
        for name in (scope.origin(flat, operators.RESHAPING), flat)
    )
    is_map = axes > of_flat and any(output.name in indices for output in scope.body.output)
    for name in indices:
        for reader in scope.nodes_reading(name):
            if reader.op_type in _OF_PLACES:
                is_map |= any(scope.constant(operand) is not None for operand in reader.input)
            elif reader.op_type in operators.MOVES | {"Cast"} and reader.output[0] not in indices:
                indices.append(reader.output[0])
    return is_map


def moved(name: str, scope: Scope) -> str:
    """The value of which ``name`` has values."""
    return scope.origin(name, operators.MOVES)


def _is_picked(name: str, scope: Scope) -> bool:
    """Whether ``name`` has values in an order of its own, as the parents of joints."""
    _, moves = scope.origin_and_moves(name, operators.MOVES)
    return any(node.op_type in operators.GATHERS for node in moves)
