from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites import rewrite
from hatch_epcontext.graph.rewrites.basics import (
    COMPUTED_BOUNDS,
    COMPUTED_PLACES,
    DEFAULT_ACTIVATIONS,
    ERROR_FUNCTION,
    INTEGER_CASTS,
    REVERSED,
    SHAPES,
    SIMPLER,
    UNDILATED,
)
from hatch_epcontext.graph.rewrites.fused import DEFINITIONS
from tests.conftest import newer_runtime
from tests.graph.rewrites.equal import check_equal, made, operators, rewritten, untouched
from tests.graph.unrolling.models import parsed
from tests.models import Shape

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


def _scattering(
    wide: str, to: list[int], rows: list[int], kind: str, data: Any = None, axis: int = 0
) -> onnx.ModelProto:
    """Rows joined with those at computed indices, which count from both ends; ``wide`` makes them wide."""
    nodes = [
        helper.make_node("Mod", ["i", "count"], ["near"], fmod=1),
        helper.make_node("Unsqueeze", ["near", "last"], ["column"]),
        helper.make_node(wide, ["column", "counts"], ["wide"]),
        helper.make_node("ScatterElements", ["x", "wide", "u"], ["y"], axis=axis, reduction=kind),
    ]
    counts = rows if wide != "Tile" else [1, *rows[1:]]
    stored = {
        "count": np.array([to[axis]]),
        "last": np.arange(1, len(rows)),
        "counts": np.array(counts),
    }
    inputs = {"i": (INT64, [rows[0]]), "u": (FLOAT, rows)}
    if data is None:
        inputs["x"] = (FLOAT, to)
    else:
        stored["x"] = np.full(to, data, np.float32)
    return made(nodes, inputs, {"y": (FLOAT, to)}, stored, opset=18)


@pytest.mark.parametrize("wide", ["Expand", "Tile", "Reshape"])
@pytest.mark.parametrize(("kind", "neutral"), [("add", 0), ("max", -np.inf)])
@pytest.mark.parametrize(("to", "rows"), [([4, 3], [9, 3]), ([2, 3, 2], [5, 3, 2]), ([4], [9])])
def test_rows_are_scattered_by_a_product_or_a_maximum(
    wide: str, kind: str, neutral: float, to: list[int], rows: list[int]
) -> None:
    if wide == "Reshape":
        to, rows = [*to[:1], *[1] * len(to[1:])], [*rows[:1], *[1] * len(rows[1:])]
    for data in (None, 0.5, neutral):
        after = operators(rewritten(_scattering(wide, to, rows, kind, data), SIMPLER))
        joining = {"add": ("MatMul", "Add"), "max": ("ReduceMax", "Max")}[kind]
        assert "ScatterElements" not in after
        assert joining[0] in after
        assert (joining[1] in after) == (data != neutral)


@pytest.mark.parametrize(
    ("shape", "length", "attributes"),
    [
        ([2, 3, 7, 4], 1, {}),
        ([2, 3, 7, 4], 3, {"axis": 2}),
        ([2, 7, 4], 2, {"mode": "circular"}),
        ([2, 7, 3, 4], 1, {"axis": 1, "mode": "circular"}),
    ],
)
@pytest.mark.parametrize("places", [[4, 1], [0, 0], None])
def test_a_cache_is_written_from_computed_places_on(
    shape: list[int], length: int, attributes: Any, places: list[int] | None
) -> None:
    if attributes.get("mode") and places:
        places = [9, 6]
    axis = attributes.get("axis", -2)
    update = [*shape]
    update[axis] = length
    nodes = [
        helper.make_node("Where", ["c", "i", "i"], ["at"]),
        helper.make_node(
            "TensorScatter", ["x", "u", *(["at"] if places else [])], ["y"], **attributes
        ),
    ]
    inputs = {"x": (FLOAT, shape), "u": (FLOAT, update), "c": (TensorProto.BOOL, [2])}
    stored = {"i": np.array(places or [0, 0])}
    model = made(nodes, inputs, {"y": (FLOAT, shape)}, stored, opset=24)
    assert "TensorScatter" not in operators(rewritten(model, SIMPLER))


def test_rows_of_integers_or_of_another_axis_of_a_cache_stay() -> None:
    node = helper.make_node("TensorScatter", ["x", "u"], ["y"], axis=1)
    for elem_type, rows in ((INT64, [2, 3, 4]), (FLOAT, [2, 3, 4])):
        shapes = {"x": (elem_type, [2, 5, 4]), "u": (elem_type, rows)}
        model = made([node], shapes, {"y": (elem_type, [2, 5, 4])}, opset=24)
        assert untouched(model, SIMPLER) is (elem_type == INT64)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize(("opset", "mode"), [(16, "bicubic"), (20, "cubic")])
