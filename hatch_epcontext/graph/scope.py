"""What is known of the values that a graph can use: its own, and those of the graphs around it.

Types and stored tensors include those of the graphs around it; nodes, and what depends on what, are only the
graph's own.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence, Set
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from hatch_epcontext.graph import graph, inference, operators
from hatch_epcontext.graph.facts import TensorFacts

T = TypeVar("T")

_MAX_SETTINGS = 4
"""The most numbers in an input with settings."""

Types = Mapping[str, onnx.TypeProto]
"""Types of values by their names."""

Sizes = tuple[int | None, ...]
"""A shape; an open dimension is None."""


class UnknownError(Exception):
    """A rewrite needs what is not known of a value before the model runs."""


class Scope:
    """The graph ``body`` inside that of ``outer``; its values hide others of the same name.

    With ``nested`` its inner graphs belong to it too, as far as their names differ. ``types``: of values
    whose types the graph does not contain. The attributes ``types`` and ``stored`` include the graphs around
    it. Methods return None for unknown values.
    """

    def __init__(
        self,
        body: onnx.GraphProto,
        outer: Scope | None = None,
        types: Types = MappingProxyType({}),
        *,
        nested: bool = False,
    ) -> None:
        self.body, self._outer = body, outer
        bodies = [*graph.graphs(body)] if nested else [body]
        self.nodes: Sequence[onnx.NodeProto] = body.node
        if len(bodies) > 1:
            self.nodes = [node for inner in bodies for node in inner.node]
        own: dict[str, onnx.TypeProto | None] = dict(types)
        stored: dict[str, onnx.TensorProto | None] = {}
        for inner in bodies:
            values = (*inner.input, *inner.value_info, *inner.output)
            typed = {value.name: value.type for value in values}
            own |= typed
            stored |= dict.fromkeys(typed)
            for node in inner.node:
                tensor = graph.constant_tensor(node)
                for name in node.output:
                    own.setdefault(name, None)
                    stored[name] = tensor
            stored |= {tensor.name: tensor for tensor in inner.initializer}
        self._own = own.keys()
        self.types: MutableMapping[str, onnx.TypeProto | None] = own
        self.stored: MutableMapping[str, onnx.TensorProto | None] = stored
        if outer is not None:
            self.types = ChainMap(own, outer.types)
            self.stored = ChainMap(stored, outer.stored)

    @staticmethod
    def of(model: onnx.ModelProto, types: Types = MappingProxyType({})) -> Scope:
        """The main graph of a copy of ``model``, with the types that onnx infers.

        ``types``: those that onnx may not infer, such as after operators of other domains.
        """
        scope = Scope(inference.inferred(model, types), types=types)
        scope.stored.update({tensor.name: tensor for tensor in model.graph.initializer})
        return scope

    @cached_property
    def makers(self) -> Mapping[str, int]:
        """The number of the node of this graph that computes each value."""
        return {name: i for i, node in enumerate(self.nodes) for name in node.output if name}

    @cached_property
    def reads(self) -> Sequence[Sequence[str]]:
        """The values that each node of this graph reads, also in the graphs inside it."""
        return [tuple(dict.fromkeys(graph.read_by(node))) for node in self.nodes]

    @cached_property
    def readers(self) -> Mapping[str, Set[int]]:
        """The numbers of the nodes of this graph that read each value."""
        readers: defaultdict[str, set[int]] = defaultdict(set)
        for index, names in enumerate(self.reads):
            for name in names:
                readers[name].add(index)
        return readers

    def nodes_reading(self, name: str) -> list[onnx.NodeProto]:
        """The nodes of this graph that read a value, also in the graphs inside them."""
        return [self.nodes[index] for index in self.readers.get(name, ())]

    def maker(self, name: str, *of: str) -> onnx.NodeProto | None:
        """The node that computes a value, in this graph or around it; None for inputs and stored tensors, and
        where operators ``of`` are named for a node of another one.
        """
        if (index := self.makers.get(name)) is not None:
            node = self.nodes[index]
            return node if not of or graph.operator(node) in of else None
        # A value of this graph hides those of the same name around it.
        if self._outer is None or name in self._own:
            return None
        return self._outer.maker(name, *of)

    def needed_nodes(
        self, names: Iterable[str], goes_on: Callable[[str], bool] = lambda name: True
    ) -> list[int]:
        """The numbers of the nodes of this graph on which values depend, the nearest first.

        ``goes_on``: whether to follow what a value depends on.
        """
        indices: dict[int, None] = {}
        waiting = deque(names)
        while waiting:
            name = waiting.popleft()
            index = self.makers.get(name)
            if index is not None and index not in indices and goes_on(name):
                indices[index] = None
                waiting += self.reads[index]
        return list(indices)

    def needed_values(
        self, names: Iterable[str], goes_on: Callable[[str], bool] = lambda name: True
    ) -> list[str]:
        """The values called ``names`` and those they depend on, the nearest first; see `needed_nodes`."""
        first = list(names)
        read = (name for index in self.needed_nodes(first, goes_on) for name in self.reads[index])
        return list(dict.fromkeys((*first, *read)))

    def origin_and_moves(
        self, name: str, through: Container[str]
    ) -> tuple[str, list[onnx.NodeProto]]:
        """The `origin` of a value, and the nodes that make the value of it, the last one first."""
        nodes: dict[str, onnx.NodeProto] = {}
        # In an invalid graph a value may depend on itself.
        while name not in nodes and (node := self.maker(name)) is not None:
            if graph.operator(node) not in through or not node.input:
                break
            nodes[name] = node
            name = node.input[0]
        return name, [*nodes.values()]

    def origin(self, name: str, through: Container[str]) -> str:
        """The value of which nodes of the operators ``through`` make ``name``, each of its first operand."""
        return self.origin_and_moves(name, through)[0]

    @cached_property
    def _inputs(self) -> Mapping[str, frozenset[str]]:
        """The inputs on whose values, and not only on their shapes, each value depends."""
        inputs = {value.name: frozenset([value.name]) for value in graph.inputs(self.body)}
        for node, reads in zip(self.nodes, self.reads, strict=True):
            behind = frozenset().union(*(inputs.get(name, ()) for name in reads))
            if behind and node.op_type not in operators.SHAPES:
                inputs.update((name, behind) for name in node.output if name)
        return inputs

    def deciding_inputs(self, name: str) -> frozenset[str]:
        """The inputs on whose values a value depends."""
        return self._inputs.get(name, frozenset())

    def varies(self, names: Iterable[str]) -> bool:
        """Whether one of the values called ``names`` depends on the values of inputs."""
        return not self._inputs.keys().isdisjoint(names)

    def nodes_from_inputs(self, name: str) -> list[onnx.NodeProto]:
        """The nodes that compute the value ``name`` from inputs, the last ones first."""
        return [self.nodes[index] for index in self.needed_nodes([name], self._inputs.__contains__)]

    @cached_property
    def counted(self) -> tuple[onnx.NodeProto, ...]:
        """The nodes that depend on the values of inputs, and that an output of the graph needs.

        Preparation computes all others once, or removes them.
        """
        needed = sorted(self.needed_nodes(value.name for value in self.body.output))
        return tuple(self.nodes[index] for index in needed if self.varies(self.nodes[index].output))

    @cached_property
    def settings(self) -> frozenset[str]:
        """The inputs that can be settings, such as a rate or a length, and not data: a few integers.

        An index is data: a token, for example.
        """
        indices = {
            self.origin(graph.operand(node, 1), operators.MOVES | {"Cast"})
            for node in self.nodes
            if node.op_type in operators.GATHERS
        }
        inputs = graph.input_facts(self.body)
        return frozenset(
            value.name for value in inputs if _is_few(value) and value.name not in indices
        )

    def constant(self, name: str) -> NDArray[Any] | None:
        """The values of a stored tensor; None if it is computed, or if they are in another file."""
        return graph.array_of(self.stored.get(name))

    def sizes(self, name: str) -> Sizes | None:
        """The shape of a value, with None for open dimensions; None if its rank is unknown."""
        if tensor := self.stored.get(name):
            return tuple(tensor.dims)
        type_ = self.types.get(name)
        return None if type_ is None else graph.sizes(type_)

    def axes(self, node: onnx.NodeProto) -> list[int] | None:
        """The axes that ``node`` reduces, from an attribute or an input, counted from the first.

        None if there are none or they are unknown.
        """
        sizes, name = self.sizes(node.input[0]), graph.operand(node, 1)
        axes = (
            self.constant(name) if name else np.array(graph.attribute(node, "axes", []), np.int64)
        )
        if sizes is None or axes is None:
            return None
        if not axes.size:
            return None if graph.number(node, "noop_with_empty_axes", 0) else [*range(len(sizes))]
        return [int(axis) % len(sizes) for axis in axes.ravel()]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a value; None if it is unknown or has an open dimension."""
        sizes = self.sizes(name)
        known = tuple(size for size in sizes or () if size is not None)
        return known if sizes == known else None

    def fixed_shape(self, name: str) -> tuple[int, ...]:
        """The `shape` of a value. Raises UnknownError if there is none."""
        return _known(self.shape(name), f"the shape of {name!r} is not fixed")

    def stored_values(self, name: str) -> NDArray[Any]:
        """The `constant` called ``name``. Raises UnknownError if there is none."""
        return _known(self.constant(name), f"{name!r} is computed")

    def known_type(self, name: str) -> int:
        """The `elem_type` of a value. Raises UnknownError if there is none."""
        return _known(self.elem_type(name), f"the type of {name!r} is not known")

    def known_dtype(self, name: str) -> np.dtype[Any]:
        """The `dtype` of a value. Raises UnknownError if there is none."""
        return _known(self.dtype(name), f"the type of {name!r} is not known")

    def fixed_axes(self, node: onnx.NodeProto) -> list[int]:
        """The `axes` that ``node`` reduces. Raises UnknownError if there are none."""
        return _known(self.axes(node), "its axes are not known")

    def elem_type(self, name: str) -> int | None:
        """ONNX's number of a value's dtype; None if it is unknown, or if it is no tensor."""
        if tensor := self.stored.get(name):
            return int(tensor.data_type)
        type_ = self.types.get(name)
        return int(type_.tensor_type.elem_type) or None if type_ is not None else None

    def dtype(self, name: str) -> np.dtype[Any] | None:
        """NumPy's dtype of a value; None if it is unknown, or if NumPy has none for it."""
        try:
            return np.dtype(helper.tensor_dtype_to_np_dtype(self.elem_type(name) or 0))
        except KeyError:
            return None

    def kind(self, name: str) -> str:
        """NumPy's letter for the kind of a value's `dtype`, such as ``"f"`` for floats; empty without one."""
        dtype = self.dtype(name)
        return "" if dtype is None else dtype.kind

    def is_whole(self, name: str) -> bool:
        """Whether a value has integers."""
        return self.kind(name) in ("i", "u")


def _known(value: T | None, reason: str) -> T:
    """``value``; raises UnknownError for the ``reason`` if there is none."""
    if value is None:
        raise UnknownError(reason)
    return value


def _is_few(facts: TensorFacts) -> bool:
    is_list = facts.shape is not None and len(facts.shape) <= 1
    are_few = all(isinstance(size, int) and size <= _MAX_SETTINGS for size in facts.sizes)
    return is_list and are_few and (facts.dtype == "bool" or "int" in facts.dtype)
