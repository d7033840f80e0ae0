from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.graph.number_format import FLOAT16, Fault, NumberFormat
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.comparison.compare import Baselines, Comparison, compare_runs, concluded
from hatch_epcontext.worker.comparison.diverging import Divergence, describe
from hatch_epcontext.worker.comparison.effect import cause_of, effect
from hatch_epcontext.worker.comparison.emulation import (
    Decisions,
    FormattedModel,
    conditioned,
    decided,
    emulate,
    narrowed,
    with_rare,
    without_chance,
)
from hatch_epcontext.worker.comparison.levels import Level, Levels, choose
from hatch_epcontext.worker.comparison.runs import Facts, Reference, ReferenceRun
from hatch_epcontext.worker.covered import describe_values
from hatch_epcontext.worker.reference import reference
from hatch_epcontext.worker.results import (
    FEW_SAMPLES,
    Agreement,
    AgreementStatus,
    Emulation,
    Nearness,
)
from hatch_epcontext.worker.session import cpu_options, open_session
from tests.models import parsed, save
from tests.worker.actions.test_compile import MODEL
from tests.worker.test_states import lstm

QNN = Tolerance(20, 0.99, unit=0.1)
POWER = Fault("Pow", "is -4 for -0.0", low=-3e-8, high=3e-8, gives=-4.0, exponent=2.0)
TABLE = Fault("Sigmoid", "is coarse behind Gemm", low=-1e5, high=1e5, behind=frozenset({"Gemm"}))


def emulated(
    made: onnx.ModelProto, folder: Path, format_: NumberFormat = FLOAT16, **settings: Any
) -> tuple[Divergence, Levels]:
    path = save(made, folder / "a.onnx")
    spec = Model("a", path, MODEL, **settings)
    model, expected = FormattedModel.load(path, format_), reference(spec, made)
    assert model is not None
    return Divergence(model, expected), emulate(model, expected, QNN)


def emulation(*arguments: Any, **settings: Any) -> Emulation:
    divergence, levels = emulated(*arguments, **settings)
    return effect(divergence, levels, levels)


def chosen(*arguments: Any) -> list[ReferenceRun]:
    divergence, levels = emulated(*arguments)
    return choose(levels, is_optimistic=divergence.model.optimistic is not None)


def ratio(result: Emulation) -> float:
    assert result.nearest is not None
    assert result.nearest.snr is not None
    return result.nearest.snr


def layers(size: int = 32) -> onnx.ModelProto:
    return parsed(
        f"""(float[4, {size}] x) => (float[4, 8] y) {{
            hidden = MatMul (x, w)
            positive = Relu (hidden)
            y = MatMul (positive, v) }}""",
        w=(size, 64),
        v=(64, 8),
    )


LOG_OF_POWER = """(float[1, 400] x) => (float[1, 400] y) <float floor = {1e-10}> {
    [square] power = Mul (x, x)
    [floor] positive = Add (power, floor)
    [log] y = Log (positive) }"""


def log_of_power() -> onnx.ModelProto:
    return parsed(LOG_OF_POWER)


def test_a_model_that_float16_computes_well_is_not_sensitive(tmp_path: Path) -> None:
    divergence, levels = emulated(layers(), tmp_path)
    result = effect(divergence, levels, levels)
    assert result.reason is None
    assert result.samples == len(levels) > 30
    assert ratio(result) > 45
    assert [each.name for each in choose(levels, is_optimistic=False)] == ["random"]


def test_the_target_runs_the_worst_floats_that_are_far_from_the_ordinary(tmp_path: Path) -> None:
    made = parsed(
        """(float[1, 2] x) => (float[1, 2] y) <float[2] mean = {300, 50000}, float[2] deviation = {1, 200}>
        { c = Sub (x, mean) y = Div (c, deviation) }"""
    )
    assert [run.name for run in chosen(made, tmp_path) if run.far] == ["other values of x"]


def test_larger_numbers_of_other_inputs_run_too(tmp_path: Path) -> None:
    made = parsed(
        """(float[1, 8] x, float[1, 8] z) => (float[1, 8] y, float[1, 8] w) <float percent = {0.01}> {
        p = Mul (x, x) y = Mul (p, z) r = Mul (z, percent) q = Div (z, r) w = Mul (q, z) }"""
    )
    larger = [run for run in chosen(made, tmp_path) if run.is_larger]
    assert {run.larger for run in larger} == {frozenset("xz"), frozenset("z")}
    # Each has a name of its own.
    assert len({run.name for run in larger}) == len(larger)


