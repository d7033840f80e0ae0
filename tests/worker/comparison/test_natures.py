from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph import graph, inference
from hatch_epcontext.worker.comparison.measures import Nature, OutputFacts, Scores
from hatch_epcontext.worker.comparison.natures import output_facts
from tests.models import parsed


def chain(*operators: str) -> onnx.ModelProto:
    """``x`` (1 x 4) -> ``operators`` in a row -> ``y``."""
    names = ["x", *(f"v{number}" for number in range(1, len(operators))), "y"]
    links = zip(operators, names, names[1:], strict=False)
    nodes = " ".join(f"{after} = {operator} ({before})" for operator, before, after in links)
    return parsed(f"(float[1, 4] x) => (float[] y) {{ {nodes} }}", check=False)


def facts_of(model: onnx.ModelProto) -> dict[str, OutputFacts]:
    names = [value.name for value in model.graph.output]
    return output_facts(inference.inferred(model), names, graph.opset(model))


def natures(model: onnx.ModelProto) -> dict[str, Nature]:
    return {name: facts.nature for name, facts in facts_of(model).items()}


@pytest.mark.parametrize(
    ("operators", "nature"),
    [
        (("Relu",), "any"),
        (("Sigmoid",), "unit"),
        (("Tanh", "Transpose"), "unit"),
        (("Sigmoid", "Exp"), "any"),
        (("Sigmoid", "Clip", "Sqrt"), "unit"),
        (("our.own.Sigmoid",), "any"),
        (("Softmax",), "probabilities"),
        (("Softmax", "Flatten"), "probabilities"),
        (("Softmax", "ReduceMax"), "unit"),
        (("Softmax", "Compress"), "unit"),
        (("Softmax", "SpaceToDepth"), "probabilities"),
        (("ArgMax",), "indices"),
    ],
)
def test_the_last_operator_that_makes_new_values_says_their_nature(
    operators: tuple[str, ...], nature: Nature
) -> None:
    assert natures(chain(*operators)) == {"y": nature}


def test_joined_values_have_a_nature_if_all_parts_have_it() -> None:
    made = parsed("""(float[1, 4] x) => (float[2, 4] units, float[2, 4] others) {
            a = Sigmoid (x)
            b = Softmax (x)
            units = Concat <axis = 0> (a, b)
            others = Concat <axis = 0> (a, x) }""")
    assert natures(made) == {"units": "unit", "others": "any"}


@pytest.mark.parametrize("number", [40, 1000])
def test_values_that_are_joined_again_and_again_have_a_nature(number: int) -> None:
    names = [f"v{index}" for index in range(number)]
    for join in ("{1} = Concat <axis = 1> ({0}, x)", "{1} = Concat <axis = 0> ({0}, {0})"):
        joins = " ".join(join.format(*pair) for pair in itertools.pairwise(names))
        made = parsed(
            f"(float[1, 1] x) => (float[?, ?] y) {{ v0 = Tanh (x) {joins} y = Neg ({names[-1]}) }}"
        )
        assert natures(made) == {"y": "any" if "x)" in join else "unit"}


LAST = "a = MatMul (x, w) b = MatMul (x, v) s = Sigmoid (b) y = Concat <axis = -1> (a, s)"
FIRST = "s = Softmax <axis = 1> (x) e = Exp (x) y = Concat <axis = 1> (s, x, s, e)"
PRODUCT = "s = Sigmoid (x) c = Softmax (x) p = Mul (s, c) y = Concat <axis = 1> (x, p)"
SELECTED = "s = Sigmoid (x) t, n = TopK (s, two) e, m = TopK (x, two) y = Concat <axis = 1> (e, t)"
MOVED = """
    anchors = Reshape (x, by_anchor)
    s = Sigmoid (anchors)
    all = Concat <axis = 2> (anchors, s)
    moved = Transpose <perm = [0, 1, 3, 2]> (all)
    shape = Shape (x)
    batch = Slice (shape, first, second)
    sizes = Concat <axis = 0> (batch, rest)
    y = Reshape (moved, sizes)"""
