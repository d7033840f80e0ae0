"""What an EP computes wrong of integers is computed otherwise: the same on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph import inference
from hatch_epcontext.graph.number_format import RewriteName
from hatch_epcontext.graph.rewrites import REWRITES
from hatch_epcontext.graph.rewrites.precise import PRECISE, applicable
from hatch_epcontext.graph.rewriting import apply
from hatch_epcontext.worker.ort_values import value_types
from tests.conftest import needs_qnn, newer_runtime
from tests.graph.rewrites.equal import operators, session
from tests.graph.rewrites.test_precise import on_the_npu
from tests.models import parsed, untyped

WHOLE = np.array([[0, 1, -1, 7, -7, 24, -24, 25, 1999, -2001, 481336, -999983, 2**30, -(2**30)]])
SIZE = WHOLE.size
ROWS = np.random.default_rng(0).standard_normal((1, 20)).astype(np.float32)
OUTSIDE = np.array([[0, -1, 19, -20, 5]])
FEW = np.array([[3.5, -70000]])

TAKEN = "(float[1, 20] t, int64[1, 5] i) => (y)"


def model(body: str, opset: int = 17) -> onnx.ModelProto:
    return untyped(body if "=>" in body else f"(int64[1, {SIZE}] x) => (y) {{ {body} }}", opset)


def feeds(source: onnx.ModelProto) -> Mapping[str, Any]:
    known = {
        "x": WHOLE,
        "t": ROWS,
        "i": OUTSIDE,
        "b": WHOLE.astype(np.uint8),
        "c": WHOLE.astype(np.int8),
        "d": WHOLE.astype(np.uint16),
        "u": OUTSIDE + 0.5,
        "f": FEW,
    }
    given = {value.name: known[value.name] for value in source.graph.input}
    return {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in given.items()}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        *(("truncate", f"k = Constant<value_int={k}>() y = Div(x, k)") for k in (2, -8, 1024)),
        ("truncate", "k = Constant<value_int=3>() a = Abs(x) d = Add(a, k) y = Div(x, d)"),
        ("truncate", "k = Constant<value_int=3>() a = Add(x, x) d = Add(a, k) y = Div(x, d)"),
        *(("modulo", f"k = Constant<value_int={k}>() y = Mod(x, k)") for k in (1, 24, 1000, -3)),
        *(("modulo", f"k = Constant<value_int={k}>() y = Mod<fmod=1>(x, k)") for k in (24, -3)),
        ("modulo", "k = Constant<value_int=24>() a = Abs(x) y = Mod(a, k)"),
        ("modulo", "k = Constant<value_int=3>() a = Add(x, x) d = Add(a, k) y = Mod(x, d)"),
        ("truth", "y = Cast<to=9>(x)"),
        ("bytes", f"(uint8[1, {SIZE}] b) => (y) {{ y = Cast<to=1>(b) }}"),
        ("bytes", "a = Cast<to=6>(x) y = Cast<to=2>(a)"),
        ("bytes", f"(int8[1, {SIZE}] c) => (y) {{ y = Cast<to=2>(c) }}"),
        ("bytes", f"(uint16[1, {SIZE}] d) => (y) {{ y = Cast<to=2>(d) }}"),
        ("indices", f"{TAKEN} {{ y = GatherElements<axis=1>(t, i) }}"),
        ("indices", f"{TAKEN} {{ j = Cast<to=6>(i) y = Gather<axis=1>(t, j) }}"),
        (
            "reciprocals",
            "(float[1, 2] f) => (y) <float[2] k = {16, 65536}> { y = Div(f, k) }",
        ),
        ("reciprocals", "(float[1, 2] f) => (y) <float k = {1048576}> { y = Div(f, k) }"),
        ("indices", f"{TAKEN} {{ j = Neg(i) k = Add(j, i) y = GatherElements<axis=-1>(t, k) }}"),
        (
            "indices",
            "(float[1, 20] t, int64[1, 5] i, float[1, 5] u) => (y) { y = ScatterElements<axis=1>(t, i, u) }",
        ),
        (
            "indices",
            """(float[1, 20] t, int64[1, 5] i, float[1, 5] u) => (y)
                <int64[2] n = {20, 1}, int64[2] m = {5, 1}>
                { r = Reshape(t, n) j = Reshape(i, m) v = Reshape(u, m) y = ScatterND(r, j, v) }""",
        ),
        (
            "hard-swish",
            "(float[1, 20] t) => (y) { s = HardSigmoid<alpha=0.1666667>(t) y = Mul(t, s) }",
        ),
    ],
)
def test_a_rewritten_node_computes_the_same_for_all_integers(name: RewriteName, body: str) -> None:
    """Indices: microsoft/onnxruntime#15966; HardSwish: onnxruntime/onnxruntime-qnn#392 and #535."""
    before = model(body)
    after = onnx.ModelProto.FromString(before.SerializeToString())
    assert name in applicable(before)
    assert apply(after, [PRECISE[name]], None, {}).names == (name,)
    assert operators(after) != operators(before) or name == "hard-swish"
    onnx.checker.check_model(after, full_check=True)
    given = feeds(before)
    (expected,) = session(before).run(None, given)
    (got,) = session(after).run(None, given)
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == expected.dtype


