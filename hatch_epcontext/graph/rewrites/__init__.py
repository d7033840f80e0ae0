"""Exact rewrites of models, for EPs that refuse an operator or a form of it.

Each replaces nodes by others that compute the same, and is applied only where an EP has refused them.
"""

from __future__ import annotations

from hatch_epcontext.graph.rewrites.branches import if_as_where
from hatch_epcontext.graph.rewrites.decompositions import (
    batch_matmul_nbits,
    cast_as_dequantize,
    clip_as_max_min,
    decompose_comparison,
    decompose_fused_conv,
    decompose_normalization,
    decompose_reduction,
    decompose_softplus,
    erf_as_tanh,
    inline_function,
    reverse_sequence_as_gather,
    scatter_as_matmul,
    slice_as_gather,
    tensor_scatter_as_where,
)
from hatch_epcontext.graph.rewrites.loops import unroll_loop
from hatch_epcontext.graph.rewrites.precise import expand_int64_inputs
from hatch_epcontext.graph.rewrites.recurrent import drop_default_activations, unroll_recurrent
from hatch_epcontext.graph.rewriting import Rewrite

REWRITES: tuple[Rewrite, ...] = (
    if_as_where,
    reverse_sequence_as_gather,
    drop_default_activations,
    decompose_fused_conv,
    decompose_normalization,
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
    expand_int64_inputs,
)
"""All but `UNROLLS`, in the order in which they are applied: later ones may replace what earlier ones add."""

UNROLLS: tuple[Rewrite, ...] = (unroll_recurrent, unroll_loop)
"""Those of nodes that repeat a known number of times, in the order in which they are applied.

The number must be constant, and the needed shapes known. ONNX Runtime's basic optimization folds constants in
the result; then more may be unrolled.
"""
