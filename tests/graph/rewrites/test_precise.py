"""What float16 loses is computed otherwise: the same on the CPU, and right on an NPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from hatch_epcontext.graph.number_format import ALWAYS, CORRECTIONS, RewriteName
from hatch_epcontext.graph.rewrites.precise import PRECISE, applicable
from hatch_epcontext.graph.rewriting import apply
from tests.conftest import needs_qnn, newer_runtime
from tests.graph.rewrites.equal import operators, rewritten, session
from tests.models import parsed
from tests.worker.actions.test_compile import X_ELITE, target

Floats = NDArray[np.float32]

NAMES = [*ALWAYS, *itertools.chain(*CORRECTIONS)]
LEVELS = (1e-6, 1e-4, 1e-2, 1.0, 30.0, 1e3, 6e4)


def samples(shape: Sequence[int]) -> Iterator[Floats]:
    """Inputs from zeros to the largest of float16."""
    yield np.zeros(shape, np.float32)
    yield np.full(shape, -0.0, np.float32)
    rng = np.random.default_rng(0)
    for level in LEVELS:
        noise = rng.uniform(-1, 1, shape) * level
        yield noise.astype(np.float32)
        yield np.full(shape, -level, np.float32)
        yield np.where(rng.random(shape) < 0.1, noise, 0).astype(np.float32)
    yield (rng.uniform(-1, 1, shape) * np.logspace(-6, 4.8, shape[-1])).astype(np.float32)


def run(model: onnx.ModelProto) -> list[Floats]:
    """The first output for each sample, on the CPU, of the nodes as they are."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options)
    inputs = session.get_inputs()
    # The second input is not the first one again.
    given = zip(
        *([np.roll(a, i) / (i + 1) for a in samples(each.shape)] for i, each in enumerate(inputs)),
        strict=True,
    )
    names = [each.name for each in inputs]
    return [session.run(None, dict(zip(names, arrays, strict=True)))[0] for arrays in given]


def decibels(wanted: Floats, found: Floats) -> float:
    """How far the noise of ``found`` is below ``wanted``; infinite values must be equal."""
    infinite = ~np.isfinite(wanted)
    np.testing.assert_array_equal(found[infinite], wanted[infinite])
    exact, other = (np.where(infinite, 0, each).astype(np.float64) for each in (wanted, found))
    noise = np.sum((exact - other) ** 2)
    return float(10 * np.log10(np.sum(exact**2) / noise)) if noise else np.inf


def mended(
    model: onnx.ModelProto,
    name: RewriteName,
    least: float = 100,
    before: Sequence[RewriteName] = (),
) -> list[str]:
    """The operators after the rewrite ``name``, which has done all that it can, and loses nothing.

    ``least``: the decibels that each sample has at least. ``before``: rewrites that came before it.
    """
    after = onnx.ModelProto.FromString(model.SerializeToString())
    assert (*before, name)[0] in applicable(model)
    assert correct(after, (*before, name)) == (*before, name)
    onnx.checker.check_model(after, full_check=True)
    for wanted, found in zip(run(model), run(after), strict=True):
        assert found.shape == wanted.shape
        assert decibels(wanted, found) >= least
    assert untouched(after, name)
    return operators(after)


def correct(model: onnx.ModelProto, names: Sequence[RewriteName]) -> tuple[str, ...]:
    return apply(model, [PRECISE[name] for name in names], None, {}).names


def untouched(model: onnx.ModelProto, name: RewriteName) -> bool:
    after = onnx.ModelProto.FromString(model.SerializeToString())
    return correct(after, [name]) == () and after == model


