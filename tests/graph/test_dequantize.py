from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.dequantize import dequantize
from hatch_epcontext.graph.limits import DYNAMIC_QUANTIZATION, QUANTIZED_WEIGHTS
from hatch_epcontext.worker.session import cpu_options, open_session
from tests.conftest import newer_runtime
from tests.models import Shape, model, network, save, value, weights

MICROSOFT = "com.microsoft"


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
    return model(
        [
            helper.make_node(
                "LSTM", ["x", "w", "r", "b"], ["y", "", "c"], "rnn", hidden_size=8, direction="bidirectional"
            )
        ],
        [value("x", [5, 3, 8])],
        [value("y", [5, 2, 3, 8]), value("c", [2, 3, 8])],
        [weights("w", 2, 32, 8), weights("r", 2, 32, 8), weights("b", 2, 64)],
    )  # fmt: skip


def embedding() -> onnx.ModelProto:
    """Rows of a table, chosen by ``x``, turned, through a matrix."""
    return model(
        [
            helper.make_node("Cast", ["x"], ["index"], to=TensorProto.INT64),
            helper.make_node("Gather", ["table", "index"], ["rows"], "rows"),
            helper.make_node("Transpose", ["rows"], ["turned"], perm=[1, 0]),
            helper.make_node("MatMul", ["turned", "w"], ["y"], "product"),
        ],
        [value("x", [3])],
        [value("y", [16, 4])],
        [weights("table", 20, 16), weights("w", 3, 4)],
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


def integers(name: str, shape: Sequence[int], dtype: Any = np.int8) -> onnx.TensorProto:
    rng = np.random.default_rng(len(name))
    return numpy_helper.from_array(rng.integers(0, 100, shape).astype(dtype), name)


def floats(name: str, values: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(values, np.float32), name)


def made_of(
    nodes: list[onnx.NodeProto], x: Shape, y: Shape, stored: list[onnx.TensorProto]
) -> onnx.ModelProto:
    first = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], "measure")
    return model([first, *nodes], [value("x", x)], [value("y", y)], stored, domain=MICROSOFT)


CONV_BIAS = [
    helper.make_node("ConvInteger", ["q", "w", "z", "wz"], ["i"], "conv", pads=[1, 1, 1, 1]),
    helper.make_node("Mul", ["s", "ws"], ["scale"]),
    helper.make_node("Div", ["b", "scale"], ["divided"]),
    helper.make_node("Floor", ["divided"], ["rounded"]),
    helper.make_node("Cast", ["rounded"], ["bi"], to=TensorProto.INT32),
    helper.make_node("Reshape", ["bi", "shape"], ["br"]),
    helper.make_node("Add", ["i", "br"], ["sum"]),
    helper.make_node("Cast", ["sum"], ["f"], to=TensorProto.FLOAT),
    helper.make_node("Mul", ["s", "ws"], ["scale2"]),
    helper.make_node("Mul", ["f", "scale2"], ["y"]),
]
"""A bias that is added as integers, as older releases of ONNX Runtime quantize it."""

BY_HAND = {
    "the bias of a convolution in integers": (
        CONV_BIAS, [1, 2, 6, 6], [1, 4, 6, 6],
        [integers("w", [4, 2, 3, 3], np.uint8), numpy_helper.from_array(np.uint8(31), "wz"),
         floats("ws", 0.02), floats("b", [3, -2, 0.5, 1]),
         numpy_helper.from_array(np.array([1, 4, 1, 1]), "shape")],
    ),
    "integers that are moved before they are multiplied, and dequantized": (
        [helper.make_node("Transpose", ["q"], ["t"], perm=[1, 0]),
         helper.make_node("MatMulInteger", ["t", "w", "z"], ["i"]),
         helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
         helper.make_node("Mul", ["f", "s"], ["m"]),
         helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
         helper.make_node("MatMul", ["d", "m"], ["y"])],
        [3, 8], [3, 4], [integers("w", [3, 4])],
    ),
    "MatMulIntegerToFloat": (
        [helper.make_node("MatMulIntegerToFloat", ["q", "w", "s", "ws", "z", "wz", "b"], ["y"],
                          domain=MICROSOFT)],
        [3, 8], [3, 4],
        [integers("w", [8, 4]), floats("ws", [0.02, 0.01, 0.03, 0.04]), integers("wz", [4]),
         floats("b", [1, 2, 3, 4])],
    ),
    "DynamicQuantizeMatMul": (
        [helper.make_node("DynamicQuantizeMatMul", ["x", "w", "ws", "", "b"], ["y"], domain=MICROSOFT)],
        [3, 8], [3, 4],
        [integers("w", [8, 4]), floats("ws", 0.02), floats("b", [1, 2, 3, 4])],
    ),
    "QAttention": (
        [helper.make_node("QAttention", ["q", "w", "b", "s", "ws", "", "z", "wz"], ["y"],
                          domain=MICROSOFT, num_heads=2)],
        [1, 5, 8], [1, 5, 8],
        [integers("w", [8, 24]), floats("b", np.arange(24) / 10), floats("ws", 0.005),
         numpy_helper.from_array(np.int8(40), "wz")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_other_quantized_operators(name: str) -> None:
    nodes, x, y, stored = BY_HAND[name]
    made = made_of(nodes, x, y, stored)
    source = onnx.ModelProto()
    source.CopyFrom(made)
    assert dequantize(made) > 0
    assert not operators(made) & {*DYNAMIC_QUANTIZATION, "Floor", "Div"}
    assert noise(source, made, feeds_of(source)) < 0.02


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # The weight is not stored, the scale is another one's, the integers have another zero point.
        (["q", "w", "z", "wz"], ["q", "q", "z", "z"]),
        (["q", "w", "z", "wz"], ["q", "w", "wz", "wz"]),
        (["f", "scale2"], ["f", "ws"]),
    ],
)
def test_what_is_not_a_known_pattern_stays(old: list[str], new: list[str]) -> None:
    made = made_of(
        CONV_BIAS, [4, 4, 3, 3], [1, 4, 6, 6], BY_HAND["the bias of a convolution in integers"][3]
    )
    (node,) = (each for each in made.graph.node if list(each.input) == old)
    node.input[:] = new
    before = operators(made)
    assert dequantize(made) == 0
    assert operators(made) == before


def static() -> onnx.ModelProto:
    """A matrix product, whose activations and weight are quantized, and the activations moved as integers."""
    return model(
        [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            helper.make_node("Transpose", ["q"], ["t"], perm=[1, 0]),
            helper.make_node("DequantizeLinear", ["t", "s", "z"], ["d"]),
            helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=1),
            helper.make_node("MatMul", ["d", "wd"], ["y"]),
        ],
        [value("x", [3, 4])],
        [value("y", [4, 5])],
        [
            floats("s", 0.05), numpy_helper.from_array(np.uint8(128), "z"), integers("w", [3, 5]),
            floats("ws", [0.01, 0.02, 0.03, 0.02, 0.01]), integers("wz", [5]),
        ],
    )  # fmt: skip