def test_of_many_turns_the_target_also_runs_what_is_right_as_emulated(tmp_path: Path) -> None:
    """The sine of many turns is less exact there."""
    made = parsed("""(float[1, 64] x) => (float[1, 64] y)
        <float k = {0.2617993878}, float share = {0.2}, float one = {1}> {
        a = Mul (x, k) s = Sin (a) p = Mul (s, share) y = Add (p, one) }""")
    _, levels = emulated(made, tmp_path)
    far = [levels.of(run) for run in choose(levels) if run.far]
    assert [level.margin >= 0 for level in far] == [False, False, True]
    assert all(level.run.is_counted for level in far)


def test_of_larger_numbers_those_that_are_wrong_by_chance_say_nothing(tmp_path: Path) -> None:
    """A sum that is about 0 is wrong; that of other numbers of the same size is right."""
    made = parsed(
        """(float[1, 8] x) => (float[1, 1] y)
        <float[1, 8] signs = {1, 1, -1, 1, -1, -1, 1, -1}, int64[1] last = {1}> {
        squares = Mul (x, x) terms = Mul (squares, signs) y = ReduceSum (terms, last) }"""
    )
    divergence, levels = emulated(made, tmp_path)
    wrong = [
        level.run.far["x"].high for level in levels if level.run.is_larger and level.margin < 0
    ]
    assert wrong == [128, 512]
    left = without_chance(levels, divergence.model, divergence.reference, QNN)
    # Squares of the others are too large.
    assert [level.run.far["x"].high for level in levels if level not in left] == [128]


@pytest.mark.parametrize(
    ("nodes", "names", "least"),
    [
        ("y = Mul (x, z)", {"x", "z"}, 256),
        # A square of one of them is too large, and a root is not.
        ("q = Mul (x, x) r = Abs (z) s = Sqrt (r) y = Add (q, s)", {"x"}, 256),
    ],
)
def test_a_warning_names_the_inputs_that_are_too_large_and_where_that_begins(
    tmp_path: Path, nodes: str, names: set[str], least: float
) -> None:
    made = parsed(f"(float[1, 64] x, float[1, 64] z) => (float[1, 64] y) {{ {nodes} }}")
    divergence, levels = emulated(made, tmp_path)
    run = next(level.run for level in levels if level.run.is_larger and level.margin < 0)
    found = narrowed(run, divergence.model, divergence.reference, QNN)
    assert set(found.far) == names
    assert all(0.9 * least < far.low < 1.2 * least < far.high for far in found.far.values())
    right = next(level.run for level in levels if level.run.is_larger and level.margin >= 0)
    assert narrowed(right, divergence.model, divergence.reference, QNN) is right


@pytest.mark.parametrize(
    ("end", "is_sensitive"), [("y = Softmax (d)", False), ("y = Sin (d)", True)]
)
def test_numbers_that_are_too_large_do_not_count_where_nothing_shows_them(
    tmp_path: Path, end: str, is_sensitive: bool
) -> None:
    """Squares of distances to points that are far away."""
    nodes = f"""d0 = Sub (x, points) q = Mul (d0, d0) s = ReduceSum <keepdims = 0> (q, axis) n = Neg (s)
        d = Div (n, width) {end}"""
    made = parsed(
        f"(float[4, 1, 2] x) => (float[4, 26] y) {{ {nodes} }}",
        points=np.linspace(0, 1000, 52, dtype=np.float32).reshape(1, 26, 2),
        axis=np.array([2]),
        width=np.float32(3000),
    )
    assert (emulation(made, tmp_path).reason is not None) == is_sensitive


SATURATING = """(float[8, 512] x) => (float[8, 1] y) <float k = {9000}, int64[1] axes = {1}> {
    [scale] large = Mul (x, k)
    [total] sum = ReduceSum (large, axes)
    [back] y = Div (sum, k) }"""
SQUARED = "(float[1, 16] x) => (float[1, 16] y) <float two = {2}> { [square] y = Pow (x, two) }"
MASKED = """(float[4, 16] x) => (float[4, 8] y) {
    scores = MatMul (x, w)
    masked = Add (scores, mask)
    y = Softmax <axis = -1> (masked) }"""
INTEGERS = "(int64[1, 20] ids) => (float[20, 8] y) { y = Gather (w, ids) }"


@pytest.mark.parametrize(
    ("text", "opset", "faults", "reason"),
    [
        (SATURATING, 17, (), r"ReduceSum total reaches .*float16 ends at 65,504"),
        (LOG_OF_POWER, 17, (), "Add floor uses 1e-10, which float16 does not have"),
        (SQUARED, 7, (POWER,), "Pow square is -4 for -0.0"),
        (SQUARED, 17, (POWER,), "Pow square is -4 for -0.0"),
        (SQUARED, 17, (), None),
        # A mask may be cut off.
        (MASKED, 17, (), None),
        (INTEGERS, 17, (), None),
    ],
)
def test_what_float16_loses_is_named_where_it_counts(
    tmp_path: Path, text: str, opset: int, faults: tuple[Fault, ...], reason: str | None
) -> None:
    mask = np.array([0] * 4 + [-1e9] * 4, np.float32)
    made = parsed(text, opset, w=(16, 8), mask=mask)
    result = emulation(made, tmp_path, replace(FLOAT16, faults=faults))
    assert (result.reason is None) == (reason is None)
    assert re.search(reason or "", result.reason or "")


