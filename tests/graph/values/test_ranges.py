from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from hatch_epcontext.graph import graph, inference
from hatch_epcontext.graph.facts import InFloats, Range
from hatch_epcontext.graph.values.offsets import with_offsets
from hatch_epcontext.graph.values.ranges import input_ranges
from tests.models import parsed


def ranges(text: str, **stored: Any) -> dict[str, Range]:
    """The ordinary ranges of the inputs of a model."""
    return ranges_of(parsed(text, check=False, **stored))


def all_of(text: str, **stored: Any) -> dict[str, Range]:
    """The ranges with the values that are far from the ordinary."""
    model = parsed(text, check=False, **stored)
    inputs = [graph.facts(value) for value in graph.inputs(model.graph)]
    return with_offsets(input_ranges(inference.inferred(model), inputs), inputs)


def ranges_of(model: onnx.ModelProto) -> dict[str, Range]:
    inputs = [graph.facts(value) for value in graph.inputs(model.graph)]
    found = input_ranges(inference.inferred(model), inputs)
    return {
        name: replace(
            each,
            far=(),
            floats=None,
            loose=False,
            sound=False,
            reach=0.0,
            thresholds=(),
            constants=(),
            signed=True,
            least=0.0,
            shifted=0.0,
            squared=False,
        )
        for name, each in found.items()
    }


def index(high: float, low: float = 0, usual: float | None = None) -> Range:
    return Range(low, high, known=True, usual=usual, whole=True)


def test_members_of_a_stored_range_are_bounded() -> None:
    found = ranges(
        """(int32[2, 1] i, int64[2] j) =>
        (float[] y) <int64 depth = {9}, float[2] values = {0, 1}> {
            is = Equal (range, i)
            z = OneHot (j, depth, values)
            y = Cast <to = 1> (is) }""",
        range=np.array(range(257), np.int32),
    )
    assert found == {"i": index(256), "j": index(8)}


def test_indices_are_bounded_by_the_size_of_the_axis() -> None:
    found = ranges(
        """(int32[1] i, int64[1] j) => (float[] y) {
            wide = Cast <to = 7> (i)
            row = Gather (table, wide)
            y = Gather <axis = -1> (row, j) }""",
        table=(7, 3),
    )
    assert found == {"i": index(6), "j": index(2)}


@pytest.mark.parametrize(
    ("nodes", "low", "high"),
    [
        ("k = Add (i, three)", -3, 3),
        ("k = Mul (three, i)", 0, 2),
        ("k = Div (i, three)", 0, 18),
        ("k = Add (i, offsets)", 0, 3),
        ("k = Mul (i, signs)", 0, 255),
        ("k = Concat <axis = 0> (i, three)", 0, 6),
        ("k = Clip (i, , three)", 0, 6),
        ("k = Sub (six, i)", 0, 6),
        ("k = Sub (zero, i)", -6, 0),
        # Negative indices, which count from the end.
        (
            """negative = Less (i, zero) positive = Not (negative) is_negative = Cast <to = 7> (negative)
            is_positive = Cast <to = 7> (positive) from_end = Add (i, seven)
            a = Mul (is_negative, from_end) b = Mul (i, is_positive) k = Add (a, b)""",
            0,
            6,
        ),
    ],
)
def test_indices_are_followed_through_arithmetic(nodes: str, low: int, high: int) -> None:
    found = ranges(
        f"""(int64[1] i) => (float[] y) <int64[1] three = {{3}}, int64[1] six = {{6}},
        int64[1] seven = {{7}}, int64[1] zero = {{0}}, int64[2] offsets = {{0, 3}},
        int64[2] signs = {{-1, 1}}> {{ {nodes} y = Gather (table, k) }}""",
        table=(7, 3),
    )
    assert (found["i"].low, found["i"].high) == (low, high)


def test_the_sum_of_two_inputs_stays_within_a_table() -> None:
    found = ranges(
        "(int64[4] i, int64[4] j) => (float[] y) { k = Add (i, j) y = Gather (table, k) }",
        table=(7, 3),
    )
    assert found["i"].high + found["j"].high == 6


def test_indices_into_a_computed_shape_and_inside_a_branch_are_bounded() -> None:
    found = ranges(
        """(float[5, 2] x, int64[1] i, int64[1] j, bool c) => (float[] y) {
            r = Relu (x)
            table = MatMul (r, w)
            y = If <then_branch = then () => (float[] t) { t = Gather (table, i) },
                 else_branch = other () => (float[] e) { e = Gather (table, j) }> (c) }""",
        w=(2, 3),
    )
    assert found["i"] == found["j"] == index(4)


def test_scattered_indices_are_bounded() -> None:
    found = ranges("""(float[6, 4] x, int64[6, 1] i, float[6, 1] u, int64[3, 2] j, int64[1] k) =>
        (float[] y) {
            a = ScatterElements <axis = 1> (x, i, u)
            b = GatherND (a, j)
            c, indices = TopK (a, k)
            y = Concat <axis = 0> (b, b) }""")
    assert (found["i"], found["j"], found["k"]) == (index(3), index(3), index(4, 1, 4))


def test_a_length_that_is_clipped_to_the_size_is_bounded_by_no_mask() -> None:
    found = ranges("""(float[1, 24, 3] x, int64[1] n_lengths) =>
        (float[] y) <int64 zero = {0}, int64 one = {1}, int64 most = {24}> {
            sizes = Shape (x)
            size = Gather (sizes, one)
            positions = Range (zero, size, one)
            lengths = Min (n_lengths, most)
            mask = Less (positions, lengths)
            y = Cast <to = 1> (mask) }""")
    assert found["n_lengths"].low == 1
    assert np.isfinite(found["n_lengths"].high)


def test_a_length_that_counts_positions_is_that_of_the_input_after_which_it_is_called() -> None:
    found = ranges("""(float[1, 256] style, int64[1, 32] x, int64[1] x_lengths) =>
        (float[] y) <int64 zero = {0}, int64 one = {1}> {
            most = ReduceMax <keepdims = 0> (x_lengths)
            positions = Range (zero, most, one)
            mask = Less (positions, x_lengths)
            y = Cast <to = 1> (mask) }""")
    assert found["x_lengths"] == index(32, 1, 32)


def test_lengths_that_measure_no_axis_are_quantities() -> None:
    found = ranges("""(int32[12] start, int32[12] length_min, float[12, 8] x, int32[12] x_lengths) =>
        (int32[12] end, int32[12] y) {
            end = Add (start, length_min)
            y = Identity (x_lengths) }""")
    assert found["x_lengths"] == index(8, 1, 8)
    found = ranges("""(int32[12] start, int32[12] length_min) =>
        (int32[12] end) { end = Add (start, length_min) }""")
    assert found["length_min"] == Range(0, 255, known=False, whole=True, gain=2)


def test_a_comparison_with_a_constant_beyond_the_limits_of_a_clip_is_of_other_values_too() -> None:
    text = """(float[4] x, float[4] z) => (y) <float zero = {273.15}, float low = {0}, float high = {20}>
        { c = Sub (x, zero) d = Clip (c, low, high) below = Less (x, limit) n = Cast <to = 1> (below)
          a = Clip (z, low, high) s = Add (d, n) y = Add (s, a) }"""
    found = all_of(text, limit=np.float32(263.15))
    assert (found["x"].known, found["x"].is_firm) == (True, False)
    assert found["z"].is_firm
    assert all_of(text, limit=np.float32(280))["x"].is_firm


def test_the_lengths_of_a_recurrent_layer_are_up_to_its_length() -> None:
    found = ranges(
        """(float[9, 1, 2] x, int32[1] n) => (float[] y)
        { y = GRU <hidden_size = 2> (x, w, r, , n) }""",
        w=(1, 6, 2),
        r=(1, 6, 2),
    )
    assert found["n"] == index(9, 1, 9)


def test_masks_are_of_ones() -> None:
    found = ranges("""(int64[1, 4] attention_mask, int64[1, 4] other, float[1, 4] x) =>
        (float[] y) <float hidden = {-10000.0}> {
            m = Cast <to = 1> (attention_mask)
            a = Mul (x, m)
            is = Cast <to = 9> (other)
            y = Where (is, a, hidden) }""")
    assert found["attention_mask"] == found["other"] == index(1, 0, 1)
    assert found["x"].is_open