def of(
    body: str, stored: str = "", opset: int = 17, given: str = "float[3, 8] x"
) -> onnx.ModelProto:
    """A model of the nodes of ``body``, which make ``y``; with the shapes that onnx infers."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]>'
        f"test ({given}) => (float[] y) <{stored}> {{ {body} }}"
    )
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize(
    ("body", "stored", "expected"),
    [
        ("y = Pow(x, e)", "float e = {2}", ["Mul"]),
        ("y = Pow(x, e)", "float[1, 1] e = {2}", ["Mul"]),
        ("e = Cast<to = 1>(two) y = Pow(x, e)", "int64 two = {2}", ["Mul"]),
        ("positive = Abs(x) y = Pow(positive, e)", "float e = {0.5}", ["Abs", "Sqrt"]),
    ],
)
def test_a_square_is_a_product_and_the_power_of_a_half_a_root(
    body: str, stored: str, expected: list[str]
) -> None:
    assert mended(of(body, stored), "square") == expected


@pytest.mark.parametrize(
    ("body", "base", "expected"),
    [
        # Float16 has 2 and a half, but not 0.993.
        ("y = Pow(b, x)", 2, ["Max", "Pow"]),
        ("y = Pow(b, x)", 0.5, ["Min", "Pow"]),
        ("y = Pow(b, x)", 0.993, ["Mul", "Max", "Exp"]),
        ("i = Cast<to = 7>(x) y = Pow(b, i)", 1.02, ["Cast", "Cast", "Mul", "Max", "Exp"]),
    ],
)
def test_a_power_of_a_number_ends_where_it_is_nothing(
    body: str, base: float, expected: list[str]
) -> None:
    model = of(body, f"float b = {{{base}}}")
    after = onnx.ModelProto.FromString(model.SerializeToString())
    assert correct(after, ["floor"]) == ("floor",)
    for wanted, found in zip(run(model), run(after), strict=True):
        np.testing.assert_allclose(found, wanted, 1e-4, atol=1e-34)
    assert untouched(after, "floor")
    assert operators(after) == expected


SUM = "total = ReduceSum{attributes}({inputs}) y = {use}"


@pytest.mark.parametrize(
    ("opset", "attributes", "inputs", "use", "factor"),
    [
        (17, "", "x, axes", "Mul(total, n)", 1 / 8),
        (18, "<keepdims = 0>", "x, axes", "Mul(n, total)", 1 / 8),
        (13, "<keepdims = 0>", "x", "Div(total, n)", 24),
        (12, "<axes = [0, 1], keepdims = 1>", "x", "Mul(total, n)", 1 / 24),
        (11, "<axes = [-2], keepdims = 0>", "x", "Div(total, n)", 3),
        (17, "<noop_with_empty_axes = 1>", "x, axes", "Div(total, n)", 8),
    ],
)
def test_a_sum_divided_by_its_length_is_a_mean(
    opset: int, attributes: str, inputs: str, use: str, factor: float
) -> None:
    stored = f"int64[1] axes = {{-1}}, float n = {{{factor:.9f}}}"
    body = SUM.format(attributes=attributes, inputs=inputs, use=use)
    assert mended(of(body, stored, opset), "mean") == ["ReduceMean"]


def test_a_sum_that_is_an_output_stays() -> None:
    model = of("total = ReduceSum(x) y = Div(total, n)", "float n = {24}")
    model.graph.output.extend(each for each in model.graph.value_info if each.name == "total")
    assert untouched(model, "mean")


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ("<min = -1.0, max = 2.0>", ["Max", "Min"]),
        ("<min = 0.0>", ["Max"]),
        ("<max = 6.0>", ["Min"]),
        ("<max = 3.4028234663852886e38>", ["Identity"]),
        ("", ["Identity"]),
    ],
)
def test_bounds_that_are_attributes_become_inputs(attributes: str, expected: list[str]) -> None:
    model = of(f"y = Clip{attributes}(x)", opset=10)
    assert mended(model, "clip-inputs", np.inf) == expected


WEIGHTS = (
    "float[8, 8] w = {"
    + ", ".join(f"{i % 9 - 4}" for i in range(64))
    + "}, float[8] bias = {1, 2, 3, 4, 5, 6, 7, 8}"
)


@pytest.mark.parametrize("activation", ["Sigmoid", "Tanh"])
@pytest.mark.parametrize(
    "before",
    [
        "a = MatMul(x, w)",
        "a = Gemm(x, w, bias)",
        "p = MatMul(x, w) a = Add(p, bias)",
        "a = Add(x, x)",
        "p = MatMul(x, w) q = Sub(bias, p) r = Mul(bias, q) s = Unsqueeze(r, axis) a = Slice(s, axis, end)",
        "p = MatMul(x, w) q, a = Split<axis = 1>(p)",
    ],
)
def test_a_number_keeps_an_activation_apart_from_what_is_before_it(
    before: str, activation: str
) -> None:
    stored = f"{WEIGHTS}, int64[1] axis = {{0}}, int64[1] end = {{9}}"
    model = of(f"{before} y = {activation}(a)", stored)
    found = mended(model, "unfuse-activation", np.inf)
    assert found == [*operators(model)[:-1], "Max", activation]


PAIR = "float[3, 8] x, float[3, 8] z"
STORED = "float two = {2}, float one = {1}, float least = {1e-10}, float[1] below = {-1}"

SQUARES = "a = Mul(x, x) b = Pow(z, two) power = Add(a, b)"
LOGARITHMS = [
    f"{SQUARES} c = Max(least, power) y = Log(c)",
    f"{SQUARES} r = Sqrt(power) s = Pow(r, two) c = Max(s, least) y = Log(c)",
    f"{SQUARES} bank = MatMul(power, bands) c = Max(bank, least) y = Log(c)",
    f"{SQUARES} c = Clip(power, least) y = Log(c)",
]
BANDS = "float[8, 2] bands = {" + ", ".join(f"{i % 3}" for i in range(16)) + "}"


@pytest.mark.parametrize("body", LOGARITHMS)
def test_a_logarithm_of_a_power_is_that_of_a_scaled_root(body: str) -> None:
    found = mended(of(body, f"{STORED}, {BANDS}", given=PAIR), "log-power")
    assert found[-3:] == ["Max", "Log", "Mul"]


@pytest.mark.parametrize("limited", ["c = Max(bank, least)", "c = Add(bank, least)"])
@pytest.mark.parametrize("power", [SQUARES, "power = Mul(x, x) unused = Add(z, z)"])
def test_powers_are_turned_before_their_filters(power: str, limited: str) -> None:
    bands = "float[3, 2] bands = {1, 0, 2, 0, 1, 1}"
    turned = "turned = Transpose<perm = [1, 0]>(power) bank = MatMul(turned, bands)"
    body = f"{power} {turned} {limited} y = Log(c)"
    found = mended(of(body, f"{STORED}, {bands}", given=PAIR), "log-power")
    assert found[-2:] == ["Log", "Mul"]
    assert found.count("Transpose") == (2 if power == SQUARES else 1)


def test_squares_that_are_broadcast_are_not_turned() -> None:
    body = f"""{SQUARES} turned = Transpose<perm = [1, 0]>(power) bank = MatMul(turned, bands)
        c = Max(bank, least) y = Log(c)"""
    stored = f"{STORED}, float[3, 2] bands = {{1, 0, 2, 0, 1, 1}}"
    model = of(body, stored, given="float[3, 8] x, float[8] z")
    assert correct(model, ("log-power",)) == ()


def test_filters_of_a_power_may_come_first() -> None:
    body = f"{SQUARES} bank = MatMul(bands, power) c = Max(bank, least) y = Log(c)"
    bands = "float[2, 3] bands = {1, 0, 2, 0, 1, 1}"
    found = mended(of(body, f"{STORED}, {bands}", given=PAIR), "log-power")
    assert found[-4:] == ["Mul", "Max", "Log", "Mul"]


@pytest.mark.parametrize(
    ("name", "body", "end"),
    [
        ("log-power", "p = Mul(u, v) y = Log(p)", ["Add", "Log", "Add"]),
        ("scaled-square", "p = Mul(u, v) y = Sqrt(p)", ["Mul", "Sqrt", "Mul"]),
        ("scaled-square", f"{SQUARES} y = Sqrt(power)", ["Add", "Sqrt", "Mul"]),
        ("scaled-square", f"{SQUARES} m = Add(power, one) y = Sqrt(m)", ["Add", "Sqrt", "Mul"]),
        ("log-power", f"{SQUARES} m = Add(power, least) y = Log(m)", ["Mul", "Log", "Mul"]),
    ],
)
def test_a_root_or_a_logarithm_of_two_values_is_of_each_or_of_scaled_ones(
    name: RewriteName, body: str, end: list[str]
) -> None:
    if body.startswith("p"):
        body = f"a = Abs(x) b = Abs(z) u = Add(a, two) v = Add(b, two) {body}"
    found = mended(of(body, STORED, given=PAIR), name)
    assert found[-len(end) :] == end


@pytest.mark.parametrize(("name", "operator"), [("log-power", "Log"), ("scaled-square", "Sqrt")])
def test_a_product_that_is_negative_or_zero_has_no_other_result(
    name: RewriteName, operator: str
) -> None:
    before = of(f"p = Mul(x, z) y = {operator}(p)", given=PAIR)
    after = onnx.ModelProto.FromString(before.SerializeToString())
    assert correct(after, [name]) == (name,)
    x = np.resize(np.array([2, -2, 0], np.float32), (3, 8))
    given = {"x": x, "z": np.ascontiguousarray(x[:, ::-1])}
    (wanted,), (found,) = (session(model).run(None, given) for model in (before, after))
    assert np.isnan(wanted).any()
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


SMALL_NUMBERS = [
    "more = Add(x, least) y = Log(more)",
    "square = Mul(x, x) more = Add(least, square) y = Log(more)",
    "square = Pow(x, two) more = Max(square, least) y = Log(more)",
    "a = Abs(x) more = Clip(a, least) y = Log(more)",
]


@pytest.mark.parametrize("body", SMALL_NUMBERS)
def test_a_logarithm_of_a_small_number_and_more_is_of_scaled_values(body: str) -> None:
    assert mended(of(body, STORED), "log-floor")[-2:] == ["Add", "Sub"]


@pytest.mark.parametrize("more", ["more = Add(level, least)", "more = Max(level, least)", ""])
@pytest.mark.parametrize(
    "level",
    [
        "level = ReduceMean<axes = [-1]>(square)",
        "level = ReduceSum(square)",
        # Of all channels of sound.
        "m = ReduceMean<axes = [1]>(square) level = ReduceSum(m)",
        "m = ReduceMean<axes = [0], keepdims = 0>(square) level = ReduceMean<axes = [0]>(m)",
        "m = ReduceSum(square, zero) level = ReduceMean<axes = [-1], keepdims = 0>(m)",
    ],
)
def test_the_logarithm_of_a_level_is_that_of_its_scaled_root(level: str, more: str) -> None:
    value = "more" if more else "level"
    body = f"square = Mul(x, x) {level} {more} y = Log({value})"
    stored = f"{STORED}, int64[1] zero = {{0}}"
    assert mended(of(body, stored), "log-power")[-2:] == ["Log", "Mul"]


VARIANCES = [
    """square = Mul(x, x) a = ReduceMean<axes = [-1]>(square) m = ReduceMean<axes = [-1]>(x)
        b = Mul(m, m) y = Sub(a, b)""",
    """square = Pow(x, two) a = ReduceMean<axes = [1], keepdims = 0>(square)
        m = ReduceMean<axes = [-1], keepdims = 0>(x) b = Pow(m, two) y = Sub(a, b)""",
]

COVARIANCE = """product = Mul(x, z) a = ReduceMean<axes = [-1]>(product) m = ReduceMean<axes = [-1]>(x)
    k = ReduceMean<axes = [-1]>(z) b = Mul(k, m) y = Sub(a, b)"""


@pytest.mark.parametrize("body", VARIANCES)
def test_a_variance_is_that_of_differences(body: str) -> None:
    found = mended(of(body, STORED), "variance")
    assert found.index("Sub") < len(found) - 1


def test_a_covariance_is_that_of_differences() -> None:
    found = mended(of(COVARIANCE, STORED, given=PAIR), "variance")
    assert found[-4:] == ["Sub", "Sub", "Mul", "ReduceMean"]


NORM = """square = Pow(x, two) mean = ReduceMean<axes = [-1]>(square) higher = Add(mean, least)
    root = Sqrt(higher) y = Div(x, root)"""


NORMS = [
    NORM,
    NORM.replace("[-1]", "[0], keepdims = 0"),
    "square = Mul(x, x) total = ReduceSum(square) root = Sqrt(total) y = Div(x, root)",
    "root = ReduceL2<axes = [-1]>(x) y = Div(x, root)",
    "y = ReduceL2<axes = [0], keepdims = 0>(x)",
]


@pytest.mark.parametrize("body", NORMS)
def test_a_norm_is_that_of_scaled_values(body: str) -> None:
    assert "ReduceMax" in mended(of(body, STORED), "scaled-square")


NORMALIZED_POWER = "p = Pow(x, four) m = ReduceMean<axes = [-1]>(p) y = Pow(m, quarter)"
EXPONENTS = "float four = {4}, float quarter = {0.25}, float ten = {10}, float part = {0.625}"


@pytest.mark.parametrize(
    "body",
    [
        NORMALIZED_POWER,
        NORMALIZED_POWER.replace("[-1]", "[0], keepdims = 0"),
        "q = Mul(x, x) p = Mul(q, q) m = ReduceSum(p) y = Pow(m, quarter)",
        "a = Abs(x) p = Pow(a, part) s = ReduceSum(p) n = Div(s, ten) y = Pow(n, two)",
        "p = Pow(x, four) s = ReduceMean(p) n = Mul(ten, s) m = Add(n, one) y = Sqrt(m)",
        "p = Mul(x, x) m = ReduceMean(p) e = Add(m, one) y = Pow(e, minus)",
        """u = Unsqueeze(x, first) p = Pow(u, four) a = AveragePool<kernel_shape = [3]>(p)
        m = ReduceMean<axes = [2]>(a) y = Pow(m, quarter)""",
        "a = Mul(x, x) b = Mul(z, z) p = Add(a, b) y = Pow(p, part)",
    ],
)
def test_the_power_of_a_mean_of_powers_is_that_of_scaled_values(body: str) -> None:
    stored = f"{STORED}, {EXPONENTS}, float minus = {{-0.5}}, int64[1] first = {{0}}"
    assert "Div" in mended(of(body, stored, given=PAIR), "scaled-square")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("p = Mul(x, x) y = Sqrt(p)", ["Abs"]),
        ("p = Pow(x, four) q = Div(p, ten) y = Pow(q, part)", ["Abs", "Mul", "Pow"]),
        ("p = Pow(ten, t) y = Pow(p, part)", ["Mul", "Mul", "Pow"]),
        ("p = Pow(ten, t) q = Div(p, ten) y = Pow(q, part)", ["Mul", "Mul", "Add", "Pow"]),
        ("p = Exp(t) q = Mul(ten, p) y = Sqrt(q)", ["Mul", "Mul", "Add", "Exp"]),
        (
            "i = Cast<to = 6>(t) p = Pow(ten, i) y = Pow(p, part)",
            ["Mul", "Cast", "Cast", "Mul", "Pow"],
        ),
    ],
)
def test_the_power_of_a_power_is_one_power(body: str, expected: list[str]) -> None:
    if "t)" in body:
        body = f"t = Mul(x, small) {body}"
    stored = f"{EXPONENTS}, float small = {{0.00005}}"
    assert mended(of(body, stored), "scaled-square") == expected


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ("y = Div(x, z)", ["Where", "Mul", "Mul", "Div"]),
        ("y = Reciprocal(z)", ["Where", "Mul", "Reciprocal", "Mul"]),
    ],
)
def test_a_quotient_by_a_large_number_is_that_of_eighths(body: str, end: list[str]) -> None:
    assert mended(of(body, STORED, given=PAIR), "scaled-division")[2:] == end


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "a = Mul(x, z) c = Greater(a, one) y = Cast<to = 1>(c)",
            ["Mul", "Min", "Greater", "Cast"],
        ),
        (
            "a = Mul(x, z) c = GreaterOrEqual(one, a) y = Cast<to = 1>(c)",
            ["Mul", "Max", "GreaterOrEqual", "Cast"],
        ),
        (
            "a = Add(x, z) u = Unsqueeze(a, axes) c = Less(u, one) y = Cast<to = 1>(c)",
            ["Add", "Unsqueeze", "Max", "Less", "Cast"],
        ),
        (
            "a = Sub(x, z) b = Mul(x, z) c = LessOrEqual(a, b) y = Cast<to = 1>(c)",
            ["Sub", "Mul", "Max", "Min", "LessOrEqual", "Cast"],
        ),
    ],
)
def test_what_is_compared_ends_with_float16(body: str, expected: list[str]) -> None:
    stored = f"{STORED}, int64[1] axes = {{0}}"
    assert mended(of(body, stored, given=PAIR), "comparison") == expected


STAYING = {
    "comparison": [
        f"{compared} y = Cast<to = 1>(c)"
        for compared in (
            "c = Greater(x, z)", "a = Relu(x) c = Less(a, two)", "a = Mul(x, z) c = Equal(a, two)")
    ],
    "scaled-division": ["y = Div(x, two)"],
    "floor": [f"y = Pow({powers})" for powers in ("x, three", "one, x", "row, x", "below, x", "n, x")],
    "square": [f"y = Pow({powers})" for powers in ("x, three", "x, row", "x, deep", "x, n", "two, x")],
    "mean": [
        "total = ReduceSum(x) y = Div(count, total)",
        "total = ReduceSum(x) y = Mul(total, near)",
        "total = ReduceSum(x) y = Div(total, deep_count)",
        "total = ReduceSum<noop_with_empty_axes = 1>(x) y = Div(total, count)",
        "total = ReduceSum(x) mean = Div(total, count) y = Add(mean, total)",
        "total = ReduceSum(open) y = Div(total, count)",
        "total = ReduceSum(x) y = Div(total, n)",
        "total = ReduceMax(x) y = Div(total, count)",
    ],
    "clip-inputs": ["y = Clip(x, one)"],
    "transposed-outputs": ["i = Transpose(x) y = Relu(i)"],
    "unfuse-activation": [
        "y = Sigmoid(x)",
        "a = MatMul(x, w) r = Relu(a) y = Sigmoid(r)",
        "a = MatMul(x, w) t = Transpose(a) y = Tanh(t)",
        "a = MatMul(x, w) m = Max(a, bias) y = Tanh(m)",
    ],
    "log-power": [
        "y = Log(x)",
        "power = Mul(x, z) c = Max(power, least) y = Log(c)",
        "a = Mul(x, x) power = Add(a, z) c = Max(power, least) y = Log(c)",
        *(f"{SQUARES} bank = MatMul(power, {name}) c = Max(bank, least) y = Log(c)"
          for name in ("w", "row")),
        *(f"{SQUARES} c = {limited} y = Log(c)"
          for limited in ("Max(power, below)", "Max(power, row)", "Max(power)", "Min(power, one)",
                          "Clip(power, least, one)", "Clip(power)", "Clip(power, below)")),
    ],
    "log-floor": [
        "y = Log(x)",
        *(f"more = {more} y = Log(more)" for more in (
            "Add(x, two)", "Max(x, one)", "Add(x, below)", "Add(x, z)", "Min(x, least)")),
    ],
    "variance": [
        "square = Mul(x, x) a = ReduceMean(square) b = Mul(z, z) y = Sub(a, b)",
        "square = Mul(x, z) a = ReduceMean(square) m = ReduceMean(x) b = Mul(m, m) y = Sub(a, b)",
        COVARIANCE.replace("ReduceMean<axes = [-1]>(z)", "ReduceMean<axes = [0]>(z)"),
        *(VARIANCES[0].replace("ReduceMean<axes = [-1]>(x)", f"ReduceMean<axes = [{other}>(x)")
          for other in ("0]", "-1], keepdims = 0")),
    ],
    "scaled-square": [
        "y = Sqrt(x)",
        "p = Mul(x, two) y = Sqrt(p)",
        "p = Pow(x, three) y = Sqrt(p)",
        "a = Mul(x, below) p = Pow(two, a) q = Mul(p, below) y = Sqrt(q)",
        "p = Pow(x, two) y = Pow(p, row)",
        "p = Pow(z, x) y = Pow(p, two)",
        "a = Mul(x, x) b = Add(a, z) y = Sqrt(b)",
        *(NORM.replace(*change) for change in (
            ("square = Pow(x, two)", "square = Mul(x, z)"), ("Add(mean, least)", "Add(mean, below)"),
            ("ReduceMean<axes = [-1]>", "ReduceMax<axes = [-1]>"))),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "body"), [(name, body) for name, bodies in STAYING.items() for body in bodies]
)
def test_what_a_rewrite_is_not_for_stays(name: RewriteName, body: str) -> None:
    stored = f"""{STORED}, {WEIGHTS}, float three = {{3}},
        float count = {{24}}, float near = {{0.0416}}, float[8] row = {{2, 2, 2, 2, 2, 2, 2, 2}},
        float[1, 1, 1] deep = {{2}}, float[1, 1, 1] deep_count = {{24}}"""
    model = of(body, stored, given=f"{PAIR}, float[N, 8] open, float n")
    assert untouched(model, name)


def test_each_rewrite_has_one_name() -> None:
    assert [*PRECISE] == NAMES


def test_nodes_inside_others_are_mended() -> None:
    model = parsed("""(float[3, 8] x, bool c) => (float[3, 8] y) <float two = {2}> {
        total = ReduceMean(x)
        y = If(c) <
            then_branch = inner () => (float[3, 8] a) { a = Pow(x, two) },
            else_branch = other () => (float[3, 8] b) { b = Add(x, total) }
        >
    }""")
    assert correct(model, ["square"]) == ("square",)
    assert operators(model) == ["ReduceMean", "If", "Mul", "Add"]


def test_a_sum_that_another_graph_reads_stays() -> None:
    model = parsed("""(float[3, 8] x, bool c) => (float[1, 1] y, float[1, 1] z) <float n = {24}> {
        total = ReduceSum(x)
        z = Identity(total)
        y = If(c) <
            then_branch = inner () => (float[1, 1] a) { a = Div(total, n) },
            else_branch = other () => (float[1, 1] b) { b = Neg(total) }
        >
    }""")
    assert untouched(model, "mean")


PICTURES = (
    "(float[1, 3, 4, 6] x) => (int64[{}] y) <float[5, 3, 1, 1] w, int64 one = {{1}}> {{ {} }}"
)
TRANSPOSED = [
    PICTURES.format(*each)
    for each in (
        ("1, 1, 4, 6", "c = Conv(x, w) y = ArgMax<axis = 1>(c)"),
        ("1, 5, 4, 6", "c = Conv(x, w) y = Cast<to = 7>(c)"),
        ("1, 1, 4, 6", "c = Conv(x, w) a = ArgMin<axis = 1>(c) y = Add(a, one)"),
        ("6, 4, 1", "a = ArgMax<axis = 1, keepdims = 0>(x) y = Transpose<perm = [2, 1, 0]>(a)"),
    )
]  # fmt: skip


@needs_qnn
@pytest.mark.parametrize("text", TRANSPOSED)
def test_a_transposed_int64_output_can_be_run_on_an_npu(text: str) -> None:
    model = parsed(text.replace("w, int64", f"w = {{{', '.join(map(str, range(15)))}}}, int64"), 17)
    x = np.random.default_rng(1).integers(-8, 8, (1, 3, 4, 6)).astype(np.float32)
    with pytest.raises(ort_errors.EPFail, match="does not match QNN tensor data size"):
        on_the_npu(model, {"x": x})
    (expected,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    assert applicable(model) == correct(model, ["transposed-outputs"]) == ("transposed-outputs",)
    np.testing.assert_array_equal(on_the_npu(model, {"x": x}), expected)


BYTES = [
    PICTURES.replace("int64[{}] y", "uint8[{}] y").format(shape, body)
    for shape, body in (
        ("1, 1, 4, 6", "c = Conv(x, w) a = ArgMax<axis = 1>(c) y = Cast<to = 2>(a)"),
        ("1, 5, 4, 6", "c = Conv(x, w) a = Abs(c) y = Cast<to = 2>(a)"),
        ("5, 4, 6", "c = Conv(x, w) a = Abs(c) b = Cast<to = 2>(a) y = Squeeze(b, first)"),
        ("1, 5, 4, 6", "c = Conv(x, w) a = Greater(c, x0) y = Cast<to = 2>(a)"),
        ("6, 4, 3, 1", "a = Abs(x) b = Cast<to = 2>(a) y = Transpose(b)"),
    )
]


@needs_qnn
@pytest.mark.parametrize("text", BYTES)
def test_a_transposed_uint8_output_can_be_computed_on_an_npu(text: str) -> None:
    stored = (
        f"w = {{{', '.join(map(str, range(15)))}}}, int64[1] first = {{0}}, float x0 = {{0}}, int64"
    )
    model = parsed(text.replace("w, int64", stored), 17)
    x = np.random.default_rng(1).integers(-2, 3, (1, 3, 4, 6)).astype(np.float32)
    with pytest.raises(ort_errors.Fail, match="fallback"):
        on_the_npu(model, {"x": x})
    (expected,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    assert correct(model, ["transposed-outputs"]) == ("transposed-outputs",)
    np.testing.assert_array_equal(on_the_npu(model, {"x": x}), expected)


@needs_qnn
@pytest.mark.parametrize("shape", [(3, 4), (5,), ()])
def test_a_cast_of_floats_that_makes_an_int64_output_is_computed_on_an_npu(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    sizes = f"[{', '.join(map(str, shape))}]" if shape else ""
    model = parsed(
        f"(float{sizes} x) => (int64{sizes} y) {{ r = Round(x) y = Cast<to = 7>(r) }}", 13
    )
    x = np.asarray(np.random.default_rng(0).integers(-200, 200, shape) + 0.25, np.float32)
    assert left_to_the_cpu(model, tmp_path) == ["Cast"]
    (expected,) = session(model).run(None, {"x": x})
    assert applicable(model) == correct(model, ["transposed-outputs"]) == ("transposed-outputs",)
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_array_equal(on_the_npu(model, {"x": x}), expected)
    assert untouched(model, "transposed-outputs")


@needs_qnn
@pytest.mark.parametrize("dtype", ["int8", "int16", "uint16", "uint64"])
def test_only_a_cast_of_an_output_is_left_of_a_type_that_an_npu_lacks(
    tmp_path: Path, dtype: str
) -> None:
    to = onnx.TensorProto.DataType.Value(dtype.upper())
    text = PICTURES.replace("int64[{}] y", f"{dtype}[{{}}] y").format(
        "1, 5, 4, 6", f"c = Conv(x, w) y = Cast<to = {to}>(c)"
    )
    model = parsed(text.replace("w, int64", f"w = {{{', '.join(map(str, range(15)))}}}, int64"), 17)
    assert left_to_the_cpu(model, tmp_path) == ["Cast", "Transpose"]
    assert applicable(model) == correct(model, ["transposed-outputs"]) == ("transposed-outputs",)
    onnx.checker.check_model(model, full_check=True)
    assert left_to_the_cpu(model, tmp_path) == ["Cast"]
    assert untouched(model, "transposed-outputs")


@needs_qnn
@pytest.mark.parametrize(("given", "made"), [("int8", "uint8"), ("uint8", "int8")])
@pytest.mark.parametrize("behind", ["", "r = Relu(c)"])
def test_a_quantized_layer_has_a_result_of_the_sign_of_its_input(
    tmp_path: Path, given: str, made: str, behind: str
) -> None:
    # An EP fuses a Relu only where 0 is the smallest number of its result.
    zero = np.iinfo(made).min if behind else 9
    model = parsed(
        f"""(float[1, 2, 8, 8] x) => (float[1, 2, 8, 8] y)
        <float s = {{0.05}}, {given} z = {{5}}, int8 o = {{0}}, float[2] b = {{1, 2}},
        {made} u = {{{zero}}}> {{ n = Neg(x) i = QuantizeLinear(n, s, z)
        f = DequantizeLinear(i, s, z) g = DequantizeLinear(w, s, o)
        c = Conv<pads = [1, 1, 1, 1]>(f, g, b) {behind}
        q = QuantizeLinear({behind[:1] or "c"}, s, u) d = DequantizeLinear(q, s, u) y = Abs(d) }}""",
        13,
        w=np.random.default_rng(1).integers(-9, 9, (2, 2, 3, 3)).astype(np.int8),
    )
    model = onnx.shape_inference.infer_shapes(model)
    feeds = {"x": np.random.default_rng(0).uniform(-3, 3, (1, 2, 8, 8)).astype(np.float32)}
    assert left_to_the_cpu(model, tmp_path) == ["DequantizeLinear"]
    (expected,) = session(model).run(None, feeds)
    assert applicable(model) == correct(model, ["quantized-signs"]) == ("quantized-signs",)
    np.testing.assert_array_equal(session(model).run(None, feeds)[0], expected)
    assert left_to_the_cpu(model, tmp_path) == []
    assert untouched(model, "quantized-signs")


def left_to_the_cpu(model: onnx.ModelProto, folder: Path) -> list[str]:
    """The nodes of ``model`` that QNN does not compile."""
    from hatch_epcontext.worker.session import options

    compiled = folder / "compiled.onnx"
    entries = {"ep.context_enable": "1", "ep.context_file_path": str(compiled)}
    to = target("qnn", X_ELITE, session_options=entries)
    compiled.unlink(missing_ok=True)
    ort.InferenceSession(model.SerializeToString(), options(to, to.settings.provider_options))
    found = onnx.load(compiled, load_external_data=False)
    return sorted(node.op_type for node in found.graph.node if node.op_type != "EPContext")


@pytest.mark.parametrize(
    "end", ["y = QuantizeLinear(c, scale, zero)",
            "q = QuantizeLinear(c, scale, zero) y = Transpose(q)"]
)  # fmt: skip
def test_a_quantized_output_that_a_transpose_reaches_stays(end: str) -> None:
    model = parsed(
        f"""(float[1, 3, 4, 6] x) => (uint8[a, b, c, d] y)
        <float scale = {{0.5}}, uint8 zero = {{3}}> {{ c = Transpose(x) {end} }}""",
        17,
    )
    assert untouched(model, "transposed-outputs")


def test_an_int64_output_that_no_transpose_reaches_stays() -> None:
    for body in ("y = ArgMax<axis = 1>(x)", "t = Transpose(x) v, y = TopK(t, k)"):
        model = parsed(f"(float[4, 4] x) => (int64[a, b] y) <int64[1] k = {{2}}> {{ {body} }}", 17)
        assert untouched(model, "transposed-outputs")


def on_the_npu(model: onnx.ModelProto, feeds: Mapping[str, Floats]) -> Floats:
    """The first output of QNN's simulator, which runs all of ``model``."""
    from hatch_epcontext.worker.session import open_session, options

    to = target("qnn", X_ELITE, session_options={"session.disable_cpu_ep_fallback": "1"})
    session = open_session(model.SerializeToString(), options(to, to.settings.provider_options))
    found: Any = session.run(None, dict(feeds))[0]
    return np.asarray(found)


