"""`runner`: a model with several sizes and any batch, run as one session."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.loader.shipped import CPU_EP, SOURCE, Shipper, changed, component, outcomes, variant
from tests.models import network, save

BATCH = {"inputs": {"x": 0}, "outputs": {"y": 0}}


def fixed(batch: int) -> dict[str, Any]:
    inputs = [{"name": "x", "dtype": "float32", "shape": [batch, 1, 8, 8]}]
    return variant(f"a/fixed{batch}", "a.onnx", inputs=inputs)


@pytest.fixture
def rows() -> Any:
    return np.random.default_rng(0).standard_normal((7, 1, 8, 8)).astype(np.float32)


def write(ship: Shipper, *batches: int, batch: dict[str, Any] | None = None) -> Any:
    """An app with the model ``a`` on the target ``fixed``, in a component for each of ``batches``, and its
    source.
    """
    components: dict[str, Any] = {}
    for size in batches:
        save(network(size), ship.folder / f"a/fixed{size}/a.onnx")
        variants = {"fixed": fixed(size), **({} if components else {"source": SOURCE})}
        components[f"a.{size}"] = component(variants, batch=batch or {})
    return ship.write(components)


def test_a_batch_is_split_into_the_compiled_ones(ship: Shipper, rows: Any) -> None:
    app = write(ship, 1, 4, batch=BATCH)
    runner = app.runner("a")
    expected = app.load("a", target="source").run(None, {"x": rows})[0]
    (outputs,) = runner.run(None, {"x": rows})
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    # Of seven rows four, and then one after the other.
    assert runner.explain()[0].reason == f"{CPU_EP} on cpu, runs: 4"
    assert runner.get_inputs()[0].shape == [None, 1, 8, 8]
    assert runner.get_outputs()[0].shape == [None, 10]


def test_rows_that_fill_no_batch_run_on_the_source(ship: Shipper, rows: Any) -> None:
    runner = write(ship, 3, batch=BATCH).runner("a")
    assert runner.run(["y"], {"x": rows})[0].shape == (7, 10)
    assert [step.reason.rpartition(" ")[2] for step in runner.explain()] == ["2", "1"]


def test_a_batch_that_may_not_be_split_runs_whole(ship: Shipper, rows: Any) -> None:
    runner = write(ship, 1).runner("a")
    assert runner.run(None, {"x": rows})[0].shape == (7, 10)
    assert outcomes(runner.explain()) == [("fixed", "opened"), ("source", "opened")]
    assert runner.explain()[0].reason == f"{CPU_EP} on cpu, runs: 0"


def test_a_size_that_no_target_has_is_an_error_with_the_reasons(ship: Shipper, rows: Any) -> None:
    app = write(ship, 4)
    runner = app.runner("a", target="fixed")
    assert runner.run(None, {"x": rows[:4]})[0].shape == (4, 10)
    with pytest.raises(
        app.LoadError, match=r"no target takes \{'x': \(7, 1, 8, 8\)\}:\n  fixed: op"
    ):
        runner.run(None, {"x": rows})


def test_a_runner_of_nothing_is_an_error(ship: Shipper) -> None:
    app = ship(
        None, npu=changed(fixed(1), product="context", settings={"ep": "Some", "device": "npu"})
    )
    with pytest.raises(app.LoadError, match="it cannot be opened on this machine"):
        app.runner("a")
