"""Unroll what repeats a known number of times: Loop, Scan, LSTM, GRU and RNN."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.unrolling.builder import Builder, Names
from hatch_epcontext.graph.unrolling.loops import unroll_loop, unroll_scan
from hatch_epcontext.graph.unrolling.recurrent import RECURRENT, unroll_recurrent
from hatch_epcontext.graph.unrolling.scope import Scope
from hatch_epcontext.text import count

UNROLLED = RECURRENT | {"Loop", "Scan"}
"""The operators that can be unrolled."""


def unroll(
    model: onnx.ModelProto,
    refused: frozenset[str],
    limit: int,
    types: Mapping[str, onnx.TypeProto],
) -> tuple[str, ...]:
    """Unroll the nodes of ``model`` whose operators are in ``refused``, in place, nested ones too.

    Only a node whose number of repetitions is constant, and whose shapes are known as far as they are
    needed, can be unrolled. ``types``: those of its values, as far as they are known. Returns what
    was done, such as ``"Loop unrolled 16 times"``. The result has constants to compute, as the basic
    optimization of ONNX Runtime does; after it there can be more to unroll. Raises TooManyNodesError, and
    nothing changes, if the graph would get more than ``limit`` nodes.
    """
    wanted = refused & UNROLLED
    if not any(_is_wanted(node, wanted) for node in graph.nodes(model.graph)):
        return ()
    known = graph.inferred(model, types)
    unrolling = _Unrolling(model, wanted)
    builder = Builder(Names.of(model), graph.opset(model), limit)
    nodes = unrolling.expand(known.graph, Scope(), builder)
    if unrolling.done:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        model.graph.initializer.extend(builder.constants)
    return tuple(dict.fromkeys(unrolling.done))


class _Unrolling:
    """Unrolls the ``wanted`` operators of ``model``; ``done`` says what was."""

    def __init__(self, model: onnx.ModelProto, wanted: frozenset[str]) -> None:
        self._model = model
        self._wanted = wanted
        self.done: list[str] = []

    def expand(self, part: onnx.GraphProto, outer: Scope, builder: Builder) -> list[onnx.NodeProto]:
        """The nodes of ``part``, a graph in the scope ``outer``, with unrolled ones in their place.

        They are in ``builder`` then. Raises TooManyNodesError.
        """
        scope = outer.inside(part)
        for node in part.node:
            # What is inside comes first, because copies of a body are more to unroll.
            inner = onnx.NodeProto()
            inner.CopyFrom(node)
            for attribute in inner.attribute:
                for nested in graph.attribute_graphs(attribute):
                    nodes = self.expand(nested, scope, builder.inner())
                    del nested.node[:]
                    nested.node.extend(nodes)
            repeated = (
                self._unroll(inner, scope, builder) if _is_wanted(node, self._wanted) else None
            )
            if repeated is None:
                builder.append(inner)
            else:
                self.done.append(f"{node.op_type} unrolled {count(repeated, 'time')}")
        return builder.nodes

    def _unroll(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> int | None:
        if node.op_type in RECURRENT:
            return unroll_recurrent(node, scope, builder)
        body = graph.attribute(node, "body", None)
        if not isinstance(body, onnx.GraphProto) or body.sparse_initializer:
            return None
        if node.op_type == "Scan":
            return unroll_scan(node, body, scope, builder)
        return unroll_loop(node, body, scope, self._model, builder)


def _is_wanted(node: onnx.NodeProto, wanted: frozenset[str]) -> bool:
    return node.domain in graph.STANDARD and node.op_type in wanted