def test_what_only_chooses_is_no_mask() -> None:
    text = "(bool[4] b, int64[4] i, float[4] x, float[4] z) => (float[4] y)"
    nodes = "c = Where (b, x, z) d = Cast <to = 9> (i) y = Where (d, c, z)"
    found = ranges(f"{text} {{ {nodes} }}")
    assert found["b"] == Range(0, 1, True)
    assert replace(found["i"], far=()) == Range(0, 1, True, whole=True)
    found = ranges(f"{text} {{ {nodes} s = Softmax (y) }}")
    assert found["i"].usual == 1
    # Each sum doubles the ways to the scores.
    sums = " ".join(f"m{n} = Identity (s{n}) s{n + 1} = Add (s{n}, m{n})" for n in range(64))
    found = ranges(f"{text} {{ {nodes} s0 = Add (y, y) {sums} s = Softmax (s64) }}")
    assert found["i"].usual == 1
    # Amounts are summed, and positions counted.
    total = "(int32[1, 4] x) => (float[] y) <int64 k = {1}> { c = CumSum (x, k)"
    assert not ranges(f"{total} y = Cast <to = 1> (c) }}")["x"].known
    assert ranges(f"{total} p = Sub (c, k) y = Gather (w, p) }}", w=(9, 2))["x"].high == 1


def test_a_mask_by_whose_values_coordinates_are_multiplied_has_larger_ones_too() -> None:
    head = "(float[1, 4] mask, float[1, 4] x) => (float[] y)"
    centre = "s = ReduceSum (p) total = ReduceSum (mask) y = Div (s, total)"
    places = np.arange(4, dtype=np.float32)
    found = all_of(f"{head} {{ p = Mul (mask, places) {centre} }}", places=places)
    assert replace(found["mask"], far=(), signed=True) == Range(0.0, 1.0, True, 1.0)
    ends = [(size / 4, size) for size in (2.0**exponent for exponent in range(5, 20, 2))]
    assert spans(found["mask"]) == ends
    # It hides values of an input, and of a table.
    assert not all_of(f"{head} {{ p = Mul (mask, x) {centre} }}")["mask"].far
    hidden = f"is = Cast <to = 9> (mask) q = Where (is, places, x) p = Mul (mask, places) {centre}"
    assert not all_of(f"{head} {{ {hidden} }}", places=places)["mask"].far


def test_floats_have_the_range_that_is_clipped_or_quantized() -> None:
    found = ranges("""(float[2] a, float[2] b) => (float[] y)
        <float low = {-1}, float high = {6}, float scale = {0.5}, uint8 zero = {100}> {
            c = Clip (a, low, high)
            q = QuantizeLinear (b, scale, zero)
            d = DequantizeLinear (q, scale, zero)
            y = Add (c, d) }""")
    assert found == {"a": Range(-1, 6, known=True), "b": Range(-50, 77.5, known=True)}


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_below_zero_and_counts_no_turns_has_no_values_far_from_that(whole: bool) -> None:
    dtype, offset, floor = ("int64", 90, "Identity") if whole else ("float", 90.0, "Floor")
    text = f"""({dtype}[4] x) => (float[] y) <{dtype} n = {{{offset}}}>
        {{ a = Add (x, n) f = {floor} (a) i = Cast <to = 7> (f) y = Gather (table, i) }}"""
    range_ = all_of(text, table=(50, 3))["x"]
    assert (range_.low, range_.high) == (-90, -41)
    assert all(far.low < far.high or far.centers for far in range_.far)


def test_floats_of_which_a_remainder_is_taken_are_within_a_turn() -> None:
    head = "(float[4] x, float[4] z) => (float[4] y) <float n = {360}, float half = {180}>"
    found = ranges(f"{head} {{ d = Sub (x, z) a = Add (d, half) y = Mod <fmod = 1> (a, n) }}")
    assert found == dict.fromkeys(("x", "z"), Range(-90, 90, known=True))
    found = ranges("(int64[4] x) => (int64[4] y) <int64 n = {360}> { y = Mod (x, n) }")
    assert found["x"].high == 255


def test_what_is_subtracted_from_clipped_values_is_not_negative() -> None:
    found = ranges(
        """(float[4] c, float[4] s) => (float[4] y) <float low = {0}, float high = {640}> {
            a = Sub (c, s) b = Add (c, s) p = Concat <axis = 0> (a, b) y = Clip (p, low, high) }"""
    )
    assert found == dict.fromkeys(("c", "s"), Range(0, 320, known=True))


def test_angles_that_are_added_up_are_within_a_turn_together() -> None:
    text = """(float[1, 3] x) => (float[1, 3] y) <float k = {0.0174532925}, int64 axis = {1}>
        { a = Mul (x, k) c = CumSum (a, axis) y = Cos (c) }"""
    range_ = ranges(text)["x"]
    assert range_.known
    assert (range_.low, range_.high) == pytest.approx((-60, 120))


def test_floats_that_become_indices_are_whole() -> None:
    found = ranges(
        "(float[2] x) => (float[] y) { i = Cast <to = 7> (x) y = Gather (table, i) }", table=(7, 3)
    )
    assert found["x"] == index(6)


@pytest.mark.parametrize(
    ("shape", "factor", "high"),
    [([1, 3, 16, 16], 1.0, 1), ([1, 3, 16, 16], 1 / 255, 255), ([1, 2, 16, 16], 1.0, None)],
)
def test_images_are_not_negative(shape: list[int], factor: float, high: float | None) -> None:
    found = ranges(
        f"""(float{shape} x) => (float[] y) {{
            scaled = Mul (x, factor)
            y = Conv (scaled, w) }}""",
        factor=np.array(factor, np.float32),
        w=(4, shape[1], 3, 3),
    )
    expected = (
        Range(-8, 8, known=False) if high is None else Range(0, high, known=False, picture=True)
    )
    assert found["x"] == expected


@pytest.mark.parametrize(
    ("type_", "is_picture"),
    [
        ("uint8[1, 32, 32, 3]", True),
        ("uint8[1, 1, 64, 64]", True),
        ("uint8[1, 512]", False),
        ("int8[1, 32, 32, 3]", False),
        ("int32[1, 32, 32, 3]", False),
    ],
)
def test_bytes_in_the_shape_of_an_image_are_a_picture(type_: str, is_picture: bool) -> None:
    found = ranges(f"({type_} x) => (float[] y) {{ y = Cast <to = 1> (x) }}")
    assert found["x"].whole
    assert found["x"].picture == is_picture


@pytest.mark.parametrize(
    ("filters", "factor", "high"),
    [
        # Those of a model that takes bytes: their mean deviation is about 60.
        (np.full((4, 3, 3, 3), 1 / 600), 1.0, 255),
        (np.full((4, 3, 3, 3), 1 / 600), 58.0, 1),
        # A mean of 81 pixels.
        (np.full((1, 1, 9, 9), 1 / 81), 1.0, 1),
        (np.concatenate([np.full((3, 3, 3, 3), 1 / 600), np.ones((1, 3, 3, 3))]), 1.0, 255),
        (np.zeros((4, 3, 3, 3)), 1.0, 1),
    ],
)
def test_filters_that_make_little_of_an_image_are_for_bytes(
    filters: np.ndarray, factor: float, high: float
) -> None:
    found = ranges(
        f"""(float[1, {filters.shape[1]}, 16, 16] x) => (float[] y) {{
            scaled = Mul (x, factor)
            y = Conv (scaled, w) }}""",
        factor=np.array(factor, np.float32),
        w=filters.astype(np.float32),
    )
    assert found["x"] == Range(0, high, known=False, picture=True)


@pytest.mark.parametrize(
    ("base", "factor", "highest"), [(2, 1, 15), (2, 2, 7), (10, 1, 4), (0.993, 1, 255), (1e6, 1, 1)]
)
def test_integers_are_exponents_of_which_float16_has_the_powers(
    base: float, factor: int, highest: int
) -> None:
    found = ranges(
        """(int64[3] i) => (float[] y) {
            a = Mul (i, factor)
            e = Cast <to = 1> (a)
            y = Pow (base, e) }""",
        base=np.float32(base),
        factor=np.int64(factor),
    )["i"]
    assert (found.low, found.high) == (0, highest)
    most = math.log(65504) / abs(math.log(base)) / factor
    assert all(far.high <= max(most, 1) for far in found.far)


