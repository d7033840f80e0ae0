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
from hatch_epcontext.graph.rewrites.fused import DEFINITIONS, FUNCTIONS, FUSED
from tests.graph.rewrites.equal import check_equal, operators, rewritten, untouched
from tests.models import parsed

NORMALIZED = "(float[2, 3, 8] x, float[2, 3, 8] s, float[8] v, float[8] u) => (float[2, 3, 8] y"
REVERSING = """(float[2, 4, 3] x) => (float[2, 4, 3] y) <int64[%d] lengths = {%s}>
{ y = ReverseSequence <batch_axis = %d, time_axis = %d> (x, lengths) }"""
ALONE: list[tuple[Rewrite, int, str]] = [
    (SIMPLER, 17, "(float[2, 3] a, float[3, 4] b) => (float[2, 4] y) { y = Gemm <alpha = 2.0> (a, b) }"),
    (SIMPLER, 17, """(float[3, 2] a, float[4, 3] b, float[2, 1] c) => (float[2, 4] y)
        { y = Gemm <transA = 1, transB = 1, alpha = 2.0, beta = 0.5> (a, b, c) }"""),
    (SIMPLER, 17, "(float[2, 3] a) => (float[2, 3] y) { y = Mean (a) }"),
    (SIMPLER, 17, "(float[2, 3] a, float[3] b) => (float[2, 3] y) { y = Mean (a, b, a) }"),
    *((SIMPLER, 17, f"""({dtype}[2, 3, 4] x) => ({dtype}[2, 3, 4] y)
        <int64 one = {{1}}, int64 below = {{-2}}, int64 nine = {{9}}> {{ y = Trilu {node} }}""")
      for dtype, node in (("float", "<upper = 1> (x)"), ("int64", "<upper = 0> (x, one)"),
                          ("int64", "(x, below)"), ("float", "<upper = 0> (x, nine)"))),
    *((SIMPLER, 17, f"""(int64[2, 3] x) => (float[{shape}] y)
        <int64 depth = {{99}}, float[2] levels = {{-1, 2}}>
        {{ y = OneHot <axis = {axis}> (x, depth, levels) }}""")
      for axis, shape in ((-1, "2, 3, 99"), (0, "99, 2, 3"), (1, "2, 99, 3"))),
    *((SIMPLER, 17, f"""({dtype}[2, 3, 4] x) => ({dtype}[{shape}] y) <int64[{sizes}] i = {{{indices}}}>
        {{ y = GatherND <batch_dims = {batches}> (x, i) }}""")
      for dtype, sizes, indices, batches, shape in (
          ("float", "2, 2", "0, 1, 1, -1", 0, "2, 4"), ("int32", "2, 1, 1", "1, 0", 0, "2, 1, 3, 4"),
          ("float", "2, 1, 1", "2, -3", 1, "2, 1, 4"), ("int32", "2, 3", "0, 1, 2, 1, 0, -1", 0, "2"),
          ("float", "2, 2", "2, 3, 0, -4", 1, "2"))),
    *((REVERSED, 17, REVERSING % given)
      for given in ((2, "4, 4", 0, 1), (2, "3, 3", 0, 1), (4, "2, 2, 2, 2", 1, 0), (2, "1, 1", 0, 1))),
    *((COMPUTED_BOUNDS, 17, f"""({dtype}[9] x, {dtype} high) => ({dtype}[9] y) <{dtype} low = {{3}}>
        {{ y = Clip (x, low, high) }}""") for dtype in ("int32", "int64")),
    *((INTEGER_CASTS, 17, f"({dtype}[99] x) => (float[99] y) {{ y = Cast <to = 1> (x) }}")
      for dtype in ("int8", "uint8", "int16", "uint16")),
    *((FUSED, 17, f"""(float[3, 4] x, float[5, 4] w, float[5] b) => (float[3, 5] y)
        {{ y = com.microsoft.FusedGemm <alpha = 0.5, beta = 2.0, transB = 1, {activation}> (x, w, b) }}""")
      for activation in ('activation = "Relu"', 'activation = "LeakyRelu", activation_alpha = 0.2')),
    *((FUSED, 17, f"""(float[{a}] a, float[{b}] b) => (float[2, 3, 5] y)
        {{ y = com.microsoft.FusedMatMul <{attributes}> (a, b) }}""")
      for attributes, a, b in (
          ("transA = 1", "2, 4, 3", "2, 4, 5"), ("transB = 1", "2, 3, 4", "2, 5, 4"),
          ("transA = 1, transB = 1, alpha = 3.0", "2, 4, 3", "2, 5, 4"),
          ("transBatchA = 1", "3, 2, 4", "2, 4, 5"),
          ("transBatchA = 1, transA = 1, transBatchB = 1", "4, 2, 3", "4, 2, 5"))),
    *((FUSED, 17, f"{NORMALIZED}) {{ y = {node} }}")
      for node in ("com.microsoft.QuickGelu <alpha = 1.5> (x)", "com.microsoft.QuickGelu (x)",
                   "com.microsoft.Gelu (x)", "com.microsoft.BiasGelu (x, v)", "com.microsoft.FastGelu (x)",
                   "com.microsoft.FastGelu (x, v)", "SimplifiedLayerNormalization <axis = -1> (x, v)",
                   "com.microsoft.SkipLayerNormalization <epsilon = 0.001> (x, s, v, u)")),
    *((FUSED, 17, f"{NORMALIZED}, float[2, 3, 8] sum) {{ y, , , sum = com.microsoft.{node} }}")
      for node in ("SkipLayerNormalization (x, s, v, u, v)", "SkipSimplifiedLayerNormalization (x, s, v)")),
    *((FUNCTIONS, 13, f"({dtype}[3, 4] x) => ({result} y) {{ y = {operator} <keepdims = {keepdims}> (x) }}")
      for operator, dtype in (("ReduceLogSumExp", "float"), ("ReduceL2", "float"), ("ReduceL1", "int32"),
                              ("ReduceSumSquare", "int32"))
      for keepdims, result in ((0, dtype), (1, f"{dtype}[1, 1]"))),
    *((FUNCTIONS, 20, f'(float[8] x) => (float[8] y) {{ y = Gelu <approximate = "{approximate}"> (x) }}')
      for approximate in ("none", "tanh")),
    *((FUNCTIONS, opset, f"""(float[2, 3, 4] x, float[{sizes}] scale, float[{sizes}] bias) =>
        (float[2, 3, 4] y, float[{kept}] mean, float[{kept}] inverse)
        {{ y, mean, inverse = LayerNormalization <axis = {axis}, epsilon = 0.1> (x, scale, bias) }}""")
      for opset, axis, sizes, kept in (
          (17, -1, "4", "2, 3, 1"), (17, 1, "3, 4", "2, 1, 1"), (18, 0, "2, 3, 4", "1, 1, 1"))),
    *((DEFINITIONS, 24, f"""(float[2, 2, {queries}, 4] q, float[2, 2, 9, 4] k, float[2, 2, 9, 4] v)
        => (float[2, 2, {queries}, 4] y) <int64[2] n = {{4, 7}}>
        {{ y = Attention <is_causal = {causal}> (q, k, v, , , , n) }}""")
      for causal in (0, 1) for queries in (1, 3)),
]  # fmt: skip
"""Single nodes, which a rewrite replaces."""


@pytest.mark.parametrize(("each", "opset", "text"), ALONE)
def test_a_node_is_replaced_by_others_that_compute_the_same(
    each: Rewrite, opset: int, text: str
) -> None:
    # ONNX does not know `SimplifiedLayerNormalization`.
    model = parsed(text, opset, check=False)
    assert operators(model)[0] not in operators(rewritten(model, each))


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


def test_what_the_ep_takes_stays_beside_what_it_refuses() -> None:
    model = parsed("(float[3, 3] x) => (float[3, 3] y) { m = Mean (x, x) y = Trilu (m) }")
    found = operators(rewritten(model, SIMPLER, refused=["Mean"]))
    assert "Trilu" in found
    assert "Mean" not in found
