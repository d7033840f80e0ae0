"""Exact rewrites of models, for EPs that refuse an operator, or some nodes of it.

Each replaces nodes by others that compute the same, and is applied only where an EP does not compile them.
"""

from __future__ import annotations

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.bits import join_bits, shift_as_product
from hatch_epcontext.graph.rewrites.branches import if_as_where
from hatch_epcontext.graph.rewrites.cells import loop_as_layer
from hatch_epcontext.graph.rewrites.decompositions import (
    batch_matmul_nbits,
    cast_as_dequantize,
    clip_as_max_min,
    decompose_fused_conv,
    decompose_normalization,
    decompose_picture,
    decompose_quantization,
    decompose_quantized_concat,
    decompose_reduction,
    erf_as_tanh,
    gather_blocks,
    gather_nd_as_gather,
    move_between_floats,
    reduce_nothing,
    scatter_as_elements,
    scatter_as_matmul,
    slice_as_gather,
)
from hatch_epcontext.graph.rewrites.functions import apply_text, inline_function
from hatch_epcontext.graph.rewrites.grids import grid_sample_as_gathers
from hatch_epcontext.graph.rewrites.indexing import (
    affine_grid_as_matmul,
    compress_as_gather,
    decompose,
    drop_single,
    one_hot_as_where,
    pad_as_concat,
    reverse_sequence_as_gather,
    tensor_scatter_as_where,
    top_of_last_axis,
    unpool_as_scatter,
)
from hatch_epcontext.graph.rewrites.loops import unroll_loop, unroll_scan
from hatch_epcontext.graph.rewrites.matrices import (
    col2im_as_matmul,
    conv_transpose_as_conv,
    dft_as_matmul,
    resize_as_matmul,
)
from hatch_epcontext.graph.rewrites.pools import pool_as_slices
from hatch_epcontext.graph.rewrites.precise import expand_int64_inputs
from hatch_epcontext.graph.rewrites.products import (
    cumulate_as_products,
    det_as_products,
    einsum_as_matmul,
    reduce_as_products,
)
from hatch_epcontext.graph.rewrites.ranks import (
    join_reshapes,
    reduce_rank,
    reduce_rank_of_gather,
    reduce_rank_of_reduction,
    reduce_rank_of_tile,
    reduce_rank_of_transpose,
)
from hatch_epcontext.graph.rewrites.recurrent import drop_default_activations, unroll_recurrent
from hatch_epcontext.graph.rewrites.widths import compute_in_32_bits
from hatch_epcontext.graph.rewriting import Rewrite

REWRITES: tuple[Rewrite, ...] = (
    if_as_where,
    loop_as_layer,
    compute_in_32_bits,
    reverse_sequence_as_gather,
    drop_default_activations,
    decompose_fused_conv,
    decompose_picture,
    decompose_normalization,
    batch_matmul_nbits,
    reduce_nothing,
    decompose_reduction,
    gather_blocks,
    gather_nd_as_gather,
    scatter_as_elements,
    scatter_as_matmul,
    tensor_scatter_as_where,
    slice_as_gather,
    erf_as_tanh,
    clip_as_max_min,
    cast_as_dequantize,
    expand_int64_inputs,
    decompose_quantization,
    decompose_quantized_concat,
    join_bits,
    shift_as_product,
    affine_grid_as_matmul,
    pad_as_concat,
    unpool_as_scatter,
    one_hot_as_where,
    top_of_last_axis,
    compress_as_gather,
    drop_single,
    einsum_as_matmul,
    reduce_as_products,
    cumulate_as_products,
    det_as_products,
    pool_as_slices,
    resize_as_matmul,
    dft_as_matmul,
    col2im_as_matmul,
    conv_transpose_as_conv,
    grid_sample_as_gathers,
    # Before texts, which may use functions that the EP has.
    inline_function,
    apply_text,
    move_between_floats,
    reduce_rank_of_transpose,
    reduce_rank_of_gather,
    reduce_rank_of_reduction,
    reduce_rank_of_tile,
    reduce_rank,
    join_reshapes,
    decompose,
)
"""All but `UNROLLS`, in the order in which they are applied: later ones may replace what earlier ones add."""

UNROLLS: tuple[Rewrite, ...] = (unroll_recurrent, unroll_loop, unroll_scan)
"""Those of nodes that repeat a known number of times, in the order in which they are applied.

The number must be constant, and the needed shapes known. ONNX Runtime's basic optimization folds constants in
the result; then more may be unrolled.
"""


def unrolls(model: onnx.ModelProto) -> bool:
    """Whether ``model`` has nodes that `UNROLLS` may replace."""
    operators = frozenset[str]().union(*(rewrite.operators for rewrite in UNROLLS))
    return any(graph.operator(node) in operators for node in graph.nodes(model.graph))
