"""Texts of ONNX Runtime's own operators, compared with its kernels on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from hatch_epcontext.graph.rewrites import REWRITES
from hatch_epcontext.graph.rewrites.functions import apply_text, inline_function, texts
from hatch_epcontext.graph.rewriting import Rewritten, apply
from tests.conftest import needs_qnn, newer_runtime
from tests.graph.rewrites.equal import operators, session
from tests.graph.rewrites.test_precise import on_the_npu
from tests.models import parsed

RNG = np.random.default_rng(3)

BATCH, LENGTH, WIDTH, HEADS = 2, 5, 16, 4

HIDDEN = f"(float[{BATCH}, {LENGTH}, {WIDTH}] x) => (float[{BATCH}, {LENGTH}, {WIDTH}] y)"


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def scalars(**values: float) -> dict[str, Any]:
    """Scales, and zero points, whose names begin with z."""
    return {
        name: np.array(value, np.uint8 if name.startswith("z") else np.float32)
        for name, value in values.items()
    }


def masks() -> Iterator[tuple[str, Any]]:
    inside = (np.arange(LENGTH) < np.array([[3], [5]])).astype(np.int32)
    yield "", None
    yield "lengths", np.array([3, 5], np.int32)
    yield "of values", inside
    yield "of pairs", np.tril(np.ones((BATCH, LENGTH, LENGTH), np.int32))


def attention() -> Iterator[tuple[str, dict[str, Any]]]:
    stored = {"w": floats(WIDTH, 3 * WIDTH) * 0.3, "b": floats(3 * WIDTH)}
    caches = {"c": floats(2, BATCH, HEADS, 3, 4)}
    for causal in (0, 1):
        attributes = f"num_heads = {HEADS}, unidirectional = {causal}"
        for _, mask in masks():
            more = {} if mask is None else {"m": mask}
            operands = "x, w, b" if mask is None else "x, w, b, m"
            yield f"Attention <{attributes}> ({operands})", {**stored, **more}
        yield f"Attention <{attributes}> (x, w)", stored
        yield f"Attention <{attributes}> (x, w, b, , c)", {**stored, **caches}
    more = {"w": floats(WIDTH, 32 + WIDTH), "b": floats(32 + WIDTH)}
    sizes = f"num_heads = {HEADS}, qkv_hidden_sizes = [16, 16, {WIDTH}]"
    yield f"Attention <{sizes}> (x, w, b)", more
    more = {"a": floats(1, HEADS, LENGTH, LENGTH)}
    yield f"Attention <num_heads = {HEADS}, scale = 0.3> (x, w, b, , , a)", {**stored, **more}


def multi_head_attention() -> Iterator[tuple[str, dict[str, Any]]]:
    shape = (BATCH, LENGTH, WIDTH)
    stored = {"k": floats(*shape), "v": floats(*shape), "b": floats(3 * WIDTH)}
    for causal in (0, 1):
        start = f"MultiHeadAttention <num_heads = {HEADS}, unidirectional = {causal}> (x, k, v"
        for _, mask in masks():
            more = {} if mask is None else {"m": mask}
            yield f"{start}, b{', m' if more else ''})", {**stored, **more}
        cache = {"c": floats(BATCH, HEADS, 3, 4), "d": floats(BATCH, HEADS, 3, 4)}
        yield f"{start}, , , , c, d)", {**stored, **cache}
    cross = {"k": floats(BATCH, HEADS, 7, 4), "v": floats(BATCH, HEADS, 7, 4)}
    yield f"MultiHeadAttention <num_heads = {HEADS}> (x, k, v)", cross


def gates() -> Iterator[tuple[str, dict[str, Any]]]:
    bias = {"b": floats(WIDTH)}
    yield "Gelu (x)", {}
    yield "BiasGelu (x, b)", bias
    yield "FastGelu (x)", {}
    yield "FastGelu (x, b)", bias
    yield "QuickGelu (x)", {}
    yield "QuickGelu <alpha = 1.1> (x)", {}
    yield "FusedMatMul <alpha = 0.5> (x, w)", {"w": floats(WIDTH, WIDTH)}
    yield "FusedMatMul <transB = 1> (x, w)", {"w": floats(WIDTH, WIDTH)}


def normalizations() -> Iterator[tuple[str, dict[str, Any]]]:
    shape = (BATCH, LENGTH, WIDTH)
    stored = {"s": floats(*shape), "g": floats(WIDTH), "b": floats(WIDTH), "c": floats(WIDTH)}
    for operands in ("x, s, g", "x, s, g, b", "x, s, g, b, c", "x, s, g, , c"):
        yield f"SkipLayerNormalization ({operands})", stored
    yield "SkipLayerNormalization <epsilon = 0.1> (x, s, g, b)", stored


VARIANTS = [*attention(), *multi_head_attention(), *gates(), *normalizations()]


def compare(model: onnx.ModelProto, atol: float = 1e-4) -> None:
    """The model gives the same results after its texts were applied."""
    before, names = session(model), {value.name: value for value in model.graph.input}
    after = onnx.ModelProto.FromString(model.SerializeToString())
    operators = frozenset(texts())
    assert apply(after, [apply_text], operators, {}).names == ("apply_text",)
    assert "com.microsoft" not in {node.domain for node in after.graph.node}
    feeds = {}
    for name, value in names.items():
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        is_float = value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        most = 2 if name == "m" else 9
        feeds[name] = floats(*shape) if is_float else RNG.integers(0, most, shape).astype(dtype)
    pairs = zip(before.run(None, feeds), session(after).run(None, feeds), strict=True)
    for right, result in pairs:
        assert (right.dtype, right.shape) == (result.dtype, result.shape)
        np.testing.assert_allclose(result.astype(float), right.astype(float), 1e-3, atol)


@pytest.mark.parametrize("opset", [11, 13, 18, 21])
@pytest.mark.parametrize(("node", "stored"), VARIANTS, ids=[node for node, _ in VARIANTS])
@newer_runtime
def test_a_fused_operator_is_what_its_text_says(
    node: str, stored: dict[str, Any], opset: int
) -> None:
    # ONNX Runtime needs the new caches beside the old ones.
    outputs = {", c)": "y, p", ", c, d)": "y, p, q"}
    results = next((names for end, names in outputs.items() if node.endswith(end)), "y")
    text = f"{HIDDEN} {{ {results} = com.microsoft.{node} }}"
    compare(parsed(text, opset, check=False, **stored))


SCALES = scalars(a=0.02, za=128, b=0.03, zb=100, c=0.05, zc=120)

QUANTIZED = {
    "(uint8[3, 4] x, uint8[3, 4] u) => (uint8[3, 4] y)": (
        "QLinearAdd (x, a, za, u, b, zb, c, zc)",
        "QLinearMul (x, a, za, u, b, zb, c, zc)",
    ),
    "(uint8[3, 4] x) => (uint8[3, 4] y)": (
        "QLinearSigmoid (x, a, za, c, zc)",
        "QLinearLeakyRelu <alpha = 0.2> (x, a, za, c, zc)",
        "QLinearSoftmax <axis = 1, opset = 13> (x, a, za, c, zc)",
        "QLinearSoftmax <axis = 0, opset = 12> (x, a, za, c, zc)",
    ),
    "(uint8[3, 4] x) => (uint8[3, 5] y)": ("QGemm <transB = 1> (x, a, za, w, b, zb, s, c, zc)",),
    "(uint8[1, 3, 4, 4] x) => (uint8[1, 3, 2, 2] y)": (
        "QLinearAveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x, a, za, a, za)",
    ),
    "(uint8[1, 3, 4, 4] x) => (uint8[1, 3, 1, 1] y)": (
        "QLinearGlobalAveragePool (x, a, za, a, za)",
    ),
    "(uint8[1, 3, 4, 4] x) => (uint8[1, 1, 1, 4] y)": (
        "QLinearGlobalAveragePool <channels_last = 1> (x, a, za, a, za)",
    ),
    "(int8[3, 4] x) => (float[3, 5] y)": (
        "QGemm <transB = 1, alpha = 0.5> (x, a, zi, wi, f, zf, s)",
        "QGemm (x, a, zi, wt, f, zf, s)",
    ),
}


@pytest.mark.parametrize(
    ("ends", "node"), [(ends, node) for ends, nodes in QUANTIZED.items() for node in nodes]
)
def test_an_operator_of_integers_is_one_of_floats(ends: str, node: str) -> None:
    stored = {"w": RNG.integers(0, 255, (5, 4)).astype(np.uint8), **SCALES}
    stored["s"] = RNG.integers(-99, 99, 5).astype(np.int32)
    stored |= {
        "zi": np.int8(3),
        "zf": np.zeros(5, np.int8),
        "f": np.arange(1, 6, dtype=np.float32) / 100,
    }
    stored["wi"] = RNG.integers(-99, 99, (5, 4)).astype(np.int8)
    stored["wt"] = stored["wi"].T.copy()
    # Both round halves, of slightly different sums.
    compare(parsed(f"{ends} {{ y = com.microsoft.{node} }}", check=False, **stored), atol=1)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("segments", [False, True])
def test_an_embedding_is_a_sum_of_rows(segments: bool, mask: bool) -> None:
    operands = f"i, {'t' if segments else ''}, w, p, {'u' if segments else ''}, g, b"
    operands += ", m" if mask else ""
    model = parsed(
        f"""(int32[2, 5] i, int32[2, 5] t, int32[2, 5] m) => (float[2, 5, 16] y, int32[2] z)
        {{ y, z = com.microsoft.EmbedLayerNormalization ({operands}) unused = Add (t, m) }}""",
        check=False,
        w=floats(9, 16),
        p=floats(20, 16),
        u=floats(9, 16),
        g=floats(16),
        b=floats(16),
    )
    compare(model)


@pytest.mark.parametrize("positions", ["2, 5", "1"])
@pytest.mark.parametrize(
    ("attributes", "angles"),
    [("", 4), ("<interleaved = 1>", 4), ("<num_heads = 4, rotary_embedding_dim = 4>", 2)],
)
@pytest.mark.parametrize("shape", [(2, 4, 5, 8), (2, 5, 32)])
def test_a_rotation_has_one_angle_for_each_pair(
    shape: tuple[int, ...], attributes: str, angles: int, positions: str
) -> None:
    model = parsed(
        f"""(float{list(shape)} x, int64[{positions}] p) => (float{list(shape)} y)
        {{ y = com.microsoft.RotaryEmbedding {attributes} (x, p, c, s) }}""",
        check=False,
        c=floats(20, angles),
        s=floats(20, angles),
    )
    compare(model)


@pytest.mark.parametrize("operator", texts())
def test_each_text_is_onnx_syntax(operator: str) -> None:
    function = onnx.parser.parse_function(texts()[operator])
    assert operator in (function.name, f"{function.domain}.{function.name}")


@pytest.mark.parametrize("value", [-10000.0, -3.4028234663852886e38])
def test_what_a_mask_hides_is_a_number_of_float16(value: float) -> None:
    model = parsed(
        f"""(float[2, 5, 8] x) => (float[2, 5, 8] y) {{
        h = Cast <to = 10> (x)
        z = com.microsoft.Attention <num_heads = 2, unidirectional = 1, mask_filter_value = {value}> (h, w, b)
        y = Cast <to = 1> (z) }}""",
        17,
        check=False,
        w=floats(8, 24).astype(np.float16),
        b=floats(24).astype(np.float16),
    )
    compare(model, atol=2e-2)


@needs_qnn
@pytest.mark.parametrize("opset", [9, 13])
def test_a_function_of_a_later_opset_is_computed_on_an_npu(opset: int) -> None:
    model = parsed("(float[3, 8] x) => (float[3, 8] y) { a = Softsign (x) y = Neg (a) }", opset)
    feeds = {"x": floats(3, 8)}
    with pytest.raises(Fail, match="fallback"):
        on_the_npu(model, feeds)
    (expected,) = session(model).run(None, feeds)
    assert apply(model, [inline_function], frozenset(["Softsign"]), {}).replaced == 1
    np.testing.assert_allclose(on_the_npu(model, feeds), expected, atol=2e-3)


def test_the_reason_is_no_opset_where_a_text_is_not_for_a_node() -> None:
    model = parsed("(float[3, 8] x) => (float[3, 1] y) { y = ReduceMax <axes = [1]> (x) }", 13)
    assert apply(model, [apply_text], None, {}) == Rewritten()


@needs_qnn
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_the_pooled_result_of_an_operator_of_integers_is_computed_on_an_npu(dtype: str) -> None:
    zero = 0 if dtype == "int8" else 128
    model = parsed(
        f"""({dtype}[1, 2, 8, 8] x) => ({dtype}[1, 9] y)
        <float s = {{0.05}}, {dtype} z = {{{zero}}}, {dtype}[1, 2, 3, 3] w, int64[2] flat = {{1, 9}}> {{
        c = QLinearConv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, s, z, w, s, z, s, z)
        p = MaxPool <kernel_shape = [2, 2]> (c) y = Reshape (p, flat) }}""",
        13,
        w=(zero + RNG.integers(-40, 40, (1, 2, 3, 3))).astype(dtype),
    )
    feeds: Any = {"x": (zero + RNG.integers(-100, 100, (1, 2, 8, 8))).astype(dtype)}
    (expected,) = session(model).run(None, feeds)
    apply(model, REWRITES, frozenset(["MaxPool", "QLinearConv", "Reshape"]), {})
    assert "Cast" not in operators(model)
    found = on_the_npu(model, feeds).astype(int)
    assert np.abs(found - expected.astype(int)).max() <= 1
