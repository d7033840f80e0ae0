"""ONNX's own node tests of the operators that rewrites replace, before and after them, on the CPU."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from benchmarks.operators import write_tests
from hatch_epcontext.graph.rewrites import REWRITES, UNROLLS
from hatch_epcontext.graph.rewriting import apply
from hatch_epcontext.worker.ort_values import value_types
from tests.conftest import newer_runtime
from tests.graph.rewrites.equal import session

# Making all of ONNX's tests takes two seconds.
pytestmark = [pytest.mark.slow, newer_runtime]

_COUNTS = """
Acos 2 Acosh 2 Add 6 AffineGrid 4 ArgMax 8 ArgMin 8 Asin 2 Asinh 2 Atanh 2 Attention 50 AveragePool
20 BatchNormalization 2 BitShift 28 BitwiseAnd 3 BitwiseNot 3 BitwiseOr 3 BitwiseXor 3 Celu 2 Clip 9
Col2Im 5 ConvTranspose 10 Cosh 2 CumProd 9 CumSum 8 DFT 10 DequantizeLinear 0 Det 2 Div 6 Dropout 6
Einsum 6 GatherElements 3 Gemm 11 GridSample 18 Hardmax 7 LayerNormalization 19
LinearAttention 14 LpNormalization 3 LpPool 8 MatMulInteger 1 Max 5 MaxPool 18 MaxUnpool 2
MeanVarianceNormalization 1 Mod 15 OneHot 4 Pad 6 Pow 6 ReduceMax 1 ReduceMin 1 ReduceProd 8 Resize
39 ReverseSequence 2 RotaryEmbedding 8 ScatterElements 7 Shrink 2 Sinh 2 Softsign 2 SpaceToDepth 1
Sum 1 TensorScatter 3 Trilu 16 Upsample 1
"""

OPERATORS: Mapping[str, int] = {
    name: int(count)
    for name, count in zip(_COUNTS.split()[::2], _COUNTS.split()[1::2], strict=True)
}
"""Operators, with the number of tests at least that rewrites change."""


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Path]]:
    """The models of each operator, beside their inputs."""
    folder = tmp_path_factory.mktemp("node-tests")
    paths = defaultdict(list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, operator in write_tests(folder, [*OPERATORS]).items():
            paths[operator].append(folder / f"{name}.onnx")
    return paths


@pytest.mark.parametrize("operator", OPERATORS)
def test_rewrites_compute_what_onnx_tests(operator: str, tests: Mapping[str, list[Path]]) -> None:
    changed = 0
    for path in tests[operator]:
        model = onnx.load(path)
        inputs = dict(np.load(path.with_suffix(".npz")))
        try:
            before = session(model).run(None, inputs)
        except (ort_errors.NotImplemented, ort_errors.Fail, ort_errors.InvalidArgument):
            # ONNX Runtime has no kernel for it, or not for this node.
            continue
        types = value_types(model, path)
        names = apply(model, REWRITES, frozenset({operator}), types).names
        names += apply(model, UNROLLS, frozenset({"Scan"}), types, 5000).names
        if not names:
            continue
        for right, result in zip(before, session(model).run(None, inputs), strict=True):
            assert (right.dtype, right.shape) == (result.dtype, result.shape), path.name
            if right.dtype.kind == "f":
                # Half of the precision of float16, and ONNX Runtime's DFT is off by 3e-4.
                atol = 2e-2 if right.dtype == np.float16 else 5e-4
                # ONNX Runtime's Attention masks with the lowest number, and ONNX with minus infinity.
                low, lowest = np.maximum(result, -6e4), np.maximum(right, -6e4)
                np.testing.assert_allclose(low, lowest, 1e-3, atol, err_msg=path.name)
            else:
                np.testing.assert_array_equal(result, right, err_msg=path.name)
        changed += 1
    assert changed >= OPERATORS[operator]
