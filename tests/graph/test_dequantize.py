from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.dequantize import dequantize, is_dynamic
from hatch_epcontext.graph.operators import DEQUANTIZES, DYNAMIC_QUANTIZATION
from hatch_epcontext.worker.session import cpu_options, open_session
from tests.conftest import newer_runtime
from tests.models import Shape, network, parsed, save, value

MICROSOFT = "com.microsoft"

ROUNDING = 1e-5
"""More than sums of float32 differ by; a weight that is wrong by 1 % differs by some 1e-3."""


def operators(made: onnx.ModelProto) -> set[str]:
    return {graph.operator(node) for node in made.graph.node}


def run(made: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    result: list[Any] = open_session(made.SerializeToString(), cpu_options()).run(None, feeds)
    return result


def feeds_of(made: onnx.ModelProto) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    facts = [graph.facts(each) for each in graph.inputs(made.graph)]
    return {
        each.name: rng.standard_normal([s if isinstance(s, int) else 3 for s in each.sizes]).astype(
            np.float32
        )
        for each in facts
    }


def on_a_grid(made: onnx.ModelProto, step: float = 2**-6, lowest: int = -100) -> dict[str, Any]:
    """Inputs of which ``step`` is the measured scale, so that quantizing them changes nothing."""
    rng = np.random.default_rng(3)
    feeds = {}
    for name, array in feeds_of(made).items():
        integers = rng.integers(lowest, lowest + 255, array.shape)
        # Each row has both: a recurrent layer measures that of each direction.
        integers[..., 0], integers[..., 1] = lowest, lowest + 255
        feeds[name] = (integers * step).astype(np.float32)
        step /= 4
    return feeds


def noise(made: onnx.ModelProto, other: onnx.ModelProto, feeds: dict[str, Any]) -> float:
    """The largest difference of the outputs, relative to the largest value."""
    pairs = list(zip(run(made, feeds), run(other, feeds), strict=True))
    return max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)


def quantized(made: onnx.ModelProto, tmp_path: Path, **options: Any) -> onnx.ModelProto:
    logging.disable(logging.WARNING)
    try:
        quantize_dynamic(save(made, tmp_path / "a.onnx"), tmp_path / "q.onnx", **options)
    finally:
        logging.disable(logging.NOTSET)
    return onnx.load(tmp_path / "q.onnx")


def recurrent() -> onnx.ModelProto:
    """An LSTM in both directions on ``x`` (5 x 3 x 8), with a bias."""
    return parsed(
        """(float[5, 3, 8] x) => (float[5, 2, 3, 8] y, float[2, 3, 8] c)
        { [rnn] y, , c = LSTM <hidden_size = 8, direction = "bidirectional"> (x, w, r, b) }""",
        w=(2, 32, 8),
        r=(2, 32, 8),
        b=(2, 64),
    )


def embedding() -> onnx.ModelProto:
    """Rows of a table, chosen by ``x``, turned, through a matrix."""
    return parsed(
        """(float[3] x) => (float[16, 4] y) {
            index = Cast <to = 7> (x)
            [rows] rows = Gather (table, index)
            turned = Transpose <perm = [1, 0]> (rows)
            [product] y = MatMul (turned, w) }""",
        table=(20, 16),
        w=(3, 4),
    )


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("type_", [QuantType.QInt8, QuantType.QUInt8])
@pytest.mark.parametrize(
    ("source", "float_operators"),
    [
        pytest.param(network(3), {"Conv", "MatMul"}, marks=newer_runtime),
        (recurrent(), {"LSTM"}),
        (embedding(), {"Gather", "MatMul"}),
    ],
)
def test_what_onnx_runtime_quantized_computes_with_floats_again(
    tmp_path: Path,
    source: onnx.ModelProto,
    float_operators: set[str],
    type_: QuantType,
    per_channel: bool,
) -> None:
    if type_ is QuantType.QUInt8 and per_channel and source.graph.node[0].op_type == "LSTM":
        pytest.skip("ONNX Runtime runs no such model")
    made = quantized(source, tmp_path, weight_type=type_, per_channel=per_channel)
    before = noise(source, made, feeds := feeds_of(source))
    assert operators(made) & {*DYNAMIC_QUANTIZATION, "DequantizeLinear"}
    assert dequantize(made) > 0
    onnx.checker.check_model(made)
    assert not operators(made) & {*DYNAMIC_QUANTIZATION, "DequantizeLinear"}
    assert operators(made) >= float_operators
    # Only the weights are rounded now, and no activation.
    assert noise(source, made, feeds) < 0.03
    assert noise(source, made, feeds) <= before * 1.5
    assert not any(each.data_type == TensorProto.INT8 for each in made.graph.initializer)