def test_a_sensitive_model_runs_samples_of_each_nature_on_the_target(tmp_path: Path) -> None:
    ran = chosen(parsed(SATURATING), tmp_path)
    assert ran[0].name == "random"
    assert len({each.nature for each in ran}) == 4


def test_what_changes_only_where_the_target_is_wrong_is_inconclusive(tmp_path: Path) -> None:
    made = parsed("(float[1, 8] x) => (float[1, 8] y) { y = Relu (x) }")
    _, levels = emulated(made, tmp_path)
    constant = Levels(level for level in levels if not level.run.outputs[0]["y"].any())
    expected = Reference(tuple(level.run for level in levels), Facts())
    compared = Comparison((Agreement("y", 0.0, 1.0),), agreed=(constant[0].run,))
    (agreement,) = concluded(compared, expected, constant).agreements
    assert agreement.status is AgreementStatus.INCONCLUSIVE
    assert concluded(compared, expected, levels) == compared
    right = replace(compared, agreed=(*compared.agreed, levels[0].run))
    assert concluded(right, expected, constant) == right
    # It is the same for all inputs.
    alike = Reference(tuple(level.run for level in constant), Facts())
    assert concluded(compared, alike, constant) == compared


@pytest.mark.parametrize(("limit", "names"), [(1500, ["values that change over"]), (200_000, [])])
def test_a_sample_in_which_an_output_changes_is_run_if_the_format_is_exact_enough(
    limit: int, names: list[str], tmp_path: Path
) -> None:
    text = """(float[1, 16] volts, float[1, 16] amps) => (float[1, 16] watts, bool[1, 1] over) {
        watts = Mul (volts, amps) most = ReduceMax <axes = [1]> (watts) over = Greater (most, limit) }"""
    made = parsed(text, limit=np.array(limit, np.float32))
    divergence, levels = emulated(made, tmp_path)
    assert sum(bool(level.run.changes) for level in levels) == 3
    expected = Reference(tuple(level.run for level in levels), Facts())
    kept = conditioned(levels, divergence.model, expected, QNN)
    assert [run.name for run in choose(kept) if run.changes] == names
    assert all(level.margin >= 0 for level in kept if level.run.changes)


def test_what_changes_in_another_sample_that_runs_needs_no_more(tmp_path: Path) -> None:
    made = parsed("""(int64[1, 8] x) => (bool[1, 8] y) <int64 limit = {300}> {
        y = Greater (x, limit) }""")
    _, levels = emulated(made, tmp_path)
    assert any(level.run.changes for level in levels)
    ran = choose(levels)
    assert [run for run in ran if run.far]
    assert not [run for run in ran if run.changes]


def test_branches_are_rounded_too(tmp_path: Path) -> None:
    made = parsed(
        """(float[1, 8] x, int64 kind) => (float[1, 8] y) <int64 k = {7}> { c = Equal (kind, k)
            y = If (c) <
                then_branch = t () => (float[1, 8] u) { u = Abs (x) },
                else_branch = e () => (float[1, 8] v) {
                    q = Mul (x, x) s = ReduceSum <keepdims = 1> (q) v = Div (q, s) }> }"""
    )
    _, levels = emulated(made, tmp_path)
    larger = [(level.run.far, level.margin < 0) for level in levels if level.run.is_larger]
    assert {wrong for far, wrong in larger if "kind" in far} == {True}
    assert {wrong for far, wrong in larger if "kind" not in far} == {False}


def test_what_no_emulation_shows_is_run_on_the_target(tmp_path: Path) -> None:
    made = parsed(
        """(float[1, 16] x) => (float[1, 8] y) {
            hidden = Gemm (x, w, b)
            [gate] y = Sigmoid (hidden) }""",
        w=(16, 8),
        b=(8,),
    )
    assert len(chosen(made, tmp_path)) == 1
    coarse = replace(FLOAT16, faults=(TABLE,))
    assert len(chosen(made, tmp_path, coarse)) == 4
    divergence, levels = emulated(made, tmp_path, coarse)
    assert "Sigmoid gate is coarse behind Gemm" in cause_of(divergence, levels[0], -5.0)[0]


def test_the_target_runs_the_worst_and_the_first_sample_of_a_large_model_or_only_one(
    tmp_path: Path,
) -> None:
    few = Levels(emulated(log_of_power(), tmp_path)[1][:FEW_SAMPLES])
    worst, first = choose(few)
    assert few.of(worst).margin == min(level.margin for level in few if level.run.usual)
    assert first.name == "random"
    assert choose(few, is_brief=True) == [worst]
    well = Levels(emulated(layers(), tmp_path)[1][:FEW_SAMPLES])
    assert [run.name for run in choose(well)] == ["random"]


