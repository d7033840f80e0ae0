"""Nodes of a source graph that an EP cannot compile, found before anything is compiled.

Only the file is read: opening a session on a model of trees can take minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.facts import Deciders, Limits
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.text import count, listing

_MAX_NAMES = 3
"""The most names or reasons in one message."""

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
    inputs = sorted(scope.inputs_of(name))
    if not inputs or not scope.settings.issuperset(inputs):
        return {}
    compared = (
        constant.item()
        for node in scope.behind(name)
        for operand in (node.input if node.op_type == "Equal" else ())
        if (constant := scope.constant(operand)) is not None and constant.size == 1
    )
    values = tuple(dict.fromkeys(compared))
    return dict.fromkeys(inputs, values if len(inputs) == 1 else ())


@dataclass(frozen=True)
class RefusedNode:
    """A node that an EP leaves to the CPU, and ``why``.

    ``decider``: the value, at the end of the reason, that would have to be a constant; empty if none would
    help.
    """

    node: onnx.NodeProto
    why: str
    decider: str = ""


@dataclass(frozen=True)
class Findings:
    """The refused nodes among those in ``scope`` that depend on the values of inputs.

    ``growing``: whether preparation may turn few nodes into many, so that their number means little.
    """

    scope: Scope
    refused: tuple[RefusedNode, ...]
    growing: bool

    @property
    def share(self) -> float:
        """The upper limit of the compiled share of the nodes, from 0 to 1."""
        total, refused = len(self.scope.counted), len(self.refused)
        if not refused:
            return 1.0
        # With growing, less than 1, however many nodes preparation makes.
        return 1 - 1e-9 if self.growing and refused < total else 1 - refused / total

    @property
    def deciders(self) -> list[Deciders]:
        """The inputs that decide each refused node; empty if none would help with one of them."""
        found = [deciders(self.scope, r.decider) if r.decider else {} for r in self.refused]
        return found if all(found) else []

    @property
    def is_trivial(self) -> bool:
        """Whether none of the other nodes is worth a context."""
        results = {name for refusal in self.refused for name in refusal.node.output if name}
        rest = (node for node in self.scope.counted if results.isdisjoint(node.output))
        return all(node.op_type in _TRIVIAL for node in rest)


def find(model: onnx.ModelProto, limits: Limits) -> Findings:
    """Find the nodes of ``model`` that an EP with ``limits`` certainly leaves to the CPU.

    Only in the main graph: inner graphs may never run.
    """
    scope = Scope.of(model)
    functions = {(function.domain, function.name) for function in model.functions}
    nodes = (node for node in scope.counted if (node.domain, node.op_type) not in functions)
    refused = (_refused(node, limits, scope) for node in nodes)
    growing = bool(functions) or any(map(graph.inner_graphs, scope.counted))
    return Findings(scope, tuple(refusal for refusal in refused if refusal), growing)


def describe(refused: Sequence[RefusedNode]) -> str:
    """The reasons of refused nodes, each once, with its operators."""
    reasons: dict[str, list[RefusedNode]] = {}
    for refusal in refused:
        reasons.setdefault(refusal.why, []).append(refusal)
    parts = [_describe(why, some) for why, some in reasons.items()]
    more = len(parts) - _MAX_NAMES
    shown = "; ".join(parts[:_MAX_NAMES])
    return f"{shown}; and {count(more, 'more reason')}" if more > 0 else shown


def _describe(why: str, refused: Sequence[RefusedNode]) -> str:
    numbers = Counter(graph.operator(refusal.node) for refusal in refused)
    names = dict.fromkeys(repr(refusal.decider) for refusal in refused if refusal.decider)
    which = listing(names, _MAX_NAMES) if names else ""
    reason = f"{why} {which}".rstrip()
    return f"{listing(_numbered(numbers), _MAX_NAMES)} ({reason})"


def _numbered(operators: Counter[str]) -> list[str]:
    """The operators with their numbers: ``["2 Loop", "Shape"]``."""
    return [op if number == 1 else f"{number} {op}" for op, number in operators.items()]


def _refused(node: onnx.NodeProto, limits: Limits, scope: Scope) -> RefusedNode | None:
    """Why an EP with ``limits`` leaves ``node`` to the CPU; None if it may compile it."""
    operator = graph.operator(node)
    if node.op_type in _TREES and node.domain == _ML:
        return RefusedNode(node, "an ensemble of trees, and the EP is for neural networks")
    for name in (*node.input, *node.output):
        if kind := _kind(name, scope):
            return RefusedNode(node, f"{_OTHER_VALUES[kind]}: {name!r}")
    if node.domain == _ML and operator not in limits.known:
        return RefusedNode(node, f"an operator of {node.domain}, which the EP does not have")
    is_sized = operator in _SHAPES_FROM and not limits.open_shapes
    for index in operators.SIZES_FROM[operator] if is_sized else ():
        name = graph.operand(node, index)
        if scope.depends([name]) and None in map(scope.shape, node.output):
            return RefusedNode(node, "the shape of an output depends on the values of", name)
    if operator == "Loop" and not limits.open_shapes and scope.depends(node.input[:1]):
        return RefusedNode(node, "the number of iterations depends on", node.input[0])
    return None


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
