"""Products that leave the range of float16 only on the way: of factors that are scaled before."""

from __future__ import annotations

import functools
import itertools
import math
import operator

import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.dtypes import Numbers
from hatch_epcontext.graph.rewrites.matching import factors_of, is_read_once, is_scaled
from hatch_epcontext.graph.rewriting import corrects
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.affine import step_of

_OVERSHOOT = 2.0
"""How much larger a product on the way is than the result if one number is better than several."""

_FEWEST_BITS, _MANY_BITS = 4, 6
"""The fewest bits by which it pays to scale a product: the root of a layer's width has fewer. And those from
which on a number is a change of units.
"""

_MOST_BITS = 7
"""The most bits by which one factor alone is scaled: small ones lose as many."""

_LARGE, _SCALE = 128.0, 256.0
"""From which size on factors are scaled down, and by how much: then float16 has all their products."""

_LEAST = 2.0**-12
"""The smallest number that multiplies factors: products of usual ones stay above 6e-5."""

_MAX_DEPTH = 3
"""How many products within each other are followed."""


def _numbers(name: str, scope: Scope) -> tuple[str, list[Numbers]]:
    """A value, and the stored numbers by which nodes multiply it to make ``name``, in order."""
    numbers = dict[str, Numbers]()
    while (maker := scope.maker(name, "Div", "Mul")) is not None:
        step = step_of(maker, scope)
        # In an invalid graph a value may depend on itself.
        if step is None or name in numbers:
            break
        numbers[name] = step.factor
        name = step.operand
    return name, [*reversed(numbers.values())]


def _is_smaller_product(node: onnx.NodeProto, scope: Scope, bits: int) -> bool:
    """Whether numbers make a product, or a sum of products, smaller by so many powers of two."""
    value, numbers = _numbers(node.output[0], scope)
    number = np.asarray(math.prod(numbers))
    if number.max() > 2.0**-bits or number.min() <= 0:
        return False
    if number.size == 1:
        fits = number.ndim <= len(scope.sizes(value) or ())
    else:
        fits = scope.maker(value, "Mul", "Pow") is not None
    return fits and _summed_factors(value, scope) is not None


