"""Small exact rewrites of models, for EPs that refuse an operator or a form of it.

Each replaces nodes by others that compute the same, and is applied only where an EP has refused them.
"""

from __future__ import annotations

from hatch_epcontext.graph.rewrites.branches import if_as_where
from hatch_epcontext.graph.rewrites.elementwise import (
    cast_as_dequantize,
    clip_as_max_min,
    decompose_comparison,
    erf_as_tanh,
)
from hatch_epcontext.graph.rewrites.fused import (
    batch_matmul_nbits,
    decompose_batch_normalization,
    decompose_fused_conv,
    decompose_normalization,
    decompose_reduction,
    decompose_softplus,
    inline_function,
)
from hatch_epcontext.graph.rewrites.indexing import (
    reverse_sequence_as_gather,
    scatter_as_matmul,
    slice_as_gather,
    tensor_scatter_as_where,
)
from hatch_epcontext.graph.rewrites.ranks import (
    join_reshapes,
    reduce_rank_of_gather,
    reduce_rank_of_transpose,
)
from hatch_epcontext.graph.rewriting import Rewrite
from hatch_epcontext.graph.unrolling.activations import drop_default_activations

REWRITES: tuple[Rewrite, ...] = (
    if_as_where,
    reverse_sequence_as_gather,
    drop_default_activations,
    decompose_fused_conv,
    decompose_normalization,
    decompose_batch_normalization,
    batch_matmul_nbits,
    decompose_reduction,
    decompose_softplus,
    inline_function,
    scatter_as_matmul,
    tensor_scatter_as_where,
    slice_as_gather,
    decompose_comparison,
    erf_as_tanh,
    clip_as_max_min,
    cast_as_dequantize,
    reduce_rank_of_transpose,
    reduce_rank_of_gather,
    join_reshapes,
)
"""All rewrites, in the order in which they are applied: later ones may replace what earlier ones add."""
