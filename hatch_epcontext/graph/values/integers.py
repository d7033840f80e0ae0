"""The smallest and the largest value that an integer inside a graph can have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.linear import ends

_MAX_DEPTH = 64
"""How many nodes are followed backwards."""

Limits = tuple[float, float]
"""The smallest and the largest value, both included."""

_UNKNOWN: Limits = (-math.inf, math.inf)


def limits(name: str, scope: Scope) -> Limits:
    """Return the limits of the integer ``name``, as far as ``scope`` proves them, at most those of its dtype.

    Infinite ones for floats; a boolean is 0 or 1. A sum beyond the end of its dtype is not thought of.
    """
    return _limits(name, scope, {}, _MAX_DEPTH)


def _limits(name: str, scope: Scope, known: dict[str, Limits], depth: int) -> Limits:
    """As `limits`; ``known``: those of other values. At most ``depth`` nodes are followed."""
    if name in known:
        return known[name]
    if stored := ends(name, scope):
        return stored[0], stored[-1]
    known[name] = own = _of_dtype(name, scope)
    node = scope.maker(name)
    rule = _RULES.get(graph.operator(node)) if node is not None and depth else None
    if node is None or rule is None:
        return own
    operands = [
        _limits(operand, scope, known, depth - 1) if operand else own for operand in node.input
    ]
    low, high = rule(node, operands, scope)
    known[name] = max(low, own[0]), min(high, own[1])
    return known[name]


def _of_dtype(name: str, scope: Scope) -> Limits:
    dtype = scope.dtype(name)
    if dtype is None or dtype.kind not in "iub":
        return _UNKNOWN
    if dtype.kind == "b":
        return 0, 1
    info = np.iinfo(dtype)
    return float(info.min), float(info.max)


_Rule = Callable[[onnx.NodeProto, Sequence[Limits], Scope], Limits]


_Extreme = Callable[[Iterable[float]], float]


def _extremes(low: _Extreme, high: _Extreme) -> _Rule:
    """The limits that ``low`` and ``high`` make of those of all operands."""
    return lambda node, operands, scope: (low(o[0] for o in operands), high(o[1] for o in operands))


def _corners(operate: Callable[[float, float], float]) -> _Rule:
    """The limits of an operator that is monotonic in each of its two operands."""

    def rule(node: onnx.NodeProto, operands: Sequence[Limits], scope: Scope) -> Limits:
        first, second = operands
        values = [operate(one, other) for one in first for other in second]
        return _UNKNOWN if any(map(math.isnan, values)) else (min(values), max(values))

    return rule


def _divided(node: onnx.NodeProto, operands: Sequence[Limits], scope: Scope) -> Limits:
    (low, high), (least, _) = operands
    return (min(low, 0), max(high, 0)) if least >= 1 else _UNKNOWN


def _modulo(node: onnx.NodeProto, operands: Sequence[Limits], scope: Scope) -> Limits:
    (low, _), (least, most) = operands
    if least < 1:
        return _UNKNOWN
    is_signed = graph.number(node, "fmod", 0) and low < 0
    return (1 - most if is_signed else 0), most - 1


def _absolute(node: onnx.NodeProto, operands: Sequence[Limits], scope: Scope) -> Limits:
    ((low, high),) = operands
    return max(low, -high, 0), max(-low, high)


def _clip(node: onnx.NodeProto, operands: Sequence[Limits], scope: Scope) -> Limits:
    (low, high), *bounds = operands
    least, most = (
        bounds[number] if len(bounds) > number and node.input[number + 1] else _UNKNOWN
        for number in (0, 1)
    )
    return min(max(low, least[0]), most[1]), max(min(high, most[1]), least[0])


def _positions(node: onnx.NodeProto, operands: Sequence[Limits], scope: Scope) -> Limits:
    """The result of ArgMax and others: a position along an axis."""
    sizes = [size for size in scope.sizes(node.input[0]) or () if size is not None]
    return 0, max(sizes, default=math.inf)


def _range(node: onnx.NodeProto, operands: Sequence[Limits], scope: Scope) -> Limits:
    (first, highest), (lowest, end), (delta, _) = operands
    return (first, max(first, end)) if delta > 0 else (min(first, lowest), highest)


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(
        operators.MOVES | operators.EXTREMES | {"Cast", "Trilu"},
        lambda node, operands, scope: operands[0],
    ),
    **dict.fromkeys(("Concat", "ScatterElements", "ScatterND"), _extremes(min, max)),
    **dict.fromkeys(("ArgMax", "ArgMin", "NonZero", "TopK"), _positions),
    **dict.fromkeys(("Shape", "Size"), lambda node, operands, scope: (0, math.inf)),
    "Where": lambda node, operands, scope: _extremes(min, max)(node, operands[1:], scope),
    "Max": _extremes(max, max),
    "Min": _extremes(min, min),
    "Add": _corners(lambda one, other: one + other),
    "Sub": _corners(lambda one, other: one - other),
    "Mul": _corners(lambda one, other: one * other),
    "Div": _divided,
    "Mod": _modulo,
    "Abs": _absolute,
    "Relu": lambda node, operands, scope: (max(operands[0][0], 0), max(operands[0][1], 0)),
    "Neg": lambda node, operands, scope: (-operands[0][1], -operands[0][0]),
    "Clip": _clip,
    "Range": _range,
}
