"""What a graph shows about its outputs: the nature of their values, randomness, and their dependencies."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.worker.comparison.measures import Nature

_SAME_VALUES = operators.MOVES | operators.EXTREMES | operators.MEANS | {"Cast"}
_SAME_VALUES |= operators.QUANTIZES | operators.DEQUANTIZES
"""Operators whose results are values of their first input, or means of them."""

_WHOLE = _SAME_VALUES - operators.PICKS - {"ReduceMean", "ReduceMax", "ReduceMin"}
"""Those that keep the probabilities of a Softmax together."""

_UNIT = frozenset({"Sigmoid", "HardSigmoid", "Tanh", "Erf", "Sin", "Cos", "Softsign"})

_INDICES = frozenset({"ArgMax", "ArgMin", "NonMaxSuppression", "NonZero"})


def natures(main: onnx.GraphProto, more: Sequence[str] = ()) -> dict[str, Nature]:
    """The nature of the values of each output of ``main``, and of ``more`` inside it."""
    scope = Scope(main)
    return {name: _nature(name, scope) for name in _names(main, more)}


def quantization_steps(main: onnx.GraphProto, more: Sequence[str] = ()) -> dict[str, float]:
    """The step between the values of each quantized one; the largest of several."""
    scope = Scope(main)
    found = ((name, _quantization_step(name, scope)) for name in _names(main, more))
    return {name: size for name, size in found if size}


def _names(main: onnx.GraphProto, more: Sequence[str]) -> tuple[str, ...]:
    return *(value.name for value in main.output), *more


def _quantization_step(name: str, scope: Scope) -> float:
    # Means have finer steps.
    for node in scope.trace(name, _SAME_VALUES - operators.MEANS)[1]:
        if node.op_type == "QuantizeLinear":
            return 1.0
        if node.op_type == "DequantizeLinear":
            scale = scope.constant(node.input[1])
            return 0.0 if scale is None else float(abs(scale).max())
    return 0.0


def _nature(name: str, scope: Scope) -> Nature:
    origin, passed = scope.trace(name, _SAME_VALUES)
    node = scope.maker(origin)
    nature = "any" if node is None else _made(node, origin, scope)
    is_whole = all(graph.operator(each) in _WHOLE for each in passed)
    return "unit" if nature == "probabilities" and not is_whole else nature


def _made(node: onnx.NodeProto, name: str, scope: Scope) -> Nature:
    """The nature of the value ``name``, which ``node`` computes."""
    if node.op_type == "If":
        return _of_branches(node, name, scope)
    if node.op_type == "Concat":
        parts = {_nature(each, scope) for each in node.input}
        return "unit" if parts <= {"unit", "probabilities"} else "any"
    if node.op_type in _INDICES or (node.op_type == "TopK" and name == node.output[-1]):
        return "indices"
    is_unit = node.op_type in _UNIT or (node.op_type in ("LSTM", "GRU") and _is_state(node, name))
    return "probabilities" if node.op_type == "Softmax" else "unit" if is_unit else "any"


def _of_branches(node: onnx.NodeProto, name: str, scope: Scope) -> Nature:
    """The nature of an output of an If: that of both branches, if they have the same."""
    index = list(node.output).index(name)
    found = {
        _nature(branch.output[index].name, Scope(branch, scope))
        for branch in graph.inner_graphs(node)
        if index < len(branch.output)
    }
    return found.pop() if len(found) == 1 else "any"


def _is_state(node: onnx.NodeProto, name: str) -> bool:
    """Whether ``name`` is a hidden state, which follows a Tanh, and not the cell state of an LSTM."""
    default = all(each.name not in ("activations", "clip") for each in node.attribute)
    return default and name in list(node.output)[:2]


def depend_on_chance(main: onnx.GraphProto) -> bool:
    """Whether there is a random operator in ``main`` or the graphs inside it."""
    return any(map(graph.is_random, main.node))


def depend_on_inputs(main: onnx.GraphProto) -> frozenset[str]:
    """The outputs of ``main`` that depend on the values of its inputs, and not only on their shapes."""
    flow = Scope(main)
    return frozenset(value.name for value in main.output if flow.depends([value.name]))
