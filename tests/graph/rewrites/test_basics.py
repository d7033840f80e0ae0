from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Rewrite
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
from tests.graph.rewrites.equal import check_equal, operators, rewritten, untouched
from tests.models import parsed


@pytest.mark.parametrize(
    "text",
    [
        "(float[2, 3] a, float[3, 4] b) => (float[2, 4] y) { y = Gemm <alpha = 2.0> (a, b) }",
        """(float[2, 3] a, float[3, 4] b, float[4] c) => (float[2, 4] y)
        { y = Gemm <alpha = 0.5, beta = 2.0> (a, b, c) }""",
        """(float[3, 2] a, float[4, 3] b, float[2, 1] c) => (float[2, 4] y)
        { y = Gemm <transA = 1, transB = 1, beta = 0.5> (a, b, c) }""",
        "(float[2, 3] a) => (float[2, 3] y) { y = Mean (a) }",
        "(float[2, 3] a, float[3] b) => (float[2, 3] y) { y = Mean (a, b) }",
        "(float[2, 3] a, float[3] b) => (float[2, 3] y) { y = Mean (a, b, a) }",
    ],
)
def test_a_product_with_factors_and_a_mean_are_products_and_sums(text: str) -> None:
    assert not {"Gemm", "Mean"} & {*operators(rewritten(parsed(text), SIMPLER))}


@pytest.mark.parametrize("dtype", ["float", "int64"])
@pytest.mark.parametrize(
    "node", ["<upper = 1> (x)", "<upper = 0> (x, one)", "(x, below)", "<upper = 0> (x, nine)"]
)
def test_a_triangle_is_a_mask(dtype: str, node: str) -> None:
    model = parsed(
        f"""({dtype}[2, 3, 4] x) => ({dtype}[2, 3, 4] y)
        <int64 one = {{1}}, int64 below = {{-2}}, int64 nine = {{9}}> {{ y = Trilu {node} }}"""
    )
    assert operators(rewritten(model, SIMPLER)) == ["Where"]


@pytest.mark.parametrize(("axis", "shape"), [(-1, [2, 3, 99]), (0, [99, 2, 3]), (1, [2, 99, 3])])
def test_one_hot_is_a_comparison(axis: int, shape: list[int]) -> None:
    model = parsed(
        f"""(int64[2, 3] x) => (float{shape} y) <int64 depth = {{99}}, float[2] levels = {{-1, 2}}>
        {{ y = OneHot <axis = {axis}> (x, depth, levels) }}"""
    )
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
@pytest.mark.parametrize("dtype", ["float", "int32"])
def test_places_are_gathered_from_a_list(
    indices: Any, batches: int, shape: list[int], dtype: str
) -> None:
    model = parsed(
        f"""({dtype}[2, 3, 4] x) => ({dtype}{shape} y)
        {{ y = GatherND <batch_dims = {batches}> (x, i) }}""",
        i=indices,
    )
    assert operators(rewritten(model, SIMPLER)) == ["Reshape", "Gather", "Reshape"]