def test_integers_that_are_computed_count_if_their_types_are_known() -> None:
    before = model("k = Constant<value_int=3600>() d = Div(x, k) y = Mod(d, k)")
    del before.graph.value_info[:]
    types = {value.name: value.type for value in inference.inferred(before).value_info}
    assert "modulo" not in applicable(before)
    assert "modulo" in applicable(before, types)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("truncate", "k = Constant<value_int=2>() a = Abs(x) y = Div(a, k)"),
        # An EP shifts only for powers of two.
        ("truncate", "k = Constant<value_int=100>() y = Div(x, k)"),
        ("truncate", "(float[1, 20] t) => (y) { k = Constant<value_float=2.0>() y = Div(t, k) }"),
        (
            "modulo",
            "(float[1, 20] t) => (y) { k = Constant<value_int=2>() a = ArgMax(t) y = Mod(a, k) }",
        ),
        ("truth", "(float[1, 20] t) => (y) { y = Cast<to=9>(t) }"),
        ("truth", f"(uint8[1, {SIZE}] b) => (y) {{ y = Cast<to=9>(b) }}"),
        ("bytes", "y = Cast<to=1>(x)"),
        (
            "indices",
            "(float[1, 20] t) => (y) { i = ArgMax<axis=1>(t) y = GatherElements<axis=1>(t, i) }",
        ),
        (
            "indices",
            "(float[1, 20] t) => (y) <int64[1, 1] i = {-1}> { y = GatherElements<axis=1>(t, i) }",
        ),
        ("indices", f"{TAKEN} {{ y = Gather<axis=1>(t, i) }}"),
        ("hard-swish", "(float[1, 20] t) => (y) { s = HardSigmoid(t) y = Mul(s, t) }"),
        ("reciprocals", "(float[1, 20] t) => (y) <float[1] k = {65504}> { y = Div(t, k) }"),
        ("reciprocals", "(float[1, 2] t) => (y) <float[2] k = {16, 8192}> { y = Div(t, k) }"),
    ],
)
def test_what_is_right_by_itself_stays(name: RewriteName, body: str) -> None:
    before = model(body)
    after = onnx.ModelProto.FromString(before.SerializeToString())
    assert apply(after, [PRECISE[name]], None, {}).names == ()
    assert after == before


@pytest.mark.parametrize("bits", [8, pytest.param(16, marks=newer_runtime), 32, 64])
@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
def test_shifts_are_right_at_the_ends_of_a_type(bits: int, direction: str) -> None:
    dtype = np.dtype(f"uint{bits}")
    values = np.array([0, 1, 2, 3, *(2 ** (bits - 1) + n for n in (-1, 0, 1)), 2**bits - 1], dtype)
    values, amounts = (
        np.ravel(array) for array in np.meshgrid(values, np.arange(bits, dtype=dtype))
    )
    kind = f"{dtype}[{values.size}]"
    body = f"y = BitShift<direction='{direction}'>(x, n)".replace("'", '"')
    source = model(f"({kind} x, {kind} n) => (y) {{ {body} }}")
    before = session(source).run(None, {"x": values, "n": amounts})
    assert apply(source, REWRITES, frozenset({"BitShift"}), value_types(source, Path())).names
    after = session(source).run(None, {"x": values, "n": amounts})
    np.testing.assert_array_equal(after[0], before[0])


@needs_qnn
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize(
    "call",
    [
        "ReduceSum <keepdims = 0> (x, axes)",
        "ReduceSum (x)",
        "CumSum (x, axis)",
        "CumSum <reverse = 1> (x, axis)",
    ],
)
def test_a_long_sum_of_integers_is_exact_on_an_npu(dtype: str, call: str) -> None:
    model = parsed(
        f"""({dtype}[8, 16] x) => ({dtype}[] y) <int64[1] axes = {{1}}, int64 axis = {{0}}> {{
        y = {call} }}""",
        13,
        check=False,
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model = onnx.shape_inference.infer_shapes(model)
    x = np.random.default_rng(0).integers(-(10**7), 3 * 10**7, (8, 16)).astype(dtype)
    if "(x)" in call:
        x //= 2
    (expected,) = session(model).run(None, {"x": x})
    assert "long-sums" in applicable(model)
    assert apply(model, [PRECISE["long-sums"]], None, {}).replaced == 1
    (found,) = session(model).run(None, {"x": x})
    np.testing.assert_array_equal(found, expected)
    assert apply(model, [PRECISE["long-sums"]], None, {}).replaced == 0
    if "reverse" not in call:
        np.testing.assert_array_equal(on_the_npu(model, {"x": x}), expected)


@pytest.mark.parametrize("call", ["ReduceSum (i, axes)", "CumSum (i, axis)"])
def test_a_sum_of_few_small_integers_stays(call: str) -> None:
    model = parsed(
        f"""(bool[8, 16] x) => (int64[a, b] y) <int64[1] axes = {{1}}, int64 axis = {{0}}>
        {{ i = Cast <to = 7> (x) y = {call} }}""",
        13,
    )
    assert apply(model, [PRECISE["long-sums"]], None, {}).replaced == 0
