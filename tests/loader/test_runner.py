"""`runner`: a model with several sizes and any batch, run as one session."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.loader.shipped import CPU_EP, SOURCE, Shipper, changed, component, outcomes, variant
from tests.models import network, parsed, save

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
    with pytest.warns(UserWarning, match="'a' runs on source"):
        assert runner.run(["y"], {"x": rows})[0].shape == (7, 10)
    fixed, source = (attempt.reason for attempt in runner.explain())
    assert "runs: 2, of other sizes: 1 (" in fixed
    assert source.endswith("runs: 1")


def test_a_target_that_is_never_fed_its_size_is_one_warning_at_the_app(
    ship: Shipper, rows: Any
) -> None:
    runner = write(ship, 1).runner("a")
    sizes = "fed {'x': [7, 1, 8, 8]}, compiled {'x': [1, 1, 8, 8]}"
    message = re.escape(f"'a' runs on source, because others have other sizes (fixed: {sizes})")
    with pytest.warns(UserWarning, match=f"^{message}$") as caught:
        runner.run(None, {"x": rows})
    assert caught[0].filename == __file__
    for batch in (rows, rows[:3]):
        assert runner.run(None, {"x": batch})[0].shape == (len(batch), 10)
    assert outcomes(runner.explain()) == [("fixed", "opened"), ("source", "opened")]
    fixed = f"{CPU_EP} on cpu, runs: 0, of other sizes: 3 ({sizes})"
    assert runner.explain()[0].reason == fixed


def test_a_size_that_no_target_has_is_an_error_with_the_reasons(ship: Shipper, rows: Any) -> None:
    app = write(ship, 4)
    runner = app.runner("a", target="fixed")
    assert runner.run(None, {"x": rows[:4]})[0].shape == (4, 10)
    with pytest.raises(
        app.LoadError,
        match=r"no target of 'a' takes .*fed \{'x': \[7, .*\]\}, compiled \{'x': \[4, .*\]\}\):\n  fixed: op",
    ):
        runner.run(None, {"x": rows})


def test_a_runner_of_nothing_is_an_error(ship: Shipper) -> None:
    app = ship(
        None, npu=changed(fixed(1), product="context", settings={"ep": "Some", "device": "npu"})
    )
    with pytest.raises(app.LoadError, match="the model 'a' cannot be opened on this machine"):
        app.runner("a")


def test_a_target_that_fails_is_one_warning(
    ship: Shipper, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app = write(ship, 1)
    (ship.folder / "a/fixed1/a.onnx").unlink()
    runner = app.runner("a")
    assert runner.run(None, {"x": rows[:1]})[0].shape == (1, 10)
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.getMessage().startswith("a on fixed: failed")


def test_no_rows_run_where_the_batch_is_open(ship: Shipper, rows: Any) -> None:
    runner = write(ship, 1, batch=BATCH).runner("a")
    assert runner.run(None, {"x": rows[:0]})[0].shape == (0, 10)
    assert [attempt.reason.rpartition(" ")[2] for attempt in runner.explain()] == ["0", "1"]


def test_threads_share_the_sessions(ship: Shipper, rows: Any) -> None:
    runner = write(ship, 1, 4, batch=BATCH).runner("a")
    shapes: list[Any] = []

    def run() -> None:
        shapes.extend(out.shape for out in runner.run(None, {"x": rows}))
        runner.explain()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shapes == [(7, 10)] * 8
    assert runner.explain()[0].reason == f"{CPU_EP} on cpu, runs: 32"


class TestSeveralSizes:
    """A model whose rows are in the second axis, with two inputs, for batches and lengths."""

    @pytest.fixture
    def app(self, ship: Shipper) -> Any:
        axes = {"inputs": {"x": 1, "b": 0}, "outputs": {"y": 1, "z": 0}}
        components: dict[str, Any] = {}
        for length, batch in ((4, 1), (8, 1), (8, 4), ("S", "N")):
            of_x, of_b = f"float[{length}, {batch}]", f"float[{batch}]"
            text = f"({of_x} x, {of_b} b) => ({of_x} y, {of_b} z)"
            name = "source" if length == "S" else f"fixed{length}x{batch}"
            save(
                parsed(f"{text} {{ y = Add (x, b) z = Neg (b) }}"), ship.folder / f"a/{name}/a.onnx"
            )
            shapes = {"x": [length, batch], "b": [batch], "y": [length, batch], "z": [batch]}
            facts = [{"name": n, "dtype": "float32", "shape": s} for n, s in shapes.items()]
            about: dict[str, Any] = {"inputs": facts[:2], "outputs": facts[2:]}
            if length == "S":
                source = variant("a/source", "a.onnx", product="source", **about)
                components["a.4x1"]["variants"]["source"] = source
            else:
                variants = {"fixed": variant(f"a/{name}", "a.onnx", **about)}
                components[f"a.{length}x{batch}"] = component(variants, batch=axes)
        return ship.write(components)

    @pytest.mark.parametrize(
        ("length", "batch", "runs"), [(4, 5, ["5"]), (8, 5, ["2"]), (6, 5, ["0", "1"])]
    )
    def test_each_batch_runs_in_the_largest_that_fit(
        self, app: Any, length: int, batch: int, runs: list[str]
    ) -> None:
        runner = app.runner("a")
        x = np.arange(length * batch, dtype=np.float32).reshape(length, batch)
        b = np.arange(batch, dtype=np.float32)
        # ONNX Runtime's own values too; and outputs in another order.
        feeds = {"x": onnxruntime.OrtValue.ortvalue_from_numpy(x), "b": b}
        other = pytest.warns(UserWarning, match=r"compiled \{'x': \[4, 1\], .* or \{'x': \[8, 1\]")
        with other if length == 6 else contextlib.nullcontext():
            z, y = runner.run(["z", "y"], feeds)
        np.testing.assert_array_equal(y, x + b)
        np.testing.assert_array_equal(z, -b)
        reasons = [
            attempt.reason.partition(", of other sizes: 1 ")[0] for attempt in runner.explain()
        ]
        assert [reason.rpartition(" ")[2] for reason in reasons] == runs

    def test_a_batch_that_is_broadcast_runs_whole(self, app: Any) -> None:
        x, runner = np.ones((8, 4), np.float32), app.runner("a")
        with pytest.warns(UserWarning, match="runs on source"):
            y, _ = runner.run(None, {"x": x, "b": np.ones(1, np.float32)})
        np.testing.assert_array_equal(y, x + 1)
        assert runner.explain()[-1].reason.endswith("runs: 1")

    def test_what_no_session_takes_is_the_error_of_onnx_runtime(self, app: Any) -> None:
        with pytest.raises(Exception, match="Invalid rank for input: x"):
            app.runner("a").run(None, {"x": np.ones(8, np.float32), "b": np.ones(1, np.float32)})

    def test_sizes_that_differ_are_open(self, app: Any) -> None:
        runner = app.runner("a", target="fixed")
        values = [*runner.get_inputs(), *runner.get_outputs()]
        assert [value.shape for value in values] == [[None, None], [None], [None, None], [None]]
        with pytest.raises(app.LoadError) as raised:
            runner.run(None, {"x": np.ones((5, 1), np.float32), "b": np.ones(1, np.float32)})
        assert outcomes(raised.value.attempts) == [("fixed", "opened")]