def test_a_bicubic_sample_is_a_sum_of_neighbours(
    padding: str, aligned: int, opset: int, mode: str
) -> None:
    node = helper.make_node(
        "GridSample", ["x", "g"], ["y"], mode=mode, padding_mode=padding, align_corners=aligned
    )
    inputs = {"x": (FLOAT, [2, 3, 5, 4]), "g": (FLOAT, [2, 4, 6, 2])}
    model = made([node], inputs, {"y": (FLOAT, [2, 3, 4, 6])}, opset=opset)
    after = onnx.ModelProto.FromString(model.SerializeToString())
    assert rewrite(after, frozenset({"GridSample"}), {}, (SIMPLER,))
    check_equal(model, after, 1e-4, scale=0.7)


def test_a_sample_that_is_not_bicubic_stays() -> None:
    node = helper.make_node("GridSample", ["x", "g"], ["y"])
    inputs = {"x": (FLOAT, [2, 3, 5, 4]), "g": (FLOAT, [2, 4, 6, 2])}
    assert untouched(made([node], inputs, {"y": (FLOAT, [2, 3, 4, 6])}, opset=16), SIMPLER)


def test_rows_that_are_scattered_in_another_way_stay() -> None:
    for kind in ("none", "mul"):
        assert untouched(_scattering("Expand", [4, 3], [9, 3], kind), SIMPLER)
    # Only a part of each row, along its features, and not by rows.
    assert untouched(_scattering("Expand", [4, 3], [9, 2], "add"), SIMPLER)
    assert untouched(_scattering("Expand", [4, 3], [4, 3], "add", axis=1), SIMPLER)
    node = helper.make_node("ScatterElements", ["x", "i", "u"], ["y"], reduction="add")
    shapes = {"x": (FLOAT, [4, 3]), "i": (INT64, [9, 3]), "u": (FLOAT, [9, 3])}
    assert untouched(made([node], shapes, {"y": (FLOAT, [4, 3])}, opset=18), SIMPLER)


@pytest.mark.parametrize("opset", [9, 17])
@pytest.mark.parametrize("elem_type", [FLOAT, TensorProto.FLOAT16])
def test_an_error_function_is_exact_in_its_dtype(opset: int, elem_type: int) -> None:
    """Casts give it either dtype in a model of float32."""
    nodes = [
        helper.make_node("Cast", ["x"], ["a"], to=elem_type),
        helper.make_node("Erf", ["a"], ["b"]),
        helper.make_node("Cast", ["b"], ["y"], to=FLOAT),
    ]
    model = made(nodes, {"x": (FLOAT, [9999])}, {"y": (FLOAT, [9999])}, opset=opset)
    after = onnx.ModelProto.FromString(model.SerializeToString())
    assert rewrite(after, frozenset({"Erf"}), {}, (ERROR_FUNCTION,))
    assert {"Tanh", "Clip"} < {*operators(after)}
    assert "Erf" not in operators(after)
    onnx.checker.check_model(after)
    tolerance = 2e-7 if elem_type == FLOAT else 1e-3
    for scale in (0.01, 1, 9, 6e4):
        check_equal(model, after, tolerance, scale)


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
    ],
)
def test_a_function_of_onnx_is_taken_apart(operator: str, opset: int) -> None:
    node = helper.make_node(operator, ["x"], ["y"])
    shape = [2, 3, 2, 2]
    model = made([node], {"x": (FLOAT, shape)}, {"y": (FLOAT, shape)}, opset=opset)
    assert operator not in operators(rewritten(model, DEFINITIONS))


REVERSING = """
main (float[2, 4, 3] x) => (float[2, 4, 3] y)
<int64[%d] lengths = {%s}>
{ y = ReverseSequence <batch_axis = %d, time_axis = %d> (x, lengths) }
"""


@pytest.mark.parametrize(
    "given", [(2, "4, 4", 0, 1), (2, "3, 3", 0, 1), (4, "2, 2, 2, 2", 1, 0), (2, "1, 1", 0, 1)]
)
def test_lengths_that_are_the_same_for_all_are_one_order(given: tuple[object, ...]) -> None:
    assert operators(rewritten(parsed(REVERSING % given), REVERSED)) == ["Gather"]


def test_different_lengths_stay() -> None:
    assert untouched(parsed(REVERSING % (2, "4, 3", 0, 1)), REVERSED)


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
    found = operators(rewritten(model, COMPUTED_BOUNDS, ["Clip"]))
    assert [each for each in found if each in ("Max", "Min", "Identity")] == expected


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


GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


def layer(
    operator: str, directions: int, activations: list[str], **attributes: Any
) -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    gates = GATES[operator]
    stored = {
        "w": rng.standard_normal((directions, gates * 3, 4)).astype(np.float32),
        "r": rng.standard_normal((directions, gates * 3, 3)).astype(np.float32),
    }
    node = helper.make_node(
        operator,
        ["x", "w", "r"],
        ["y"],
        hidden_size=3,
        activations=activations,
        direction="bidirectional" if directions == 2 else "reverse",
        **attributes,
    )
    return made([node], {"x": (FLOAT, [5, 1, 4])}, {"y": (FLOAT, [5, directions, 1, 3])}, stored)


