from __future__ import annotations

import onnx
import pytest
from onnx import helper

from hatch_epcontext.graph.facts import Cut
from hatch_epcontext.graph.refusals.covered import largest_covered
from tests.models import interrupted, model, value, weights


def chain(*operators: str) -> onnx.ModelProto:
    """``x`` through operators, whose results are called after them and their place: ``Relu0``."""
    nodes, current = [], "x"
    for index, operator in enumerate(operators):
        nodes.append(helper.make_node(operator, [current], [f"{operator}{index}"]))
        current = f"{operator}{index}"
    return model(nodes, [value("x", [2])], [value(current, [2])])


def largest(source: onnx.ModelProto, *uncovered: int, **more: object) -> Cut | None:
    left = [source.graph.node[index] for index in uncovered]
    return largest_covered(source.graph, left, source, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("uncovered", "expected"),
    [
        ((6,), Cut(outputs=("Relu5",))),
        ((0,), Cut(inputs=("Relu0",))),
        ((1, 6), Cut(inputs=("Relu1",), outputs=("Relu5",))),
        ((1,), Cut(inputs=("Relu1",))),
        # A half is too little.
        ((3,), None),
        ((0, 1, 2, 3, 4, 5, 6), None),
    ],
)
def test_the_longest_part_of_a_chain(uncovered: tuple[int, ...], expected: Cut | None) -> None:
    assert largest(chain(*["Relu"] * 7), *uncovered) == expected


def test_a_part_is_not_left_and_entered_again() -> None:
    # Hardmax takes `b`, and what it makes is added to `b`: "sum" is not in one part with "relu".
    made = interrupted()
    for name in "ef":
        made.graph.node.insert(0, helper.make_node("Relu", ["x"], [name]))
        made.graph.node[1].input[0] = name
    assert largest(made, 4) == Cut(outputs=("b",))


@pytest.mark.parametrize("outputs", [("selected",), ("selected", "boxes")])
def test_all_that_an_uncovered_node_reads_is_an_output(outputs: tuple[str, ...]) -> None:
    made = model(
        [
            helper.make_node("Relu", ["x"], ["a"]),
            helper.make_node("Relu", ["a"], ["boxes"]),
            helper.make_node("Sigmoid", ["y"], ["scores"]),
            helper.make_node("NonMaxSuppression", ["boxes", "scores"], ["selected"]),
        ],
        [value("x", [1, 9, 4]), value("y", [1, 2, 9])],
        [value(name, [None, 3] if name == "selected" else [1, 9, 4]) for name in outputs],
    )
    assert largest(made, 3) == Cut(outputs=("boxes", "scores"))


def test_a_part_begins_where_shapes_are_fixed() -> None:
    made = chain(*["Relu"] * 7)
    assert largest(made, 1) == Cut(inputs=("Relu1",))
    assert largest(made, 1, open_values={"Relu1"}) == Cut(inputs=("Relu2",))


def test_it_ends_at_tensors_that_the_source_has() -> None:
    prepared, source = chain(*["Relu"] * 7), chain(*["Relu"] * 7)
    source.graph.node[4].output[0] = source.graph.node[5].input[0] = "other"
    found = largest_covered(prepared.graph, [prepared.graph.node[5]], source)
    assert found == Cut(outputs=("Relu3",))


def test_all_that_an_uncovered_node_was_made_of_is_left() -> None:
    source = chain(*["Relu"] * 9)
    fused = helper.make_node("Fused", ["Relu1"], ["Relu3"])
    assert largest_covered(source.graph, [fused], source) == Cut(inputs=("Relu3",))


def test_a_part_that_has_an_uncovered_node_in_the_source_is_none() -> None:
    source, prepared = chain(*["Relu"] * 7), chain(*["Relu"] * 7)
    left = helper.make_node("Hardmax", ["Relu0"], ["left"])
    for made in (source, prepared):
        made.graph.node.insert(1, left)
    assert largest_covered(prepared.graph, [left], source) == Cut(outputs=("Relu0", "Relu6"))
    # Preparation has computed its shape.
    source.graph.node.insert(2, helper.make_node("Shape", ["left"], ["shape"]))
    source.graph.node[-1].CopyFrom(helper.make_node("Reshape", ["Relu5", "shape"], ["Relu6"]))
    assert largest_covered(prepared.graph, [left], source) is None


@pytest.mark.parametrize("ends", [4, 5])
def test_a_part_with_many_ends_is_none(ends: int) -> None:
    names = [f"n{index}" for index in range(ends)]
    made = model(
        [
            *(helper.make_node("Relu", ["x"], [name]) for name in names),
            helper.make_node("NonMaxSuppression", names, ["y"]),
        ],
        [value("x", [1, 9, 4])],
        [value("y", [None, 3])],
    )
    assert largest(made, ends) == (Cut(outputs=tuple(names)) if ends == 4 else None)


def test_more_of_the_source_can_depend_on_its_inputs() -> None:
    # Preparation has computed the sum of the weights and the shape that `x` has.
    source = model(
        [
            helper.make_node("Hardmax", ["x"], ["a"]),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("Relu", ["b"], ["c"]),
            helper.make_node("Shape", ["x"], ["shape"]),
            helper.make_node("Reshape", ["c", "shape"], ["y"]),
        ],
        [value("x", [2, 2])],
        [value("y", [2, 2])],
        [weights("w", 2, 2)],
    )
    prepared = chain("Hardmax", "Relu", "Relu", "Relu")
    for node, names in zip(prepared.graph.node, "xabcy", strict=False):
        node.input[0] = names
    for node, names in zip(prepared.graph.node, "abcy", strict=True):
        node.output[0] = names
    prepared.graph.output[0].name = "y"
    assert largest_covered(prepared.graph, [prepared.graph.node[0]], source) is None
