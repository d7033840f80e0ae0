from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph.rewrites.bits import shift_as_product
from hatch_epcontext.graph.rewrites.widths import compute_in_32_bits, join_casts
from hatch_epcontext.graph.rewriting import apply
from tests.conftest import needs_qnn
from tests.graph.rewrites.equal import operators, rewritten, session
from tests.graph.rewrites.test_precise import on_the_npu
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


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_the_largest_of_bytes_is_that_of_floats(dtype: str) -> None:
    model = parsed(
        f"""({dtype}[1, 2, 4, 4] x) => ({dtype}[1, 2, 4, 4] y)
        {{ y = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x) }}""",
        12,
    )
    after = rewritten(model, compute_in_32_bits, tolerance=1e-6)
    assert operators(after) == ["Cast", "MaxPool", "Cast"]


INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


def to(dtype: str) -> int:
    return int(onnx.TensorProto.DataType.Value(dtype.upper()))


def values(dtype: str, between: str) -> Any:
    """Those of ``dtype`` with its ends; floats within ``between``."""
    rng = np.random.default_rng(0)
    if dtype == "bool":
        return rng.random(64) < 0.5
    ends = np.iinfo(between if dtype == "float" else dtype)
    low, high = (ends.min, ends.max) if dtype != "float" else (max(ends.min, -2e4), 100)
    found = rng.integers(int(low), int(high), 64, dtype=ends.dtype, endpoint=True)
    found[:4] = [0, 7, low, high]
    return found if dtype != "float" else (found + 0.25).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float", "bool", *INTEGERS])
def test_two_casts_of_integers_are_one(dtype: str) -> None:
    joined = set[str]()
    for between, result in itertools.product(INTEGERS, ["float", "float16", "bool", *INTEGERS]):
        casts = f"h = Cast <to = {to(between)}> (x) y = Cast <to = {to(result)}> (h)"
        model = parsed(f"({dtype}[64] x) => ({result}[64] y) {{ {casts} }}", 13)
        after = onnx.ModelProto.FromString(model.SerializeToString())
        if not apply(after, [join_casts], None, {}).names:
            continue
        joined.add(between)
        onnx.checker.check_model(after, full_check=True)
        feeds = {"x": values(dtype, between)}
        (expected,), (found,) = (session(each).run(None, feeds) for each in (model, after))
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found.astype(float), expected.astype(float), 1e-6)
    assert {"int8", "uint8", "int16", "uint16", "uint64"} <= joined


@pytest.mark.parametrize("ends", [("string", "float"), ("int64", "string"), ("int64", "bfloat16")])
@pytest.mark.parametrize("between", ["uint8", "uint64"])
def test_casts_of_texts_and_of_types_that_numpy_lacks_stay(
    ends: tuple[str, str], between: str
) -> None:
    source, result = ends
    casts = f"h = Cast <to = {to(between)}> (x) y = Cast <to = {to(result)}> (h)"
    model = parsed(f"({source}[4] x) => ({result}[4] y) {{ {casts} }}", 13)
    assert not apply(model, [join_casts], None, {}).names


@needs_qnn
@pytest.mark.parametrize("dtype", ["int8", "int16", "uint16", "uint64"])
def test_integers_of_types_that_an_npu_lacks_are_computed_inside_of_a_graph(dtype: str) -> None:
    body = f"a = Cast <to = {to(dtype)}> (x) b = Mod (a, n) c = Cast <to = 7> (b)"
    if dtype == "uint64":
        body = body.replace("Mod (a, n)", 'BitShift <direction = "LEFT"> (a, n)')
    model = parsed(
        f"(int64[64] x) => (int64[64] y) <{dtype} n = {{9}}, int64 k = {{3}}> {{ {body} y = Add (c, k) }}",
        13,
    )
    feeds: dict[str, Any] = {"x": np.arange(64)}
    (expected,) = session(model).run(None, feeds)
    changed = apply(model, [compute_in_32_bits, shift_as_product, join_casts], None, {})
    assert changed.names[-1] == "join_casts"
    np.testing.assert_array_equal(on_the_npu(model, feeds), expected)
