from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.graph.dtypes import numpy_dtype
from hatch_epcontext.graph.facts import Range, TensorFacts
from hatch_epcontext.worker.advice import warning
from hatch_epcontext.worker.candidates import candidate
from hatch_epcontext.worker.comparison.runs import Reference, sides, values_of
from hatch_epcontext.worker.covered import describe_values
from hatch_epcontext.worker.results import AgreementStatus
from tests.models import parsed
from tests.worker.test_reference import BRANCHES, check, referred

PRODUCT = """(float[1, 16] volts, float[1, 16] amps) => (float[1, 16] watts, bool[1, 16] y)
    <float limit = {1500}>
    { watts = Mul (volts, amps) y = Greater (watts, limit) }"""

QUOTIENT = """(float[1] weight, float[1] height) => (int64[1] y) <float m = {100}>
    { metres = Div (height, m) square = Mul (metres, metres) bmi = Div (weight, square)
      column = Unsqueeze (bmi, one) is_above = GreaterOrEqual (column, limits) n = Cast <to = 7> (is_above)
      y = ReduceSum <keepdims = 0> (n, one) }"""

DEVIATION = """(float[2, 60] x) => (bool[2, 1] y) <float least = {0.01}, float limit = {3}>
    { mean = ReduceMean <axes = [1]> (x) centered = Sub (x, mean) squares = Mul (centered, centered)
      variance = ReduceMean <axes = [1]> (squares) bounded = Max (variance, least) deviation = Sqrt (bounded)
      last = Slice (centered, n59, n60, one) z = Div (last, deviation) size = Abs (z)
      y = Greater (size, limit) }"""

GAPS = """(int64[1, 12] seconds) => (int32[1, 11] y) <int64 half_hour = {1800}, int64 axis = {1}>
    { after = Slice (seconds, one, twelve, one) before = Slice (seconds, zero, eleven, one)
      gap = Sub (after, before) is_long = Greater (gap, half_hour) n = Cast <to = 6> (is_long)
      y = CumSum (n, axis) }"""

SUM = """(int32[1, 24] steps) => (int64[1] y) <int32 goal = {10000}, int64 axis = {1}>
    { total = CumSum (steps, axis) is_below = Less (total, goal) n = Cast <to = 7> (is_below)
      y = ReduceSum <keepdims = 0> (n, one) }"""

LEVEL = """(float[1, 24] rain) => (float[1] y) <float d = {1000}>
    { sum = ReduceSum <keepdims = 0> (rain, one) size = Abs (sum) q = Div (size, d) y = Floor (q) }"""

ARGMAX = """(float[1, 4] load) => (int64[1] y) <float limit = {500}>
    { sum = ReduceSum <keepdims = 1> (load, one) rest = Sub (limit, sum) both = Concat <axis = 1> (rest, sum)
      y = ArgMax <axis = 1, keepdims = 0> (both) }"""

DEBOUNCED = """(float[1, 1] x, float[1, 1] count) => (float[1, 1] count_out, bool[1, 1] y)
    <float limit = {50}, float step = {1}, float most = {4.5}>
    { is_high = Greater (x, limit) n = Cast <to = 1> (is_high) more = Add (count, step)
      count_out = Mul (more, n) y = Greater (count_out, most) }"""

PEAKS = """(int16[1, 3, 100] counts) => (int32[1, 1] y) <float limit = {2500}, int32 none = {0}>
    { x = Cast <to = 1> (counts) squares = Mul (x, x) sums = ReduceSum <keepdims = 1> (squares, one)
      size = Sqrt (sums) mean = AveragePool <kernel_shape = [5], strides = [1]> (size)
      is_high = Greater (mean, limit) n = Cast <to = 6> (is_high)
      after = Slice (n, one, n96, two) before = Slice (n, zero, n95, two) change = Sub (after, before)
      rise = Max (change, none) y = ReduceSum <keepdims = 0> (rise, two) }"""

WINDOW = """(float[1, 64] x) => (bool[1] y) <float low = {500}, float high = {520}>
    { squares = Mul (x, x) mean = ReduceMean <axes = [1], keepdims = 0> (squares) size = Sqrt (mean)
      is_above = Greater (size, low) is_below = Less (size, high) y = And (is_above, is_below) }"""

