"""Every rewrite and unrolling in every opset, compared by value on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites import REWRITES, rewrite
from hatch_epcontext.graph.rewrites.precise import PRECISE, remedy
from hatch_epcontext.graph.rewrites.ranks import FEW_DIMENSIONS
from hatch_epcontext.graph.unrolling import UNROLLED, unroll
from hatch_epcontext.worker.value_types import value_types
from tests.graph.rewrites.equal import check_equal, operators

# All opsets of all rules take more than ten seconds.
pytestmark = pytest.mark.slow

Forms = Mapping[int, str]
"""Graphs in ONNX's notation by the first opset in which their operators have this form; empty without one."""

X = "(float[2, 3, 4] x) => (float[2, 3, 4] y)"
NORMALIZED = "(float[2, 3, 8] x, float[2, 3, 8] s, float[8] v, float[8] u) => (float[2, 3, 8] y)"
LAYER = "(float[3, 1, 4] x, float[1, {0}, 4] w, float[1, {0}, 5] r) => (float[3, 1, 1, 5] y)"
SEQUENCE = """(float[3, 4] x) => (float[{0}] y) <int64 one = {{1}}, int64 n = {{-1}}>
{{ s = SplitToSequence (x, one) {1} }}"""
ATTENTION = (
    "(float[2, 5, 8] x, float[2, 7, 8] k, float[8, 24] w, float[24] b) => (float[2, 5, 8] y)"
)
HEADS = "(float[2, 2, 5, 4] q, float[2, 2, 7, 4] k, float[2, 2, 7, 4] v)"
INTEGERS = "<float s = {0.1}, float t = {0.2}, uint8 z = {128}, int32[4] b = {1, 2, 3, 4}>"
NUMBERS = "float two = {2}, float half = {0.5}, float small = {1e-3}, float six = {6}"
WEIGHTS = "w = QuantizeLinear (v, s, z)"


def unary(operator: str, since: int = 7) -> Forms:
    return {since: f"{X} {{ y = {operator} (x) }}"}


def binary(operator: str, since: int = 7) -> Forms:
    given = "(float[2, 3, 4] x, float[3, 1] z) => (float[2, 3, 4] y)"
    return {since: f"{given} {{ y = {operator} (x, z) }}"}


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


def integers(nodes: str, result: str = "2, 3, 4", since: int = 10) -> Forms:
    """Nodes from integers ``q`` and ``w`` to ``r``."""
    given = f"(float[2, 3, 4] x, float[4, 4] v) => (float[{result}] y)"
    quantized = "q = QuantizeLinear (x, s, z)" + (WEIGHTS if "w," in nodes else "")
    return {since: f"{given} {INTEGERS} {{ {quantized} {nodes} y = DequantizeLinear (r, t, z) }}"}


def activated(operator: str, gates: int, names: str) -> Forms:
    attributes = f"hidden_size = 5, activations = [{names}]"
    layer = LAYER.format(gates * 5)
    return {7: f"{layer} {{ y = {operator} <{attributes}> (x, w, r) }}"}


def ours(node: str) -> Forms:
    return {7: f"{NORMALIZED} {{ y = com.microsoft.{node} }}"}