@pytest.mark.parametrize(
    ("dtype", "nodes", "ordinary", "far"),
    [
        # The received power of a radio, in dBm.
        ("int8", "d = Add (x, sixty) y = Pow (ten, d)", (-128, -56), {(-56, 16), (-128, -68)}),
        ("int32", "d = Add (x, sixty) y = Pow (ten, d)", (-311, -56), {(-56, 199), (-311, -68)}),
        (
            "int32",
            "s = Sub (sixty, x) d = Div (s, twenty) y = Pow (ten, d)",
            (0, 156),
            {(156, 624)},
        ),
        (
            "int8",
            "s = Sub (sixty, x) d = Div (s, twenty) y = Pow (ten, d)",
            (-36, 127),
            {(-128, -36)},
        ),
        (
            "int8",
            "s = Sub (x, sixty) d = Div (s, twenty) y = Pow (ten, d)",
            (-128, 127),
            {(-128, -85)},
        ),
        (
            "int8",
            "d = Div (x, twenty) p = Pow (ten, d) y = ReduceSum (p, one)",
            (-128, 72),
            {(72, 127)},
        ),
        # A sigmoid.
        ("int8", "p = Pow (two, x) s = Add (one, p) y = Div (one, s)", (-128, 15), set()),
    ],
)
def test_exponents_beside_a_constant_have_float16s_on_their_side(
    dtype: str, nodes: str, ordinary: tuple[int, int], far: set[tuple[int, int]]
) -> None:
    numbers = {"ten": 10.0, "sixty": 60.0, "twenty": 20.0, "two": 2.0}
    found = all_of(
        f"({dtype}[1, 4] i) => (y) {{ x = Cast <to = 1> (i) {nodes} }}",
        **{name: np.float32(number) for name, number in numbers.items()},
        one=np.array([1]),
    )["i"]
    assert (found.low, found.high) == ordinary
    beyond = {(values.low, values.high) for values in found.far if values.low < values.high}
    assert {(math.floor(low), math.floor(high)) for low, high in beyond} - {(-36, 156)} == far


def test_integers_that_nothing_bounds_are_bytes() -> None:
    found = ranges("""(int64[3] i, int8[3] j) => (float[] y) {
            a = Cast <to = 1> (i)
            b = Cast <to = 1> (j)
            y = Add (a, b) }""")
    assert found["i"] == Range(0, 255, known=False, whole=True)
    assert found["j"] == Range(-128, 127, known=False, whole=True)


@pytest.mark.parametrize(
    ("nodes", "high"),
    [
        ("f = Cast <to = 1> (i) y = Div (f, thousand)", 1000),
        ("f = Cast <to = 1> (i) h = Mul (f, small) y = Tanh (h)", 4000),
        ("h = Div (i, whole) y = Cast <to = 1> (h)", 1000),
        ("f = Cast <to = 1> (i) c = Sub (f, ten) y = Div (c, thousand)", 1010),
        # Where it is 0, it hides another value.
        (
            "f = Cast <to = 1> (i) d = Div (f, thousand) n = Equal (i, none) y = Where (n, ten, d)",
            1000,
        ),
        # Up to the end of float16, and no fewer than bytes.
        ("f = Cast <to = 1> (i) h = Div (f, thousand) y = Div (h, thousand)", 65504),
        ("f = Cast <to = 1> (i) y = Div (f, ten)", 255),
    ],
)
def test_integers_that_are_scaled_go_up_to_what_is_scaled_to_1(nodes: str, high: int) -> None:
    found = ranges(
        f"""(int32[3] i) => (y) <float ten = {{10}}, float thousand = {{1000}}, float small = {{0.00025}}> {{
        {nodes} }}""",
        whole=np.int32(1000),
        none=np.int32(0),
    )
    assert (found["i"].low, found["i"].high) == (0, high)


def test_counts_of_pictures_go_up_to_what_is_scaled_to_1() -> None:
    text = """(int32[1, 1, 8, 8] x) => (y) <float black = {256}, float white = {3839}> { f = Cast <to = 1> (x)
        c = Sub (f, black) d = Div (c, white) y = Conv (d, w) }"""
    assert ranges(text, w=np.ones((1, 1, 3, 3), np.float32))["x"].high == 4095


@pytest.mark.parametrize(("dividend", "reach"), [("f", 2**19), ("one", 0)])
def test_integers_of_which_a_quotient_is_taken_are_counts(dividend: str, reach: float) -> None:
    found = all_of(
        f"""(int32[1, 1, 9] x) => (float[1, 1, 9] y) <float one = {{1}}> {{ f = Cast <to = 1> (x)
        p = Pad <mode = "reflect"> (f, pads) t = Conv (p, w) y = Div ({dividend}, t) }}""",
        pads=np.array([0, 0, 1, 0, 0, 1]),
        w=np.full((1, 1, 3), 1 / 3, np.float32),
    )
    assert found["x"].reach == reach


def test_bytes_that_are_scaled_stay_bytes() -> None:
    found = ranges("""(uint8[3] i) => (y) <float k = {1000}> {
        f = Cast <to = 1> (i) y = Div (f, k) }""")
    assert found["i"].high == 255


def test_a_number_is_the_one_with_which_it_is_compared() -> None:
    found = ranges("(int64 rate) => (bool[] y) <int64 known = {16000}> { y = Equal (rate, known) }")
    assert found["rate"] == index(16000, 16000)


def test_what_is_divided_by_is_not_near_zero() -> None:
    found = ranges(
        """(float[4] mass, float[4] height, float[4] x) => (float[4] y, float[4] z, float[4] s) {
        h = Mul (height, height) y = Div (mass, h) z = Div (x, x) s = Tanh (x) }"""
    )
    assert found["height"] == Range(0.5, 1.5, known=False)
    assert (found["mass"].low, found["x"].low) == (-8, -8)


@pytest.mark.parametrize(
    ("nodes", "unit"),
    [
        ("m = Div (x, hundred) q = Mul (m, m) d = Div (one, q) e = Sqrt (m)", 100),
        ("d = Div (one, x) c = Greater (x, hundred) e = Cast <to = 1> (c)", 1),
        # Each of a mean has the size of that, if this shows in a stored number.
        ("m = ReduceMean (x) d = Div (many, m) e = Sub (x, m)", 200),
        ("m = ReduceMean (x) q = Mul (m, m) d = Div (many, q) e = Sub (x, m)", 200**0.5),
        ("m = ReduceMean (x) d = Div (x, m) e = Sub (x, m)", 0),
        # Each of squares may be near 0, and what a constant keeps from 0 too.
        ("q = Mul (x, x) m = ReduceMean (q) d = Div (many, m) e = Neg (x)", 0),
        ("m = Max (x, small) d = Div (one, m) e = Sqrt (x)", 0),
        # Other nodes ask for its sign.
        ("d = Div (one, x) c = Greater (x, zero) e = Cast <to = 1> (c)", 0),
        ("d = Div (one, x) e = Abs (x)", 0),
    ],
)
def test_a_divisor_that_is_also_calculated_with_is_not_near_zero(nodes: str, unit: float) -> None:
    range_ = ranges(
        f"""(float[4] x) => (d, e) <float hundred = {{100}}, float many = {{40000}}, float one = {{1}},
        float small = {{0.001}}, float zero = {{0}}> {{ {nodes} }}"""
    )["x"]
    ends = (0.5 * unit, 1.5 * unit) if unit else (-8, 8)
    assert (range_.low, range_.high) == pytest.approx(ends)


def test_integers_that_divide_a_stored_number_are_as_large_as_its_quotient() -> None:
    found = ranges("(int32[4] x) => (y) <float k = {1e6}> { f = Cast <to = 1> (x) y = Div (k, f) }")
    assert (found["x"].low, found["x"].high) == (500, 1500)
    found = ranges("(uint8[4] x) => (y) <float k = {1e6}> { f = Cast <to = 1> (x) y = Div (k, f) }")
    assert (found["x"].low, found["x"].high) == (85, 255)


def test_values_are_around_a_constant_also_of_an_input_that_divides() -> None:
    far = all_of(
        "(float[4] x) => (y, z) <float k = {293.15}, float one = {1}> { y = Sub (x, k) z = Div (one, x) }"
    )["x"].far
    assert [values.centers[0] for values in far if values.centers] == pytest.approx([293.15] * 2)


def test_a_divisor_in_a_branch_may_be_a_constant() -> None:
    found = ranges(
        """(float[4] x, bool c) => (float[4] y) { y = If (c) <
            then_branch = t () => (float[4] u) { k = Constant <value_float = 255.0> () u = Div (x, k) },
            else_branch = e () => (float[4] v) { v = Identity (x) }> }"""
    )
    assert (found["x"].low, found["x"].high) == (-8, 8)


@pytest.mark.parametrize(
    ("nodes", "unit"),
    [
        ("m = Div (x, hundred) d = Mul (m, m) y = Div (one, d)", 100),
        ("m = Mul (x, thousandth) d = Pow (m, two) y = Reciprocal (d)", 1000),
        ("s = Pow (x, two) d = Mul (tenth, s) y = Div (one, d)", 10**0.5),
        ("p = Mul (x, x) m = Div (p, hundred) d = Sqrt (m) y = Div (one, d)", 10),
        ("d = Sqrt (x) y = Div (hundred, d)", 100),
        # The quotient has half of the digits.
        ("d = Mul (x, thousandth) y = Div (hundred, d)", 10**4),
        ("s = Pow (x, minus) y = Div (hundred, s)", 10**-0.5),
        # A number to the power of x has no unit, and none is beyond all floats.
        ("d = Pow (x, tiny) y = Div (hundred, d)", 0),
        ("d = Pow (two, x) y = Div (one, d)", 0),
    ],
)
def test_factors_on_the_way_to_a_divisor_show_its_unit(nodes: str, unit: float) -> None:
    range_ = ranges(
        f"""(float[4] x) => (y) <float hundred = {{100}}, float thousandth = {{0.001}},
        float tenth = {{0.1}}, float two = {{2}}, float one = {{1}}, float minus = {{-2}},
        float tiny = {{0.001}}> {{ {nodes} }}"""
    )["x"]
    ends = (0.5 * unit, 1.5 * unit) if unit else (-8, 8)
    assert (range_.low, range_.high) == pytest.approx(ends)