def integers(name: str, shape: Sequence[int], dtype: Any = np.int8) -> Any:
    """Random numbers, which ``name`` decides."""
    # Two products of larger numbers overflow 16 bits, with which some CPUs add them.
    return np.random.default_rng(len(name)).integers(0, 60, shape).astype(dtype)


@pytest.mark.parametrize("type_", [QuantType.QInt8, QuantType.QUInt8])
def test_a_step_of_a_recurrent_layer(tmp_path: Path, type_: QuantType) -> None:
    source = parsed(
        """(float[1, 3, 8] x, float[2, 3, 8] h) => (float[1, 2, 3, 8] y, float[2, 3, 8] c)
        { y, , c = LSTM <hidden_size = 8, direction = "bidirectional"> (x, w, r, b, , h) }""",
        w=(2, 32, 8),
        r=(2, 32, 8),
        b=(2, 64),
    )
    source = quantized(source, tmp_path, weight_type=type_, reduce_range=True)
    made = onnx.ModelProto.FromString(source.SerializeToString())
    assert dequantize(made) == 1
    assert noise(source, made, on_a_grid(source)) < ROUNDING


@newer_runtime
@given(st.data())
def test_integers_become_floats_where_that_computes_the_same(data: st.DataObject) -> None:
    """``us`` and ``uz`` are the scale and the zero point of other integers, ``t`` those of ``x`` turned."""

    def draw(*choices: Any) -> Any:
        return data.draw(st.sampled_from(choices))

    convolves = draw(True, False)
    shape, results = ((2, 2, 6, 6), (2, 4, 6, 6)) if convolves else ((8, 8), (8, 4))
    channels = (4, 1, 1) if convolves else (4,)
    mistake = draw("", "", "zero", "factor", "divisor", "rows")
    zero = "uz" if mistake == "zero" else "z"
    factor, divisor = (
        draw("ws", "us") if mistake == name else draw("scale", "s")
        for name in ("factor", "divisor")
    )
    sizes = draw((), (1,), channels)
    if mistake == "rows":
        factor, sizes = "scale", (6,) if convolves else (8, 1)
    has_bias = mistake == "divisor" or (mistake != "rows" and draw(True, False))
    left = draw("q", "t")
    biased = f"""
        divided = Div (b, {divisor}) rounded = {draw("Floor", "Round")} (divided)
        integers = Cast <to = 6> (rounded) bias = Reshape (integers, shape)
        sum = Add ({draw("i, bias", "bias, i")}) f = Cast <to = 1> (sum)"""
    rng = np.random.default_rng(draw(1, 2, 3))
    dtype = draw(np.uint8, np.int8)
    source = parsed(
        f"""(float[{str(shape)[1:-1]}] x, float[3] u) => (float[{str(results)[1:-1]}] y) {{
            q, s, z = DynamicQuantizeLinear (x) uq, us, uz = DynamicQuantizeLinear (u)
            scale = Mul ({draw("s, ws", "ws, s")})
            t = Transpose <perm = [{"0, 1, 3, 2" if convolves else "1, 0"}]> (q)
            i = {"ConvInteger <pads = [1, 1, 1, 1]>" if convolves else "MatMulInteger"}
                ({left}, w, {zero}, wz)
            {biased if has_bias else "f = Cast <to = 1> (i)"}
            y = Mul ({draw(f"f, {factor}", f"{factor}, f")}) }}""",
        w=rng.integers(0, 60, (4, 2, 3, 3) if convolves else (8, 4)).astype(dtype),
        wz=np.asarray(draw(0, 7), dtype),
        ws=rng.choice([0.25, 0.5], sizes).astype(np.float32),
        b=rng.integers(-99, 99, channels).astype(np.float32),
        shape=np.array((1, *channels)),
    )
    made = onnx.ModelProto.FromString(source.SerializeToString())
    dequantize(made)
    assert operators(made).isdisjoint(DYNAMIC_QUANTIZATION) == (not mistake)
    assert noise(source, made, on_a_grid(source)) < ROUNDING


