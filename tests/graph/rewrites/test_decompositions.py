from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph.rewrites.decompositions import (
    clip_as_max_min,
    decompose_fused_conv,
    decompose_normalization,
    decompose_picture,
    decompose_reduction,
    erf_as_tanh,
    reduce_nothing,
)
from hatch_epcontext.graph.rewrites.functions import apply_text, inline_function
from hatch_epcontext.graph.rewrites.indexing import (
    compress_as_gather,
    reverse_sequence_as_gather,
    top_of_last_axis,
)
from hatch_epcontext.graph.rewrites.quantized import (
    batch_matmul_nbits,
    cast_as_dequantize,
    decompose_quantization,
    gather_blocks,
    move_between_floats,
)
from hatch_epcontext.graph.rewrites.scattering import (
    gather_nd_as_gather,
    scatter_as_elements,
    scatter_as_matmul,
    slice_as_gather,
)
from hatch_epcontext.graph.rewriting import Rewrite
from tests.conftest import newer_runtime
from tests.graph.rewrites.equal import check_equal, operators, reasons, rewritten
from tests.models import parsed

RNG = np.random.default_rng(3)

NORMALIZED = "(float[2, 3, 8] x, float[2, 3, 8] s, float[8] v, float[8] u) => (float[2, 3, 8] y"
VOLUMES = "(float[2, 3, 2, 2, 3] x)"
CHANNELS = "float[3] s = {0.5, 1, 2}, float[3] b = {-1, 0, 0.5}"
SINGLE: list[tuple[Rewrite, int, str]] = [
    (decompose_normalization, 17, f"""{NORMALIZED})
        {{ y = SimplifiedLayerNormalization <axis = -1> (x, v) }}"""),
    (decompose_normalization, 17, f"""{NORMALIZED}, float[2, 3, 8] sum)
        {{ y, , , sum = com.microsoft.SkipSimplifiedLayerNormalization (x, s, v) }}"""),
    (apply_text, 7, "(float[99] x) => (float[99] y) { y = Softplus (x) }"),
    (apply_text, 10, f"""{VOLUMES} => (float[2, 3, 2, 2, 3] y) <{CHANNELS}>
        {{ y = BatchNormalization (x, s, b, b, s) }}"""),
    (apply_text, 15, f"""{VOLUMES} => (float[2, 3, 2, 2, 3] y, float[3] m, float[3] v) <{CHANNELS}>
        {{ y, m, v = BatchNormalization <training_mode = 1, momentum = 0.7> (x, s, b, b, s) }}"""),
    (apply_text, 11, f"""{VOLUMES} => (float[2, 3, 2, 2, 3] y) <{CHANNELS}>
        {{ y = InstanceNormalization (x, s, b) }}"""),
    *((apply_text, 11, f"{VOLUMES} => (float[2, 3, 1, 1, 1] y) {{ y = {pool} (x) }}")
      for pool in ("GlobalMaxPool", "GlobalLpPool <p = 1>", "GlobalLpPool")),
    *((apply_text, 11, f"""{VOLUMES} => (float[2, 3, 2, 2, 3] y)
        {{ y = LpNormalization <axis = 1, p = {p}> (x) }}""") for p in (1, 2)),
    *((scatter_as_matmul, 18, f"""(float[3, 5, 2] x, float[3, 4, 2] u) => (float[3, 5, 2] y)
        <int64[1, 4, 1] i = {{0, -1, 4, 2}}, int64[3] n = {{3, 4, 2}}>
        {{ w = Expand (i, n) y = ScatterElements <axis = 1, reduction = "{kind}"> (x, w, u) }}""")
      for kind in ("add", "max", "min", "mul")),
    *((scatter_as_elements, 18, f"""(float[3, 5, 2] x, float[4, 2] u) => (float[3, 5, 2] y)
        <int64[4, 2] i = {{0, -1, 2, 4, 1, 1, -3, 4}}>
        {{ y = ScatterND <reduction = "{kind}"> (x, i, u) }}""") for kind in ("add", "max")),
    (gather_nd_as_gather, 12, """(float[2, 3, 5, 2] x) => (float[2, 4, 2] y)
        <int64[2, 4, 2] i = {0, 1, 2, 4, 1, 1, -3, 4, 0, -1, 2, 3, 1, 0, -1, 2}>
        { y = GatherND <batch_dims = 1> (x, i) }"""),
    (top_of_last_axis, 11, """(float[2, 5, 3] x) => (float[2, 2, 3] y, int64[2, 2, 3] z)
        <int64[1] k = {2}> { y, z = TopK <axis = 1> (x, k) }"""),
    *((compress_as_gather, 11, f"""(float[2, 3] x) => (float[{shape}] y) <bool[3] c = {{1, 0, 1}}>
        {{ y = Compress {axis} (x, c) }}""") for axis, shape in (("<axis = 1>", "2, 2"), ("", 2))),
    *((inline_function, 24, f"""(float[2, 2, {queries}, 4] q, float[2, 2, 9, 4] k, float[2, 2, 9, 4] v)
        => (float[2, 2, {queries}, 4] y) <int64[2] n = {{4, 7}}>
        {{ y = Attention <is_causal = {causal}> (q, k, v, , , , n) }}""")
      for causal in (0, 1) for queries in (1, 3)),
    (inline_function, 23, """(float[1, 2, 3, 4] x, float[1, 3, 2] c, float[1, 3, 2] s)
        => (float[1, 2, 3, 4] y) { y = RotaryEmbedding (x, c, s) }"""),
]  # fmt: skip
"""Single nodes, which a rewrite replaces."""


