from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hatch_epcontext.graph import graph, inference
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.powers import Powers, powers_of
from tests.graph.values.test_ranges import all_of
from tests.models import parsed

VARIANCE = """
    q = Mul (x, x) square = ReduceMean <axes = [1]> (q) mean = ReduceMean <axes = [1]> (x)
    product = Mul (mean, mean) y = Sub (square, product)
"""

DISTANCES = """
    q = Mul (x, x) s = ReduceSum (q, last) turned = Transpose <perm = [1, 0]> (x)
    product = MatMul (x, turned) twice = Mul (product, two) y = Sub (s, twice)
"""

POLYNOMIAL = """
    q = Mul (x, x) high = Mul (q, a) middle = Mul (x, b) s = Add (high, middle) y = Add (s, c)
"""


def sizes(nodes: str, inputs: str = "float[4, 8] x", **stored: Any) -> dict[str, float]:
    return dict(powers(nodes, inputs, **stored).sizes)


def powers(nodes: str, inputs: str = "float[4, 8] x", **stored: Any) -> Powers:
    numbers: dict[str, Any] = {
        "a": np.float32(1e-4),
        "b": np.float32(-0.1),
        "c": np.float32(85),
        "two": np.float32(2),
        "last": np.array([1]),
        "small": np.float32(1e-6),
    }
    numbers |= stored
    model = parsed(f"({inputs}) => (float[] y) {{ {nodes} }}", check=False, **numbers)
    facts = [graph.facts(value) for value in graph.inputs(model.graph)]
    inferred = inference.inferred(model)
    whole = frozenset(tensor.name for tensor in facts if "int" in tensor.dtype)
    return powers_of(
        inferred, [tensor.name for tensor in facts], Scope(inferred, nested=True), whole
    )


@pytest.mark.parametrize("nodes", [VARIANCE, DISTANCES])
def test_differences_of_squares_are_of_all_sizes(nodes: str) -> None:
    assert sizes(nodes) == {"x": math.inf}


def test_a_polynomial_is_of_the_size_at_which_its_terms_are_equal() -> None:
    assert sizes(POLYNOMIAL) == {"x": pytest.approx(1000, rel=1e-3)}


@pytest.mark.parametrize(
    ("nodes", "size"),
    [
        ("p = Mul (x, x) y = Mul (p, micro)", 1000),
        ("t = Transpose <perm = [1, 0]> (x) p = MatMul (x, t) y = Div (p, million)", 1000),
        # Of a mean.
        ("p = Mul (x, x) y = Mul (p, a)", None),
        ("h = MatMul (x, weights) p = Mul (h, h) y = Mul (p, micro)", None),
    ],
)
def test_the_factor_of_a_power_shows_its_size(nodes: str, size: float | None) -> None:
    numbers: dict[str, Any] = {
        "micro": np.float32(1e-6),
        "million": np.float32(1e6),
        "a": np.float32(1e-3),
    }
    found = sizes(nodes, weights=(8, 8), **numbers)
    assert found == ({} if size is None else {"x": pytest.approx(size, rel=1e-3)})


def test_a_product_of_two_inputs_is_of_both() -> None:
    found = sizes(
        """p = Mul (x, z) both = ReduceMean <axes = [1]> (p)
           one = ReduceMean <axes = [1]> (x) other = ReduceMean <axes = [1]> (z)
           product = Mul (one, other) y = Sub (both, product)""",
        "float[4, 8] x, float[4, 8] z",
    )
    assert found == {"x": math.inf, "z": math.inf}


@pytest.mark.parametrize(
    "norm",
    [
        "n = ReduceL2 <axes = [1]> (x)",
        "q = Mul (x, x) s = ReduceSum (q, last) n = Sqrt (s)",
        "r = ReduceL2 <axes = [1]> (x) n = Clip (r, small)",
        "s = ReduceSumSquare <axes = [1]> (x) f = Add (s, small) n = Sqrt (f)",
    ],
)
def test_what_is_divided_by_its_own_norm_is_of_all_sizes(norm: str) -> None:
    assert sizes(f"{norm} y = Div (x, n)") == {"x": math.inf}


@pytest.mark.parametrize(
    "nodes",
    [
        # No negative summand cancels anything, a small number only keeps the sum from 0, and tanh is small.
        "q = Mul (x, x) m = ReduceMean <axes = [1]> (q) s = Add (m, small) y = Tanh (s)",
        "q = Mul (x, x) r = Mul (x, x) s = Add (q, r) y = Tanh (s)",
        # The result of a layer has the size that training gave it.
        "h = MatMul (x, weights) q = ReduceSumSquare <axes = [1]> (h) n = Sqrt (q) y = Div (h, n)",
        "y = Sub (x, a)",
        "e = Exp (x) q = Mul (e, e) y = Sub (q, e)",
    ],
)
def test_other_powers_have_no_size(nodes: str) -> None:
    assert sizes(nodes, weights=(8, 8)) == {}


