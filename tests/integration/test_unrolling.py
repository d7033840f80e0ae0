"""Loops and layers that QNN refuses, unrolled, compiled and run on its simulator."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import numpy_helper

from hatch_epcontext.api import BuildError, ValidationStatus
from tests.conftest import needs_qnn
from tests.graph.rewrites.unrolled import recurrent
from tests.integration.conftest import compile_for_qnn, compile_job_for_qnn
from tests.models import parsed

pytestmark = needs_qnn

LOOP = """
(float[1, 8] x) => (float[1, 8] y)
<int64 trips = {3}, bool true = {1}>
{
    sum = Add (x, x)
    y = Loop (trips, true, sum) <body = body (int64 i, bool go, float[1, 8] state)
        => (bool go, float[1, 8] next) { rate = Sigmoid (state) next = Mul (rate, x) }>
}
"""


def test_a_loop_of_known_length_becomes_one_context(tmp_path: Path) -> None:
    model = compile_for_qnn(parsed(LOOP), tmp_path)
    assert model.coverage is not None
    assert (model.coverage.partitions, model.coverage.uncovered) == (1, ())
    assert model.preparation is not None
    assert model.preparation.rewrites == ("unroll_loop",)


def test_the_limit_0_leaves_it_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(BuildError) as raised:
        compile_for_qnn(parsed(LOOP), tmp_path, settings={"unroll-limit": 0})
    assert "Loop" in raised.value.problems[0].message


def test_a_layer_that_qnn_computes_wrong_is_unrolled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HATCH_EPCONTEXT_CACHE_DIR", str(tmp_path / "cache"))
    layer = recurrent("GRU", inputs=("B", "h"))
    for weights in layer.graph.initializer:
        # QNN's kernel is wrong where the gates have large sums.
        weights.CopyFrom(numpy_helper.from_array(20 * numpy_helper.to_array(weights), weights.name))
    lines: list[str] = []
    for folder in ("first", "second"):
        job = compile_job_for_qnn(layer, tmp_path / folder, log=lines.append)
        (model,) = job.models
        assert model.preparation is not None
        assert model.preparation.rewrites == ("unroll_recurrent",)
        assert "differs from the CPU's" in job.notes[0]
        assert model.validation.status is ValidationStatus.RAN
    assert lines[-1].endswith("from the cache")
