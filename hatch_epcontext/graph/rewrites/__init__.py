"""Small exact rewrites of models, for EPs that refuse an operator or a form of it.

Each replaces nodes by others that compute the same, and is applied only where an EP has refused them.
"""

from __future__ import annotations

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Rewrite
from hatch_epcontext.graph.rewrites.basics import (
    COMPUTED_BOUNDS,
    COMPUTED_PLACES,
    DEFAULT_ACTIVATIONS,
    ERROR_FUNCTION,
    INTEGER_CASTS,
    REVERSED,
    SHAPES,
    SIMPLER,
    UNDILATED,
)
from hatch_epcontext.graph.rewrites.branches import BRANCHES
from hatch_epcontext.graph.rewrites.einsum import EINSUM
from hatch_epcontext.graph.rewrites.fused import DEFINITIONS, FUNCTIONS, FUSED
from hatch_epcontext.graph.rewrites.integers import INTEGERS
from hatch_epcontext.graph.rewrites.old import NEWER
from hatch_epcontext.graph.rewrites.ranks import FEW_DIMENSIONS
from hatch_epcontext.graph.rewrites.sequences import SEQUENCES
from hatch_epcontext.graph.scope import Types

REWRITES: tuple[Rewrite, ...] = (
    NEWER,
    BRANCHES,
    SEQUENCES,
    REVERSED,
    DEFAULT_ACTIVATIONS,
    FUSED,
    FUNCTIONS,
    DEFINITIONS,
    INTEGERS,
    SIMPLER,
    UNDILATED,
    ERROR_FUNCTION,
    COMPUTED_BOUNDS,
    COMPUTED_PLACES,
    INTEGER_CASTS,
    EINSUM,
    FEW_DIMENSIONS,
    SHAPES,
)
"""All rewrites, in the order in which they are applied."""


def rewrite(
    model: onnx.ModelProto,
    refused: frozenset[str],
    types: Types,
    rewrites: tuple[Rewrite, ...] = REWRITES,
) -> tuple[str, ...]:
    """Apply ``rewrites`` to ``model``, in place, where its nodes have ``refused`` operators.

    ``types``: the known types of its values. Returns the names of those that changed something.
    """
    done = []
    for each in rewrites:
        wanted = each.operators & refused
        if any(graph.operator(node) in wanted for node in graph.nodes(model.graph)):
            done += [each.name] if each.apply(model, types, refused) else []
    return tuple(done)
