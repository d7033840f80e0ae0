"""What float16 loses is computed otherwise: the same on the CPU, and right on an NPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from hatch_epcontext.graph.number_format import ALWAYS, REMEDIES, RewriteName
from hatch_epcontext.graph.rewrites.precise import PRECISE, applicable, remedy
from hatch_epcontext.providers import PROVIDERS
from tests.conftest import needs_qnn
from tests.graph.rewrites.equal import operators
from tests.models import parsed
from tests.worker.actions.test_compile import X_ELITE, target

Floats = NDArray[np.float32]

NAMES = [*ALWAYS, *itertools.chain(*REMEDIES)]
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
    """The operators after the rewrite ``name``, which has done something and loses nothing.

    ``least``: the decibels that each sample has at least. ``before``: rewrites that came before it.
    """
    after = onnx.ModelProto.FromString(model.SerializeToString())
    assert (*before, name)[0] in applicable(model.graph)
    assert remedy(after, {}, (*before, name)) == (*before, name)
    onnx.checker.check_model(after, full_check=True)
    for wanted, found in zip(run(model), run(after), strict=True):
        assert found.shape == wanted.shape
        assert decibels(wanted, found) >= least
    return operators(after)


def untouched(model: onnx.ModelProto, name: RewriteName) -> bool:
    after = onnx.ModelProto.FromString(model.SerializeToString())
    return remedy(after, {}, [name]) == () and after == model


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
    ("exponent", "stored"),
    [
        ("e", "float e = {2}"),
        ("e", "float[1] e = {2}"),
        ("e", "float[1, 1] e = {2}"),
        ("e", "int64 e = {2}"),
        ("cast", "int64 two = {2}"),
    ],
)
def test_a_square_is_a_product(exponent: str, stored: str) -> None:
    cast = "cast = Cast<to = 1>(two)" if exponent == "cast" else ""
    model = of(f"{cast} y = Pow(x, {exponent})", stored)
    assert mended(model, "square", np.inf) == ["Mul"]


def test_the_power_of_a_half_is_a_root() -> None:
    model = of("positive = Abs(x) y = Pow(positive, e)", "float e = {0.5}")
    assert mended(model, "square") == ["Abs", "Sqrt"]


@pytest.mark.parametrize(
    "model",
    [
        of("y = Pow(x, e)", "float e = {3}"),
        of("y = Pow(x, e)", "float[8] e = {2, 2, 2, 2, 2, 2, 2, 2}"),
        of("y = Pow(x, e)", "float[1, 1, 1] e = {2}"),
        of("y = Pow(x, e)", given="float[3, 8] x, float e"),
        of("y = Pow(e, x)", "float e = {2}"),
    ],
)
def test_other_powers_stay(model: onnx.ModelProto) -> None:
    assert untouched(model, "square")


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


@pytest.mark.parametrize(
    "model",
    [
        of(SUM.format(attributes="", inputs="x", use="Div(n, total)"), "float n = {24}"),
        of(SUM.format(attributes="", inputs="x", use="Mul(total, n)"), "float n = {0.0416}"),
        of(SUM.format(attributes="", inputs="x", use="Div(total, n)"), "float[1, 1, 1] n = {24}"),
        of(
            SUM.format(attributes="<noop_with_empty_axes = 1>", inputs="x", use="Div(total, n)"),
            "float n = {24}",
        ),
        of("total = ReduceSum(x) mean = Div(total, n) y = Add(mean, total)", "float n = {24}"),
        of(
            SUM.format(attributes="", inputs="x", use="Div(total, n)"),
            "float n = {24}",
            given="float[N, 8] x",
        ),
        of("total = ReduceSum(x) y = Div(total, n)", given="float[3, 8] x, float n"),
        of("total = ReduceMax(x) y = Div(total, n)", "float n = {24}"),
    ],
)
def test_other_sums_stay(model: onnx.ModelProto) -> None:
    assert untouched(model, "mean")


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


def test_bounds_that_are_inputs_stay() -> None:
    assert untouched(of("y = Clip(x, low)", "float low = {0}", opset=11), "clip-inputs")


WEIGHTS = (
    "float[8, 8] w = {"
    + ", ".join(f"{i % 9 - 4}" for i in range(64))
    + "}, float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}"
)


@pytest.mark.parametrize("activation", ["Sigmoid", "Tanh"])
@pytest.mark.parametrize(
    "before",
    [
        "a = MatMul(x, w)",
        "a = Gemm(x, w, b)",
        "p = MatMul(x, w) a = Add(p, b)",
        "a = Add(x, x)",
        "p = MatMul(x, w) q = Sub(b, p) r = Mul(b, q) s = Unsqueeze(r, axis) a = Slice(s, axis, end)",
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


@pytest.mark.parametrize(
    "body",
    [
        "y = Sigmoid(x)",
        "a = MatMul(x, w) r = Relu(a) y = Sigmoid(r)",
        "a = MatMul(x, w) t = Transpose(a) y = Tanh(t)",
        "a = MatMul(x, w) m = Max(a, b) y = Tanh(m)",
    ],
)
def test_what_nothing_fuses_stays(body: str) -> None:
    assert untouched(of(body, WEIGHTS), "unfuse-activation")


PAIR = "float[3, 8] x, float[3, 8] z"
SQUARES = "a = Mul(x, x) b = Mul(z, z) power = Add(a, b)"
STORED = "float two = {2}, float eps = {1e-10}, float one = {1}, int64[1] axis = {1}, int64[2] back = {8, 3}"
ROOTS = [
    f"{SQUARES} y = Sqrt(power)",
    "a = Pow(x, two) b = Pow(z, two) power = Add(a, b) y = Sqrt(power)",
    f"{SQUARES} higher = Add(power, eps) y = Sqrt(higher)",
    f"{SQUARES} higher = Max(eps, power) y = Sqrt(higher)",
    f"{SQUARES} higher = Clip(power, eps) y = Sqrt(higher)",
    f"{SQUARES} turned = Transpose(power) y = Sqrt(turned)",
    f"{SQUARES} flat = Reshape(power, back) higher = Add(eps, flat) y = Sqrt(higher)",
    "both = Concat<axis = 1>(x, z) a = Mul(both, both) power = ReduceSum(a, axis) y = Sqrt(power)",
    "a = Mul(x, x) power = ReduceSum<keepdims = 0>(a, axis) higher = Add(power, eps) y = Sqrt(higher)",
]


@pytest.mark.parametrize("body", ROOTS)
def test_a_root_of_a_sum_of_squares_is_scaled(body: str) -> None:
    given = PAIR if "z" in body else "float[3, 8] x"
    assert "Div" in mended(of(body, STORED, given=given), "hypot")


@pytest.mark.parametrize("body", ROOTS)
def test_a_logarithm_of_squares_is_twice_that_of_their_root(body: str) -> None:
    given = PAIR if "z" in body else "float[3, 8] x"
    model = of(body.replace("Sqrt", "Log"), STORED, given=given)
    found = mended(model, "log-power")
    assert found[-2:] == ["Log", "Mul"]


BANDS = "float[8, 2] bands = {" + ", ".join(f"{i % 3}" for i in range(16)) + "}"
BANDS += ", float[2, 3] turned = {0, 1, 2, 3, 0, 1}, float limit = {3.4028234663852886e38}"


@pytest.mark.parametrize(
    "body",
    [
        f"{SQUARES} bank = MatMul(power, bands) higher = Clip(bank, eps, limit) y = Log(higher)",
        f"{SQUARES} bank = MatMul(turned, power) higher = Add(bank, eps) y = Log(higher)",
    ],
)
def test_a_logarithm_of_weighted_squares_is_twice_that_of_their_root(body: str) -> None:
    found = mended(of(body, f"{STORED}, {BANDS}", given=PAIR), "log-power")
    assert found[-2:] == ["Log", "Mul"]
    assert found.count("MatMul") == 1


def test_weights_that_may_be_negative_stay() -> None:
    body = f"{SQUARES} bank = MatMul(power, signed) y = Log(bank)"
    assert untouched(
        of(body, "float[8, 1] signed = {1, 1, 1, 1, 1, 1, 1, -1}", given=PAIR), "log-power"
    )


@pytest.mark.parametrize(
    "model",
    [
        of("y = ReduceL2<axes = [-1], keepdims = 0>(x)"),
        of("y = ReduceL2(x, axis)", "int64[1] axis = {1}", opset=18),
    ],
)
def test_a_norm_of_one_node_is_scaled(model: onnx.ModelProto) -> None:
    assert "ReduceL2" not in mended(model, "hypot")


def test_the_root_of_zeros_is_zero() -> None:
    model = of(ROOTS[0], STORED, given=PAIR)
    assert remedy(model, {}, ["hypot"]) == ("hypot",)
    zeros = np.zeros([3, 8], np.float32)
    session = ort.InferenceSession(model.SerializeToString())
    (found,) = session.run(None, {"x": zeros, "z": -zeros})
    assert not found.any()


NORMS = {
    "RMSNorm": """square = Pow(x, two) mean = ReduceMean<axes = [-1]>(square) higher = Add(mean, eps)
        root = Sqrt(higher) y = Div(x, root)""",
    "LayerNorm": """middle = ReduceMean<axes = [-1]>(x) apart = Sub(x, middle) square = Mul(apart, apart)
        mean = ReduceMean<axes = [-1]>(square) higher = Add(mean, eps) root = Sqrt(higher)
        inverse = Reciprocal(root) y = Mul(apart, inverse)""",
    "without dimension": """square = Mul(x, x) mean = ReduceMean<axes = [0], keepdims = 0>(square)
        higher = Add(mean, one) root = Sqrt(higher) y = Div(x, root)""",
}


@pytest.mark.parametrize("body", NORMS.values(), ids=NORMS)
def test_a_norm_is_scaled(body: str) -> None:
    assert untouched(of(body, STORED), "hypot")
    assert "ReduceMax" in mended(of(body, STORED), "scaled-square")


@pytest.mark.parametrize(
    "body",
    [
        "y = Sqrt(x)",
        "power = Mul(x, z) y = Sqrt(power)",
        "a = Mul(x, x) power = Add(a, z) y = Sqrt(power)",
        f"{SQUARES} lower = Sub(power, eps) y = Sqrt(lower)",
        f"{SQUARES} lower = Add(power, below) y = Sqrt(lower)",
        f"{SQUARES} higher = Min(power, one) y = Sqrt(higher)",
        f"{SQUARES} cube = Pow(power, three) y = Sqrt(cube)",
    ],
)
@pytest.mark.parametrize("name", ["hypot", "log-power", "scaled-square"])
def test_other_roots_and_logarithms_stay(body: str, name: RewriteName) -> None:
    stored = f"{STORED}, float below = {{-1}}, float three = {{3}}"
    body = body.replace("Sqrt", "Log") if name == "log-power" else body
    assert untouched(of(body, stored, given=PAIR), name)


VARIANCES = [
    """square = Mul(x, x) a = ReduceMean<axes = [-1]>(square) m = ReduceMean<axes = [-1]>(x)
        b = Mul(m, m) y = Sub(a, b)""",
    """square = Pow(x, two) a = ReduceMean<axes = [1], keepdims = 0>(square)
        m = ReduceMean<axes = [-1], keepdims = 0>(x) b = Pow(m, two) y = Sub(a, b)""",
]


@pytest.mark.parametrize("body", VARIANCES)
def test_a_variance_is_that_of_differences(body: str) -> None:
    found = mended(of(body, STORED), "variance")
    assert found.index("Sub") < len(found) - 1


@pytest.mark.parametrize(
    "body",
    [
        "square = Mul(x, x) a = ReduceMean(square) b = Mul(z, z) y = Sub(a, b)",
        "square = Mul(x, z) a = ReduceMean(square) m = ReduceMean(x) b = Mul(m, m) y = Sub(a, b)",
        VARIANCES[0].replace("ReduceMean<axes = [-1]>(x)", "ReduceMean<axes = [0]>(x)"),
    ],
)
def test_other_differences_stay(body: str) -> None:
    assert untouched(of(body, STORED, given=PAIR), "variance")


def test_each_rewrite_has_one_name() -> None:
    assert [*PRECISE] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_is_mended_stays_as_it_is(name: RewriteName) -> None:
    bodies = {
        "square": of("y = Pow(x, two)", STORED),
        "mean": of("total = ReduceSum(x) y = Div(total, n)", "float n = {24}"),
        "clip-inputs": of("y = Clip<min = 0.0>(x)", opset=10),
        "unfuse-activation": of("a = MatMul(x, w) y = Tanh(a)", WEIGHTS),
        "hypot": of(ROOTS[2], STORED, given=PAIR),
        "log-power": of(ROOTS[2].replace("Sqrt", "Log"), STORED, given=PAIR),
        "variance": of(VARIANCES[0], STORED),
        "scaled-square": of(NORMS["RMSNorm"], STORED),
    }
    model = bodies[name]
    assert remedy(model, {}, [name]) == (name,)
    assert untouched(model, name)


def test_nodes_inside_others_are_mended() -> None:
    model = parsed("""(float[3, 8] x, bool c) => (float[3, 8] y) <float two = {2}> {
        total = ReduceMean(x)
        y = If(c) <
            then_branch = inner () => (float[3, 8] a) { a = Pow(x, two) },
            else_branch = other () => (float[3, 8] b) { b = Add(x, total) }
        >
    }""")
    assert remedy(model, {}, ["square"]) == ("square",)
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


def test_what_avoids_a_fault_is_a_rewrite() -> None:
    formats = (each.number_format("npu", {}) for each in PROVIDERS.values())
    named = {fault.rewrite for each in formats if each for fault in each.faults}
    assert "square" in named
    assert named <= {None, *NAMES}


def on_the_npu(model: onnx.ModelProto, feeds: Mapping[str, Floats]) -> Floats:
    """The first output of QNN's simulator, which runs all of ``model``."""
    from hatch_epcontext.worker.session import options

    to = target("qnn", X_ELITE, session_options={"session.disable_cpu_ep_fallback": "1"})
    session_options = options(to, to.settings.provider_options)
    session = ort.InferenceSession(model.SerializeToString(), session_options)
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
        ("hypot", of(ROOTS[8], STORED), TOKENS),
        ("hypot", of("y = ReduceL2<axes = [-1]>(x)"), TOKENS),
        ("log-power", of(ROOTS[8].replace("Sqrt", "Log"), STORED), TOKENS),
        ("variance", of(VARIANCES[0], STORED), 30 + RNG.standard_normal((3, 8)) / 4),
        ("scaled-square", of(NORMS["RMSNorm"], STORED), TOKENS),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_an_npu_computes_wrong_is_right_then(
    name: RewriteName, model: onnx.ModelProto, given: Floats
) -> None:
    feeds = {"x": given.astype(np.float16).astype(np.float32)}
    (wanted,) = ort.InferenceSession(model.SerializeToString()).run(None, feeds)
    before = on_the_npu(model, feeds)
    assert remedy(model, {}, [name]) == (name,)
    after = on_the_npu(model, feeds)
    error, left = (
        np.abs(each - wanted) / np.maximum(np.abs(wanted), 1e-4) for each in (before, after)
    )
    assert left.max() < 0.01
    assert error.max() > 3 * left.max() + 0.001
