"""Replace nodes of a model by others of its opset, with unique names, up to a limit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import helper, numpy_helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.scope import Scope, UnknownError

LISTS: Mapping[str, tuple[int, str]] = {
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"), (18, "axes")),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceSumSquare"), (18, "axes")),
    **dict.fromkeys(("ReduceSum", "Squeeze", "Unsqueeze"), (13, "axes")),
    "Pad": (11, "pads"),
    "Split": (13, "split"),
}
"""Operators whose second input, a list of integers, was an attribute before an opset: that, and its name."""

BOUNDS_AS_INPUTS = 11
"""The opset from which the bounds of a Clip are inputs instead of attributes."""

MAX_VALUES = 2**24
"""The most values that a rewrite stores in one tensor: 64 MB of float32."""

_CONCAT_AT_A_TIME = 128
"""The most values that one Concat joins: QNN's simulator, for example, refuses many more."""


class TooManyNodesError(Exception):
    """The graph would get more nodes than its ``limit``."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the graph would get more than {limit} nodes")


class MissingOperatorError(Exception):
    """The model's opset does not have an operator yet."""

    def __init__(self, operator: str, opset: int) -> None:
        super().__init__(f"the model's opset {opset} has no {operator}")


class Builder:
    """Collects the new ``nodes`` of a graph in order, and the ``stored`` tensors of ``model``'s main graph.

    New names begin with that of the replaced node; ``dtype``: that of its floats, or else of its first value
    with a known one. Methods that add nodes return the names of their outputs; they are of the model's opset.
    They raise TooManyNodesError when the ``size`` of the graph, its nodes with those inside them, exceeds
    ``limit``, and MissingOperatorError for an operator of ONNX that the opset does not have: the node that
    needs it stays as it is. ``declined``: why nodes stayed that have a rule. ``added``: the nodes instead of
    others, by their outputs.
    """

    def __init__(self, model: onnx.ModelProto, limit: int | None = None) -> None:
        self.model, self.limit = model, limit
        self.opset = graph.opset(model)
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[onnx.TensorProto] = []
        self.declined: list[Declined] = []
        self.dtype: np.dtype[Any] = np.dtype(np.float32)
        self._stem = self._stem_of_nodes = ""
        self.size = 0
        self._names: set[str] = set()
        self._counts: dict[str, int] = {}
        self.added: dict[str, onnx.NodeProto] = {}
        for body in graph.graphs(model.graph):
            values = (*body.input, *body.output, *body.value_info)
            self._names |= {value.name for value in values}
            self._names |= {tensor.name for tensor in graph.stored_tensors(body)}
            for node in body.node:
                self._names |= {node.name, *node.input, *node.output}

    def replace(self, scope: Scope, rules: Rules, *, nested: bool = True) -> int:
        """Add the nodes of the graph of ``scope``, each replaced by the rule for its operator, if any.

        Returns the number of replaced nodes; with ``nested`` also those of the graphs inside it.
        """
        count = 0
        for node in map(copy_of, scope.body.node):
            # Inner graphs come first: the node around them may copy them.
            for inner in graph.inner_graphs(node) if nested else ():
                # It shares the stored tensors, the names, and what was declined.
                builder = copy.copy(self)
                builder.nodes, builder.size = [], 0
                count += builder.replace(Scope(inner, scope), rules)
                set_nodes(inner, builder.nodes)
            rule = rules.get(graph.operator(node))
            if rule is not None and self._replace_node(node, scope, rule):
                count += 1
            else:
                self.append(node)
        return count

    def _replace_node(self, node: onnx.NodeProto, scope: Scope, rule: Rule) -> bool:
        """Add what ``rule`` makes instead of ``node``; returns whether it makes all outputs that are used."""
        nodes, stored, size = len(self.nodes), len(self.stored), self.size
        self._begin(node, scope)
        values = self._outputs_of(node, scope, rule)
        pairs = [*zip_longest(node.output, values[: len(node.output)], fillvalue="")]
        if not values or any(output and not value for output, value in pairs):
            del self.nodes[nodes:], self.stored[stored:]
            self.size = size
            return False
        self._give_names(self.nodes[nodes:], pairs)
        return True

    def _begin(self, node: onnx.NodeProto, scope: Scope) -> None:
        """Name and type what is added from now on like ``node``."""
        self._stem = next(filter(None, node.output), node.op_type)
        self._stem_of_nodes = node.name or node.op_type
        dtypes = (scope.dtype(name) for name in (*node.input, *node.output))
        known = [dtype for dtype in dtypes if dtype is not None] or [np.dtype(np.float32)]
        self.dtype = next((dtype for dtype in known if dtype.kind == "f"), known[0])

    def _outputs_of(self, node: onnx.NodeProto, scope: Scope, rule: Rule) -> Sequence[str]:
        """The values by which ``rule`` replaces the outputs of ``node``; empty if it stays."""
        try:
            outcome = rule(node, scope, self)
        except (MissingOperatorError, UnknownError) as error:
            outcome = Declined(str(error))
        if isinstance(outcome, Declined):
            named = replace(outcome, operator=graph.operator(node), node=node.name)
            self.declined.append(named)
            return ()
        return outcome or ()

    def _give_names(self, new: Sequence[onnx.NodeProto], pairs: Iterable[tuple[str, str]]) -> None:
        """Give the values of ``new`` nodes the names of the replaced outputs; ``pairs``: output and value."""
        results = {name for added in new for name in added.output}
        names: dict[str, str] = {}
        for output, value in pairs:
            if output and value in results and value not in names:
                names[value] = output
            elif output:
                self.copy_to(names.get(value, value), output)
        rename_values(new, names)
        self.added.update((name, added) for added in new for name in added.output)

    def write(self) -> None:
        """Give the model the new nodes and stored tensors."""
        set_nodes(self.model.graph, self.nodes)
        self.model.graph.initializer.extend(self.stored)
        named = {entry.domain for entry in self.model.opset_import}
        needed = {node.domain for node in graph.nodes(self.model.graph)}
        if graph.MICROSOFT in needed - named:
            self.model.opset_import.add(domain=graph.MICROSOFT, version=1)

    def fresh(self, name: str) -> str:
        """``name``, with a number after it if a value or a node has it."""
        unique = name
        while unique in self._names:
            self._counts[name] = self._counts.get(name, 0) + 1
            unique = f"{name}_{self._counts[name]}"
        self._names.add(unique)
        return unique

    def append(self, node: onnx.NodeProto) -> None:
        """Add ``node``, whose names are unique."""
        self.nodes.append(node)
        if self.limit is None or node.op_type == "Constant":
            return
        self.size += 1 + sum(map(len, map(graph.compute_nodes, graph.inner_graphs(node))))
        if self.size > self.limit:
            raise TooManyNodesError(self.limit)

    def add_all(
        self, op: str, inputs: Sequence[str], outputs: Iterable[str], **attributes: Any
    ) -> list[str]:
        """Add a node with an output for each of ``outputs`` that is not empty, and return their names.

        Attributes that are None are left out, and so are empty inputs at the end.
        """
        if not attributes.get("domain") and not onnx.defs.has(op, self.opset):
            raise MissingOperatorError(op, self.opset)
        names = [output and self.fresh(f"{self._stem}/{op}") for output in outputs]
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        # Not the output's name: ONNX Runtime's optimizer has one namespace for both.
        name = self.fresh(f"{self._stem_of_nodes}/{op}")
        self.append(helper.make_node(op, inputs, names, name, **attributes))
        return names

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output and return the output's name."""
        return self.add_all(op, inputs, ["output"], **attributes)[0]

    def add_like(
        self, node: onnx.NodeProto, op: str, inputs: Sequence[str], domain: str = "", **changed: Any
    ) -> list[str]:
        """Add a node with the name, the attributes and the number of outputs of ``node``, and return their
        names. ``changed``: other attributes, None for those that are left out.
        """
        names = self.add_all(op, inputs, node.output, domain=domain, **changed)
        kept = (attribute for attribute in node.attribute if attribute.name not in changed)
        self.nodes[-1].attribute.extend(kept)
        self.nodes[-1].name = node.name
        return names

    def store(self, values: ArrayLike) -> str:
        """Store a tensor and return its name."""
        name = self.fresh(f"{self._stem}/stored")
        self.stored.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def number(self, value: ArrayLike) -> str:
        """Store ``value``, one number or several, in the dtype of the node that is replaced."""
        return self.store(np.asarray(value, self.dtype))

    def integers(self, values: Sequence[int]) -> str:
        """Store a list of int64."""
        return self.store(np.asarray(values, np.int64))

    def copy_to(self, value: str, output: str) -> None:
        """Give ``value`` the existing name ``output``."""
        name = self.fresh(f"{self._stem_of_nodes}/Identity")
        self.append(helper.make_node("Identity", [value], [output], name))

    def add_with(
        self, op: str, value: str, numbers: Sequence[int], count: int = 1, **attributes: Any
    ) -> list[str]:
        """Add a node of an operator in `LISTS` with ``count`` outputs, and return their names."""
        operands, own = self._list(op, numbers)
        return self.add_all(op, [value, *operands], ["output"] * count, **attributes, **own)

    def _list(self, op: str, numbers: Sequence[int]) -> tuple[list[str], dict[str, list[int]]]:
        """``numbers`` for a node of an operator in `LISTS`: as an operand, or as an attribute."""
        first, name = LISTS[op]
        return ([], {name: [*numbers]}) if self.opset < first else ([self.integers(numbers)], {})

    def reduced(self, op: str, value: str, axes: Sequence[int], keepdims: int) -> str:
        """``op``, such as ReduceSum or ReduceMean, of ``value`` over ``axes``."""
        return self.add_with(op, value, axes, keepdims=keepdims)[0]

    def clip(self, value: str, low: float, high: float) -> str:
        """``value`` within bounds."""
        if self.opset < BOUNDS_AS_INPUTS:
            return self.add("Clip", value, min=low, max=high)
        return self.add("Clip", value, self.number(low), self.number(high))

    def transpose(self, value: str, perm: Sequence[int]) -> str:
        """``value`` with its dimensions in the order of ``perm``; itself if that is its own."""
        return value if [*perm] == sorted(perm) else self.add("Transpose", value, perm=[*perm])

    def squeeze(self, value: str, axes: Sequence[int]) -> str:
        """``value`` without ``axes``, which have the size 1."""
        return self.add_with("Squeeze", value, axes)[0]

    def reshape(self, value: str, shape: Sequence[int]) -> str:
        """``value`` with a static shape."""
        return self.add("Reshape", value, self.integers(shape))

    def split(self, value: str, axis: int, sizes: Sequence[int]) -> list[str]:
        """``value`` in parts of the given ``sizes`` along ``axis``; itself if there is one."""
        if len(sizes) == 1:
            return [value]
        return self.add_with("Split", value, sizes, len(sizes), axis=axis)

    def item(self, value: str, axis: int, index: int) -> str:
        """``value`` at one ``index`` of ``axis``, without that axis."""
        return self.add("Gather", value, self.store(np.int64(index)), axis=axis)

    def from_start(self, index: str, sizes: ArrayLike) -> str:
        """``index`` with numbers from the start of axes with these ``sizes``, of its dtype: negative ones
        count from the end.
        """
        stored = np.asarray(sizes)
        is_negative = self.add("Less", index, self.store(np.zeros((), stored.dtype)))
        return self.add("Where", is_negative, self.add("Add", index, self.store(stored)), index)

    def concat(self, values: Sequence[str], axis: int) -> str:
        """``values`` one after another along ``axis``."""
        while len(values) > 1:
            values = [
                self.add("Concat", *values[at : at + _CONCAT_AT_A_TIME], axis=axis)
                for at in range(0, len(values), _CONCAT_AT_A_TIME)
            ]
        return values[0]

    def stack(self, values: Sequence[str], axis: int) -> str:
        """``values`` one after another along a new ``axis``."""
        axes, attributes = self._list("Unsqueeze", [axis])
        rows = [self.add("Unsqueeze", value, *axes, **attributes) for value in values]
        return self.concat(rows, axis)

    def store_all(self, body: onnx.GraphProto, names: dict[str, str]) -> None:
        """Store the tensors of ``body``, a graph inside another one; ``names`` gets their new names."""
        for tensor in body.initializer:
            moved = onnx.TensorProto.FromString(tensor.SerializeToString())
            moved.name = names[tensor.name] = self.fresh(tensor.name)
            self.stored.append(moved)

    def copy(
        self, nodes: Iterable[onnx.NodeProto], names: dict[str, str], suffix: str = ""
    ) -> None:
        """Add copies of ``nodes``.

        ``names`` has new names for values that ``nodes`` use, and gets those of their outputs.
        """
        copies = [copy_of(node) for node in nodes]
        for node in copies:
            node.name = node.name or node.op_type
        _name_nodes_anew(copies, names, lambda name: self.fresh(f"{name}{suffix}"))
        for node in copies:
            self.append(node)