@pytest.mark.parametrize(
    ("nodes", "degree"),
    [
        ("p = Mul (x, z) y = Sqrt (p)", 0),
        ("p = Mul (x, z) q = Mul (p, p) y = Log (q)", 0),
        ("a = Mul (x, x) b = Mul (z, z) s = Add (a, b) y = Sqrt (s)", 0),
        # Parts of an area.
        (
            "p = ReduceProd <axes = [1]> (z) m = Max (x, z) q = ReduceProd <axes = [1]> (m) y = Div (p, q)",
            2,
        ),
        ("c = Concat <axis = 0> (x, z) p = Mul (c, c) y = Log (p)", 0),
        ("p = Mul (x, z) y = Exp (p)", None),
        ("s = Add (x, z) y = Exp (s)", None),
        ("h = MatMul (x, weights) p = Mul (h, z) y = Sqrt (p)", None),
    ],
)
def test_a_root_a_logarithm_or_a_quotient_of_powers_is_of_all_sizes(
    nodes: str, degree: float | None
) -> None:
    text = f"(float[2, 2] x, float[2, 2] z) => (y) {{ {nodes} }}"
    stored = {"weights": (2, 2)} if "weights" in nodes else {}
    degrees = powers(nodes, "float[2, 2] x, float[2, 2] z", weights=(2, 2)).degrees
    assert degrees == ({} if degree is None else {"x": degree, "z": degree})
    for range_ in all_of(text, **stored).values():
        larger = [far.high for far in range_.far if not far.centers]
        assert larger == ([] if degree is None else [32, 128, 512, 2048])
        least = 2 ** (-10 / degree) if degree else 0
        assert range_.least == pytest.approx(least)


@pytest.mark.parametrize(
    ("shape", "largest"),
    # Of coordinates or a sensor, a picture, and features.
    [("4, 8", 2048), ("1, 1, 16, 16", 128), ("1, 400", 2048)],
)
def test_larger_floats_are_far_from_the_ordinary(shape: str, largest: float) -> None:
    found = all_of(f"(float[{shape}] x) => (float[] y) {{ {VARIANCE} }}")["x"]
    ends = [(far.low, far.high) for far in found.far if not far.centers]
    assert ends == [(s / 4, s) for s in (32, 128, 512, 2048, 8192, 32768) if s <= largest]


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Log (x)",
        "m = MatMul (x, bank) f = Max (m, small) y = Log (f)",
        "s = Mul (x, a) f = Add (s, small) y = Sqrt (f)",
        "m = ReduceMean <axes = [1]> (x) y = Log (m)",
        "m = ReduceMax <axes = [1]> (x) f = Add (m, small) y = Div (x, f)",
    ],
)
def test_what_has_a_logarithm_is_not_negative(nodes: str) -> None:
    bank = np.abs(np.random.default_rng(0).standard_normal((8, 2))).astype(np.float32)
    assert powers(nodes, bank=bank).amounts == {"x"}


def test_a_product_of_two_inputs_has_no_negative_ones() -> None:
    inputs = "float[4] x, float[4] z"
    assert powers("p = Mul (x, z) y = Log (p)", inputs).amounts == {"x", "z"}
    assert powers("q = Mul (x, x) p = Mul (q, z) y = Log (p)", inputs).amounts == {"z"}
    # Of quotients, and powers that are no number for negative values.
    assert powers("q = Div (x, z) y = Log (q)", inputs).amounts == {"x", "z"}
    assert powers("q = Div (x, z) y = Pow (q, a)", inputs, a=np.float32(0.19)).amounts == {"x", "z"}
    barometric = powers("q = Div (x, z) y = Pow (q, a)", inputs, a=np.float32(0.19))
    assert barometric.sizes == {"x": 2**19, "z": 2**19}
    # What is divided by.
    assert powers("q = Div (x, z) y = Pow (q, a)", inputs, a=np.float32(3)).amounts == {"z"}
    assert powers("q = Sub (x, z) y = Log (q)", inputs).amounts == set()


def test_what_is_added_up_by_its_indices_is_no_negative_amount_if_that_divides() -> None:
    nodes = """b = ScatterElements <axis = 1, reduction = "add"> (none, i, x)
        m = ReduceMean <axes = [1]> (b) y = Div (b, m)"""
    inputs = "int64[4, 8] i, float[4, 8] x"
    assert powers(nodes, inputs, none=np.zeros((4, 9), np.float32)).amounts == {"x"}


