from __future__ import annotations

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph.rewrites.elementwise import (
    cast_as_dequantize,
    clip_as_max_min,
    decompose_comparison,
    erf_as_tanh,
)
from hatch_epcontext.graph.rewriting import Rewrite
from tests.graph.rewrites.equal import check_equal, operators, reasons, rewritten
from tests.models import parsed


@pytest.mark.parametrize("opset", [9, 17])
@pytest.mark.parametrize(("elem_type", "tolerance"), [(1, 2e-7), (10, 1e-3)])
def test_an_error_function_is_exact_in_its_dtype(
    opset: int, elem_type: int, tolerance: float
) -> None:
    """Casts give it either dtype in a model of float32."""
    model = parsed(
        f"""(float[9999] x) => (float[9999] y)
        {{ a = Cast <to = {elem_type}> (x) b = Erf (a) y = Cast <to = 1> (b) }}""",
        opset,
    )
    after = rewritten(model, erf_as_tanh, tolerance=tolerance)
    assert {"Tanh", "Clip"} < {*operators(after)}
    for scale in (0.01, 1, 9, 6e4):
        check_equal(model, after, tolerance, scale)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ("low, high", ["Max", "Min"]),
        ("low", ["Max"]),
        (", high", ["Min"]),
        ("low, infinity", ["Max"]),
        (",", ["Identity"]),
    ],
)
def test_computed_bounds_become_max_and_min(bounds: str, expected: list[str]) -> None:
    model = parsed(
        f"""(float[2, 9] x) => (float[2, 9] y) <float half = {{0.5}}> {{
            small = ReduceMin <keepdims = 0> (x)
            low = Mul (small, half)
            high = Neg (low)
            y = Clip (x, {bounds}) }}""",
        infinity=np.float32(np.inf),
    )
    after = operators(rewritten(model, clip_as_max_min))
    assert [name for name in after if name in ("Max", "Min", "Identity")] == expected


def test_a_comparison_has_a_shape_behind_what_has_none() -> None:
    """As in models of PyTorch, whose opset defines it by other operators."""
    for operator, expected in (("GreaterOrEqual", "Greater"), ("LessOrEqual", "Less")):
        model = parsed(
            f"""(float[2, 3] x, float[2, 3] z) => (float[2, 3] y)
            {{ c = {operator} (x, z) y = Where (c, x, z) }}""",
            13,
        )
        after = operators(rewritten(model, decompose_comparison))
        assert after == [expected, "Equal", "Or", "Where"]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_a_cast_of_small_integers_is_their_dequantization(dtype: str) -> None:
    model = parsed(f"({dtype}[99] x) => (float[99] y) {{ y = Cast <to = 1> (x) }}")
    del model.opset_import[1:]
    after = rewritten(model, cast_as_dequantize)
    assert operators(after) == ["com.microsoft.DequantizeLinear"]
    # ONNX Runtime opens no model without it.
    assert [entry.domain for entry in after.opset_import] == ["", "com.microsoft"]


@pytest.mark.parametrize(
    ("rewrite", "model", "expected"),
    [
        (clip_as_max_min, parsed("""(float[9] x) => (float[9] y)
            { y = Clip <min = 0.0, max = 6.0> (x) }""", 6), ["its bounds are attributes"]),
        (cast_as_dequantize, parsed("(int32[9] x) => (float[9] y) { y = Cast <to = 1> (x) }"), []),
        (cast_as_dequantize, parsed("(int16[9] x) => (int32[9] y) { y = Cast <to = 6> (x) }"), []),
        (decompose_comparison, parsed("(float[9] x) => (bool[9] y) { y = Greater (x, x) }"), []),
    ],
)  # fmt: skip
def test_what_a_rewrite_is_not_for_stays(
    rewrite: Rewrite, model: onnx.ModelProto, expected: list[str]
) -> None:
    assert reasons(model, rewrite) == expected
