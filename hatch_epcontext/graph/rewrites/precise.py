"""What to compute instead of nodes that EPs compute wrong, or inexactly, in float16.

Those of `number_format.ALWAYS` lose nothing and add hardly any nodes. Those of `number_format.CORRECTIONS`
add nodes, whose cost on NPUs is not measured: they are for models that, as a run has shown, need them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.builder import BOUNDS_AS_INPUTS, Builder, Outputs
from hatch_epcontext.graph.number_format import ALWAYS, CORRECTIONS, FLOAT16, FUSING, RewriteName
from hatch_epcontext.graph.rewrites import factors, integers, long_integers
from hatch_epcontext.graph.rewrites.matching import (
    factors_of,
    is_read_once,
    is_scaled,
    number_beside,
    scale_of,
    value_squared,
)
from hatch_epcontext.graph.rewrites.pools import is_padded_unevenly, pad_before
from hatch_epcontext.graph.rewriting import Operators, Rewrite, Rules, onnx_operators
from hatch_epcontext.graph.scope import Scope, Types
from hatch_epcontext.graph.values.linear import ends

_BROADCASTING = 8
"""The opset from which Max and Min accept a number beside a tensor."""

_LARGEST = float(np.finfo(np.float32).max)

_COMPARISONS = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual")

_LEAST = 2.0**-20
"""The number from which float16 is exact to 6 %."""

_SMALL_ANGLE = 2.0**-5
"""The angle up to which its sine and tangent are the angle itself, to half a unit of float16."""

_MOST_BITS, _LIMIT_BITS = 24, 15
"""The most bits by which smaller numbers are scaled, and those of the largest result."""


def _power(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    value, name = node.input
    number = number_beside(value, scope.origin(name, ("Cast", "Identity")), scope)
    if number == 2:
        return [builder.add("Mul", value, value)]
    dtype = scope.dtype(value)
    is_float = dtype is not None and dtype.kind == "f"
    return [builder.add("Sqrt", value)] if number == 0.5 and is_float else None


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


def _clip(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Clip of an opset in which the bounds are attributes."""
    if builder.opset >= BOUNDS_AS_INPUTS:
        return None
    value = node.input[0]
    for operator, bound in (("Max", "min"), ("Min", "max")):
        number = graph.attribute(node, bound, _LARGEST)
        if abs(number) < _LARGEST:
            value = builder.add(operator, value, builder.number(number))
    return [value]