@pytest.mark.parametrize(
    "nodes",
    [
        "q = Mul (x, x) y = Log (q)",
        "n = Neg (x) y = Log (n)",
        "d = Sub (a, x) y = Sqrt (d)",
        "m = MatMul (x, weights) y = Log (m)",
        "r = Abs (x) y = Log (r)",
    ],
)
def test_what_is_negative_may_have_a_logarithm_of_something_else(nodes: str) -> None:
    weights = np.random.default_rng(0).standard_normal((8, 2)).astype(np.float32)
    assert powers(nodes, weights=weights).amounts == set()


def test_what_terms_have_in_common_has_not_the_size_at_which_they_are_equal() -> None:
    # Interest in percent of an amount.
    nodes = "p = Mul (x, z) i = Mul (p, a) s = Add (x, i) y = Sqrt (s)"
    found = sizes(nodes, "float[4, 8] x, float[4, 8] z", a=np.float32(1 / 1200))
    assert found == {"z": pytest.approx(1200)}


def test_the_level_of_sound_is_also_that_of_int16() -> None:
    level = "q = Mul (x, x) m = ReduceMean <axes = [1]> (q) y = Sqrt (m)"
    assert powers(level).levels == {"x"}
    for shape in ("1, 400", "1, 2, 400"):
        ends = [far.high for far in all_of(f"(float[{shape}] x) => (y) {{ {level} }}")["x"].far]
        assert max(ends) == 32768
    ends = [far.high for far in all_of(f"(float[4, 8] x) => (y) {{ {level} }}")["x"].far]
    assert max(ends) == 2048


@pytest.mark.parametrize(
    ("nodes", "size"),
    [
        ("y = Mul (x, z)", 512),
        ("q = Mul (z, z) p = Mul (x, q) y = Mul (p, a)", 2 * (2 * 65504) ** (1 / 3)),
        ("p = Mul (x, z) y = ReduceSum (p)", 512),
        # Divided by something smaller.
        ("p = Mul (x, z) t = Exp (z) y = Div (p, t)", None),
        ("p = Mul (x, z) q = Mul (x, p) d = Mul (z, two) y = Div (q, d)", 2 * 65504 ** (1 / 3)),
        ("p = Mul (x, z) y = Mul (p, micro)", 1000),
        ("h = MatMul (x, weights) y = Mul (h, z)", None),
    ],
)
def test_a_product_is_as_large_as_the_format(nodes: str, size: float | None) -> None:
    weights = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    numbers: dict[str, Any] = {"a": np.float32(0.5), "micro": np.float32(1e-6)}
    found = sizes(nodes, "float[4, 8] x, float[4, 8] z", weights=weights, **numbers)
    assert found == ({} if size is None else pytest.approx({"x": size, "z": size}, rel=1e-3))


def test_powers_in_a_branch_are_followed() -> None:
    shares = """s = ReduceSum (x) w = If (b) <
        then_branch = t () => (float[4, 8] u) { u = Mul (x, x) },
        else_branch = e () => (float[4, 8] v) { v = Identity (x) }> q = ReduceSum (w)"""
    inputs = "bool b, float[4, 8] x"
    assert sizes(f"{shares} p = Mul (q, s) y = Tanh (p)", inputs) == {}
    then = """y = If (b) < then_branch = t () => (float[4, 8] u)
        { p = Mul (x, x) q = ReduceSum (p) u = Div (p, q) },
        else_branch = e () => (float[4, 8] v) { v = Identity (x) }>"""
    assert sizes(then, inputs) == {"x": math.inf}


def test_the_size_of_what_is_multiplied_by_an_integer_is_the_integers() -> None:
    """Shares of a picture, and how many pixels that has."""
    text = """f = Cast <to = 1> (n) w = Mul (x, f) area = Mul (w, w) total = ReduceSum (area)
        y = Div (area, total)"""
    assert sizes(text, "float[8] x, int64[1] n") == {"n": math.inf}
    ranges = all_of(f"(float[8] x, int64[1] n) => (float[8] y) {{ {text} }}")
    assert not ranges["x"].far
    assert [(far.low, far.high) for far in ranges["n"].far if far.low > 0] == [
        (128, 512),
        (512, 2048),
    ]


def test_windows_of_running_sums_are_of_all_sizes() -> None:
    window = (
        """c = CumSum (x, last) a = Slice (c, one, eight, last) b = Slice (c, zero, seven, last)"""
    )
    numbers = {"one": [1], "zero": [0], "seven": [7], "eight": [8]}
    stored: dict[str, Any] = {name: np.array(value) for name, value in numbers.items()}
    assert sizes(f"{window} y = Sub (a, b)", **stored) == {"x": math.inf}
    assert sizes("c = CumSum (x, last) y = Mul (c, two)", **stored) == {}