@pytest.mark.parametrize(
    ("rewrite", "opset", "text"),
    [pytest.param(*case, marks=[newer_runtime] if case[1] > 23 else []) for case in SINGLE],
)
def test_a_node_is_replaced_by_others_that_compute_the_same(
    rewrite: Rewrite, opset: int, text: str
) -> None:
    # ONNX does not know `SimplifiedLayerNormalization`.
    model = parsed(text, opset, check=False)
    assert operators(rewritten(model, rewrite)) != operators(model)


ACTIVATIONS = {
    "Relu": "",
    "Sigmoid": "",
    "Tanh": "",
    "LeakyRelu": ", activation_params = [0.3]",
    "Clip": ", activation_params = [-0.5, 1.5]",
    "HardSigmoid": ", activation_params = [0.3, 0.4]",
}


@pytest.mark.parametrize("added", [False, pytest.param(True, marks=newer_runtime)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_fused_convolution_is_taken_apart(activation: str, added: bool) -> None:
    attributes = f'activation = "{activation}"{ACTIVATIONS[activation]}'
    model = parsed(
        f"""(float[1, 2, 6, 6] x{", float[1, 4, 3, 6] z" if added else ""}) => (float[1, 4, 3, 6] y)
        {{ y = com.microsoft.FusedConv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 1],
        {attributes}> (x, w, b{", z" if added else ""}) }}""",
        w=(4, 2, 3, 3),
        b=(4,),
    )
    expected = ["Conv", *(["Add"] if added else []), activation]
    assert operators(rewritten(model, decompose_fused_conv)) == expected


def test_values_behind_a_fused_operator_have_known_shapes() -> None:
    model = parsed(
        """(float[2, 3, 4] x) => (float[2, 3, 4] y) {
            g = com.microsoft.Gelu (x)
            y = SimplifiedLayerNormalization (g, v) }""",
        v=(4,),
        check=False,
    )
    assert "SimplifiedLayerNormalization" not in operators(
        rewritten(model, decompose_normalization)
    )


def blocks(shape: list[int], bias: str) -> onnx.ModelProto:
    """A product with weights of four bits in blocks."""
    return parsed(
        f"""(float{shape} x) => (float{[*shape[:-1], 5]} y) {{ y = com.microsoft.MatMulNBits
        <K = 32, N = 5, bits = 4, block_size = 32> (x, w, s{bias}) }}""",
        w=RNG.integers(0, 256, (5, 1, 16)).astype(np.uint8),
        s=(5,),
        b=(5,),
    )


@pytest.mark.parametrize(
    ("shape", "bias", "expected"),
    [
        ([3, 32], "", ["Reshape", "com.microsoft.MatMulNBits", "Reshape"]),
        ([2, 2, 3, 32], ", , , b", ["Reshape", "com.microsoft.MatMulNBits", "Add", "Reshape"]),
        ([2, 3, 32], ", , , b", ["com.microsoft.MatMulNBits", "Add"]),
    ],
)
def test_a_product_with_blocks_is_one_of_a_batch_and_a_sum(
    shape: list[int], bias: str, expected: list[str]
) -> None:
    """See microsoft/onnxruntime#28178."""
    assert operators(rewritten(blocks(shape, bias), batch_matmul_nbits)) == expected


def test_a_comparison_has_a_shape_behind_what_has_none() -> None:
    """As in models of PyTorch, whose opset defines it by other operators."""
    for operator, expected in (("GreaterOrEqual", "Greater"), ("LessOrEqual", "Less")):
        model = parsed(
            f"""(float[2, 3] x, float[2, 3] z) => (float[2, 3] y)
            {{ c = {operator} (x, z) y = Where (c, x, z) }}""",
            13,
        )
        after = operators(rewritten(model, apply_text))
        assert after == [expected, "Equal", "Or", "Where"]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ("low, high", ["Max", "Min"]),
        (", high", ["Min"]),
        ("low, infinity", ["Max"]),
        (",", ["Identity"]),
    ],
)
def test_computed_bounds_become_max_and_min(bounds: str, expected: list[str]) -> None:
    model = parsed(
        f"""(float[2, 9] x) => (float[2, 9] y) {{
            low = ReduceMin <keepdims = 0> (x)
            high = Neg (low)
            y = Clip (x, {bounds}) }}""",
        infinity=np.float32(np.inf),
    )
    after = operators(rewritten(model, clip_as_max_min))
    assert [name for name in after if name in ("Max", "Min", "Identity")] == expected


