from __future__ import annotations

import pytest

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.loops import leave_to_cpu, unroll_loop
from tests.graph.rewrites.equal import operators, reasons, rewritten
from tests.graph.rewrites.unrolled import assert_equal, assert_too_large, unrolled
from tests.models import parsed

COUNTING = """
(float[2] x) => (float[2] y, float[n, 2] rows)
<int64 trips = {4}, bool true = {1}>
{
    y, rows = Loop (trips, true, x) <body = body (int64 i, bool go, float[2] state)
        => (bool go_out, float[2] next, float[2] row) {
        go_out = Identity (go)
        number = Cast <to = 1> (i)
        next = Add (state, number)
        row = Mul (next, x)
    }>
}
"""
"""A fixed number of trips: the state is carried, rows are collected, and ``x`` is an outer value."""


def test_a_loop_computes_the_same() -> None:
    result = assert_equal(parsed(COUNTING), "unroll_loop")
    assert [node.op_type for node in result.graph.node].count("Mul") == 4


@pytest.mark.parametrize(
    ("trips", "condition", "times"),
    [
        ("trips", "", 3),
        ("", "true", 2),
        ("trips", "true", 2),
        ("few", "true", 1),
        ("trips", "false", 0),
        ("zero", "true", 0),
    ],
)
def test_the_number_and_the_condition_decide(trips: str, condition: str, times: int) -> None:
    # As TensorFlow writes a while loop: the condition is computed from a counter of its own.
    end = "Identity (go)" if condition == "" else "Less (counter_out, two)"
    model = parsed(
        f"""
        (float[2] x) => (float[2] y)
        <int64 trips = {{3}}, int64 few = {{1}}, int64 zero = {{0}}, bool true = {{1}}, bool false = {{0}},
         int64 start = {{0}}, int64 one = {{1}}, int64 two = {{2}}>
        {{
            last, y = Loop ({trips or '""'}, {condition or '""'}, start, x) <body = body
                (int64 i, bool go, int64 counter, float[2] state)
                => (bool go_out, int64 counter_out, float[2] next) {{
                counter_out = Add (counter, one)
                go_out = {end}
                next = Exp (state)
            }}>
        }}
        """.replace('""', "")
    )
    result = assert_equal(model, "unroll_loop")
    assert [node.op_type for node in result.graph.node].count("Exp") == times


def test_a_condition_can_be_of_rank_1() -> None:
    model = parsed(
        """
        (float[2] x) => (float[2] y)
        <int64[1] trips = {2}, bool[1] true = {1}>
        {
            y = Loop (trips, true, x) <body = body (int64[1] i, bool[1] go, float[2] state)
                => (bool[1] go, float[2] next) {
                number = Cast <to = 1> (i)
                next = Add (state, number)
            }>
        }
        """
    )
    assert_equal(model, "unroll_loop")


BODY = "body = body (int64 i, bool go, float[2] state)"
STAYING = [
    ("its number of iterations 'trips' is computed", f"""
        (int64 trips, float[2] x) => (float[2] y) <bool true = {{1}}> {{
        y = Loop (trips, true, x) <{BODY} => (bool go, float[2] next) {{ next = Exp (state) }}> }}"""),
    ("its number of iterations depends on data or chance", f"""
        (float[2] x) => (float[2] y)
        <int64 trips = {{9}}, bool true = {{1}}, float limit = {{3.0}}> {{
        y = Loop (trips, true, x) <{BODY} => (bool go_out, float[2] next) {{
            next = Exp (state)
            sum = ReduceSum <keepdims = 0> (next)
            go_out = Less (sum, limit) }}> }}"""),
    ("its number of iterations depends on data or chance", f"""
        (float[2] x) => (float[2] y) <bool true = {{1}}, float half = {{0.5}}> {{
        y = Loop (, true, x) <{BODY} => (bool[1] go_out, float[2] next) {{
            next = Exp (state)
            chance = RandomUniform <shape = [1], seed = 1.0> ()
            go_out = Less (chance, half) }}> }}"""),
    ("it has no iteration, and its results are empty", f"""
        (float[2] x) => (float[2] y, float[n, 2] rows) <int64 trips = {{0}}, bool true = {{1}}> {{
        y, rows = Loop (trips, true, x) <{BODY} => (bool go, float[2] next, float[2] row) {{
            next = Exp (state)
            row = Exp (state) }}> }}"""),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "text"), STAYING)
def test_a_loop_of_unknown_length_stays_and_the_reason_is_named(reason: str, text: str) -> None:
    assert reasons(parsed(text), unroll_loop) == [reason]


def test_loops_in_loops_are_unrolled_with_constants_and_branches_of_their_own() -> None:
    model = parsed(
        """
        (float[2] x) => (float[n, 2] y)
        <int64 two = {2}, int64 three = {3}, bool true = {1}, float zero = {0.0}>
        {
            unused, y = Loop (three, true, x) <body = outer (int64 i, bool go, float[2] state)
                => (bool go, float[2] end, float[2] end_too)
                <float[2] weight = {0.5, -2.0}> {
                end = Loop (two, true, state) <body = inner (int64 j, bool on, float[2] inner_state)
                    => (bool on, float[2] inner_next) {
                    product = Mul (inner_state, weight)
                    sum = ReduceSum <keepdims = 0> (product)
                    positive = Less (zero, sum)
                    inner_next = If (positive) <
                        then_branch = then_ () => (float[2] a) { b = Add (product, state) a = Exp (b) },
                        else_branch = else_ () => (float[2] a) { b = Sub (product, x) a = Abs (b) }
                    >
                }>
                end_too = Neg (end)
            }>
        }
        """
    )
    result = assert_equal(model, "unroll_loop")
    # The weight is stored once, and not for each trip.
    weights = [each for each in result.graph.initializer if list(each.dims) == [2]]
    assert len(weights) == 1


