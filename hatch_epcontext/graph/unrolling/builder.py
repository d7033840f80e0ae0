"""New nodes and constants of a graph: with unique names, in the form of its opset, up to a limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.arrays import Array

_CONCAT_AT_A_TIME = 128
"""How many values one Concat joins: EPs have limits, QNN's simulator refuses many more."""


class TooManyNodesError(Exception):
    """The graph would get more nodes than its ``limit``."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the graph would get more than {limit} nodes (unroll-limit)")


@dataclass(frozen=True)
class Names:
    """All names in a model, which new ones must not repeat."""

    taken: set[str]
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: onnx.ModelProto) -> Names:
        """The names of values and nodes in ``model``, of nested graphs too."""
        taken: set[str] = set()
        for part in graph.graphs(model.graph):
            assert isinstance(part, onnx.GraphProto), "a graph has only graphs inside it"
            taken |= {each.name for each in (*part.input, *part.output, *part.value_info)}
            taken |= {each.name for each in graph.stored_tensors(part)}
            for node in part.node:
                taken |= {node.name, *node.input, *node.output}
        return cls(taken)

    def fresh(self, wanted: str) -> str:
        """``wanted``, with a number after it if the name is taken."""
        name = wanted
        while name in self.taken or not name:
            self.counts[wanted] = self.counts.get(wanted, 0) + 1
            name = f"{wanted}_{self.counts[wanted]}"
        self.taken.add(name)
        return name


@dataclass(frozen=True)
class Builder:
    """Collects ``nodes`` in order, and the ``constants`` of the whole model.

    Raises TooManyNodesError when there are more than ``limit`` nodes, nested ones too, in ``nodes``.
    """

    names: Names
    opset: int
    limit: int
    constants: list[onnx.TensorProto] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def inner(self) -> Builder:
        """A builder for the nodes of another graph of the same model."""
        return Builder(self.names, self.opset, self.limit, self.constants)

    def append(self, node: onnx.NodeProto) -> None:
        """Add ``node``, whose names are unique."""
        self.nodes.append(node)
        if node.op_type == "Constant":
            return
        size = 1 + sum(
            len(graph.compute_nodes(each))
            for attribute in node.attribute
            for each in graph.attribute_graphs(attribute)
        )
        self.sizes.append(size + (self.sizes[-1] if self.sizes else 0))
        if self.sizes[-1] > self.limit:
            raise TooManyNodesError(self.limit)

    def add(self, op: str, inputs: Sequence[str], hint: str, **attributes: Any) -> str:
        """Add a node with one output and return the output's name; ``hint`` is what it is named after."""
        return self.add_several(op, inputs, hint, 1, **attributes)[0]

    def add_several(
        self, op: str, inputs: Sequence[str], hint: str, outputs: int, **attributes: Any
    ) -> list[str]:
        """Add a node with ``outputs`` outputs and return their names."""
        names = [self.names.fresh(hint) for _ in range(outputs)]
        # Not the output's name: the graph optimizer of ONNX Runtime keeps one space of names for both.
        node = helper.make_node(op, inputs, names, self.names.fresh(f"{hint}/{op}"), **attributes)
        self.append(node)
        return names

    def constant(self, values: Array, hint: str) -> str:
        """Add a stored tensor and return its name."""
        name = self.names.fresh(hint)
        self.constants.append(numpy_helper.from_array(values, name))
        return name

    def integers(self, values: Sequence[int], hint: str) -> str:
        """Add a stored list of int64 and return its name."""
        return self.constant(np.asarray(values, np.int64), hint)

    def copy_to(self, value: str, output: str, hint: str) -> None:
        """Give ``value`` the existing name ``output``; nothing if that is empty."""
        if output:
            name = self.names.fresh(f"{hint}/Identity")
            self.append(helper.make_node("Identity", [value], [output], name))

    def reshape(self, value: str, shape: Sequence[int], hint: str) -> str:
        """``value`` with a static shape."""
        return self.add("Reshape", [value, self.integers(shape, f"{hint}/shape")], hint)

    def unsqueeze(self, value: str, axis: int, hint: str) -> str:
        """``value`` with a dimension of 1 at ``axis`` of the result."""
        if self.opset < 13:
            return self.add("Unsqueeze", [value], hint, axes=[axis])
        return self.add("Unsqueeze", [value, self.integers([axis], f"{hint}/axes")], hint)

    def split(self, value: str, axis: int, sizes: Sequence[int], hint: str) -> list[str]:
        """``value`` in parts of the given ``sizes`` along ``axis``; itself if there is one."""
        if len(sizes) == 1:
            return [value]
        if self.opset < 13:
            return self.add_several("Split", [value], hint, len(sizes), axis=axis, split=sizes)
        inputs = [value, self.integers(sizes, f"{hint}/sizes")]
        return self.add_several("Split", inputs, hint, len(sizes), axis=axis)

    def item(self, value: str, axis: int, index: int, hint: str) -> str:
        """``value`` at one ``index`` of ``axis``, without that axis."""
        chosen = self.constant(np.asarray(index, np.int64), f"{hint}/index")
        return self.add("Gather", [value, chosen], hint, axis=axis)

    def concat(self, values: Sequence[str], axis: int, hint: str) -> str:
        """``values`` one after another along ``axis``."""
        while len(values) > 1:
            values = [
                self.add("Concat", values[at : at + _CONCAT_AT_A_TIME], hint, axis=axis)
                for at in range(0, len(values), _CONCAT_AT_A_TIME)
            ]
        return values[0]


def instantiate(
    nodes: Iterable[onnx.NodeProto], renamed: dict[str, str], builder: Builder, suffix: str
) -> None:
    """Add a copy of ``nodes`` to ``builder``.

    ``renamed`` has new names for values that ``nodes`` use, and gets those of their outputs.
    """
    for node in nodes:
        builder.append(_renamed_node(node, renamed, builder.names, suffix))


def _renamed_node(
    node: onnx.NodeProto, renamed: dict[str, str], names: Names, suffix: str
) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = names.fresh(f"{node.name or node.op_type}{suffix}")
    copy.input[:] = [renamed.get(name, name) for name in node.input]
    for attribute in copy.attribute:
        for part in graph.attribute_graphs(attribute):
            _rename_graph(part, dict(renamed), names, suffix)
    for index, name in enumerate(node.output):
        copy.output[index] = _rename(name, renamed, names, suffix)
    return copy


def _rename(name: str, renamed: dict[str, str], names: Names, suffix: str) -> str:
    if name:
        renamed[name] = names.fresh(f"{name}{suffix}")
    return renamed.get(name, "")


def _rename_graph(
    part: onnx.GraphProto, renamed: dict[str, str], names: Names, suffix: str
) -> None:
    """Give all values that ``part`` defines new names, in place."""
    for value in part.input:
        # Before ONNX IR 4, initializers were listed as inputs too: both get the same name.
        value.name = _rename(value.name, renamed, names, suffix)
    inputs = {value.name for value in part.input}
    for tensor in (*part.initializer, *(sparse.values for sparse in part.sparse_initializer)):
        known = renamed.get(tensor.name)
        tensor.name = known if known in inputs else _rename(tensor.name, renamed, names, suffix)
    del part.value_info[:]
    renamed_nodes = [_renamed_node(node, renamed, names, suffix) for node in part.node]
    del part.node[:]
    part.node.extend(renamed_nodes)
    for value in part.output:
        value.name = renamed.get(value.name, value.name)
