"""Branches and loops that values of inputs decide."""

from __future__ import annotations

import pytest

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.branches import Branching, branchings
from tests.models import parsed

BODIES = """then_branch = a () => (float[2] p) { p = Abs (x) },
    else_branch = b () => (float[2] q) { q = Neg (x) }"""

NESTED = """then_branch = a () => (float[2] p) { inside },
    else_branch = b () => (float[2] q) { q = Neg (x) }"""

LOOP = """y = Loop ({}, {}, x) <body = b (int64 i, bool g, float[2] v) => (bool h, float[2] w)
    {{ h = Identity (g) w = Abs (v) }}>"""


@pytest.mark.parametrize(
    ("nodes", "condition"),
    [
        (f"y = If (c) <{BODIES}>", "c"),
        (f"m = ReduceMax <keepdims = 0> (x) d = Greater (m, k) y = If (d) <{BODIES}>", "d"),
        (LOOP.format("", "c"), "c"),
        (f"n = Cast <to = 7> (c) {LOOP.format('n', '')}", "n"),
        # Known, whatever the inputs are.
        (f"n = Size (x) d = Equal (n, two) y = If (d) <{BODIES}>", None),
        ("y = Abs (x)", None),
        (f"y = If (c) <{NESTED}>".replace("inside", f"p = If (c) <{BODIES}>"), "c"),
        (
            f"y = If (c) <{NESTED}>".replace("inside", f"g = Not (c) p = If (g) <{BODIES}>"),
            "c",
        ),
        # Fixed inside a branch.
        (
            f"y = If (c) <{NESTED}>".replace(
                "inside", f"n = Size (x) d = Equal (n, two) p = If (d) <{BODIES}>"
            ),
            "c",
        ),
    ],
)
def test_conditions_that_inputs_decide(nodes: str, condition: str | None) -> None:
    model = parsed(
        "(float[2] x, bool c) => (float[2] y) <float k = {1}, int64 two = {2}> {" + nodes + "}"
    )
    for number, node in enumerate(graph.nodes(model.graph)):
        node.name = f"n{number}"
    found = [*branchings(model.graph, model.graph)]
    assert {part.condition for part in found} - {""} == ({condition} - {None})
    assert all(part.outputs == {"y"} for part in found)
    assert any(not part.condition for part in found) == ("Not" in nodes)
    assert not [
        *branchings(model.graph, parsed("(float[2] x) => (float[2] y) { y = Abs (x) }").graph)
    ]


@pytest.mark.parametrize(
    ("sides", "is_loop", "untaken"),
    [
        ({True, False}, False, None),
        ({True}, False, "no sample takes the branch 'else' of the If 'a'"),
        ({False}, False, "no sample takes the branch 'then' of the If 'a'"),
        (set(), False, "the branches that samples take in the If 'a' are unknown"),
        ({True}, True, None),
        ({False}, True, "no sample runs the body of the If 'a'"),
        (set(), True, "no sample runs the body of the If 'a'"),
    ],
)
def test_what_no_sample_runs_is_named(sides: set[bool], is_loop: bool, untaken: str | None) -> None:
    part = Branching("If 'a'", "c", is_loop, frozenset({"y"}))
    assert part.untaken(frozenset(sides)) == untaken