def test_what_is_the_same_in_all_trips_is_computed_once_unless_it_is_random() -> None:
    model = parsed(
        """
        (float[2] x) => (float[2] y)
        <int64 trips = {3}, bool true = {1}>
        {
            y = Loop (trips, true, x) <body = body (int64 i, bool go, float[2] state)
                => (bool go, float[2] next) {
                same = Exp (x)
                chance = RandomUniform <shape = [2]> ()
                sum = Add (state, same)
                next = Add (sum, chance)
            }>
        }
        """
    )
    result, done = unrolled(model)
    assert done.names == ("unroll_loop",)
    operators = [node.op_type for node in result.graph.node]
    assert (operators.count("Exp"), operators.count("RandomUniform")) == (1, 3)


def test_names_stay_unique() -> None:
    model = parsed(
        """
        (float[2] x) => (float[2] y, float[2] z)
        <int64 trips = {2}, bool true = {1}>
        {
            taken = Exp (x)
            first = Loop (trips, true, taken) <body = one (int64 i, bool go, float[2] s)
                => (bool go, float[2] t) { u = Exp (s) t = Neg (u) }>
            y = Loop (trips, true, first) <body = two (int64 i, bool go, float[2] s)
                => (bool go, float[2] t) { u = Abs (s) t = Neg (u) }>
            z = Add (taken, y)
        }
        """
    )
    # Names that unrolled nodes would get.
    model.graph.node[0].output[0] = "t/0"
    model.graph.node[1].input[2] = model.graph.node[3].input[0] = "t/0"
    result = assert_equal(model, "unroll_loop")
    outputs = [name for node in result.graph.node for name in node.output]
    assert len(outputs) == len(set(outputs))
    names = [node.name for node in result.graph.node if node.name]
    assert len(names) == len(set(names))


def test_nothing_is_unrolled_beyond_the_limit() -> None:
    model = parsed(COUNTING)
    # Four of the body and one of the row for each trip, and the Concat of rows.
    nodes = 4 * 5 + 1
    assert_equal(model, "unroll_loop", limit=nodes)
    assert_too_large(model, nodes - 1)
    assert_too_large(model, 0)


@pytest.mark.parametrize(
    ("trips", "nodes", "last"),
    [("", "next = Exp (state)", "next"), ("trips", "", "state")],
    ids=["endless", "without nodes"],
)
def test_a_loop_that_takes_for_ever_is_beyond_any_limit(trips: str, nodes: str, last: str) -> None:
    model = parsed(f"""(float[2] x) => (float[2] y)
        <int64 trips = {{9223372036854775807}}, bool true = {{1}}>
        {{ y = Loop ({trips}, true, x) <{BODY} => (bool go, float[2] {last}) {{ {nodes} }}> }}""")
    assert_too_large(model, 50)


def test_a_loop_that_stays_keeps_its_unrolled_inside() -> None:
    model = parsed(
        """
        (int64 trips, float[2] x) => (float[2] y)
        <int64 two = {2}, bool true = {1}>
        {
            y = Loop (trips, true, x) <body = outer (int64 i, bool go, float[2] state)
                => (bool go, float[2] end) {
                end = Loop (two, true, state) <body = inner (int64 j, bool on, float[2] s)
                    => (bool on, float[2] t) { t = Neg (s) }>
            }>
        }
        """
    )
    result, done = unrolled(model)
    assert done.names == ("unroll_loop",)
    assert [node.op_type for node in graph.nodes(result.graph)].count("Loop") == 1


def test_a_loop_of_an_old_opset_that_leaves_a_node_to_the_cpu_has_a_state() -> None:
    model = parsed("(float[2, 4] x) => (float[2, 4] y) { a = Neg (x) y = Relu (a) }", opset=9)
    after = rewritten(model, leave_to_cpu, allowed=["Relu"])
    assert len(after.graph.node[1].input) == 3


def test_what_is_left_to_the_cpu_is_a_loop_of_one_iteration() -> None:
    model = parsed(
        """(float[2, 4] x) => (float[2, 2] y, int64[2, 2] i) <int64[1] two = {2}>
        { a = Neg (x) [top] y, i = TopK (a, two) }"""
    )
    after = rewritten(model, leave_to_cpu, allowed=["TopK"])
    assert operators(after) == ["Neg", "Loop", "Reshape", "Reshape", "Identity", "TopK"]
    loop = after.graph.node[1]
    assert (loop.name, loop.op_type) == ("top", "Loop")
    # All others have names by which reports leave them out.
    others = [node.name for node in graph.nodes(after.graph) if node.op_type not in ("Neg", "Loop")]
    assert all(name.startswith("top/inside") for name in others)
    assert len({*others}) == len(others)
