from __future__ import annotations

import pytest

from hatch_epcontext.graph.rewrites.sequences import SEQUENCES
from tests.graph.rewrites.equal import operators, rewritten, untouched
from tests.graph.unrolling.models import unrolled
from tests.models import parsed


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("SplitToSequence <axis = 0> (x, two)", ["Split"]),
        ("SplitToSequence <axis = -2> (x, sizes)", ["Split"]),
        ("SplitToSequence (x)", ["Split"]),
        ("SplitToSequence <keepdims = 0> (x)", ["Split", *["Reshape"] * 5]),
    ],
    ids=["chunks", "sizes", "single", "without the axis"],
)
def test_a_split_of_known_sizes_is_a_split(split: str, expected: list[str], opset: int) -> None:
    shape = "2" if "keepdims" in split else "n, 2"
    model = parsed(
        f"""
        (float[5, 2] x) => (float[{shape}] y, float[{shape}] z, int64 n)
        <int64 two = {{2}}, int64[3] sizes = {{1, 3, 1}}, int64 one = {{1}}, int64 last = {{-1}}>
        {{
            parts = {split}
            y = SequenceAt (parts, one)
            z = SequenceAt (parts, last)
            n = SequenceLength (parts)
        }}
        """,
        opset,
    )
    found = operators(rewritten(model, SEQUENCES))
    assert found == [*expected, *["Identity"] * 3]


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("new_axis", [0, 1])
def test_a_sequence_of_known_tensors_is_concatenated(opset: int, new_axis: int) -> None:
    shape = "2, 4, 2" if new_axis else "2, 8"
    model = parsed(
        f"""
        (float[2, 2] x) => (float[{shape}] y)
        <int64 zero = {{0}}, int64 two = {{-2}}>
        {{
            a = Exp (x)
            b = Neg (x)
            start = SequenceEmpty <dtype = 1> ()
            first = SequenceInsert (start, a)
            second = SequenceInsert (first, b, zero)
            third = SequenceInsert (second, x)
            fourth = SequenceInsert (third, x, two)
            more = SequenceInsert (fourth, a)
            fewer = SequenceErase (more)
            y = ConcatFromSequence <axis = 1, new_axis = {new_axis}> (fewer)
        }}
        """,
        opset,
    )
    found = operators(rewritten(model, SEQUENCES))
    assert not {operator for operator in found if "Sequence" in operator}


def test_a_sequence_that_a_loop_fills_is_known_when_that_is_unrolled() -> None:
    model = parsed(
        """
        (float[2] x) => (float[3, 2] y)
        <int64 trips = {3}, bool true = {1}>
        {
            start = SequenceEmpty <dtype = 1> ()
            full, end = Loop (trips, true, start, x) <body = body
                (int64 i, bool go, seq(float[2]) rows, float[2] state)
                => (bool go, seq(float[2]) more, float[2] next) {
                next = Exp (state)
                half = Tanh (next)
                more = SequenceInsert (rows, half)
            }>
            y = ConcatFromSequence <axis = 0, new_axis = 1> (full)
        }
        """
    )
    result, done = unrolled(model)
    assert done == ("Loop unrolled 3 times",)
    found = operators(rewritten(result, SEQUENCES))
    assert not {operator for operator in found if "Sequence" in operator}


def test_a_sequence_that_is_used_otherwise_stays() -> None:
    model = parsed(
        """
        (float[4, 2] x) => (float[n, 2] y, float[m, 2] z)
        <int64 zero = {0}>
        {
            largest = ArgMax <axis = 0, keepdims = 0> (x)
            where = Gather (largest, zero)
            parts = SplitToSequence <axis = 0> (x)
            same = Identity (parts)
            y = SequenceAt (same, where)
            z = SequenceAt (parts, zero)
        }
        """
    )
    found = operators(rewritten(model, SEQUENCES))
    kept = ["Identity", "SequenceAt", "SplitToSequence"]
    assert sorted(found) == sorted(["ArgMax", "Gather", "Split", "Identity", *kept])


@pytest.mark.parametrize(
    "split", ["SplitToSequence (x, length)", "SplitToSequence <axis = 0> (x)"], ids=["fed", "open"]
)
def test_a_split_of_unknown_sizes_stays(split: str) -> None:
    first = "n" if "length)" not in split else "4"
    model = parsed(
        f"""
        (float[{first}, 2] x, int64 length) => (float[m, 2] z)
        <int64 zero = {{0}}>
        {{
            parts = {split}
            z = SequenceAt (parts, zero)
        }}
        """
    )
    assert untouched(model, SEQUENCES)


def test_only_what_is_refused_is_rewritten() -> None:
    model = parsed(
        """
        (float[4, 2] x) => (float[1, 2] z)
        <int64 zero = {0}>
        { parts = SplitToSequence (x) z = SequenceAt (parts, zero) }
        """
    )
    assert untouched(model, SEQUENCES, ["Clip"])