def _scattering(
    wide: str, to: list[int], rows: list[int], kind: str, data: Any = None, axis: int = 0
) -> onnx.ModelProto:
    """Rows joined with those at computed indices, which count from both ends; ``wide`` makes them wide."""
    stored: dict[str, Any] = {} if data is None else {"x": np.full(to, data, np.float32)}
    return parsed(
        f"""(int64[{rows[0]}] i, float{rows} u{"" if stored else f", float{to} x"}) => (float{to} y) {{
            near = Mod <fmod = 1> (i, count)
            column = Unsqueeze (near, last)
            wide = {wide} (column, counts)
            y = ScatterElements <axis = {axis}, reduction = "{kind}"> (x, wide, u) }}""",
        18,
        count=[to[axis]],
        last=np.arange(1, len(rows)),
        counts=rows if wide != "Tile" else [1, *rows[1:]],
        **stored,
    )


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
    ("shape", "update", "attributes"),
    [
        ([2, 3, 7, 4], [2, 3, 1, 4], ""),
        ([2, 3, 7, 4], [2, 3, 3, 4], "<axis = 2>"),
        ([2, 7, 4], [2, 2, 4], '<mode = "circular">'),
        ([2, 7, 3, 4], [2, 1, 3, 4], '<axis = 1, mode = "circular">'),
    ],
)
@pytest.mark.parametrize("places", [[4, 1], [0, 0], None])
def test_a_cache_is_written_from_computed_places_on(
    shape: list[int], update: list[int], attributes: str, places: list[int] | None
) -> None:
    if "circular" in attributes and places:
        places = [9, 6]
    model = parsed(
        f"""(float{shape} x, float{update} u, bool[2] c) => (float{shape} y) {{
            at = Where (c, i, i)
            y = TensorScatter {attributes} (x, u{", at" if places else ""}) }}""",
        24,
        i=places or [0, 0],
    )
    assert "TensorScatter" not in operators(rewritten(model, SIMPLER))


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize(("opset", "mode"), [(16, "bicubic"), (20, "cubic")])
def test_a_bicubic_sample_is_a_sum_of_neighbours(
    padding: str, aligned: int, opset: int, mode: str
) -> None:
    model = parsed(
        f"""(float[2, 3, 5, 4] x, float[2, 4, 6, 2] g) => (float[2, 3, 4, 6] y) {{ y = GridSample
        <mode = "{mode}", padding_mode = "{padding}", align_corners = {aligned}> (x, g) }}""",
        opset,
    )
    after = onnx.ModelProto.FromString(model.SerializeToString())
    assert rewrite(after, frozenset({"GridSample"}), {}, (SIMPLER,))
    check_equal(model, after, 1e-4, scale=0.7)


@pytest.mark.parametrize("opset", [9, 17])
@pytest.mark.parametrize(("elem_type", "tolerance"), [(1, 2e-7), (10, 1e-3)])
def test_an_error_function_is_exact_in_its_dtype(
    opset: int, elem_type: int, tolerance: float
) -> None:
    """Casts give it either dtype in a model of float32."""
    model = parsed(
        f"""(float[9999] x) => (float[9999] y)
        {{ a = Cast <to = {elem_type}> (x) b = Erf (a) y = Cast <to = 1> (b) }}""",
        opset,
    )
    after = onnx.ModelProto.FromString(model.SerializeToString())
    assert rewrite(after, frozenset({"Erf"}), {}, (ERROR_FUNCTION,))
    assert {"Tanh", "Clip"} < {*operators(after)}
    assert "Erf" not in operators(after)
    onnx.checker.check_model(after)
    for scale in (0.01, 1, 9, 6e4):
        check_equal(model, after, tolerance, scale)


@pytest.mark.parametrize(("operator", "opset"), [("Celu", 12), ("HardSwish", 14), ("Mish", 18)])
def test_a_function_of_onnx_is_taken_apart(operator: str, opset: int) -> None:
    model = parsed(f"(float[2, 3] x) => (float[2, 3] y) {{ y = {operator} (x) }}", opset)
    assert operator not in operators(rewritten(model, DEFINITIONS))


REVERSING = """(float[2, 4, 3] x) => (float[2, 4, 3] y) <int64[%d] lengths = {%s}>
{ y = ReverseSequence <batch_axis = %d, time_axis = %d> (x, lengths) }"""


@pytest.mark.parametrize(
    "given", [(2, "4, 4", 0, 1), (2, "3, 3", 0, 1), (4, "2, 2, 2, 2", 1, 0), (2, "1, 1", 0, 1)]
)
def test_lengths_that_are_the_same_for_all_are_one_order(given: tuple[object, ...]) -> None:
    assert operators(rewritten(parsed(REVERSING % given), REVERSED)) == ["Gather"]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ("low, high", ["Max", "Min"]),
        ("low", ["Max"]),
        (", high", ["Min"]),
        ("low, infinity", ["Max"]),
        (",", ["Identity"]),
    ],
)
def test_computed_bounds_become_max_and_min(bounds: str, expected: list[str]) -> None:
    model = parsed(
        f"""(float[2, 9] x) => (float[2, 9] y) <float half = {{0.5}}> {{
            small = ReduceMin <keepdims = 0> (x)
            low = Mul (small, half)
            high = Neg (low)
            y = Clip (x, {bounds}) }}""",
        infinity=np.float32(np.inf),
    )
    found = operators(rewritten(model, COMPUTED_BOUNDS, ["Clip"]))
    assert [name for name in found if name in ("Max", "Min", "Identity")] == expected


