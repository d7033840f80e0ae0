from __future__ import annotations

import onnx
import pytest

from hatch_epcontext.errors import Key, Kind, ModelError
from hatch_epcontext.worker.states import first_states, recomputed, state_pairs
from tests.models import parsed

KEY = Key(("states",))


LAYER = "y, h1, c1 = LSTM <hidden_size = 4> (x, w, r, , , h0, c0)"
STATES = "float[1, 1, 4] h0, float[1, 1, 4] c0"
VARIANTS = {
    "own": f"(float[2, 1, 3] x, {STATES}) => (float[1, 1, 4] c1, float[1, 1, 4] h1) {{ {LAYER} }}",
    "stacked": f"""(float[2, 1, 3] x, float[2, 1, 4] state) => (float[2, 1, 4] state_out) {{
        h0, c0 = Split <axis = 0> (state)
        {LAYER}
        state_out = Concat <axis = 0> (h1, c1) }}""",
    "branch": f"""(float[2, 1, 3] x, bool k, {STATES}) => (float[1, 1, 4] h, float[1, 1, 4] c) {{
        h, c = If (k) <
            then_branch = one () => (float[1, 1, 4] h1, float[1, 1, 4] c1) {{ {LAYER} }},
            else_branch = other () => (float[1, 1, 4] a, float[1, 1, 4] b)
                {{ a = Identity (h0) b = Identity (c0) }}> }}""",
}


def lstm(variant: str = "own") -> onnx.ModelProto:
    """An LSTM whose states are inputs and outputs: each its ``own``, or ``stacked`` in one."""
    return parsed(VARIANTS[variant], w=(1, 16, 3), r=(1, 16, 4))


def test_the_states_of_a_layer_are_found() -> None:
    assert state_pairs(lstm(), {}, KEY) == {"h0": "h1", "c0": "c1"}
    assert state_pairs(lstm("stacked"), {}, KEY) == {"state": "state_out"}
    assert state_pairs(lstm("branch"), {}, KEY) == {"h0": "h", "c0": "c"}
    assert first_states(lstm("stacked").graph) >= {"state", "h0", "c0"}
    assert first_states(lstm("branch").graph).isdisjoint({"x", "h", "c"})


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("state", "stateN"),
        ("h", "hn"),
        ("c0", "c_out"),
        ("in_cache_2", "out_cache_2"),
        ("LstmStateIn", "LstmStateOut"),
        ("step", "next_step"),
    ],
)
def test_states_of_single_operators_are_found_by_their_names(first: str, last: str) -> None:
    made = parsed(f"""(float[1, 4] x, float[1, 4] {first}) => (float[1, 4] {last})
        {{ {last} = Add (x, {first}) }}""")
    assert state_pairs(made, {}, KEY) == {first: last}
    # A picture that goes in and comes out is none, nor is a state of another size.
    for wrong, size in (("image", 4), (last, 5)):
        names = ("image_in", "image_out") if wrong == "image" else (first, wrong)
        made = parsed(f"""(float[1, {size}] x, float[1, 4] {names[0]}) => (float[1, {size}] {names[1]})
        {{ {names[1]} = Identity (x) }}""")
        assert state_pairs(made, {}, KEY) == {}


def test_what_a_transformer_passes_on_or_keeps_of_tokens_is_no_state() -> None:
    made = parsed("""(float[1, 1, 8] in_hidden_states, float[1, 1, 4, 8] k_cache,
        float[1, 1, 4, 8] v_cache, int32[1] lengths, int32 total) => (float[1, 1, 8] out_hidden_states,
        float[1, 1, 4, 8] next_k_cache, float[1, 1, 4, 8] next_v_cache) {
            out_hidden_states, next_k_cache, next_v_cache = com.microsoft.GroupQueryAttention (
                in_hidden_states, in_hidden_states, in_hidden_states, k_cache, v_cache, lengths, total) }""")
    assert state_pairs(made, {}, KEY) == {}


def test_the_cells_of_single_operators_are_found() -> None:
    made = parsed("""(float[4] x, float[1, 4] input_5) =>
        (float[1, 4] stack_5, float[4] masked) <int64[1] axis = {0}> {
            keep = Sigmoid (x)
            new = Tanh (x)
            before = Squeeze (input_5)
            kept = Mul (keep, before)
            added = Mul (keep, new)
            cell = Add (kept, added)
            stack_5 = Unsqueeze (cell, axis)
            masked = Mul (keep, x) }""")
    assert state_pairs(made, {}, KEY) == {"input_5": "stack_5"}


def test_only_layers_have_states_unless_they_are_given() -> None:
    made = parsed("""(float[1, 4] x, float[1, 4] state) => (float[1, 4] next)
        { next = Add (x, state) }""")
    assert state_pairs(made, {}, KEY) == {}
    assert state_pairs(made, {"state": "next"}, KEY) == {"state": "next"}


def test_an_output_of_unknown_rank_can_be_a_state() -> None:
    made = lstm()
    (last,) = (each for each in made.graph.output if each.name == "h1")
    last.type.tensor_type.ClearField("shape")
    assert state_pairs(made, {"h0": "h1"}, KEY) == {"h0": "h1"}


@pytest.mark.parametrize(
    ("pair", "message", "kind"),
    [
        ({"h": "h1"}, "has no input 'h'", Kind.UNKNOWN_INPUT),
        ({"h0": "h2"}, "has no output 'h2'", Kind.UNKNOWN_INPUT),
        (
            {"x": "h1"},
            r"'h1' \(float32 1 x 1 x 4\) cannot be fed to the input 'x'",
            Kind.VALUE_MISMATCH,
        ),
    ],
)
def test_pairs_that_are_none_are_errors(pair: dict[str, str], message: str, kind: Kind) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        state_pairs(lstm(), pair, KEY)
    assert raised.value.problems[0].kind is kind


@pytest.mark.parametrize(
    ("nodes", "is_recomputed"),
    [
        ("next = ScatterElements <axis = 1> (past, at, x)", False),
        ('next = ScatterElements <axis = 1, reduction = "add"> (past, at, x)', True),
        ("late = Slice (past, one, five, one) next = Concat <axis = 1> (late, x)", False),
        ("is_new = Less (x, zero) next = Where (is_new, past, x)", False),
        (
            "half = Mul (past, k) row = Slice (half, zeros, one, one) next = Concat <axis = 1> (late, row)",
            True,
        ),
        ("row = Add (x, k) next = ScatterElements <axis = 1> (past, at, row)", False),
        (
            "last = ReduceSum (past) row = Add (x, last) next = ScatterElements <axis = 1> (past, at, row)",
            True,
        ),
    ],
)
def test_a_state_that_is_overwritten_or_moved_is_not_recomputed(
    nodes: str, is_recomputed: bool
) -> None:
    late = "" if "late = " in nodes else "late = Slice (past, one, five, one)"
    made = parsed(f"""(float[1, 5] past, float[1, 1] x, int64[1, 1] at) => (float[1, 5] next)
        <int64[1] zeros = {{0}}, int64[1] one = {{1}}, int64[1] five = {{5}}, float zero = {{0}},
        float k = {{2}}>
        {{ {late} {nodes} }}""")
    assert recomputed(made.graph, {"past": "next"}) == ({"past"} if is_recomputed else set())