EQUAL = """(int64[1, 4] parts) => (bool[1] y) <int64 wanted = {1234}>
    { sum = ReduceSum <keepdims = 0> (parts, one) y = Equal (sum, wanted) }"""

FENCE = """(float[1, 2] position) => (bool[1, 1] y) <float radius = {0.5}>
    { away = Sub (position, center) square = ReduceSumSquare <axes = [1]> (away) distance = Sqrt (square)
      y = Less (distance, radius) }"""

SCORE = """(int32[2, 5] vitals) => (bool[2] y) <int64 least = {7}, int64 highest = {3}> {
    column = Unsqueeze (vitals, two) is_above = GreaterOrEqual (column, limits) n = Cast <to = 7> (is_above)
    interval = ReduceSum <keepdims = 0> (n, two) points = Abs (interval) away = Sub (points, two)
    each = Abs (away) sum = ReduceSum <keepdims = 0> (each, one)
    most = ReduceMax <axes = [1], keepdims = 0> (each)
    many = GreaterOrEqual (sum, least) one_high = Greater (most, one64) y = Or (many, one_high) }"""

NEAREST = """(int32[6] diameter, int32[6] weight) => (bool[6] y) <float most = {16}> {
    d = Cast <to = 1> (diameter) w = Cast <to = 1> (weight) dc = Unsqueeze (d, one) wc = Unsqueeze (w, one)
    both = Concat <axis = 1> (dc, wc) each = Unsqueeze (both, one) away = Sub (each, coins)
    scaled = Div (away, deviations) sum = ReduceSumSquare <axes = [2], keepdims = 0> (scaled)
    least = ReduceMin <axes = [1], keepdims = 0> (sum) y = Less (least, most) }"""

NAMED = {"zero": 0, "one": 1, "two": 2, "eleven": 11, "twelve": 12}
NUMBERS = NAMED | {f"n{number}": number for number in (59, 60, 95, 96)}


def made_of(text: str) -> onnx.ModelProto:
    """The model ``text`` with the numbers that it names."""
    stored: dict[str, Any] = {
        name: np.array([n], np.int64) for name, n in NUMBERS.items() if f" {name}" in text
    }
    if "limits" in text:
        stored["limits"] = np.array([[18.5, 25, 30]], np.float32)
    if "vitals" in text:
        stored["limits"] = np.add([[9, 92, 91, 41, 351]], [[0], [12], [20], [40]], dtype=np.int32).T
        stored["one64"] = np.array(1, np.int64)
    if "coins" in text:
        stored["coins"] = np.array([[[16250, 2300], [21250, 3920], [25750, 8500]]], np.float32)
        stored["deviations"] = np.array([120, 90], np.float32)
    if "center" in text:
        stored["center"] = np.array([[48.1, 11.5]], np.float32)
    return parsed(text, **stored)


def looked_for(expected: Reference) -> list[str]:
    """The names of the runs on the target that were looked for."""
    return [run.name for run in expected.runs if run.on_target and run.changes]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(PRODUCT, id="product"),
        pytest.param(QUOTIENT, id="quotient"),
        pytest.param(DEVIATION, id="deviation"),
        pytest.param(GAPS, id="gaps"),
        pytest.param(SUM, id="sum"),
        pytest.param(LEVEL, id="floor"),
        pytest.param(ARGMAX, id="argmax"),
        pytest.param(DEBOUNCED, id="debounced"),
        pytest.param(PEAKS, id="peaks"),
        pytest.param(WINDOW, id="window"),
        pytest.param(EQUAL, id="equal"),
        pytest.param(FENCE, id="fence"),
        pytest.param(SCORE, id="score"),
        pytest.param(NEAREST, id="nearest"),
    ],
)
def test_an_output_that_is_always_the_same_is_compared_where_it_changes(
    text: str, tmp_path: Path
) -> None:
    _, expected = referred(made_of(text), tmp_path)
    assert not any(facts.inconclusive for facts in expected.facts.outputs.values())
    ordinary = [run for run in expected.runs if not run.far]
    assert len({number for array in values_of("y", ordinary) for number in array.ravel()}) == 1
    # One sample, which is one too for other outputs that change in it.
    assert len(looked_for(expected)) == 1
    assert all(not run.usual for run in expected.runs if run.changes)


