"""Floats that are an integer times one constant plus another, which floats of few bits lose on the way."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.dtypes import Numbers
from hatch_epcontext.graph.number_format import FLOAT16
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.conventions import DEVIATIONS, SCALING
from hatch_epcontext.graph.values.integers import limits

_LONG = (np.dtype(np.int32), np.dtype(np.int64))

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)

_ARITHMETIC = frozenset({"Add", "Div", "Mul", "Sub"})

_MOVES = operators.LAYOUT | {"Expand", "Gather", "Slice"}
"""Operators between a Cast and its arithmetic whose result has values of their first input."""

_LARGEST, _EXACT, _END = FLOAT16.largest, 2048, 2.0**31
"""The largest float16; the integer up to which it has them all; and the first of more than 32 bits."""

_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-29, 1.0
"""The factor that leaves something of integers of 32 bits, and the largest of several of which one scales
large ones down.
"""

_FEW = 4096
"""Up to so many values nodes cost next to nothing."""

_ROUNDED = 2.0**-22
"""The error of constants, relative to them."""


class Affine(NamedTuple):
    """``scale * (whole + shift) + rest``: ``whole`` is an integer, and ``rest`` less than half a ``scale``.

    ``moves``: the nodes that first move its values, the last one first.
    """

    whole: str
    moves: tuple[onnx.NodeProto, ...]
    scale: Numbers
    shift: Numbers
    rest: Numbers


def affine(node: onnx.NodeProto, scope: Scope) -> Affine | None:
    """What ``node`` and those before it make of a Cast of long integers; None if anything else."""
    scale, offset = np.array(1.0), np.array(0.0)
    moves: list[onnx.NodeProto] = []
    seen = set[str]()
    while not _makes_floats(node) or scope.dtype(node.input[0]) not in _LONG:
        step = step_of(node, scope)
        if step is None or (moves and max(step.factor.size, step.summand.size) > 1):
            return None
        if graph.operator(node) in _MOVES:
            moves.append(node)
        scale, offset = scale * step.factor, scale * step.summand + offset
        maker = scope.maker(step.operand)
        # In an invalid graph a value may depend on itself.
        if maker is None or step.operand in seen:
            return None
        seen.add(step.operand)
        node = maker
    scale, offset = np.broadcast_arrays(scale, offset)
    if not (scale.all() and np.isfinite(scale).all() and np.isfinite(offset).all()):
        return None
    shift = np.round(offset / scale)
    if np.abs(shift).max() >= _END:
        return None
    rest = offset - scale * shift
    rest = np.where(np.abs(rest) <= _ROUNDED * np.abs(offset), 0.0, rest)
    return Affine(node.input[0], tuple(moves), scale, shift, rest)


class Step(NamedTuple):
    """A result is ``factor`` times ``operand`` plus ``summand``."""

    operand: str
    factor: Numbers = np.array(1.0)
    summand: Numbers = np.array(0.0)


def step_of(node: onnx.NodeProto, scope: Scope) -> Step | None:
    """What ``node`` makes of its operand; None if it is no arithmetic with stored floats, and no move."""
    operator = graph.operator(node)
    if _makes_floats(node) or operator in _MOVES:
        return Step(node.input[0])
    if operator not in _ARITHMETIC:
        return None
    for number, other in ((0, 1), (1, 0)):
        # Skips weights.
        stored = scope.stored.get(node.input[other])
        constant = graph.array_of(stored) if stored and math.prod(stored.dims) <= _FEW else None
        if constant is None or not constant.size or constant.dtype.kind != "f":
            continue
        value = constant.astype(np.float64)
        sign = -1.0 if operator == "Sub" and number == 1 else 1.0
        if operator in ("Add", "Sub"):
            summand = value if operator == "Add" else -sign * value
            return Step(node.input[number], np.full_like(value, sign), summand)
        if operator == "Mul" or (number == 0 and value.all()):
            return Step(node.input[number], value if operator == "Mul" else 1 / value)
    return None


def _makes_floats(node: onnx.NodeProto) -> bool:
    return graph.operator(node) == "Cast" and graph.attribute(node, "to", 0) in _FLOATS


def is_last(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether ``node`` is arithmetic, and not all that reads its result goes on in the same way."""
    return graph.operator(node) in _ARITHMETIC and not _goes_on(node.output[0], scope)


def of_operand(node: onnx.NodeProto, operand: int, scope: Scope) -> Affine | None:
    """As `affine`, of what makes an operand of ``node``."""
    maker = scope.maker(node.input[operand])
    return None if maker is None else affine(maker, scope)


def logarithm(node: onnx.NodeProto, scope: Scope) -> Affine | None:
    """The integers of whose sizes, of any number of digits, ``node`` is the logarithm."""
    value = of_operand(node, 0, scope) if graph.operator(node) == "Log" else None
    if value is None or value.rest.any() or (value.scale != 1).any():
        return None
    return value if is_long(value, scope) and _are_few(value, scope) else None


def scales(cast: onnx.NodeProto, scope: Scope) -> list[Numbers]:
    """The factors of all results of the integers of ``cast`` that are split; empty if there are others."""
    factors, waiting = [], [cast.output[0]]
    while waiting:
        name = waiting.pop()
        if any(output.name == name for output in scope.body.output):
            return []
        for node in scope.nodes_reading(name):
            if logarithm(node, scope):
                # It is right for all of them.
                factors.append(np.array(1 / _END))
                continue
            if _continues(node, name, scope) and not is_last(node, scope):
                waiting.append(node.output[0])
                continue
            value = affine(node, scope) if is_last(node, scope) else None
            if value is None or not is_split(value, scope):
                return []
            factors.append(value.scale)
    return factors


def _goes_on(name: str, scope: Scope) -> bool:
    readers = scope.nodes_reading(name)
    is_output = any(output.name == name for output in scope.body.output)
    return (
        bool(readers) and not is_output and all(_continues(node, name, scope) for node in readers)
    )


def _continues(node: onnx.NodeProto, name: str, scope: Scope) -> bool:
    if logarithm(node, scope):
        return True
    step = step_of(node, scope)
    if step is None or step.operand != name:
        return False
    return graph.operator(node) in _ARITHMETIC or _goes_on(node.output[0], scope)


def is_split(value: Affine, scope: Scope) -> bool:
    """Whether float16 has the results for integers that it has not, and these are not proved small.

    Pixels and other large tensors are not, although no graph says so.
    """
    sizes = np.abs(value.scale)
    is_scaled = _SMALLEST_SCALE < sizes.min() <= SCALING and sizes.max() <= _LARGEST_SCALE
    if not is_scaled or not is_long(value, scope):
        return False
    low, high = limits(value.whole, scope)
    is_proved = low > -_END and high < _END - 1
    return is_proved or _are_few(value, scope) or DEVIATIONS / sizes.min() > _LARGEST


def is_long(value: Affine, scope: Scope) -> bool:
    """Whether the integers are not proved to be such as float16 has."""
    low, high = limits(value.whole, scope)
    return max(-low, high) > _LARGEST


def _are_few(value: Affine, scope: Scope) -> bool:
    shape = scope.shape(value.whole)
    return shape is not None and math.prod(shape) <= _FEW


def is_shifted(value: Affine) -> bool:
    """Whether a difference to integers is lost that float16 does not have."""
    return bool(np.abs(value.shift).max() > _EXACT)
