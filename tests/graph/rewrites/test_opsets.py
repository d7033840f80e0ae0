"""Every rewrite and unrolling in every opset, compared by value on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites import REWRITES, UNROLLS
from hatch_epcontext.graph.rewrites.precise import PRECISE
from hatch_epcontext.graph.rewriting import Rewrite, apply
from hatch_epcontext.worker.ort_values import value_types
from tests.graph.rewrites.equal import check_equal, session
from tests.graph.rewrites.test_node_tests import OPERATORS

# All opsets of all rules take more than ten seconds.
pytestmark = pytest.mark.slow

Variants = Mapping[int, str]
"""Graphs in ONNX's notation by the first opset that has these variants of their operators; empty without."""

X = "(float[2, 3, 4] x) => (float[2, 3, 4] y)"
NORMALIZED = "(float[2, 3, 8] x, float[2, 3, 8] s, float[8] v, float[8] u) => (float[2, 3, 8] y)"
LAYER = "(float[3, 1, 4] x, float[1, {0}, 4] w, float[1, {0}, 5] r) => (float[3, 1, 1, 5] y)"
HEADS = "(float[2, 2, 5, 4] q, float[2, 2, 7, 4] k, float[2, 2, 7, 4] v)"
NUMBERS = "float two = {2}, float half = {0.5}, float six = {6}, float thousandth = {0.001}"


def unary(operator: str, since: int = 7) -> Variants:
    return {since: f"{X} {{ y = {operator} (x) }}"}


def reducing(before: str, reduce: str, after: str, keepdims: int = 1) -> dict[int, str]:
    """``reduce`` over two of three axes, as attributes and as an input."""
    given = f"(float[2, 3, 4] x) => (float[{'1, 1, 4' if keepdims else '4'}] y)"
    axes = f"axes = [0, 1], keepdims = {keepdims}"
    return {
        7: f"{given} <{NUMBERS}> {{ {before} b = {reduce} <{axes}> (a) {after} }}",
        13 if reduce == "ReduceSum" else 18: (
            f"{given} <int64[2] axes = {{0, -2}}, {NUMBERS}> "
            f"{{ {before} b = {reduce} <keepdims = {keepdims}> (a, axes) {after} }}"
        ),
    }


def activated(operator: str, gates: int, names: str) -> Variants:
    attributes = f"hidden_size = 5, activations = [{names}]"
    layer = LAYER.format(gates * 5)
    return {7: f"{layer} {{ y = {operator} <{attributes}> (x, w, r) }}"}