@pytest.mark.parametrize(
    ("bound", "centers"),
    [
        ("c = Conv (x, w)", {1.5}),
        ("d = Div (x, bytes) c = Conv (d, w)", {600.0}),
        # Nothing is above what clips.
        ("d = Clip (x, zero, one) c = Conv (d, w)", set()),
    ],
)
def test_a_picture_is_on_both_sides_of_a_number_with_which_its_largest_value_is_compared(
    bound: str, centers: set[float]
) -> None:
    limit = max(centers, default=9)
    text = f"""(float[1, 3, 16, 16] x) => (bool[] y, c) <float zero = {{0}}, float one = {{1}},
        float bytes = {{255}}, float limit = {{{limit}}}> {{
            most = ReduceMax <keepdims = 0> (x) y = Greater (most, limit) {bound} }}"""
    far = all_of(text, w=(8, 3, 3, 3))["x"].far
    assert {center for values in far for center in values.centers} == centers


@pytest.mark.parametrize(
    ("nodes", "is_divisor"),
    [
        ("m = ReduceMean (x) d = Add (m, small) y = Div (one, d)", True),
        ("d = Mul (x, x) y = Reciprocal (d)", True),
        ("d = Max (x, small) y = Div (one, d)", True),
        # It is not near -1 only because it is not negative.
        ("d = Add (x, one) y = Div (one, d)", False),
        ("d = Sub (one, x) y = Div (one, d)", False),
        ("e = Exp (x) d = Mul (e, x) y = Div (one, d)", False),
    ],
)
def test_what_keeps_a_divisor_from_zero_is_no_part_of_it(nodes: str, is_divisor: bool) -> None:
    text = f"(float[4] x) => (y) <float small = {{0.001}}, float one = {{1}}> {{ {nodes} }}"
    assert (ranges(text)["x"] == Range(0.5, 1.5, known=False)) == is_divisor


def test_an_invalid_graph_bounds_nothing() -> None:
    made = parsed(
        "(int64[1] i) => (float[] y) { y = Gather (table, i) }", check=False, table=(7, 3)
    )
    del made.graph.node[0].input[0]
    made.graph.node.append(helper.make_node("Mul", ["loop", "i"], ["loop"]))
    made.graph.node.append(helper.make_node("Add", ["i"], ["sum"]))
    made.graph.node.append(helper.make_node("Cast", ["i"], ["c"], to=[1.0]))
    assert ranges_of(made)["i"] == Range(0, 255, known=False, whole=True)


def test_positions_boxes_and_caches_of_fused_operators_are_bounded() -> None:
    found = ranges(
        """(float[1, 4, 8] x, int64[1, 4] position, float[1, 4, 8] k, float[1, 4, 8] v,
        float[1, 1, 6, 8] past, float[1, 1, 3, 8] few, int32[1] mask_lengths, int32 total,
        int32 grown, int32 small, float[1, 20, 4] boxes, float[1, 2, 20] scores, int64[1] most,
        float[1] iou) => (int64[] y, float[1, 1, 10, 8] keys) {
            r = com.microsoft.RotaryEmbedding (x, position, cos, sin)
            a = com.microsoft.GroupQueryAttention (x, k, v, past, past, mask_lengths, total)
            b, keys = com.microsoft.GroupQueryAttention (x, k, v, past, past, mask_lengths, grown)
            c = com.microsoft.GroupQueryAttention (x, k, v, few, few, lengths, small)
            y = NonMaxSuppression (boxes, scores, most, iou) }""",
        cos=(32, 4),
        sin=(32, 4),
    )
    assert found["position"] == index(31)
    # A cache with room for the new part is not extended, unless its result shows that.
    assert (found["mask_lengths"], found["total"]) == (index(5, 0, 5), index(6, 1, 6))
    assert (found["grown"], found["small"]) == (index(10, 1, 10), index(7, 1, 7))
    assert (found["most"], found["iou"]) == (index(20, 1, 20), Range(0, 1, known=True))


def test_a_loop_runs_a_few_rounds_and_passes_on_what_it_gets() -> None:
    found = ranges(
        """(int64 rounds, int64[1] i) => (float[] y) {
            last, y = Loop (rounds, , i) <body = body (int64 round, bool go, int64[1] inside)
                => (bool again, int64[1] next, float[1, 3] row) {
                again = Identity (go)
                row = Gather (table, inside)
                next = Identity (inside) }> }""",
        table=(7, 3),
    )
    assert found == {"rounds": index(8, 1, 8), "i": index(6)}


def spans(range_: Range) -> list[tuple[float, float]]:
    """The ends of what is far, or the first center and its deviation."""
    return [
        (far.centers[0], far.spreads[0]) if far.centers else (far.low, far.high)
        for far in range_.far
    ]


