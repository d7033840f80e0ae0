"""What QNN refuses, rewritten, compiled and run on its simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext.api import BuildError, ValidationStatus
from tests.conftest import needs_qnn
from tests.integration.conftest import compile_for_qnn, compile_job_for_qnn
from tests.models import parsed

pytestmark = needs_qnn


STORED = f"""<int64[4] n = {{8, 8, 8, 8}}, uint8[8, 1, 16] w = {{{", ".join(map(str, range(128)))}}},
float[8] s = {{0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4}}>"""
BLOCKS = "com.microsoft.MatMulNBits <K = 32, N = 8, bits = 4, block_size = 32>"


def test_what_is_refused_is_rewritten_and_named(tmp_path: Path) -> None:
    refused = parsed(
        f"""(float[4, 8, 32] x) => (float[32, 8] y) {STORED} {{
            a = Sigmoid (x)
            b = ReverseSequence <batch_axis = 0, time_axis = 1> (a, n)
            c = Flatten <axis = 2> (b)
            d = {BLOCKS} (c, w, s)
            y = Erf (d) }}""",
    )
    lines: list[str] = []
    job = compile_job_for_qnn(refused, tmp_path, log=lines.append)
    (compiled,) = job.models
    assert compiled.coverage is not None
    assert compiled.coverage.uncovered == ()
    names = ("reverse_sequence_as_gather", "batch_matmul_nbits", "erf_as_tanh")
    assert compiled.preparation.rewrites == names
    assert job.notes == ("unmodified: 3 nodes on the CPU",)
    assert compiled.validation.status is ValidationStatus.RAN
    assert any("3 rewrites of 3 nodes" in line for line in lines)
    assert onnx.load(tmp_path / "a.onnx") == refused


ODD: dict[str, tuple[int, str, dict[str, Any], int]] = {
    "decompose_normalization": (23, """(float[1, 4, 8, 16] x) => (float[1, 4, 8, 16] y) {
        a = Sigmoid (x)
        [good] b = RMSNormalization (a, s)
        [odd] c = RMSNormalization <axis = 2> (b, t)
        [better] d = RMSNormalization (c, s)
        y = Sigmoid (d) }""", {"s": (16,), "t": (8, 16)}, 5 - 1 + 6),
    "clip_as_max_min": (17, """(float[4, 8] x) => (float[4, 8] y) <float low = {0.1}, float high = {0.9}> {
        a = Sigmoid (x)
        [good] b = Clip (a, low, high)
        m = ReduceMin <keepdims = 0> (x)
        [odd] c = Clip (b, m, m)
        [better] d = Clip (c, low, high)
        y = Sigmoid (d) }""", {}, 6 - 1 + 2),
}  # fmt: skip
"""By the rewrite that applies: one node that QNN refuses among others of its operator; the nodes after it."""


@pytest.mark.parametrize("rewrite", ODD)
def test_the_good_nodes_of_an_operator_stay_where_an_odd_one_is_refused(
    tmp_path: Path, rewrite: str
) -> None:
    opset, text, stored, nodes = ODD[rewrite]
    lines: list[str] = []
    job = compile_job_for_qnn(parsed(text, opset, **stored), tmp_path, log=lines.append)
    (compiled,) = job.models
    prepared = compiled.preparation
    assert (prepared.rewrites, prepared.replaced, prepared.nodes) == ((rewrite,), 1, nodes)
    assert job.notes == ("unmodified: 1 node on the CPU",)
    assert compiled.coverage is not None
    assert (compiled.coverage.nodes, compiled.coverage.uncovered) == (nodes, ())
    assert compiled.validation.status is ValidationStatus.RAN
    assert any("1 rewrite of 1 node" in line for line in lines)


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
        assert problem.notes == ("slice_as_gather does not apply to 1 Slice: its start has 2 axes",)


ATTENDING = """(float[1, 2, 1, 8] x, float[1, 2, 9, 8] k, int64[1] n) => (float[1, 2, 1, 8] y) {
    a = Sigmoid (x) y = Attention (a, k, k, , , , n) }"""
MESSAGES = """(float[9, 8] x, int64[9, 1] i) => (float[4, 8] y)
<int64[2] n = {9, 8}, float[1, 8] s = {0, 0, 0, 0, 0, 0, 0, 0}, int64[2] m = {4, 8}> {
    a = Sigmoid (x) w = Expand (i, n) z = Expand (s, m)
    y = ScatterElements <reduction = "add"> (z, w, a) }"""

CACHING = """(float[1, 2, 1, 8] x, float[1, 2, 9, 8] k, int64[1] at) => (float[1, 2, 9, 8] y) {
    a = Sigmoid (x) y = TensorScatter (k, a, at) }"""
SQUARING = (
    "(float[4, 8] x) => (float[4, 1] y) { a = Sigmoid (x) y = ReduceSumSquare <axes = [1]> (a) }"
)


@pytest.mark.parametrize(
    ("opset", "text", "rewrite"),
    [
        (24, ATTENDING, "inline_function"),
        (18, MESSAGES, "scatter_as_matmul"),
        (24, CACHING, "tensor_scatter_as_where"),
        (13, SQUARING, "decompose_reduction"),
    ],
)
def test_what_qnn_refuses_is_compiled_in_another_form(
    tmp_path: Path, opset: int, text: str, rewrite: str
) -> None:
    """The cache: microsoft/onnxruntime#27485 and microsoft/onnxruntime-genai#2235; the sum of squares:
    istupakov/onnx-asr#124.
    """
    compiled = compile_for_qnn(parsed(text, opset), tmp_path)
    assert compiled.coverage is not None
    assert compiled.coverage.uncovered == ()
    assert compiled.preparation.rewrites == (rewrite,)
    assert compiled.validation.status is ValidationStatus.RAN


OTHER_WIDTHS = {
    "double": "a = Tanh (x) y = Exp (a)",
    "int8": "a = Add (x, x) b = Cast <to = 6> (a) y = Cast <to = 3> (b)",
}


@pytest.mark.parametrize("dtype", OTHER_WIDTHS)
def test_the_cpu_casts_values_of_types_that_the_ep_lacks(tmp_path: Path, dtype: str) -> None:
    model = parsed(f"({dtype}[4, 8] x) => ({dtype}[4, 8] y) {{ {OTHER_WIDTHS[dtype]} }}")
    (compiled,) = compile_job_for_qnn(model, tmp_path).models
    assert compiled.coverage is not None
    assert compiled.coverage.share == 1
    assert {node.op for node in compiled.coverage.uncovered} == {"Cast"}
    assert all(node.waived for node in compiled.coverage.uncovered)
    assert "compute_in_32_bits" in compiled.preparation.rewrites


def test_what_qnn_computes_wrong_is_rewritten_at_once(tmp_path: Path) -> None:
    model = parsed(
        """(float[1, 3, 32, 32] x) => (float[1, 3, 32, 32] y)
        { y = AveragePool <kernel_shape = [3, 3], pads = [2, 2, 0, 0]> (x) }"""
    )
    (compiled,) = compile_job_for_qnn(model, tmp_path).models
    assert compiled.preparation.rewrites == ("pool-padding",)
    assert compiled.validation.status is ValidationStatus.RAN


def test_a_node_whose_values_float16_lacks_is_left_to_the_cpu(tmp_path: Path) -> None:
    x = np.array([[0, 1, 2, 3], [10000, 10001, 10002, 10003]], np.float32)
    np.savez(tmp_path / "samples.npz", x=x)
    model = parsed(
        """(float[2, 4] x) => (float[2, 4] y, float[2, 4] z)
        { [shares] y = Softmax (x) z = Tanh (x) }"""
    )
    validate = {"inputs": str(tmp_path / "samples.npz")}
    with pytest.raises(BuildError, match=r"EPC302[^$]*Softmax shares \(has an error of 49 %\)"):
        compile_for_qnn(model, tmp_path, settings={"validate": validate})
    settings = {"min-coverage": 0.1, "validate": validate}
    compiled = compile_for_qnn(model, tmp_path, settings=settings)
    assert compiled.preparation.rewrites == ("leave_to_cpu",)
    assert compiled.validation.status is ValidationStatus.RAN
    assert compiled.coverage is not None
    assert compiled.coverage.compiled


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ("4, 1", "y = Gather <axis = 1> (v, one)"),
        ("4, 3", "y = Neg (v)"),
        ("4, 2", "y = MatMul (v, w)"),
    ],
)
def test_transposed_int64_can_be_read_on_the_cpu(tmp_path: Path, shape: str, text: str) -> None:
    x = np.random.default_rng(1).integers(-8, 8, (3, 6, 4)).astype(np.float32)
    np.savez(tmp_path / "samples.npz", x=x)
    model = parsed(
        f"""(float[3, 6, 4] x) => (int64[{shape}] y)
        <int64[1] one = {{1}}, int64[3, 2] w = {{1, 2, 3, 4, 5, 6}}> {{
            t = Transpose <perm = [2, 1, 0]> (x) v = ArgMax <axis = 1, keepdims = 0> (t) {text} }}""",
        17,
    )
    settings = {"min-coverage": 0.5, "validate": {"inputs": str(tmp_path / "samples.npz")}}
    compiled = compile_for_qnn(model, tmp_path, settings=settings)
    assert "expand_int64_inputs" in compiled.preparation.rewrites
    assert compiled.validation.status is ValidationStatus.RAN
    assert [agreement.max_abs for agreement in compiled.validation.agreements] == [0]
