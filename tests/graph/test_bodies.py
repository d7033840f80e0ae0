from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.external_data_helper import set_external_data

from hatch_epcontext.graph.bodies import fix_states, keep_weights, move_weights, remove_readers
from hatch_epcontext.worker.session import cpu_options, open_session
from tests.models import parsed, value

OPERATORS = {
    "Loop": """z = Loop (n, , r) <body = body (int64 i, bool c, float[1, 8] before)
        => (bool go_on, float[1, 8] after) { NODES go_on = Identity (c) }>""",
    "Scan": """z, steps = Scan <num_scan_inputs = 1, body = body (float[1, 8] before, float[1, 8] e)
        => (float[1, 8] after, float[1, 8] step) { NODES step = Identity (after) }> (r, n)""",
    "If": """z = If (n) <then_branch = body () => (float[1, 8] after) { before = Identity (r) NODES },
        else_branch = other () => (float[1, 8] same) { same = Identity (r) }>""",
}
POSITIONS = ("around the body", "in the body", "a Constant of the body")
WEIGHT = numpy_helper.from_array(np.eye(8, dtype=np.float32)[::-1].copy(), "w")
DATA: dict[str, tuple[str, Any]] = {
    "Loop": ("int64 n", np.array(3)),
    "Scan": ("float[3, 1, 8] n", np.ones((3, 1, 8), np.float32)),
    "If": ("bool n", np.array(True)),
}


def with_body(operator: str, where: str) -> onnx.ModelProto:
    """``x`` (1 x 8) -> Relu, ``operator`` with a stored weight in its body, MatMul -> ``y``."""
    node = OPERATORS[operator].replace("NODES", "t = MatMul (before, w) after = Tanh (t)")
    made = parsed(
        f"""(float[1, 8] x, {DATA[operator][0]}) => (float[1, 8] y)
        {{ r = Relu (x) {node} y = MatMul (z, v) }}""",
        check=False,
        v=np.ones((8, 8), np.float32),
    )
    body = next(each.g for each in made.graph.node[1].attribute if each.g.name == "body")
    if where == "around the body":
        made.graph.initializer.append(WEIGHT)
    elif where == "in the body":
        body.initializer.append(WEIGHT)
    else:
        body.node.insert(0, helper.make_node("Constant", [], ["w"], value=WEIGHT))
    onnx.checker.check_model(made)
    return made


def feeds_of(operator: str) -> dict[str, Any]:
    return {"x": np.array([[0.1, 0.5, 0.2, 0.9] * 2], np.float32), "n": DATA[operator][1]}


@pytest.mark.parametrize("external", [False, True])
def test_a_small_tensor_leaves_a_body_if_it_is_in_another_file(external: bool) -> None:
    loop = with_body("Loop", "in the body")
    weights = loop.graph.node[1].attribute[0].g.initializer
    weights[0].CopyFrom(numpy_helper.from_array(np.ones((8, 1), np.float32), "w"))
    if external:
        set_external_data(weights[0], "w.data")
    assert move_weights(loop) is external
    assert [tensor.name for tensor in weights] == ([] if external else ["w"])


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_weights_of_bodies_are_read_in_the_main_graph(operator: str, where: str) -> None:
    """See microsoft/onnxruntime#28158 and microsoft/onnxruntime#32131."""
    made = with_body(operator, where)
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
