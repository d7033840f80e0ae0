"""What repeats with an input: angles, and what is counted on, as hours are."""

from __future__ import annotations

import math

import onnx

from hatch_epcontext.graph.dtypes import is_float
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.linear import LinearTerm, ends

_ANGLES = (math.tau, 90.0, 120.0, 180.0, 360.0, 720.0)
"""The turns of angles in radians, and of halves and multiples of angles in degrees."""

_PERIODIC = frozenset({"Cos", "Sin", "Tan"})


def turn_of(node: onnx.NodeProto, term: LinearTerm, scope: Scope) -> float:
    """The turn of an input of which the first operand of ``node`` is this ``term``; infinite without one.

    Angles have a turn or two. What a graph scales otherwise before a sine, or before a remainder of floats,
    is counted on, as hours are.
    """
    turn = period(node, scope) * term.parts / abs(term.scale)
    is_angle = any(math.isclose(turn, angle, rel_tol=1e-2) for angle in _ANGLES)
    is_angle |= node.op_type in _PERIODIC and turn < math.tau
    return math.inf if is_angle or not turn else turn


def period(node: onnx.NodeProto, scope: Scope) -> float:
    """That with which a result of the first operand repeats; 0 if none does."""
    operator, operand = node.op_type, node.input[0]
    if operator in _PERIODIC:
        return math.tau
    dtype = scope.dtype(operand)
    if operator == "Floor":
        return 1.0 if _leaves_fraction(node, scope) else 0.0
    factors = ends(node.input[1], scope) if operator in ("MatMul", "Mod") else ()
    largest = max(map(abs, factors), default=0.0)
    if operator == "Mod":
        return largest if dtype is not None and is_float(dtype) else 0.0
    # Each frequency times one number.
    is_outer = bool(largest) and (scope.sizes(node.input[1]) or (0,))[0] == 1
    is_sine = any(reader.op_type in _PERIODIC for reader in scope.nodes_reading(node.output[0]))
    return math.tau / largest if is_outer and is_sine else 0.0


def _leaves_fraction(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether the result of a Floor is subtracted from its operand, perhaps both times a divisor."""
    operand = node.input[0]
    readers = scope.nodes_reading(node.output[0])
    products = [reader for reader in readers if reader.op_type == "Mul"]
    for product in products:
        readers = [*readers, *scope.nodes_reading(product.output[0])]
    maker = scope.maker(operand)
    wholes = {operand, *(maker.input[:1] if maker is not None and products else ())}
    return any(reader.op_type == "Sub" and reader.input[0] in wholes for reader in readers)
