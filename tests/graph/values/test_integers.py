"""What a graph proves of its integers."""

from __future__ import annotations

import itertools
import math

import pytest

from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.integers import limits
from tests.models import untyped

INT32 = (-(2.0**31), 2.0**31 - 1)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Identity(i)", INT32),
        ("y = ArgMax<axis=1>(x)", (0, 6)),
        ("y = Abs(i)", (0, INT32[1])),
        ("k = Constant<value_int=10>(); y = Mod(l, k)", (0, 9)),
        ("k = Constant<value_int=10>(); y = Mod<fmod=1>(l, k)", (-9, 9)),
        ("k = Constant<value_int=10>(); a = ArgMax<axis=1>(x); y = Sub(a, k)", (-10, -4)),
        ("k = Constant<value_int=-3>(); a = ArgMax<axis=1>(x); y = Mul(a, k)", (-18, 0)),
        ("k = Constant<value_int=3>(); a = ArgMax<axis=1>(x); y = Div(a, k)", (0, 6)),
        ("a = Shape(x); y = Neg(a)", (-math.inf, 0)),
        ("b = Cast<to=9>(i); y = Cast<to=7>(b)", (0, 1)),
        ("a = ArgMax<axis=1>(x); b = Neg(a); y = Concat<axis=0>(a, b)", (-6, 6)),
        ("k = Constant<value_int=4>(); a = Relu(l); y = Min(a, k)", (0, 4)),
        ("k = Constant<value_int=4>(); m = Constant<value_int=8>(); y = Clip(l, k, m)", (4, 8)),
        ("a = Constant<value_int=2>(); b = Constant<value_int=8>(); y = Range(a, b, a)", (2, 8)),
        ("y = Exp(x)", (-math.inf, math.inf)),
    ],
)
def test_the_graph_proves_limits_of_integers(nodes: str, expected: tuple[float, float]) -> None:
    body = nodes.replace(";", "")
    model = untyped(f"(float[1, 6] x, int32[1, 6] i, int64[1, 6] l) => (y) {{ {body} }}", 18)
    low, high = limits("y", Scope.of(model))
    assert (max(low, -(2.0**63)), min(high, 2.0**63)) == (
        max(expected[0], -(2.0**63)),
        min(expected[1], 2.0**63),
    )


def test_a_long_chain_of_sums_is_followed_once() -> None:
    names = ["l", *(f"s{number}" for number in range(50)), "y"]
    nodes = " ".join(f"{b} = Add({a}, {a})" for a, b in itertools.pairwise(names))
    model = untyped(f"(int64[1, 6] l) => (y) {{ {nodes} }}", 18)
    low, high = limits("y", Scope.of(model))
    assert low < 0 < high