Outputs = Sequence[str] | Declined | None
"""The values that replace a node's outputs, or why it stays; None if the rule is not for it."""

Rule = Callable[[onnx.NodeProto, Scope, Builder], Outputs]
"""Adds nodes to the builder that compute the outputs of a node of the scope.

The node also stays as it is if one of its outputs has an empty name in the result.
"""

Rules = Mapping[str, Rule]
"""A rule for each of these operators, as `graph.operator` writes them."""


def copy_of(node: onnx.NodeProto) -> onnx.NodeProto:
    """A copy of ``node`` that can be changed."""
    return onnx.NodeProto.FromString(node.SerializeToString())


def set_nodes(body: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Give ``body`` these ``nodes``, none of which it contains."""
    del body.node[:]
    body.node.extend(nodes)


def remove_unused(
    body: onnx.GraphProto, is_removable: Callable[[onnx.NodeProto], bool] = lambda node: True
) -> None:
    """Remove the removable nodes of ``body`` whose results nothing uses, and their stored tensors."""
    used = {value.name for value in (*body.input, *body.output)}
    kept: list[onnx.NodeProto] = []
    for node in reversed(body.node):
        if not used.isdisjoint(node.output) or not is_removable(node):
            kept.append(copy_of(node))
            used.update(graph.read_by(node))
    set_nodes(body, reversed(kept))
    _keep(body.initializer, used)
    _keep(body.value_info, used)


def _keep(named: Any, used: set[str]) -> None:
    kept = [entry for entry in named if entry.name in used]
    del named[:]
    named.extend(kept)


def _name_nodes_anew(
    nodes: Iterable[onnx.NodeProto], names: dict[str, str], new: Callable[[str], str]
) -> None:
    """Give ``nodes`` and their results the names that ``new`` makes of theirs.

    ``names`` has new names for values that they read, and gets those of their results.
    """
    for node in nodes:
        node.name = node.name and new(node.name)
        node.input[:] = [names.get(name, name) for name in node.input]
        for inner in graph.inner_graphs(node):
            name_graph_anew(inner, dict(names), new)
        names.update((name, new(name)) for name in node.output if name)
        node.output[:] = [names.get(name, "") for name in node.output]


def name_graph_anew(
    body: onnx.GraphProto, names: dict[str, str], new: Callable[[str], str]
) -> None:
    """Give the nodes of ``body`` and all values that it defines the names that ``new`` makes."""
    named: list[Any] = [*body.input, *body.initializer]
    named += (sparse.values for sparse in body.sparse_initializer)
    # Before ONNX IR 4, initializers were listed as inputs too: both get the same name.
    names.update((name, new(name)) for name in dict.fromkeys(value.name for value in named))
    for value in named:
        value.name = names[value.name]
    _name_nodes_anew(body.node, names, new)
    for value in (*body.output, *body.value_info):
        value.name = names.get(value.name, value.name)


def rename_values(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Give the values of ``nodes`` their new ``names``, which no graph inside them has."""
    for node in nodes:
        for list_ in (node.input, node.output):
            list_[:] = [names.get(name, name) for name in list_]
        for inner in graph.inner_graphs(node):
            rename_values(inner.node, names)
            for value in inner.output:
                value.name = names.get(value.name, value.name)
