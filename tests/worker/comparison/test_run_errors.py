from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from hatch_epcontext.errors import Key, Kind, Problem
from hatch_epcontext.ipc.facts import ModelSpec
from hatch_epcontext.worker.comparison.run_errors import source_failed
from tests.models import model, value, weights

I64 = TensorProto.INT64


def problem(made: onnx.ModelProto, **feeds: object) -> Problem:
    """The problem of running ``made`` on ``feeds``."""
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match="Non-zero status code") as raised:
        session.run(None, {name: np.array(each) for name, each in feeds.items()})
    spec = ModelSpec("a", "a.onnx", Key(("models", 0)), dims={"n": 2})
    return source_failed(spec, made, raised.value)


def test_the_node_its_input_and_what_to_set_are_named() -> None:
    made = model(
        [
            helper.make_node("Add", ["sid", "one"], ["next"], "add"),
            helper.make_node("Gather", ["table", "next"], ["row"], "choose"),
            helper.make_node("Mul", ["row", "x"], ["y"], "times"),
        ],
        [value("x", [1, 3]), value("sid", [1], I64)],
        [value("y", [1, 3])],
        [weights("table", 7, 3), numpy_helper.from_array(np.array([1]), "one")],
    )
    found = problem(made, x=np.ones((1, 3), np.float32), sid=[9])
    assert found.kind is Kind.SOURCE_FAILED
    assert "its node 'choose' (Gather) fails: indices element out of data bounds" in found.message
    assert found.message.endswith("It depends on the input 'sid'.")
    assert "a value that never changes for 'sid', or other sizes" in (found.hint or "")
    assert [str(each) for each in found.settings] == [
        "tool.epcontext.models[0].validate.inputs",
        "tool.epcontext.models[0].constants",
        "tool.epcontext.models[0].dims",
        "tool.epcontext.models[0].validate.tolerance = false",
    ]


def test_the_node_inside_a_branch_is_named() -> None:
    choose = helper.make_node("Gather", ["table", "i"], ["t"], "inner")
    then = helper.make_graph([choose], "then", [], [value("t", [2, 3])])
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["e"])], "else", [], [value("e", [2, 3])]
    )
    made = model(
        [helper.make_node("If", ["c"], ["y"], "outer", then_branch=then, else_branch=other)],
        [value("x", [2, 3]), value("i", [2], I64), value("c", [], TensorProto.BOOL)],
        [value("y", [2, 3])],
        [weights("table", 7, 3)],
    )
    found = problem(made, x=np.ones((2, 3), np.float32), i=[9, 9], c=True)
    assert "'inner' (Gather)" in found.message
    assert found.message.endswith("It depends on the input 'i'.")


def test_a_message_without_a_known_node_is_shown_as_it_is() -> None:
    made = model([helper.make_node("Relu", ["x"], ["y"])], [value("x", [1])], [value("y", [1])])
    spec = ModelSpec("a", "a.onnx", Key(("models", 0)))
    found = source_failed(spec, made, RuntimeError("std::bad_alloc"))
    assert found.message == "the source model itself cannot be run on the CPU: std::bad_alloc"
