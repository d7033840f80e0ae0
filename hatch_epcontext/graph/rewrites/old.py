"""Operators that ONNX has removed, or whose form has changed."""

from __future__ import annotations

import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs, Rewrite, by_node
from hatch_epcontext.graph.scope import Scope, Types


def _affine(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    alpha, beta = (graph.attribute(node, *each) for each in (("alpha", 1.0), ("beta", 0.0)))
    return [builder.add("Add", builder.scaled(node.input[0], alpha), builder.number(beta))]


def _image_scaler(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    scaled = builder.scaled(node.input[0], graph.attribute(node, "scale", 1.0))
    bias = np.array(graph.attribute(node, "bias", [0.0]), builder.dtype)
    return [builder.add("Add", scaled, builder.store(bias.reshape(-1, 1, 1)))]


def _cropped(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    shape, border = scope.shape(node.input[0]), graph.attribute(node, "border", [0] * 4)
    if shape is None:
        return None
    left, top, right, bottom = border
    size = graph.attribute(node, "scale", [shape[2] - top - bottom, shape[3] - left - right])
    ends = [top + size[0], left + size[1]]
    # These operators exist up to opset 9; indices are inputs from 10 on.
    return [builder.add("Slice", node.input[0], starts=[top, left], ends=ends, axes=[2, 3])]


GIVEN_UP = by_node(
    "Affine, Crop or ImageScaler as simpler operators",
    {"Affine": _affine, "Crop": _cropped, "ImageScaler": _image_scaler},
)


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
