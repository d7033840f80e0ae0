from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.graph.rewrites.basics import INTEGER_CASTS
from tests.graph.rewrites.equal import made, operators, rewritten, untouched


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
def test_a_cast_of_a_small_integer_is_a_dequantization(dtype: Any) -> None:
    elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)]
    model = made(nodes, {"x": (elem_type, [99])}, {"y": (TensorProto.FLOAT, [99])})
    (operator,) = operators(rewritten(model, INTEGER_CASTS))
    assert operator.endswith("DequantizeLinear")


@pytest.mark.parametrize(
    "types", [(TensorProto.INT32, TensorProto.FLOAT), (TensorProto.INT16, TensorProto.INT32)]
)
def test_other_casts_stay(types: tuple[int, int]) -> None:
    before, after = types
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=after)]
    assert untouched(made(nodes, {"x": (before, [9])}, {"y": (after, [9])}), INTEGER_CASTS)
