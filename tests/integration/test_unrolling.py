"""Loops and layers that QNN refuses, unrolled, compiled and run on its simulator."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import numpy_helper

from hatch_epcontext.api import BuildError, ValidationStatus
from tests.conftest import needs_qnn
from tests.graph.unrolling.models import recurrent
from tests.integration.conftest import compile_for_qnn
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
    assert model.preparation.rewrites == ("Loop unrolled 3 times",)


SCAN = """
(float[1, 8] h, float[5, 1, 8] x) => (float[1, 8] last, float[5, 1, 8] y)
{
    last, y = Scan <num_scan_inputs = 1, body = body (float[1, 8] state, float[1, 8] item)
        => (float[1, 8] next, float[1, 8] next) { sum = Add (state, item) next = Tanh (sum) }> (h, x)
}
"""


def test_a_cell_that_returns_its_state_as_its_result_by_the_same_name_is_compiled(
    tmp_path: Path,
) -> None:
    """ONNX Runtime's CPU computes one of both wrong: the compared model has two names."""
    model = compile_for_qnn(parsed(SCAN, check=False), tmp_path)
    assert model.preparation.rewrites == ("Scan unrolled 5 times",)
    assert model.validation.status is ValidationStatus.RAN


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
        model = compile_for_qnn(layer, tmp_path / folder, log=lines.append)
        assert model.preparation is not None
        assert model.preparation.rewrites == ("GRU unrolled 3 times",)
        assert "differs from the CPU's" in model.preparation.tried[0]
        assert model.validation.status is ValidationStatus.RAN
    assert lines[-1].endswith("from the cache")
