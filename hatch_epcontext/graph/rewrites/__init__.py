"""Exact rewrites of models, for EPs that refuse an operator, or some nodes of it.

Each replaces nodes by others that compute the same.
"""

from __future__ import annotations

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites import (
    bits,
    branches,
    cells,
    decompositions,
    functions,
    grids,
    indexing,
    loops,
    matrices,
    pools,
    products,
    quantized,
    ranks,
    recurrent,
    scattering,
    transposed,
    widths,
)
from hatch_epcontext.graph.rewriting import Rewrite

REWRITES: tuple[Rewrite, ...] = (
    branches.if_as_where,
    cells.loop_as_layer,
    # Before others compute in 32 bits what an EP fuses.
    quantized.move_between_floats,
    widths.compute_in_32_bits,
    indexing.reverse_sequence_as_gather,
    recurrent.drop_default_activations,
    decompositions.decompose_fused_conv,
    decompositions.decompose_picture,
    decompositions.decompose_normalization,
    quantized.batch_matmul_nbits,
    decompositions.reduce_nothing,
    decompositions.decompose_reduction,
    quantized.gather_blocks,
    scattering.gather_nd_as_gather,
    scattering.scatter_as_elements,
    scattering.scatter_as_matmul,
    indexing.tensor_scatter_as_where,
    scattering.slice_as_gather,
    decompositions.erf_as_tanh,
    decompositions.clip_as_max_min,
    quantized.cast_as_dequantize,
    transposed.expand_int64_inputs,
    quantized.decompose_quantization,
    quantized.decompose_quantized_concat,
    bits.join_bits,
    bits.shift_as_product,
    indexing.affine_grid_as_matmul,
    indexing.pad_as_concat,
    indexing.unpool_as_scatter,
    indexing.one_hot_as_where,
    indexing.top_of_last_axis,
    indexing.compress_as_gather,
    indexing.drop_single,
    products.einsum_as_matmul,
    products.reduce_as_products,
    products.cumulate_as_products,
    products.det_as_products,
    pools.pool_as_slices,
    matrices.resize_as_matmul,
    matrices.dft_as_matmul,
    matrices.col2im_as_matmul,
    matrices.conv_transpose_as_conv,
    grids.grid_sample_as_gathers,
    # Before texts, which may use functions that the EP has.
    functions.inline_function,
    functions.apply_text,
    widths.join_casts,
    ranks.reduce_rank_of_transpose,
    ranks.reduce_rank_of_gather,
    ranks.reduce_rank_of_reduction,
    ranks.reduce_rank_of_tile,
    ranks.reduce_rank,
    ranks.join_reshapes,
    indexing.decompose,
)
"""All but `UNROLLS`, in the order in which they are applied: later ones may replace what earlier ones add."""

UNROLLS: tuple[Rewrite, ...] = (recurrent.unroll_recurrent, loops.unroll_loop, loops.unroll_scan)
"""Those of nodes that repeat a known number of times, in the order in which they are applied.

The number must be constant, and the needed shapes known. ONNX Runtime's basic optimization folds constants in
the result; then more may be unrolled.
"""


def unrolls(model: onnx.ModelProto) -> bool:
    """Whether ``model`` has nodes that `UNROLLS` may replace."""
    return any(
        graph.operator(node) in rewrite.operators
        for node in graph.nodes(model.graph)
        for rewrite in UNROLLS
    )