@pytest.mark.parametrize(
    ("nodes", "size"),
    [
        ("y = Div (x, z)", 2**19),
        # Smoothed.
        ("a = Add (x, a) b = Add (z, two) y = Div (a, b)", 2**19),
        # Means with weights.
        ("p = Mul (x, z) s = ReduceSum (p, last) w = ReduceSum (z, last) y = Div (s, w)", 2**19),
        # Relative changes.
        ("d = Sub (x, z) y = Div (d, z)", 2**19),
        # Other differences, and layers.
        ("d = Sub (x, a) y = Div (d, z)", None),
        ("h = MatMul (x, weights) y = Div (h, z)", None),
    ],
)
def test_counts_have_a_quotient(nodes: str, size: float | None) -> None:
    weights = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    found = sizes(nodes, "float[4, 8] x, float[4, 8] z", weights=weights, a=np.float32(1))
    assert found == ({} if size is None else {"x": size, "z": size})


@pytest.mark.parametrize(
    ("nodes", "size"),
    [
        ("y = Sqrt (x)", 2**19),
        ("a = Add (x, two) y = Log (a)", 2**17),
        ("s = ReduceSum (x, last) y = Log (s)", 2**17),
        # Spectra.
        ("s = Add (x, small) y = Log (s)", None),
        ("m = Max (x, small) y = Sqrt (m)", None),
        ("d = Sub (two, x) y = Log (d)", None),
    ],
)
def test_amounts_of_which_a_root_or_a_logarithm_is_taken_are_beyond_the_format(
    nodes: str, size: float | None
) -> None:
    assert sizes(nodes) == ({} if size is None else {"x": size})
    # Integers have an end of their own.
    assert sizes(f"f = Cast <to = 1> (n) {nodes.replace('(x', '(f')}", "int64[4, 8] n") == {}


INTEREST = """y = Loop (months, , x) <body = month (int64 i, bool go, float[4, 8] s) =>
    (bool stays, float[4, 8] t) { stays = Identity (go) m = Mul (s, r) n = Add (s, m) BODY }>"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("t = Sub (n, p)", {"x": 2.0**19, "p": 2.0**19}),
        ("u = Sub (n, p) t = Relu (u)", {"x": 2.0**19, "p": 2.0**19}),
        ("t = Tanh (n)", {}),
        ("t = MatMul (n, weights)", {}),
    ],
)
def test_what_a_loop_makes_more_or_less_of_is_of_all_sizes(
    body: str, expected: dict[str, float]
) -> None:
    inputs = "float[4, 8] x, float[1, 1] p, float[1, 1] r"
    weights = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    stored = {"weights": weights, "months": np.int64(12), "c": np.float32(0.1)}
    found = sizes(INTEREST.replace("BODY", body), inputs, **stored)
    assert {name: size for name, size in found.items() if name != "r"} == expected


def test_a_bright_picture_has_small_differences_where_its_local_variance_counts() -> None:
    text = """(float[1, 1, 16, 16] x) => (float[] y) { m = Conv (x, box) q = Mul (x, x) s = Conv (q, box)
        p = Mul (m, m) y = Sub (s, p) }"""
    found = all_of(text, box=np.full((1, 1, 3, 3), 1 / 9, np.float32))["x"]
    (near,) = (far for far in found.far if far.is_offset)
    assert (near.low, near.high) == (0, 255)
    assert near.spreads[0] / near.centers[0] < 1 / 40
    # A layer may learn any.
    assert not all_of(text, box=np.array([1, -1] * 4 + [1], np.float32).reshape(1, 1, 3, 3))[
        "x"
    ].far


@pytest.mark.parametrize(
    ("kept", "is_amount"),
    [
        ("k = Max (d, c)", True),
        ("k = Clip (d, c)", True),
        ("k = Relu (d) l = Add (k, c)", True),
        ("k = Min (d, c)", False),
        ("k = Clip (d, b)", False),
        # It keeps a share from 0.
        ("k = Max (d, small)", False),
    ],
)
def test_what_is_kept_from_being_negative_is_an_amount(kept: str, is_amount: bool) -> None:
    last = "l" if "l = " in kept else "k"
    inputs = "float[8] x, float[8] z"
    found = powers(f"d = Sub (x, z) {kept} y = Log ({last})", inputs)
    assert found.sizes == (dict.fromkeys("xz", 2.0**17) if is_amount else {})
    assert found.remaining == (set("xz") if is_amount else set())
