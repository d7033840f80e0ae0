"""LSTM, GRU and RNN without attributes that say what is the default anyway."""

from __future__ import annotations

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.base import Values, by_node, copy

_DEFAULTS = {
    "LSTM": ["Sigmoid", "Tanh", "Tanh"],
    "GRU": ["Sigmoid", "Tanh"],
    "RNN": ["Tanh"],
}


def _without_defaults(node: onnx.NodeProto, values: Values) -> list[onnx.NodeProto] | None:
    """``node`` without ``activations``, if these are the default ones; EPs refuse any."""
    given = [each.decode() for each in graph.attribute(node, "activations", [])]
    directions = 2 if graph.text(node, "direction") == "bidirectional" else 1
    default = _DEFAULTS[node.op_type] * directions
    if not given or [each.lower() for each in given] != [each.lower() for each in default]:
        return None
    result = copy(node)
    # Those of the default activations take no numbers.
    unused = ("activations", "activation_alpha", "activation_beta")
    kept = [each for each in node.attribute if each.name not in unused]
    del result.attribute[:]
    result.attribute.extend(kept)
    return [result]


DEFAULT_ACTIVATIONS = by_node("default activations left out", tuple(_DEFAULTS), _without_defaults)