FORMS: Mapping[str, Forms] = {
    "TopK": {
        7: "(float[3, 5] x) => (float[3, 2] y, int64[3, 2] i) { y, i = TopK <k = 2> (x) }",
        10: "(float[3, 5] x) => (float[3, 2] y, int64[3, 2] i) <int64[1] k = {2}> "
        "{ y, i = TopK (x, k) }",
        11: "",
    },
    "Scatter": {
        9: """(float[1, 5] x, float[1, 2] u) => (float[1, 5] y)
        <int64[1, 2] i = {1, 3}> { y = Scatter <axis = 1> (x, i, u) }""",
        11: "",
    },
    "If": {
        7: """(float[2, 3] x, float[1] s) => (float[2, 3] y) <float[1] zero = {0}> {
        c = Greater (s, zero)
        y = If (c) <then_branch = a () => (float[2, 3] t) { t = Neg (x) },
                    else_branch = b () => (float[2, 3] e) { e = Abs (x) }> }"""
    },
    "SplitToSequence": {11: SEQUENCE.format("3, 4", "y = ConcatFromSequence <axis = 0> (s)")},
    "ConcatFromSequence": {
        11: """(float[2, 4] x) => (float[2, 2, 4] y) {
        s = SequenceConstruct (x, x) y = ConcatFromSequence <axis = 1, new_axis = 1> (s) }"""
    },
    "SequenceConstruct": {
        11: "(float[4] x, float[4] z) => (float[4] y) <int64 n = {-1}> "
        "{ s = SequenceConstruct (x, z) y = SequenceAt (s, n) }"
    },
    "SequenceEmpty": {
        11: "(float[4] x) => (float[4] y) <int64 n = {-1}> "
        "{ s = SequenceEmpty () t = SequenceInsert (s, x) y = SequenceAt (t, n) }"
    },
    "SequenceInsert": {
        11: SEQUENCE.format("4, 4", "a = SequenceAt (s, n) t = SequenceInsert (s, a, one)")[:-1]
        + "y = ConcatFromSequence <axis = 0> (t) }"
    },
    "SequenceErase": {
        11: SEQUENCE.format("1, 4", "t = SequenceErase (s, one) y = SequenceAt (t, one)")
    },
    "SequenceAt": {11: SEQUENCE.format("1, 4", "y = SequenceAt (s, n)")},
    "SequenceLength": {
        11: "(float[3, 4] x) => (int64 y) { s = SplitToSequence (x) y = SequenceLength (s) }"
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
    "com.microsoft.FusedGemm": {
        7: """(float[2, 3] x, float[3, 4] w, float[4] b) => (float[2, 4] y)
        { y = com.microsoft.FusedGemm <activation = "Relu", alpha = 0.5> (x, w, b) }"""
    },
    **{
        f"com.microsoft.{name}": {
            7: f"""(float[2, 4, 3] x, float[2, 4, 5] w) => (float[2, 3, 5] y)
            {{ y = com.microsoft.{name} <transA = 1, alpha = 0.5> (x, w) }}"""
        }
        for name in ("FusedMatMul", "TransposeMatMul")
    },
    "com.microsoft.Attention": {
        7: f"{ATTENTION} {{ y = com.microsoft.Attention <num_heads = 2> (x, w, b) }}"
    },
    "com.microsoft.MultiHeadAttention": {
        7: f"{ATTENTION} {{ y = com.microsoft.MultiHeadAttention <num_heads = 2> (x, k, k, b) }}"
    },
    "com.microsoft.EmbedLayerNormalization": {
        7: """(float[9, 4] w, float[9, 4] p, float[2, 4] s, float[4] a, float[4] b) =>
        (float[2, 3, 4] y, int32[2] n) <int32[2, 3] i = {0, 1, 2, 8, 7, 6},
        int32[2, 3] j = {0, 1, 1, 0, 0, 1}, int32[2, 3] k = {1, 1, 0, 1, 0, 0}>
        { y, n = com.microsoft.EmbedLayerNormalization (i, j, w, p, s, a, b, k) }"""
    },
    "com.microsoft.MatMulNBits": {
        7: """(float[3, 32] x) => (float[3, 2] y) <float[2] s = {0.1, 0.2}, uint8[2, 1, 16] w =
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
        16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31}>
        { y = com.microsoft.MatMulNBits <K = 32, N = 2, bits = 4, block_size = 32> (x, w, s) }"""
    },
    "com.microsoft.QuickGelu": ours("QuickGelu (x)"),
    "com.microsoft.Gelu": {9: ours("Gelu (x)")[7]},
    "com.microsoft.BiasGelu": {9: ours("BiasGelu (x, v)")[7]},
    "com.microsoft.FastGelu": ours("FastGelu (x, v)"),
    "com.microsoft.SkipLayerNormalization": ours("SkipLayerNormalization (x, s, v, u, v)"),
    "com.microsoft.SkipSimplifiedLayerNormalization": ours(
        "SkipSimplifiedLayerNormalization (x, s, v)"
    ),
    "SimplifiedLayerNormalization": {
        7: f"{NORMALIZED} {{ y = SimplifiedLayerNormalization <axis = -1> (x, v) }}"
    },
    "Gelu": unary('Gelu <approximate = "tanh">', 20),
    "LayerNormalization": {17: f"{NORMALIZED} {{ y = LayerNormalization <axis = -1> (x, v, u) }}"},
    "RMSNormalization": {23: f"{NORMALIZED} {{ y = RMSNormalization <axis = -1> (x, v) }}"},
    "BatchNormalization": {
        7: """(float[2, 3, 4] x, float[3] a, float[3] b, float[3] m) => (float[2, 3, 4] y)
        { v = Abs (m) y = BatchNormalization <epsilon = 0.1> (x, a, b, m, v) }"""
    },
    "LogSoftmax": unary("LogSoftmax <axis = 1>"),
    "PRelu": binary("PRelu"),
    "Softplus": unary("Softplus"),
    "Softsign": unary("Softsign"),
    "ReduceL1": reducing("a = Neg (x)", "ReduceL1", "y = Neg (b)"),
    "ReduceL2": reducing("a = Neg (x)", "ReduceL2", "y = Neg (b)", keepdims=0),
    "ReduceLogSum": reducing("a = Exp (x)", "ReduceLogSum", "y = Neg (b)"),
    "ReduceLogSumExp": reducing("a = Neg (x)", "ReduceLogSumExp", "y = Neg (b)", keepdims=0),
    "ReduceSumSquare": reducing("a = Neg (x)", "ReduceSumSquare", "y = Neg (b)"),
    "AffineGrid": {
        20: "(float[1, 2, 3] x) => (float[1, 3, 4, 2] y) <int64[4] n = {1, 1, 3, 4}> "
        "{ y = AffineGrid (x, n) }"
    },
    "Attention": {23: f"{HEADS} => (float[2, 2, 5, 4] y) {{ y = Attention (q, k, v) }}"},
    "Celu": unary("Celu <alpha = 0.5>", 12),
    "CenterCropPad": {
        18: "(float[2, 5, 4] x) => (float[2, 3, 6] y) <int64[2] n = {3, 6}> "
        "{ y = CenterCropPad <axes = [1, 2]> (x, n) }"
    },
    "GroupNormalization": {
        18: "(float[2, 4, 6] x, float[2] a, float[2] b) => (float[2, 4, 6] y) "
        "{ y = GroupNormalization <num_groups = 2> (x, a, b) }",
        21: "(float[2, 4, 6] x, float[4] a, float[4] b) => (float[2, 4, 6] y) "
        "{ y = GroupNormalization <num_groups = 2> (x, a, b) }",
    },
    "HardSwish": unary("HardSwish", 14),
    "Mish": unary("Mish", 18),
    "RotaryEmbedding": {
        23: "(float[1, 2, 3, 4] x, float[1, 3, 2] c, float[1, 3, 2] s) => (float[1, 2, 3, 4] y) "
        "{ y = RotaryEmbedding (x, c, s) }"
    },
    "SwiGLU": {28: "(float[2, 3] x, float[2, 3] z) => (float[2, 3] y) { y = SwiGLU (x, z) }"},
    "Swish": unary("Swish", 24),
    "QLinearConv": {
        10: f"""(float[1, 4, 5, 5] x, float[4, 4, 1, 1] v) => (float[1, 4, 5, 5] y) {INTEGERS}
        {{ q = QuantizeLinear (x, s, z) {WEIGHTS} r = QLinearConv (q, s, z, w, s, z, t, z, b)
        y = DequantizeLinear (r, t, z) }}"""
    },
    "QLinearMatMul": integers("r = QLinearMatMul (q, s, z, w, s, z, t, z)"),
    "com.microsoft.QGemm": integers(
        "f = Flatten <axis = 2> (q) "
        "r = com.microsoft.QGemm <transB = 1> (f, s, z, w, s, z, b, t, z)",
        "6, 4",
    ),
    "com.microsoft.QLinearConcat": integers(
        "r = com.microsoft.QLinearConcat <axis = 0> (t, z, q, s, z, q, s, z)", "4, 3, 4"
    ),
    **{
        f"com.microsoft.QLinear{name}": integers(
            f"r = com.microsoft.QLinear{name} (q, s, z, q, s, z, t, z)"
        )
        for name in ("Add", "Mul")
    },
    "com.microsoft.QLinearSigmoid": integers("r = com.microsoft.QLinearSigmoid (q, s, z, t, z)"),
    "com.microsoft.QLinearLeakyRelu": integers(
        "r = com.microsoft.QLinearLeakyRelu <alpha = 0.1> (q, s, z, t, z)"
    ),
    "com.microsoft.QLinearSoftmax": integers(
        "r = com.microsoft.QLinearSoftmax <axis = -1, opset = 13> (q, s, z, t, z)"
    ),
    "com.microsoft.QLinearAveragePool": integers(
        "r = com.microsoft.QLinearAveragePool <kernel_shape = [2]> (q, s, z, t, z)", "2, 3, 3"
    ),
    "com.microsoft.QLinearGlobalAveragePool": integers(
        "r = com.microsoft.QLinearGlobalAveragePool <channels_last = 0> (q, s, z, t, z)", "2, 3, 1"
    ),
    "Flatten": integers("r = Flatten (q)", "2, 12"),
    "Identity": integers("r = Identity (q)"),
    "MaxPool": {12: integers("r = MaxPool <kernel_shape = [2]> (q)", "2, 3, 3")[10]},
    "Gemm": {
        7: """(float[2, 3] x, float[3, 4] w, float[4] b) => (float[2, 4] y)
        { y = Gemm <alpha = 0.5, beta = 2.0> (x, w, b) }"""
    },
    "GridSample": {
        16: """(float[2, 3, 5, 4] x, float[2, 2, 3, 2] g) => (float[2, 3, 2, 3] y)
        { y = GridSample <mode = "bicubic"> (x, g) }""",
        20: """(float[2, 3, 5, 4] x, float[2, 2, 3, 2] g) => (float[2, 3, 2, 3] y)
        { y = GridSample <mode = "cubic", align_corners = 1> (x, g) }""",
    },
    "TensorScatter": {
        24: """(float[2, 3, 7, 4] x, float[2, 3, 2, 4] u) => (float[2, 3, 7, 4] y)
        <int64[2] i = {3, 1}> { y = TensorScatter (x, u, i) }"""
    },
    "Mean": {7: "(float[3] x, float[3] z) => (float[3] y) { y = Mean (x, z, x) }"},
    "Trilu": unary("Trilu", 14),
    "OneHot": {
        9: """(int64[3] x) => (float[3, 99] y) <int64 n = {99}, float[2] v = {-1, 2}>
        { y = OneHot (x, n, v) }"""
    },
    "GatherND": {
        11: f"{X.replace('2, 3, 4] y', '2, 4] y')} <int64[2, 2] i = {{0, 1, 1, -1}}> "
        "{ y = GatherND (x, i) }"
    },
    "ScatterElements": {
        16: """(float[3, 2] x, float[3, 2] u) => (float[3, 2] y)
        <int64[3, 1] i = {2, 0, 2}, int64[2] n = {3, 2}>
        { w = Expand (i, n) y = ScatterElements <reduction = "add"> (x, w, u) }"""
    },
    "ConvTranspose": {
        7: """(float[1, 1, 4] x) => (float[1, 1, 6] y) <float[1, 1, 2] w = {1.5, -2}>
        { y = ConvTranspose <dilations = [2]> (x, w) }"""
    },
    "Erf": unary("Erf", 9),
    "Clip": {11: "(float[9] x, float z) => (float[9] y) { y = Clip (x, z) }"},
    "Slice": {
        10: """(float[2, 8] x, int64[1] i) => (float[2, 3] y)
        <int64[1] one = {1}, int64[1] n = {3}, int64[1] zero = {0}, int64[1] three = {3}> {
        f = Cast <to = 1> (i) c = Sigmoid (f) j = Cast <to = 7> (c) k = Add (j, three)
        y = Slice (x, j, k, one) }"""
    },
    "Cast": {7: "(uint8[9] x) => (float[9] y) { y = Cast <to = 1> (x) }"},
    "Einsum": {
        12: """(float[2, 3, 4] x, float[2, 4, 5] z) => (float[2, 5] y)
        { y = Einsum <equation = "bij,bjk->bk"> (x, z) }"""
    },
    "Unsqueeze": {
        7: """(float[2, 3] x) => (float[1, 2, 1, 3] y) { m = Unsqueeze <axes = [0, 2, 4]> (x)
        y = Squeeze <axes = [4]> (m) }""",
        13: """(float[2, 3] x) => (float[1, 2, 1, 3] y) <int64[3] i = {0, 2, 4}, int64[1] j = {4}>
        { m = Unsqueeze (x, i) y = Squeeze (m, j) }""",
    },
    "ReduceMean": {
        7: """(float[1, 2, 3, 2, 4, 2] x) => (float[1, 2, 3, 4] y)
        { y = ReduceMean <axes = [3, 5], keepdims = 0> (x) }""",
        18: """(float[1, 2, 3, 2, 4, 2] x) => (float[1, 2, 3, 1, 4, 1] y) <int64[2] n = {3, -1}>
        { y = ReduceMean (x, n) }""",
    },
    **{
        name: {
            12: f"""{NORMALIZED} {{ g = com.microsoft.QuickGelu (x) c = {name} (g, s)
            y = Where (c, g, s) }}"""
        }
        for name in ("GreaterOrEqual", "LessOrEqual")
    },
}
"""By the operator that is replaced."""

UNROLLABLE: Mapping[str, Forms] = {
    "Loop": {
        7: """(float[1, 4] s, float[4, 4] w) => (float[1, 4] y) <int64 n = {3}, bool go = {1}>
        { y = Loop (n, go, s) <body = b (int64 i, bool c, float[1, 4] s0) =>
        (bool d, float[1, 4] t) { d = Identity (c) m = MatMul (s0, w) t = Tanh (m) }> }""",
    },
    "Scan": {
        8: """(float[2, 1, 4] s, float[2, 3, 1, 4] x, float[4, 4] w) =>
        (float[2, 1, 4] y, float[2, 3, 1, 4] z) { y, z = Scan <num_scan_inputs = 1, directions = [1],
        body = b (float[1, 4] s0, float[1, 4] i) => (float[1, 4] t, float[1, 4] o)
        { m = MatMul (s0, w) n = Add (m, i) t = Tanh (n) o = Neg (t) }> (, s, x) }""",
        9: """(float[1, 4] s, float[3, 1, 4] x, float[4, 4] w) => (float[1, 4] y, float[3, 1, 4] z)
        { y, z = Scan <num_scan_inputs = 1, body = b (float[1, 4] s0, float[1, 4] i) =>
        (float[1, 4] t, float[1, 4] o) { m = MatMul (s0, w) n = Add (m, i) t = Tanh (n)
        o = Neg (t) }> (s, x) }""",
    },
    **{
        operator: {
            7: f"""{LAYER.format(gates * 5)} <int32[1] n = {{2}}>
            {{ y = {operator} <hidden_size = 5, clip = 2.0{functions}> (x, w, r, , n) }}"""
        }
        for operator, gates, functions in (
            (
                "LSTM",
                4,
                ', activations = ["HardSigmoid", "Relu", "Tanh"], activation_alpha = [0.3]',
            ),
            ("GRU", 3, ""),
            ("RNN", 1, ""),
        )
    },
}

SQUARES = "a = Mul (x, x)"
REMEDIED: Mapping[str, Forms] = {
    "square": {7: f"{X} <{NUMBERS}> {{ y = Pow (x, two) }}"},
    "mean": reducing("a = Neg (x)", "ReduceSum", "y = Div (b, six)"),
    "clip-inputs": {7: f"{X} {{ y = Clip <min = -1.0, max = 0.5> (x) }}", 11: ""},
    "hypot": reducing(SQUARES, "ReduceSum", "y = Sqrt (b)"),
    "log-power": reducing(SQUARES, "ReduceSum", "y = Log (b)"),
    "variance": {
        7: """(float[2, 3, 4] x) => (float[1, 1, 4] y) { a = Mul (x, x) m = ReduceMean <axes = [0, 1]> (x)
        b = ReduceMean <axes = [0, 1]> (a) n = Mul (m, m) y = Sub (b, n) }""",
        18: """(float[2, 3, 4] x) => (float[1, 1, 4] y) <int64[2] i = {0, 1}>
        { a = Mul (x, x) m = ReduceMean (x, i) b = ReduceMean (a, i) n = Mul (m, m) y = Sub (b, n) }""",
    },
    "scaled-square": reducing(SQUARES, "ReduceMean", "c = Add (b, small) y = Sqrt (c)"),
    "unfuse-activation": {7: f"{X} <{NUMBERS}> {{ a = Add (x, two) y = Tanh (a) }}"},
}
"""By the id of the rewrite."""


def newest() -> int:
    """The newest opset that onnx and ONNX Runtime know."""
    opset = onnx.defs.onnx_opset_version()
    while True:
        model = parsed(f"{X} {{ y = Relu (x) }}", opset)
        try:
            ort.InferenceSession(model.SerializeToString())
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
    pytest.param(kind, name, forms, id=f"{kind}-{name}")
    for kind, table in (("rewrite", FORMS), ("unroll", UNROLLABLE), ("remedy", REMEDIED))
    for name, forms in table.items()
]