def _has_other_unit(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether numbers multiply a value by more on the way than together, or make a product much smaller."""
    numbers = _numbers(node.output[0], scope)[1]
    sizes = (float(np.abs(number).max()) for number in numbers)
    *before, last = itertools.accumulate(sizes, operator.mul, initial=1.0)
    is_larger = max(before, default=0.0) > _OVERSHOOT * max(last, 1.0)
    return is_larger or _is_smaller_product(node, scope, _MANY_BITS)


def _computed_factors(name: str, scope: Scope) -> tuple[str, str] | None:
    """The two values, no constants, whose product, also of matrices, is ``name``."""
    product, factors = scope.maker(name, "MatMul"), factors_of(name, scope)
    if product is not None and is_read_once(name, scope):
        factors = product.input[0], product.input[1]
    is_stored = any(scope.stored.get(factor) is not None for factor in factors or ())
    return None if is_stored else factors


def _summed_factors(name: str, scope: Scope) -> tuple[str, str] | None:
    """Those of a product, or of one of which ``name`` is the sum."""
    if (total := scope.maker(name, "ReduceSum")) is None:
        return _computed_factors(name, scope)
    return _computed_factors(total.input[0], scope) if is_read_once(name, scope) else None


def _product(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The product of a value and one number in place of several, or of smaller factors."""
    value, numbers = _numbers(node.output[0], scope)
    number, total = np.asarray(math.prod(numbers)), scope.maker(value)
    if not _is_smaller_product(node, scope, _FEWEST_BITS) or total is None:
        return [builder.add("Mul", value, builder.number(number))]
    if number.size == 1:
        number = number.reshape(())
    # The rest comes last: small results keep their bits.
    before = np.maximum(number, _LEAST)
    if total.op_type == "ReduceSum":
        product = _times(total.input[0], before, scope, builder)
        (result,) = builder.add_like(total, total.op_type, [product, *total.input[1:]])
    else:
        result = _times(value, before, scope, builder)
    if (number < _LEAST).any():
        result = builder.add("Mul", result, builder.number(number / before))
    return [result]


def _times(value: str, number: Numbers, scope: Scope, builder: Builder) -> str:
    """The product ``value`` times ``number``, which multiplies one factor, or a root of it all of them."""
    product = scope.maker(value, "MatMul")
    factors = _leaves(value, scope) if product is None else [*product.input]
    single = [factor for factor in factors if factors.count(factor) == 1]
    if single and number.min() >= 2.0**-_MOST_BITS:
        changed, share = {single[0]}, number
    else:
        changed, share = {*factors}, number ** (1 / len(factors))
    scaled = {factor: _scaled(factor, share, scope, builder) for factor in sorted(changed)}
    parts = [scaled.get(factor, factor) for factor in factors]
    multiply = "Mul" if product is None else "MatMul"
    return functools.reduce(lambda one, other: builder.add(multiply, one, other), parts)


def _leaves(value: str, scope: Scope, depth: int = _MAX_DEPTH) -> list[str]:
    """The factors of which ``value`` is a product, itself if it is none."""
    factors = _computed_factors(value, scope) if depth else None
    if factors is None or factors_of(value, scope) is None:
        return [value]
    return [leaf for factor in factors for leaf in _leaves(factor, scope, depth - 1)]


def _scaled(factor: str, number: Numbers, scope: Scope, builder: Builder) -> str:
    """``factor`` times ``number``, and in one product with numbers that multiply it before."""
    value, numbers = _numbers(factor, scope)
    return builder.add("Mul", value, builder.number(math.prod(numbers) * number))


def _may_overflow(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether ``node`` is a mean of products, makes one smaller, or divides a product with a number."""
    if node.op_type == "ReduceMean":
        factors = _computed_factors(node.input[0], scope)
        shapes = {scope.shape(factor) for factor in factors or ()}
        is_known = len(shapes) == 1 and None not in shapes
        return is_known and not any(is_scaled(factor, scope) for factor in factors or ())
    if _is_smaller_product(node, scope, _FEWEST_BITS):
        return True
    return node.op_type == "Div" and _numerator(node, scope) is not None


def _numerator(node: onnx.NodeProto, scope: Scope) -> tuple[str, Numbers] | None:
    """A value and the number by which it is multiplied before ``node``, a Div, divides it by another one."""
    if scope.constant(node.input[1]) is not None:
        return None
    value, numbers = _numbers(node.input[0], scope)
    number = np.asarray(math.prod(numbers))
    is_larger = numbers and np.abs(number).min() >= 2.0**_FEWEST_BITS
    return (value, number) if is_larger and is_read_once(node.input[0], scope) else None


_factors = corrects("factors", "Div", "Mul", applies=_has_other_unit)(_product)


@corrects("scaled-product", "Div", "Mul", "ReduceMean", applies=_may_overflow)
def _scale(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A product of smaller factors, or a quotient that is made larger at last."""
    if node.op_type == "ReduceMean":
        return _mean(node, scope, builder)
    numerator = _numerator(node, scope) if node.op_type == "Div" else None
    if numerator is None:
        return _product(node, scope, builder)
    quotient = builder.add("Div", numerator[0], node.input[1])
    return [builder.add("Mul", quotient, builder.number(numerator[1]))]


def _mean(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The mean of products of factors, of which large ones are scaled by a power of two: that is exact."""
    factors, axes = _computed_factors(node.input[0], scope), scope.axes(node)
    if factors is None or axes is None or builder.dtype.kind != "f":
        return None
    down, up = dict[str, str](), dict[str, str]()
    for factor in dict.fromkeys(factors):
        largest = builder.reduced("ReduceMax", builder.add("Abs", factor), axes, keepdims=1)
        is_large = builder.add("Greater", largest, builder.number(_LARGE))
        smaller = builder.add("Where", is_large, builder.number(1 / _SCALE), builder.number(1.0))
        down[factor] = builder.add("Mul", factor, smaller)
        up[factor] = builder.add("Where", is_large, builder.number(_SCALE), builder.number(1.0))
    product = builder.add("Mul", *(down[factor] for factor in factors))
    result = builder.reduced("ReduceMean", product, axes, keepdims=1)
    for factor in factors:
        result = builder.add("Mul", result, up[factor])
    return [result if graph.number(node, "keepdims", 1) else builder.squeeze(result, axes)]
