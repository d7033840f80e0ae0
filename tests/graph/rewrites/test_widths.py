from __future__ import annotations

import pytest

from hatch_epcontext.graph.rewrites.widths import compute_in_32_bits
from tests.graph.rewrites.equal import operators, reasons, rewritten
from tests.models import parsed

DTYPES = ("int8", "uint8", "int16", "uint16", "uint32", "double")


# Of the largest uint64 only sums and products are those of int64.
@pytest.mark.parametrize(
    ("operator", "dtype"),
    [("Mul", "uint64"), *((name, dtype) for name in ("Add", "Div", "Less") for dtype in DTYPES)],
)
def test_values_of_other_widths_are_computed_in_32_bits(operator: str, dtype: str) -> None:
    result = "bool" if operator == "Less" else dtype
    model = parsed(
        f"({dtype}[9] x) => ({result}[9] y) <{dtype} two = {{2}}> {{ y = {operator} (x, two) }}"
    )
    after = rewritten(model, compute_in_32_bits, tolerance=1e-6)
    casts = ["Cast", "Cast", operator, *(["Cast"] if operator != "Less" else [])]
    assert operators(after) == casts


def test_a_float64_between_two_operators_is_no_value_of_the_model() -> None:
    model = parsed("(double[9] x) => (double[9] y) { a = Tanh (x) b = Exp (a) y = Neg (b) }")
    after = rewritten(model, compute_in_32_bits, tolerance=1e-5)
    assert operators(after) == ["Cast", "Tanh", "Exp", "Neg", "Cast"]


def test_an_operator_that_takes_no_wider_type_stays() -> None:
    model = parsed(
        "(uint8[1, 1, 4, 4] x) => (uint8[1, 1, 3, 3] y) { y = MaxPool <kernel_shape = [2, 2]> (x) }"
    )
    assert reasons(model, compute_in_32_bits) == ["it takes no int32"]