def test_static_quantization_is_only_undone_on_request() -> None:
    source, kept, undone = static(), static(), static()
    assert dequantize(kept) == 0
    assert operators(kept) == operators(source)
    assert dequantize(undone, static=True) == 3
    assert operators(undone) == {"Clip", "Transpose", "Identity", "MatMul"}
    # The second is beyond what the integers can be.
    for number in (1.234, 12.34):
        assert noise(source, undone, {"x": np.full((3, 4), number, np.float32)}) < 0.03


def test_a_bias_of_one_number_has_no_channels() -> None:
    made = model(
        [
            helper.make_node("DequantizeLinear", ["b", "s"], ["bias"]),
            helper.make_node("Add", ["x", "bias"], ["y"]),
        ],
        [value("x", [4])],
        [value("y", [4])],
        [numpy_helper.from_array(np.array([8], np.int32), "b"), floats("s", [0.25])],
    )
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
    elif node.op_type == "GatherBlockQuantized":
        nodes.insert(0, helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64))
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


def n_bits(bits: int, zero: str = "", groups: bool = False, dtype: int = 1) -> onnx.ModelProto:
    """A MatMulNBits of 40 x 6 numbers in blocks of 16 rows, the last one padded."""
    array = helper.tensor_dtype_to_np_dtype(dtype)
    stored = [numbers("b", TensorProto.UINT8, (6, 3, 2 * bits), 0, 255), scales((6, 3), array)]
    names = ["x", "b", "s", "", "", "bias"]
    if zero:
        of_bytes = numbers("z", TensorProto.UINT8, (6, -(-3 * bits // 8)), 0, 255)
        of_floats = numpy_helper.from_array(np.full((6, 3), 1.5, array), "z")
        stored.append(of_bytes if zero == "bytes" else of_floats)
        names[3] = "z"
    if groups:
        stored.append(numpy_helper.from_array(np.arange(40, dtype=np.int32) // 16, "g"))
        names[4] = "g"
    stored.append(numpy_helper.from_array(np.arange(6).astype(array), "bias"))
    node = helper.make_node(
        "MatMulNBits", names, ["y"], domain=MICROSOFT, K=40, N=6, bits=bits, block_size=16
    )
    return weights_only(node, [2, 40], stored, dtype)


def gathered(dtype: int, bits: int, *, zero: bool) -> onnx.ModelProto:
    """A GatherBlockQuantized from 20 rows of 32 numbers in blocks of 16."""
    packed = bits if dtype == TensorProto.UINT8 else 8
    low, high = {8: (0, 255), 4: (0, 7)}[8 if dtype == TensorProto.UINT8 else 4]
    stored = [numbers("q", dtype, (20, 32 * packed // 8), low, high), scales((20, 2))]
    stored += [numbers("z", dtype, (20, -(-2 * packed // 8)), low, high)] * zero
    names = [stored[0].name, "i", *(tensor.name for tensor in stored[1:])]
    node = helper.make_node(
        "GatherBlockQuantized", names, ["y"], domain=MICROSOFT, bits=bits, block_size=16
    )
    return weights_only(node, [3], stored)


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
    **{f"MatMulNBits, {bits} bits, zero points {zero}": n_bits(bits, zero)
       for bits in (2, 4, 8) for zero in ("", "bytes")},
    "MatMulNBits, zero points of floats": n_bits(4, "floats"),
    "MatMulNBits of float16": n_bits(4, "bytes", dtype=TensorProto.FLOAT16),
    **{f"GatherBlockQuantized, {bits} bits of type {dtype}, zero points {zero}":
           gathered(dtype, bits, zero=zero)
       for dtype, bits in ((TensorProto.INT4, 4), (TensorProto.UINT4, 4), (TensorProto.UINT8, 2),
                           (TensorProto.UINT8, 4), (TensorProto.UINT8, 8))
       for zero in (False, True)},
}  # fmt: skip
"""Stored numbers that are only dequantized."""


@newer_runtime
@pytest.mark.parametrize("name", WEIGHTS)
def test_quantized_weights_become_the_floats_that_onnx_runtime_computes(name: str) -> None:
    source = WEIGHTS[name]
    made = onnx.ModelProto.FromString(source.SerializeToString())
    assert dequantize(made) == 1
    assert not operators(made) & QUANTIZED_WEIGHTS
    dtype = helper.tensor_dtype_to_np_dtype(source.graph.input[0].type.tensor_type.elem_type)
    (x,) = (np.abs(array * 5).astype(dtype) for array in feeds_of(source).values())
    (before,), (after,) = run(source, {"x": x}), run(made, {"x": x})
    assert before.dtype == after.dtype
    error = np.abs(after - before).max() / np.abs(before).max()
    assert error <= (1e-3 if dtype == np.float16 else 1e-6)


@newer_runtime
def test_weights_of_a_loop_are_undone_too() -> None:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["c"], ["go_on"]),
            helper.make_node("DequantizeLinear", ["q", "s"], ["w"]),
            helper.make_node("Mul", ["before", "w"], ["after"]),
        ],
        "body",
        [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), value("before", [1, 3])],
        [value("go_on", [], TensorProto.BOOL), value("after", [1, 3])],
    )  # fmt: skip
    made = model(
        [helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)],
        [value("x", [1, 3])],
        [value("y", [1, 3])],
        [numpy_helper.from_array(np.array(3), "n"), integers("q", [1, 3]), floats("s", 0.01)],
    )
    feeds = feeds_of(made)
    (before,) = run(made, feeds)
    assert dequantize(made) == 1
    assert "DequantizeLinear" not in {node.op_type for node in graph.nodes(made.graph)}
    (after,) = run(made, feeds)
    assert np.allclose(before, after)


def test_weights_that_are_computed_or_grouped_stay() -> None:
    computed = linear(TensorProto.INT8, (6,), zero=False)
    computed.graph.node.insert(0, helper.make_node("Abs", ["s"], ["positive"]))
    computed.graph.node[1].input[1] = "positive"
    for made in (computed, n_bits(4, groups=True)):
        before = made.SerializeToString()
        assert dequantize(made) == 0
        assert made.SerializeToString() == before


OTHER_SCALES = {
    "of a measured range": [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("DequantizeLinear", ["q", "half", "zero"], ["y"]),
    ],
    "of one that is stored": [
        helper.make_node("QuantizeLinear", ["x", "tenth", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "half", "zero"], ["y"]),
    ],
    "of one of two": [
        helper.make_node("QuantizeLinear", ["x", "half", "zero"], ["q"]),
        helper.make_node("QuantizeLinear", ["x", "tenth", "zero"], ["r"]),
        helper.make_node("Concat", ["q", "r"], ["both"], axis=1),
        helper.make_node("DequantizeLinear", ["both", "half", "zero"], ["y"]),
    ],
    "with the same value": [
        helper.make_node("QuantizeLinear", ["x", "half", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "other_half"], ["y"]),
    ],
}
"""Integers that are read with another scale than they were written with."""


@pytest.mark.parametrize("name", OTHER_SCALES)
def test_integers_are_floats_again_only_with_their_own_scale(name: str) -> None:
    stored = [floats("half", 0.5), floats("other_half", 0.5), floats("tenth", 0.1)]
    stored.append(numpy_helper.from_array(np.uint8(0), "zero"))
    columns = 8 if name == "of one of two" else 4
    made = model(OTHER_SCALES[name], [value("x", [1, 4])], [value("y", [1, columns])], stored)
    feeds = {"x": np.array([[1, 2, 3, 4]], np.float32)}
    (before,) = run(made, feeds)
    assert bool(dequantize(made, static=True)) == (name == "with the same value")
    (after,) = run(made, feeds)
    assert np.array_equal(before, after)


def test_a_broken_scale_is_noticed(tmp_path: Path) -> None:
    source = network(3)
    made = quantized(source, tmp_path)
    (scale, *_) = (each for each in made.graph.initializer if each.name == "dense_scale")
    scale.CopyFrom(floats("dense_scale", numpy_helper.to_array(scale) * 1.5))
    dequantize(made)
    assert noise(source, made, feeds_of(source)) > 0.3
