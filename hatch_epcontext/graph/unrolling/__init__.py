"""Unroll nodes that repeat a known number of times: Loop, Scan, LSTM, GRU and RNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx

from hatch_epcontext.graph.builder import Builder, Outputs, replace
from hatch_epcontext.graph.scope import Scope, Types
from hatch_epcontext.graph.unrolling.loops import unroll_loop, unroll_scan
from hatch_epcontext.graph.unrolling.recurrent import RECURRENT, unroll_recurrent
from hatch_epcontext.text import count

_Unroll = Callable[[onnx.NodeProto, Scope, Builder], "tuple[int, Sequence[str]] | None"]
"""Unrolls a node; returns the number of repetitions and its outputs, or None if these are unknown."""

_UNROLL: dict[str, _Unroll] = {
    **dict.fromkeys(RECURRENT, unroll_recurrent),
    "Loop": unroll_loop,
    "Scan": unroll_scan,
}

UNROLLED = frozenset(_UNROLL)
"""The operators that can be unrolled."""


def unroll(
    model: onnx.ModelProto, refused: frozenset[str], limit: int, types: Types
) -> tuple[str, ...]:
    """Unroll the nodes of ``model`` whose operators are in ``refused``, in place, nested ones too.

    A node can be unrolled only if its number of repetitions is constant, and the needed shapes are known.
    ``types``: the known types of its values. Returns descriptions such as ``"Loop unrolled 16 times"``. ONNX
    Runtime's basic optimization folds constants in the result; then more may be unrolled. Raises
    TooManyNodesError, and nothing changes, if the graph would get more than ``limit`` nodes.
    """
    done: list[str] = []

    def unrolled(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        found = _UNROLL[node.op_type](node, scope, builder)
        if found is None:
            return None
        times, outputs = found
        done.append(f"{node.op_type} unrolled {count(times, 'time')}")
        return outputs

    replace(model, dict.fromkeys(refused & UNROLLED, unrolled), types, limit=limit)
    return tuple(dict.fromkeys(done))
