"""What to compute instead of nodes that EPs compute wrong for negative or large numbers, or for bytes.

Each is for all values that the graph does not prove to be right: see `values.integers`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.number_format import FLOAT16
from hatch_epcontext.graph.rewriting import corrects
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.integers import limits

COMPARING = 9
"""The opset from which Less takes integers, and Where exists."""

_WHERE_REPEATS = 4
"""The most dimensions for which QNN repeats operands of a Where right."""

_MAX_OF_MODULO = 1024
"""Up to here all remainders are right; QNN computes those of larger integers as floats of 11 bits."""

_LARGEST_DIVISOR, _LARGEST_NUMBER = 2.0**14, FLOAT16.largest
"""Behind these QNN's quotients are 0: that of several divisors, and that of a single stored number."""

_FIRST_FACTOR = 2.0**-12
"""Reciprocals of larger divisors have few bits in float16: they become two factors."""


def _is_rounded_down(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether a Div may have a negative result that is rounded: QNN shifts to divide by powers of two."""
    if not scope.is_whole(node.input[0]):
        return False
    low, least = (limits(name, scope)[0] for name in node.input)
    divisors = scope.constant(node.input[1])
    if divisors is not None:
        sizes = np.abs(divisors.astype(np.int64))
        if not ((sizes > 1) & (sizes & (sizes - 1) == 0)).any():
            return False
    return low < 0 or least < 0


@corrects("truncate", "Div", applies=_is_rounded_down)
def _truncate(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A division of what is not negative, with the sign behind it."""
    if builder.opset < COMPARING:
        return None
    zero, negative = builder.number(0), None
    sizes = [*node.input]
    for number, name in enumerate(node.input):
        if limits(name, scope)[0] < 0:
            sizes[number] = builder.add("Abs", name)
            is_below = builder.add("Less", name, zero)
            negative = builder.add("Xor", negative, is_below) if negative else is_below
    quotient = builder.add("Div", *sizes)
    assert negative is not None, "an operand may be negative"
    return [builder.add("Where", negative, builder.add("Sub", zero, quotient), quotient)]


def _is_large(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether a Mod may have operands that are not small."""
    values = (limits(name, scope) for name in node.input)
    return scope.is_whole(node.input[0]) and any(
        max(-low, high) > _MAX_OF_MODULO for low, high in values
    )


@corrects("modulo", "Mod", applies=_is_large)
def _modulo(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The difference to a multiple of the divisor, with the sign that the operator gives it."""
    value, divisor = node.input
    zero = builder.number(0)
    is_signed, is_negative = (limits(name, scope)[0] < 0 for name in node.input)
    size = builder.add("Abs", value) if is_signed else value
    divisor_size = builder.add("Abs", divisor) if is_negative else divisor
    quotient = builder.add("Div", size, divisor_size)
    rest = builder.add("Sub", size, builder.add("Mul", quotient, divisor_size))
    if is_signed:
        negative = builder.add("Less", value, zero)
        rest = builder.add("Where", negative, builder.add("Sub", zero, rest), rest)
    if graph.number(node, "fmod", 0) or not (is_signed or is_negative):
        return [rest]
    # It has the sign of the divisor.
    is_other = builder.add("Less", rest, zero)
    if is_negative:
        is_other = builder.add("Xor", is_other, builder.add("Less", divisor, zero))
        is_zero = builder.add("Equal", rest, zero)
        is_other = builder.add("And", is_other, builder.add("Not", is_zero))
    return [builder.add("Where", is_other, builder.add("Add", rest, divisor), rest)]


def _is_truth(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether a Cast makes a boolean of integers, of which some may be negative."""
    is_bool = graph.attribute(node, "to", 0) == onnx.TensorProto.BOOL
    return is_bool and scope.is_whole(node.input[0]) and limits(node.input[0], scope)[0] < 0


@corrects("truth", "Cast", applies=_is_truth)
def _truth(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    return [builder.add("Not", builder.add("Equal", node.input[0], builder.number(0)))]


_BYTES = 256
"""How many values an uint8 has."""

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)


def _is_of_bytes(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether a Cast makes floats of uint8, or uint8 of integers that may be none."""
    value, to = node.input[0], graph.attribute(node, "to", 0)
    if to in _FLOATS:
        return scope.dtype(value) == np.uint8
    if to != onnx.TensorProto.UINT8 or not scope.is_whole(value):
        return False
    low, high = limits(value, scope)
    return low < 0 or high >= _BYTES


@corrects("bytes", "Cast", applies=_is_of_bytes)
def _bytes(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Through int32, or of what is left of a multiple of 256.

    ONNX Runtime joins two Casts, and leaves an Abs between them, which changes nothing.
    """
    if builder.opset < COMPARING:
        return None
    value, to = node.input[0], graph.attribute(node, "to", 0)
    if to in _FLOATS:
        whole = builder.add("Cast", value, to=onnx.TensorProto.INT32)
        return [builder.add("Cast", builder.add("Abs", whole), to=to)]
    dtype, wide = scope.known_dtype(value), np.dtype(np.int32)
    if dtype.itemsize < wide.itemsize:
        # An int8 is never 256, and older opsets have no Div of 16 bits.
        value, dtype = builder.add("Cast", value, to=onnx.TensorProto.INT32), wide
    return [builder.add("Cast", in_bits(value, dtype, np.dtype(np.uint8), builder), to=to)]


def in_bits(value: str, dtype: np.dtype[Any], to: np.dtype[Any], builder: Builder) -> str:
    """What is left of ``value``, of ``dtype``, in the bits of ``to``, which has fewer."""
    ends = np.iinfo(to)
    size, zero, most = (
        builder.store(np.array(number, dtype)) for number in (2**ends.bits, 0, ends.max)
    )
    rest = builder.add("Sub", value, builder.add("Mul", builder.add("Div", value, size), size))
    is_below = builder.add("Less", rest, zero)
    rest = builder.add("Where", is_below, builder.add("Add", rest, size), rest)
    if not ends.min:
        return rest
    is_negative = builder.add("Greater", rest, most)
    return builder.add("Where", is_negative, builder.add("Sub", rest, size), rest)


def _counts_from_end(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether indices are computed, and may be negative: an EP counts stored ones itself, and a Gather's of
    int64.
    """
    name = graph.operand(node, 1)
    is_counted = node.op_type == "Gather" and scope.dtype(name) != np.int32
    return not is_counted and scope.constant(name) is None and limits(name, scope)[0] < 0


@corrects(
    *("indices", "Gather", "GatherElements", "ScatterElements", "ScatterND"),
    applies=_counts_from_end,
)
def _indices(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Indices from 0, without those from the end of an axis."""
    sizes, name = scope.shape(node.input[0]), graph.operand(node, 1)
    if builder.opset < COMPARING or sizes is None or not scope.is_whole(name):
        return None
    indexed: tuple[int, ...] | int = sizes[graph.number(node, "axis", 0)] if sizes else 0
    if node.op_type == "ScatterND":
        depth = (scope.sizes(name) or (None,))[-1]
        if depth is None:
            return None
        indexed = sizes[:depth]
    index = builder.from_start(name, np.array(indexed, scope.dtype(name)))
    results = builder.add_like(node, node.op_type, [node.input[0], index, *node.input[2:]])
    # Other rewrites, which come first, find it by its name if an EP refuses it.
    builder.nodes[-1].name = node.name
    return results


_EXACT_SUM = 2.0**24
"""Up to here sums of integers are exact where an EP sums in float32."""

_PART = 2**12
"""By what they are divided: sums of 4096 rests are exact, and so are those of quotients of 32 bits."""


def _is_long_sum(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether a sum of integers may have more bits than a float32."""
    value = node.input[0]
    sizes = scope.sizes(value)
    if not scope.is_whole(value) or sizes is None or _is_part(value, scope):
        return False
    axes = None if node.op_type == "CumSum" else scope.axes(node)
    summed = sizes if axes is None else [sizes[axis] for axis in axes]
    count = math.prod(math.inf if size is None else size for size in summed)
    low, high = limits(value, scope)
    return count > 1 and max(-low, high) * count > _EXACT_SUM


def _is_part(name: str, scope: Scope) -> bool:
    """Whether a value has quotients by `_PART`, or the rests of these."""
    node = scope.maker(name, "Div", "Sub")
    if node is not None and node.op_type == "Sub":
        product = scope.maker(node.input[1], "Mul")
        node = None if product is None else scope.maker(product.input[0], "Div")
    divisor = None if node is None else scope.constant(node.input[1])
    return divisor is not None and bool((divisor == _PART).all())


@corrects("long-sums", "CumSum", "ReduceSum", applies=_is_long_sum)
def _sum_parts(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The sum of quotients, times the divisor, and that of rests."""
    value, part = node.input[0], builder.number(_PART)
    quotient = builder.add("Div", value, part)
    rest = builder.add("Sub", value, builder.add("Mul", quotient, part))
    sums = list[str]()
    for number in (quotient, rest):
        sums += builder.add_like(node, node.op_type, [number, *node.input[1:]])
        builder.nodes[-1].name = builder.fresh(node.name or node.op_type)
    return [builder.add("Add", builder.add("Mul", sums[0], part), sums[1])]


def _is_hard_swish(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether a Mul has x and then the HardSigmoid of the same x."""
    maker = scope.maker(graph.operand(node, 1), "HardSigmoid")
    return maker is not None and maker.input[0] == node.input[0]


@corrects("hard-swish", "Mul", beside=["HardSigmoid"], applies=_is_hard_swish)
def _swap(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The factors in the other order, in which no EP fuses them with a Conv before."""
    return [builder.add("Mul", *reversed(node.input))]


def _has_large_divisors(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether a Div has stored float32 divisors, of which some are large."""
    divisors = scope.constant(graph.operand(node, 1))
    if divisors is None or divisors.dtype != np.float32:
        return False
    largest = _LARGEST_NUMBER if divisors.size == 1 else _LARGEST_DIVISOR
    return bool((np.abs(divisors) > largest).any() and divisors.all())


@corrects("reciprocals", "Div", applies=_has_large_divisors)
def _multiply(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The product with the reciprocals."""
    value, divisors = node.input[0], scope.stored_values(node.input[1])
    if (np.abs(divisors) > _LARGEST_DIVISOR).all():
        value = builder.add("Mul", value, builder.number(_FIRST_FACTOR))
        divisors = divisors * np.float32(_FIRST_FACTOR)
    return [builder.add("Mul", value, builder.store(np.reciprocal(divisors)))]


def _repeats(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether a Where of many dimensions repeats some of several values."""
    sizes = scope.sizes(node.output[0]) or ()
    others = [scope.sizes(name) or () for name in node.input if scope.sizes(name) != sizes]
    return len(sizes) > _WHERE_REPEATS and any({*other} - {1} for other in others)


@corrects("broadcast", "Where", applies=_repeats)
def _repeat(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Where of values that have its shape."""
    shape = scope.fixed_shape(node.output[0])
    sizes, values = builder.integers(shape), [*node.input]
    for index, name in enumerate(values):
        if scope.shape(name) == shape:
            continue
        # EPs repeat no booleans.
        value = name if index else builder.add("Cast", name, to=onnx.TensorProto.INT32)
        value = builder.add("Expand", value, sizes)
        values[index] = value if index else builder.add("Cast", value, to=onnx.TensorProto.BOOL)
    return [builder.add("Where", *values)]