VARIANTS: Mapping[str, Variants] = {
    "If": {
        9: """(float[2, 3] x, float[1] s) => (float[2, 3] y) <float[1] zero = {0}> {
        c = Greater (s, zero)
        y = If (c) <then_branch = a () => (float[2, 3] t) { t = Neg (x) },
                    else_branch = b () => (float[2, 3] e) { e = Abs (x) }> }"""
    },
    "ReverseSequence": {
        10: f"{X} <int64[3] n = {{2, 2, 2}}> {{ y = ReverseSequence (x, n) }}",
    },
    "LSTM": activated("LSTM", 4, '"Sigmoid", "Tanh", "Tanh"'),
    "GRU": activated("GRU", 3, '"Sigmoid", "Tanh"'),
    "RNN": activated("RNN", 1, '"Tanh"'),
    "com.microsoft.FusedConv": {
        7: """(float[1, 2, 6, 6] x, float[4, 2, 3, 3] w) => (float[1, 4, 4, 4] y) { y =
        com.microsoft.FusedConv <activation = "Clip", activation_params = [-0.5, 1.5]> (x, w) }"""
    },
    "com.microsoft.MatMulNBits": {
        7: """(float[3, 32] x) => (float[3, 2] y) <float[2] s = {0.1, 0.2}, uint8[2, 1, 16] w =
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
        16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31}>
        { y = com.microsoft.MatMulNBits <K = 32, N = 2, bits = 4, block_size = 32> (x, w, s) }"""
    },
    "com.microsoft.SkipSimplifiedLayerNormalization": {
        7: f"{NORMALIZED} {{ y = com.microsoft.SkipSimplifiedLayerNormalization (x, s, v) }}"
    },
    "SimplifiedLayerNormalization": {
        7: f"{NORMALIZED} {{ y = SimplifiedLayerNormalization <axis = -1> (x, v) }}"
    },
    "RMSNormalization": {23: f"{NORMALIZED} {{ y = RMSNormalization <axis = -1> (x, v) }}"},
    "Softplus": unary("Softplus"),
    "ReduceL1": reducing("a = Neg (x)", "ReduceL1", "y = Neg (b)"),
    "ReduceL2": reducing("a = Neg (x)", "ReduceL2", "y = Neg (b)", keepdims=0),
    "ReduceLogSum": reducing("a = Exp (x)", "ReduceLogSum", "y = Neg (b)"),
    "ReduceSumSquare": reducing("a = Neg (x)", "ReduceSumSquare", "y = Neg (b)"),
    "TensorScatter": {
        24: """(float[2, 3, 7, 4] x, float[2, 3, 1, 4] u) => (float[2, 3, 7, 4] y)
        <int64[2] i = {9, 1}> { y = TensorScatter <mode = "circular"> (x, u, i) }"""
    },
    "Erf": unary("Erf", 9),
    "Clip": {11: "(float[9] x, float z) => (float[9] y) { y = Clip (x, z) }"},
    "ScatterElements": {
        16: """(float[3, 2] x, float[3, 2] u) => (float[3, 2] y)
        <int64[3, 1] i = {2, 0, 2}, int64[2] n = {3, 2}>
        { w = Expand (i, n) y = ScatterElements <reduction = "add"> (x, w, u) }"""
    },
    "Attention": {23: f"{HEADS} => (float[2, 2, 5, 4] y) {{ y = Attention (q, k, v) }}"},
    "RotaryEmbedding": {
        23: "(float[1, 2, 3, 4] x, float[1, 3, 2] c, float[1, 3, 2] s) => (float[1, 2, 3, 4] y) "
        "{ y = RotaryEmbedding (x, c, s) }"
    },
    "Slice": {
        10: """(float[2, 8] x, int64[1] i) => (float[2, 3] y)
        <int64[1] one = {1}, int64[1] n = {3}, int64[1] zero = {0}, int64[1] three = {3}> {
        f = Cast <to = 1> (i) c = Sigmoid (f) j = Cast <to = 7> (c) k = Add (j, three)
        y = Slice (x, j, k, one) }"""
    },
    "Gather": {
        8: """(float[2, 3, 4] x) => (int64[2, 1] y) <int64[1] one = {1}>
        { t = Transpose <perm = [2, 0, 1]> (x) a = ArgMax <axis = 0, keepdims = 0> (t)
        y = Gather <axis = 1> (a, one) }"""
    },
    "Cast": {7: "(uint8[9] x) => (float[9] y) { y = Cast <to = 1> (x) }"},
    **{
        name: {12: f"{NORMALIZED} {{ c = {name} (x, s) y = Where (c, x, s) }}"}
        for name in ("GreaterOrEqual", "LessOrEqual")
    },
}
"""By the operator that is replaced."""

DEFINED: Mapping[str, Variants] = {
    "ArgMax": {
        12: """(float[2, 3, 4] x) => (int64[2, 1, 4] y)
        { y = ArgMax <axis = 1, select_last_index = 1> (x) }"""
    },
    "Flatten": {10: "(float[2, 3, 4] x) => (float[6, 4] y) { y = Flatten <axis = 2> (x) }"},
    "Pow": {12: "(int32[2, 3] x) => (int32[2, 3] y) <int32 k = {2}> { y = Pow (x, k) }"},
    "Elu": unary("Elu", 9),
    "HardSigmoid": unary("HardSigmoid", 8),
    "LeakyRelu": unary("LeakyRelu", 9),
    "PRelu": {9: f"(float[2, 3, 4] x, float[4] s) {X[19:]} {{ y = PRelu (x, s) }}"},
    "Relu": unary("Relu", 13),
    "Selu": unary("Selu", 9),
    "Softsign": unary("Softsign"),
    "ThresholdedRelu": unary("ThresholdedRelu", 10),
}
"""Operators whose function is one of a later opset, or whose text is for older ones."""

UNROLLABLE: Mapping[str, Variants] = {
    "Loop": {
        7: """(float[1, 4] s, float[4, 4] w) => (float[1, 4] y, float[3, 1, 4] rows)
        <int64 n = {3}, bool go = {1}>
        { y, rows = Loop (n, go, s) <body = b (int64 i, bool c, float[1, 4] s0) =>
        (bool d, float[1, 4] t, float[1, 4] row)
        { d = Identity (c) m = MatMul (s0, w) t = Tanh (m) row = Neg (t) }> }""",
    },
    **{
        operator: {
            7: f"""{LAYER.format(gates * 5)} <int32[1] n = {{2}}>
            {{ y = {operator} <hidden_size = 5{functions}> (x, w, r, , n) }}"""
        }
        for operator, gates, functions in (
            (
                "LSTM",
                4,
                ', activations = ["HardSigmoid", "Relu", "Tanh"]',
            ),
            ("GRU", 3, ""),
            ("RNN", 1, ""),
        )
    },
}