def test_no_threshold_is_so_near_that_rounding_decides(tmp_path: Path) -> None:
    made = parsed("""(float[1, 8] a, float[1, 8] b) => (bool[1, 8] y) <float limit = {1500}>
        { product = Mul (a, b) y = Greater (product, limit) }""")
    _, expected = referred(made, tmp_path)
    runs = [run for run in expected.runs if run.changes]
    assert len(runs) == 3
    for run in runs:
        products = np.multiply(run.feeds["a"], run.feeds["b"], dtype=np.float64)
        assert np.abs(products / 1500 - 1).min() > 2**-8
        # No farther from the ordinary than is needed.
        assert products.max() < 20 * 1500


def test_a_difference_there_is_a_warning(tmp_path: Path) -> None:
    made = made_of(PRODUCT)
    _, expected = referred(made, tmp_path)
    wrong = made_of(PRODUCT.replace("1500", "1000000"))
    compared = check(wrong, expected, tmp_path)
    assert {agreement.status for agreement in compared.agreements} == {AgreementStatus.AGREES}
    (difference,) = compared.unusual
    assert difference.run.name == "values that change y"
    text = warning(difference, describe_values(difference.run, compared.agreed))
    assert "'amps'" in text
    assert "may give wrong answers: of 'y'" in text


def test_nothing_is_looked_for_where_outputs_change(tmp_path: Path) -> None:
    _, expected = referred(made_of(PRODUCT.replace("1500", "1")), tmp_path)
    assert not any(run.changes for run in expected.runs)


def test_what_is_looked_for_is_inside_the_ranges_of_the_app(tmp_path: Path) -> None:
    ranges = {"volts": (0.0, 12.0), "amps": (0.0, 130.0)}
    table = ValidateTable(ranges=ranges)
    _, expected = referred(made_of(PRODUCT), tmp_path, validate=table)
    assert expected.facts.of("y").inconclusive == ""
    for name, (low, high) in ranges.items():
        arrays = [run.feeds[name] for run in expected.runs]
        assert low <= min(array.min() for array in arrays)
        assert max(array.max() for array in arrays) <= high
    table = replace(table, ranges={"volts": (0.0, 12.0), "amps": (0.0, 120.0)})
    _, expected = referred(made_of(PRODUCT), tmp_path, validate=table)
    reason = "the CPU's value is False everywhere, for all inputs"
    assert expected.facts.of("y").inconclusive == reason


def test_a_branch_that_no_other_sample_takes_is_run(tmp_path: Path) -> None:
    made = parsed(f"""(float[4] x, float[4] by) => (float[4] y) <float limit = {{2000}}> {{
        product = Mul (x, by) mean = ReduceMean <keepdims = 0> (product) c = Greater (mean, limit)
        y = If (c) {BRANCHES} }}""")
    made.graph.node[-1].name = "n"
    _, expected = referred(made, tmp_path)
    assert expected.facts.of("y").inconclusive == ""
    on_target = [run for run in expected.runs if run.on_target]
    assert {side for run in on_target for side in sides(run, ["c"])} == {("c", True), ("c", False)}
    assert looked_for(expected) == ["values that change c"]


@pytest.mark.parametrize(
    ("dtype", "range_"),
    [
        ("float32", Range(0.0, 1.0, True)),
        ("int64", Range(3.0, 9.0, True, whole=True)),
        ("bool", Range(0.0, 1.0, True)),
        ("float16", Range(-8.0, 8.0, False)),
        ("uint8", Range(0.0, 255.0, False, whole=True)),
        ("int16", Range(0.0, 255.0, False, whole=True)),
        ("int32", Range(1.0, 7.0, True, usual=7.0, whole=True)),
    ],
)
def test_candidates_are_inside_of_what_type_and_graph_allow(dtype: str, range_: Range) -> None:
    facts = TensorFacts("x", dtype, (2, 5))
    arrays = [
        candidate(facts, range_, 3, number / 10, np.random.default_rng(number))
        for number in range(200)
    ]
    assert {(array.dtype, array.shape) for array in arrays} == {(numpy_dtype(dtype), (3, 2, 5))}
    lowest = min(float(array.min()) for array in arrays)
    highest = max(float(array.max()) for array in arrays)
    if range_.known:
        assert (lowest, highest) == (range_.low, range_.high)
    else:
        assert highest > 100
        assert (lowest < 0) == (dtype in ("float16", "int16"))
