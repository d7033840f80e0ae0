"""Rows that are independent, as the graph proves it, and rows that mix."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.batch.follow import batch_of_outputs
from tests.models import parsed

ROW = "(float[N, 4, 6] x) => (float[N, S, T] y)"

INDEPENDENT = {
    "elementwise": f"{ROW} {{ a = Mul (x, six) b = Sigmoid (a) y = Where (yes, b, x) }}",
    "mean of a row": f"{ROW} {{ m = ReduceMean <axes = [1, -1]> (x) y = Sub (x, m) }}",
    "two axes are one": f"{ROW} {{ a = Reshape (x, rows_by_six) b = MatMul (a, w66) y = Reshape (b, back) }}",
    "a row becomes rows": "(float[N, 8] x) => (float[M, 2] y) { y = Reshape (x, by_two) }",
    "attention": f"""{ROW} {{ k = Transpose <perm = [0, 2, 1]> (x) s = MatMul (x, k)
        p = Softmax <axis = -1> (s)
        y = MatMul (p, x) }}""",
    "the shape decides sizes": f"""{ROW} {{ s = Shape (x) n = Gather (s, first) u = Unsqueeze (n, first1)
        t = Concat <axis = 0> (u, open) a = Reshape (x, t) y = Unsqueeze (a, one) }}""",
    "a token before each row": f"""{ROW} {{ n = Shape <end = 1> (x) s = Concat <axis = 0> (n, one, six1)
        t = Expand (token, s) y = Concat <axis = 1> (t, x) }}""",
    "an open size, as PyTorch writes it": f"""{ROW} {{ n = Shape <end = 1> (x)
        s = Concat <axis = 0> (n, open, open)
        l = Shape (s) o = ConstantOfShape <value = int64[1] {{1}}> (l) is_open = Equal (s, minus)
        e = Where (is_open, o, s) t = Expand (token, e) y = Add (t, x) }}""",
    "images": """(float[N, 3, 8, 8] x) => (float[N, 4, 4, 4] y) { c = Conv <pads = [1, 1, 1, 1]> (x, conv)
        b = BatchNormalization (c, s4, s4, s4, s4) i = InstanceNormalization (b, s4, s4)
        g = GlobalAveragePool (i) m = Mul (i, g) y = MaxPool <kernel_shape = [2, 2],
        strides = [2, 2]> (m) }""",
    "normalized in each row": """(float[N, 3, 4, 4] x) => (float[N, 3, 4, 4] y)
        { y = MeanVarianceNormalization <axes = [1, 2, 3]> (x) }""",
    "resized by the shape": """(float[N, 3, 4, 4] x) => (float[N, 3, 8, 8] y) { n = Shape <end = 2> (x)
        s = Concat <axis = 0> (n, eights) y = Resize <mode = "nearest"> (x, , , s) }""",
    "tokens": """(int64[N, 5] x) => (float[N, 6] y) { e = Gather (table, x) y = ReduceSum (e, one) }""",
    "one-hot": "(int64[N] x) => (float[N, 6] y) { y = OneHot (x, six_deep, off_on) }",
    "picked in each row": """(float[N, 6] x, int64[N, 2] i) => (float[N, 2] y)
        { y = GatherElements <axis = 1> (x, i) }""",
    "the best of each row": """(float[N, 6] x) => (float[N, 2] y, int64[N, 2] i, int64[N] a)
        { y, i = TopK (x, two) a = ArgMax <axis = 1, keepdims = 0> (x) }""",
    "padded and cut": f"""{ROW} {{ p = Pad (x, pads) y = Slice (p, starts, ends) }}""",
    "time first": """(float[T, N, 6] x) => (float[T, N, 3] y, float[1, N, 3] h)
        { a, h = GRU <hidden_size = 3> (x, gru_w, gru_r) y = Squeeze (a, one) }""",
    "time and rows are one axis": """(float[T, N, 6] x) => (float[T, N, 6] y)
        { s = Shape (x) f = Reshape (x, rows_by_six) a = MatMul (f, w66) y = Reshape (a, s) }""",
    "a recurrent layer whose state is made": """(float[T, N, 6] x) => (float[1, N, 3] h)
        { n = Shape <start = 1, end = 2> (x) s = Concat <axis = 0> (one, n, three) z = ConstantOfShape (s)
        y, h = GRU <hidden_size = 3> (x, gru_w, gru_r, , , z) }""",
    "columns": "(float[6, N] x) => (float[6, N] y) { a = MatMul (w66, x) y = Softmax <axis = 0> (a) }",
    "a Gemm of columns": "(float[6, N] x) => (float[N, 6] y) { y = Gemm <transA = 1> (x, w66, s6) }",
    "Einstein's sums": f"""{ROW} {{ a = Einsum <equation = "bij,bkj->bik"> (x, x)
        y = Einsum <equation = "...i,ij->...j"> (x, w66) z = Add (a, a) }}""",
    "a branch that the shape decides": """(float[N, 6] x) => (float[N, 6] y) { s = Shape <start = 1> (x)
        c = Equal (s, six1) d = Squeeze (c)
        y = If (d) <then_branch = t () => (float[N, 6] a) { a = Relu (x) },
            else_branch = e () => (float[N, 6] b) { b = CumSum (x, first) }> }""",
    "a loop over each row": """(float[N, 6] x) => (float[N, 6] y) { count = Constant <value_int = 3> ()
        y = Loop (count, , x) <body = b (int64 i, bool c, float[N, 6] v) => (bool d, float[N, 6] o)
        { d = Identity (c) o = Tanh (v) }> }""",
    "a scan over time": """(float[N, 5, 6] x, float[N, 6] h) => (float[N, 6] end, float[N, 5, 6] y) { end, y =
        Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
        body = b (float[N, 6] v, float[N, 6] p) => (float[N, 6] o, float[N, 6] q)
        { o = Add (v, p) q = Tanh (o) }> (h, x) }""",
    "found in each row": """(float[N, 6] x, int64[N, 1] i) => (float[N] y)
        { y = GatherND <batch_dims = 1> (x, i) }""",
    "found in a table": "(int64[N, 3, 1] i) => (float[N, 3, 6] y) { y = GatherND (table, i) }",
    "values behind the found": "(float[6, N] x) => (float[3, N] y) { y = GatherND (x, three_rows) }",
    "written in each row": """(float[N, 6] x, int64[N, 6] i, float[N, 6] u) => (float[N, 6] y)
        { y = ScatterElements <axis = 1, reduction = "add"> (x, i, u) }""",
    "picked from a table of columns": """(int64[N, 2] i) => (float[N, 2] y)
        { n = Shape <end = 1> (i) s = Concat <axis = 0> (n, six1) t = Expand (s6, s)
        y = GatherElements <axis = 1> (t, i) }""",
    "one-hot before": "(int64[N] x) => (float[6, N] y) { y = OneHot <axis = 0> (x, six_deep, off_on) }",
    "each row backwards": """(float[N, 6] x, int64[N] i) => (float[N, 6] y)
        { l = Max (i, one) y = ReverseSequence <time_axis = 1, batch_axis = 0> (x, l) }""",
    "repeated by the shape": f"""{ROW} {{ n = Shape <end = 1> (x) s = Concat <axis = 0> (n, four1, one)
        t = Tile (token, s) y = Add (t, x) }}""",
    "a Gemm with a bias": "(float[N, 6] x) => (float[N, 6] y) { y = Gemm <transB = 1> (x, w66, s6) }",
    "a Gemm with a bias of rows": "(float[N, 6] x) => (float[N, 6] y) { y = Gemm (x, w66, x) }",
    "kept by a Dropout": "(float[N, 6] x) => (float[N, 6] y) { y = Dropout (x) }",
    "frequencies of each row": """(float[N, 8, 1] x) => (float[N, 8, 2] y)
        { y = DFT <axis = 1> (x) }""",
    "sizes are computed": f"""{ROW} {{ s = Shape (x) n, a, b = Split <axis = 0> (s) p = Mul (a, b)
        m = Mod (p, five) h = Sub (p, m) q = Div (h, two) w = Max (q, two) v = Min (p, w)
        d = Add (v, v) r = ReduceProd <keepdims = 1> (four_three) e = Add (r, r)
        z = Cast <to = 7> (e) c = Concat <axis = 0> (n, z) y = Reshape (x, c) }}""",
    "another domain's functions": """(float[N, 6] x) => (float[N, 6] y) {
        a = com.microsoft.FastGelu (x, s6) y = com.microsoft.SkipLayerNormalization (a, x, s6, s6) }""",
}

MIXING = {
    "the largest of all": """(float[N, 6] x) => (float[N, 6] y)
        { m = ReduceMax <keepdims = 0> (x) y = Div (x, m) }""",
    "the largest of all, where it matters": """(float[N, 6] x) => (float[N, 6] y) {
        m = ReduceMax <keepdims = 0> (x)
        g = Greater (m, six) d = Div (x, six) y = Where (g, d, x) }""",
    "a branch for all": """(float[N, 6] x) => (float[N, 6] y) { m = ReduceMax <keepdims = 0> (x)
        g = Greater (m, six)
        y = If (g) <then_branch = t () => (float[N, 6] a) { a = Div (x, six) },
            else_branch = e () => (float[N, 6] b) { b = Identity (x) }> }""",
    "loops until all are small": """(float[N, 6] x) => (float[N, 6] y) { y = Loop (, yes, x)
        <body = b (int64 i, bool c, float[N, 6] v) => (bool d, float[N, 6] o)
        { o = Div (v, six) m = ReduceMax <keepdims = 0> (o) d = Greater (m, six) }> }""",
    "a loop that adds up rows": """(float[N, 6] x, float[N, 6] h) => (float[N, 6] y, float[N, 6] z) { y, z =
        Scan <num_scan_inputs = 1, body = b (float[N, 6] v, float[6] p) => (float[N, 6] o, float[6] q)
        { o = Add (v, p) q = Identity (p) }> (h, x) }""",
    "products of rows": """(float[N, 6] x) => (float[N, 6] y)
        { t = Transpose (x) a = MatMul (x, t) y = MatMul (a, x) }""",
    "a sum of rows, behind a Reshape": f"""{ROW} {{ a = Reshape (x, by_six4) m = ReduceMean <axes = [0]> (a)
        y = Sub (x, m) }}""",
    "old Softmax of all axes": "(float[N, 6] x) => (float[N, 6] y) { y = Softmax <axis = 0> (x) }",
    "before": "(float[N, 6] x) => (float[N, 6] y) { y = CumSum (x, first) }",
    "neighbours, by a window": """(float[N, 6] x) => (float[1, 1, N, 6] y) { u = Unsqueeze (x, two_axes)
        y = AveragePool <kernel_shape = [3, 1], pads = [1, 0, 1, 0]> (u) }""",
    "neighbours, by a cut": """(float[N, 6] x) => (float[N, 6] y)
        { p = Pad (x, before) s = Slice (p, none, last, first1) y = Add (s, x) }""",
    "backwards": "(float[N, 6] x) => (float[N, 6] y) { y = Slice (x, last, minimum, first1, last) }",
    "the first row for all": "(float[N, 6] x) => (float[N, 6] y) { a = Gather (x, first1) y = Sub (x, a) }",
    "sorted rows": """(float[N, 6] x) => (float[N, 6] y)
        { n = Shape <end = 1> (x) y, i = TopK <axis = 0> (x, n) }""",
    "the position of a row": """(float[N, 6] x) => (float[N, 6] y) { n = Shape <end = 1> (x) s = Squeeze (n)
        r = Range (zero, s, step) f = Cast <to = 1> (r) u = Unsqueeze (f, one) y = Add (x, u) }""",
    "the number of rows": """(float[N, 6] x) => (float[N, 6] y) { n = Shape <end = 1> (x)
        f = Cast <to = 1> (n)
        y = Div (x, f) }""",
    "many rows": """(float[N, 6] x) => (float[N, 6] y) { n = Shape <end = 1> (x) g = Greater (n, six1)
        s = Squeeze (g) y = If (s) <then_branch = t () => (float[N, 6] a) { a = Relu (x) },
            else_branch = e () => (float[N, 6] b) { b = Identity (x) }> }""",
    "as many columns as rows": """(float[N, 6] x) => (float[N, 1] y) { n = Shape <end = 1> (x)
        c = Slice (x, none, n, one) y = ReduceSum (c, one) }""",
    "weights for each row": "(float[N, 6] x) => (float[N, 6] y) { y = Add (x, w66) }",
    "normalized over all": """(float[N, 6, 4, 4] x) => (float[N, 6, 4, 4] y)
        { y = MeanVarianceNormalization (x) }""",
    "statistics of the batch": """(float[N, 6] x) => (float[N, 6] y)
        { y, m, v = BatchNormalization <training_mode = 1> (x, s6, s6, s6, s6) }""",
    "the scale of all": """(float[N, 6] x) => (float[N, 6] y) { q, s, z = DynamicQuantizeLinear (x)
        y = DequantizeLinear (q, s, z) }""",
    "chance": "(float[N, 6] x) => (float[N, 6] y) { r = RandomNormalLike (x) y = Add (x, r) }",
    "rows of rows": """(float[N, 6] x) => (float[N, 2, 3] y)
        { t = Transpose (x) y = Reshape (t, by_two_three) }""",
    "boxes": """(float[N, 6, 4] x, float[N, 1, 6] s) => (int64[M, 3] y)
        { y = NonMaxSuppression (x, s, six_deep) }""",
    "only some rows": "(float[N, 6] x) => (int64[2, M] y) { y = NonZero (x) }",
    "a state without rows": """(float[T, N, 6] x) => (float[1, N, 3] h)
        { y, h = GRU <hidden_size = 3> (x, gru_w, gru_r, , , state) }""",
    "recurrent over rows": """(float[N, 1, 6] x) => (float[N, 1, 1, 3] y)
        { y = GRU <hidden_size = 3> (x, gru_w, gru_r) }""",
    "rows found by rows": "(float[N, 6] x, int64[N, 1] i) => (float[N, 6] y) { y = GatherND (x, i) }",
    "rows written by rows": """(float[N, 6] x, int64[N, 6] i, float[N, 6] u) => (float[N, 6] y)
        { y = ScatterElements <axis = 0> (x, i, u) }""",
    "rows backwards": """(float[N, 6] x) => (float[N, 6] y)
        { y = ReverseSequence <time_axis = 0, batch_axis = 1> (x, six_ones) }""",
    "products of two rows": "(float[N, 6] x) => (float[N, M] y) { y = Gemm <transB = 1> (x, x) }",
    "a Gemm along the rows": "(float[N, 6] x) => (float[6, 6] y) { y = Gemm <transA = 1> (x, x) }",
    "the half of the rows": """(float[N, 6] x) => (float[N, 6] y) { n = Shape <end = 1> (x)
        h = Div (n, two) f = Cast <to = 1> (h) y = Add (x, f) }""",
    "the half of the rows, rounded": """(float[N, 6] x) => (float[N, 6] y) { n = Shape <end = 1> (x)
        f = Cast <to = 1> (n) h = Mul (f, half) i = Cast <to = 7> (h) g = Cast <to = 1> (i)
        y = Add (x, g) }""",
    "an unknown operator": "(float[N, 6] x) => (float[N, 6] y) { y = our.own.Scale (x) }",
    "an output without rows": "(float[N, 6] x) => (float[N, 6] y, float[6] z) { y = Relu (x) z = Neg (s6) }",
    "rows after other axes": "(float[N, 6] x) => (float[M, 6] y) { y = Tile (x, twice) }",
}

STORED: dict[str, Any] = {
    "yes": np.array(True),
    "six": np.float32(6),
    "half": np.float32(0.5),
    "first": np.int64(0),
    "zero": np.int64(0),
    "step": np.int64(1),
    "first1": np.array([0]),
    "none": np.array([0]),
    "one": np.array([1]),
    "two": np.array([2]),
    "three": np.array([3]),
    "six1": np.array([6]),
    "four1": np.array([4]),
    "five": np.array([5]),
    "four_three": np.array([4, 3]),
    "three_rows": np.array([[0], [3], [5]]),
    "six_ones": np.ones(6, np.int64),
    "six_deep": np.int64(6),
    "last": np.array([-1]),
    "open": np.array([-1]),
    "minus": np.array([-1, -1, -1]),
    "minimum": np.array([-(2**63)]),
    "twice": np.array([2, 1]),
    "two_axes": np.array([0, 1]),
    "before": np.array([1, 0, 0, 0]),
    "rows_by_six": np.array([-1, 6]),
    "by_six4": np.array([-1, 4, 6]),
    "by_two": np.array([-1, 2]),
    "by_two_three": np.array([-1, 2, 3]),
    "back": np.array([-1, 4, 6]),
    "eights": np.array([8, 8]),
    "off_on": np.array([0, 1], np.float32),
    "pads": np.array([0, 1, 0, 0, 0, 2]),
    "starts": np.array([0, 1, 1]),
    "ends": np.array([10**9, 4, 7]),
    "token": (1, 1, 6),
    "conv": (4, 3, 3, 3),
    "s4": np.ones(4, np.float32),
    "s6": np.ones(6, np.float32),
    "w66": (6, 6),
    "table": (20, 6),
    "gru_w": (1, 9, 6),
    "gru_r": (1, 9, 3),
    "state": (1, 1, 3),
}


def model_of(text: str) -> onnx.ModelProto:
    names = {
        name
        for name in STORED
        if name in text.replace("(", " ").replace(",", " ").replace(")", " ").split()
    }
    return parsed(text, check=False, **{name: STORED[name] for name in STORED if name in names})


def axes_of(model: onnx.ModelProto) -> dict[str, int]:
    return {value.name: graph.facts(value).sizes.index("N") for value in model.graph.input}


def shapes_of(model: onnx.ModelProto, rows: int) -> dict[str, tuple[int, ...]]:
    sizes = {"N": rows, "T": 5}
    return {
        value.name: tuple(
            size if isinstance(size, int) else sizes[str(size)] for size in graph.facts(value).sizes
        )
        for value in model.graph.input
    }


@pytest.mark.parametrize("text", INDEPENDENT.values(), ids=INDEPENDENT)
def test_rows_are_proven_independent_and_are(text: str) -> None:
    model, rng = model_of(text), np.random.default_rng(0)
    axes = axes_of(model)
    outputs = batch_of_outputs(model, shapes_of(model, 2), axes, {})
    assert outputs is not None
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {
        value.name: rng.integers(0, 6, shape)
        if value.type.tensor_type.elem_type == onnx.TensorProto.INT64
        else rng.standard_normal(shape).astype(np.float32)
        for value, shape in zip(model.graph.input, shapes_of(model, 3).values(), strict=True)
    }
    together = session.run(None, feeds)
    parts = [
        session.run(None, {name: array.take([row], axes[name]) for name, array in feeds.items()})
        for row in range(3)
    ]
    for number, axis in enumerate(outputs.values()):
        joined = np.concatenate([part[number] for part in parts], axis)
        np.testing.assert_allclose(joined, together[number], atol=1e-5)


@pytest.mark.parametrize("text", MIXING.values(), ids=MIXING)
def test_rows_that_mix_are_not_proven_independent(text: str) -> None:
    model = model_of(text)
    assert batch_of_outputs(model, shapes_of(model, 1), axes_of(model), {}) is None


def test_the_branch_of_a_constant_is_followed() -> None:
    text = """(float[N, 6] x, bool c) => (float[N, 6] y) {
        y = If (c) <then_branch = t () => (float[N, 6] a) { a = Relu (x) },
            else_branch = e () => (float[N, 6] b) { b = CumSum (x, first) }> }"""
    model = model_of(text)
    for value, expected in ((True, {"y": 0}), (False, None)):
        assert batch_of_outputs(model, {"x": (1, 6)}, {"x": 0}, {"c": np.array(value)}) == expected
    assert batch_of_outputs(model, {"x": (1, 6), "c": ()}, {"x": 0}, {}) is None


def test_functions_of_the_model_are_followed() -> None:
    text = """<ir_version: 8, opset_import: ["": 17, "our.own": 1]> graph (float[N, 6] x) => (float[N, 6] y)
        { y = our.own.Norm (x) }
        <domain: "our.own", opset_import: ["": 17]> Norm (x) => (y) { m = ReduceMean <axes = [AXIS]> (x)
        y = Sub (x, m) }"""
    for axis, expected in ((1, {"y": 0}), (0, None)):
        model = onnx.parser.parse_model(text.replace("AXIS", str(axis)))
        assert batch_of_outputs(model, {"x": (1, 6)}, {"x": 0}, {}) == expected
