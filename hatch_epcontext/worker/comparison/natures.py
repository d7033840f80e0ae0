"""What a graph shows about its outputs: the nature of their values, and which of them are scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.dtypes import Array
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.worker.comparison.measures import Nature, OutputFacts, Scores
from hatch_epcontext.worker.ort_values import run
from hatch_epcontext.worker.session import open_unoptimized

_SAME_VALUES = operators.MOVES | operators.EXTREMES | operators.MEANS | {"Cast"}
_SAME_VALUES |= operators.QUANTIZES | operators.DEQUANTIZES
"""Operators whose results are values of their first input, or means of them."""

_WHOLE = _SAME_VALUES - operators.PICKS - {"ReduceMean", "ReduceMax", "ReduceMin"}
"""Those that keep the probabilities of a Softmax together."""

_UNIT = frozenset({"Sigmoid", "HardSigmoid", "Tanh", "Erf", "Sin", "Cos", "Softsign"})

_UNIT_OF_UNITS = frozenset({"Abs", "Max", "Min", "Mul", "Neg", "Relu", "Sqrt"})
"""Operators whose results are between -1 and 1 if all their operands are, such as the score of an object of a
class. So is the first operand of a Clip, and what a TopK selects.
"""

_INDICES = frozenset({"ArgMax", "ArgMin", "NonMaxSuppression", "NonZero"})

_UPDATES = frozenset({"ScatterElements", "ScatterND"})
"""Operators that replace some values of their first input by those of their third one."""

_JOINS = _UPDATES | {"Concat"}

_MAX_VALUES = 2**26
"""The most values of an output whose scores are looked for."""


def output_facts(main: onnx.GraphProto, names: Iterable[str], opset: int) -> dict[str, OutputFacts]:
    """What ``main``, which has the types of its values, shows about those called ``names``."""
    # The values of inner graphs are no values of the main one.
    scope = Scope(main)
    natures = _natures(main, {})
    facts = {}
    for name in names:
        nature = natures.get(name, "any")
        scores = _scores(name, scope, natures, opset) if nature == "any" else None
        facts[name] = OutputFacts(nature, _quantization_scale(name, scope), scores)
    return facts


def _quantization_scale(name: str, scope: Scope) -> float:
    # Means have values between.
    for node in scope.origin_and_moves(name, _SAME_VALUES - operators.MEANS)[1]:
        if node.op_type == "QuantizeLinear":
            return 1.0
        if node.op_type == "DequantizeLinear":
            scale = scope.constant(node.input[1])
            return 0.0 if scale is None else float(abs(scale).max())
    return 0.0


def _natures(part: onnx.GraphProto, outer: Mapping[str, Nature]) -> dict[str, Nature]:
    """The natures of the values that nodes of ``part`` compute, inside a graph with those of ``outer``."""
    natures = dict(outer)
    # They hide values of the same name.
    for name in (*(value.name for value in part.input), *(t.name for t in part.initializer)):
        natures[name] = "any"
    for node in part.node:
        natures |= {name: _nature(node, name, natures) for name in node.output if name}
    return natures


def _nature(node: onnx.NodeProto, name: str, natures: Mapping[str, Nature]) -> Nature:
    """The nature of the value ``name``, which ``node`` computes; ``natures``: those of its operands."""
    operator = graph.operator(node)
    operands: list[Nature] = [natures.get(operand, "any") for operand in node.input] or ["any"]
    are_units = {"unit", "probabilities"}.issuperset(operands)
    if operator == "If":
        return _nature_of_branches(node, name, natures)
    if operator in _SAME_VALUES:
        return "unit" if operands[0] == "probabilities" and operator not in _WHOLE else operands[0]
    if operator in _INDICES or (operator == "TopK" and name == node.output[-1]):
        return "indices"
    if operator == "Concat" or operator in _UNIT_OF_UNITS:
        return "unit" if are_units else "any"
    if operator in ("Clip", "TopK"):
        return "unit" if operands[0] in ("unit", "probabilities") else "any"
    is_unit = operator in _UNIT or (operator in ("LSTM", "GRU") and _is_state(node, name))
    return "probabilities" if operator == "Softmax" else "unit" if is_unit else "any"


def _nature_of_branches(node: onnx.NodeProto, name: str, natures: Mapping[str, Nature]) -> Nature:
    """The nature of an output of an If: that of both branches, if they have the same."""
    index = list(node.output).index(name)
    of_branches = {
        _natures(branch, natures).get(branch.output[index].name, "any")
        for branch in graph.inner_graphs(node)
        if index < len(branch.output)
    }
    return of_branches.pop() if len(of_branches) == 1 else "any"


def _is_state(node: onnx.NodeProto, name: str) -> bool:
    """Whether ``name`` is a hidden state, which follows a Tanh, and not the cell state of an LSTM."""
    default = all(item.name not in ("activations", "clip") for item in node.attribute)
    return default and name in list(node.output)[:2]


def _scores(output: str, scope: Scope, natures: Mapping[str, Nature], opset: int) -> Scores | None:
    """Where ``output`` has scores, if nodes join them with other values, at indices that the graph shows.

    These nodes are run with ones for scores and zeros for all else.
    """
    tail, origins, constants = _tail(output, scope)
    scoring = {name for name in origins if natures.get(name) in ("unit", "probabilities")}
    feeds: dict[str, Array] = {}
    for name in origins if scoring and tail else ():
        if (sizes := scope.sizes(name)) is None:
            return None
        # The sizes of other axes than that of the scores do not matter.
        shape = tuple(1 if size is None else size for size in sizes)
        if math.prod(shape) > _MAX_VALUES:
            return None
        feeds[name] = np.full(shape, name in scoring, np.float32)
    if not feeds:
        return None
    part = helper.make_graph(
        tail,
        "tail",
        [helper.make_tensor_value_info(name, 1, array.shape) for name, array in feeds.items()],
        [onnx.ValueInfoProto(name=output)],
        [
            numpy_helper.from_array(array, name)
            for name, array in constants.items()
            if name not in feeds
        ],
    )
    model = helper.make_model(part, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    try:
        is_score = run(open_unoptimized(model.SerializeToString()), feeds)[output]
    except Exception:
        # ONNX Runtime raises many types. Then all values are compared in the same way.
        return None
    return Scores.at(np.asarray(is_score, bool))


def _tail(
    output: str, scope: Scope
) -> tuple[Sequence[onnx.NodeProto], Sequence[str], Mapping[str, Array]]:
    """The nodes that join and move values into ``output``, the values of which they make it, and constants.

    No nodes if none of them joins values.
    """
    constants: dict[str, Array] = {}
    nodes: dict[int, onnx.NodeProto] = {}
    origins: dict[str, None] = {}
    waiting = [output]
    while waiting:
        name = waiting.pop()
        index = scope.makers.get(name)
        if index in nodes:
            continue
        node = None if index is None else scope.nodes[index]
        data = () if node is None else _moved(node)
        others = () if node is None else [side for side in node.input if side and side not in data]
        shape = scope.shape(name) if node is not None and node.op_type == "Reshape" else None
        # Sizes are often computed of those of an input.
        sizes = np.array(shape) if shape else None
        arrays = ((side, scope.constant(side)) for side in others)
        sides = {side: sizes if array is None else array for side, array in arrays}
        constants |= {side: array for side, array in sides.items() if array is not None}
        if index is None or not data or any(array is None for array in sides.values()):
            origins[name] = None
            continue
        nodes[index] = scope.nodes[index]
        waiting += data
    tail = [_without_type(nodes[index]) for index in sorted(nodes)]
    return tail if any(node.op_type in _JOINS for node in tail) else [], [*origins], constants


def _moved(node: onnx.NodeProto) -> Sequence[str]:
    """The operands of ``node`` whose values, and no others, are in its results."""
    operator = graph.operator(node)
    if operator == "Concat":
        return node.input
    if operator in _UPDATES:
        is_plain = graph.text(node, "reduction") in ("", "none")
        return (node.input[0], node.input[2]) if is_plain else ()
    return node.input[:1] if operator in _SAME_VALUES - operators.EXTREMES - operators.MEANS else ()


def _without_type(node: onnx.NodeProto) -> onnx.NodeProto:
    """``node`` for floats: their indices have no other type."""
    if graph.operator(node) in operators.MOVES | _JOINS:
        return node
    return helper.make_node("Identity", node.input[:1], node.output[:1])