NEIGHBOURS = """(float[1, 32] x) => (float[] y) <int64[1] i = {{0}}, int64[1] j = {{1}}, int64[1] n = {{{}}},
    int64[1] m = {{{}}}> {{ a = Slice (x, i, n, j) b = Slice (x, j, m, j) y = Sub (b, a) }}"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "(int64[4] x) => (int64[4] y) { y = Add (x, x) }",
            [(-1000, 1000), (0.5 - 2**30, 2**30 - 0.5)],
        ),
        ("(uint32[4] x) => (uint32[4] y) { y = Abs (x) }", [(0, 2**31 - 1)]),
        ("(uint8[4] x) => (uint8[4] y) { y = Identity (x) }", []),
        (
            "(int32[4] x) => (float[4] y) { y = Cast <to = 1> (x) }",
            [(-1000, 1000)],
        ),
        # The graph expects larger ones: thousands of thousandths, and of any size.
        (
            """(int32[4] x) => (float[4] y) <float k = {0.001}>
            { c = Cast <to = 1> (x) d = Mul (c, k) y = Exp (d) }""",
            [(-1000, 1000), (-16000, 16000)],
        ),
        # Ticks are counted on, as days and hours, and no radians or degrees.
        (
            """(int32[4] x) => (float[4] y) <float k = {0.0015339808}>
            { c = Cast <to = 1> (x) d = Mul (c, k) y = Sin (d) }""",
            [(-1000, 1000), (204800, 409600), (409600, 819200)],
        ),
        (
            "(float[4] x) => (float[4] y) <float k = {0.0172024238}> { d = Mul (x, k) y = Cos (d) }",
            [(18262.5, 36525), (32752, 65504)],
        ),
        (
            "(float[4] x) => (float[4] y) <float k = {0.2617993878}> { d = Mul (x, k) y = Cos (d) }",
            [(1200, 2400), (4800, 9600), (19200, 38400), (32752, 65504)],
        ),
        (
            """(float[4] x) => (float[4] y) <float k = {30}, float turn = {360}>
            { d = Mul (x, k) y = Mod <fmod = 1> (d, turn) }""",
            [(600, 1200), (2400, 4800), (9600, 19200), (32752, 65504)],
        ),
        # Minutes, also more of them than float16 has.
        (
            """(float[4] x) => (float[4] y) <float day = {1440}>
            { d = Div (x, day) f = Floor (d) m = Mul (f, day) y = Sub (x, m) }""",
            [(32752, 65504), (131008, 576000)],
        ),
        (
            """(float[4] x) => (float[4] y) <float period = {30}>
            { d = Div (x, period) f = Floor (d) y = Sub (d, f) }""",
            [(1500, 3000), (6000, 12000), (24000, 48000), (32752, 65504)],
        ),
        # A Floor that leaves nothing, and several frequencies of hours.
        (
            """(float[4] x) => (float[4] y) <float period = {30}>
            { d = Div (x, period) f = Floor (d) y = Mul (f, period) }""",
            [],
        ),
        (
            """(float[4, 1] x) => (float[4, 2] y) <float[1, 2] k = {0.2617993878, 0.0001}>
            { d = MatMul (x, k) y = Sin (d) }""",
            [(1200, 2400), (4800, 9600), (19200, 38400), (32752, 65504)],
        ),
        (
            """(float[4] x) => (float[4] y) <float k = {0.0174532925}, float two = {2}>
            { d = Mul (x, k) e = Mul (d, two) s = Sin (e) c = Cos (d) y = Mul (s, c) }""",
            [],
        ),
        (
            """(float[4] x) => (float[4] y) <float k = {0.0174532925}, int64 zero = {0}>
            { d = Mul (x, k) e = CumSum (d, zero) y = Sin (e) }""",
            [],
        ),
        ("(int32[4] x) => (float[4] y) { c = Cast <to = 1> (x) y = Cos (c) }", [(-1000, 1000)]),
        (
            "(int32[4] x) => (float[4] y) { c = Cast <to = 1> (x) y = Log (c) }",
            [(0, 2**25)],
        ),
        ("(float[5, 9] t, int32[2] x) => (float[2, 9] y) { y = Gather (t, x) }", [(-5, 4)]),
        # Neighbours in a series, and all less their mean; no columns of a table, and no layer's rows.
        (NEIGHBOURS.format(31, 32), [(1000, 1), (1000, 0.25)]),
        (NEIGHBOURS.format(1, 2), []),
        (
            "(float[1, 32] x) => (float[] y) { m = ReduceMean <axes = [1]> (x) y = Sub (x, m) }",
            [(1000, 1), (1000, 0.25)],
        ),
        (
            "(float[1, 16, 32] x) => (float[] y) { m = ReduceMean <axes = [2]> (x) y = Sub (x, m) }",
            [],
        ),
        (
            "(float[1, 32, 4] x) => (float[] y) { m = ReduceMean <axes = [1]> (x) y = Sub (x, m) }",
            [(1000, 1), (1000, 0.25)],
        ),
        (
            "(float[1, 32, 4] x) => (float[] y) { m = ReduceMin <axes = [1]> (x) y = Sub (x, m) }",
            [(1000, 1), (1000, 0.25)],
        ),
        # Moments, as seconds since 1970.
        (
            "(double[1, 32] x) => (double[] y) { m = ReduceMin <axes = [1]> (x) y = Sub (x, m) }",
            [(1000, 1), (1000, 0.25), (1e9, 10)],
        ),
        # Its median, which a Gather takes; and a logit less the largest.
        (
            """(float[31] x) => (float[] y) <int64[1] k = {16}, int64[1] last = {15}>
            { v, i = TopK (x, k) m = Gather (v, last) y = Sub (x, m) }""",
            [(1000, 1), (1000, 0.25)],
        ),
        (
            "(float[1, 32] x) => (float[] y) { m = ReduceMax <axes = [1]> (x) d = Sub (x, m) y = Exp (d) }",
            [],
        ),
        # Features.
        (
            "(float[1, 32, 9] x) => (float[] y) { m = ReduceMean <axes = [1]> (x) y = Sub (x, m) }",
            [],
        ),
        # One series.
        (
            "(float[1, 1, 32] x) => (float[] y) { m = ReduceMean <axes = [2]> (x) y = Sub (x, m) }",
            [(1000, 1), (1000, 0.25)],
        ),
        # Others, in an order of their own.
        (
            """(float[1, 9] x) => (float[] y) <int64[9] i = {1, 0, 0, 3, 2, 5, 4, 7, 7}>
            { a = Gather <axis = 1> (x, i) y = Sub (x, a) }""",
            [],
        ),
        # A constant that is subtracted, or added.
        (
            "(float[4] x) => (float[4] y) <float k = {300}> { y = Sub (x, k) }",
            [(300, 37.5), (300, 0.3)],
        ),
        ("(float[4] x) => (float[4] y) <float k = {300}> { y = Add (x, k) }", []),
        # No iteration at all.
        (
            """(int64 x, float[2] a) => (float[2] y) <int64 one = {1}> { n = Add (x, one)
            y = Loop (n, , a) <body = b (int64 i, bool g, float[2] v) => (bool h, float[2] w)
            { h = Identity (g) w = Abs (v) }> }""",
            [(-1, 0)],
        ),
        # Words of a table.
        ("(int32[2] x) => (float[2, 9] y) { y = Gather (w, x) }", []),
        # Categories.
        (
            "(int64[1] x) => (bool[3] y) <int64[3] k = {11, 7, 900}> { y = Equal (x, k) }",
            [(-1000, 1000), (11, 0), (1 - 2**31, 2**31 - 1)],
        ),
        # Prices up to the end of float16, and beyond it.
        (
            "(float[1] x) => (bool[3] y) <float[3] k = {100, 50000, 180000}> { y = Less (x, k) }",
            [(100, 0), (65504, 180000)],
        ),
        # Unix time: all around the constant.
        (
            "(int64[4] x) => (float[4] y) <int64 k = {1000000000}> { d = Sub (x, k) y = Cast <to = 1> (d) }",
            [(1e9, 125e6), (1e9, 1e6)],
        ),
        (
            "(float[4, 3] t, int64[2, 3] x) => (float[2, 3] y) { y = GatherElements (t, x) }",
            [(-4, 3)],
        ),
        # A rate that decides: another one with which it is compared, and one beside.
        (
            """(int64 x) => (bool y) <int64 a = {16000}, int64 b = {8000}>
            { c = Equal (x, a) d = Equal (x, b) y = Or (c, d) }""",
            [(8000, 0), (16001, 0)],
        ),
        (
            "(float[3] x) => (float[3] y) <float k = {300}> { y = Sub (x, k) }",
            [(300, 37.5), (300, 0.3)],
        ),
        (
            "(float[3] x) => (bool[3] y) <float k = {-37.5}> { y = Less (x, k) }",
            [(-37.5, 4.6875), (-37.5, 0.5)],
        ),
        ("(float[3] x) => (float[3] y) <float k = {0.5}> { y = Sub (x, k) }", []),
        # Positions in a table, from each of which it is away by something else.
        (
            """(float[1, 2] x) => (float[3, 2] y) <float[3, 2] k = {52, 13, 53, 13, 54, 16}>
            { y = Sub (x, k) }""",
            [(53, np.sqrt(2 / 3))],
        ),
        # A mean and a deviation, as of a table's column.
        (
            """(float[3] x) => (float[3] y) <float[3] m = {1013, 20, 50}, float[3] s = {8, 9, 15}>
            { c = Sub (x, m) y = Div (c, s) }""",
            [],
        ),
        (
            "(float[1, 400] x) => (float[] y) <int64[1] a = {1}> { u = Unsqueeze (x, a) y = Conv (u, w) }",
            [(0, 8000)],
        ),
        ("(float[1, 400] x) => (float[] y) { y = MatMul (x, w) }", []),
        (
            "(float[3] x) => (float[3] y) <float k = {0.0001}> { d = Mul (x, k) y = Exp (d) }",
            [(0, 10000)],
        ),
        # The full scale of integers of 16 bits.
        (
            "(float[3] x) => (float[3] y) <float k = {32768}> { d = Div (x, k) y = Exp (d) }",
            [(0, 4096)],
        ),
    ],
)
def test_values_far_from_the_ordinary_follow_from_the_type_and_the_graph(
    text: str, expected: list[tuple[float, float]]
) -> None:
    stored = {"w": np.ones((2, 1, 9), np.float32)} if "w)" in text else {}
    stored |= {"w": np.ones((5, 9), np.float32)} if "Gather (w" in text else {}
    found = spans(all_of(text, **stored)["x"])
    assert len(found) == len(expected)
    np.testing.assert_allclose(found, np.reshape(expected, (-1, 2)) if expected else found)


def test_only_other_integers_than_known_ones_are_left_open() -> None:
    text = "(int64[3] x) => (bool[3] y) <int64[3] k = {5, 6, 7}> { y = Equal (x, k) }"
    assert all_of(text)["x"].loose
    text = "(float[4, 3] t, int64[2] x) => (float[2, 3] y) { y = Gather (t, x) }"
    assert not all_of(text)["x"].loose


def test_integers_become_floats_by_a_factor_and_an_offset() -> None:
    text = """(int64[4] x) => (float[4] y) <int64 k = {100}, int64 two = {2}>
        { d = Sub (x, k) e = Mul (d, two) y = Cast <to = 1> (e) }"""
    assert all_of(text)["x"].floats == InFloats(2, -200)
    # A difference of two inputs may be small, however large they are.
    text = "(int64[4] x, int64[4] z) => (float[4] y) { d = Sub (x, z) y = Cast <to = 1> (d) }"
    assert all_of(text)["x"].floats == InFloats(2, 0, several=True)


def test_inputs_of_float16_are_not_beyond_it() -> None:
    text = """({0}[4] x) => ({0}[4] y)
        {{ d = Div (x, day) f = Floor (d) m = Mul (f, day) y = Sub (x, m) }}"""
    for dtype, ends in (("float32", [65504, 576000]), ("float16", [65504])):
        found = all_of(text.format(dtype.removesuffix("32")), day=np.array(1440, dtype))["x"]
        assert [far.high for far in found.far] == ends


def test_differences_of_times_of_which_a_logarithm_is_taken_have_all_sizes() -> None:
    text = """({}) => (float[7] y) <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] end = {{9}},
        int64[1] last = {{-1}}> {{ a = Slice (x, one, end) b = Slice ({}, zero, last)
        d = Sub (a, b) c = Cast <to = 1> (d) y = Log (c) }}"""
    for types, other in (("int64[8] x", "x"), ("int64[8] x, int64[8] z", "z")):
        floats = all_of(text.format(types, other))["x"].floats
        assert floats is not None
        assert (floats.several, floats.wide) == (True, True)


def test_a_clip_of_standardized_columns_bounds_none_of_them() -> None:
    text = """(float[1, 2] x) => (float[1, 2] y) <float[2] mean = {{{}}}, float[2] deviation = {{3, 12}},
        float low = {{-4}}, float high = {{4}}> {{
        s = Sub (x, mean) d = Div (s, deviation) y = Clip (d, low, high) }}"""
    found = all_of(text.format("294, 45"))["x"]
    assert not found.known
    assert found.standardized is not None
    assert (found.standardized.centers, found.standardized.spreads) == ((294, 45), (3, 12))
    # With one mean all columns have the limits in common.
    same = all_of(text.format("45, 45"))["x"]
    assert (same.known, same.low, same.high) == (True, 33, 57)


def test_integers_that_are_added_up_end_where_the_sum_does() -> None:
    text = """(int64[1, 8] x, int64[1, 8] z) => (int64[1, 8] y) <int64 axis = {1}>
        { d = Sub (x, z) y = CumSum (d, axis) }"""
    range_ = all_of(text)["x"]
    assert range_.gain == 16
    assert max(high for _, high in spans(range_)) == (2**31 - 1) / 16
    assert (
        all_of("(int64[4, 8] x) => (int64[4] y) { y = ReduceSum <axes = [1]> (x) }")["x"].gain == 8
    )


@pytest.mark.parametrize(
    ("nodes", "ends", "most"),
    [
        # The first byte of an address, and of 16 bits.
        ("i = Div (x, byte4)", (0, 2**31 - 1), 255 * 2**24),
        ("i = Div (x, byte2)", (0, 255 * 2**8), 0),
        # The largest difference, of which each has half.
        ("d = Sub (x, z) i = Div (d, byte4)", (0, 2**30 - 1), 255 * 2**23),
    ],
)
def test_what_a_graph_accepts_beyond_integers_of_32_bits_is_far_from_the_ordinary(
    nodes: str, ends: tuple[float, float], most: float
) -> None:
    text = f"""(int64[4] x, int64[4] z) => (float[] y, int64[] v)
        <int64 byte4 = {{16777216}}, int64 byte2 = {{256}}>
        {{ {nodes} y = Gather (table, i) v = Abs (z) }}"""
    range_ = all_of(text, table=np.zeros((256, 3), np.float32))["x"]
    assert (range_.low, range_.high) == ends
    assert [(far.low, far.high) for far in range_.far] == ([(ends[1], most)] if most else [])
    assert range_.is_firm == (not most)


@pytest.mark.parametrize(
    "nodes",
    [
        "c = GreaterOrEqual (x, half) n = Sub (x, all) y = Where (c, n, x)",
        "c = Less (x, half) n = Add (x, less) y = Where (c, x, n)",
        "c = Greater (x, below) n = Sub (x, all) y = Where (c, n, x)",
    ],
)
def test_integers_whose_upper_half_is_made_negative_have_few_bits(nodes: str) -> None:
    text = f"""(int32[4] x) => (int32[4] y) <int32 half = {{2048}}, int32 below = {{2047}},
        int32 all = {{4096}}, int32 less = {{-4096}}, int32 other = {{3000}}> {{ {nodes} }}"""
    range_ = all_of(text)["x"]
    assert (range_.low, range_.high, range_.is_firm) == (0, 4095, True)
    other = text.replace("(x, half)", "(x, other)").replace("(x, below)", "(x, other)")
    assert not all_of(other)["x"].known


@pytest.mark.parametrize(
    ("nodes", "reach"),
    [
        ("y = Add (x, x)", 0),
        ("y = Mod (x, buckets)", 2**53),
        # Of a clock, and the last bits, which fewer bits have too.
        ("y = Mod (x, k)", 0),
        ("y = Mod (x, bits)", 0),
        # Of a hash of two identifiers; and of minutes.
        ("h = Mul (x, hour) s = Add (h, x) y = Mod (s, buckets)", 2**53),
        ("m = Mul (x, k) y = Mod (m, buckets)", 0),
        ("y = Div (x, bits)", 1024),
        ("y = ReduceMax (x)", 2**53),
        # Of milliseconds and of seconds since 1970.
        ("d = Div (x, ms) y = Mod (d, k)", 2**53),
        ("d = Div (x, hour) y = Mod (d, k)", 24 * 3600),
        # Of the bytes of an address.
        ("d = Div (x, bits) y = Mod (d, bits)", 2**20),
        # Of the digits of a date, and of a telephone number.
        ("d = Div (x, cent) m = Mod (d, cent) e = Mod (x, cent) y = Div (x, myriad)", 10**8),
        ("d = Div (x, buckets) m = Mod (d, buckets) y = Div (x, million)", 10**12),
        # Of the year and the day of a date, and of seconds and milliseconds.
        ("e = Mod (x, cent) y = Div (x, myriad)", 10**8),
        ("e = Mod (x, buckets) y = Div (x, buckets)", 2**53),
        # Of thousands of an amount, as a share of its span.
        ("m = Mul (x, buckets) y = Div (m, hour)", 28.8),
        ("d = Sub (x, hour) y = Abs (d)", 3600),
        ("y = Equal (x, id)", 10**10),
        ("c = Cast <to = 1> (x) d = Mul (c, micro) y = Tanh (d)", 8e6),
        # In another unit.
        ("c = Cast <to = 1> (x) y = Mul (c, micro)", 2**53),
        ("c = Cast <to = 1> (x) y = Identity (c)", 0),
        ("c = Cast <to = 1> (x) y = Exp (c)", 0),
        # More than float32 keeps, as cents of a bank.
        ("c = Cast <to = 11> (x) y = Identity (c)", 2**53),
        ("c = Cast <to = 1> (x) d = Mul (c, micro) y = Log (d)", 1024 * 8e6),
        ("c = Cast <to = 1> (x) y = Log (c)", 2**24),
        ("c = Cast <to = 1> (x) d = Add (c, one) y = Log (d)", 2**24),
        # Of what a sensor of 12 bits has above black, as of a quantity in the same unit.
        (
            "c = Cast <to = 1> (x) b = Sub (c, black) d = Div (b, span) e = Add (d, least) y = Log (e)",
            32000,
        ),
    ],
)
def test_constants_show_how_large_values_are(nodes: str, reach: float) -> None:
    text = f"""(int64[4] x) => (y) <int64 k = {{24}}, int64 hour = {{3600}}, int64 ms = {{86400000}},
        int64 id = {{10000000000}}, int64 bits = {{1024}}, int64 buckets = {{1000}},
        float micro = {{0.000001}}, float one = {{1}}, int64 cent = {{100}}, int64 myriad = {{10000}},
        int64 million = {{1000000}}, float black = {{95}}, float span = {{4000}}, float least = {{0.001}}>
        {{ {nodes} }}"""
    assert all_of(text)["x"].reach == pytest.approx(reach, rel=1e-4)


def test_constants_are_beside_what_they_are_added_to() -> None:
    head = "(float[4] x, float[4] z) => (float[4] y) <float k = {180}, float two = {2}>"
    found = all_of(f"{head} {{ d = Sub (x, z) e = Mul (z, two) f = Add (d, e) y = Add (f, k) }}")
    assert {name: range_.least for name, range_ in found.items()} == {"x": 0.225, "z": 0.225}
    found = all_of(f"{head} {{ g = Less (x, k) y = Mul (z, two) }}")
    assert {range_.least for range_ in found.values()} == {0.0}


def test_constants_that_reach_a_value_with_others_are_beside_it_too() -> None:
    # The centre of a picture, as for a letterbox; its layers may be many.
    layers = " ".join(f"a{i + 1} = Add (a{i}, a{i})" for i in range(1200))
    text = f"""(float[4] x, float[1] size) => (float[4] y, float[1] z)
        <float side = {{640}}, float two = {{2}}> {{
        g = Sqrt (size) d = Sub (side, g) p = Div (d, two) y = Sub (x, p)
        a0 = Exp (size) {layers} z = Add (size, a1200) }}"""
    found = all_of(text)
    assert found["x"].least == 320 / 200
    assert found["size"].least == 0


@pytest.mark.parametrize(
    ("types", "nodes", "expected"),
    [
        (
            "float",
            "y = Sub (x, z)",
            {"x": [(1000, 1), (1000, 0.25)], "z": [(1000, 1), (1000, 0.25)]},
        ),
        # The difference is of tens.
        (
            "float",
            "d = Sub (x, z) y = Div (d, k)",
            {"x": [(5000, 5), (5000, 1.25)], "z": [(5000, 5), (5000, 1.25)]},
        ),
        # It is of ten thousands, beside the largest offset that the format has.
        (
            "float",
            "d = Sub (x, z) e = Div (d, k) f = Div (e, k) g = Div (f, k) y = Div (g, k)",
            {"x": [(32752, 32.752), (32752, 8.188)], "z": [(32752, 32.752), (32752, 8.188)]},
        ),
        # The logarithm of a quotient is a difference.
        (
            "float",
            "q = Div (x, z) y = Log (q)",
            {"x": [(1000, 1), (1000, 0.25)], "z": [(1000, 1), (1000, 0.25)]},
        ),
        ("float", "q = Div (x, z) y = Tanh (q)", {}),
        ("float", "a = Mul (x, k) y = Sub (a, z)", {}),
        ("float", "y = Add (x, z)", {}),
        # A pole, of which no value is near.
        ("float", "s = Add (x, k) d = Div (x, s) y = Mul (d, z)", {}),
        ("float", "s = Add (x, k) l = Log (s) y = Mul (l, z)", {}),
        ("float", "e = Exp (x) y = Sub (e, z)", {}),
        (
            "int32",
            "a = Cast <to = 1> (x) b = Cast <to = 1> (z) y = Sub (a, b)",
            {"x": [(48000, 16)], "z": [(48000, 16)]},
        ),
        # Integers are exact.
        ("int32", "d = Sub (x, z) y = Cast <to = 1> (d)", {}),
        ("uint8", "a = Cast <to = 1> (x) b = Cast <to = 1> (z) y = Sub (a, b)", {}),
    ],
)
def test_two_inputs_whose_difference_counts_have_a_common_offset(
    types: str, nodes: str, expected: dict[str, list[tuple[float, float]]]
) -> None:
    text = f"({types}[4] x, {types}[4] z) => (y) <float k = {{10}}> {{ {nodes} }}"
    offsets = {
        name: near
        for name, range_ in all_of(text).items()
        if (near := spans(replace(range_, far=tuple(far for far in range_.far if far.is_offset))))
    }
    assert offsets == expected


@pytest.mark.parametrize(
    "nodes",
    [
        "m = ReduceMean <axes = [1]> (f) y = Div (f, m)",
        "a = Slice (f, one, nine, one) b = Slice (f, zero, eight, one) y = Div (a, b)",
    ],
)
@pytest.mark.parametrize(
    ("types", "far"), [("float", (1000, 0.25)), ("int32", (48000, 16)), ("uint8", None)]
)
def test_a_series_is_divided_by_its_mean_or_its_neighbours_beside_an_offset(
    types: str, far: tuple[float, float] | None, nodes: str
) -> None:
    numbers = {"zero": [0], "one": [1], "eight": [8], "nine": [9]}
    stored = {name: np.array(value) for name, value in numbers.items()}
    found = all_of(f"({types}[1, 9] x) => (y) {{ f = Cast <to = 1> (x) {nodes} }}", **stored)["x"]
    offsets = spans(replace(found, far=tuple(far for far in found.far if far.is_offset)))
    assert offsets[-1:] == ([far] if far else [])


_PEAKS = "n = Neg (x) p = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (n) y = Equal (n, p)"


@pytest.mark.parametrize(
    ("nodes", "shifted"),
    [
        (_PEAKS, 1),
        ("m = AveragePool <kernel_shape = [2, 2]> (x) y = Greater (m, x)", 1),
        ("m = Max (x, low) y = Less (low, x) z = Less (x, m)", 1),
        # Two maps, and scores.
        (_PEAKS.replace("(n, p)", "(z, p)"), 0),
        (f"{_PEAKS} t = Greater (x, half) v = And (y, t)", 0),
        (f"{_PEAKS} v = Softmax (x)", 0),
    ],
)
def test_floats_that_are_compared_with_their_neighbours_have_an_offset(
    nodes: str, shifted: float
) -> None:
    text = f"(float[1, 8, 8, 16] x, float[1, 8, 8, 16] z) => (y) {{ {nodes} }}"
    found = all_of(text, half=np.float32(0.5), low=np.float32(-900))["x"]
    # Peaks say nothing of what is a mask.
    assert (found.shifted, found.known, found.usual) == (shifted, False, None)
    assert any(far.is_offset for far in found.far) == bool(shifted)


@pytest.mark.parametrize(
    ("nodes", "shifted"),
    [
        ("i = ArgMax <axis = 0> (flat)", 1),
        ("v, i = TopK (flat, k)", 1),
        ("n = ArgMax <axis = 1> (x) f = Cast <to = 1> (n) i = Mul (f, seconds)", 1),
        # The median, classes, and what is chosen by scores.
        ("i, n = TopK (flat, k)", 0),
        ("i = ArgMax <axis = 1> (x)", 0),
        ("s = Softmax (flat) v, i = TopK (flat, k)", 0),
        ("v, n = TopK (row, k) i = Gather (names, n)", 0),
    ],
)
def test_floats_whose_largest_have_a_place_in_a_map_or_a_series_have_an_offset(
    nodes: str, shifted: float
) -> None:
    text = f"""(float[8, 16] x, float[128] row) => (i) {{ flat = Reshape (x, all) {nodes} }}"""
    stored = {"all": np.array([-1]), "k": np.array([3]), "names": np.arange(128.0)}
    found = all_of(text, seconds=np.float32(0.5), **stored)
    assert (found["x"].shifted, found["row"].shifted) == (shifted, 0)


@pytest.mark.parametrize(
    ("constants", "spreads"),
    [([293.15] * 6, [36.64, 0.293]), ([50.1, 47.3, 61.2, 58.8, 44.4, 52.5], [7.65])],
)
def test_values_are_near_one_place_and_not_near_the_means_of_features(
    constants: list[float], spreads: list[float]
) -> None:
    text = "(float[6] x) => (y) { d = Sub (x, k) y = Tanh (d) }"
    far = all_of(text, k=np.array(constants, np.float32))["x"].far
    assert [max(values.spreads) for values in far] == pytest.approx(spreads, rel=1e-2)


@pytest.mark.parametrize(
    ("nodes", "spread"),
    [
        ("a = Mul (d, thousand) y = Div (a, fifty)", 0.05),
        ("a = Div (d, fifty) b = Mul (thousand, a) y = Tanh (b)", 0.05),
        ("a = Mul (d, thousand) b = Tanh (a) y = Div (b, fifty)", 0.001),
    ],
)
def test_values_around_a_constant_vary_by_that_by_which_their_difference_is_divided(
    nodes: str, spread: float
) -> None:
    text = f"(float[6] x) => (y) {{ d = Sub (x, fifty) {nodes} }}"
    far, *_ = all_of(text, fifty=np.float32(50), thousand=np.float32(1000))["x"].far
    assert far.centers == (50,)
    assert far.spreads == pytest.approx((spread,))


def test_standardized_values_are_around_their_means_if_the_format_has_their_deviations() -> None:
    text = """(float[3] x) => (float[3] y)
        <float[3] m = {1013, 20, 50}, float[3] s = {8, 9, 15}, float[3] small = {2, 9, 15}>"""
    range_ = all_of(f"{text} {{ d = Sub (x, m) y = Div (d, s) }}")["x"]
    assert (range_.low, range_.high, range_.least, range_.far) == (-8, 8, 1, ())
    assert range_.standardized is not None
    assert range_.standardized.centers == (1013, 20, 50)
    assert range_.standardized.spreads == (8, 9, 15)
    range_ = all_of(f"{text} {{ d = Sub (x, m) y = Div (d, small) }}")["x"]
    assert range_.standardized is None
    assert [(max(far.centers), min(far.spreads)) for far in range_.far] == [(1013, 2)]


def test_amounts_that_are_subtracted_from_each_other_may_be_of_other_sizes() -> None:
    text = "(float[4] x, float[4] z) => (y) { d = Sub (x, z) m = Max (d, one) y = Log (m) }"
    larger = [far for far in all_of(text, one=np.float32(1))["x"].far if far.is_larger]
    assert max(far.high for far in larger) == 2**17
    assert all(far.high == 64 * far.low for far in larger)


def test_integers_are_not_divided_by_0_and_their_products_have_32_bits() -> None:
    head = "(int32[4] x, int32[4] z) => (int32[4] y)"
    assert ranges(f"{head} {{ y = Div (x, z) }}")["z"].low == 1
    assert ranges(f"{head} {{ y = Div (z, x) }}")["z"].low == 0
    of_product = all_of(f"{head} {{ p = Mul (x, z) y = Mul (p, x) }}")
    assert all(far.high**3 <= 2**31 for range_ in of_product.values() for far in range_.far)


@pytest.mark.parametrize(
    ("nodes", "end"),
    [
        ("k = Mul (x, eight) y = Exp (k)", math.log(65504) / 8),
        ("k = Mul (x, minus) y = Exp (k)", -math.log(65504) / 8),
        ("k = Mul (x, eight) y = Pow (ten, k)", math.log10(65504) / 8),
        ("g = Add (x, one) y = Pow (g, ten)", 65504**0.1 - 1),
        # All are within, or one is beside a smaller end.
        ("y = Exp (x)", 0),
        ("y = Pow (ten, x)", 0),
        ("k = Mul (x, eight) e = Exp (k) f = Exp (x) y = Add (e, f)", math.log(65504) / 8),
        # A pole, and powers that are below 1 behind it.
        ("g = Add (x, small) y = Pow (g, minus)", 0),
        # Powers have all sizes; and of a large one a quotient is small.
        ("y = Pow (x, ten)", 0),
        ("k = Mul (x, eight) e = Exp (k) s = Add (e, one) y = Reciprocal (s)", 0),
        ("k = Mul (x, eight) e = Exp (k) s = Sub (one, e) y = Div (x, s)", 0),
    ],
)
def test_floats_are_within_the_end_of_their_powers_and_larger_ones_far(
    nodes: str, end: float
) -> None:
    range_ = all_of(
        f"""(float[4] x) => (y) <float eight = {{8}}, float minus = {{-8}}, float ten = {{10}},
        float one = {{1}}, float small = {{1e-6}}> {{ {nodes} }}"""
    )["x"]
    assert range_.high == pytest.approx(2 * abs(end) if end else 8)
    beyond = [values for values in range_.far if values.centers or values.is_larger]
    assert [values.low or values.centers[0] for values in beyond] == pytest.approx(
        [end if end > 0 else 2 * end] if end else []
    )


def test_integers_whose_sum_divides_are_not_negative() -> None:
    head = "(int16[4] x, int8[4] z) => (float[4] y) { a = Cast <to = 1> (x) b = Cast <to = 1> (z)"
    for divisor, low in (("Add (a, b)", 0), ("Sub (a, b)", -128), ("Mul (s, s)", -128)):
        found = all_of(f"{head} s = Sub (a, b) d = {divisor} y = Div (s, d) }}")
        assert found["z"].low == low
        assert all((far.low < 0) == (low < 0) for far in found["x"].far if not far.centers)


def test_a_logarithm_is_of_integers_of_all_sizes() -> None:
    head = "(int64[4] x, int64[4] z) => (float[4] y) { d = Sub (x, z) c = Cast <to = 1> (d)"
    for body, wide in (("y = Log (c)", True), ("y = Tanh (c)", False)):
        floats = all_of(f"{head} {body} }}")["x"].floats
        assert floats is not None
        assert floats.wide == wide


def test_what_hides_scores_is_a_mask() -> None:
    scores = "(int64[1, 6] m, float[1, 4] x) => (float[1, 6] y) { s = MatMul (x, w) f = Cast <to = 1> (m)"
    numbers: dict[str, Any] = {
        "w": np.ones((4, 6), np.float32),
        "one": np.float32(1),
        "low": np.float32(-1e4),
        "high": np.float32(1e4),
    }
    mask = Range(0, 1, True, 1, whole=True)
    for nodes, expected in (
        ("h = Sub (one, f) n = Mul (h, low) a = Add (s, n) y = Softmax (a) }", mask),
        ("h = Sub (f, one) n = Mul (h, high) a = Add (s, n) y = Softmax (a) }", mask),
        ("h = Sub (one, f) n = Mul (h, low) a = Add (s, n) y = Tanh (a) }", None),
        ("h = Sub (one, f) n = Mul (h, one) a = Add (s, n) y = Softmax (a) }", None),
    ):
        found = ranges(f"{scores} {nodes}", **numbers)["m"]
        assert found == expected if expected else not found.known


def test_a_factor_is_what_other_values_are_multiplied_with_or_divided_by() -> None:
    head, layer = "(float[1] temperature, float[1, 4] z) => (y)", "h = MatMul (z, w)"
    weights = np.ones((4, 4), np.float32)
    for body, usual in (
        (f"{layer} y = Div (h, temperature)", 1),
        (f"{layer} y = Sub (h, temperature)", None),
        # A quantity of a formula.
        ("y = Div (z, temperature)", None),
    ):
        assert ranges(f"{head} {{ {body} }}", w=weights)["temperature"].usual == usual


def test_offsets_are_common_to_the_ranges_of_inputs_and_within_them() -> None:
    text = """(float[4] x, float[4] z) => (y, v) <float k = {0.001}, float degree = {0.017453293}>
        { d = Sub (x, z) e = Div (d, k) y = Clip (e, low, high) a = Mul (z, degree) v = Sin (a) }"""
    found = all_of(text, low=np.float32(-3), high=np.float32(3))
    offsets = [far for range_ in found.values() for far in range_.far]
    assert len(offsets) == 4
    # At the end of the smallest range.
    assert len({far.centers for far in offsets}) == 2
    for far in offsets:
        assert far.is_offset
        assert 0.9 * far.high < far.centers[0] < far.high
    # Something within limits, and what nothing bounds.
    text = """(float[4] x, float[4] z) => (y, v)
        { d = Sub (x, z) y = Clip (d, low, high) v = Clip (x, low, high) }"""
    found = all_of(text, low=np.float32(-3), high=np.float32(3))
    assert spans(found["x"]) == spans(found["z"]) == [(1.494, 0.0015), (1.4985, 0.000375)]


@pytest.mark.parametrize(
    ("dtype", "sizes", "is_sound"),
    [("int16", "1, 1, 400", True), ("int8", "1, 1, 400", False), ("int16", "1, 8, 40", False)],
)
def test_integers_that_a_filter_reads_are_sound(dtype: str, sizes: str, is_sound: bool) -> None:
    channels = int(sizes.split(", ")[1])
    text = f"({dtype}[{sizes}] x) => (y) {{ f = Cast <to = 1> (x) y = Conv (f, w) }}"
    found = all_of(text, w=np.ones((2, channels, 9), np.float32))["x"]
    loud = [far for far in found.far if far.spreads == (8000.0,)]
    assert [(far.low, far.high) for far in loud] == ([(-32768, 32767)] if is_sound else [])


@pytest.mark.parametrize(
    ("nodes", "is_sound"),
    [
        ("d = Sub (x, 0.5)", True),
        ("d = Sub (x, 273.15)", False),
        ("m = Sub (x, 32) f = Mul (m, 5) d = Div (f, 9)", False),
    ],
)
def test_what_is_beside_a_large_constant_is_no_sound(nodes: str, is_sound: bool) -> None:
    for number in ("0.5", "273.15", "32", "5", "9"):
        nodes = nodes.replace(f", {number})", f", n{number.replace('.', '_')})")
    stored = {f"n{n}".replace(".", "_"): np.float32(n) for n in ("0.5", "273.15", "32", "5", "9")}
    text = f"(float[1, 1, 400] x) => (y) {{ {nodes} y = Conv (d, w) }}"
    found = all_of(text, w=np.ones((1, 1, 9), np.float32), **stored)["x"]
    assert found.sound == is_sound
    assert (found.least > 0.01) == (not is_sound)


def test_pictures_and_sound_have_no_offset() -> None:
    for shape in ("1, 3, 16, 16", "1, 400"):
        text = f"(float[{shape}] x, float[{shape}] z) => (y) {{ y = Sub (x, z) }}"
        assert not any(range_.far for range_ in all_of(text).values())


@pytest.mark.parametrize(
    ("types", "factor", "expected"),
    [
        ("float", np.pi / 180, (-180, 360)),
        ("int64", 2 * np.pi / 24, (-12, 24)),
        # Radians, and times since a start.
        ("float", 1, None),
        ("float", 2 * np.pi / 86400, None),
    ],
)
def test_angles_are_within_a_turn(
    types: str, factor: float, expected: tuple[float, float] | None
) -> None:
    text = f"({types}[4] x) => (y) {{ c = Cast <to = 1> (x) a = Mul (c, factor) y = Sin (a) }}"
    range_ = all_of(text, factor=np.float32(factor))["x"]
    assert range_.known == (expected is not None)
    if expected is not None:
        assert (range_.low, range_.high) == pytest.approx(expected, rel=0.15)
