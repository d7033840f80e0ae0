"""Roots of sums of squares, and powers of other powers, of which float16 has only the results."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

import numpy as np
import onnx

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.rewrites.matching import (
    beside_number,
    factors_of,
    is_scaled,
    number_beside,
    scale_of,
)
from hatch_epcontext.graph.rewriting import corrects
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.affine import step_of

_POOLS = frozenset({"AveragePool", "GlobalAveragePool"})
_MEANS = _POOLS | {"ReduceMean"}
_TOTALS = _MEANS | {"ReduceSum"}

_LARGEST_MEAN, _LARGEST_SUMMAND = 64.0, 16.0
"""The power of the largest value, after it is scaled, in a mean and in a sum."""


@dataclass(frozen=True)
class _Total:
    """``number``, and ``factor`` times what the nodes ``steps``, the last one first, make of the power of
    ``value`` by ``exponent``.
    """

    value: str
    exponent: float
    steps: Sequence[onnx.NodeProto]
    factor: float = 1.0
    number: float = 0.0


def _is_of_powers(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether a Pow has a stored exponent, and its base is made of what may be powers."""
    if node.op_type != "Pow":
        return True
    name, _, _ = _origin_and_factor(node.input[0], _TOTALS, scope)
    is_made = scope.maker(name, "Add", "Exp", "Mul", "Pow") is not None
    return is_made and number_beside(node.input[0], node.input[1], scope) is not None


