from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.graph.rewrites.basics import SIMPLER
from hatch_epcontext.graph.rewrites.fused import DEFINITIONS
from tests.graph.rewrites.equal import made, operators, rewritten, untouched

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


@pytest.mark.parametrize(
    ("attributes", "a", "b", "bias"),
    [
        ({"alpha": 2.0}, [2, 3], [3, 4], []),
        ({"alpha": 0.5, "beta": 2.0}, [2, 3], [3, 4], [4]),
        ({"transA": 1, "transB": 1, "beta": 0.5}, [3, 2], [4, 3], [2, 1]),
    ],
)
def test_a_gemm_is_a_product(attributes: Any, a: list[int], b: list[int], bias: list[int]) -> None:
    node = helper.make_node("Gemm", ["a", "b", *(["c"] if bias else [])], ["y"], **attributes)
    inputs = {"a": (FLOAT, a), "b": (FLOAT, b), "c": (FLOAT, bias)}
    assert "Gemm" not in operators(rewritten(made([node], inputs, {"y": (FLOAT, [2, 4])}), SIMPLER))


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "a"]])
def test_a_mean_is_a_sum(names: list[str]) -> None:
    node = helper.make_node("Mean", names, ["y"])
    inputs = {"a": (FLOAT, [2, 3]), "b": (FLOAT, [3])}
    rewritten(made([node], inputs, {"y": (FLOAT, [2, 3])}), SIMPLER)


@pytest.mark.parametrize("elem_type", [FLOAT, INT64])
@pytest.mark.parametrize(("upper", "diagonal"), [(1, None), (0, 1), (1, -2), (0, 9)])
def test_a_triangle_is_a_mask(elem_type: int, upper: int, diagonal: int | None) -> None:
    given = [] if diagonal is None else ["k"]
    node = helper.make_node("Trilu", ["x", *given], ["y"], upper=upper)
    stored = {} if diagonal is None else {"k": np.array(diagonal)}
    shapes = {"x": (elem_type, [2, 3, 4])}
    model = made([node], shapes, {"y": (elem_type, [2, 3, 4])}, stored)
    assert operators(rewritten(model, SIMPLER)) == ["Where"]


@pytest.mark.parametrize(("axis", "shape"), [(-1, [2, 3, 99]), (0, [99, 2, 3]), (1, [2, 99, 3])])
def test_one_hot_is_a_comparison(axis: int, shape: list[int]) -> None:
    node = helper.make_node("OneHot", ["x", "depth", "levels"], ["y"], axis=axis)
    stored = {"depth": np.array(99), "levels": np.array([-1, 2], np.float32)}
    model = made([node], {"x": (INT64, [2, 3])}, {"y": (FLOAT, shape)}, stored)
    assert operators(rewritten(model, SIMPLER)) == ["Reshape", "Equal", "Equal", "Or", "Where"]


@pytest.mark.parametrize(
    ("indices", "batches", "shape"),
    [
        ([[0, 1], [1, -1]], 0, [2, 4]),
        ([[[1]], [[0]]], 0, [2, 1, 3, 4]),
        ([[[2]], [[-3]]], 1, [2, 1, 4]),
        ([[0, 1, 2], [1, 0, -1]], 0, [2]),
        ([[2, 3], [0, -4]], 1, [2]),
    ],
)
@pytest.mark.parametrize("elem_type", [FLOAT, TensorProto.INT32])
def test_places_are_gathered_from_a_list(
    indices: Any, batches: int, shape: list[int], elem_type: int
) -> None:
    node = helper.make_node("GatherND", ["x", "i"], ["y"], batch_dims=batches)
    given = {"x": (elem_type, [2, 3, 4])}
    model = made([node], given, {"y": (elem_type, shape)}, {"i": np.array(indices)})
    assert operators(rewritten(model, SIMPLER)) == ["Reshape", "Gather", "Reshape"]


def test_a_computed_depth_stays() -> None:
    node = helper.make_node("OneHot", ["x", "depth", "levels"], ["y"])
    inputs = {"x": (INT64, [2]), "depth": (INT64, [])}
    levels = {"levels": np.array([0, 1], np.float32)}
    model = made([node], inputs, {"y": (FLOAT, [2, None])}, levels)
    assert untouched(model, SIMPLER)


@pytest.mark.parametrize(
    ("operator", "opset"),
    [
        ("Celu", 12),
        ("HardSwish", 14),
        ("Mish", 18),
        ("Softsign", 18),
    ],
)
def test_a_function_of_onnx_is_taken_apart(operator: str, opset: int) -> None:
    node = helper.make_node(operator, ["x"], ["y"])
    shape = [2, 3, 2, 2]
    model = made([node], {"x": (FLOAT, shape)}, {"y": (FLOAT, shape)}, opset=opset)
    assert operator not in operators(rewritten(model, DEFINITIONS))


def test_what_onnx_does_not_define_stays() -> None:
    node = helper.make_node("Softplus", ["x"], ["y"])
    model = made([node], {"x": (FLOAT, [2])}, {"y": (FLOAT, [2])}, opset=6)
    assert untouched(model, DEFINITIONS)