SCALES = """
    s = Sigmoid (x)
    head = Concat <axis = 1> (x, s)
    small = AveragePool <kernel_shape = [2]> (x)
    t = Sigmoid (small)
    other = Concat <axis = 1> (small, t)
    y = Concat <axis = 2> (head, other, head)"""
SLICED = """
    s = Sigmoid (x)
    xy, wh, c = Split <axis = 1> (s, widths)
    a = Add (xy, xy)
    b = Exp (wh)
    joined = Concat <axis = 1> (a, b, c)
    y = Transpose <perm = [0, 2, 1]> (joined)"""
UPDATED = """
    s = Sigmoid (x)
    e = ReduceMax <axes = [1]> (x)
    y = ScatterElements <axis = 1> (s, at, e)"""


@pytest.mark.parametrize(
    ("nodes", "scores"),
    [
        (LAST, (2, "oosss")),
        (FIRST, (1, "s" * 6 + "o" * 6 + "s" * 6 + "o" * 6)),
        (PRODUCT, (1, "o" * 6 + "s" * 6)),
        (SELECTED, (1, "o" * 6 + "s" * 6)),
        (MOVED, (2, "ooosss")),
        (SCALES, (1, "o" * 6 + "s" * 6)),
        (SLICED, (2, "ooooss")),
        (UPDATED, (1, "osssss")),
        # Where scores are depends on the input, or is not along an axis.
        ("s = Sigmoid (x) all = Concat <axis = 1> (x, s) y = Gather <axis = 1> (all, k)", None),
        ("s = Sigmoid (x) e = Exp (s) y = Concat <axis = 1> (x, e)", None),
        ("n = Slice (x, zero, zero) s = Sigmoid (n) y = Concat <axis = 1> (n, s)", None),
        (
            """s = Sigmoid (x) a = Concat <axis = 1> (x, s) b = Concat <axis = 1> (s, x)
            y = Concat <axis = 2> (a, b)""",
            None,
        ),
    ],
)
def test_the_graph_shows_where_an_output_has_scores(
    nodes: str, scores: tuple[int, str] | None
) -> None:
    made = parsed(
        f"(float[1, 6, 4] x, int64[3] k) => (float[?, ?, ?] y) {{ {nodes} }}",
        w=(4, 2),
        v=(4, 3),
        two=[2],
        by_anchor=[1, 2, 3, 4],
        zero=[0],
        first=[0],
        second=[1],
        rest=[-1, 6],
        widths=[2, 2, 2],
        at=np.zeros((1, 1, 4), np.int64),
    )
    facts = facts_of(made)["y"]
    assert facts.nature == "any"
    expected = scores and Scores(3, scores[0], tuple(mark == "s" for mark in scores[1]))
    assert facts.scores == expected


@pytest.mark.parametrize(("other", "nature"), [("Tanh", "unit"), ("Relu", "any")])
def test_both_branches_say_the_nature_of_an_if(other: str, nature: Nature) -> None:
    made = parsed(f"""(float[1, 4] x, bool k) => (float[1, 4] y) {{ y = If (k) <
        then_branch = one () => (float[1, 4] t) {{ t = Sigmoid (x) }},
        else_branch = two () => (float[1, 4] e) {{ e = {other} (x) }}> }}""")
    assert natures(made) == {"y": nature}


def test_a_quantized_output_has_its_scale_and_the_nature_of_what_was_quantized() -> None:
    text = """(float[1, 4] x) => (float[1, 4] quantized, float[1, 4] others, uint8[1, 4] integers)
        <float scale = {0.25}> {
            a = Sigmoid (x)
            integers = QuantizeLinear (a, scale)
            b = DequantizeLinear (integers, scale)
            quantized = Flatten (b)
            others = Exp (b) }"""
    made = parsed(text)
    scales = {name: facts.scale for name, facts in facts_of(made).items()}
    assert scales == {"quantized": 0.25, "others": 0, "integers": 1}
    assert natures(made) == {"quantized": "unit", "others": "any", "integers": "unit"}
