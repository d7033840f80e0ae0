from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Key, Kind, ModelError, Problem
from hatch_epcontext.worker.source import running_source
from tests.conftest import newer_runtime
from tests.models import parsed


def problem(made: onnx.ModelProto, **feeds: object) -> Problem:
    """The problem of running ``made`` on ``feeds``."""
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    spec = Model("a", Path("a.onnx"), Key(("models", 0)), dims={"n": 2})
    with (
        pytest.raises(ModelError, match="Non-zero status code") as raised,
        running_source(spec, made),
    ):
        session.run(None, {name: np.array(value) for name, value in feeds.items()})
    return raised.value.problems[0]


def test_the_node_and_what_to_set_are_named() -> None:
    made = parsed(
        """(float[1, 3] x, int64[1] sid) => (float[1, 3] y) <int64[1] one = {1}> {
            [add] next = Add (sid, one)
            [choose] row = Gather (table, next)
            [times] y = Mul (row, x) }""",
        table=(7, 3),
    )
    found = problem(made, x=np.ones((1, 3), np.float32), sid=[9])
    assert found.kind is Kind.SOURCE_FAILED
    assert "Name:'choose' Status Message: indices element out of data bounds" in found.message
    assert [str(each) for each in found.settings] == [
        'tool.epcontext.models[0].validate.inputs = "samples.npz"',
        "tool.epcontext.models[0].dims",
        "tool.epcontext.models[0].validate.tolerance = false",
    ]


def test_an_error_of_our_own_is_no_failure_of_the_source() -> None:
    made = parsed("(float[2] x) => (float[2] y) { y = Neg (x) }")
    spec = Model("a", Path("a.onnx"), Key(("models", 0)))
    with pytest.raises(ValueError, match="cannot reshape"), running_source(spec, made):
        np.zeros(3).reshape(2)


@newer_runtime
def test_open_dimensions_without_a_size_are_the_likely_cause() -> None:
    made = parsed("""(float[?, time] x) => (float[?, t] y) <int64[4] pads = {0, 1, 0, 1}>
        { [pad] y = Pad <mode = "reflect"> (x, pads) }""")
    found = problem(made, x=np.ones((1, 1), np.float32))
    assert "Open dimensions of 'x' have no size in the configuration" in found.message
    assert [str(setting) for setting in found.settings] == ["tool.epcontext.models[0].shapes.x"]