@pytest.mark.parametrize("opset", [9, 17])
@pytest.mark.parametrize(("elem_type", "tolerance"), [(1, 2e-7), (10, 1e-3)])
def test_an_error_function_is_exact_in_its_dtype(
    opset: int, elem_type: int, tolerance: float
) -> None:
    """Casts give it either dtype in a model of float32."""
    model = parsed(
        f"""(float[9999] x) => (float[9999] y)
        {{ a = Cast <to = {elem_type}> (x) b = Erf (a) y = Cast <to = 1> (b) }}""",
        opset,
    )
    after = rewritten(model, erf_as_tanh, tolerance=tolerance)
    assert {"Tanh", "Clip"} < {*operators(after)}
    for scale in (0.01, 1, 9, 6e4):
        check_equal(model, after, tolerance, scale)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_a_cast_of_small_integers_is_their_dequantization(dtype: str) -> None:
    model = parsed(f"({dtype}[99] x) => (float[99] y) {{ y = Cast <to = 1> (x) }}")
    del model.opset_import[1:]
    after = rewritten(model, cast_as_dequantize)
    assert operators(after) == ["com.microsoft.DequantizeLinear"]
    # ONNX Runtime opens no model without it.
    assert [entry.domain for entry in after.opset_import] == ["", "com.microsoft"]


REVERSING = """(float[2, 4, 3] x) => (float[2, 4, 3] y) <int64[%d] lengths = {%s}>
{ y = ReverseSequence <batch_axis = %d, time_axis = %d> (x, lengths) }"""


@pytest.mark.parametrize(
    "lengths", [(2, "4, 4", 0, 1), (2, "3, 3", 0, 1), (4, "2, 2, 2, 2", 1, 0), (2, "1, 1", 0, 1)]
)
def test_a_sequence_is_reversed_by_a_gather(lengths: tuple[int, str, int, int]) -> None:
    after = rewritten(parsed(REVERSING % lengths), reverse_sequence_as_gather)
    assert operators(after) == ["Gather"]


def scattering(
    wide: str, shape: list[int], rows: list[int], kind: str, data: Any = None, axis: int = 0
) -> onnx.ModelProto:
    """Rows joined with those at computed indices, which count from both ends; ``wide`` makes them wide."""
    stored: dict[str, Any] = {} if data is None else {"x": np.full(shape, data, np.float32)}
    return parsed(
        f"""(int64[{rows[0]}] i, float{rows} u{"" if stored else f", float{shape} x"}) => (float{shape} y) {{
            near = Mod <fmod = 1> (i, count)
            column = Unsqueeze (near, last)
            wide = {wide} (column, counts)
            y = ScatterElements <axis = {axis}, reduction = "{kind}"> (x, wide, u) }}""",
        18,
        count=[shape[axis]],
        last=np.arange(1, len(rows)),
        counts=rows,
        **stored,
    )


