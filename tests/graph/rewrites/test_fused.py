from __future__ import annotations

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph.rewrites.fused import (
    batch_matmul_nbits,
    decompose_batch_normalization,
    decompose_fused_conv,
    decompose_normalization,
    decompose_reduction,
    decompose_softplus,
    inline_function,
)
from hatch_epcontext.graph.rewriting import Rewrite
from tests.conftest import newer_runtime
from tests.graph.rewrites.equal import check_equal, operators, reasons, rewritten
from tests.models import parsed

RNG = np.random.default_rng(3)

NORMALIZED = "(float[2, 3, 8] x, float[2, 3, 8] s, float[8] v, float[8] u) => (float[2, 3, 8] y"
ALONE: list[tuple[Rewrite, int, str]] = [
    (decompose_normalization, 17, f"""{NORMALIZED})
        {{ y = SimplifiedLayerNormalization <axis = -1> (x, v) }}"""),
    (decompose_normalization, 17, f"""{NORMALIZED}, float[2, 3, 8] sum)
        {{ y, , , sum = com.microsoft.SkipSimplifiedLayerNormalization (x, s, v) }}"""),
    *((decompose_normalization, opset, f"""(float[2, 3, 4] x, float[{sizes}] scale, float[{sizes}] bias) =>
        (float[2, 3, 4] y, float[{kept}] mean, float[{kept}] inverse)
        {{ y, mean, inverse = LayerNormalization <axis = {axis}, epsilon = 0.1> (x, scale, bias) }}""")
      for opset, axis, sizes, kept in (
          (17, -1, "4", "2, 3, 1"), (17, 1, "3, 4", "2, 1, 1"), (18, 0, "2, 3, 4", "1, 1, 1"))),
    *((decompose_reduction, 13,
       f"({dtype}[3, 4] x) => ({result} y) {{ y = {operator} <keepdims = {keepdims}> (x) }}")
      for operator, dtype in (("ReduceLogSumExp", "float"), ("ReduceL2", "float"), ("ReduceL1", "int32"),
                              ("ReduceSumSquare", "int32"))
      for keepdims, result in ((0, dtype), (1, f"{dtype}[1, 1]"))),
    (decompose_softplus, 17, "(float[99] x) => (float[99] y) { y = Softplus (x) }"),
    *((inline_function, 24, f"""(float[2, 2, {queries}, 4] q, float[2, 2, 9, 4] k, float[2, 2, 9, 4] v)
        => (float[2, 2, {queries}, 4] y) <int64[2] n = {{4, 7}}>
        {{ y = Attention <is_causal = {causal}> (q, k, v, , , , n) }}""")
      for causal in (0, 1) for queries in (1, 3)),
    (inline_function, 23, """(float[1, 2, 3, 4] x, float[1, 3, 2] c, float[1, 3, 2] s)
        => (float[1, 2, 3, 4] y) { y = RotaryEmbedding (x, c, s) }"""),
]  # fmt: skip
"""Single nodes, which a rewrite replaces."""


@pytest.mark.parametrize(("rewrite", "opset", "text"), ALONE)
def test_a_node_is_replaced_by_others_that_compute_the_same(
    rewrite: Rewrite, opset: int, text: str
) -> None:
    # ONNX does not know `SimplifiedLayerNormalization`.
    model = parsed(text, opset, check=False)
    assert operators(model)[0] not in operators(rewritten(model, rewrite))


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


def test_a_sum_of_large_powers_does_not_overflow() -> None:
    text = "(float[3, 4] x) => (float[3, 1] y) { y = ReduceLogSumExp <axes = [1]> (x) }"
    model = parsed(text, 13)
    check_equal(model, rewritten(model, decompose_reduction), scale=300)


@pytest.mark.parametrize("opset", [7, 13, 17])
def test_a_computed_batch_normalization_is_its_formula(opset: int) -> None:
    """As converters write LayerNormalization."""
    model = parsed(
        """(float[2, 8, 3] x) => (float[2, 8, 3] y) {
            mean = ReduceMean <axes = [0, 2], keepdims = 0> (x)
            wide = ReduceMean <axes = [0, 2]> (x)
            away = Sub (x, wide)
            square = Mul (away, away)
            variance = ReduceMean <axes = [0, 2], keepdims = 0> (square)
            y = BatchNormalization (x, v, v, mean, variance) }""",
        opset,
        v=(8,),
    )
    after = rewritten(model, decompose_batch_normalization)
    assert "BatchNormalization" not in operators(after)


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
    assert operators(rewritten(blocks(shape, bias), batch_matmul_nbits)) == expected


@pytest.mark.parametrize(
    ("rewrite", "model", "expected"),
    [
        (decompose_fused_conv, parsed("""(float[1, 2, 6, 6] x) => (float[1, 4, 4, 4] y)
            { y = com.microsoft.FusedConv <activation = "Swish"> (x, w) }""", w=(4, 2, 3, 3)),
         ["its activation 'Swish' is not known"]),
        (batch_matmul_nbits, blocks([2, 3, 32], ""), []),
        (decompose_reduction, parsed("(int32[3, 4] x) => (int32 y) { y = ReduceL2 <keepdims = 0> (x) }", 13),
         ["it reduces int32"]),
        (decompose_reduction, parsed("""(float[3, 4] x, int64[1] i) => (float[?, ?] y)
            { y = ReduceL2 (x, i) }""", 18), ["its axes are not known"]),
        (decompose_softplus, parsed("(float[8] x) => (float[8] y) { y = Softsign (x) }"), []),
    ],
)  # fmt: skip
def test_what_a_rewrite_is_not_for_stays_and_the_reason_is_named(
    rewrite: Rewrite, model: onnx.ModelProto, expected: list[str]
) -> None:
    assert reasons(model, rewrite) == expected
