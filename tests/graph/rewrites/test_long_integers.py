"""Long integers that become floats are computed of parts that float16 has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph.rewrites.precise import PRECISE, applicable
from hatch_epcontext.graph.rewriting import apply
from hatch_epcontext.graph.rounding import emulate
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.affine import affine
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.worker.ort_values import value_types
from tests.graph.rewrites.equal import operators, session
from tests.models import parsed

FORMAT = PROVIDERS["qnn"].number_format("npu", {})
INTEGERS = np.array([0, 1, -1, 7, -300, 2047, -49151, 49152, 86399, -131009, 12345678, -(2**30)])
SPLIT = ["Div", "Mul", "Sub", "Cast", "Mul", "Cast", "Mul", "Add"]
"""The operators of a number in two parts."""


def of(body: str, dtype: str = "int64", shape: str = "12") -> onnx.ModelProto:
    return parsed(f"({dtype}[{shape}] x) => (float[{shape}] y) {body}", 17)


def rewritten(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    after = onnx.ModelProto.FromString(model.SerializeToString())
    assert name in applicable(model)
    assert apply(after, [PRECISE[name]], None, {}).names == (name,)
    onnx.checker.check_model(after, full_check=True)
    return after


def emulated(model: onnx.ModelProto) -> onnx.ModelProto:
    assert FORMAT is not None
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    emulate(copy, Scope.of(copy, value_types(copy, Path("unsaved.onnx"))), FORMAT)
    return copy


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize(
    ("body", "added"),
    [
        ("<float k = {1000}> { f = Cast <to = 1> (x) y = Div (f, k) }", SPLIT),
        # A factor that float16 nearly lacks.
        (
            "<float k = {1e-07}> { f = Cast <to = 1> (x) y = Mul (k, f) }",
            [*SPLIT, "Mul"],
        ),
        # The time of a day as an angle.
        (
            """<float k = {86400}, float turn = {6.2831853}>
            { f = Cast <to = 1> (x) d = Div (f, k) y = Mul (d, turn) }""",
            SPLIT,
        ),
        # Hundredths of a kelvin: the constant is a whole number of them.
        (
            """<float k = {100}, float zero = {273.15}>
            { f = Cast <to = 1> (x) d = Div (f, k) y = Sub (d, zero) }""",
            ["Add", *SPLIT],
        ),
        # A rest of a hundredth remains.
        (
            """<float k = {100}, float zero = {21.004}>
            { f = Cast <to = 1> (x) d = Div (f, k) y = Sub (zero, d) }""",
            ["Add", *SPLIT, "Add"],
        ),
    ],
)
def test_integers_that_are_scaled_down_have_two_parts(
    dtype: str, body: str, added: list[str]
) -> None:
    """Both rewritten and in float16 each one is as near as float16 allows."""
    before = of(body, dtype)
    after = rewritten(before, "split-integers")
    assert operators(after) == added
    feeds = {"x": INTEGERS.astype(dtype)}
    (expected,) = session(before).run(None, feeds)
    (got,) = session(after).run(None, feeds)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    (rounded,) = session(emulated(after)).run(None, feeds)
    inside = np.abs(expected) < 65504
    assert inside.sum() >= 10
    np.testing.assert_allclose(rounded[inside], expected[inside], rtol=3e-3, atol=1e-6)
    (lost,) = session(emulated(before)).run(None, feeds)
    assert np.abs(lost - expected)[inside].max() > 0.1


def test_a_constant_is_subtracted_from_integers() -> None:
    """Around it float16 has only every 32nd integer; nothing is added to the graph."""
    before = of("<float k = {54321}> { f = Cast <to = 1> (x) y = Sub (f, k) }")
    after = rewritten(before, "split-integers")
    assert operators(after) == ["Add", "Cast"]
    feeds = {"x": 54321 + np.arange(-6, 6)}
    (rounded,) = session(emulated(after)).run(None, feeds)
    np.testing.assert_array_equal(rounded, np.arange(-6, 6))


def test_each_feature_has_its_own_mean_and_deviation() -> None:
    before = of(
        """<float[3] m = {250000, 3000.5, 12}, float[3] s = {100000, 900, 4}>
        { f = Cast <to = 1> (x) d = Sub (f, m) y = Div (d, s) }""",
        shape="2, 3",
    )
    feeds = {"x": np.array([[120000, 4500, 3], [777777, 3001, 23]])}
    (expected,) = session(before).run(None, feeds)
    (rounded,) = session(emulated(rewritten(before, "split-integers"))).run(None, feeds)
    np.testing.assert_allclose(rounded, expected, rtol=3e-3, atol=3e-4)


def test_integers_are_moved_before_they_are_split() -> None:
    before = parsed(
        """(int64[4] x) => (float[4, 3] y) <int64[1] axes = {1}, float[3] k = {1e-2, 1e-4, 1e-6}>
        { f = Cast <to = 1> (x) u = Unsqueeze (f, axes) y = Mul (u, k) }""",
        17,
    )
    after = rewritten(before, "split-integers")
    assert operators(after)[0] == "Unsqueeze"
    feeds = {"x": np.array([3, 1000, 70000, 2000000])}
    (expected,) = session(before).run(None, feeds)
    (rounded,) = session(emulated(after)).run(None, feeds)
    np.testing.assert_allclose(rounded, expected, rtol=3e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "dtype", "shape"),
    [
        # Integers of 16 bits are floats too.
        ("<float k = {1000}> { f = Cast <to = 1> (x) y = Div (f, k) }", "uint16", "12"),
        # Pixels.
        ("<float k = {255}> { f = Cast <to = 1> (x) y = Div (f, k) }", "int32", "1, 3, 64, 64"),
        # What is not scaled has the end of its integers.
        ("<float k = {2}> { f = Cast <to = 1> (x) y = Div (f, k) }", "int32", "12"),
        ("<float k = {1}> { f = Cast <to = 1> (x) y = Sub (k, f) }", "int64", "12"),
        # Proved small.
        (
            """<int64 n = {60}, float k = {1000}>
            { m = Mod (x, n) f = Cast <to = 1> (m) y = Div (f, k) }""",
            "int64",
            "12",
        ),
        # No integer at all.
        ("<float k = {1000}> { f = Cast <to = 1> (x) y = Div (f, k) }", "double", "12"),
    ],
)
def test_what_float16_has_stays(body: str, dtype: str, shape: str) -> None:
    assert "split-integers" not in applicable(of(body, dtype, shape))


LONG = np.array([1, 2, 7, 300, 2047, 32767, 32768, 65535, 86399, 131009, 12345678, 2**28])


@pytest.mark.parametrize(
    "body",
    [
        "{ f = Cast <to = 1> (x) y = Log (f) }",
        "<float one = {1}> { f = Cast <to = 1> (x) p = Add (one, f) y = Log (p) }",
    ],
)
def test_the_logarithm_of_an_integer_is_that_of_a_small_number_and_of_how_much_more_it_is(
    body: str,
) -> None:
    before = of(body)
    after = rewritten(before, "split-integers")
    (expected,) = session(before).run(None, {"x": LONG})
    (rounded,) = session(emulated(after)).run(None, {"x": LONG})
    np.testing.assert_allclose(rounded, expected, atol=0.01)
    (small,) = session(emulated(before)).run(None, {"x": LONG})
    np.testing.assert_array_equal(rounded[:5], small[:5])


@pytest.mark.parametrize(
    "body",
    [
        "{ f = Cast <to = 1> (x) g = Cast <to = 1> (z) y = Div (f, g) }",
        # Per cent.
        """<float one = {1}, float k = {100}> { f = Cast <to = 1> (x) g = Cast <to = 1> (z)
        p = Mul (f, k) q = Add (g, one) y = Div (p, q) }""",
    ],
)
def test_a_ratio_of_integers_is_that_of_small_numbers(body: str) -> None:
    before = parsed(f"(int64[12] x, int64[12] z) => (float[12] y) {body}", 17)
    after = rewritten(before, "ratio")
    feeds = {"x": LONG // 3, "z": LONG}
    (expected,) = session(before).run(None, feeds)
    (rounded,) = session(emulated(after)).run(None, feeds)
    np.testing.assert_allclose(rounded, expected, rtol=3e-3)
    (lost,) = session(emulated(before)).run(None, feeds)
    assert np.abs(lost / np.maximum(expected, 1e-3) - 1).max() > 0.5


def test_a_ratio_of_integers_of_32_bits_has_a_scaled_divisor() -> None:
    """One of less than 16384, which QNN needs, also where that of small integers is small."""
    before = parsed(
        """(int64[12] x, int64[12] z) => (float[12] y)
        { f = Cast <to = 1> (x) g = Cast <to = 1> (z) y = Div (f, g) }""",
        17,
    )
    after = onnx.ModelProto.FromString(before.SerializeToString())
    rewrites = (
        rewrite for name, rewrite in PRECISE.items() if name in ("ratio", "scaled-division")
    )
    assert apply(after, rewrites, None, {}).names == ("ratio", "scaled-division")
    feeds = {"x": LONG, "z": np.append(LONG[1:], 2**31 - 1)}
    (expected,) = session(before).run(None, feeds)
    (rounded,) = session(emulated(after)).run(None, feeds)
    np.testing.assert_allclose(rounded, expected, rtol=4e-3)


def test_a_ratio_of_small_integers_stays() -> None:
    text = """(int16[4] x, int16[4] z) => (float[4] y)
        { f = Cast <to = 1> (x) g = Cast <to = 1> (z) y = Div (f, g) }"""
    assert "ratio" not in applicable(parsed(text, 17))


def test_only_the_last_of_a_chain_is_replaced() -> None:
    """A value that something else reads too is computed beside it."""
    before = parsed(
        """(int64[4] x) => (float[4] y, float[4] z) <float k = {3600}, float n = {24}>
        { f = Cast <to = 1> (x) h = Div (f, k) y = Div (h, n) z = Sin (h) }""",
        17,
    )
    after = onnx.ModelProto.FromString(before.SerializeToString())
    assert apply(after, [PRECISE["split-integers"]], None, {}).replaced == 2
    assert operators(after).count("Sin") == 1


def test_a_chain_that_depends_on_itself_is_no_number() -> None:
    model = of("<float k = {1000}> { f = Cast <to = 1> (x) z = Div (f, k) y = Mul (z, k) }")
    model.graph.node[0].input[0] = "z"
    assert affine(model.graph.node[2], Scope(model.graph)) is None
