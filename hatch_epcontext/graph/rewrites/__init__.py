"""Small exact rewrites of models, for EPs that refuse an operator or a form of it.

Each replaces nodes by others that compute the same, and is applied only where an EP has refused them.
"""

from __future__ import annotations

from hatch_epcontext.graph.rewrites.branches import if_as_where
from hatch_epcontext.graph.rewrites.decompositions import (
    batch_matmul_nbits,
    cast_as_dequantize,
    decompose_comparison,
    decompose_fused_conv,
    decompose_normalization,
    decompose_softplus,
    inline_function,
    reverse_sequence_as_gather,
    slice_as_gather,
)
from hatch_epcontext.graph.rewriting import Rewrite
from hatch_epcontext.graph.unrolling.activations import drop_default_activations

REWRITES: tuple[Rewrite, ...] = (
    if_as_where,
    reverse_sequence_as_gather,
    drop_default_activations,
    decompose_fused_conv,
    decompose_normalization,
    batch_matmul_nbits,
    decompose_softplus,
    inline_function,
    slice_as_gather,
    decompose_comparison,
    cast_as_dequantize,
)
"""All rewrites, in the order in which they are applied: later ones may replace what earlier ones add."""