WHOLE = "(int64[2, 3] x) => (int64[2, 3] y) <int64 two = {2}>"

CORRECTED: Mapping[str, Variants] = {
    "square": {7: f"{X} <{NUMBERS}> {{ y = Pow (x, two) }}"},
    "mean": reducing("a = Neg (x)", "ReduceSum", "y = Div (b, six)"),
    "clip-inputs": {7: f"{X} {{ y = Clip <min = -1.0, max = 0.5> (x) }}", 11: ""},
    "transposed-outputs": {
        7: "",
        8: """(float[2, 3, 4] x) => (int64[3, 2, 1] y)
        { t = Transpose <perm = [1, 0, 2]> (x) y = ArgMax <axis = 2> (t) }""",
    },
    "pool-padding": {
        7: """(float[1, 2, 6, 6] x) => (float[1, 2, 6, 6] y)
        { y = LpPool <kernel_shape = [2, 2], pads = [0, 0, 1, 1]> (x) }"""
    },
    "log-sum-exp": reducing("a = Exp (x)", "ReduceSum", "y = Log (b)"),
    "log-power": {
        8: f"{X} <{NUMBERS}> {{ a = Mul (x, x) b = Add (a, a) c = Max (half, b) y = Log (c) }}"
    },
    "log-floor": {
        8: f"{X} <float tiny = {{1e-10}}, {NUMBERS}> {{ a = Abs (x) b = Add (a, tiny) y = Log (b) }}"
    },
    "quantized-signs": {
        10: """(int8[2, 3] x, float[3, 4] w) => (uint8[2, 4] y)
        <float s = {0.5}, int8 z = {3}, uint8 u = {100}>
        { f = DequantizeLinear (x, s, z) m = MatMul (f, w) y = QuantizeLinear (m, s, u) }"""
    },
    "variance": {
        7: """(float[2, 3, 4] x) => (float[1, 1, 4] y) { a = Mul (x, x) m = ReduceMean <axes = [0, 1]> (x)
        b = ReduceMean <axes = [0, 1]> (a) n = Mul (m, m) y = Sub (b, n) }""",
        18: """(float[2, 3, 4] x) => (float[1, 1, 4] y) <int64[2] i = {0, 1}>
        { a = Mul (x, x) m = ReduceMean (x, i) b = ReduceMean (a, i) n = Mul (m, m) y = Sub (b, n) }""",
    },
    "small-angle": unary("Atan", 9),
    "scaled-square": reducing("a = Mul (x, x)", "ReduceMean", "c = Add (b, half) y = Sqrt (c)"),
    "unfuse-activation": {7: f"{X} <{NUMBERS}> {{ a = Add (x, two) y = Tanh (a) }}"},
    "split-integers": {
        7: """(int32[2, 3] x) => (float[2, 3] y) <float k = {0.001}, float m = {3000}>
        { f = Cast <to = 1> (x) d = Sub (f, m) y = Mul (d, k) }"""
    },
    "ratio": {
        7: """(int64[2, 3] x) => (float[2, 3] y) <float one = {1}>
        { f = Cast <to = 1> (x) d = Add (f, one) y = Div (f, d) }"""
    },
    "factors": reducing("a = Mul (x, x)", "ReduceSum", "y = Mul (b, thousandth)"),
    "scaled-product": {
        9: """(float[2, 3, 4] x) => (float[2, 3, 1] y)
        { a = Mul (x, x) y = ReduceMean <axes = [-1]> (a) }""",
        18: """(float[2, 3, 4] x) => (float[2, 3, 1] y) <int64[1] axes = {-1}>
        { a = Mul (x, x) y = ReduceMean (a, axes) }""",
    },
    "long-sums": {
        11: """(int64[2, 3] x) => (int64[2, 3] y) <int32 axis = {1}> { y = CumSum (x, axis) }"""
    },
    "truncate": {9: f"{WHOLE} {{ y = Div (x, two) }}"},
    "modulo": {10: f"{WHOLE} {{ y = Mod (x, two) }}"},
    "truth": {9: f"{WHOLE} {{ b = Cast <to = 9> (x) y = Cast <to = 7> (b) }}"},
    "bytes": {
        9: f"{WHOLE} {{ b = Cast <to = 2> (x) f = Cast <to = 1> (b) y = Cast <to = 7> (f) }}"
    },
    "indices": {11: f"{WHOLE} {{ m = Mod (x, two) i = Sub (m, two) y = GatherElements (x, i) }}"},
    "broadcast": {
        9: """(float[2, 1, 2, 1, 3] x, float[1, 4, 1, 2, 1] s) => (float[2, 4, 2, 2, 3] y)
        { c = Greater (x, s) y = Where (c, x, s) }"""
    },
    "hard-swish": {7: f"{X} {{ s = HardSigmoid (x) y = Mul (x, s) }}"},
    "reciprocals": {7: f"{X} <float[4] k = {{1, 2, 4, 32768}}> {{ y = Div (x, k) }}"},
    "floor": {8: f"{X} {{ y = Exp (x) }}"},
    "comparison": {
        8: "(float[2, 3, 4] x) => (bool[2, 3, 4] y) { a = Mul (x, x) y = Greater (a, x) }"
    },
    "scaled-division": {9: f"{X} <{NUMBERS}> {{ y = Div (two, x) }}"},
}
"""By the id of the rewrite."""