BYTES = [pytest.param(dtype, marks=newer_runtime) for dtype in ("int8", "uint8")]


@pytest.mark.parametrize("dtype", [*BYTES, "int32", "int64"])
def test_integers_are_clipped_too(dtype: str) -> None:
    model = parsed(
        f"({dtype}[9] x, {dtype} high) => ({dtype}[9] y) {{ y = Clip (x, low, high) }}",
        low=np.array(3, dtype),
    )
    assert operators(rewritten(model, COMPUTED_BOUNDS)) == ["Max", "Min"]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_a_cast_of_a_small_integer_is_a_dequantization(dtype: str) -> None:
    model = parsed(f"({dtype}[99] x) => (float[99] y) {{ y = Cast <to = 1> (x) }}")
    (operator,) = operators(rewritten(model, INTEGER_CASTS))
    assert operator.endswith("DequantizeLinear")


GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DEFAULTS = {"LSTM": '"Sigmoid", "Tanh", "Tanh"', "GRU": '"Sigmoid", "Tanh"', "RNN": '"Tanh"'}


def layer(operator: str, directions: int, activations: str) -> onnx.ModelProto:
    direction = "bidirectional" if directions == 2 else "reverse"
    return parsed(
        f"""(float[5, 1, 4] x) => (float[5, {directions}, 1, 3] y) {{ y = {operator} <hidden_size = 3,
        activations = [{activations}], direction = "{direction}"> (x, w, r) }}""",
        w=(directions, GATES[operator] * 3, 4),
        r=(directions, GATES[operator] * 3, 3),
    )


@pytest.mark.parametrize("operator", GATES)
@pytest.mark.parametrize("directions", [1, 2])
def test_default_activations_are_left_out(operator: str, directions: int) -> None:
    activations = ", ".join([DEFAULTS[operator]] * directions)
    (node,) = rewritten(layer(operator, directions, activations), DEFAULT_ACTIVATIONS).graph.node
    assert {attribute.name for attribute in node.attribute} == {"hidden_size", "direction"}


def comparing(operator: str) -> onnx.ModelProto:
    text = """(float[2, 3] x) => (float[2, 3] y)
    {{ g = com.microsoft.QuickGelu (x) c = {} (g, x) y = Where (c, x, g) }}"""
    return parsed(text.format(operator), 13)


def test_the_shape_of_a_comparison_is_written_down() -> None:
    after = rewritten(comparing("GreaterOrEqual"), SHAPES)
    (value,) = after.graph.value_info
    assert graph.facts(value).shape == (2, 3)
    assert untouched(after, SHAPES)


@pytest.mark.parametrize(
    ("kernel", "attributes", "size"),
    [
        ([3, 3], "dilations = [2, 2], pads = [1, 1, 1, 1]", [6, 8]),
        ([3, 2], "dilations = [2, 1], strides = [2, 1], output_padding = [1, 0]", [12, 7]),
        ([3], "dilations = [3], strides = [2], kernel_shape = [3]", [13]),
        ([3, 3], 'dilations = [2, 2], auto_pad = "SAME_UPPER", strides = [2, 2]', [8, 12]),
    ],
)
@pytest.mark.parametrize("group", [1, 3])
def test_a_dilated_conv_transpose_has_zeros_between_its_weights(
    kernel: list[int], attributes: str, size: list[int], group: int
) -> None:
    model = parsed(
        f"""(float{[1, 3, *[4, 6][: len(kernel)]]} x) => (float{[1, 2 * group, *size]} y)
        {{ y = ConvTranspose <group = {group}, {attributes}> (x, w) }}""",
        w=(3, 2, *kernel),
    )
    after = rewritten(model, UNDILATED)
    assert graph.attribute(after.graph.node[0], "dilations", None) is None
    assert untouched(after, UNDILATED)