def test_a_simulator_runs_few_frames_of_a_model_that_is_slow_there(tmp_path: Path) -> None:
    levels = emulated(lstm(), tmp_path)[1]
    first, longest, *_ = choose(levels, seconds=0.2)
    assert (len(first.frames), len(longest.frames)) == (1, 16)
    slow = [run for run in choose(levels, seconds=0.3) if not run.far]
    assert [len(run.frames) for run in slow] == [1, 8]
    short = [level for level in levels if len(level.run.frames) == 8 and level.run.usual]
    assert levels.of(slow[1]).margin == min(level.margin for level in short)


def test_a_simulator_runs_the_two_worst_samples_of_a_model_that_is_slow_there(
    tmp_path: Path,
) -> None:
    levels = emulated(log_of_power(), tmp_path)[1]
    few, slow = (
        [run.name for run in choose(levels, seconds=seconds) if run.usual] for seconds in (0.4, 0.6)
    )
    assert (len(few), len(slow)) == (4, 2)
    assert min(levels, key=lambda level: level.spare).run.name in slow


def scaled(factor: float) -> onnx.ModelProto:
    """Adds up an input, with a wrong ``factor``."""
    return parsed(
        "(float[1, 8] x, float[1, 8] s) => (float[1, 8] next) { k = Mul (x, f) next = Add (s, k) }",
        f=np.float32(factor),
    )


@pytest.mark.parametrize(("to_beat", "frames"), [(Nearness(50), 1), (Nearness(10), 25)])
def test_a_run_ends_with_the_frame_that_shows_that_it_is_beaten(
    tmp_path: Path, to_beat: Nearness, frames: int
) -> None:
    table = ValidateTable(states={"s": "next"})
    expected = emulated(scaled(1), tmp_path, validate=table)[0].reference
    session = open_session(save(scaled(1.001), tmp_path / "b.onnx"), cpu_options())
    runs = [run for run in expected.runs if len(run.frames) > 1][:2]
    one = next(run for run in expected.runs if len(run.frames) == 1)
    # It leaves 60 dB, 40 above the limit.
    compared = compare_runs(session, expected, QNN, [*runs, one], Baselines(to_beat=to_beat))
    assert (compared.runs, compared.beaten) == (frames, frames == 1)


def test_the_sample_that_is_worst_for_what_is_to_be_beaten_comes_first(tmp_path: Path) -> None:
    expected = emulated(scaled(1), tmp_path)[0].reference
    session = open_session(save(scaled(1.001), tmp_path / "b.onnx"), cpu_options())
    runs = [run for run in expected.runs if run.usual][:3]
    to_beat = Nearness(50, sample=runs[2].name)
    compared = compare_runs(session, expected, QNN, runs, Baselines(to_beat=to_beat))
    assert compared.samples == (runs[2].name,)


def test_states_are_fed_back_in_the_format(tmp_path: Path) -> None:
    made = parsed("""(float[1, 40] x, float[1, 40] state) => (float[1, 40] next) <float rate = {100}> {
            [keep] kept = Mul (state, rate)
            [add] next = Add (kept, x) }""")
    table = ValidateTable(states={"state": "next"})
    # After eight frames the state is 1e14 times the input.
    assert ratio(emulation(made, tmp_path))
    reason = emulation(made, tmp_path, validate=table).reason
    assert reason is not None
    assert "float16 ends at 65,504" in reason


def mean(kept: float) -> onnx.ModelProto:
    """What an input differs from its running mean."""
    return parsed(
        """(float[1, 16] x, float[1, 16] mean) => (float[1, 16] y, float[1, 16] mean_out) {
            before = Mul (mean, kept)
            new = Mul (x, rest)
            mean_out = Add (before, new)
            y = Sub (x, mean_out) }""",
        kept=np.float32(kept),
        rest=np.float32(1 - kept),
    )


COUNTER = """(float[1, 8] x, float[1, 1] step) => (float[1, 8] y, float[1, 1] next_step)
    <float one = {1}> {
        next_step = Add (step, one)
        y = Add (next_step, x) }"""


