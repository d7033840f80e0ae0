"""Sums, their means and logarithms, of which values on the way leave the range of float16."""

from __future__ import annotations

import math

import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.rewrites.matching import (
    beside_number,
    factors_of,
    is_read_once,
    number_beside,
    scale_of,
    value_squared,
)
from hatch_epcontext.graph.rewrites.roots import (
    different_factors,
    of_factors,
    power_of_total,
    scaled_power,
)
from hatch_epcontext.graph.rewriting import corrects
from hatch_epcontext.graph.scope import Scope

_LARGEST = float(np.finfo(np.float32).max)

_LEAST = 2.0**-20
"""The number from which float16 is exact to 6 %."""

_MOST_BITS, _LIMIT_BITS = 24, 15
"""The most bits by which smaller numbers are scaled, and those of the largest result."""


@corrects("mean", "Mul", "Div", beside=["ReduceSum"])
def _mean(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A sum that is read only by its division by the number of its values."""
    name, other = node.input
    if node.op_type == "Mul" and scope.stored.get(name) is not None:
        name, other = other, name
    total, number = scope.maker(name, "ReduceSum"), number_beside(name, other, scope)
    if total is None or not is_read_once(name, scope):
        return None
    sizes, axes = scope.sizes(total.input[0]), scope.axes(total)
    if not number or sizes is None or axes is None or builder.dtype.kind != "f":
        return None
    summed = [sizes[axis] for axis in axes]
    known = [size for size in summed if size is not None]
    factor = 1 / number if node.op_type == "Div" else number
    if known != summed or abs(factor * math.prod(known) - 1) > 1e-6:
        return None
    keepdims = graph.number(total, "keepdims", 1)
    return [builder.reduced("ReduceMean", total.input[0], axes, keepdims)]


def _at_least(name: str, scope: Scope) -> tuple[str, float] | None:
    """A value and the stored number that ``name`` is the larger of: by a Max, or by a Clip without an end."""
    node = scope.maker(name, "Clip")
    if node is None:
        return beside_number(name, "Max", scope)
    value, low, high = graph.operands(node, 3)
    least, most = (number_beside(value, bound, scope) for bound in (low, high))
    is_open = not high or (most is not None and most >= _LARGEST)
    return (value, least) if is_open and least is not None and least >= 0 else None


@corrects("log-power", "Log")
def _log_power(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """``Log(Max(a² + b², number))`` as twice that of the root, whose exponent is half as large.

    Spectra of audio, as in DNSMOS, have powers that float16 does not have; openWakeWord filters them. So has
    the level of sound: ``Log(ReduceMean(x²) + number)``.
    """
    if factors := different_factors(node.input[0], scope):
        return [of_factors("Log", "Add", factors, builder)]
    if level := _root_of_level(node.input[0], scope, builder):
        return [builder.add("Mul", builder.add("Log", level), builder.number(2))]
    return _log_of_squares(node, scope, builder)


def _log_of_squares(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """That of at least a number, or of a number and more, and the sum of two squares; also behind filters,
    and then of one.
    """
    added = beside_number(node.input[0], "Add", scope)
    limited = added or _at_least(node.input[0], scope)
    if limited is None:
        return None
    power, number = limited
    # Some square a root again.
    root = scope.maker(value_squared(power, scope) or "", "Sqrt")
    if root is not None:
        power = root.input[0]
    product, weights, is_first = scope.maker(power, "MatMul"), "", False
    if product is not None:
        is_first = scope.constant(product.input[0]) is not None
        weights, power = product.input if is_first else reversed(product.input)
        filters = scope.constant(weights)
        if filters is None or filters.ndim < 2 or (filters < 0).any():
            return None
    values = _squared_values(power, scope, builder, least=1 if weights else 2)
    if not values:
        return None
    least = math.sqrt(number)
    largest = builder.add("Abs", values[0])
    if len(values) > 1:
        largest = builder.add("Max", largest, builder.add("Abs", values[1]))
    if weights:
        largest = builder.reduced("ReduceMax", largest, [-2 if is_first else -1], keepdims=1)
    scale = scale_of(largest, least, 64, builder)
    squares = [scaled_power(value, scale, 2.0, builder) for value in values]
    power = builder.add("Add", *squares) if len(squares) > 1 else squares[0]
    if weights:
        power = builder.add("MatMul", *((weights, power) if is_first else (power, weights)))
    if added:
        power = builder.add("Add", power, scaled_power(builder.number(least), scale, 2.0, builder))
    result = builder.add("Mul", builder.add("Sqrt", power), scale)
    if not added:
        result = builder.add("Max", result, builder.number(least))
    return [builder.add("Mul", builder.add("Log", result), builder.number(2))]


def _root_of_level(value: str, scope: Scope, builder: Builder) -> str | None:
    """That of a sum or a mean of squares, to which a number is added, or that is at least a number."""
    level, least = _at_least(value, scope) or (value, None)
    root = power_of_total(level, 0.5, scope, builder)
    if root is None or least is None:
        return root
    return builder.add("Max", root, builder.number(math.sqrt(least)))


def _squared_values(name: str, scope: Scope, builder: Builder, least: int) -> list[str]:
    """The values, at ``least`` so many, of whose squares ``name`` is the sum, moved like that; else none."""
    name, moves = scope.origin_and_moves(name, {"Transpose"})
    total = scope.maker(name, "Add")
    squares = [name] if total is None else total.input
    values = [value for square in squares if (value := value_squared(square, scope))]
    if not least <= len(values) == len(squares):
        return []
    if moves and any(scope.sizes(value) != scope.sizes(name) for value in values):
        # The axes of a value that is broadcast are others.
        return []
    for move in reversed(moves):
        # The axes, or all in reverse order.
        perm = list(graph.attribute(move, "perm", []))
        values = [
            builder.transpose(value, perm) if perm else builder.add("Transpose", value)
            for value in values
        ]
    return values


@corrects("log-floor", "Log")
def _log_of_more(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """``Log(x + number)`` or ``Log(Max(x, number))`` of a number that float16 does not have.

    As the sum of two: up to a limit of ``x`` it is scaled, so that the scaled number exists.
    """
    added = beside_number(node.input[0], "Add", scope)
    value, number = added or _at_least(node.input[0], scope) or ("", 0.0)
    if not _LEAST / 2**_MOST_BITS < number < _LEAST or builder.dtype.kind != "f":
        return None
    bits = math.ceil(math.log2(_LEAST / number))
    limit = 2.0 ** (_LIMIT_BITS - bits)
    if root := value_squared(value, scope):
        small = builder.add("Min", builder.add("Abs", root), builder.number(math.sqrt(limit)))
        small = builder.add("Mul", small, builder.number(2.0 ** (bits / 2)))
        small = builder.add("Mul", small, small)
    else:
        small = builder.add("Min", value, builder.number(limit))
        for part in (bits // 2, bits - bits // 2):
            small = builder.add("Mul", small, builder.number(2.0**part))
    small = builder.add("Add" if added else "Max", small, builder.number(number * 2.0**bits))
    large = builder.add("Log", builder.add("Max", value, builder.number(limit)))
    total = builder.add("Add", builder.add("Log", small), large)
    return [builder.add("Sub", total, builder.number(_LIMIT_BITS * math.log(2)))]


@corrects("log-sum-exp", "Div", "Log", beside=["Exp", "ReduceSum"])
def _sum_of_powers(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """``Log(ReduceSum(Exp(x)))``, or an Exp divided by such a sum, of x less its largest value.

    It is the definition of ReduceLogSumExp and Softmax; float16 ends at the Exp of 11.
    """
    total = scope.maker(node.input[-1], "ReduceSum")
    if total is None:
        return None
    power, axes = scope.maker(total.input[0], "Exp"), scope.axes(total)
    keeps = graph.number(total, "keepdims", 1)
    if power is None or axes is None or builder.dtype.kind != "f":
        return None
    value, is_share = power.input[0], node.op_type == "Div"
    if is_share and (node.input[0] != total.input[0] or not keeps):
        return None
    less = scope.maker(value, "Sub")
    if less is not None and scope.maker(less.input[1], "ReduceMax") is not None:
        return None
    largest = builder.reduced("ReduceMax", value, axes, keepdims=1)
    power_of_less = builder.add("Exp", builder.add("Sub", value, largest))
    sum_ = builder.reduced("ReduceSum", power_of_less, axes, keepdims=keeps)
    if is_share:
        return [builder.add("Div", power_of_less, sum_)]
    if not keeps:
        largest = builder.squeeze(largest, axes)
    return [builder.add("Add", builder.add("Log", sum_), largest)]


@corrects("variance", "Sub", beside=["ReduceMean"])
def _covariance(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The mean of squares less the square of the mean, and so of products: both are nearly equal for nearly
    equal values.
    """
    product, means = scope.maker(node.input[0], "ReduceMean"), factors_of(node.input[1], scope)
    if product is None or means is None:
        return None
    values, axes = factors_of(product.input[0], scope), scope.axes(product)
    keeps = graph.number(product, "keepdims", 1)
    by_mean = {
        maker.input[0]: mean
        for mean in means
        if (maker := scope.maker(mean, "ReduceMean")) is not None
        and scope.axes(maker) == axes
        and graph.number(maker, "keepdims", 1) == keeps
    }
    if values is None or axes is None or by_mean.keys() != {*values}:
        return None
    if len({scope.shape(value) for value in values}) > 1:
        return None
    away = {}
    for value, mean in by_mean.items():
        kept = mean if keeps else builder.reduced("ReduceMean", value, axes, keepdims=1)
        away[value] = builder.add("Sub", value, kept)
    square = builder.add("Mul", *(away[value] for value in values))
    return [builder.reduced("ReduceMean", square, axes, keepdims=keeps)]