def moving(offset: int, step: int = 1, shape: str = "2, 3") -> onnx.ModelProto:
    """Three of ten columns from a place that is computed."""
    return parsed(
        f"""(float[2, 10] x, int64[1] i) => (float[{shape}] y) <int64 low = {{0}}, int64 high = {{3}},
        int64[1] offset = {{{offset}}}, int64[1] length = {{{3 * step}}}, int64[1] axes = {{-1}},
        int64[1] steps = {{{step}}}> {{
            a = Abs (x)
            j = Clip (i, low, high)
            start = Add (j, offset)
            end = Add (start, length)
            y = Slice (a, start, end, axes, steps) }}"""
    )


@pytest.mark.parametrize(("offset", "step"), [(1, 1), (-9, 1), (0, 2)])
def test_a_slice_at_a_computed_place_is_a_gather(offset: int, step: int) -> None:
    after = operators(rewritten(moving(offset, step), COMPUTED_PLACES))
    assert "Slice" not in after
    assert "Gather" in after


SCATTER_ROWS = """(float[4, 3] x, int64[9, 3] i, float[9, 3] u) => (float[4, 3] y)
{ y = ScatterElements <reduction = "add"> (x, i, u) }"""


@pytest.mark.parametrize(
    ("model", "each"),
    [
        pytest.param(model, each, id=name)
        for name, model, each in (
            ("rows of integers in a cache", parsed("""(int64[2, 5] x, int64[2, 3] u) => (int64[2, 5] y)
                { y = TensorScatter <axis = 1> (x, u) }""", 24), SIMPLER),
            ("a linear sample", parsed("""(float[2, 3, 5, 4] x, float[2, 4, 6, 2] g) => (float[2, 3, 4, 6] y)
                { y = GridSample (x, g) }""", 16), SIMPLER),
            ("scattered without a sum", _scattering("Expand", [4, 3], [9, 3], "none"), SIMPLER),
            ("scattered products", _scattering("Expand", [4, 3], [9, 3], "mul"), SIMPLER),
            ("a part of each row", _scattering("Expand", [4, 3], [9, 2], "add"), SIMPLER),
            ("along the features", _scattering("Expand", [4, 3], [4, 3], "add", axis=1), SIMPLER),
            ("not by rows", parsed(SCATTER_ROWS, 18), SIMPLER),
            ("a computed depth", parsed("""(int64[2] x, int64 depth) => (float[2, ?] y)
                <float[2] levels = {0, 1}> { y = OneHot (x, depth, levels) }"""), SIMPLER),
            ("different lengths", parsed(REVERSING % (2, "4, 3", 0, 1)), REVERSED),
            ("bounds that are attributes", parsed("""(float[9] x) => (float[9] y)
                { y = Clip <min = 0.0, max = 6.0> (x) }""", 6), COMPUTED_BOUNDS),
            ("a cast of large integers", parsed("(int32[9] x) => (float[9] y) { y = Cast <to = 1> (x) }"),
             INTEGER_CASTS),
            ("a cast to integers", parsed("(int16[9] x) => (int32[9] y) { y = Cast <to = 6> (x) }"),
             INTEGER_CASTS),
            ("activations of an LSTM", layer("LSTM", 1, '"Sigmoid", "Relu", "Tanh"'), DEFAULT_ACTIVATIONS),
            ("activations of a GRU", layer("GRU", 1, '"Tanh", "Sigmoid"'), DEFAULT_ACTIVATIONS),
            ("activations of an RNN", layer("RNN", 1, '"Relu"'), DEFAULT_ACTIVATIONS),
            ("a shape that is inferred", comparing("Greater"), SHAPES),
            ("a slice of unknown length", moving(1, shape="2, n"), COMPUTED_PLACES),
            ("a slice at a stored place", parsed("""(float[4] x) => (float[2] y)
                <int64[1] start = {1}, int64[1] end = {3}> { y = Slice (x, start, end) }"""),
             COMPUTED_PLACES),
        )
    ],
)  # fmt: skip
def test_what_a_rewrite_is_not_for_stays(model: onnx.ModelProto, each: Rewrite) -> None:
    assert untouched(model, each)


def test_what_the_ep_takes_stays() -> None:
    model = layer("GRU", 1, DEFAULTS["GRU"])
    assert untouched(model, DEFAULT_ACTIVATIONS, refused=["LSTM"])
    assert graph.attribute(model.graph.node[0], "activations", None)
