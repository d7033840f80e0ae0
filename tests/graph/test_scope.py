from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from hatch_epcontext.graph.scope import Scope
from tests.models import value


@pytest.mark.parametrize(
    ("attribute", "dtype", "shape"),
    [
        ({"value": numpy_helper.from_array(np.array([[1, 2]], np.int32))}, "int32", (1, 2)),
        ({"value_int": 3}, "int64", ()),
        ({"value_ints": [3, 4]}, "int64", (2,)),
        ({"value_float": 0.5}, "float32", ()),
        ({"value_floats": [0.5, 1.5, 2.5]}, "float32", (3,)),
    ],
)
def test_every_numeric_form_of_a_constant_is_read(
    attribute: dict[str, Any], dtype: str, shape: tuple[int, ...]
) -> None:
    node = helper.make_node("Constant", [], ["c"], **attribute)
    scope = Scope(helper.make_graph([node], "g", [], []))
    found = scope.constant("c")
    assert found is not None
    assert (found.dtype.name, found.shape) == (dtype, shape)
    (given,) = attribute.values()
    expected = (
        numpy_helper.to_array(given) if isinstance(given, TensorProto) else np.array(given, dtype)
    )
    assert np.array_equal(found, expected)
    assert (scope.dtype("c"), scope.shape("c")) == (found.dtype, shape)


def test_other_nodes_and_texts_have_no_known_value() -> None:
    nodes = [
        helper.make_node("Constant", [], ["text"], value_string="a"),
        helper.make_node("Neg", ["x"], ["y"]),
    ]
    scope = Scope(helper.make_graph(nodes, "g", [value("x", ["batch", 2])], []))
    assert scope.constant("text") is scope.constant("y") is None
    assert (scope.elem_type("x"), scope.sizes("x")) == (TensorProto.FLOAT, (None, 2))
    assert scope.shape("x") is None
    assert (scope.elem_type("y"), scope.sizes("y")) == (None, None)


def test_values_of_an_inner_graph_hide_those_of_the_outer_one() -> None:
    outer = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], value_int=1)], "outer", [], []
    )
    inner = helper.make_graph([helper.make_node("Neg", ["x"], ["c"])], "inner", [], [])
    scope = Scope(outer)
    assert scope.constant("c") == 1
    assert Scope(inner, scope).constant("c") is None
    assert Scope(helper.make_graph([], "empty", [], []), scope).constant("c") == 1


def test_what_nodes_make_and_read_is_known_also_of_graphs_inside_them() -> None:
    branch = helper.make_graph([helper.make_node("Neg", ["a"], ["n"])], "b", [], [value("n", [])])
    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node("Abs", ["x"], ["unused"]),
        helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
    ]
    main = helper.make_graph(nodes, "g", [value("x", []), value("c", [])], [value("y", [])])
    scope = Scope(main)
    assert scope.makers == {"a": 0, "unused": 1, "y": 2}
    assert list(scope.reads[2]) == ["c", "a"]
    assert (scope.readers["a"], scope.readers["x"]) == ({2}, {0, 1})
    assert scope.maker("x") is None
    assert scope.above(["y"]) == [2, 0]
    assert scope.above(["y"], lambda name: name != "a") == [2]
    assert scope.ancestors(["y"]) == ["y", "c", "a", "x"]


def test_graphs_inside_nodes_are_a_part_of_it_if_they_are_to_be() -> None:
    constant = helper.make_node("Constant", [], ["two"], value_int=2)
    branch = helper.make_graph(
        [constant, helper.make_node("Add", ["a", "two"], ["sum"])], "b", [], [value("sum", [3])]
    )
    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
    ]
    main = helper.make_graph(nodes, "g", [value("x", [3]), value("c", [])], [value("y", [3])])
    outer = Scope(main)
    assert (outer.maker("sum"), outer.constant("two"), outer.sizes("sum")) == (None, None, None)
    inner = Scope(branch, outer).maker("a")
    assert inner is not None
    assert inner.op_type == "Exp"
    whole = Scope(main, nested=True)
    maker = whole.maker("sum")
    assert maker is not None
    assert (maker.op_type, whole.shape("sum")) == ("Add", (3,))
    assert whole.constant("two") == 2
    assert whole.ancestors(["sum"]) == ["sum", "a", "two", "x"]


def test_an_input_of_an_inner_graph_hides_what_is_called_so_around_it() -> None:
    outer = Scope(
        helper.make_graph(
            [helper.make_node("Relu", ["x"], ["s"]), helper.make_node("Neg", ["x"], ["t"])],
            "outer",
            [value("x", [1])],
            [value("s", [1])],
        )
    )
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "t"], ["y"])], "body", [value("s", [1])], [value("y", [1])]
    )
    inner = Scope(body, outer)
    assert inner.maker("s") is None
    made = inner.maker("t")
    assert made is not None
    assert made.op_type == "Neg"
