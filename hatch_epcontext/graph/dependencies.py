"""What depends on what in a graph: on the values of its inputs, and not only on their shapes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.arrays import Array
from hatch_epcontext.graph.facts import TensorFacts

_SHAPES = frozenset({"Shape", "Size"})
"""Operators whose outputs depend on the shape of their input only."""

_SAME_VALUES = frozenset(
    {"Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Expand"}
)

_CHOOSING = frozenset({"Gather", "GatherElements", "GatherND"})

_MAX_SETTINGS = 4
"""Numbers that an input with settings has."""


class Dependencies:
    """How values depend on each other in the graph ``main``, without the graphs inside its nodes."""

    def __init__(self, main: onnx.GraphProto) -> None:
        self._main = main
        self._nodes = list(main.node)
        self._used = [list(graph.read_by(node)) for node in self._nodes]
        self._makers = {
            name: index for index, node in enumerate(self._nodes) for name in node.output if name
        }
        self._inputs = {value.name for value in graph.inputs(main)}
        self._origins = self._find_origins()

    @cached_property
    def nodes(self) -> tuple[onnx.NodeProto, ...]:
        """The nodes that depend on the values of inputs, and that an output of the graph needs.

        All others are computed once, or are removed, when the graph is prepared.
        """
        needed = self._needed()
        return tuple(
            node
            for index, node in enumerate(self._nodes)
            if index in needed and self.depends(node.output)
        )

    def depends(self, names: Iterable[str]) -> bool:
        """Whether one of the values called ``names`` depends on the values of inputs."""
        return any(name in self._origins for name in names)

    def origins(self, name: str) -> frozenset[str]:
        """The inputs on whose values the value ``name`` depends."""
        return self._origins.get(name, frozenset())

    def maker(self, name: str) -> onnx.NodeProto | None:
        """The node that makes the value ``name``; None for inputs and stored tensors."""
        index = self._makers.get(name)
        return None if index is None else self._nodes[index]

    def behind(self, name: str) -> list[onnx.NodeProto]:
        """The nodes that make the value ``name`` of inputs, the last ones first."""
        nodes: list[onnx.NodeProto] = []
        seen: set[int] = set()
        waiting = [name]
        while waiting:
            each = waiting.pop()
            index = self._makers.get(each)
            if index is None or index in seen or not self.depends([each]):
                continue
            seen.add(index)
            nodes.append(self._nodes[index])
            waiting += self._used[index]
        return nodes

    @cached_property
    def settings(self) -> frozenset[str]:
        """The inputs that can be settings, such as a rate or a length, and not data: a few integers.

        An index is data: a token, for example.
        """
        indices = self._indices()
        found = (graph.facts(value) for value in graph.inputs(self._main))
        return frozenset(each.name for each in found if _is_few(each) and each.name not in indices)

    def _indices(self) -> frozenset[str]:
        """The inputs that choose from tables."""
        origin = {name: name for name in self._inputs}
        found = set()
        for node in self._nodes:
            first, second = (*node.input, "", "")[:2]
            if node.op_type in _SAME_VALUES and first in origin:
                origin.update(dict.fromkeys(node.output, origin[first]))
            elif node.op_type in _CHOOSING and second in origin:
                found.add(origin[second])
        return frozenset(found)

    def constant(self, name: str) -> Array | None:
        """The stored value ``name`` as an array; None if it is not stored, or in another file."""
        maker = self.maker(name)
        return graph.array_of(graph.constant_tensor(maker) if maker else self._stored.get(name))

    @cached_property
    def _stored(self) -> dict[str, onnx.TensorProto]:
        return {tensor.name: tensor for tensor in self._main.initializer}

    def _find_origins(self) -> dict[str, frozenset[str]]:
        """Each value that depends on the values of inputs, with these inputs."""
        found = {name: frozenset([name]) for name in self._inputs}
        for node, used in zip(self._nodes, self._used, strict=True):
            given = {found[name] for name in used if name in found}
            if node.op_type not in _SHAPES and given:
                origins = frozenset().union(*given)
                found.update((name, origins) for name in node.output if name)
        return found

    def _needed(self) -> set[int]:
        """The numbers of the nodes that an output of the graph needs."""
        needed: set[int] = set()
        waiting = [value.name for value in self._main.output]
        while waiting:
            index = self._makers.get(waiting.pop())
            if index is not None and index not in needed:
                needed.add(index)
                waiting += self._used[index]
        return needed


def _is_few(facts: TensorFacts) -> bool:
    few = len(facts.shape) <= 1 and all(
        isinstance(size, int) and size <= _MAX_SETTINGS for size in facts.shape
    )
    return few and (facts.dtype == "bool" or "int" in facts.dtype)