@functools.cache
def newest() -> int:
    """The newest opset that onnx and ONNX Runtime know."""
    opset = onnx.defs.onnx_opset_version()
    while True:
        model = parsed(f"{X} {{ y = Relu (x) }}", opset)
        try:
            session(model)
        except ort_errors.Fail:
            opset -= 1
        else:
            return opset


def parsed(text: str, opset: int) -> onnx.ModelProto:
    opsets = f'["" : {opset}, "com.microsoft" : 1]'
    model: onnx.ModelProto = onnx.parser.parse_model(
        f"<ir_version: 8, opset_import: {opsets}> main {text}"
    )
    return model


CASES = [
    pytest.param(kind, name, variants, id=f"{kind}-{name}")
    for kind, table in (
        ("rewrite", {**VARIANTS, **DEFINED}),
        ("unroll", UNROLLABLE),
        ("correction", CORRECTED),
    )
    for name, variants in table.items()
]


@pytest.mark.parametrize(("kind", "name", "variants"), CASES)
def test_a_change_computes_the_same_in_every_opset(
    kind: str, name: str, variants: Variants
) -> None:
    """Such as ReduceSumSquare before opset 18: istupakov/onnx-asr#124."""
    compared = []
    # Those for the accuracy need Max with a number.
    first = max(min(variants), 8) if kind == "correction" else min(variants)
    for opset in range(first, newest() + 1):
        text = variants[max(since for since in variants if since <= opset)]
        if text and is_run(before := parsed(text, opset)):
            check_equal(before, changed(before, kind, name), 2e-5)
            compared.append(opset)
    if not compared:
        pytest.skip("ONNX Runtime runs it in no opset")


def is_run(model: onnx.ModelProto) -> bool:
    """Whether ONNX Runtime has kernels for the opset of ``model``: some newer variants have none yet."""
    try:
        session(model)
    except ort_errors.NotImplemented:
        return False
    return True


def changed(before: onnx.ModelProto, kind: str, name: str) -> onnx.ModelProto:
    """``before`` after the change of ``kind`` for the operator or the id ``name``, which does something."""
    after = onnx.ModelProto.FromString(before.SerializeToString())
    types = value_types(before, Path("unsaved.onnx"))
    if kind == "rewrite":
        done = apply(after, REWRITES, frozenset({name}), types).names
    elif kind == "unroll":
        done = apply(after, UNROLLS, frozenset({name}), types, 1000).names
    else:
        done = apply(after, [PRECISE[name]], None, types).names  # type: ignore[index]
    assert done, f"nothing was done in opset {graph.opset(before)}"
    onnx.checker.check_model(after, full_check=True)
    return after


OTHERS = {
    *("apply_text", "compute_in_32_bits", "inline_function"),
    *("decompose_picture", "decompose_quantization", "gather_blocks", "move_between_floats"),
    *("reduce_nothing", "reduce_rank", "reduce_rank_of_gather", "reduce_rank_of_transpose"),
    *("join_reshapes", "drop_single", "decompose", "loop_as_layer"),
    *("reduce_rank_of_reduction", "reduce_rank_of_tile", "decompose_quantized_concat"),
    *("gather_nd_as_gather", "scatter_as_elements", "compress_as_gather", "top_of_last_axis"),
}
"""Those of many operators, and of ONNX Runtime's own; other tests have examples."""


def _named(rewrite: Rewrite) -> frozenset[str]:
    assert isinstance(rewrite.operators, frozenset)
    return rewrite.operators


def test_each_change_has_a_case() -> None:
    # Those for a fault are of any operator.
    listed = {
        operator
        for rewrite in REWRITES
        if rewrite.fault is None and rewrite.name not in OTHERS
        for operator in _named(rewrite)
    }
    assert listed - set(OPERATORS) <= set(VARIANTS)
    # A Scan is that of a LinearAttention in ONNX's tests.
    unrolled = {operator for rewrite in UNROLLS for operator in _named(rewrite)}
    assert set(UNROLLABLE) == unrolled - {"Scan"}
    assert set(CORRECTED) == set(PRECISE)
