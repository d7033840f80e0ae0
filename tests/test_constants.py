"""Frozen inputs, with the real onnxruntime."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from hatch_epcontext import _constants
from tests.models import model, save, value
from tests.test_loader import CPU, Shipper, Table, component, ship, source_of, variant

__all__ = ["ship"]


def scaled(frozen: int | None, shape: list[int]) -> onnx.ModelProto:
    """``y`` = ``x`` * ``sr``; with ``frozen`` the input ``sr`` is a constant."""
    constant = [] if frozen is None else [numpy_helper.from_array(np.full(shape, frozen), "sr")]
    free = [value("sr", shape, TensorProto.INT64)] if frozen is None else []
    return model(
        [
            helper.make_node("Cast", ["sr"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["x", "f"], ["y"]),
        ],
        [value("x", [1, 4]), *free],
        [value("y", [1, 4])],
        constant,
    )


@pytest.fixture(params=[[], [1], [1, 1]], ids=repr)
def frozen(ship: Shipper, request: pytest.FixtureRequest) -> Any:
    """An app whose model was compiled with ``sr`` = 16000; its source still has the input."""
    shape: list[int] = request.param
    save(scaled(16000, shape), ship.folder / "m/cpu/m.onnx")
    save(scaled(None, shape), ship.folder / "m/source/m.onnx")
    inputs = [{"name": "x", "shape": [1, 4]}]
    source = source_of("m/source", "m.onnx", [1, 4])
    variants = {"cpu": variant("m/cpu", "m.onnx", inputs=inputs), "source": source}
    constants = {"sr": {"dtype": "int64", "shape": shape, "value": 16000}}
    return ship.write({"m": component(variants, "m", constants=constants)})


ROW = np.array([[1, 2, 3, 4]], np.float32)


@pytest.mark.parametrize("target", ["cpu", "source"])
def test_a_frozen_input_is_taken_and_checked_on_every_target(frozen: Any, target: str) -> None:
    session = frozen.load("m", target=target)
    assert isinstance(session, onnxruntime.InferenceSession)
    assert [each.name for each in session.get_inputs()] == ["x"]
    assert frozen.shapes_of(session) == {"x": (1, 4)}
    for sr in (16000, np.array(16000), np.array([16000], np.int32), np.full((1, 1), 16000)):
        feed = {"x": ROW, "sr": sr}
        assert np.array_equal(session.run(None, feed)[0], ROW * 16000)
        assert feed.keys() == {"x", "sr"}, "the app's own feed was changed"
    assert np.array_equal(session.run(["y"], {"x": ROW}, None)[0], ROW * 16000)
    for wrong in (8000, np.array([16000, 16000]), "text", None, np.array([])):
        with pytest.raises(ValueError, match="the input 'sr' was frozen to"):
            session.run(None, {"x": ROW, "sr": wrong})
    with pytest.raises(ValueError, match=r"Required inputs \(\['x'\]\)"):
        session.run(None, {"sr": 16000})


@pytest.mark.parametrize("target", ["cpu", "source"])
@pytest.mark.parametrize("feed", [{"x": ROW}, {"x": ROW, "sr": np.array(16000)}], ids=len)
def test_a_frozen_input_is_taken_by_run_async(frozen: Any, target: str, feed: Table) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = frozen.load("m", target=target, session_options=options)
    done, results = threading.Event(), []

    def callback(values: Any, data: Any, error: str) -> None:
        results.append((values, data, error))
        done.set()

    session.run_async(None, feed, callback, "mine")
    assert done.wait(60)
    ((values, data, error),) = results
    assert np.array_equal(values[0], ROW * 16000)
    assert (data, error) == ("mine", "")
    with pytest.raises(ValueError, match="was frozen to"):
        session.run_async(None, {"x": ROW, "sr": np.array(1)}, callback, "mine")


def test_sessions_of_models_without_frozen_inputs_are_plain(ship: Shipper) -> None:
    assert type(ship(cpu=CPU).load("a")) is onnxruntime.InferenceSession


def test_a_constant_that_does_not_fit_its_dtype_is_a_failure(ship: Shipper) -> None:
    for constant in (
        {"dtype": "int64", "shape": [], "value": "text"},
        {"dtype": "int64", "shape": []},
        {"dtype": "no dtype", "shape": [], "value": 1},
        {"dtype": "uint8", "shape": [], "value": 300},
    ):
        app = ship.write({"a": component({"cpu": CPU}, constants={"sr": constant})})
        with pytest.raises(app.LoadError, match=r"cpu: failed, .*'sr'"):
            app.load("a")


def test_a_frozen_text_is_an_array_of_objects() -> None:
    array = _constants._array("s", {"dtype": "string", "shape": [1], "value": "text"})
    assert (array.dtype, array.tolist()) == (np.dtype(object), ["text"])