RNG = np.random.default_rng(0)
TOKENS = RNG.standard_normal((3, 8)) * np.array([[1e-3], [1], [1e4]])


@needs_qnn
@pytest.mark.parametrize(
    ("name", "model", "given"),
    [
        ("square", of("y = Pow(x, two)", STORED), np.full((3, 8), -0.0)),
        ("mean", of("t = ReduceSum(x) y = Div(t, n)", "float n = {24}"), np.full((3, 8), 3e4)),
        ("clip-inputs", of("y = Clip<min = 0.0, max = 6.0>(x)", opset=10), TOKENS),
        (
            "unfuse-activation",
            of("a = MatMul(x, w) y = Sigmoid(a)", WEIGHTS),
            RNG.uniform(-0.5, 0, (3, 8)),
        ),
        ("log-power", of(LOGARITHMS[0].replace("z", "x"), STORED), TOKENS / 20),
        ("log-floor", of(SMALL_NUMBERS[1], STORED), TOKENS / 1e6),
        ("floor", of("y = Pow(b, x)", "float b = {0.993}"), RNG.uniform(18, 1e3, (3, 8))),
        ("floor", of("y = Pow(two, x)", STORED), RNG.uniform(-300, 10, (3, 8))),
        ("scaled-square", of(NORM, STORED), TOKENS),
        ("scaled-square", of(NORMS[3], STORED), 500 + 50 * RNG.standard_normal((3, 8))),
        ("scaled-square", of(NORMALIZED_POWER, EXPONENTS), RNG.uniform(100, 400, (3, 8))),
        (
            "scaled-square",
            of("p = Pow(ten, x) y = Pow(p, part)", EXPONENTS),
            RNG.uniform(0, 6, (3, 8)),
        ),
        *(
            ("small-angle", of(f"y = {operator}(x)"), RNG.uniform(-1e-2, 1e-2, (3, 8)))
            for operator in ("Atan", "Sin", "Tan")
        ),
        ("variance", of(VARIANCES[0], STORED), 30 + RNG.standard_normal((3, 8)) / 4),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_an_npu_computes_wrong_is_right_then(
    name: RewriteName, model: onnx.ModelProto, given: Floats
) -> None:
    feeds = {"x": given.astype(np.float16).astype(np.float32)}
    (wanted,) = ort.InferenceSession(model.SerializeToString()).run(None, feeds)
    before = on_the_npu(model, feeds)
    assert correct(model, [name]) == (name,)
    after = on_the_npu(model, feeds)
    error, left = (
        np.abs(each - wanted) / np.maximum(np.abs(wanted), 1e-4) for each in (before, after)
    )
    assert left.max() < 0.01
    assert error.max() > 3 * left.max() + 0.001


@pytest.mark.parametrize("opset", [10, 18, pytest.param(22, marks=newer_runtime)])
@pytest.mark.parametrize("borders", ["pads = [0, 0, 1, 2]", 'auto_pad = "SAME_UPPER"'])
@pytest.mark.parametrize(
    "operator", ["AveragePool", "AveragePool <count_include_pad = 1>", "LpPool"]
)
def test_a_pool_with_some_padded_borders_is_one_without(
    operator: str, borders: str, opset: int
) -> None:
    operator, _, own = operator.partition(" <")
    attributes = ", ".join(filter(None, ["kernel_shape = [2, 3]", borders, own.rstrip(">")]))
    model = parsed(
        f"(float[1, 2, 7, 8] x) => (float[1, 2, H, W] y) {{ y = {operator} <{attributes}> (x) }}",
        opset=opset,
    )
    assert "pool-padding" in applicable(model)
    after = rewritten(model, PRECISE["pool-padding"])
    pool = next(node for node in after.graph.node if node.op_type == operator)
    assert not {"pads", "auto_pad"} & {attribute.name for attribute in pool.attribute}


def test_a_pool_of_a_centred_kernel_stays() -> None:
    pool = "AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]>"
    model = parsed(f"(float[1, 2, 7, 8] x) => (float[1, 2, 7, 8] y) {{ y = {pool} (x) }}")
    assert "pool-padding" not in applicable(model)


@pytest.mark.parametrize("keeps", [0, 1])
@pytest.mark.parametrize("opset", [11, 18])
def test_a_log_of_a_sum_of_powers_is_that_of_what_the_largest_exceeds(
    keeps: int, opset: int
) -> None:
    axes = "ReduceSum (p, a)" if opset > 12 else "ReduceSum <axes = [1]> (p)"
    total = axes.replace(
        "ReduceSum", f"ReduceSum <keepdims = {keeps}>" if opset > 12 else "ReduceSum"
    )
    total = total.replace("<axes = [1]>", f"<axes = [1], keepdims = {keeps}>")
    log = parsed(
        f"""(float[3, 5] x) => (float[{"3, 1" if keeps else "3"}] y) <int64[1] a = {{1}}>
        {{ p = Exp (x) s = {total} y = Log (s) }}""",
        opset=opset,
    )
    rewritten(log, PRECISE["log-sum-exp"])
    share = parsed(
        """(float[3, 5] x) => (float[3, 5] y) <int64[1] a = {1}>
        { p = Exp (x) s = ReduceSum (p, a) y = Div (p, s) }"""
    )
    after = rewritten(share, PRECISE["log-sum-exp"])
    # It is done once.
    assert apply(after, [PRECISE["log-sum-exp"]], None, {}).names == ()
