"""What QNN refuses, rewritten, compiled and run on its simulator."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from hatch_epcontext.api import ValidationStatus
from tests.conftest import needs_qnn
from tests.integration.conftest import compile_for_qnn
from tests.models import parsed

pytestmark = needs_qnn


def test_what_is_refused_is_rewritten_and_named(tmp_path: Path) -> None:
    refused = parsed(
        """(float[4, 8] x) => (float[6, 4] y) {
            m = MatMul (x, w)
            mean = ReduceMean <keepdims = 0> (m)
            c = Clip (m, mean)
            y = Einsum <equation = "bi,io->ob"> (c, v) }""",
        w=(8, 8),
        v=(8, 6),
    )
    lines: list[str] = []
    compiled = compile_for_qnn(refused, tmp_path, log=lines.append)
    assert compiled.coverage is not None
    assert compiled.coverage.uncovered == ()
    assert compiled.preparation.rewrites == (
        "Clip as Max and Min",
        "Einsum as MatMul, Mul and ReduceSum",
    )
    assert compiled.preparation.tried == ("unmodified: 2 nodes on the CPU",)
    assert compiled.validation.status is ValidationStatus.RAN
    assert any("rewritten (Clip as Max and Min; Einsum" in line for line in lines)
    assert onnx.load(tmp_path / "a.onnx") == refused


def numbers(count: int, step: int = 1) -> str:
    return ", ".join(str(index * step % 128) for index in range(count))


STORED = f"""<float[4, 8] words = {{{numbers(32, 5)}}}, float[2, 8] places = {{{numbers(16, 9)}}},
float[8] one = {{1, 1, 1, 1, 1, 1, 1, 1}}, int32[1, 2] ids = {{3, 1}},
uint8[8, 1, 16] w = {{{numbers(128)}}}, float[8] s = {{0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4}},
int64[6] six = {{1, 3, 1, 4, 1, 2}}, int64[6] wide = {{1, 3, 2, 4, 2, 2}}, int64[3] few = {{2, 6, 8}}>"""


@pytest.mark.parametrize(
    ("opset", "values", "nodes"),
    [
        (13, "(float[4, 8] x) => (float[4, 1] y)", "y = ReduceSumSquare <axes = [1]> (a)"),
        (7, "(float[4, 8] x) => (float[4, 1] y)", "y = ReduceL1 <axes = [1]> (a)"),
        (
            13,
            "(float[2, 8, 4] x) => (float[2, 8, 4] y)",
            """m = ReduceMean <axes = [0, 2], keepdims = 0> (a) n = ReduceMean <axes = [0, 2]> (a)
            b = Sub (a, n) c = Mul (b, b) v = ReduceMean <axes = [0, 2], keepdims = 0> (c)
            y = BatchNormalization (a, one, one, m, v)""",
        ),
        (
            24,
            "(float[1, 2, 1, 8] x, float[1, 2, 9, 8] k, int64[1] at, int64[1] n) => (float[1, 2, 1, 8] y)",
            "c = TensorScatter (k, a, at) y = Attention (a, c, c, , , , n)",
        ),
        (
            17,
            "(float[3, 32] x) => (float[3, 8] y)",
            "y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 4, block_size = 32> (a, w, s)",
        ),
        (
            17,
            "(float[8] x) => (float[1, 2, 8] y)",
            """b, m = com.microsoft.EmbedLayerNormalization (ids, , words, places, , one, one)
            y = Mul (a, b)""",
        ),
        (
            16,
            "(float[1, 2, 5, 5] x, float[1, 3, 4, 2] g) => (float[1, 2, 3, 4] y)",
            'y = GridSample <mode = "bicubic"> (a, g)',
        ),
        (
            17,
            "(float[3, 8] x) => (float[2, 6, 8] y)",
            "b = Reshape (a, six) c = Expand (b, wide) y = Reshape (c, few)",
        ),
    ],
    ids=[
        "square",
        "magnitude",
        "computed normalization",
        "static cache",
        "blocks",
        "embedding",
        "bicubic",
        "six",
    ],
)
def test_what_qnn_refuses_is_compiled_in_another_form(
    tmp_path: Path, opset: int, values: str, nodes: str
) -> None:
    text = f"{values} {STORED} {{ a = Sigmoid (x) {nodes} }}"
    compiled = compile_for_qnn(parsed(text, opset), tmp_path)
    assert compiled.coverage is not None
    assert compiled.coverage.uncovered == ()
    assert compiled.preparation.rewrites
    assert compiled.validation.status is ValidationStatus.RAN
