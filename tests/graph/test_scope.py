from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from hatch_epcontext.graph import graph, inference
from hatch_epcontext.graph.cost import cost
from hatch_epcontext.graph.facts import Cost
from hatch_epcontext.graph.operators import MOVES
from hatch_epcontext.graph.scope import Scope
from tests.models import parsed


def graph_of(text: str) -> onnx.GraphProto:
    return parsed(text, check=False).graph


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("value = int32[1, 2] {1, 2}", np.array([[1, 2]], np.int32)),
        ("value_int = 3", np.array(3)),
        ("value_ints = [3, 4]", np.array([3, 4])),
        ("value_float = 0.5", np.array(0.5, np.float32)),
        ("value_floats = [0.5, 1.5, 2.5]", np.array([0.5, 1.5, 2.5], np.float32)),
    ],
)
def test_every_numeric_attribute_of_a_constant_is_read(
    attribute: str, expected: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> None:
    scope = Scope(graph_of(f"() => () {{ c = Constant <{attribute}> () }}"))
    found = scope.constant("c")
    assert found is not None
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(found, expected)
    assert (scope.dtype("c"), scope.shape("c")) == (found.dtype, expected.shape)


def test_other_nodes_and_texts_have_no_known_value() -> None:
    text = '(float[batch, 2] x) => () { text = Constant <value_string = "a"> () y = Neg (x) }'
    scope = Scope(graph_of(text))
    assert scope.constant("text") is scope.constant("y") is None
    assert (scope.elem_type("x"), scope.sizes("x")) == (TensorProto.FLOAT, (None, 2))
    assert scope.shape("x") is None
    assert (scope.elem_type("y"), scope.sizes("y")) == (None, None)


def operator(node: onnx.NodeProto | None) -> str | None:
    return node.op_type if node else None


def test_values_of_an_inner_graph_hide_those_of_the_outer_one() -> None:
    outer = Scope(graph_of("(float x) => () { c = Constant <value_int = 1> () t = Neg (x) }"))
    for text in ("() => () { c = Neg (x) }", "(float c) => () { y = Add (c, t) }"):
        inner = Scope(graph_of(text), outer)
        assert inner.constant("c") is None
        assert operator(inner.maker("t")) == "Neg"
    assert outer.constant("c") == Scope(graph_of("() => () {}"), outer).constant("c") == 1
    assert inner.maker("c") is None


INNER = """(float[3] x, bool c) => (float[3] y) {
    a = Exp (x)
    unused = Abs (x)
    y = If (c) <
        then_branch = one () => (float[3] sum) { two = Constant <value_int = 2> () sum = Add (a, two) },
        else_branch = other () => (float[3] n) { n = Neg (a) }> }"""


def test_what_nodes_make_and_read_is_known_also_of_graphs_inside_them() -> None:
    scope = Scope(graph_of(INNER))
    assert scope.makers == {"a": 0, "unused": 1, "y": 2}
    assert list(scope.reads[2]) == ["c", "a"]
    assert (scope.readers["a"], scope.readers["x"]) == ({2}, {0, 1})
    assert scope.maker("x") is None
    assert scope.needed_nodes(["y"]) == [2, 0]
    assert scope.needed_nodes(["y"], lambda name: name != "a") == [2]
    assert scope.needed_values(["y"]) == ["y", "c", "a", "x"]


def test_graphs_inside_nodes_are_a_part_of_it_if_they_are_to_be() -> None:
    main = graph_of(INNER)
    outer = Scope(main)
    assert (outer.maker("sum"), outer.constant("two"), outer.sizes("sum")) == (None, None, None)
    (_, branch) = graph.inner_graphs(main.node[-1])
    assert operator(Scope(branch, outer).maker("a")) == "Exp"
    whole = Scope(main, nested=True)
    assert (operator(whole.maker("sum")), whole.shape("sum")) == ("Add", (3,))
    assert whole.constant("two") == 2
    assert whole.needed_values(["sum"]) == ["sum", "a", "two", "x"]


def test_the_origin_of_a_value_is_above_all_nodes_that_only_move_it() -> None:
    main = graph_of("""(float[2, 2] x, int64[2] s) => (float[2, 2] y) {
        a = Neg (x) t = Transpose (a) d = other.Reshape (t, s) r = Reshape (d, s) y = Reshape (r, s) }""")
    origin, moves = Scope(main).origin_and_moves("y", MOVES)
    assert (origin, [node.output[0] for node in moves]) == ("d", ["y", "r"])
    assert Scope(main).origin("t", MOVES) == "a"
    main.node[0].input[0] = "t"
    main.node[0].op_type = "Identity"
    assert Scope(main).origin("t", MOVES) == "t"


@pytest.mark.parametrize(
    ("body", "given", "stored", "number"),
    [
        ("y = MatMul(x, w)", "float[4, 8] x", "float[8, 16] w", 4 * 16 * 8),
        ("y = Gemm<transA = 1>(x, w)", "float[8, 4] x", "float[8, 16] w", 4 * 16 * 8),
        (
            "y = Conv<pads = [1, 1, 1, 1], group = 2>(x, w)",
            "float[1, 4, 10, 10] x",
            "float[6, 2, 3, 3] w",
            6 * 100 * 2 * 9,
        ),
        ("y = ConvTranspose(x, w)", "float[1, 4, 10] x", "float[4, 6, 3] w", 4 * 10 * 6 * 3),
        ("y = Relu(x)", "float[4, 8] x", "float[1] w", 32),
        ("a = Relu(x) y = Relu(a)", "float[4, 8] x", "float[1] w", 64),
    ],
)
def test_a_product_counts_for_each_of_its_terms(
    body: str, given: str, stored: str, number: int
) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>'
        f"agraph ({given}, {stored}) => (float y) {{ {body} }}"
    )
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert cost(inference.inferred(model)).multiply_adds == number


@pytest.mark.parametrize(
    ("attributes", "steps"), [("", 5), ('direction = "bidirectional", ', 10), ("layout = 1, ", 3)]
)
def test_each_time_step_of_a_recurrent_layer_counts_as_several_nodes(
    attributes: str, steps: int
) -> None:
    made = parsed(
        f"(float[5, 3, 2] x) => (float[5, 1, 3, 8] y) {{ y = GRU <{attributes}hidden_size = 8> (x, w, r) "
        "}",
        w=(1, 24, 2),
        r=(1, 24, 8),
        check=False,
    )
    assert cost(made.graph).nodes == 10 * steps


def test_what_is_inside_of_nodes_counts_and_unknown_sizes_are_one() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>'
        "agraph (bool c, float[n, 8] x) => (float[n, 8] y) {"
        "y = If (c) <then_branch = one () => (float[n, 8] a) { a = Relu(x) }, "
        "else_branch = two () => (float[n, 8] b) { b = Neg(x) }> }"
    )
    assert cost(model.graph) == Cost(nodes=3, multiply_adds=8 + 8 + 8, values=8 + 8 + 8)


def test_values_of_stored_tensors_that_are_listed_as_inputs_depend_on_none() -> None:
    model = parsed(
        "(float[1, 300] x) => (float[1, 300] y) { t = Transpose (w) y = MatMul (x, t) }",
        check=False,
        w=(300, 300),
    )
    model.ir_version = 3
    model.graph.input.add(name="w").type.CopyFrom(
        onnx.helper.make_tensor_type_proto(TensorProto.FLOAT, [300, 300])
    )
    scope = Scope.of(model)
    assert [node.op_type for node in scope.counted] == ["MatMul"]
    assert scope.shape("t") == (300, 300)
    assert scope.deciding_inputs("y") == {"x"}
