from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.errors import BuildError, Kind
from hatch_epcontext.graph.arrays import Array, is_float, numpy_dtype
from hatch_epcontext.worker.tensors import refuse_not_finite, run
from tests.models import value


@pytest.mark.parametrize(
    ("dtype", "array"),
    [
        (TensorProto.FLOAT, np.array([1, 2], np.float32)),
        (TensorProto.FLOAT16, np.array([1, 2], np.float16)),
        (TensorProto.DOUBLE, np.array([1, 2], np.float64)),
        (TensorProto.BFLOAT16, np.array([1, 2], ml_dtypes.bfloat16)),
        (TensorProto.FLOAT8E4M3FN, np.array([1, 2], ml_dtypes.float8_e4m3fn)),
        (TensorProto.INT8, np.array([1, 2], np.int8)),
        (TensorProto.UINT16, np.array([1, 2], np.uint16)),
        (TensorProto.INT64, np.array([1, 2], np.int64)),
        (TensorProto.BOOL, np.array([True, False])),
        (TensorProto.STRING, np.array(["a", "b"], object)),
    ],
)
def test_every_dtype_can_be_fed_and_returned(dtype: int, array: Array) -> None:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [value("x", [2], dtype)],
        [value("y", [2], dtype)],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    onnx.checker.check_model(made)
    session = onnxruntime.InferenceSession(
        made.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    output = run(session, {"x": array})["y"]
    assert output.dtype == array.dtype
    assert output.tolist() == array.tolist()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2", "int4", "bool", "string"])
def test_dtypes_by_name(name: str) -> None:
    assert numpy_dtype(name).name == ("object" if name == "string" else name)
    assert is_float(numpy_dtype(name)) == ("float" in name)


def test_nan_is_found_in_every_float_dtype() -> None:
    for dtype in (np.float16, np.float64, ml_dtypes.bfloat16):
        bad = np.array([np.nan, 1], dtype)
        with pytest.raises(BuildError, match="has NaN or Inf in 1 of 2 places") as raised:
            refuse_not_finite({"y": bad}, {})
        assert raised.value.problems[0].kind is Kind.NOT_FINITE
        refuse_not_finite({"y": bad}, {"y": bad})
    refuse_not_finite({"i": np.array([1]), "s": np.array(["nan"], object)}, {})
