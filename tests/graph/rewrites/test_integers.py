from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_static,
)

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites import rewrite
from hatch_epcontext.graph.rewrites.integers import INTEGERS
from hatch_epcontext.worker.session import cpu_options, open_session
from tests.models import model, value, weights

RNG = np.random.default_rng(4)
SAMPLES = [RNG.uniform(0, 1, (1, 4, 8, 8)).astype(np.float32) for _ in range(8)]


class Samples(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self) -> None:
        self.left = [*SAMPLES]

    def get_next(self) -> dict[str, Any] | None:
        return {"x": self.left.pop()} if self.left else None


def node(operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, [output], output, **attributes)


def network() -> onnx.ModelProto:
    """Operators that ONNX Runtime quantizes, on ``x`` (1 x 4 x 8 x 8)."""
    nodes = [
        node("Conv", ["x", "w1", "b1"], "c1", pads=[1, 1, 1, 1]),
        node("LeakyRelu", ["c1"], "l", alpha=0.1),
        node("Conv", ["l", "w2"], "c2", pads=[1, 1, 1, 1]),
        node("Add", ["c2", "l"], "sum"),
        node("MaxPool", ["sum"], "p", kernel_shape=[2, 2], strides=[2, 2]),
        node("AveragePool", ["p"], "q", kernel_shape=[2, 2], strides=[2, 2]),
        node("Concat", ["q", "q"], "both", axis=1),
        node("GlobalAveragePool", ["both"], "g"),
        node("Flatten", ["g"], "f"),
        node("Gemm", ["f", "w3", "b3"], "e", transB=1),
        node("MatMul", ["e", "w4"], "m"),
        node("Sigmoid", ["m"], "s"),
        node("Mul", ["s", "m"], "product"),
        node("Softmax", ["product"], "y", axis=-1),
    ]
    stored = [
        *(weights("w1", 8, 4, 3, 3), weights("b1", 8), weights("w2", 8, 8, 3, 3)),
        *(weights("w3", 6, 16), weights("b3", 6), weights("w4", 6, 5)),
    ]
    return model(nodes, [value("x", [1, 4, 8, 8])], [value("y", [1, 5])], stored)


def run(made: onnx.ModelProto) -> list[Any]:
    session = open_session(made.SerializeToString(), cpu_options())
    return [session.run(None, {"x": each})[0] for each in SAMPLES]


@pytest.mark.parametrize("per_channel", [False, True])
def test_operators_of_integers_are_those_of_floats_between_two_of_quantization(
    tmp_path: Path, per_channel: bool
) -> None:
    source, result = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(network(), source)
    quantize_static(
        source,
        result,
        Samples(),
        quant_format=QuantFormat.QOperator,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=per_channel,
    )
    made = onnx.load(result)
    before = {graph.operator(each) for each in made.graph.node}
    own = {each for each in before if "QLinear" in each or "QGemm" in each}
    assert len(own) >= 9
    wanted = run(made)
    assert rewrite(made, frozenset(before), {}) == (INTEGERS.name,)
    onnx.checker.check_model(made)
    after = {graph.operator(each) for each in made.graph.node}
    assert not own & after
    assert after >= {"Conv", "MatMul", "Gemm", "Add", "Mul", "Concat", "QuantizeLinear"}
    # No operator is left that moves integers: an EP takes it with floats.
    makers = {each.output[0]: each.op_type for each in made.graph.node}
    for each in made.graph.node:
        if each.op_type in ("MaxPool", "Flatten"):
            assert makers[each.input[0]] == "DequantizeLinear"
    # Softmax has steps of 1/256, and one may be the next.
    for one, other in zip(wanted, run(made), strict=True):
        assert np.abs(one - other).max() < 1.01 / 256


def test_a_scale_that_is_not_known_keeps_the_operator() -> None:
    made = model(
        [
            node("QuantizeLinear", ["x", "s"], "q"),
            helper.make_node("QLinearConv", ["q", "s", "z", "w", "ws", "wz", "s", "z", "b"], ["c"]),
            node("DequantizeLinear", ["c", "s"], "y"),
        ],
        [value("x", [1, 4, 8, 8]), value("s", [])],
        [value("y", [1, 2, 8, 8])],
        [
            numpy_helper.from_array(np.uint8(0), "z"),
            numpy_helper.from_array(np.ones((2, 4, 1, 1), np.int8), "w"),
            numpy_helper.from_array(np.float32(0.1), "ws"),
            numpy_helper.from_array(np.int8(0), "wz"),
            numpy_helper.from_array(np.array([1, 2], np.int32), "b"),
        ],
    )
    assert rewrite(made, frozenset({"QLinearConv"}), {}) == ()


def test_what_is_added_to_a_product_has_its_factor() -> None:
    made = model(
        [
            node("QuantizeLinear", ["x", "s", "z"], "q"),
            node("Flatten", ["q"], "f"),
            helper.make_node(
                "QGemm",
                ["f", "s", "z", "w", "s", "wz", "c", "s", "z"],
                ["g"],
                domain=graph.MICROSOFT,
                alpha=0.5,
            ),
            node("DequantizeLinear", ["g", "s", "z"], "y"),
        ],
        [value("x", [1, 4, 8, 8])],
        [value("y", [1, 2])],
        [
            numpy_helper.from_array(np.float32(0.02), "s"),
            numpy_helper.from_array(np.uint8(10), "z"),
            numpy_helper.from_array(RNG.integers(-9, 9, (256, 2)).astype(np.int8), "w"),
            numpy_helper.from_array(np.int8(0), "wz"),
            numpy_helper.from_array(np.array([5000, -9000], np.int32), "c"),
        ],
        domain=graph.MICROSOFT,
    )
    wanted = run(made)
    assert rewrite(made, frozenset({f"{graph.MICROSOFT}.QGemm"}), {}) == (INTEGERS.name,)
    for one, other in zip(wanted, run(made), strict=True):
        assert np.abs(one - other).max() <= 0.0201
    assert np.ptp(wanted) > 0.5