@corrects("scaled-square", "Pow", "ReduceL2", "Sqrt", applies=_is_of_powers)
def _root(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """``Sqrt(ReduceMean(x²) + number)``, also of a sum, or a ReduceL2, of values that are first scaled by the
    largest; so ``Pow`` of other powers, which is one power without a sum; and ``Sqrt(a * b)`` as the product
    of two roots.

    The RMSNorm of language models such as T5 has values whose squares float16 does not have.
    """
    value = node.input[0]
    if node.op_type == "ReduceL2":
        result = _of_scaled(_Total(value, 2.0, [node]), 0.5, scope, builder)
        return None if result is None else [result]
    exponent = 0.5 if node.op_type == "Sqrt" else number_beside(value, node.input[1], scope)
    if not exponent or builder.dtype.kind != "f":
        return None
    if exponent == 0.5 and (factors := different_factors(value, scope)):
        return [of_factors("Sqrt", "Mul", factors, builder)]
    result = power_of_total(value, exponent, scope, builder)
    result = result or _power_of_power(value, exponent, scope, builder)
    return None if result is None else [result]


def different_factors(name: str, scope: Scope) -> tuple[str, str] | None:
    """Two different values whose product is ``name``; no constants, nor what is small: roots and signs."""
    factors = factors_of(name, scope)
    if factors is None or len({*factors}) == 1:
        return None
    are_small = any(scope.maker(factor, "Sqrt", "Sign") is not None for factor in factors)
    is_stored = any(scope.constant(factor) is not None for factor in factors)
    return None if are_small or is_stored else factors


def of_factors(operator: str, join: str, factors: Sequence[str], builder: Builder) -> str:
    """The root or the logarithm of a product, of the size of each factor and of the sign."""
    sign = builder.add("Mul", *(builder.add("Sign", factor) for factor in factors))
    sizes = (builder.add("Abs", factor) for factor in factors)
    result = builder.add(join, *(builder.add(operator, size) for size in sizes))
    return builder.add(join, result, builder.add(operator, sign))


def power_of_total(value: str, exponent: float, scope: Scope, builder: Builder) -> str | None:
    """That of sums or means of powers, or of the sum of two squares, to which a number may be added."""
    name, number = beside_number(value, "Add", scope) or (value, 0.0)
    if (two := scope.maker(name, "Add")) is not None:
        return _of_two(two, number, exponent, scope, builder)
    name, factor, steps = _origin_and_factor(name, _TOTALS, scope)
    power = _base_and_exponent(name, scope)
    if power is None or not steps or power[1] <= 0:
        return None
    return _of_scaled(_Total(*power, steps, factor, number), exponent, scope, builder)


def _origin_and_factor(
    name: str, through: Container[str], scope: Scope
) -> tuple[str, float, list[onnx.NodeProto]]:
    """The value of which nodes ``through``, the last one first, and positive numbers that multiply it make
    ``name``; the product of these numbers; and the nodes.
    """
    factor, steps, known = 1.0, list[onnx.NodeProto](), set[str]()
    # In an invalid graph a value may depend on itself.
    while name not in known and (node := scope.maker(name)) is not None:
        known.add(name)
        if node.op_type in through:
            steps.append(node)
            name = node.input[0]
            continue
        step = step_of(node, scope) if node.op_type in ("Div", "Mul") else None
        if step is None or step.factor.size != 1 or step.factor.min() <= 0:
            break
        if step.factor.ndim > len(scope.sizes(step.operand) or ()):
            break
        factor, name = factor * step.factor.item(), step.operand
    return name, factor, steps


def _base_and_exponent(name: str, scope: Scope) -> tuple[str, float] | None:
    """What ``name`` is a power of, and the stored exponent."""
    node = scope.maker(name, "Mul", "Pow")
    if node is None:
        return None
    value, other = graph.operands(node, 2)
    if node.op_type == "Pow":
        exponent = number_beside(value, other, scope)
        return None if exponent is None else (value, exponent)
    if value != other:
        return None
    base, exponent = _base_and_exponent(value, scope) or (value, 1.0)
    return base, 2 * exponent


def _of_two(
    total: onnx.NodeProto, number: float, exponent: float, scope: Scope, builder: Builder
) -> str | None:
    """The power of ``number`` and ``total``, the sum of two squares, scaled by the larger value."""
    powers = [_base_and_exponent(name, scope) for name in total.input]
    values = [power[0] for power in powers if power is not None and power[1] == 2]
    if len(values) != 2 or any(is_scaled(value, scope) for value in values):
        return None
    least = math.sqrt(number)
    largest = builder.add("Max", *(builder.add("Abs", value) for value in values))
    scale = scale_of(largest, least, 64, builder)
    power = builder.add("Add", *(scaled_power(value, scale, 2.0, builder) for value in values))
    if least:
        power = builder.add("Add", power, scaled_power(builder.number(least), scale, 2.0, builder))
    result = _power(power, exponent, builder)
    return builder.add("Mul", result, _power(scale, 2 * exponent, builder))


def _of_scaled(total: _Total, exponent: float, scope: Scope, builder: Builder) -> str | None:
    """The power of ``total``, of values that are scaled by the largest."""
    if is_scaled(total.value, scope):
        return None
    rank = len(scope.sizes(total.value) or ())
    kept, steps = [*range(rank)], list[tuple[onnx.NodeProto, list[int]]]()
    for step in reversed(total.steps):
        is_pool = step.op_type in _POOLS
        axes = [*range(2, rank)] if is_pool else scope.axes(step)
        if axes is None or (is_pool and len(kept) < rank):
            return None
        axes = [kept[axis] for axis in axes]
        steps.append((step, axes))
        if not is_pool and not graph.number(step, "keepdims", 1):
            kept = [axis for axis in kept if axis not in axes]
    # As it is added to what the factor multiplies.
    least = (total.number / total.factor) ** (1 / total.exponent)
    every = sorted({axis for _, axes in steps for axis in axes})
    is_mean = all(step.op_type in _MEANS for step, _ in steps)
    highest = _LARGEST_MEAN if is_mean else _LARGEST_SUMMAND
    largest = builder.reduced("ReduceMax", builder.add("Abs", total.value), every, keepdims=1)
    scale = scale_of(largest, least, highest ** (1 / total.exponent), builder)
    power = scaled_power(total.value, scale, total.exponent, builder)
    for step, axes in steps:
        if step.op_type in _POOLS:
            (power,) = builder.add_like(step, step.op_type, [power])
        else:
            operator = "ReduceMean" if step.op_type == "ReduceMean" else "ReduceSum"
            power = builder.reduced(operator, power, axes, keepdims=1)
    if least:
        least_power = scaled_power(builder.number(least), scale, total.exponent, builder)
        power = builder.add("Add", power, least_power)
    result = _power(power, exponent, builder)
    result = builder.add("Mul", result, _power(scale, total.exponent * exponent, builder))
    if total.factor != 1:
        result = builder.add("Mul", result, builder.number(total.factor**exponent))
    squeezed = [axis for axis in every if axis not in kept]
    return builder.squeeze(result, squeezed) if squeezed else result


def scaled_power(value: str, scale: str, exponent: float, builder: Builder) -> str:
    """The power of ``value`` after it is divided by ``scale``."""
    return _power(builder.add("Div", value, scale), exponent, builder)


def _power(value: str, exponent: float, builder: Builder) -> str:
    """``value`` to a power, of which EPs compute products right for all values."""
    if exponent == 1:
        return value
    if exponent == 0.5:
        return builder.add("Sqrt", value)
    if exponent in (2, 4, 8):
        half = _power(value, exponent / 2, builder)
        return builder.add("Mul", half, half)
    return builder.add("Pow", value, builder.number(exponent))


def _power_of_power(value: str, exponent: float, scope: Scope, builder: Builder) -> str | None:
    """That of a power and of numbers that multiply it, which become a part of its exponent or of its base."""
    name, factor, _ = _origin_and_factor(value, (), scope)
    node = scope.maker(name, "Exp", "Pow")
    base = scope.constant(node.input[0]) if node is not None else None
    if node is not None and (node.op_type == "Exp" or (base is not None and (base > 0).all())):
        logarithms = np.ones(()) if base is None or node.op_type == "Exp" else np.log(base)
        if not logarithms.all():
            return None
        power = node.input[-1]
        if scope.dtype(power) != builder.dtype:
            power = builder.add("Cast", power, to=scope.elem_type(node.input[0]))
        power = builder.add("Mul", power, builder.number(exponent))
        if factor != 1:
            more = builder.number(math.log(factor) * exponent / logarithms)
            power = builder.add("Add", power, more)
        (result,) = builder.add_like(node, node.op_type, [*node.input[:-1], power])
        return result
    known = _base_and_exponent(name, scope)
    # The root of a negative number is none, also if it is squared then.
    if known is None or not known[1] or known[1] % 2:
        return None
    size = builder.add("Abs", known[0])
    if factor != 1:
        size = builder.add("Mul", size, builder.number(factor ** (1 / known[1])))
    return _power(size, known[1] * exponent, builder)
