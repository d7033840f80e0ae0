"""Operators whose form ONNX has changed."""

from __future__ import annotations

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Rewrite
from hatch_epcontext.graph.scope import Types

_NEWER = 11
"""The opset from which all `_OPERATORS` have today's form, or can be rewritten.

Where follows If, and ONNX Runtime rounds the biases of convolutions of integers by Round.
"""

_OPERATORS = frozenset({"If", "QLinearConv", "Scatter", "TopK", f"{graph.MICROSOFT}.QGemm"})


def convert(model: onnx.ModelProto, types: Types, refused: frozenset[str]) -> int:
    """Write ``model`` in opset 11, in place; returns the number of its nodes, 0 if nothing changes."""
    if graph.opset(model) >= _NEWER:
        return 0
    try:
        converted = onnx.version_converter.convert_version(model, _NEWER)
    except RuntimeError:
        # The converter has no operators that ONNX has removed.
        return 0
    model.CopyFrom(converted)
    return len(model.graph.node)


NEWER = Rewrite(f"written in opset {_NEWER}", _OPERATORS, convert)
