"""What a graph computes for some inputs only: branches of an If, and the iterations of a Loop."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.scope import Scope


@dataclass(frozen=True)
class Branching:
    """An If or a Loop, in words, and its ``condition``: of a Loop the number of iterations, or the first one.

    It is empty if it is computed inside another node. ``outputs``: those of the graph that depend
    on it.
    """

    node: str
    condition: str
    is_loop: bool
    outputs: frozenset[str]

    def untaken(self, sides: frozenset[bool]) -> str | None:
        """Which part no sample has run, if conditions were on these ``sides`` only."""
        missing = frozenset((True, False)) - sides
        if self.is_loop:
            if not self.condition:
                return None
            return f"no sample runs the body of the {self.node}" if True in missing else None
        if len(missing) == 2:
            return f"the branches that samples take in the {self.node} are unknown"
        branch = "then" if True in missing else "else"
        return f"no sample takes the branch {branch!r} of the {self.node}" if missing else None


def branchings(main: onnx.GraphProto, kept: onnx.GraphProto) -> Iterator[Branching]:
    """Yield those of ``main`` that values of inputs decide, and that ``kept``, what is left of it, has."""
    names = {node.name for node in graph.nodes(kept) if node.op_type in ("If", "Loop")}
    if not names:
        return
    scope, nested = Scope(main), Scope(main, nested=True)
    own = {value.name for value in graph.inputs(main)} | scope.makers.keys()
    needed = {value.name: {*scope.needed_nodes([value.name])} for value in main.output}
    for index, outer in enumerate(main.node):
        for node in (
            outer,
            *(inner for body in graph.inner_graphs(outer) for inner in graph.nodes(body)),
        ):
            if node.op_type not in ("If", "Loop") or node.name not in names:
                continue
            is_loop, what = node.op_type == "Loop", f"{node.op_type} {node.name!r}"
            outputs = frozenset(name for name, indices in needed.items() if index in indices)
            for condition in filter(None, node.input[: 1 + is_loop]):
                if nested.varies([condition]):
                    yield Branching(what, condition if condition in own else "", is_loop, outputs)