def static() -> onnx.ModelProto:
    """A matrix product, whose activations and weight are quantized, and the activations moved as integers."""
    return parsed(
        """(float[3, 4] x) => (float[4, 5] y)
        <float s = {0.05}, uint8 z = {128}, float[5] ws = {0.01, 0.02, 0.03, 0.02, 0.01}> {
            q = QuantizeLinear (x, s, z)
            t = Transpose <perm = [1, 0]> (q)
            d = DequantizeLinear (t, s, z)
            wd = DequantizeLinear <axis = 1> (w, ws, wz)
            y = MatMul (d, wd) }""",
        w=integers("w", [3, 5]),
        wz=integers("wz", [5]),
    )


def test_static_quantization_is_only_undone_on_request() -> None:
    source, kept, undone = static(), static(), static()
    assert dequantize(kept) == 0
    assert operators(kept) == operators(source)
    assert dequantize(undone, static=True) == 3
    assert operators(undone) == {"Clip", "Transpose", "Identity", "MatMul"}
    # The second is beyond what the integers can be.
    for number in (1.234, 12.34):
        assert noise(source, undone, {"x": np.full((3, 4), number, np.float32)}) < 0.03


def test_activations_of_products_with_blocks_are_no_integers_any_more() -> None:
    def product(level: int) -> onnx.ModelProto:
        return parsed(
            f"""(float[3, 64] x) => (float[3, 5] y) {{ y = com.microsoft.MatMulNBits
            <K = 64, N = 5, bits = 4, block_size = 32, accuracy_level = {level}> (x, w, s) }}""",
            w=np.arange(160, dtype=np.uint8).reshape(5, 2, 16),
            s=(10,),
        )

    source, undone = product(4), product(4)
    assert dequantize(undone) == 1
    assert undone == product(1)
    assert not is_dynamic(undone)
    (x,) = feeds_of(source).values()
    assert 1e-4 < noise(source, undone, {"x": x}) < 0.03


def test_a_bias_of_one_number_has_no_channels() -> None:
    made = parsed("""(float[4] x) => (float[4] y) <int32[1] b = {8}, float[1] s = {0.25}> {
            bias = DequantizeLinear (b, s)
            y = Add (x, bias) }""")
    assert dequantize(made, static=True) == 1
    (found,) = run(made, {"x": np.zeros(4, np.float32)})
    assert found.tolist() == [2.0] * 4


def weights_only(
    node: onnx.NodeProto,
    x: Shape,
    stored: Sequence[onnx.TensorProto],
    dtype: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    """``node``, and what makes a model of ``x`` and ``y`` of it."""
    nodes = [node]
    if node.op_type == "DequantizeLinear":
        nodes += [
            helper.make_node("Cast", node.output, ["cast"], to=TensorProto.FLOAT),
            helper.make_node("MatMul", ["x", "cast"], ["y"]),
        ]
    made = helper.make_model(
        helper.make_graph(
            nodes, "graph", [value("x", x, dtype)], [value("y", None, dtype)], stored
        ),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)],
        ir_version=10,
    )
    made.graph.output[0].type.tensor_type.elem_type = dtype
    return made


def numbers(name: str, dtype: int, shape: Sequence[int], low: int, high: int) -> onnx.TensorProto:
    rng = np.random.default_rng(len(name))
    values = rng.integers(low, high, int(np.prod(shape)), endpoint=True)
    return helper.make_tensor(name, dtype, shape, values.tolist())


def scales(shape: Sequence[int], dtype: Any = np.float32) -> onnx.TensorProto:
    rng = np.random.default_rng(3)
    return numpy_helper.from_array(rng.uniform(0.01, 0.1, shape).astype(dtype), "s")


def linear(
    dtype: int, shape: Sequence[int], *, zero: bool, float_: Any = np.float32, **at: Any
) -> onnx.ModelProto:
    """A DequantizeLinear of 40 x 6 numbers, whose scales have ``shape``."""
    low, high = (0, 15) if dtype in (TensorProto.UINT4, TensorProto.UINT8) else (-8, 7)
    stored = [numbers("q", dtype, (40, 6), low, high), scales(shape, float_)]
    stored += [numbers("z", dtype, shape, 0, 7)] * zero
    node = helper.make_node("DequantizeLinear", [tensor.name for tensor in stored], ["w"], **at)
    return weights_only(node, [2, 40], stored)


def int4_blocks() -> onnx.ModelProto:
    return linear(TensorProto.INT4, (5, 6), zero=True, axis=0, block_size=8)


