"""Nodes of a source graph that an EP cannot compile, found before anything is compiled.

Only the file is read: opening a session on a model of trees can take minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.facts import Cut
from hatch_epcontext.graph.limits import TREES, Limits
from hatch_epcontext.graph.parts import is_possible
from hatch_epcontext.graph.refusals.conditions import Decided, decided
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.text import count, listing

_MAX_NAMES = 3
"""The most names or reasons in one message."""

MAKES: Mapping[str, str] = {
    "StringConcat": "string",
    "StringNormalizer": "string",
    "StringSplit": "string",
    "ai.onnx.ml.CategoryMapper": "string",
    "SequenceConstruct": "sequence",
    "SequenceEmpty": "sequence",
    "SequenceErase": "sequence",
    "SequenceInsert": "sequence",
    "SequenceMap": "sequence",
    "SplitToSequence": "sequence",
    "ai.onnx.ml.ZipMap": "sequence",
    "ai.onnx.ml.CastMap": "map",
    "ai.onnx.ml.DictVectorizer": "map",
    "Optional": "optional",
}
"""Operators whose first output is never, or not always, a tensor of numbers."""

_SAME_KIND = operators.MOVES | {"Concat", "Where"}
"""Operators whose result is of strings, or a sequence, if what they read is."""

_TRIVIAL = operators.LAYOUT | {"Cast"}
"""Operators that are not worth a context of their own."""


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
    """The nodes that depend on the values of inputs, and the refused ones among them.

    ``growing``: whether preparation may turn few nodes into many, so that their number means little.
    """

    flow: Scope
    refused: tuple[RefusedNode, ...]
    growing: bool

    @property
    def share(self) -> float:
        """The upper limit of the compiled share of the nodes, from 0 to 1."""
        total, refused = len(self.flow.counted), len(self.refused)
        if not refused:
            return 1.0
        if self.growing and refused < total:
            # Less than 1, however many nodes preparation makes.
            return 1 - 1e-9
        return 1 - refused / total

    @property
    def decided(self) -> Decided | None:
        """The inputs that decide all refused nodes; None if data decides one, or nothing that is known."""
        inputs: dict[str, tuple[Any, ...]] = {}
        for refusal in self.refused:
            by = decided(self.flow, refusal.decider) if refusal.decider else None
            if by is None:
                return None
            inputs |= by.inputs
        return Decided(inputs)

    @property
    def is_trivial(self) -> bool:
        """Whether none of the other nodes is worth a context."""
        return all(node.op_type in _TRIVIAL for node in self._rest)

    @property
    def _rest(self) -> list[onnx.NodeProto]:
        return [node for node in self.flow.counted if self._results.isdisjoint(node.output)]

    @property
    def _results(self) -> set[str]:
        return {name for refusal in self.refused for name in refusal.node.output if name}

    def part(self, model: onnx.ModelProto) -> Cut:
        """The cut that keeps the nodes of ``model`` before or after all refused ones; empty if none does."""
        refused, rest = self._results, self._rest
        made = {name for node in rest for name in node.output if name}
        cut = Cut()
        if refused.isdisjoint(self.flow.ancestors(made)):
            read = {name for refusal in self.refused for name in refusal.node.input}
            read |= {value.name for value in model.graph.output} - refused
            cut = Cut(outputs=tuple(n for node in rest for n in node.output if n in read))
        elif made.isdisjoint(self.flow.ancestors(refused)):
            cut = Cut(tuple(sorted({name for node in rest for name in node.input} & refused)))
        return cut if cut and is_possible(model, cut, (), refused) else Cut()


def find(model: onnx.ModelProto, limits: Limits) -> Findings:
    """Find the nodes of ``model`` that an EP with ``limits`` certainly leaves to the CPU.

    Only in the main graph: inner graphs may never run.
    """
    flow = Scope(model.graph)
    own = {(function.domain, function.name) for function in model.functions}
    kinds = _kinds(model.graph)
    fixed = _fixed_values(model.graph)
    refused = []
    for node in flow.counted:
        if (node.domain, node.op_type) in own:
            continue
        if found := _refused(node, limits, flow, kinds, fixed):
            refused.append(found)
    inside = any(map(graph.inner_graphs, flow.counted))
    return Findings(flow, tuple(refused), inside or bool(own))


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
    deciders = dict.fromkeys(repr(refusal.decider) for refusal in refused if refusal.decider)
    which = listing(deciders, _MAX_NAMES) if deciders else ""
    reason = f"{why} {which}".rstrip()
    return f"{listing(numbered(numbers), _MAX_NAMES)} ({reason})"


def numbered(operators: Counter[str]) -> list[str]:
    """The operators with their numbers: ``["2 Loop", "Shape"]``."""
    return [op if number == 1 else f"{number} {op}" for op, number in operators.items()]


def _refused(
    node: onnx.NodeProto,
    limits: Limits,
    flow: Scope,
    kinds: Mapping[str, str],
    fixed: frozenset[str],
) -> RefusedNode | None:
    """Why an EP with ``limits`` leaves ``node`` to the CPU; None if it may compile it."""
    operator = graph.operator(node)
    if node.op_type in TREES and node.domain in limits.domains:
        return RefusedNode(node, "an ensemble of trees, and the EP is for neural networks")
    for name in (*node.input, *node.output):
        kind = kinds.get(name)
        if kind in limits.kinds:
            what = "strings" if kind == "string" else f"a {kind}"
            return RefusedNode(node, f"{what}: {name!r}")
    if node.domain in limits.domains and operator not in limits.known:
        return RefusedNode(node, f"an operator of {node.domain}, which the EP does not have")
    for index in limits.shapes_from.get(operator, ()):
        name = graph.operand(node, index)
        if name and flow.depends([name]) and not fixed.issuperset(node.output):
            return RefusedNode(node, "the shape of an output depends on the values of", name)
    if operator == "Loop" and not limits.loops and flow.depends(node.input[:1]):
        return RefusedNode(node, "the number of iterations depends on", node.input[0])
    return None


def _kinds(main: onnx.GraphProto) -> dict[str, str]:
    """The values of ``main`` that are not tensors of numbers: by their types, or by their nodes."""
    kinds: dict[str, str] = {}
    for value in (*main.input, *main.output, *main.value_info):
        if kind := _kind(value.type):
            kinds[value.name] = kind
    for tensor in main.initializer:
        if tensor.data_type == TensorProto.STRING:
            kinds[tensor.name] = "string"
    for node in main.node:
        kind = _made(node, kinds)
        if kind and node.output and node.output[0]:
            kinds.setdefault(node.output[0], kind)
    return kinds


def _kind(type_: onnx.TypeProto) -> str | None:
    name = type_.WhichOneof("value")
    if name == "tensor_type":
        return "string" if type_.tensor_type.elem_type == TensorProto.STRING else None
    return name.removesuffix("_type") if name in _OTHER_TYPES else None


_OTHER_TYPES = frozenset({"sequence_type", "map_type", "optional_type"})


def _made(node: onnx.NodeProto, kinds: Mapping[str, str]) -> str | None:
    """The kind of the first output of ``node``; None for a tensor of numbers, or if it is unknown."""
    operator = graph.operator(node)
    if operator in _SAME_KIND:
        given = node.input[1:2] if operator == "Where" else node.input[:1]
        return next((kinds[name] for name in given if name in kinds), None)
    if operator == "Cast":
        return "string" if graph.attribute(node, "to", 0) == TensorProto.STRING else None
    if node.domain == "ai.onnx.ml" and _has_string_classes(node):
        return "string"
    return MAKES.get(operator)


_CLASSES = frozenset({"classlabels_strings", "values_strings", "cats_strings"})


def _has_string_classes(node: onnx.NodeProto) -> bool:
    names = {attribute.name for attribute in node.attribute if len(attribute.strings)}
    if node.op_type == "LabelEncoder":
        return "values_strings" in names
    return node.op_type.endswith("Classifier") and not names.isdisjoint(_CLASSES)


def _fixed_values(main: onnx.GraphProto) -> frozenset[str]:
    """The values whose full shapes are in the file."""
    values = (*main.value_info, *main.output)
    return frozenset(value.name for value in values if graph.facts(value).is_fixed)
