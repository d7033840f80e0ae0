from __future__ import annotations

import onnx
import pytest
from onnx import helper

from hatch_epcontext.graph.facts import Cut
from hatch_epcontext.graph.parts import largest_covered
from tests.models import interrupted, parsed


def chain(*operators: str) -> onnx.ModelProto:
    """``x`` through operators, whose results are called after them and their place: ``Relu0``."""
    names = ["x", *(f"{operator}{index}" for index, operator in enumerate(operators))]
    steps = zip(operators, names, names[1:], strict=False)
    nodes = " ".join(f"{after} = {operator} ({before})" for operator, before, after in steps)
    return parsed(f"(float[2] x) => (float[2] {names[-1]}) {{ {nodes} }}")


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


@pytest.mark.parametrize("more", ["", ", float[1, 9, 4] boxes"])
def test_all_that_an_uncovered_node_reads_is_an_output(more: str) -> None:
    made = parsed(f"""(float[1, 9, 4] x, float[1, 2, 9] y) => (int64[?, 3] selected{more}) {{
        a = Relu (x)
        boxes = Relu (a)
        scores = Sigmoid (y)
        selected = NonMaxSuppression (boxes, scores) }}""")
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
    nodes = " ".join(f"{name} = Relu (x)" for name in names)
    made = parsed(f"""(float[1, 9, 4] x) => (int64[?, 3] y)
        {{ {nodes} y = NonMaxSuppression ({", ".join(names)}) }}""")
    assert largest(made, ends) == (Cut(outputs=tuple(names)) if ends == 4 else None)


def test_more_of_the_source_can_depend_on_its_inputs() -> None:
    # Preparation has computed the sum of the weights and the shape that `x` has.
    source = parsed(
        """(float[2, 2] x) => (float[2, 2] y) {
            a = Hardmax (x)
            b = Relu (a)
            c = Relu (b)
            shape = Shape (x)
            y = Reshape (c, shape) }""",
        w=(2, 2),
    )
    prepared = parsed("""(float[2, 2] x) => (float[2, 2] y)
        { a = Hardmax (x) b = Relu (a) c = Relu (b) y = Relu (c) }""")
    assert largest_covered(prepared.graph, [prepared.graph.node[0]], source) is None
