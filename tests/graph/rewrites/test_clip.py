from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.graph.rewrites.basics import COMPUTED_BOUNDS
from tests.conftest import newer_runtime
from tests.graph.rewrites.equal import made, operators, rewritten, untouched

FLOAT = TensorProto.FLOAT


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        (["low", "high"], ["Max", "Min"]),
        (["low"], ["Max"]),
        (["", "high"], ["Min"]),
        (["low", "infinity"], ["Max"]),
        (["", ""], ["Identity"]),
    ],
)
def test_computed_bounds_become_max_and_min(bounds: list[str], expected: list[str]) -> None:
    model = made(
        [
            helper.make_node("ReduceMin", ["x"], ["small"], keepdims=0),
            helper.make_node("Mul", ["small", "half"], ["low"]),
            helper.make_node("Neg", ["low"], ["high"]),
            helper.make_node("Clip", ["x", *bounds], ["y"]),
        ],
        {"x": (FLOAT, [2, 9])},
        {"y": (FLOAT, [2, 9])},
        {"half": np.float32(0.5), "infinity": np.float32(np.inf)},
    )
    assert operators(rewritten(model, COMPUTED_BOUNDS, ["Clip"]))[3:] == expected


BYTES = [pytest.param(each, marks=newer_runtime) for each in (np.int8, np.uint8)]


@pytest.mark.parametrize("dtype", [*BYTES, np.int32, np.int64])
def test_integers_are_clipped_too(dtype: Any) -> None:
    elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model = made(
        [helper.make_node("Clip", ["x", "low", "high"], ["y"])],
        {"x": (elem_type, [9]), "high": (elem_type, [])},
        {"y": (elem_type, [9])},
        {"low": np.array(3, dtype)},
    )
    assert operators(rewritten(model, COMPUTED_BOUNDS)) == ["Max", "Min"]


def test_bounds_that_are_attributes_stay() -> None:
    nodes = [helper.make_node("Clip", ["x"], ["y"], min=0.0, max=6.0)]
    model = made(nodes, {"x": (FLOAT, [9])}, {"y": (FLOAT, [9])}, opset=6)
    assert untouched(model, COMPUTED_BOUNDS)
