"""Operators in the 32 bits that EPs compute in: integers of other widths, and float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewrites.integers import COMPARING, in_bits
from hatch_epcontext.graph.rewriting import Operators, Rewrite, rewrites
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.integers import limits

_BYTES = (TensorProto.INT8, TensorProto.UINT8)

_WIDER: Mapping[int, int] = {
    **dict.fromkeys(_BYTES, TensorProto.INT32),
    **dict.fromkeys((TensorProto.INT16, TensorProto.UINT16), TensorProto.INT32),
    # Their sums and products are the same modulo 2^32; values of 2^31 and more need 64 bits.
    **dict.fromkeys((TensorProto.UINT32, TensorProto.UINT64), TensorProto.INT64),
    **dict.fromkeys((TensorProto.DOUBLE, TensorProto.BFLOAT16), TensorProto.FLOAT),
}
"""The type in which values of each other one are computed; all but those of float64 and uint64 exactly."""

_OF_POOLS: Mapping[int, int] = {**_WIDER, **dict.fromkeys(_BYTES, TensorProto.FLOAT)}
"""Those of a MaxPool, which takes no int32: floats have all integers of 8 bits."""

_OF_BITS = frozenset(
    {"BitCast", "BitShift", "BitwiseNot", "Cast", "CastLike", "If", "Loop", "Scan"}
)
"""Operators whose results depend on the number of bits, or that have bodies."""

_SHORT, _LONG = np.dtype(np.int32), np.dtype(np.int64)
"""What EPs compute with."""

_QUANTIZED = ("quantize", "qlinear", "integer")


def _is_typed(operator: str) -> bool:
    """Whether ``operator`` is one of ONNX that may compute in 32 bits."""
    is_quantized = any(part in operator.lower() for part in _QUANTIZED)
    is_own = "." not in operator and onnx.defs.has(operator)
    return is_own and operator not in _OF_BITS and not is_quantized


def _widen(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The same between Casts: other integers than those of 32 and 64 bits, and float64, in 32 bits."""
    types = [scope.elem_type(name) if name else None for name in (*node.input, *node.output)]
    if not any(type_ in _WIDER for type_ in types):
        return None
    for name, type_ in zip(node.input, types, strict=False):
        if name and type_ is None:
            return Declined(f"the type of {name!r} is not known")
    schema = onnx.defs.get_schema(node.op_type, builder.opset)
    allowed = {rule.type_param_str: rule.allowed_type_strs for rule in schema.type_constraints}
    wider = _OF_POOLS if node.op_type == "MaxPool" else _WIDER
    wide: list[str] = []
    for index, name in enumerate(node.input):
        new = wider.get(types[index] or 0) if name else None
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        if new and graph.type_text(new) not in allowed.get(formal.type_str, [formal.type_str]):
            return Declined(f"it takes no {graph.dtype_name(new)}")
        wide.append(_cast(name, new, scope, builder) if new else name)
    named = (entry for entry in node.attribute if entry.name in graph.TYPE_ATTRIBUTES)
    attributes = {entry.name: _WIDER[entry.i] for entry in named if entry.i in _WIDER}
    results = builder.add_like(node, node.op_type, wide, "", **attributes)
    outputs = types[len(node.input) :]
    return [
        builder.add("Cast", result, to=type_) if type_ in _WIDER and result else result
        for result, type_ in zip(results, outputs, strict=True)
    ]


def _cast(name: str, to: int, scope: Scope, builder: Builder) -> str:
    """``name`` as the type ``to``; if it is that of a float32 in more bits, the float32."""
    cast = builder.added.get(name) or scope.maker(name)
    if to == TensorProto.FLOAT and cast is not None and cast.op_type == "Cast":
        (value,) = cast.input
        if value in builder.added or scope.elem_type(value) == to:
            return value
    return builder.add("Cast", name, to=to)


compute_in_32_bits = Rewrite("compute_in_32_bits", Operators(_is_typed), _widen)
"""An operator of integers of 8, 16 or 64 bits without sign, or of float64, between Casts."""


@rewrites("Cast")
def join_casts(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Cast of integers that another Cast makes, without the type between, which EPs may lack.

    Integers lose the bits that a shorter type does not have.
    """
    before = scope.maker(node.input[0], "Cast")
    if before is None or builder.opset < COMPARING:
        return None
    (value,), to = before.input, scope.known_dtype(node.output[0])
    source, between = scope.known_dtype(value), scope.known_dtype(node.input[0])
    if between.kind not in "iu" or not {source.kind, to.kind} <= {*"biuf"}:
        # Texts, and types that NumPy lacks, have other ends.
        return None
    low, high = limits(value, scope)
    ends = np.iinfo(between)
    is_shorter = {source.kind, to.kind} <= {*"iu"} and to.itemsize <= between.itemsize
    if is_shorter or (ends.min <= low and high <= ends.max):
        return [_as(value, source, to, builder)]
    if between == np.uint64:
        return [_without_sign(_as(value, source, _LONG, builder), to, builder)]
    if between.itemsize >= _SHORT.itemsize:
        return None
    rest = in_bits(_as(value, source, _SHORT, builder), _SHORT, between, builder)
    return [_as(rest, _SHORT, to, builder)]


def _as(value: str, source: np.dtype[Any], to: np.dtype[Any], builder: Builder) -> str:
    """``value`` of the dtype ``source`` as ``to``."""
    if source == to:
        return value
    return builder.add("Cast", value, to=helper.np_dtype_to_tensor_dtype(to))


def _without_sign(value: str, to: np.dtype[Any], builder: Builder) -> str:
    """The int64 ``value`` as ``to``, of which negative ones stand for integers from 2^63 on."""
    result = _as(value, _LONG, to, builder)
    if to.kind != "f":
        return result
    negative = builder.add("Less", value, builder.store(np.array(0, np.int64)))
    with np.errstate(over="ignore"):
        # It is infinite in float16, as these integers are.
        end = np.array(2.0**64, to)
    larger = builder.add("Add", result, builder.store(end))
    return builder.add("Where", negative, larger, result)
