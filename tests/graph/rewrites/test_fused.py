from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph.rewrites.fused import FUNCTIONS, FUSED
from tests.conftest import newer_runtime
from tests.graph.rewrites.equal import check_equal, operators, rewritten, untouched
from tests.models import parsed

RNG = np.random.default_rng(3)

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
    assert operators(rewritten(model, FUSED)) == expected


def test_values_behind_a_fused_operator_have_known_shapes() -> None:
    model = parsed(
        """(float[2, 4, 3] x) => (float[2, 3, 5] y) {
            g = com.microsoft.QuickGelu (x)
            m = com.microsoft.FusedMatMul <transA = 1> (g, w)
            y = com.microsoft.Gelu (m) }""",
        w=(4, 5),
    )
    assert not any("com.microsoft" in each for each in operators(rewritten(model, FUSED)))


def test_a_sum_of_large_powers_does_not_overflow() -> None:
    text = "(float[3, 4] x) => (float[3, 1] y) { y = ReduceLogSumExp <axes = [1]> (x) }"
    model = parsed(text, 13)
    check_equal(model, rewritten(model, FUNCTIONS), scale=300)


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
    assert "BatchNormalization" not in operators(rewritten(model, FUNCTIONS))


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
    assert operators(rewritten(blocks(shape, bias), FUSED)) == expected


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("places", [False, True])
def test_embeddings_and_the_attention_with_their_mask_are_taken_apart(
    segments: bool, places: bool
) -> None:
    """As ONNX Runtime's optimizer of transformers writes BERT."""
    names = ["i", "j" if segments else "", "words", "rows", "kinds" if segments else ""]
    names += ["v", "v", "kept", *(["k"] if places else [])]
    ids = RNG.integers(0, 5, (3, 2, 5)).astype(np.int32)
    model = parsed(
        f"""(bool[2, 5] c) => (float[2, 5, 8] y, float[2, 5, 8] sum, int32[2] m) {{
            kept = Cast <to = 6> (c)
            e, m, sum = com.microsoft.EmbedLayerNormalization <epsilon = 0.001> ({", ".join(names)})
            y = com.microsoft.Attention <num_heads = 2> (e, w, b, m) }}""",
        i=ids[0],
        j=ids[1],
        k=ids[2],
        words=(5, 8),
        rows=(5, 8),
        kinds=(5, 8),
        v=(8,),
        w=(8, 24),
        b=(24,),
    )
    assert not any("microsoft" in each for each in operators(rewritten(model, FUSED)))


def _attention(merged: bool, extras: str, attributes: str = "") -> onnx.ModelProto:
    """Attention of two heads for two batches of 5 queries; ``extras`` says what else it reads.

    These are ``b``, a bias, ``m``, a mask, and ``z``, which is added.
    """
    keys = 5 if merged else 7
    inputs = (
        ["float[2, 5, 6] x"]
        if merged
        else ["float[2, 5, 8] q", "float[2, 7, 8] k", "float[2, 7, 4] v"]
    )
    names = ["x", "w"] if merged else ["q", "k", "v"]
    names += [name if name in extras else "" for name in "bm"] + [""] * merged
    names += ["z"] if "z" in extras else []
    inputs += [f"bool[2, {keys}] kept"] * ("m" in extras)
    inputs += [f"float[2, 2, 5, {keys}] z"] * ("z" in extras)
    operator, width = ("Attention", 8) if merged else ("MultiHeadAttention", 4)
    stored: dict[str, Any] = {"w": (6, 24), "b": (24,)} if merged else {"b": (20,)}
    return parsed(
        f"""({", ".join(inputs)}) => (float[2, 5, {width}] y) {{
            {"m = Cast <to = 6> (kept)" if "m" in extras else ""}
            y = com.microsoft.{operator} <num_heads = 2{attributes}> ({", ".join(names)}) }}""",
        **stored,
    )


@pytest.mark.parametrize("extras", ["b", "bm", "bz", "bmz", ""])
@pytest.mark.parametrize("attributes", ["", ", scale = 0.2", ", mask_filter_value = -9.0"])
@pytest.mark.parametrize("merged", [False, True])
def test_attention_is_taken_apart(merged: bool, extras: str, attributes: str) -> None:
    if merged and not extras:
        pytest.skip("ONNX Runtime needs the bias")
    after = operators(rewritten(_attention(merged, extras, attributes), FUSED))
    assert (after.count("MatMul"), after.count("Softmax")) == (2 + merged, 1)
    assert not any("Attention" in each for each in after)


@pytest.mark.parametrize(
    "model",
    [
        parsed("""(float[1, 2, 6, 6] x) => (float[1, 4, 4, 4] y)
            { y = com.microsoft.FusedConv <activation = "Swish"> (x, w) }""", w=(4, 2, 3, 3)),
        # Erf is of opset 9.
        parsed("(float[8] x) => (float[8] y) { y = com.microsoft.Gelu (x) }", 8),
        blocks([2, 3, 32], ""),
        _attention(True, "b", ", unidirectional = 1"),
        _attention(True, "b", ", do_rotary = 1"),
        parsed("""(float[2, 5, 8] q, float[2, 5, 8] k, float[2, 5, 8] v)
            => (float[2, 5, 8] y, float[2, 2, 5, 4] key, float[2, 2, 5, 4] value)
            { y, key, value = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v) }"""),
        parsed("""(float[2, 5, 2, 3, 4] q) => (float[2, 5, 8] y)
            { y = com.microsoft.MultiHeadAttention <num_heads = 2> (q) }"""),
    ],
    ids=["unknown activation", "newer opset", "one batch", "causal", "rotary", "cache", "packed"],
)  # fmt: skip
def test_what_is_not_understood_stays(model: onnx.ModelProto) -> None:
    assert untouched(model, FUSED)
