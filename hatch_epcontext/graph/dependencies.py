"""Dependencies of values in a graph: on the values of its inputs, and not only on their shapes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.graph.scope import Scope

_MAX_SETTINGS = 4
"""The most numbers in an input with settings."""


class Dependencies(Scope):
    """How values depend on each other in the graph ``main``, without the graphs inside its nodes."""

    def __init__(self, main: onnx.GraphProto) -> None:
        super().__init__(main)
        self._origins = {value.name: frozenset([value.name]) for value in graph.inputs(main)}
        for node, used in zip(main.node, self.reads, strict=True):
            given = {self._origins[name] for name in used if name in self._origins}
            if node.op_type not in operators.SHAPES and given:
                origins = frozenset().union(*given)
                self._origins.update((name, origins) for name in node.output if name)

    @cached_property
    def counted(self) -> tuple[onnx.NodeProto, ...]:
        """The nodes that depend on the values of inputs, and that an output of the graph needs.

        Preparation computes all others once, or removes them.
        """
        needed = sorted(self.above(value.name for value in self.part.output))
        nodes = (self.part.node[index] for index in needed)
        return tuple(node for node in nodes if self.depends(node.output))

    def depends(self, names: Iterable[str]) -> bool:
        """Whether one of the values called ``names`` depends on the values of inputs."""
        return any(name in self._origins for name in names)

    def origins(self, name: str) -> frozenset[str]:
        """The inputs on whose values the value ``name`` depends."""
        return self._origins.get(name, frozenset())

    def behind(self, name: str) -> list[onnx.NodeProto]:
        """The nodes that compute the value ``name`` from inputs, the last ones first."""
        found = self.above([name], lambda each: each in self._origins)
        return [self.part.node[index] for index in found]

    @cached_property
    def settings(self) -> frozenset[str]:
        """The inputs that can be settings, such as a rate or a length, and not data: a few integers.

        An index is data: a token, for example.
        """
        indices = self._indices()
        found = (graph.facts(value) for value in graph.inputs(self.part))
        return frozenset(each.name for each in found if _is_few(each) and each.name not in indices)

    def _indices(self) -> frozenset[str]:
        """The values that choose from tables, as far up as they are moved only."""
        gathers = (node for node in self.part.node if node.op_type in operators.GATHERS)
        return frozenset(
            self.origin(graph.operand(node, 1), operators.MOVES | {"Cast"}) for node in gathers
        )


def _is_few(facts: TensorFacts) -> bool:
    few = (
        facts.shape is not None
        and len(facts.shape) <= 1
        and all(isinstance(size, int) and size <= _MAX_SETTINGS for size in facts.shape)
    )
    return few and (facts.dtype == "bool" or "int" in facts.dtype)
