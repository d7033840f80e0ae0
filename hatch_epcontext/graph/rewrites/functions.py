"""Operators that ONNX itself defines by others, taken apart as it defines them."""

from __future__ import annotations

import onnx
import onnx.inliner

from hatch_epcontext.graph.rewrites.base import Rewrite, Values

_NAMES = """
AffineGrid Attention Celu CenterCropPad GroupNormalization HardSwish LogSoftmax
Mish PRelu ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare
RotaryEmbedding Softplus Softsign SwiGLU Swish
"""
_OPERATORS = frozenset(_NAMES.split())


def _count(model: onnx.ModelProto, wanted: frozenset[str]) -> int:
    return sum(not node.domain and node.op_type in wanted for node in model.graph.node)


def _apply(values: Values, refused: frozenset[str]) -> int:
    model = values.model
    wanted = _OPERATORS & refused
    if not (before := _count(model, wanted)):
        return 0
    names = [("", name) for name in sorted(wanted)]
    try:
        inlined = onnx.inliner.inline_selected_functions(model, names, inline_schema_functions=True)
    except RuntimeError:
        # It does not understand all models that ONNX Runtime takes.
        return 0
    model.CopyFrom(inlined)
    # An older opset may not define all of them.
    return before - _count(model, wanted)


DEFINITIONS = Rewrite("functions of ONNX as it defines them", _OPERATORS, _apply)
