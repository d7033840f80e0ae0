"""Operators in the 32 bits that EPs compute in: integers of other widths, and float64."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import Operators, Rewrite
from hatch_epcontext.graph.scope import Scope

_WIDER: Mapping[int, int] = {
    **dict.fromkeys((TensorProto.INT8, TensorProto.UINT8), TensorProto.INT32),
    **dict.fromkeys((TensorProto.INT16, TensorProto.UINT16), TensorProto.INT32),
    # Their sums and products are the same modulo 2^32; values of 2^31 and more need 64 bits.
    **dict.fromkeys((TensorProto.UINT32, TensorProto.UINT64), TensorProto.INT64),
    **dict.fromkeys((TensorProto.DOUBLE, TensorProto.BFLOAT16), TensorProto.FLOAT),
}
"""The type in which values of each other one are computed; all but those of float64 and uint64 exactly."""

_OF_BITS = frozenset(
    {"BitCast", "BitShift", "BitwiseNot", "Cast", "CastLike", "If", "Loop", "Scan"}
)
"""Operators whose results depend on the number of bits, or that have bodies."""

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
    wide: list[str] = []
    for index, name in enumerate(node.input):
        new = _WIDER.get(types[index] or 0) if name else None
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        if new and graph.type_text(new) not in allowed.get(formal.type_str, [formal.type_str]):
            return Declined(f"it takes no {graph.dtype_name(new)}")
        wide.append(_cast(name, new, scope, builder) if new else name)
    named = (entry for entry in node.attribute if entry.name in graph.TYPE_ATTRIBUTES)
    wider = {entry.name: _WIDER[entry.i] for entry in named if entry.i in _WIDER}
    results = builder.add_like(node, node.op_type, wide, "", **wider)
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
