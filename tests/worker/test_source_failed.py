from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Key, Kind, Problem
from hatch_epcontext.worker.source import source_failed
from tests.conftest import newer_runtime
from tests.models import parsed


def problem(made: onnx.ModelProto, **feeds: object) -> Problem:
    """The problem of running ``made`` on ``feeds``."""
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match="Non-zero status code") as raised:
        session.run(None, {name: np.array(each) for name, each in feeds.items()})
    spec = Model("a", Path("a.onnx"), Key(("models", 0)), dims={"n": 2})
    return source_failed(spec, made, raised.value)


def test_the_node_its_input_and_what_to_set_are_named() -> None:
    made = parsed(
        """(float[1, 3] x, int64[1] sid) => (float[1, 3] y) <int64[1] one = {1}> {
            [add] next = Add (sid, one)
            [choose] row = Gather (table, next)
            [times] y = Mul (row, x) }""",
        table=(7, 3),
    )
    found = problem(made, x=np.ones((1, 3), np.float32), sid=[9])
    assert found.kind is Kind.SOURCE_FAILED
    assert "its node 'choose' (Gather) fails: indices element out of data bounds" in found.message
    assert found.message.endswith("It depends on the input 'sid'.")
    assert [str(each) for each in found.settings] == [
        'tool.epcontext.models[0].validate.inputs = "samples.npz"',
        "tool.epcontext.models[0].constants",
        "tool.epcontext.models[0].dims",
        "tool.epcontext.models[0].validate.tolerance = false",
    ]


def test_a_type_that_no_node_of_the_cpu_takes_is_named() -> None:
    text = "(float4e2m1[2] x) => (float[2] y) { [widen] y = Cast <to = 1> (x) }"
    made = parsed(text, opset=23, ir_version=11, check=False)
    with pytest.raises(Exception, match="NOT_IMPLEMENTED") as raised:
        ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    found = source_failed(Model("a", Path("a.onnx"), Key()), made, raised.value)
    assert "has no Cast for the types of the node 'widen'." in found.message


def test_the_node_inside_a_branch_is_named() -> None:
    made = parsed(
        """(float[2, 3] x, int64[2] i, bool c) => (float[2, 3] y) {
            [outer] y = If <then_branch = then () => (float[2, 3] t) { [inner] t = Gather (table, i) },
                 else_branch = other () => (float[2, 3] e) { e = Identity (x) }> (c) }""",
        table=(7, 3),
    )
    found = problem(made, x=np.ones((2, 3), np.float32), i=[9, 9], c=True)
    assert "'inner' (Gather)" in found.message
    assert found.message.endswith("It depends on the input 'i'.")


def test_a_message_without_a_known_node_is_shown_as_it_is() -> None:
    made = parsed("(float[1] x) => (float[1] y) { y = Relu (x) }")
    spec = Model("a", Path("a.onnx"), Key(("models", 0)))
    found = source_failed(spec, made, RuntimeError("std::bad_alloc"))
    assert found.message == "the source model itself cannot be run on the CPU: std::bad_alloc"


def test_a_node_in_another_memory_layout_is_named() -> None:
    made = parsed(
        "(float[1, 1, h, w_] x) => (float[1, 8, ?, ?] c) { [conv] c = Conv (x, w) }", w=(8, 1, 3, 3)
    )
    spec = Model("a", Path("a.onnx"), Key(("models", 0)), shapes={"x": (1, 1, 2, 2)})
    error = RuntimeError("running Conv node. Name:'c_nchwc' Status Message: Invalid shape")
    found = source_failed(spec, made, error)
    assert "its node 'conv' (Conv) fails: Invalid shape." in found.message


@newer_runtime
def test_open_dimensions_without_a_size_are_the_likely_cause() -> None:
    made = parsed("""(float[?, time] x) => (float[?, t] y) <int64[4] pads = {0, 1, 0, 1}>
        { [pad] y = Pad <mode = "reflect"> (x, pads) }""")
    found = problem(made, x=np.ones((1, 1), np.float32))
    assert "Open dimensions of 'x' have no size in the configuration" in found.message
    assert [str(setting) for setting in found.settings] == ["tool.epcontext.models[0].shapes.x"]
