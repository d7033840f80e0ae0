"""The rewrites of nodes that EPs compute wrong, or inexactly, in float16.

Those of `number_format.ALWAYS` lose nothing and add hardly any nodes. Those of `number_format.CORRECTIONS`
add nodes, whose cost on NPUs is not measured: they are for models that, as a run has shown, need them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from types import MappingProxyType

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.number_format import ALWAYS, CORRECTIONS, RewriteName
from hatch_epcontext.graph.rewrites import (
    factors,
    integers,
    kernels,
    long_integers,
    pools,
    sums,
    transposed,
)
from hatch_epcontext.graph.rewriting import Rewrite, Rules
from hatch_epcontext.graph.scope import Scope, Types

_BROADCASTING = 8
"""The opset from which Max and Min accept a number beside a tensor."""

_RULES: Rules = {
    "pool-padding": (pools.pad_before, ("AveragePool", "LpPool"), pools.is_padded_unevenly),
    **transposed.RULES,
    **kernels.RULES,
    **sums.RULES,
    **integers.RULES,
    **long_integers.RULES,
    **factors.RULES,
}

PRECISE: Mapping[RewriteName, Rewrite] = {
    name: Rewrite(name, frozenset(types), rule, applies=applies)
    for name in (*ALWAYS, *itertools.chain(*CORRECTIONS))
    for rule, types, applies in (_RULES[name],)
}
"""Those of `ALWAYS`, and then of `CORRECTIONS`, in the order in which they are applied."""

_BESIDE: Mapping[RewriteName, frozenset[str]] = {
    "hard-swish": frozenset({"HardSigmoid"}),
    "log-sum-exp": frozenset({"Exp", "ReduceSum"}),
    "mean": frozenset({"ReduceSum"}),
    "split-integers": frozenset({"Cast"}),
    "ratio": frozenset({"Cast"}),
    "variance": frozenset({"ReduceMean"}),
}
"""The other operators of what some rewrites change."""


def applicable(
    model: onnx.ModelProto, types: Types = MappingProxyType({})
) -> tuple[RewriteName, ...]:
    """Those of `PRECISE` for whose operators ``model`` has nodes that they change.

    ``types``: of its values, as far as they are known.
    """
    if graph.opset(model) < _BROADCASTING:
        return ()
    # Most models have no node for which it is needed.
    scope = functools.cache(lambda: Scope(model.graph, types=types, nested=True))
    nodes: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.nodes(model.graph):
        nodes.setdefault(graph.operator(node), []).append(node)
    ends = transposed.outputs_to_keep(model.graph)

    def may_apply(name: RewriteName, rewrite: Rewrite) -> bool:
        if not _BESIDE.get(name, frozenset()) <= nodes.keys():
            return False
        if name == "transposed-outputs" and not ends:
            return False
        of_rewrite = (node for operator in rewrite.operators for node in nodes.get(operator, ()))
        applies = rewrite.applies
        return any(applies is None or applies(node, scope()) for node in of_rewrite)

    return tuple(name for name, rewrite in PRECISE.items() if may_apply(name, rewrite))