@pytest.mark.parametrize("made", [mean(0.999), parsed(COUNTER)], ids=["mean", "counter"])
@pytest.mark.parametrize("is_given", [False, True])
def test_a_model_whose_states_last_is_sensitive(
    tmp_path: Path, made: onnx.ModelProto, is_given: bool
) -> None:
    inputs = {
        value.name: [d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in made.graph.input
    }
    arrays = {name: np.full(shape, 3.3, np.float32) for name, shape in inputs.items()}
    np.savez(tmp_path / "given.npz", **arrays)  # type: ignore[arg-type]
    validate = ValidateTable(inputs=str(tmp_path / "given.npz") if is_given else "random")
    divergence, levels = emulated(made, tmp_path, validate=validate)
    assert min(level.margin for level in levels) > 25
    assert "adds up" in (effect(divergence, levels, levels).reason or "")


WINDOW = """(float[1, 4] x, float[32, 4] cache) => (float[4] y, float[32, 4] next_cache)
    <int64[1] one = {1}, int64[1] end = {32}> {
        kept = Slice (cache, one, end)
        next_cache = Concat <axis = 0> (kept, x)
        y = ReduceMean <axes = [0], keepdims = 0> (next_cache) }"""


def test_states_that_are_forgotten_or_only_moved_do_not_last(tmp_path: Path) -> None:
    for made in (mean(0.9), lstm(), parsed(WINDOW)):
        path = save(made, tmp_path / "forgets.onnx")
        facts = reference(Model("a", path, MODEL), made).facts
        assert facts.states
        assert not facts.is_lasting


@pytest.mark.parametrize(
    ("text", "right", "wrong", "message"),
    [
        (
            "(float16[9] x) => (float16[9] y) { y = Abs (x) }",
            "Abs",
            "Neg",
            "changes nothing for the sample 'random', so the EP computes",
        ),
        (LOG_OF_POWER, "1e-10", "1", "The first diverging node: Add floor uses 1e-10"),
    ],
)
def test_a_disagreement_is_explained_by_the_emulation(
    tmp_path: Path, text: str, right: str, wrong: str, message: str
) -> None:
    broken = save(parsed(text.replace(right, wrong)), tmp_path / "broken.onnx")
    divergence, levels = emulated(parsed(text), tmp_path)
    usual = [level for level in levels if level.run.usual]
    runs = [level.run for level in usual if level.margin < 0] or [level.run for level in usual]
    session = open_session(broken, cpu_options())
    difference = compare_runs(
        session, divergence.reference, QNN, runs, Baselines(levels)
    ).difference
    assert difference is not None
    assert message in cause_of(divergence, levels.of(difference.run), difference.margin)[0]


@pytest.mark.parametrize(
    ("inexact", "ran", "words"),
    [
        ("Add", True, "'. Perhaps the cause is that Add a, b has a kernel that is less exact"),
        ("Mul", True, "not have. Perhaps the cause is that Mul square has a kernel that is less"),
        ("Add", False, "': Add a, b uses 1e-10, which float16 does not have"),
    ],
    ids=["same-node", "other-node", "not-run"],
)
def test_a_node_that_the_emulation_cannot_show_may_be_the_cause_on_the_target(
    tmp_path: Path, inexact: str, ran: bool, words: str
) -> None:
    made = parsed(LOG_OF_POWER)
    made.graph.node[1].name = "a, b"
    divergence, levels = emulated(made, tmp_path, replace(FLOAT16, inexact=frozenset({inexact})))
    reason = effect(divergence, levels, Levels(replace(level, ran=ran) for level in levels)).reason
    assert words in (reason or "")
    assert ("Perhaps" in (reason or "")) is ran


@pytest.mark.parametrize(
    ("least", "words"), [(1.0, "Log log has an error of "), (4.0, "Log log is 0 above 2")]
)
def test_a_known_fault_is_named_only_where_a_value_has_it(
    tmp_path: Path, least: float, words: str
) -> None:
    made = parsed(
        """(float[1, 16] x) => (float[1, 16] y) <float scale = {1e-3}> {
            positive = Relu (x)
            small = Mul (positive, scale)
            logged = Add (small, least)
            [log] y = Log (logged) }""",
        least=np.float32(least),
    )
    fault = Fault("Log", "is 0 above 2", low=2.0, high=1e5, gives=0.0)
    divergence, levels = emulated(made, tmp_path, replace(FLOAT16, faults=(fault,)))
    node = divergence.first(levels[0].run)
    assert node is not None
    assert describe(node).startswith(words)


def detector() -> onnx.ModelProto:
    """``x`` -> the rows that a NonMaxSuppression selects of 300 boxes in three classes."""
    return parsed(
        """(float[1, 16] x) => (int64[?, 3] rows)
        <int64[3] table = {1, 300, 4}, int64[3] by_class = {1, 3, 300}, int64[1] most = {50},
        float[1] overlap = {0.5}, float[1] least = {0.4}> {
            a = MatMul (x, w)
            b = Sigmoid (a)
            boxes = Reshape (b, table)
            c = MatMul (x, v)
            d = Sigmoid (c)
            scores = Reshape (d, by_class)
            [suppression] rows = NonMaxSuppression (boxes, scores, most, overlap, least) }""",
        w=(16, 1200),
        v=(16, 900),
    )


def test_what_a_suppression_reads_is_compared_in_the_format(tmp_path: Path) -> None:
    _, levels = emulated(detector(), tmp_path)
    assert levels.worst.nearest is not None
    assert levels.worst.nearest.output in ("boxes", "scores")
    assert levels.margin > 25


@pytest.mark.parametrize(
    ("offsets", "is_flat"),
    [
        ([1000] * 16, True),
        ([1000, -1000] * 8, True),
        ([10] * 16, False),
        ([1000, *[10] * 15], False),
        ([0] * 16, False),
    ],
)
def test_an_output_that_changes_by_less_than_its_numbers_are_apart_is_sensitive(
    tmp_path: Path, offsets: list[float], is_flat: bool
) -> None:
    made = parsed(
        """(float[1, 16] x) => (float[1, 16] y) <float scale = {0.1}> {
            t = Tanh (x)
            small = Mul (t, scale)
            y = Add (small, offset) }""",
        offset=np.array(offsets, np.float32),
    )
    result = emulation(made, tmp_path)
    assert ratio(result) > 50
    assert (result.reason is not None) == is_flat
    assert result.reason is None or "1000" in result.reason


def test_floats_that_no_app_has_make_no_model_sensitive(tmp_path: Path) -> None:
    made = parsed(
        """(float[1, 32] x) => (float[1, 32] y) <float side = {30}> {
            e = Exp (x) y = Mul (e, side) }"""
    )
    divergence, levels = emulated(made, tmp_path)
    assert any(level.margin < 0 for level in levels if not level.run.usual)
    assert levels.margin > 10
    assert effect(divergence, levels, levels).reason is None


def test_the_first_integers_that_are_too_long_for_the_ep_are_named(tmp_path: Path) -> None:
    made = parsed(
        """(int64[1, 8] x) => (int64[1, 8] y) <int64 k = {100000000}, int64 three = {3}> {
            [triple] t = Mul (x, three) [hash] h = Mul (t, k) [half] y = Div (h, three) }"""
    )
    path = save(made, tmp_path / "a.onnx")
    expected = reference(Model("a", path, MODEL), made)
    for bits, name in ((32, "hash"), (64, "")):
        model = FormattedModel.load(path, FLOAT16, integer_bits=bits)
        assert model is not None
        node = Divergence(model, expected).overflow(expected.runs[0])
        assert (node.name if node else "") == name
        assert node is None or node.reason == "reaches 7.6e+10; the EP computes integers in 32 bits"


def test_samples_at_which_the_source_itself_is_wrong_do_not_count(tmp_path: Path) -> None:
    # It has a pole at 0.1, the level of a square wave.
    made = parsed(
        """(float[1, 4] x) => (float[1, 4] y) <float pole = {0.01}> {
            s = Mul (x, x) d = Sub (s, pole) y = Reciprocal (d) }"""
    )
    divergence, levels = emulated(made, tmp_path)
    kept = conditioned(levels, divergence.model, divergence.reference, QNN)
    names = [[level.run.name for level in some] for some in (levels, kept)]
    assert "square at 0.1" in {*names[0]} - {*names[1]}
    assert names[1][0] == "random"
    # Other faults count: a logarithm of powers is right for rounded inputs.
    divergence, levels = emulated(log_of_power(), tmp_path)
    assert conditioned(levels, divergence.model, divergence.reference, QNN) == levels


@pytest.mark.parametrize(
    ("text", "dropped", "kept"),
    [
        # A pole near 1, which float16 has.
        (
            """(float[1, 4] x) => (float[1, 4] y) <float pole = {0.9999}> {
                s = Mul (x, x) d = Sub (s, pole) y = Reciprocal (d) }""",
            {"ramp at 1", "spike at 1", "constant at 1"},
            {"random", "square at 0.1"},
        ),
        # A Sigmoid of a small number is within rounding of its threshold.
        (
            """(float[1, 64] x) => (float[1, 1] y) <float half = {0.5}> {
                s = Sigmoid (x) is_more = Greater (s, half) n = Cast <to = 1> (is_more)
                y = ReduceMean <axes = [1]> (n) }""",
            {"pink at 0.01", "ramp at 0.01", "random at 0.01"},
            {"random", "tone at 1", "pink at 0.1"},
        ),
        # Products that float16 does not have are neither above nor below 0.
        (
            """(float[1, 6, 200] x) => (float[1, 6] y) <int64[1] i = {0}, int64[1] j = {1},
                int64[1] n = {199}, int64[1] m = {200}, int64[1] last = {-1}, float zero = {0}> {
                a = Slice (x, i, n, last) b = Slice (x, j, m, last) p = Mul (a, b) c = Less (p, zero)
                f = Cast <to = 1> (c) y = ReduceMean <axes = [2], keepdims = 0> (f) }""",
            {"decay at 0.1", "pink at 0.01"},
            {"random", "tone at 0.1", "pink at 0.1"},
        ),
        # What the format loses inside counts, as of the sum of two large numbers.
        (
            """(float[1, 4] x) => (float[1, 4] y) <float large = {5000}> {
                s = Add (x, large) y = Sub (s, large) }""",
            set(),
            {"random", "spike at 1", "tone at 1"},
        ),
    ],
)
def test_samples_beside_a_pole_or_a_threshold_do_not_count(
    tmp_path: Path, text: str, dropped: set[str], kept: set[str]
) -> None:
    divergence, levels = emulated(parsed(text), tmp_path)
    left = conditioned(levels, divergence.model, divergence.reference, QNN)
    every, names = ({level.run.name for level in some} for some in (levels, left))
    assert dropped | kept <= every
    assert dropped.isdisjoint(names)
    assert kept <= names


def border(size: int, at: int) -> onnx.ModelProto:
    """A pitch and how far it is from the next note; of ``size`` pitches the one ``at`` that index is at the
    border of two notes.
    """
    octave = 12 / math.log(2)
    low = 8000 / (10 + at) / math.exp(11.499 / octave)
    return parsed(
        f"""(float[1, {size}] x) => (float[1] cents)
            <float[1] first = {{10}}, float rate = {{{8000 / low}}}, float octave = {{{octave}}}> {{
            index = ArgMax <axis = 1, keepdims = 0> (x) number = Cast <to = 1> (index)
            lag = Add (number, first) hz = Div (rate, lag) log = Log (hz) pitch = Mul (log, octave)
            note = Round (pitch) cents = Sub (pitch, note) }}"""
    )


@pytest.mark.parametrize(
    ("size", "at", "dropped", "is_inconclusive"),
    [(3, 0, 7, False), (3, 1, 9, True), (2, 1, 0, False)],
    ids=["exceptions", "many", "nearly all"],
)
def test_samples_in_which_rounding_flips_a_decision_say_nothing(
    tmp_path: Path, size: int, at: int, dropped: int, is_inconclusive: bool
) -> None:
    divergence, levels = emulated(border(size, at), tmp_path)
    model, expected = divergence.model, divergence.reference
    left, reasons = decided(levels, Decisions(model, expected, QNN))
    usual, usual_left = (sum(level.run.usual for level in some) for some in (levels, left))
    assert usual - usual_left == dropped
    assert any(level.margin < 0 for level in levels if level.run.usual)
    assert (left.margin >= 0) == bool(dropped)
    reason = f"rounding to float16 flips what it depends on in {dropped} of {usual} samples"
    assert reasons == ({"cents": reason} if is_inconclusive else {})
    (agreement,) = expected.with_inconclusive(reasons).compare(
        left[0].run, 0, left[0].run.outputs[0], QNN
    )
    assert (agreement.status is AgreementStatus.INCONCLUSIVE) == is_inconclusive


def test_floats_that_a_format_has_not_are_no_decision_that_rounding_flips(tmp_path: Path) -> None:
    made = parsed(
        """(float[1, 64] x) => (float[1, 64] y) <float turns = {1000}> {
            turn = Mul (x, turns) whole = Floor (turn) y = Sub (turn, whole) }"""
    )
    divergence, levels = emulated(made, tmp_path)
    decisions = Decisions(divergence.model, divergence.reference, QNN)
    assert levels.margin < 0
    assert decided(levels, decisions) == (levels, {})


RANK = """(uint8[1, 20] age, bool[1, 20] unread) => (int64[1, 8] rank)
    <float day = {1440}, float more = {0.35}, int64[1] kept = {8}> {
    minutes = Cast <to = 1> (age) days = Div (minutes, day) before = Neg (days) fresh = Exp (before)
    new = Cast <to = 1> (unread) plus = Mul (new, more) score = Add (fresh, plus)
    scores, rank = TopK (score, kept) }"""


def test_a_difference_because_rounding_flips_a_decision_is_none(tmp_path: Path) -> None:
    divergence, levels = emulated(parsed(RANK), tmp_path)
    model, expected = divergence.model, divergence.reference
    usual = [level for level in levels if level.run.usual]
    (flipped,) = (level.run for level in usual if level.margin < 0)
    path = save(model.rounding(model.prepared), tmp_path / "rounded.onnx")
    session = open_session(path, cpu_options())
    baselines = Baselines(levels, decisions=Decisions(model, expected, QNN))
    runs = [flipped, usual[0].run]
    assert compare_runs(session, expected, QNN, runs, Baselines(levels)).difference is not None
    compared = compare_runs(session, expected, QNN, runs, baselines)
    assert compared.difference is None
    assert not compared.unusual
    assert [difference.run.name for difference in compared.undecided] == [flipped.name]
    assert [agreement.status for agreement in compared.agreements] == [AgreementStatus.AGREES]
    # Without others that agree it is no exception.
    assert compare_runs(session, expected, QNN, [flipped], baselines).difference is not None


CATENARY = """(float[1, 1] x) => (float[1, 1] y) <float k = {4.2}> {
    [product] p = Mul (x, k) [power] y = Cosh (p) }"""


def test_few_usual_samples_that_the_format_makes_wrong_are_a_warning(tmp_path: Path) -> None:
    divergence, levels = emulated(parsed(CATENARY), tmp_path)
    model, expected = divergence.model, divergence.reference
    levels = with_rare(conditioned(levels, model, expected, QNN))
    rare = [level.run.name for level in levels if level.rare]
    assert 0 < len(rare) <= len(levels) / 8
    assert levels.margin > 0
    # What the format computes stands for the target.
    path = save(model.rounding(model.prepared), tmp_path / "rounded.onnx")
    runs = choose(levels)
    session = open_session(path, cpu_options())
    compared = compare_runs(session, expected, QNN, runs, Baselines(levels))
    assert compared.difference is None
    assert {d.run.name for d in compared.unusual if d.run.usual} <= {*rare}
    (first, *_) = (d for d in compared.unusual if d.run.usual)
    assert describe_values(first.run, []).startswith(f"inputs as in the sample {rare[0]!r}, 'x' ")


def test_a_target_that_is_more_exact_for_rare_samples_has_no_level_for_them(
    tmp_path: Path,
) -> None:
    divergence, levels = emulated(parsed(CATENARY), tmp_path)
    model, expected = divergence.model, divergence.reference
    levels = with_rare(conditioned(levels, model, expected, QNN))
    path = save(model.prepared, tmp_path / "exact.onnx")
    runs = choose(levels)
    session = open_session(path, cpu_options())
    compared = compare_runs(session, expected, QNN, runs, Baselines(levels))
    rare = {level.run.name for level in levels if level.rare}
    assert rare & {*compared.samples}
    assert not compared.unusual
    assert rare.isdisjoint(level.run.name for level in compared.levels)


def test_many_usual_samples_that_the_format_makes_wrong_are_not_rare(tmp_path: Path) -> None:
    _, levels = emulated(log_of_power(), tmp_path)
    assert levels.margin < 0
    assert with_rare(levels) == levels


def test_few_samples_near_their_limits_make_no_model_sensitive(tmp_path: Path) -> None:
    divergence, levels = emulated(parsed(CATENARY), tmp_path)
    levels = with_rare(conditioned(levels, divergence.model, divergence.reference, QNN))

    def near(are_near: Callable[[Level], bool]) -> Levels:
        """The levels, of which some are 5 dB above their limits."""
        return Levels(_with_margin(level, 5.0) if are_near(level) else level for level in levels)

    usual = [level for level in levels if level.counts]
    few, first, many = (
        near(lambda level: level is usual[1]),
        near(lambda level: level is usual[0]),
        near(lambda level: level in usual[1::2]),
    )
    assert few.margin == first.margin == many.margin == 5
    assert effect(divergence, few, few).reason is None
    for sensitive in (first, many):
        assert "leaves 25 dB" in (effect(divergence, sensitive, sensitive).reason or "")
    # The target is worse than its emulation, and may be so for the samples that it did not run.
    assert "leaves 25 dB" in (effect(divergence, levels, few).reason or "")


def _with_margin(level: Level, margin: float) -> Level:
    assert level.nearest is not None
    return replace(level, nearest=replace(level.nearest, margin=margin))


@pytest.mark.parametrize(("scale", "counts"), [(1e-3, False), (1e-6, True)])
def test_large_integers_do_not_count_where_the_format_lacks_the_result(
    tmp_path: Path, scale: float, counts: bool
) -> None:
    made = parsed(
        """(int32[1, 8] x, uint8[1, 8] n) => (float[1, 8] y) { m = Cast <to = 6> (n) d = Div (x, m)
        f = Cast <to = 1> (d) y = Mul (f, scale) }""",
        scale=np.float32(scale),
    )
    divergence, levels = emulated(made, tmp_path)
    kept = conditioned(levels, divergence.model, divergence.reference, QNN)
    large = [level.run.largest > 65504 for level in levels if level.run.far]
    assert any(large) != counts
    assert len(kept) == len(levels) - sum(large)


@pytest.mark.parametrize("suffering", ["all", "some"])
def test_what_the_target_has_shown_counts_more_than_its_emulation(
    tmp_path: Path, suffering: str
) -> None:
    _, levels = emulated(log_of_power(), tmp_path)
    assert levels.margin < 0
    runs = [run for run in choose(levels, is_optimistic=False) if not run.far]
    worst = levels.of(runs[-1])
    near = Agreement("y", 0.0, 1.0, margin=40.0)
    right = [replace(levels.of(run), nearest=near) for run in runs]
    corrected = levels.corrected(right if suffering == "all" else [*right[:-1], worst])
    assert corrected.margin == (40.0 if suffering == "all" else pytest.approx(worst.spare, abs=10))
