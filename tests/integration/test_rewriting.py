"""What QNN refuses, rewritten, compiled and run on its simulator."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from hatch_epcontext.api import BuildError, ValidationStatus
from tests.conftest import needs_qnn
from tests.integration.conftest import compile_for_qnn
from tests.models import parsed

pytestmark = needs_qnn


def test_what_is_refused_is_rewritten_and_named(tmp_path: Path) -> None:
    refused = parsed(
        """(float[4, 8] x) => (float[4, 8] y) {
            m = MatMul (x, w)
            mean = ReduceMean <keepdims = 0> (m)
            c = Clip (m, mean)
            y = Erf (c) }""",
        w=(8, 8),
    )
    lines: list[str] = []
    compiled = compile_for_qnn(refused, tmp_path, log=lines.append)
    assert compiled.coverage is not None
    assert compiled.coverage.uncovered == ()
    assert compiled.preparation.rewrites == ("erf_as_tanh", "clip_as_max_min")
    assert compiled.preparation.tried == ("unmodified: 2 nodes on the CPU",)
    assert compiled.validation.status is ValidationStatus.RAN
    assert any("rewritten (erf_as_tanh; clip_as_max_min)" in line for line in lines)
    assert onnx.load(tmp_path / "a.onnx") == refused


SLICING = """(float[4, 8] x) => (float[2, 3] y) <int64[2] zero = {0, 0}, int64[2] one = {1, 2},
int64[2] size = {2, 3}, int64[2] axes = {0, 1}> {
    a = Sigmoid (x)
    m = ReduceMax <keepdims = 0> (a)
    k = ReduceMax <keepdims = 0> (x)
    c = Greater (k, m)
    start = Where (c, zero, one)
    end = Add (start, size)
    [moving] y = Slice (a, start, end, axes) }"""


def test_a_node_that_stays_is_named_with_the_reason_why_no_rewrite_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HATCH_EPCONTEXT_CACHE_DIR", str(tmp_path / "cache"))
    for _ in range(2):
        # The second time from the cache.
        with pytest.raises(BuildError) as raised:
            compile_for_qnn(parsed(SLICING), tmp_path)
        (problem,) = raised.value.problems
        assert "Left to the CPU: Slice moving (" in problem.message
        assert "; slice_as_gather does not apply: its start has 2 axes)" in problem.message
        assert problem.tried == ("slice_as_gather does not apply to 1 Slice: its start has 2 axes",)


NUMBERS = ", ".join(map(str, range(128)))


STORED = f"""<float[8] one = {{1, 1, 1, 1, 1, 1, 1, 1}}, uint8[8, 1, 16] w = {{{NUMBERS}}},
float[8] s = {{0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4}}>"""


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
    ],
    ids=[
        "square",
        "magnitude",
        "computed normalization",
        "static cache",
        "blocks",
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
