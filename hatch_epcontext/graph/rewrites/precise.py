"""The rewrites of nodes that EPs compute wrong, or inexactly, in float16.

Those of `number_format.ALWAYS` lose nothing and add hardly any nodes. Those of `number_format.CORRECTIONS`
add nodes, whose cost on NPUs is not measured: they are for models that, as a run has shown, need them.
"""

from __future__ import annotations

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
    quantized,
    roots,
    sums,
    transposed,
)
from hatch_epcontext.graph.rewriting import Rewrite
from hatch_epcontext.graph.scope import Scope, Types

_BROADCASTING = 8
"""The opset from which Max and Min accept a number beside a tensor."""

_BY_NAME = {
    rewrite.name: rewrite
    for module in (
        factors,
        integers,
        kernels,
        long_integers,
        pools,
        quantized,
        roots,
        sums,
        transposed,
    )
    for rewrite in vars(module).values()
    if isinstance(rewrite, Rewrite)
}

PRECISE: Mapping[RewriteName, Rewrite] = {
    name: _BY_NAME[name] for name in (*ALWAYS, *itertools.chain(*CORRECTIONS))
}
"""Those of `ALWAYS`, and then of `CORRECTIONS`, in the order in which they are applied."""


def applicable(
    model: onnx.ModelProto, types: Types = MappingProxyType({})
) -> tuple[RewriteName, ...]:
    """Those of `PRECISE` for whose operators ``model`` has nodes that they change.

    ``types``: of its values, as far as they are known.
    """
    if graph.opset(model) < _BROADCASTING:
        return ()
    scope = Scope(model.graph, types=types, nested=True)
    nodes = [(graph.operator(node), node) for node in scope.nodes]
    present = {operator for operator, _ in nodes}

    def may_apply(rewrite: Rewrite) -> bool:
        of_rewrite = (node for operator, node in nodes if operator in rewrite.operators)
        is_possible = rewrite.beside <= present
        return is_possible and any(rewrite.applies(node, scope) for node in of_rewrite)

    return tuple(name for name, rewrite in PRECISE.items() if may_apply(rewrite))
