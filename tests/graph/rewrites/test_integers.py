from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
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
from tests.models import parsed

RNG = np.random.default_rng(4)
SAMPLES = [RNG.uniform(0, 1, (1, 4, 8, 8)).astype(np.float32) for _ in range(8)]


class Samples(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self) -> None:
        self.left = [*SAMPLES]

    def get_next(self) -> dict[str, Any] | None:
        return {"x": self.left.pop()} if self.left else None


def network() -> onnx.ModelProto:
    """Operators that ONNX Runtime quantizes, on ``x`` (1 x 4 x 8 x 8)."""
    return parsed(
        """(float[1, 4, 8, 8] x) => (float[1, 5] y) {
            [c1] c1 = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
            [l] l = LeakyRelu <alpha = 0.1> (c1)
            [c2] c2 = Conv <pads = [1, 1, 1, 1]> (l, w2)
            [sum] sum = Add (c2, l)
            [p] p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (sum)
            [q] q = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (p)
            [both] both = Concat <axis = 1> (q, q)
            [g] g = GlobalAveragePool (both)
            [f] f = Flatten (g)
            [e] e = Gemm <transB = 1> (f, w3, b3)
            [m] m = MatMul (e, w4)
            [s] s = Sigmoid (m)
            [product] product = Mul (s, m)
            [y] y = Softmax <axis = -1> (product) }""",
        w1=(8, 4, 3, 3), b1=(8,), w2=(8, 8, 3, 3), w3=(6, 16), b3=(6,), w4=(6, 5),
    )  # fmt: skip


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
    made = parsed(
        """(float[1, 4, 8, 8] x, float s) => (float[1, 2, 8, 8] y)
        <uint8 z = {0}, float ws = {0.1}, int8 wz = {0}, int32[2] b = {1, 2}> {
            q = QuantizeLinear (x, s)
            c = QLinearConv (q, s, z, w, ws, wz, s, z, b)
            y = DequantizeLinear (c, s) }""",
        w=np.ones((2, 4, 1, 1), np.int8),
    )
    assert rewrite(made, frozenset({"QLinearConv"}), {}) == ()


def test_what_is_added_to_a_product_has_its_factor() -> None:
    made = parsed(
        """(float[1, 4, 8, 8] x) => (float[1, 2] y)
        <float s = {0.02}, uint8 z = {10}, int8 wz = {0}, int32[2] c = {5000, -9000}> {
            q = QuantizeLinear (x, s, z)
            f = Flatten (q)
            g = com.microsoft.QGemm <alpha = 0.5> (f, s, z, w, s, wz, c, s, z)
            y = DequantizeLinear (g, s, z) }""",
        w=RNG.integers(-9, 9, (256, 2)).astype(np.int8),
    )
    wanted = run(made)
    assert rewrite(made, frozenset({f"{graph.MICROSOFT}.QGemm"}), {}) == (INTEGERS.name,)
    for one, other in zip(wanted, run(made), strict=True):
        assert np.abs(one - other).max() <= 0.0201
    assert np.ptp(wanted) > 0.5
