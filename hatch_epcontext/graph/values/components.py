"""Components by which a graph divides the others, such as the depth of points before a camera."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import onnx

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.dtypes import Numbers
from hatch_epcontext.graph.scope import Scope, UnknownError
from hatch_epcontext.graph.values.affine import step_of
from hatch_epcontext.graph.values.linear import INVALID

_AWAY = 4.0
"""How many deviations away from 0 a component is by which others are divided."""


@dataclass(frozen=True)
class _Component:
    """The sum of the values of ``name`` along the last axis, each times its ``weights``, plus ``offset``;
    before it is one of several, ``weights`` is a single number.
    """

    name: str
    weights: Numbers
    offset: float = 0.0


def center_away_from_pole(node: onnx.NodeProto, scope: Scope) -> tuple[str, Numbers] | None:
    """The input of which a component, perhaps a turned one, is a divisor in ``node``, and the values of shape
    ``(components,)`` around which that is positive; None if anything else is.
    """
    if node.op_type not in ("Div", "Reciprocal"):
        return None
    component: _Component | None = _Component(node.input[-1], np.ones(1))
    # In an invalid graph a value may depend on itself.
    for _ in scope.nodes:
        if component is None or (maker := scope.maker(component.name)) is None:
            break
        try:
            component = _before(maker, component, scope)
        except (*INVALID, UnknownError):
            return None
    if component is None or component.weights.size == 1 or not component.weights.any():
        return None
    length = float(np.linalg.norm(component.weights))
    shift = max(component.offset, _AWAY * length) - component.offset
    center = shift * component.weights / length**2
    return (component.name, center) if 0 < shift < math.inf else None


def _before(node: onnx.NodeProto, after: _Component, scope: Scope) -> _Component | None:
    """What ``after``, which ``node`` makes, is of the operand of that; None if it is no component of it."""
    operator, weights = node.op_type, after.weights
    if operator in operators.PICKS:
        return _picked(node, after, scope)
    computed = [name for name in node.input if name and scope.constant(name) is None]
    if operator in ("Clip", "Max") and len(computed) == 1:
        # What keeps it from 0 is for few values.
        return replace(after, name=computed[0])
    if operator in ("Gemm", "MatMul") and computed == [node.input[0]]:
        return _turned(node, after, scope)
    step = step_of(node, scope)
    if step is None or not {1, weights.size} >= {step.factor.size, step.summand.size}:
        return None
    if weights.size > 1 and operator in operators.LAYOUT:
        sizes = (scope.fixed_shape(name)[-1:] for name in (step.operand, after.name))
        if operator == "Transpose" or {*sizes} != {weights.shape}:
            return None
    factor, summand = (np.broadcast_to(n.ravel(), weights.shape) for n in step[1:])
    offset = after.offset + float(weights @ summand)
    return _Component(step.operand, weights * factor, offset)


def _turned(node: onnx.NodeProto, after: _Component, scope: Scope) -> _Component | None:
    """The same, if ``node`` multiplies by a stored matrix, such as a camera's."""
    matrix, *summand = (scope.stored_values(name).astype(np.float64) for name in node.input[1:])
    factors = {graph.attribute(node, name, 1.0) for name in ("alpha", "beta")}
    if factors != {1.0} or graph.attribute(node, "transA", 0) or matrix.ndim != 2:
        return None
    if graph.attribute(node, "transB", 0):
        matrix = matrix.T
    offset = sum(float(np.sum(after.weights * number)) for number in summand)
    return _Component(node.input[0], matrix @ after.weights, after.offset + offset)


def _picked(node: onnx.NodeProto, after: _Component, scope: Scope) -> _Component | None:
    """The same, if ``node`` picks some numbers along the last axis."""
    rank, weights = len(scope.fixed_shape(node.input[0])), after.weights
    numbers = np.arange(scope.fixed_shape(node.input[0])[-1])
    if node.op_type == "Split":
        sizes = [scope.fixed_shape(name)[-1] for name in node.output]
        number = [*node.output].index(after.name)
        axis = int(graph.attribute(node, "axis", 0))
        picked = numbers[sum(sizes[:number]) :][: sizes[number]]
    elif node.op_type == "Slice":
        start, end, axis, *stride = (int(scope.stored_values(n).item()) for n in node.input[1:])
        picked = numbers[slice(start, end, *stride)]
    elif node.op_type == "Gather":
        axis = int(graph.attribute(node, "axis", 0))
        picked = numbers[scope.stored_values(node.input[1])].ravel()
    else:
        return None
    if axis not in (-1, rank - 1) or picked.size != weights.size:
        return None
    of_all = np.zeros(numbers.size)
    of_all[picked] = weights
    return _Component(node.input[0], of_all, after.offset)