@pytest.mark.parametrize("operator", GATES)
@pytest.mark.parametrize("directions", [1, 2])
def test_default_activations_are_left_out(operator: str, directions: int) -> None:
    activations = DEFAULTS[operator] * directions
    after = rewritten(layer(operator, directions, activations), DEFAULT_ACTIVATIONS)
    (node,) = after.graph.node
    assert {each.name for each in node.attribute} == {"hidden_size", "direction"}


@pytest.mark.parametrize(
    ("operator", "activations"),
    [("LSTM", ["Sigmoid", "Relu", "Tanh"]), ("GRU", ["Tanh", "Sigmoid"]), ("RNN", ["Relu"])],
)
def test_other_activations_stay(operator: str, activations: list[str]) -> None:
    assert untouched(layer(operator, 1, activations), DEFAULT_ACTIVATIONS)


def test_what_the_ep_takes_stays() -> None:
    model = layer("GRU", 1, DEFAULTS["GRU"])
    assert untouched(model, DEFAULT_ACTIVATIONS, refused=["LSTM"])
    assert graph.attribute(model.graph.node[0], "activations", None)


def comparing(operator: str) -> onnx.ModelProto:
    nodes = [
        helper.make_node("QuickGelu", ["x"], ["g"], domain="com.microsoft"),
        helper.make_node(operator, ["g", "x"], ["c"]),
        helper.make_node("Where", ["c", "x", "g"], ["y"]),
    ]
    return made(nodes, {"x": (FLOAT, [2, 3])}, {"y": (FLOAT, [2, 3])}, opset=13)


def test_the_shape_of_a_comparison_is_written_down() -> None:
    after = rewritten(comparing("GreaterOrEqual"), SHAPES)
    (value,) = after.graph.value_info
    assert graph.facts(value).shape == (2, 3)
    assert untouched(after, SHAPES)


def test_shapes_that_onnx_runtime_infers_are_not() -> None:
    assert untouched(comparing("Greater"), SHAPES)


@pytest.mark.parametrize(
    ("dilations", "kernel", "attributes", "size"),
    [
        ([2, 2], [3, 3], {"pads": [1, 1, 1, 1]}, [6, 8]),
        ([2, 1], [3, 2], {"strides": [2, 1], "output_padding": [1, 0]}, [12, 7]),
        ([3], [3], {"strides": [2], "kernel_shape": [3]}, [13]),
        ([2, 2], [3, 3], {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, [8, 12]),
    ],
)
@pytest.mark.parametrize("group", [1, 3])
def test_a_dilated_conv_transpose_has_zeros_between_its_weights(
    dilations: list[int],
    kernel: list[int],
    attributes: dict[str, Any],
    size: list[int],
    group: int,
) -> None:
    weights = np.random.default_rng(0).standard_normal((3, 2, *kernel))
    node = helper.make_node(
        "ConvTranspose", ["x", "w"], ["y"], dilations=dilations, group=group, **attributes
    )
    model = made(
        [node],
        {"x": (FLOAT, [1, 3, *[4, 6][: len(kernel)]])},
        {"y": (FLOAT, [1, 2 * group, *size])},
        {"w": weights.astype(np.float32)},
    )
    (after,) = rewritten(model, UNDILATED).graph.node
    assert graph.attribute(after, "dilations", None) is None
    assert untouched(rewritten(model, UNDILATED), UNDILATED)


def moving(offset: int, step: int = 1, shape: Shape = (2, 3)) -> onnx.ModelProto:
    """Three of ten columns from a place that is computed."""
    return made(
        [
            helper.make_node("Abs", ["x"], ["a"]),
            helper.make_node("Clip", ["i", "low", "high"], ["j"]),
            helper.make_node("Add", ["j", "offset"], ["start"]),
            helper.make_node("Add", ["start", "length"], ["end"]),
            helper.make_node("Slice", ["a", "start", "end", "axes", "steps"], ["y"]),
        ],
        {"x": (FLOAT, [2, 10]), "i": (INT64, [1])},
        {"y": (FLOAT, list(shape))},
        {
            "low": np.array(0),
            "high": np.array(3),
            "offset": np.array([offset]),
            "length": np.array([3 * step]),
            "axes": np.array([-1]),
            "steps": np.array([step]),
        },
    )


@pytest.mark.parametrize(("offset", "step"), [(1, 1), (-9, 1), (0, 2)])
def test_a_slice_at_a_computed_place_is_a_gather(offset: int, step: int) -> None:
    after = operators(rewritten(moving(offset, step), COMPUTED_PLACES))
    assert "Slice" not in after
    assert "Gather" in after


def test_a_slice_of_unknown_length_stays() -> None:
    assert untouched(moving(1, shape=(2, "n")), COMPUTED_PLACES)
    node = helper.make_node("Slice", ["x", "start", "end"], ["y"])
    stored = {"start": np.array([1]), "end": np.array([3])}
    model = made([node], {"x": (FLOAT, [4])}, {"y": (FLOAT, [2])}, stored)
    assert untouched(model, COMPUTED_PLACES)
