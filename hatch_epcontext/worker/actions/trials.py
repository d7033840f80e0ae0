"""Write the small graphs that an unknown EP is tried with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from hatch_epcontext.graph import graph
from hatch_epcontext.worker.requests import TrialsReply, TrialsRequest

_VERSIONS = '<ir_version: 8, opset_import: ["" : 17]>'
"""Old enough for all plugin EPs, and the oldest opset with LayerNormalization."""

_GRAPHS: Mapping[str, str] = {
    "gemm": """(float[1, 16] x) => (float[1, 10] y)
        <float[32, 16] w1, float[32] b1, float[10, 32] w2, float[10] b2> {
            hidden = Gemm<transB = 1>(x, w1, b1)
            active = Relu(hidden)
            scores = Gemm<transB = 1>(active, w2, b2)
            y = Softmax<axis = -1>(scores)
        }""",
    "conv": """(float[1, 3, 16, 16] x) => (float[1, 5] y)
        <float[8, 3, 3, 3] w1, float[8] b1, float[8, 1, 3, 3] w2, float[8] b2, float[5, 8] w3, float[5] b3> {
            wide = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w1, b1)
            first = Relu(wide)
            deep = Conv<pads = [1, 1, 1, 1], group = 8>(first, w2, b2)
            gate = Sigmoid(deep)
            gated = Mul(gate, first)
            added = Add(gated, first)
            pooled = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(added)
            means = GlobalAveragePool(pooled)
            flat = Flatten(means)
            y = Gemm<transB = 1>(flat, w3, b3)
        }""",
    # The steps come first, as LSTM requires.
    "lstm": """(float[1, 5, 6] x) => (float[5, 1, 4] y)
        <float[1, 32, 6] w, float[1, 32, 8] r, float[1, 64] b, float[8, 4] m, int64[1] axis = {1}> {
            steps = Transpose<perm = [1, 0, 2]>(x)
            layer, hidden, cell = LSTM<hidden_size = 8>(steps, w, r, b)
            flat = Squeeze(layer, axis)
            y = MatMul(flat, m)
        }""",
    # Exporters write GELU like this for this opset.
    "attention": """(float[1, 8, 16] x) => (float[1, 8, 16] y)
        <float[16] s1, float[16] n1, float[16, 16] wq, float[16, 16] wk, float[16, 16] wv, float[16, 16] wo,
         float[16] s2, float[16] n2, float[16, 32] w1, float[32] b1, float[32, 16] w2,
         int64[4] heads = {1, 8, 2, 8}, int64[3] whole = {1, 8, 16}, float scale = {0.35355338},
         float root = {1.4142135}, float one = {1}, float half = {0.5}> {
            normal = LayerNormalization<axis = -1>(x, s1, n1)
            q = MatMul(normal, wq)
            q_split = Reshape(q, heads)
            query = Transpose<perm = [0, 2, 1, 3]>(q_split)
            k = MatMul(normal, wk)
            k_split = Reshape(k, heads)
            keys = Transpose<perm = [0, 2, 3, 1]>(k_split)
            v = MatMul(normal, wv)
            v_split = Reshape(v, heads)
            values = Transpose<perm = [0, 2, 1, 3]>(v_split)
            products = MatMul(query, keys)
            scores = Mul(products, scale)
            shares = Softmax<axis = -1>(scores)
            mixed = MatMul(shares, values)
            turned = Transpose<perm = [0, 2, 1, 3]>(mixed)
            joined = Reshape(turned, whole)
            projected = MatMul(joined, wo)
            first = Add(projected, x)
            again = LayerNormalization<axis = -1>(first, s2, n2)
            wide = MatMul(again, w1)
            biased = Add(wide, b1)
            small = Div(biased, root)
            error = Erf(small)
            curve = Add(error, one)
            curved = Mul(biased, curve)
            gelu = Mul(curved, half)
            narrow = MatMul(gelu, w2)
            y = Add(narrow, first)
        }""",
    "qdq": """(float[1, 3, 8, 8] x) => (float[1, 4, 8, 8] y)
        <int8[4, 3, 3, 3] w, float ws = {0.01}, int8 wz = {0},
         int32[4] b = {100, -200, 300, 0}, float bs = {0.0003}, int32 bz = {0},
         float xs = {0.03}, uint8 xz = {128}, float ys = {0.1}, uint8 yz = {128}> {
            x_integers = QuantizeLinear(x, xs, xz)
            x_floats = DequantizeLinear(x_integers, xs, xz)
            kernel = DequantizeLinear(w, ws, wz)
            bias = DequantizeLinear(b, bs, bz)
            made = Conv<pads = [1, 1, 1, 1]>(x_floats, kernel, bias)
            active = Relu(made)
            y_integers = QuantizeLinear(active, ys, yz)
            y = DequantizeLinear(y_integers, ys, yz)
        }""",
    "dynamic": """(float[batch, 3, 8, 8] x) => (float[batch, 5] y)
        <float[4, 3, 3, 3] w1, float[4] b1, float[256, 5] w2, float[5] b2> {
            made = Conv<pads = [1, 1, 1, 1]>(x, w1, b1)
            active = Relu(made)
            flat = Flatten(active)
            y = Gemm(flat, w2, b2)
        }""",
}
"""Each of `TRIALS` in ONNX's text format; initializers without values get random ones."""


def handle(request: TrialsRequest) -> TrialsReply:
    """Write the request's graphs."""
    paths = {name: str(Path(request.folder, f"{name}.onnx")) for name in request.names}
    for name, path in paths.items():
        onnx.save(_model(name), path)
    return TrialsReply(paths)


def _model(name: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"{_VERSIONS} {name} {_GRAPHS[name]}")
    main = model.graph
    for node in main.node:
        node.name = node.output[0]
    # The same weights in each run.
    rng = np.random.default_rng(0)
    for value in main.value_info:
        dtype = graph.facts(value).dtype
        shape = [each.dim_value for each in value.type.tensor_type.shape.dim]
        weights = rng.uniform(-1, 1, shape) * (100 if dtype == "int8" else 0.5)
        main.initializer.append(numpy_helper.from_array(weights.astype(dtype), value.name))
    del main.value_info[:]
    onnx.checker.check_model(model, full_check=True)
    return model