@pytest.mark.parametrize("wide", ["Expand", "Reshape"])
@pytest.mark.parametrize(
    ("kind", "neutral"), [("add", 0), ("max", -np.inf), ("min", np.inf), ("mul", 1)]
)
@pytest.mark.parametrize(("shape", "rows"), [([4, 3], [9, 3]), ([2, 3, 2], [5, 3, 2]), ([4], [9])])
def test_rows_are_scattered_by_a_product_or_a_reduction(
    wide: str, kind: str, neutral: float, shape: list[int], rows: list[int]
) -> None:
    if wide == "Reshape":
        shape, rows = [*shape[:1], *[1] * len(shape[1:])], [*rows[:1], *[1] * len(rows[1:])]
    for data in (None, 0.5, neutral):
        model = scattering(wide, shape, rows, kind, data)
        after = operators(rewritten(model, scatter_as_matmul))
        product = {"add": ("MatMul", "Add"), "mul": ("ReduceProd", "Mul")}
        joining = product.get(kind, (f"Reduce{kind.title()}", kind.title()))
        assert "ScatterElements" not in after
        assert joining[0] in after
        assert (joining[1] in after) == (data != neutral)


PART = ["it scatters into a part of the other axes"]


def slicing(offset: int, step: int = 1, shape: str = "2, 3") -> onnx.ModelProto:
    """Three of ten columns from a start that is computed."""
    return parsed(
        f"""(float[2, 10] x, int64[1] i) => (float[{shape}] y) <int64 low = {{0}}, int64 high = {{3}},
        int64[1] offset = {{{offset}}}, int64[1] length = {{{3 * step}}}, int64[1] axes = {{-1}},
        int64[1] steps = {{{step}}}> {{
            a = Abs (x)
            j = Clip (i, low, high)
            start = Add (j, offset)
            end = Add (start, length)
            y = Slice (a, start, end, axes, steps) }}"""
    )


@pytest.mark.parametrize(("offset", "step"), [(1, 1), (-9, 1), (0, 2)])
def test_a_slice_at_a_computed_start_is_a_gather(offset: int, step: int) -> None:
    after = operators(rewritten(slicing(offset, step), slice_as_gather))
    assert "Slice" not in after
    assert "Gather" in after


TWO_AXES = """(float[2, 9] x, int64[2] i) => (float[1, 3] y) <int64[2] n = {1, 3}{}>
{ end = Add (i, n) y = Slice (x, i, end{}) }"""


@pytest.mark.parametrize(
    ("rewrite", "model", "expected"),
    [
        (decompose_fused_conv, parsed("""(float[1, 2, 6, 6] x) => (float[1, 4, 4, 4] y)
            { y = com.microsoft.FusedConv <activation = "Swish"> (x, w) }""", w=(4, 2, 3, 3)),
         ["its activation 'Swish' is not known"]),
        (batch_matmul_nbits, blocks([2, 3, 32], ""), []),
        (decompose_reduction, parsed("(int32[8] x) => (int32[1] y) { y = ReduceL1 (x) }"),
         ["it reduces int32"]),
        (cast_as_dequantize, parsed("(int32[9] x) => (float[9] y) { y = Cast <to = 1> (x) }"), []),
        (cast_as_dequantize, parsed("(int16[9] x) => (int32[9] y) { y = Cast <to = 6> (x) }"), []),
        (clip_as_max_min, parsed("""(float[9] x) => (float[9] y)
            { y = Clip <min = 0.0, max = 6.0> (x) }""", 6), ["its bounds are attributes"]),
        (clip_as_max_min, parsed("(int32[9] x, int32 n) => (int32[9] y) { y = Clip (x, n) }"),
         ["it clips int32"]),
        (scatter_as_matmul, scattering("Expand", [4, 3], [9, 3], "none"), ["its reduction is none"]),
        (scatter_as_matmul, scattering("Expand", [4, 3], [9, 2], "add"), PART),
        (scatter_as_matmul, scattering("Expand", [9999, 9], [9999, 9], "add"),
         ["its mask has 99,980,001 values"]),
        (slice_as_gather, slicing(1, shape="2, n"), ["the shape of 'y' is not fixed"]),
        *((slice_as_gather, parsed(TWO_AXES.replace("{}", stored, 1).replace("{}", axes)),
           ["its start has 2 axes"]) for stored, axes in ((", int64[2] axes = {0, 1}", ", axes"), ("", ""))),
        # It is not at a computed start.
        (slice_as_gather, parsed("""(float[4] x) => (float[2] y)
            <int64[1] start = {1}, int64[1] end = {3}> { y = Slice (x, start, end) }"""), []),
    ],
)  # fmt: skip
def test_what_a_rewrite_is_not_for_stays_and_the_reason_is_named(
    rewrite: Rewrite, model: onnx.ModelProto, expected: list[str]
) -> None:
    assert reasons(model, rewrite) == expected