@pytest.mark.parametrize(("kind", "name", "forms"), CASES)
def test_a_change_computes_the_same_in_every_opset(kind: str, name: str, forms: Forms) -> None:
    compared = []
    for opset in range(min(forms), newest() + 1):
        text = forms[max(since for since in forms if since <= opset)]
        if text and is_run(before := parsed(text, opset)):
            check_equal(before, changed(before, kind, name), tolerance(before))
            compared.append(opset)
    if not compared:
        pytest.skip("ONNX Runtime runs it in no opset")


def is_run(model: onnx.ModelProto) -> bool:
    """Whether ONNX Runtime has kernels for the opset of ``model``: it has none yet for some newer forms."""
    try:
        ort.InferenceSession(model.SerializeToString())
    except ort_errors.NotImplemented:
        return False
    return True


def changed(before: onnx.ModelProto, kind: str, name: str) -> onnx.ModelProto:
    """``before`` after the change of ``kind`` for the operator or the id ``name``, which does something."""
    after = onnx.ModelProto.FromString(before.SerializeToString())
    types = value_types(before, Path("unsaved.onnx"))
    if kind == "rewrite":
        done = rewrite(after, frozenset({name}), types)
    elif kind == "unroll":
        done = unroll(after, frozenset({name}), 1000, types)
    else:
        done = remedy(after, types, [name])  # type: ignore[list-item]
    assert done, f"nothing was done in opset {graph.opset(before)}"
    onnx.checker.check_model(after, full_check=True)
    return after


def tolerance(model: onnx.ModelProto) -> float:
    """The largest difference: of integers a step."""
    return 0.2001 if "QuantizeLinear" in operators(model) else 2e-5


def test_each_change_has_a_case() -> None:
    operators = {operator for each in REWRITES for operator in each.operators}
    assert set(FORMS) >= operators - FEW_DIMENSIONS.operators
    assert set(UNROLLABLE) == UNROLLED
    assert set(REMEDIED) == set(PRECISE)
