"""Differences of values of one series, in which any offset is lost."""

from __future__ import annotations

import math

from hatch_epcontext.graph import operators
from hatch_epcontext.graph.scope import Scope

_MAX_SENSORS = 8
"""The most series at one time: more are features."""


def is_own_mean(one: str, other: str, scope: Scope) -> bool:
    """Whether ``other`` is the mean of ``one``, a series."""
    mean = scope.maker(other)
    if mean is None or mean.op_type != "ReduceMean" or mean.input[0] != one:
        return False
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


def moved(name: str, scope: Scope) -> str:
    """The value of which ``name`` has values."""
    return scope.origin(name, operators.MOVES)


def _is_picked(name: str, scope: Scope) -> bool:
    """Whether ``name`` has values in an order of its own, as the parents of joints."""
    _, moves = scope.origin_and_moves(name, operators.MOVES)
    return any(node.op_type in operators.GATHERS for node in moves)
