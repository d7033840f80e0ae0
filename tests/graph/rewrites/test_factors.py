"""Products that leave the range of float16 only on the way are computed of smaller factors."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph.rewrites.precise import applicable
from tests.graph.rewrites.equal import operators, session
from tests.graph.rewrites.test_long_integers import emulated, rewritten
from tests.models import untyped

RNG = np.random.default_rng(0)
NUMBERS = "float thousand = {1000}, float million = {1000000}, float half = {0.5}, float few = {20}"
NUMBERS += ", float hundredth = {0.01}"


def of(body: str, shape: str = "4, 50") -> onnx.ModelProto:
    inputs = f"float[{shape}] x, float[{shape}] z"
    stored = f"{NUMBERS}, int64[1] axes = {{1}}"
    return untyped(f"({inputs}) => (y) <{stored}> {{ {body} }}", 17)


def feeds(size: float = 1.0) -> dict[str, np.ndarray]:
    return {
        "x": (900 * size * RNG.random((4, 50)) + 100 * size).astype(np.float32),
        "z": (900 * size * RNG.random((4, 50)) - 100 * size).astype(np.float32),
    }


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        ("factors", "p = Mul (x, z) y = Div (p, thousand)", ["Mul", "Mul", "Mul"]),
        # A number is part of one factor, or of all; of three none of the two products leaves the range.
        ("factors", "p = Mul (x, z) y = Mul (hundredth, p)", ["Mul", "Mul"]),
        ("factors", "p = Mul (x, z) q = Mul (p, x) y = Div (q, million)", ["Mul"] * 5),
        # A number of a factor takes it up.
        (
            "factors",
            "h = Mul (x, half) s = Mul (z, z) p = Mul (h, s) y = Div (p, million)",
            ["Mul"] * 5,
        ),
        (
            "factors",
            "p = Mul (x, z) s = ReduceSum (p, axes) y = Div (s, thousand)",
            ["Mul", "Mul", "Mul", "ReduceSum"],
        ),
        (
            "factors",
            "t = Transpose (z) p = MatMul (x, t) y = Div (p, thousand)",
            ["Transpose", "Mul", "Mul", "MatMul"],
        ),
        # Several numbers are one.
        ("factors", "p = Mul (x, thousand) q = Div (p, million) y = Mul (few, q)", ["Mul"]),
        (
            "scaled-product",
            "t = Transpose (z) p = MatMul (x, t) y = Div (p, few)",
            ["Transpose", "Mul", "MatMul"],
        ),
        ("scaled-product", "p = Mul (x, thousand) y = Div (p, z)", ["Div", "Mul"]),
    ],
)
def test_a_product_with_a_number_is_one_of_smaller_factors(
    name: str, body: str, expected: list[str]
) -> None:
    before = of(body)
    after = rewritten(before, name)
    assert operators(after) == expected
    given = feeds(0.3 if "few" in body and "MatMul" in body else 0.8)
    (right,) = session(before).run(None, given)
    (rounded,) = session(emulated(after)).run(None, given)
    inside = np.abs(right) < 65504
    assert inside.mean() > 0.8
    np.testing.assert_allclose(rounded[inside], right[inside], rtol=6e-3)
    (lost,) = session(emulated(before)).run(None, given)
    assert np.abs(lost / right - 1)[inside].max() > 0.5


@pytest.mark.parametrize("size", [1e-3, 1, 100])
@pytest.mark.parametrize("keeps", [0, 1])
@pytest.mark.parametrize("body", ["p = Mul (x, x)", "p = Mul (z, x)"])
def test_a_mean_of_products_is_that_of_smaller_values(body: str, keeps: int, size: float) -> None:
    before = of(f"{body} y = ReduceMean <axes = [1], keepdims = {keeps}> (p)")
    after = rewritten(before, "scaled-product")
    given = {name: values / 1000 * size * 2 for name, values in feeds().items()}
    (right,) = session(before).run(None, given)
    (rounded,) = session(emulated(after)).run(None, given)
    assert rounded.shape == right.shape
    np.testing.assert_allclose(rounded, right, rtol=6e-3, atol=6e-8)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        # The root of a layer's width.
        ("factors", "t = Transpose (z) p = MatMul (x, t) y = Div (p, few)"),
        ("scaled-product", "p = Mul (x, z) y = Mul (p, half)"),
        ("factors", "p = Div (x, thousand) y = Mul (p, few)"),
        # A product that another node reads is there anyway.
        ("factors", "t = Transpose (z) p = MatMul (x, t) q = Div (p, thousand) y = Add (p, q)"),
        ("factors", "p = Add (x, z) y = Div (p, thousand)"),
        ("scaled-product", "y = ReduceMean (x)"),
        ("scaled-product", "p = Div (x, z) q = Mul (p, p) y = ReduceMean (q)"),
        ("scaled-product", "p = Mul (x, half) y = Div (p, z)"),
    ],
)
def test_other_products_stay(name: str, body: str) -> None:
    assert name not in applicable(of(body))


def test_numbers_of_a_graph_that_depends_on_itself_count_once() -> None:
    model = of("p = Mul (x, thousand) y = Div (p, thousand)")
    model.graph.node[0].input[0] = "y"
    assert "factors" in applicable(model)