def _small_angle(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A small angle itself in place of its sine or tangent, and a small tangent in place of its angle."""
    if builder.opset < integers.COMPARING:
        return None
    value = node.input[0]
    is_small = builder.add("Less", builder.add("Abs", value), builder.number(_SMALL_ANGLE))
    return [builder.add("Where", is_small, value, builder.add(node.op_type, value))]


_TRANSPOSED = frozenset(
    """
    AveragePool BatchNormalization Conv ConvTranspose DepthToSpace GlobalAveragePool GlobalMaxPool GridSample
    InstanceNormalization LRN LpPool MaxPool QLinearConv Resize SpaceToDepth Transpose Upsample
    """.split()  # noqa: SIM905
)
"""Transpose, and the operators around which ONNX Runtime adds one where an EP wants channels last."""

_MOVED_PAST = tuple(
    """
    Abs Add ArgMax ArgMin Cast Clip Concat Div Identity Max Min Mod Mul Neg Pad Pow ReduceMax ReduceMin
    ReduceSum Relu Reshape Sign Slice Split Squeeze Sub Tile Transpose Unsqueeze Where
    """.split()  # noqa: SIM905
)
"""Operators of integers behind which ONNX Runtime moves a Transpose."""

_NOT_MOVED_PAST = operators.GATHERS | {
    *("CumSum", "Expand", "Gemm", "MatMul", "ScatterElements", "ScatterND", "TopK", "Trilu")
}


def _transposed_output(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A node behind which no Transpose can be moved, after one with an int64 or uint8 output of the graph:
    an Expand to its own shape, or for uint8 a Cast of a single dimension.
    """
    ends = _outputs_to_keep(scope.body).intersection(node.output)
    if not _is_transposed(ends, scope):
        return None
    if scope.dtype(node.output[0]) == np.uint8:
        return _bytes_in_one_dimension(node, scope, builder)
    values = builder.add_like(node, node.op_type, node.input)
    for index, name in enumerate(node.output):
        shape = scope.shape(name)
        if name in ends and shape and scope.dtype(name) == np.int64:
            values[index] = builder.add("Expand", values[index], builder.integers(shape))
    return values


def _bytes_in_one_dimension(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Bytes that are made in a single dimension, which no Transpose changes, and then get their shape."""
    (output,) = node.output[:1]
    shape = scope.shape(output)
    above = scope.needed_nodes([output], lambda name: scope.dtype(name) == np.uint8)
    makers = {graph.operator(scope.nodes[index]) for index in above}
    is_quantized = not operators.QUANTIZES.isdisjoint(makers) or any(
        map(operators.is_of_integers, makers)
    )
    # EPs take a Transpose of what is quantized.
    if not shape or len(node.output) > 1 or is_quantized:
        return None
    name, moves = output, list[onnx.NodeProto]()
    while (move := scope.maker(name, *operators.LAYOUT)) is not None:
        moves.append(move)
        name = move.input[0]
    if (cast := scope.maker(name, "Cast")) is not None:
        value = cast.input[0]
    else:
        made = name if moves else builder.add_like(node, node.op_type, node.input)[0]
        value = builder.add("Cast", made, to=onnx.TensorProto.INT32)
    for move in reversed(moves):
        (value,) = builder.add_like(move, move.op_type, [value, *move.input[1:]])
        # Others may still read what it makes of bytes.
        builder.nodes[-1].name = builder.fresh(move.name or move.op_type)
    flat = builder.add("Cast", builder.reshape(value, [-1]), to=onnx.TensorProto.UINT8)
    return [builder.reshape(flat, shape)]


def _is_transposed(names: Iterable[str], scope: Scope) -> bool:
    """Whether a Transpose could be moved to one of these values."""
    above = scope.needed_nodes(
        names, lambda name: scope.nodes[scope.makers[name]].op_type not in _NOT_MOVED_PAST
    )
    return not _TRANSPOSED.isdisjoint(scope.nodes[index].op_type for index in above)


def _expand_int64_inputs(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Any node, with an Expand and a Squeeze before the int64 inputs to which a Transpose could be moved.

    ONNX Runtime removes an Expand to the same shape in the middle of a graph.
    """
    inputs = list(node.input)
    for index, name in enumerate(inputs):
        shape = scope.shape(name)
        if shape and scope.dtype(name) == np.int64 and _is_transposed([name], scope):
            expanded = builder.add("Expand", name, builder.integers([1, *shape]))
            inputs[index] = builder.squeeze(expanded, [0])
    return None if inputs == node.input else builder.add_like(node, node.op_type, inputs)


expand_int64_inputs = Rewrite(
    "expand_int64_inputs",
    Operators(onnx_operators, onnx.defs.has),
    _expand_int64_inputs,
    nested=False,
    fault="transposed-outputs",
)


_NOT_TRANSPOSED = (onnx.TensorProto.INT64, onnx.TensorProto.UINT8)
"""Types of outputs that an EP writes wrong from a Transpose, or whose Transpose it refuses."""


def _outputs_to_keep(main: onnx.GraphProto) -> set[str]:
    typed = ((value.name, value.type.tensor_type.elem_type) for value in main.output)
    return {name for name, type_ in typed if type_ in _NOT_TRANSPOSED}


_FUSING = FUSING | {"Add", "Sub"}
_FUSED_THROUGH = operators.RESHAPING | {"Mul", "Slice", "Split"}
"""Operators that EPs fuse with an activation, and those that may come between."""


def _unfuse_activation(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Max between an activation and what computes its operand, so that an EP cannot fuse the two.

    At the number, and below it, the activation is 0 or -1: the result is the same.
    """
    value = node.input[0]
    maker = scope.maker(value)
    while maker is not None and graph.operator(maker) in _FUSED_THROUGH:
        computed = (name for name in maker.input if scope.stored.get(name) is None)
        maker = scope.maker(next(computed, ""))
    if maker is None or graph.operator(maker) not in _FUSING:
        return None
    return [builder.add(node.op_type, builder.add("Max", value, builder.number(-60000)))]


def _beside_number(name: str, operator: str, scope: Scope) -> tuple[str, float] | None:
    """What ``operator`` makes ``name`` of: a value, and a stored number that is not negative."""
    node = scope.maker(name, operator)
    if node is None or len(node.input) != 2:
        return None
    number, value = sorted(node.input, key=lambda operand: scope.stored.get(operand) is None)
    least = number_beside(value, number, scope)
    return None if least is None or least < 0 else (value, least)


def _at_least(name: str, scope: Scope) -> tuple[str, float] | None:
    """A value and the stored number that ``name`` is the larger of: by a Max, or by a Clip without an end."""
    node = scope.maker(name, "Clip")
    if node is None:
        return _beside_number(name, "Max", scope)
    value, low, high = graph.operands(node, 3)
    least, most = (number_beside(value, bound, scope) for bound in (low, high))
    is_open = not high or (most is not None and most >= _LARGEST)
    return (value, least) if is_open and least is not None and least >= 0 else None


def _log_power(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """``Log(Max(a² + b², number))`` as twice that of the root, whose exponent is half as large.

    Spectra of audio, as in DNSMOS, have powers that float16 does not have; openWakeWord filters them. So has
    the level of sound: ``Log(ReduceMean(x²) + number)``.
    """
    if factors := _different_factors(node.input[0], scope):
        return [_of_factors("Log", "Add", factors, builder)]
    if level := _root_of_level(node.input[0], scope, builder):
        return [builder.add("Mul", builder.add("Log", level), builder.number(2))]
    return _log_of_squares(node, scope, builder)


def _log_of_squares(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """That of at least a number, or of a number and more, and the sum of two squares; also behind filters,
    and then of one.
    """
    added = _beside_number(node.input[0], "Add", scope)
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
    squares = [_scaled_square(value, scale, builder) for value in values]
    power = builder.add("Add", *squares) if len(squares) > 1 else squares[0]
    if weights:
        power = builder.add("MatMul", *((weights, power) if is_first else (power, weights)))
    if added:
        power = builder.add("Add", power, _scaled_square(builder.number(least), scale, builder))
    result = builder.add("Mul", builder.add("Sqrt", power), scale)
    if not added:
        result = builder.add("Max", result, builder.number(least))
    return [builder.add("Mul", builder.add("Log", result), builder.number(2))]


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


def _log_of_more(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """``Log(x + number)`` or ``Log(Max(x, number))`` of a number that float16 does not have.

    As the sum of two: up to a limit of ``x`` it is scaled, so that the scaled number exists.
    """
    added = _beside_number(node.input[0], "Add", scope)
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


def _root(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """``Sqrt(ReduceMean(x²) + number)``, also of a sum, or a ReduceL2, of values that are first scaled by the
    largest; and ``Sqrt(a * b)`` as the product of two roots.

    The RMSNorm of language models such as T5 has values whose squares float16 does not have.
    """
    if node.op_type == "ReduceL2":
        return _scaled_root([node], node.input[0], 0.0, scope, builder)
    if factors := _different_factors(node.input[0], scope):
        return [_of_factors("Sqrt", "Mul", factors, builder)]
    value, number = _beside_number(node.input[0], "Add", scope) or (node.input[0], 0.0)
    return _root_of_squares(value, number, scope, builder)


def _of_factors(operator: str, join: str, factors: Sequence[str], builder: Builder) -> str:
    """The root or the logarithm of a product, of the size of each factor and of the sign."""
    sign = builder.add("Mul", *(builder.add("Sign", factor) for factor in factors))
    sizes = (builder.add("Abs", factor) for factor in factors)
    result = builder.add(join, *(builder.add(operator, size) for size in sizes))
    return builder.add(join, result, builder.add(operator, sign))


def _root_of_level(value: str, scope: Scope, builder: Builder) -> str | None:
    """That of a sum or a mean of squares, to which a number is added, or that is at least a number."""
    added, limited = _beside_number(value, "Add", scope), _at_least(value, scope)
    level, number = added or limited or (value, 0.0)
    root = _root_of_squares(level, number if added else 0.0, scope, builder)
    if not isinstance(root, list):
        return None
    return builder.add("Max", *root, builder.number(math.sqrt(number))) if limited else root[0]


def _root_of_squares(value: str, number: float, scope: Scope, builder: Builder) -> Outputs:
    """That of ``value``, a sum or a mean of squares, plus ``number``."""
    if (total := scope.maker(value, "Add")) is not None:
        return _root_of_two(total, number, scope, builder)
    value, totals = scope.origin_and_moves(value, {"ReduceMean", "ReduceSum"})
    squared = value_squared(value, scope) if totals else None
    return _scaled_root(totals, squared, number, scope, builder) if squared else None


def _root_of_two(total: onnx.NodeProto, number: float, scope: Scope, builder: Builder) -> Outputs:
    """That of ``number`` and ``total``, the sum of two squares, whose values are scaled by the larger."""
    values = [value for name in total.input if (value := value_squared(name, scope))]
    if len(values) != 2 or any(is_scaled(value, scope) for value in values):
        return None
    least = math.sqrt(number)
    largest = builder.add("Max", *(builder.add("Abs", value) for value in values))
    scale = scale_of(largest, least, 64, builder)
    power = builder.add("Add", *(_scaled_square(value, scale, builder) for value in values))
    if least:
        power = builder.add("Add", power, _scaled_square(builder.number(least), scale, builder))
    return [builder.add("Mul", builder.add("Sqrt", power), scale)]


def _scaled_root(
    totals: Sequence[onnx.NodeProto], value: str, number: float, scope: Scope, builder: Builder
) -> Outputs:
    """That of ``number`` and what the reductions ``totals``, the last one first, make of the squares of
    ``value``.
    """
    if is_scaled(value, scope):
        return None
    kept, steps = [*range(len(scope.sizes(value) or ()))], list[tuple[str, list[int]]]()
    for total in reversed(totals):
        if (axes := scope.axes(total)) is None:
            return None
        axes = [kept[axis] for axis in axes]
        steps.append(("ReduceMean" if total.op_type == "ReduceMean" else "ReduceSum", axes))
        if not graph.number(total, "keepdims", 1):
            kept = [axis for axis in kept if axis not in axes]
    least, every = math.sqrt(number), sorted({axis for _, axes in steps for axis in axes})
    factor = 8 if all(operator == "ReduceMean" for operator, _ in steps) else 4
    largest = builder.reduced("ReduceMax", builder.add("Abs", value), every, keepdims=1)
    scale = scale_of(largest, least, factor, builder)
    square = _scaled_square(value, scale, builder)
    for operator, axes in steps:
        square = builder.reduced(operator, square, axes, keepdims=1)
    if least:
        square = builder.add("Add", square, _scaled_square(builder.number(least), scale, builder))
    result = builder.add("Mul", builder.add("Sqrt", square), scale)
    squeezed = [axis for axis in every if axis not in kept]
    return [builder.squeeze(result, squeezed) if squeezed else result]


def _scaled_square(value: str, scale: str, builder: Builder) -> str:
    part = builder.add("Div", value, scale)
    return builder.add("Mul", part, part)


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


def _different_factors(name: str, scope: Scope) -> tuple[str, str] | None:
    """Two different values whose product is ``name``; no constants, nor what is small: roots and signs."""
    factors = factors_of(name, scope)
    if factors is None or len({*factors}) == 1:
        return None
    are_small = any(scope.maker(factor, "Sqrt", "Sign") is not None for factor in factors)
    is_stored = any(scope.constant(factor) is not None for factor in factors)
    return None if are_small or is_stored else factors


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


_NOTHING = -80.0
"""The logarithm of a number that is 0 in float16 too."""


def _floor(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Of numbers from -80 on: for smaller ones the result is 0 in float16 too."""
    if node.op_type == "Pow":
        return _power_of_number(node, scope, builder)
    value = _limited(node.input[0], "Max", _NOTHING, scope, builder)
    return [builder.add(node.op_type, value)] if value else None


def _limited(name: str, operator: str, limit: float, scope: Scope, builder: Builder) -> str | None:
    """The larger or the smaller, by ``operator``, of a value and ``limit``; None if it is that already."""
    maker, limits = scope.maker(name, operator), (float(builder.dtype.type(limit)),)
    operands = () if maker is None else maker.input
    if any(ends(operand, scope) == limits for operand in operands):
        return None
    return builder.add(operator, name, builder.number(limit))


def _power_of_number(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """That of a stored positive number, as an Exp where float16 loses less of its logarithm."""
    base, exponent = node.input
    number = number_beside(exponent, base, scope)
    if number is None or number <= 0 or number == 1 or scope.dtype(base) != builder.dtype:
        return None
    if scope.dtype(exponent) != builder.dtype:
        exponent = builder.add("Cast", exponent, to=scope.elem_type(base))
    logarithm = math.log(number)
    by_logarithm = abs(logarithm) * (_lost(logarithm) + FLOAT16.unit / 2)
    if by_logarithm < _lost(number):
        exponent = builder.add("Mul", exponent, builder.number(logarithm))
        return [builder.add("Exp", builder.add("Max", exponent, builder.number(_NOTHING)))]
    operator = "Max" if number > 1 else "Min"
    limited = _limited(exponent, operator, _NOTHING / logarithm, scope, builder)
    return [builder.add("Pow", base, limited)] if limited else None


def _lost(number: float) -> float:
    """The share of ``number`` that float16 loses."""
    return abs(float(np.float16(number)) / number - 1)


_LARGE_DIVISOR = 8192.0
"""The divisor from which a quotient is that of eighths: QNN makes 0 of those above 16384."""


def _is_quotient(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether floats are divided by computed ones, which are not scaled yet."""
    divisor = node.input[-1]
    dtype, product = scope.dtype(divisor), scope.maker(divisor, "Mul")
    if dtype is None or dtype.kind != "f" or scope.constant(divisor) is not None:
        return False
    return product is None or scope.maker(product.input[-1], "Where") is None


def _scaled_division(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """That of an eighth by an eighth, where the divisor is large."""
    size = builder.add("Abs", node.input[-1])
    is_large = builder.add("Greater", size, builder.number(_LARGE_DIVISOR))
    scale = builder.add("Where", is_large, builder.number(1 / 8), builder.number(1))
    result = builder.add(node.op_type, *(builder.add("Mul", name, scale) for name in node.input))
    return [result if node.op_type == "Div" else builder.add("Mul", result, scale)]


_UNLIMITED = frozenset(
    {"Add", "CumSum", "Div", "Exp", "Mul", "Pow", "ReduceMean", "ReduceSum", "Sub"}
)
"""Operators whose results, also rewritten, EPs may keep beyond the end of float16."""


def _limited_operands(node: onnx.NodeProto, scope: Scope) -> list[int]:
    """The numbers of the operands of a comparison that may be beyond the end of float16."""
    numbers = []
    for number, name in enumerate(node.input):
        dtype, origin = scope.dtype(name), scope.origin(name, operators.RESHAPING)
        is_float = dtype is not None and dtype.kind == "f"
        if is_float and scope.maker(origin, *_UNLIMITED) is not None:
            numbers.append(number)
    return numbers


def _has_limited_operands(node: onnx.NodeProto, scope: Scope) -> bool:
    return bool(_limited_operands(node, scope))


def _limit_operands(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The same of what is larger up to the end of float16, and of what is smaller from the other end on."""
    operands = [*node.input]
    for number in _limited_operands(node, scope):
        is_larger = node.op_type.startswith("Greater") == (number == 0)
        limit, end = ("Min", FLOAT16.largest) if is_larger else ("Max", -FLOAT16.largest)
        operands[number] = builder.add(limit, operands[number], builder.number(end))
    return builder.add_like(node, node.op_type, operands)


_RULES: Rules = {
    "square": (_power, ("Pow",), None),
    "mean": (_mean, ("Mul", "Div"), None),
    "clip-inputs": (_clip, ("Clip",), None),
    "transposed-outputs": (_transposed_output, _MOVED_PAST, None),
    "pool-padding": (pad_before, ("AveragePool", "LpPool"), is_padded_unevenly),
    "log-power": (_log_power, ("Log",), None),
    "log-floor": (_log_of_more, ("Log",), None),
    "log-sum-exp": (_sum_of_powers, ("Div", "Log"), None),
    "variance": (_covariance, ("Sub",), None),
    "small-angle": (_small_angle, ("Atan", "Sin", "Tan"), None),
    "scaled-square": (_root, ("Sqrt", "ReduceL2"), None),
    "floor": (_floor, ("Exp", "Mish", "Pow", "Softplus"), None),
    "comparison": (_limit_operands, _COMPARISONS, _has_limited_operands),
    "scaled-division": (_scaled_division, ("Div", "Reciprocal"), _is_quotient),
    "unfuse-activation": (_unfuse_activation, ("Sigmoid", "Tanh"), None),
    **integers.RULES,
    **long_integers.RULES,
    **factors.RULES,
}

PRECISE: Mapping[RewriteName, Rewrite] = {
    name: Rewrite(name, frozenset(types), rule, applies=applies)
    for name in (*ALWAYS, *itertools.chain(*CORRECTIONS))
    for rule, types, applies in (_RULES[name],)
}
"""Those of `ALWAYS`, and then of `CORRECTIONS`, in the order in which they are applied."""


_BESIDE: Mapping[RewriteName, frozenset[str]] = {
    "hard-swish": frozenset({"HardSigmoid"}),
    "log-sum-exp": frozenset({"Exp", "ReduceSum"}),
    "mean": frozenset({"ReduceSum"}),
    "split-integers": frozenset({"Cast"}),
    "ratio": frozenset({"Cast"}),
    "variance": frozenset({"ReduceMean"}),
}
"""The other operators of what some rewrites change."""


def applicable(
    model: onnx.ModelProto, types: Types = MappingProxyType({})
) -> tuple[RewriteName, ...]:
    """Those of `PRECISE` for whose operators ``model`` has nodes that they change.

    ``types``: of its values, as far as they are known.
    """
    if graph.opset(model) < _BROADCASTING:
        return ()
    # Most models have no node for which it is needed.
    scope = functools.cache(lambda: Scope(model.graph, types=types, nested=True))
    nodes: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.nodes(model.graph):
        nodes.setdefault(graph.operator(node), []).append(node)
    ends = _outputs_to_keep(model.graph)

    def may_apply(name: RewriteName, rewrite: Rewrite) -> bool:
        if not _BESIDE.get(name, frozenset()) <= nodes.keys():
            return False
        if name == "transposed-outputs" and not ends:
            return False
        of_rewrite = (node for operator in rewrite.operators for node in nodes.get(operator, ()))
        applies = rewrite.applies
        return any(applies is None or applies(node, scope()) for node in of_rewrite)

    return tuple(name for name, rewrite in PRECISE.items() if may_apply(name, rewrite))
