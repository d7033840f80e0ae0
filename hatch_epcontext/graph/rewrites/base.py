"""What a rewrite is, and what it needs to know of the model that it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from hatch_epcontext.graph import graph

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

Types = Mapping[str, onnx.TypeProto]
"""Types of values by their names."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Rewrite:
    """A replacement of nodes by others that compute the same; ``name`` says in messages what it does.

    ``operators``: those that it replaces, as `graph.operator` writes them. ``apply(values, refused)``
    changes the model of ``values`` in place where a node's operator is in ``refused``, and returns how many
    nodes it has replaced. Nodes that it does not understand stay as they are.
    """

    name: str
    operators: frozenset[str]
    apply: Callable[[Values, frozenset[str]], int]


class Values:
    """What is known of the values of ``model``, and names for new ones.

    ``types``: those that onnx may not infer, such as those behind operators of other domains. Raises
    nothing for a model that shape inference does not understand: less is known of it then.
    """

    def __init__(self, model: onnx.ModelProto, types: Types = MappingProxyType({})) -> None:
        self.model, self.types = model, types
        self._main = model.graph
        self.opset = graph.opset(model)
        self._types: dict[str, onnx.TypeProto | None] = {}
        self._stored: dict[str, onnx.TensorProto | None] = {}
        self._names: set[str] = set()
        for part in graph.graphs(graph.inferred(model, types).graph):
            assert isinstance(part, onnx.GraphProto), "functions have no types"
            for value in (*part.input, *part.value_info, *part.output):
                _once(self._types, value.name, value.type)
        for part in graph.graphs(model.graph):
            for tensor in graph.stored_tensors(part):
                _once(self._stored, tensor.name, tensor)
            self._names.update(value for node in part.node for value in (*node.input, *node.output))
            self._names.update(node.name for node in part.node)
            for node in part.node:
                if (constant := graph.constant_tensor(node)) is not None:
                    _once(self._stored, node.output[0], constant)
        for name, type_ in types.items():
            if self._types.get(name) is None:
                self._types[name] = type_
        self._names.update(self._types, self._stored)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a value; None if it is unknown or has an open dimension."""
        if tensor := self._stored.get(name):
            return tuple(tensor.dims)
        type_ = self._types.get(name)
        if type_ is None or not type_.tensor_type.HasField("shape"):
            return None
        sizes = tuple(graph.size(dim) for dim in type_.tensor_type.shape.dim)
        return None if any(not isinstance(each, int) for each in sizes) else sizes  # type: ignore[return-value]

    def rank(self, name: str) -> int | None:
        """The number of dimensions of a value; None if it is unknown."""
        if tensor := self._stored.get(name):
            return len(tensor.dims)
        type_ = self._types.get(name)
        if type_ is None or not type_.tensor_type.HasField("shape"):
            return None
        return len(type_.tensor_type.shape.dim)

    def elem_type(self, name: str) -> int | None:
        """ONNX's number of a value's dtype; None if it is unknown, or if it is no tensor."""
        if tensor := self._stored.get(name):
            return int(tensor.data_type)
        type_ = self._types.get(name)
        return int(type_.tensor_type.elem_type) or None if type_ is not None else None

    def dtype(self, name: str) -> np.dtype[Any] | None:
        """NumPy's dtype of a value; None if it is unknown, or if NumPy has none for it."""
        try:
            return np.dtype(helper.tensor_dtype_to_np_dtype(self.elem_type(name) or 0))
        except KeyError:
            return None

    def constant(self, name: str) -> Array | None:
        """The values of a stored tensor; None if it is computed, or if they are in another file."""
        return graph.array_of(self._stored.get(name))

    def fresh(self, stem: str) -> str:
        """A name that begins with ``stem`` and that nothing has."""
        name, number = stem, 0
        while name in self._names:
            number += 1
            name = f"{stem}_{number}"
        self._names.add(name)
        return name

    def store(self, stem: str, array: Array) -> str:
        """Store ``array`` in the model; returns its name."""
        tensor = numpy_helper.from_array(np.asarray(array), self.fresh(stem))
        self._main.initializer.append(tensor)
        self._stored[tensor.name] = tensor
        return tensor.name

    def move(self, tensor: onnx.TensorProto) -> str:
        """Store ``tensor``, which was stored in an inner graph; returns its new name."""
        moved = onnx.TensorProto.FromString(tensor.SerializeToString())
        moved.name = self.fresh(tensor.name)
        self._main.initializer.append(moved)
        self._stored[moved.name] = moved
        return moved.name


def _once(known: dict[str, Any], name: str, value: Any) -> None:
    """Enter ``value``; None for a name that has others in other graphs."""
    known[name] = value if known.get(name, value) == value else None


Expand = Callable[[onnx.NodeProto, Values], "Sequence[onnx.NodeProto] | None"]
"""Returns the nodes that replace a node, with the same outputs; None if it stays as it is."""


def by_node(name: str, operators: Sequence[str], expand: Expand) -> Rewrite:
    """A rewrite that replaces nodes one by one, in the graphs inside of others too."""
    known = frozenset(operators)

    def apply(values: Values, refused: frozenset[str]) -> int:
        return sum(
            replace(part, expand, values, known & refused)
            for part in graph.graphs(values.model.graph)
            if isinstance(part, onnx.GraphProto)
        )

    return Rewrite(name, known, apply)


def replace(part: onnx.GraphProto, expand: Expand, values: Values, wanted: frozenset[str]) -> int:
    """Replace the nodes of ``part`` whose operators are ``wanted``; returns how many."""
    result: list[onnx.NodeProto] = []
    replaced = 0
    for node in part.node:
        new = expand(node, values) if graph.operator(node) in wanted else None
        if new is None:
            result.append(node)
            continue
        replaced += 1
        for each in new:
            each.name = values.fresh(f"{node.name or node.op_type}/{each.op_type}")
        result += new
    if replaced:
        copies = [copy(node) for node in result]
        del part.node[:]
        part.node.extend(copies)
    return replaced


def copy(node: onnx.NodeProto) -> onnx.NodeProto:
    """A node like ``node``, which can be changed."""
    return onnx.NodeProto.FromString(node.SerializeToString())


def consumers(part: onnx.GraphProto) -> dict[str, list[onnx.NodeProto]]:
    """The nodes of ``part`` that take each value; a node with graphs inside takes what these take."""
    result: dict[str, list[onnx.NodeProto]] = {}
    for node in part.node:
        for name in dict.fromkeys(graph.read_by(node)):
            result.setdefault(name, []).append(node)
    return result
