from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import (
    Builder,
    Outputs,
    Rules,
    TooManyNodesError,
    remove_unused,
)
from hatch_epcontext.graph.repairs import separate_outputs
from hatch_epcontext.graph.scope import Scope
from tests.models import parsed, value


def replace(
    model: onnx.ModelProto, rules: Rules, *, nested: bool = True, limit: int | None = None
) -> int:
    builder = Builder(model, limit)
    if count := builder.replace(Scope.of(model), rules, nested=nested):
        builder.write()
    return count


def doubled(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    return [builder.add("Add", node.input[0], node.input[0])]


def chain(*operators: str) -> onnx.ModelProto:
    """``y`` (float, 2) made of ``x`` by ``operators``, one after the other."""
    names = ["x", *(f"v{index}" for index in range(len(operators) - 1)), "y"]
    links = zip(operators, names, names[1:], strict=False)
    nodes = " ".join(f"[{op}] {b} = {op} ({a})" for op, a, b in links)
    return parsed(f"(float[2] x) => (float[2] y) {{ {nodes} }}")


def operators(made: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in made.graph.node]


def test_what_replaces_a_node_gets_the_names_of_its_outputs() -> None:
    made = chain("Exp", "Neg", "Abs")
    assert replace(made, {"Neg": doubled}) == 1
    onnx.checker.check_model(made, full_check=True)
    assert [(node.op_type, *node.input, *node.output) for node in made.graph.node] == [
        ("Exp", "x", "v0"),
        ("Add", "v0", "v0", "v1"),
        ("Abs", "v1", "y"),
    ]


@pytest.mark.parametrize("result", [None, ["", "v0"], []])
def test_a_node_that_a_rule_does_not_replace_stays_and_leaves_nothing(
    result: Sequence[str] | None,
) -> None:
    def rule(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        builder.add("Mul", node.input[0], builder.number(2))
        return result

    made = chain("Exp", "Neg", "Abs")
    builder = Builder(made)
    assert builder.replace(Scope.of(made), {"Neg": rule}) == 0
    assert [node.op_type for node in builder.nodes] == operators(made)
    assert not builder.stored


def test_a_value_that_is_there_already_is_copied_to_the_output() -> None:
    made = chain("Exp", "Neg", "Abs")
    assert replace(made, {"Neg": lambda node, scope, builder: list(node.input)}) == 1
    onnx.checker.check_model(made, full_check=True)
    assert operators(made) == ["Exp", "Identity", "Abs"]


def test_graphs_inside_new_nodes_get_the_new_names_too() -> None:
    def rule(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        first = builder.add("Exp", node.input[0])
        inner = helper.make_node("Neg", [first], ["inner"])
        branch = helper.make_graph([inner], "b", [], [value("inner", [2])])
        condition = builder.store(np.array(True))
        return [first, builder.add("If", condition, then_branch=branch, else_branch=branch)]

    made = parsed(
        "(float[2] x) => (float[2] y, int64[2] z) <int64[1] k = {2}> { y, z = TopK (x, k) }"
    )
    assert replace(made, {"TopK": rule}) == 1
    (inner, other) = graph.inner_graphs(made.graph.node[-1])
    assert inner.node[0].input == other.node[0].input == ["y"]


def test_equal_names_in_two_graphs_are_two_values() -> None:
    found = []

    def rule(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        found.append(scope.constant("value"))
        return None

    branch = "() => (float[2] inner) {{ value = Constant <value_int = {}> () inner = Neg (x) }}"
    made = parsed(f"""(bool c, float[2] x) => (float[2] y) {{ y = If (c) <
        then_branch = one {branch.format(1)}, else_branch = other {branch.format(2)}> }}""")
    assert replace(made, {"Neg": rule}) == 0
    # Attributes are in the order of the text.
    assert found == [1, 2]
    assert replace(made, {"Neg": doubled}, nested=False) == 0


def test_too_many_nodes_change_nothing() -> None:
    made = chain("Exp", "Neg", "Neg")
    before = made.SerializeToString()
    with pytest.raises(TooManyNodesError):
        replace(made, {"Neg": doubled}, limit=2)
    assert made.SerializeToString() == before
    assert replace(made, {"Neg": doubled}, limit=3) == 2


def test_names_are_unique_among_values_and_nodes() -> None:
    builder = Builder(chain("Exp", "Neg", "Abs"))
    names = [builder.fresh("Neg"), builder.fresh("v0"), builder.fresh("new"), builder.fresh("new")]
    assert len({*names, "Neg", "v0"}) == 6
    assert names[2] == "new"


@pytest.mark.parametrize("ir_version", [3, 8])
def test_what_nothing_uses_is_removed(ir_version: int) -> None:
    listed = ir_version < 4
    made = parsed(
        f"""(float[2] x{", float[2] k, float[2] kept" if listed else ""}) => (float[2] y)
        {{ a = Mul (x, k) b = Neg (a) y = Add (x, kept) }}""",
        ir_version=ir_version,
        k=(2,),
        kept=(2,),
    )
    remove_unused(made.graph, lambda node: node.op_type != "Neg")
    assert operators(made) == ["Mul", "Neg", "Add"]
    remove_unused(made.graph)
    onnx.checker.check_model(made, full_check=True)
    assert operators(made) == ["Add"]
    # An input without its initializer would have to be fed.
    assert len(made.graph.initializer) == (2 if listed else 1)


def test_each_output_of_an_inner_graph_gets_its_own_value() -> None:
    text = """(float[2] h, float[3, 2] x) => (float[2] last, float[3, 2] y) {
        last, y = Scan <num_scan_inputs = 1, body = body (float[2] state, float[2] item)
            => (float[2] next, float[2] next) { next = Add (state, item) }> (h, x) }"""
    made = parsed(text, check=False)
    assert separate_outputs(made)
    onnx.checker.check_model(made, full_check=True)
    assert not separate_outputs(made)
    feeds = {"h": np.zeros(2, np.float32), "x": np.ones((3, 2), np.float32)}
    session = ort.InferenceSession(made.SerializeToString())
    last, rows = session.run(None, feeds)
    assert (last.tolist(), rows[:, 0].tolist()) == ([3, 3], [1, 2, 3])
