from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.errors import BuildError, Kind
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.tensors import (
    Array,
    compare,
    is_float,
    numpy_dtype,
    refuse_not_finite,
    run,
    within,
)
from tests.models import value

HALF = Tolerance(1e-2, 5e-2, 0.99)


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


def agrees(output: list[float], reference: list[float]) -> bool:
    a, b = np.array(output), np.array(reference)
    return within(a, b, compare("y", a, b, HALF), HALF)


def test_outputs_agree_in_value_and_in_direction() -> None:
    assert agrees([1.0, 2.0], [1.02, 2.0])
    assert not agrees([1.0, 2.5], [1.0, 2.0])
    assert not agrees([0.04, 0.0], [0.0, 0.04]), "small, but at a right angle"


def test_an_output_near_zero_has_no_direction() -> None:
    a, b = np.array([0.0003, 0.0]), np.array([0.0, 0.0003])
    assert compare("y", a, b, HALF).cosine is None
    assert agrees([0.0003, 0.0], [0.0, 0.0003])
    assert not agrees([0.0, 0.0], [0.002, 0.001]), "zeros where the reference has none"


def test_the_absolute_tolerance_grows_with_the_output() -> None:
    assert agrees([100.0, 2.0], [100.0, 0.0])
    assert not agrees([1.0, 0.5], [1.0, 0.0])


def test_all_zeros_agree_with_all_zeros() -> None:
    assert agrees([0.0, 0.0], [0.0, 0.0])
    assert agrees([], [])


def test_places_where_neither_is_finite_are_ignored() -> None:
    assert agrees([np.nan, 1.0], [np.nan, 1.0])
    assert agrees([np.inf], [np.inf])


def test_strings_are_equal_or_not() -> None:
    a, b = np.array(["x", "y"], object), np.array(["x", "z"], object)
    assert within(a, a, compare("y", a, a, HALF), HALF)
    assert not within(a, b, compare("y", a, b, HALF), HALF)


def test_another_shape_is_an_error() -> None:
    with pytest.raises(BuildError, match=r"has the shape \[2\], but \[1, 2\] on the CPU") as raised:
        compare("y", np.zeros(2), np.zeros((1, 2)), HALF)
    assert raised.value.problems[0].kind is Kind.OUTPUT_SHAPE


def test_nan_is_found_in_every_float_dtype() -> None:
    for dtype in (np.float16, np.float64, ml_dtypes.bfloat16):
        bad = np.array([np.nan, 1], dtype)
        with pytest.raises(BuildError, match="has NaN or Inf in 1 of 2 places") as raised:
            refuse_not_finite({"y": bad}, {})
        assert raised.value.problems[0].kind is Kind.NOT_FINITE
        refuse_not_finite({"y": bad}, {"y": bad})
    refuse_not_finite({"i": np.array([1]), "s": np.array(["nan"], object)}, {})
