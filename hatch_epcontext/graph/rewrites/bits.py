"""Operators of bits as arithmetic of 32-bit integers, which is exact: And, Or, Xor and shifts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope

_HALF = 16
"""Bits whose sum is exact where an EP sums in float32."""

_JOINS: Mapping[str, str] = {"BitwiseAnd": "Mul", "BitwiseOr": "Max"}
"""What joins two bits; the bits of a BitwiseXor differ."""


class _Integers:
    """Arithmetic of int32, or of another ``dtype``."""

    def __init__(self, builder: Builder, dtype: type[Any] = np.int32) -> None:
        self.builder, self.dtype = builder, dtype

    def number(self, value: int) -> str:
        return self.builder.store(np.array(value, self.dtype))

    def below(self, value: str, condition: str) -> str:
        """``value`` less 2^31 where the ``condition`` is true. int32 has no 2^31."""
        moved = self.builder.add("Sub", value, self.number(2**31 - 1))
        moved = self.builder.add("Sub", moved, self.number(1))
        return self.builder.add("Where", condition, moved, value)

    def shifted_right(self, value: str, amount: str) -> str:
        """``value`` by 2 to the power of ``amount``, rounded down."""
        builder, amounts = self.builder, np.arange(np.iinfo(self.dtype).bits, dtype=self.dtype)
        # ~(~x / 2^n) of negative ones, because a quotient is rounded to zero.
        negative = builder.add("Less", value, self.number(0))
        ones = self.number(-1)
        opposite = builder.add("Sub", ones, value)
        positive = builder.add("Where", negative, opposite, value)
        quotient = positive
        # In two parts, because the greatest power of 2 is above the greatest number.
        for part in (amounts // 2, amounts - amounts // 2):
            divisor = builder.add("Gather", builder.store(2**part), amount, axis=0)
            quotient = builder.add("Div", quotient, divisor)
        return builder.add("Where", negative, builder.add("Sub", ones, quotient), quotient)

    def shifted_left(self, value: str, amount: str) -> str:
        """``value`` times 2 to the power of ``amount``, without the bits beyond the 32nd."""
        builder, numbers = self.builder, range(32)
        unsigned, negative = self.without_sign(value)
        # Bits that stay are below this, which itself becomes the sign.
        sizes = np.array([min(2 ** (31 - n), 2**31 - 1) for n in numbers], np.int32)
        size = builder.add("Gather", builder.store(sizes), amount, axis=0)
        high = builder.add("Div", unsigned, size)
        rest = builder.add("Sub", unsigned, builder.add("Mul", high, size))
        none = builder.add("Equal", amount, self.number(0))
        rest = builder.add("Where", none, unsigned, rest)
        factors = builder.store(np.array([2**n if n < 31 else 0 for n in numbers], np.int32))
        product = builder.add("Mul", rest, builder.add("Gather", factors, amount, axis=0))
        two = self.number(2)
        even = builder.add("Mul", builder.add("Div", high, two), two)
        some = builder.add("Equal", builder.add("Sub", high, even), self.number(1))
        new = builder.add("And", some, builder.add("Not", none))
        old = builder.add("And", negative, none)
        return self.below(product, builder.add("Or", new, old))

    def bits(self, value: str, count: int) -> str:
        """The lowest ``count`` bits of ``value`` (n x 1), which is not negative: n x count."""
        powers = self.builder.store(2 ** np.arange(count, dtype=np.int32))
        shifted = self.builder.add("Div", value, powers)
        double = self.builder.add("Div", shifted, self.number(2))
        return self.builder.add("Sub", shifted, self.builder.add("Mul", double, self.number(2)))

    def joined(self, bits: str, count: int) -> str:
        """The integers (n x 1) of ``bits`` (n x count)."""
        parts = []
        for first in range(0, count, _HALF):
            size = min(_HALF, count - first)
            indices = np.arange(first, first + size, dtype=np.int64)
            part = self.builder.add("Gather", bits, self.builder.store(indices), axis=1)
            powers = self.builder.store(2 ** np.arange(size, dtype=np.int32))
            part = self.builder.add("Mul", part, powers)
            part = self.builder.reduced("ReduceSum", part, [1], keepdims=1)
            scale = self.number(2**first)
            parts.append(self.builder.add("Mul", part, scale) if first else part)
        return self.builder.add("Add", *parts) if len(parts) > 1 else parts[0]

    def without_sign(self, value: str) -> tuple[str, str]:
        """The lowest 31 bits of ``value``, and where it is negative."""
        negative = self.builder.add("Less", value, self.number(0))
        # -2^31 has no opposite.
        moved = self.builder.add("Add", value, self.number(2**31 - 1))
        moved = self.builder.add("Add", moved, self.number(1))
        return self.builder.add("Where", negative, moved, value), negative


def _bounds(type_: int) -> tuple[int, bool]:
    """The number of bits of ``type_``, and whether it has a sign."""
    info = np.iinfo(onnx.helper.tensor_dtype_to_np_dtype(type_))
    return info.bits, info.min < 0


@rewrites("BitwiseAnd", "BitwiseOr", "BitwiseXor")
def join_bits(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """And, Or or Xor of the single bits of integers of at most 32."""
    type_, shape = scope.known_type(node.output[0]), scope.fixed_shape(node.output[0])
    count, is_signed = _bounds(type_)
    if count > 32:
        return Declined(f"it has integers of {count} bits")
    integers, signs, parts = _Integers(builder), [], []
    is_other = type_ != TensorProto.INT32
    for name in node.input:
        value = builder.add("Cast", name, to=TensorProto.INT32) if is_other else name
        if scope.shape(name) != shape:
            value = builder.add("Expand", value, builder.integers(shape))
        value = builder.reshape(value, [-1, 1])
        # A uint32 from 2^31 on is a negative int32.
        if is_signed or count == 32:
            value, negative = integers.without_sign(value)
            signs.append(negative)
        parts.append(integers.bits(value, min(count, 31)))
    if node.op_type == "BitwiseXor":
        result = builder.add("Abs", builder.add("Sub", *parts))
        signs = [builder.add("Xor", *signs)] if signs else []
    else:
        result = builder.add(_JOINS[node.op_type], *parts)
        signs = [builder.add(node.op_type.removeprefix("Bitwise"), *signs)] if signs else []
    value = integers.joined(result, min(count, 31))
    for negative in signs:
        value = integers.below(value, negative)
    value = builder.reshape(value, shape)
    return [builder.add("Cast", value, to=type_) if is_other else value]


@rewrites("BitShift")
def shift_as_product(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A shift of integers as a product or a quotient.

    Of unsigned integers zeros enter, from the left of signed ones the sign; beyond the width nothing else is
    left. Those of more bits than an int32 has are computed in int64.
    """
    value, amount = node.input
    type_ = scope.known_type(value)
    count, is_signed = _bounds(type_)
    is_long = count == 64 or (count == 32 and not is_signed)
    wide = TensorProto.INT64 if is_long else TensorProto.INT32
    integers = _Integers(builder, np.int64 if is_long else np.int32)
    if type_ != wide:
        value, amount = (builder.add("Cast", name, to=wide) for name in (value, amount))
    beyond = builder.add("Greater", amount, integers.number(count - 1))
    if is_signed:
        beyond = builder.add("Or", beyond, builder.add("Less", amount, integers.number(0)))
    inside = builder.add("Where", beyond, integers.number(0), amount)
    filler = integers.number(0)
    if graph.text(node, "direction") == "RIGHT":
        result = integers.shifted_right(value, inside)
        if is_signed:
            negative = builder.add("Less", value, filler)
            filler = builder.add("Where", negative, integers.number(-1), filler)
        elif type_ == TensorProto.UINT64:
            # Values from 2^63 on are less by 2^64 as int64.
            shifted = np.array([0, -(2**63), *(2 ** (64 - n) for n in range(2, 64))], np.int64)
            modulus = builder.add("Gather", builder.store(shifted), inside, axis=0)
            negative = builder.add("Less", value, filler)
            result = builder.add("Where", negative, builder.add("Add", result, modulus), result)
    elif is_long:
        powers = builder.store(np.array([2**n for n in range(63)] + [-(2**63)], np.int64))
        result = builder.add("Mul", value, builder.add("Gather", powers, inside, axis=0))
    else:
        result = integers.shifted_left(value, inside)
    result = builder.add("Where", beyond, filler, result)
    return [builder.add("Cast", result, to=type_) if type_ != wide else result]
