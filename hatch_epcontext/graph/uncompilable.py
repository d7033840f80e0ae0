"""Nodes of a source graph that an EP cannot compile, found before anything is compiled.

Only the file is read: opening a session on a model of trees can take minutes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import onnx
from onnx import TensorProto

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.facts import Cut, Deciders, Limits, NodeFacts
from hatch_epcontext.graph.parts import cut_around
from hatch_epcontext.graph.scope import Scope

_TRIVIAL = operators.LAYOUT | {"Cast"}
"""Operators that are not worth a context of their own."""

_TREES = frozenset({"TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"})
"""The operators of ``ai.onnx.ml`` that are ensembles of trees."""

_ML = "ai.onnx.ml"

_OTHER_VALUES = {
    "string": "strings",
    "sequence": "a sequence",
    "map": "a map",
    "optional": "an optional value",
}
"""The kinds of values that are not tensors of numbers, and what messages call them."""

_SHAPES_FROM = (
    *("Compress", "ConstantOfShape", "Expand", "NonZero", "Range", "Reshape", "Tile"),
    *("TopK", "Unique"),
)
"""Operators that an EP for fixed shapes compiles only if constants decide the sizes of their results."""


def deciders(scope: Scope, name: str) -> Deciders:
    """The inputs that decide the value ``name``."""
    inputs = sorted(scope.deciding_inputs(name))
    if not inputs or not scope.settings.issuperset(inputs):
        return {}
    compared = (
        constant.item()
        for node in scope.nodes_from_inputs(name)
        for operand in (node.input if node.op_type == "Equal" else ())
        if (constant := scope.constant(operand)) is not None and constant.size == 1
    )
    values = tuple(dict.fromkeys(compared))
    return dict.fromkeys(inputs, values if len(inputs) == 1 else ())


@dataclass(frozen=True)
class Findings:
    """The ``nodes`` that an EP cannot compile, among the ``counted`` ones, which depend on values of inputs.

    ``is_growing``: whether preparation may turn few nodes into many, so that their number means little.
    ``is_trivial``: whether none of the other nodes is worth a context. ``cut``: one that leaves them
    out, if there is one at tensors of known types.
    """

    counted: int
    nodes: tuple[NodeFacts, ...]
    is_growing: bool
    is_trivial: bool
    cut: Cut | None = None

    @property
    def share(self) -> float:
        """The upper limit of the compiled share of the nodes, from 0 to 1."""
        number = len(self.nodes)
        if not number:
            return 1.0
        # If it grows, less than 1, however many nodes preparation makes.
        is_unknown = self.is_growing and number < self.counted
        return 1 - 1e-9 if is_unknown else 1 - number / self.counted


def find(model: onnx.ModelProto, limits: Limits) -> Findings:
    """Find the nodes of ``model`` that an EP with ``limits`` certainly leaves to the CPU.

    Only in the main graph: inner graphs may never run.
    """
    scope = Scope.of(model)
    functions = {(function.domain, function.name) for function in model.functions}
    nodes = (node for node in scope.counted if (node.domain, node.op_type) not in functions)
    pairs = [(node, facts) for node in nodes if (facts := _uncompilable(node, limits, scope))]
    uncompilable = tuple(facts for _, facts in pairs)
    others = Counter(map(graph.operator, scope.counted)) - Counter(n.op for n in uncompilable)
    is_growing = bool(functions) or any(map(graph.inner_graphs, scope.counted))
    is_trivial = _TRIVIAL.issuperset(others)
    cut = None
    if uncompilable and not is_trivial:
        cut = cut_around(scope, [name for node, _ in pairs for name in node.output if name])
    return Findings(len(scope.counted), uncompilable, is_growing, is_trivial, cut)


def _uncompilable(node: onnx.NodeProto, limits: Limits, scope: Scope) -> NodeFacts | None:
    """Why an EP with ``limits`` leaves ``node`` to the CPU; None if it may compile it."""
    operator = graph.operator(node)
    facts = NodeFacts(node.name, operator)
    if node.op_type in _TREES and node.domain == _ML:
        return replace(facts, reason="an ensemble of trees, and the EP is for neural networks")
    for name in (*node.input, *node.output):
        if kind := _kind(name, scope):
            return replace(facts, reason=f"{_OTHER_VALUES[kind]}: {name!r}", own=True)
    if node.domain == _ML and operator not in limits.known:
        return replace(facts, reason=f"an operator of {node.domain}, which the EP does not have")
    is_sized = operator in _SHAPES_FROM and not limits.open_shapes
    decider, what = "", "the shape of an output depends on the values of"
    for index in operators.SIZES_FROM[operator] if is_sized else ():
        name = graph.operand(node, index)
        if scope.varies([name]) and None in map(scope.shape, node.output):
            decider = name
    if operator == "Loop" and not limits.open_shapes and scope.varies(node.input[:1]):
        decider, what = node.input[0], "the number of iterations depends on"
    if not decider:
        return None
    return replace(facts, reason=f"{what} {decider!r}", own=True, deciders=deciders(scope, decider))


def _kind(name: str, scope: Scope) -> str:
    """One of `_OTHER_VALUES`; empty if the value ``name`` is a tensor of numbers, or unknown."""
    type_, node = scope.types.get(name), scope.maker(name)
    if scope.elem_type(name) == TensorProto.STRING:
        return "string"
    if node is not None and node.op_type == "LabelEncoder":
        # onnx does not infer its type.
        return "string" if graph.attribute(node, "values_strings", ()) else ""
    kind = ((type_ and type_.WhichOneof("value")) or "").removesuffix("_type")
    return kind if kind in _OTHER_VALUES else ""