PICTURES = [
    ("Affine <alpha = 2.0, beta = 0.5> (x)", 6),
    ("ImageScaler <bias = [0.5, 1.0, 2.0], scale = 0.25> (x)", 6),
    ("Crop <border = [1, 2, 1, 0]> (x)", 4),
    ("Crop <border = [1, 0, 0, 0], scale = [6, 4]> (x)", 4),
]


@pytest.mark.parametrize(("node", "width"), PICTURES)
@pytest.mark.parametrize("opset", [7, 9])
def test_old_operators_of_pictures_are_sums_and_slices(node: str, width: int, opset: int) -> None:
    height = 4 if "2, 1, 0" in node else 6
    model = parsed(
        f"(float[1, 3, 6, 6] x) => (float[1, 3, {height}, {width}] y) {{ y = {node} }}",
        opset,
        check=False,
    )
    assert operators(model)[0] not in operators(rewritten(model, decompose_picture))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
@pytest.mark.parametrize(("sizes", "axis"), [((), 1), ((3,), 1), ((4,), -1)])
@pytest.mark.parametrize("operator", ["QuantizeLinear", "DequantizeLinear"])
def test_a_quantization_at_an_end_is_a_quotient_or_a_product(
    operator: str, dtype: str, sizes: tuple[int, ...], axis: int
) -> None:
    ends = ("float", dtype) if operator == "QuantizeLinear" else (dtype, "float")
    model = parsed(
        f"""({ends[0]}[2, 3, 4] x) => ({ends[1]}[2, 3, 4] y)
        {{ y = {operator} <axis = {axis}> (x, s, z) }}""",
        21,
        10,
        s=np.full(sizes, 0.07, np.float32),
        z=np.full(sizes, 7, dtype),
    )
    assert operator not in operators(rewritten(model, decompose_quantization))


def test_a_quantization_inside_of_a_graph_stays_for_an_ep_to_fuse() -> None:
    model = parsed(
        """(float[2, 3] x) => (float[2, 3] y)
        { q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z) }""",
        s=np.float32(0.05),
        z=np.uint8(128),
    )
    assert reasons(model, decompose_quantization) == []


@pytest.mark.parametrize("zeros", [False, True])
def test_rows_of_quantized_tables_are_unpacked(zeros: bool) -> None:
    """As the builder writes them: microsoft/onnxruntime-genai#1690 and #1885."""
    model = parsed(
        f"""(int64[1, 5] i) => (float[1, 5, 64] y) {{ y = com.microsoft.GatherBlockQuantized
        <bits = 4, block_size = 32, quantize_axis = 1> (q, i, s{", z" if zeros else ""}) }}""",
        21,
        q=RNG.integers(0, 256, (999, 32)).astype(np.uint8),
        s=(999, 2),
        z=RNG.integers(0, 256, (999, 1)).astype(np.uint8),
    )
    assert operators(rewritten(model, gather_blocks))[0] == "Gather"


@pytest.mark.parametrize("domain", ["", "com.microsoft."])
def test_quantized_values_are_pooled_as_floats(domain: str) -> None:
    model = parsed(
        f"""(float[1, 1, 4, 4] x) => (uint8[1, 1, 3, 3] y) {{
            q = {domain}QuantizeLinear (x, s, z) y = MaxPool <kernel_shape = [2, 2]> (q) }}""",
        s=np.float32(0.05),
        z=np.uint8(128),
    )
    quantize, dequantize = f"{domain}QuantizeLinear", f"{domain}DequantizeLinear"
    expected = [quantize, dequantize, "MaxPool", quantize]
    assert operators(rewritten(model, move_between_floats)) == expected


@pytest.mark.parametrize(
    "operator",
    [
        "ReduceMean",
        *(pytest.param(f"Reduce{end}", marks=newer_runtime) for end in ("L1", "SumSquare")),
    ],
)
def test_a_reduction_along_no_axis_is_a_function_of_each_value(operator: str) -> None:
    """See microsoft/onnxruntime#19147 and #26541."""
    model = parsed(
        f"""(float[2, 3] x) => (float[2, 3] y)
        {{ y = {operator} <noop_with_empty_axes = 1> (x, axes) }}""",
        18,
        axes=np.zeros(0, np.int64),
    )
    assert operator not in operators(rewritten(model, reduce_nothing))
