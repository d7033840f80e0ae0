from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

from hatch_epcontext.graph.bodies import fix_states, keep_weights, move_weights, remove_readers
from hatch_epcontext.worker.session import cpu_options, open_session
from tests.models import model, value

WEIGHT = numpy_helper.from_array(np.eye(8, dtype=np.float32)[::-1].copy(), "w")

OPERATORS = ("Loop", "Scan", "If")
PLACES = ("around the body", "in the body", "a Constant of the body")


def with_body(operator: str, place: str) -> onnx.ModelProto:
    """``x`` (1 x 8) -> Relu, ``operator`` with a stored weight in its body, MatMul -> ``y``."""
    inner = [WEIGHT] * (place == "in the body")
    nodes = [helper.make_node("Constant", [], ["w"], value=WEIGHT)]
    nodes *= place == "a Constant of the body"
    row = [1, 8]
    before = "r" if operator == "If" else "before"
    nodes += [
        helper.make_node("MatMul", [before, "w"], ["t"]),
        helper.make_node("Tanh", ["t"], ["after"]),
    ]

    def body(
        more: Sequence[onnx.NodeProto],
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
    ) -> onnx.GraphProto:
        return helper.make_graph([*nodes, *more], "body", inputs, outputs, inner)

    def copy(name: str, output: str) -> onnx.NodeProto:
        return helper.make_node("Identity", [name], [output])

    after = value("after", row)
    if operator == "Loop":
        condition = value("c", [], TensorProto.BOOL), value("go_on", [], TensorProto.BOOL)
        counted = [value("i", [], TensorProto.INT64), condition[0], value("before", row)]
        loop = body([copy("c", "go_on")], counted, [condition[1], after])
        node = helper.make_node("Loop", ["n", "", "r"], ["z"], body=loop)
        data = value("n", [], TensorProto.INT64)
    elif operator == "Scan":
        steps = body(
            [copy("after", "step")], [value("before", row), value("e", row)], [after, value("step", row)]
        )  # fmt: skip
        node = helper.make_node("Scan", ["r", "n"], ["z", "steps"], body=steps, num_scan_inputs=1)
        data = value("n", [3, *row])
    else:
        otherwise = helper.make_graph([copy("r", "same")], "else", [], [value("same", row)])
        then = body([], [], [after])
        node = helper.make_node("If", ["n"], ["z"], then_branch=then, else_branch=otherwise)
        data = value("n", [], TensorProto.BOOL)
    return model(
        [helper.make_node("Relu", ["x"], ["r"]), node, helper.make_node("MatMul", ["z", "v"], ["y"])],
        [value("x", row), data],
        [value("y", row)],
        [numpy_helper.from_array(np.ones((8, 8), np.float32), "v")]
        + [WEIGHT] * (place == "around the body"),
    )  # fmt: skip


def feeds_of(operator: str) -> dict[str, Any]:
    data = {"Loop": np.array(3), "Scan": np.ones((3, 1, 8), np.float32), "If": np.array(True)}
    return {"x": np.array([[0.1, 0.5, 0.2, 0.9] * 2], np.float32), "n": data[operator]}


@pytest.mark.parametrize("external", [False, True])
def test_a_small_tensor_leaves_a_body_if_it_is_in_another_file(external: bool) -> None:
    loop = with_body("Loop", "in the body")
    weights = loop.graph.node[1].attribute[0].g.initializer
    weights[0].CopyFrom(numpy_helper.from_array(np.ones((8, 1), np.float32), "w"))
    if external:
        set_external_data(weights[0], "w.data")
    assert move_weights(loop) is external
    assert [tensor.name for tensor in weights] == ([] if external else ["w"])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_weights_of_bodies_are_read_in_the_main_graph(operator: str, place: str) -> None:
    made = with_body(operator, place)
    source = onnx.ModelProto.FromString(made.SerializeToString())
    outputs = keep_weights(made)
    onnx.checker.check_model(made, full_check=True)
    (reader,) = (node for node in made.graph.node if node.op_type == "SequenceConstruct")
    assert set(reader.output) == outputs
    assert {tensor.name for tensor in made.graph.initializer} == {"v", *reader.input}
    remove_readers(made, outputs)
    assert len(made.graph.node) == len(source.graph.node)
    before, after = (
        open_session(each.SerializeToString(), cpu_options()).run(["y"], feeds_of(operator))[0]
        for each in (source, made)
    )
    assert np.array_equal(before, after)


@pytest.mark.parametrize(("declared", "known"), [([1, 8], True), ([None, 8], False), (None, False)])
def test_a_loop_keeps_the_shape_that_its_body_declares(
    declared: Sequence[int | None] | None, known: bool
) -> None:
    made = with_body("Loop", "in the body")
    (body,) = (node.attribute[0].g for node in made.graph.node if node.op_type == "Loop")
    body.output[1].CopyFrom(value("after", declared))
    fix_states(made)
    assert [each.name for each in made.graph.value_info] == ["z"] * known