WEIGHTS = {
    f"{TensorProto.DataType.Name(dtype)}, scales {shape}, {at}{', zero point' if zero else ''}":
        linear(dtype, shape, zero=zero, **at)
    for dtype in (TensorProto.INT4, TensorProto.UINT4, TensorProto.INT8, TensorProto.UINT8,
                  TensorProto.INT16, TensorProto.FLOAT8E4M3FN)
    for shape, at in (((), {}), ((40,), {"axis": 0}), ((6,), {}), ((6,), {"axis": -1}),
                      ((5, 6), {"axis": 0, "block_size": 8}), ((3, 6), {"axis": 0, "block_size": 16}),
                      ((40, 2), {"block_size": 3}))
    for zero in ({False, dtype != TensorProto.FLOAT8E4M3FN})
} | {
    "scales of float16": linear(TensorProto.INT4, (5, 6), zero=True, float_=np.float16, axis=0, block_size=8),
}  # fmt: skip
"""Stored numbers that are only dequantized."""


@newer_runtime
@pytest.mark.parametrize("name", WEIGHTS)
def test_quantized_weights_become_the_floats_that_onnx_runtime_computes(name: str) -> None:
    """As models with weights of 4 and 8 bits have them: onnxruntime/onnxruntime-qnn#650."""
    source = WEIGHTS[name]
    made = onnx.ModelProto.FromString(source.SerializeToString())
    assert dequantize(made) == 1
    assert not operators(made) & DEQUANTIZES
    dtype = helper.tensor_dtype_to_np_dtype(source.graph.input[0].type.tensor_type.elem_type)
    (x,) = (np.abs(array * 5).astype(dtype) for array in feeds_of(source).values())
    (before,), (after,) = run(source, {"x": x}), run(made, {"x": x})
    assert before.dtype == after.dtype
    error = np.abs(after - before).max() / np.abs(before).max()
    assert error <= (1e-3 if dtype == np.float16 else 1e-6)


@newer_runtime
def test_quantization_inside_a_loop_is_undone_too() -> None:
    source = parsed(
        """(float[1, 3] x) => (float[1, 3] y) <int64 n = {1}, float s = {0.01}> {
            y = Loop (n, , x) <body = body (int64 i, bool c, float[1, 3] before)
                => (bool go_on, float[1, 3] after) {
                go_on = Identity (c)
                w = DequantizeLinear (q, s)
                quantized, scale, zero = DynamicQuantizeLinear (before)
                product = MatMulInteger (quantized, square, zero)
                numbers = Cast <to = 1> (product)
                scaled = Mul (numbers, scale)
                after = Mul (scaled, w) }> }""",
        q=integers("q", [1, 3]),
        square=integers("square", [3, 3]),
    )
    made = onnx.ModelProto.FromString(source.SerializeToString())
    assert dequantize(made) == 3
    names = set(map(graph.operator, graph.nodes(made.graph)))
    assert names.isdisjoint(DYNAMIC_QUANTIZATION | DEQUANTIZES)
    assert noise(source, made, on_a_grid(source)) < ROUNDING


def test_weights_that_are_computed_stay() -> None:
    computed = linear(TensorProto.INT8, (6,), zero=False)
    computed.graph.node.insert(0, helper.make_node("Abs", ["s"], ["positive"]))
    computed.graph.node[1].input[1] = "positive"
    before = computed.SerializeToString()
    assert dequantize(computed) == 0
    assert computed.SerializeToString() == before


@pytest.mark.parametrize(
    ("nodes", "undone"),
    [
        ("q, s, z = DynamicQuantizeLinear (x) y = DequantizeLinear (q, half, zero)", False),
        ("q = QuantizeLinear (x, tenth, zero) y = DequantizeLinear (q, half, zero)", False),
        # That of one of two.
        (
            """q = QuantizeLinear (x, half, zero) r = QuantizeLinear (x, tenth, zero)
            both = Concat <axis = 1> (q, r) y = DequantizeLinear (both, half, zero)""",
            False,
        ),
        ("q = QuantizeLinear (x, half, zero) y = DequantizeLinear (q, other_half)", True),
    ],
)
def test_integers_are_floats_again_only_with_their_own_scale(nodes: str, undone: bool) -> None:
    made = parsed(f"""(float[1, 4] x) => (float[1, n] y) <float half = {{0.5}}, float other_half = {{0.5}},
        float tenth = {{0.1}}, uint8 zero = {{0}}> {{ {nodes} }}""")
    feeds = {"x": np.array([[1, 2, 3, 4]], np.float32)}
    (before,) = run(made, feeds)
    assert bool(dequantize(made, static=True)) is undone
    (after,) = run(made, feeds)
    assert np.array_equal(before, after)
