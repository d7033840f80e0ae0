from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.graph.dtypes import numpy_dtype
from hatch_epcontext.worker.ort_values import not_finite, run
from hatch_epcontext.worker.results import AgreementStatus
from tests.conftest import newer_runtime
from tests.models import value

pytestmark = newer_runtime

_INTEGERS = [0, 1, -2, 3, -1]
_UNSIGNED = [0, 1, 2, 3, 1]
_HALVES = [0.5, -2, 4, 1, 0]
VALUES: Mapping[str, Sequence[float]] = {
    "BOOL": [0, 1, 1, 0, 1],
    "INT2": [0, 1, -2, -1, 1],
    "UINT2": _UNSIGNED,
    "INT4": [0, 7, -8, -1, 3],
    "UINT4": [0, 15, 8, 1, 9],
    **dict.fromkeys(("INT8", "INT16", "INT32", "INT64"), _INTEGERS),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32", "UINT64"), _UNSIGNED),
    **dict.fromkeys(("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"), _HALVES),
    **dict.fromkeys(("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"), _HALVES),
    "FLOAT8E8M0": [0.5, 2, 4, 1, 0.25],
}
"""Numbers that each type has."""


def opened(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
) -> onnxruntime.InferenceSession:
    """A session on the CPU, with the opset that has all types."""
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=12)
    onnx.checker.check_model(made)
    return onnxruntime.InferenceSession(
        made.SerializeToString(), providers=["CPUExecutionProvider"]
    )


@pytest.mark.parametrize("type_name", VALUES)
@pytest.mark.parametrize("shape", [(5,), (5, 1, 1), (1,), (), (0, 3)])
def test_tensors_of_every_type_are_fed_and_read_by_value(
    type_name: str, shape: tuple[int, ...]
) -> None:
    number = TensorProto.DataType.Value(type_name)
    dtype = helper.tensor_dtype_to_np_dtype(number)
    numbers = np.resize(np.array(VALUES[type_name], np.float32), shape)
    # ONNX Runtime itself converts in both directions.
    session = opened(
        [
            helper.make_node("Cast", ["x"], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("Cast", ["f"], ["y"], to=number),
        ],
        [value("x", shape, number), value("f", shape)],
        [value("floats", shape), value("y", shape, number)],
    )
    outputs = run(session, {"x": numbers.astype(dtype), "f": numbers})
    assert outputs["floats"].tolist() == numbers.tolist()
    assert outputs["y"].dtype == dtype
    assert outputs["y"].astype(np.float32).tolist() == numbers.tolist()


def test_a_type_that_no_operator_takes_is_fed_and_read_by_value() -> None:
    # Two values a byte, the first one in the lower half: 0.5, 6, -1.
    packed = bytes([0x71, 0x0A])
    x = value("x", [3], TensorProto.FLOAT4E2M1)
    array = np.array([0.5, 6, -1], numpy_dtype("float4_e2m1fn"))
    assert onnx.numpy_helper.from_array(array).raw_data == packed
    assert run(opened([], [x], [x]), {"x": array})["x"].tolist() == [0.5, 6, -1]


def test_strings_are_fed_and_read() -> None:
    x, y = (value(name, [2, 1], TensorProto.STRING) for name in "xy")
    session = opened([helper.make_node("Identity", ["x"], ["y"])], [x], [y])
    text = np.array([["é"], [""]], object)
    assert run(session, {"x": text})["y"].tolist() == text.tolist()


def test_nan_is_found_in_every_float_dtype() -> None:
    for dtype in (np.float16, np.float64, ml_dtypes.bfloat16):
        bad = np.array([np.nan, 1], dtype)
        (agreement,) = not_finite({"y": bad}, {})
        assert agreement.status is AgreementStatus.NOT_FINITE
        assert "has NaN or Inf in 1 of 2 values" in (agreement.reason or "")
        assert not not_finite({"y": bad}, {"y": bad})
    assert not not_finite({"i": np.array([1]), "s": np.array(["nan"], object)}, {})
