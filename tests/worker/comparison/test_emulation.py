from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from hatch_epcontext.config.settings import Model
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.graph.number_format import FLOAT16, Fault, NumberFormat
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.comparison.compare import compare_runs
from hatch_epcontext.worker.comparison.emulation import Emulator
from hatch_epcontext.worker.comparison.reference import reference
from hatch_epcontext.worker.results import FEW_SAMPLES, differences
from hatch_epcontext.worker.session import cpu_options, open_session
from tests.models import parsed, save
from tests.worker.actions.test_compile import MODEL
from tests.worker.comparison.test_states import lstm

QNN = Tolerance(20, 0.99, unit=0.1)
POWER = Fault("Pow", "is -4 for -0.0", low=-3e-8, high=3e-8, gives=-4.0, exponent=2.0)
TABLE = Fault("Sigmoid", "is coarse behind Gemm", low=-1e5, high=1e5, behind=frozenset({"Gemm"}))


def emulator(
    made: onnx.ModelProto, folder: Path, format_: NumberFormat = FLOAT16, **settings: Any
) -> Emulator:
    path = save(made, folder / "a.onnx")
    spec = Model("a", path, MODEL, **settings)
    return Emulator(spec, onnx.load(path), path, format_, frozenset(), reference(spec, made), QNN)


def layers(size: int = 32) -> onnx.ModelProto:
    return parsed(
        f"""(float[4, {size}] x) => (float[4, 8] y) {{
            hidden = MatMul (x, w)
            positive = Relu (hidden)
            y = MatMul (positive, v) }}""",
        w=(size, 64),
        v=(64, 8),
    )


def log_of_power() -> onnx.ModelProto:
    return parsed("""(float[1, 400] x) => (float[1, 400] y) <float floor = {1e-10}> {
            [square] power = Mul (x, x)
            [floor] positive = Add (power, floor)
            [log] y = Log (positive) }""")


def test_a_model_that_float16_computes_well_is_not_sensitive(tmp_path: Path) -> None:
    found = emulator(layers(), tmp_path)
    result = found.result()
    assert result.reason is None
    assert result.samples == len(found.levels) > 60
    assert result.snr is not None
    assert result.snr > 45
    assert [each.name for each in found.to_run()] == ["random"]


def test_a_node_that_saturates_is_named_with_its_value(tmp_path: Path) -> None:
    made = parsed("""(float[8, 512] x) => (float[8, 1] y) <float k = {9000}, int64[1] axes = {1}> {
            [scale] large = Mul (x, k)
            [total] sum = ReduceSum (large, axes)
            [back] y = Div (sum, k) }""")
    found = emulator(made, tmp_path)
    result = found.result()
    assert result.reason is not None
    assert "ReduceSum total reaches " in result.reason
    assert "float16 ends at 65,504" in result.reason
    ran = found.to_run()
    assert ran[0].name == "random"
    assert len({each.nature for each in ran}) == 4


def test_a_constant_that_float16_lacks_is_named_where_it_counts(tmp_path: Path) -> None:
    result = emulator(log_of_power(), tmp_path).result()
    assert result.reason is not None
    assert "Add floor uses 1e-10, which float16 does not have" in result.reason


def test_a_mask_may_be_cut_off(tmp_path: Path) -> None:
    made = parsed(
        """(float[4, 16] x) => (float[4, 8] y) {
            scores = MatMul (x, w)
            masked = Add (scores, mask)
            y = Softmax <axis = -1> (masked) }""",
        w=(16, 8),
        mask=np.array([0] * 4 + [-1e9] * 4, np.float32),
    )
    assert emulator(made, tmp_path).result().reason is None


def test_the_fault_of_an_operator_is_named(tmp_path: Path) -> None:
    made = parsed("""(float[1, 100] x) => (float[1, 100] y) <float two = {2}> {
            [square] square = Pow (x, two)
            [root] y = Sqrt (square) }""")
    reason = emulator(made, tmp_path, replace(FLOAT16, faults=(POWER,))).result().reason
    assert reason is not None
    assert "Pow square is -4 for -0.0" in reason
    assert "is -4" not in (emulator(made, tmp_path).result().reason or "")


def test_what_no_emulation_shows_is_run_on_the_target(tmp_path: Path) -> None:
    made = parsed(
        """(float[1, 16] x) => (float[1, 8] y) {
            hidden = Gemm (x, w, b)
            [gate] y = Sigmoid (hidden) }""",
        w=(16, 8),
        b=(8,),
    )
    exact = emulator(made, tmp_path)
    assert len(exact.to_run()) == 1
    coarse = emulator(made, tmp_path, replace(FLOAT16, faults=(TABLE,)))
    assert len(coarse.to_run()) == 4
    wrong = coarse.explanation(coarse.levels[0].run, -5.0)
    assert "Sigmoid gate, which is coarse behind Gemm" in wrong


def test_the_target_runs_one_sample_of_a_large_model(tmp_path: Path) -> None:
    found = emulator(log_of_power(), tmp_path)
    found.levels = found.levels[:FEW_SAMPLES]
    (run,) = found.to_run()
    assert found.level(run).margin == min(each.margin for each in found.levels if each.run.usual)
    well = emulator(layers(), tmp_path)
    well.levels = well.levels[:FEW_SAMPLES]
    assert [each.name for each in well.to_run()] == ["random"]


def test_states_are_fed_back_in_the_format(tmp_path: Path) -> None:
    made = parsed("""(float[1, 40] x, float[1, 40] state) => (float[1, 40] next) <float rate = {100}> {
            [keep] kept = Mul (state, rate)
            [add] next = Add (kept, x) }""")
    table = ValidateTable(states={"state": "next"})
    # After eight steps the state is 1e14 times the input.
    assert emulator(made, tmp_path).result().snr is not None
    reason = emulator(made, tmp_path, validate=table).result().reason
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


def test_a_mean_of_many_steps_is_emulated_until_it_is_wrong(tmp_path: Path) -> None:
    found = emulator(mean(0.999), tmp_path)
    assert min(each.margin for each in found.levels) > 25
    result = found.result()
    assert result.worst == "step 1,024"
    assert result.reason is not None
    assert "in step 1,024" in result.reason
    assert result.snr is not None
    assert result.snr < 20
    # A simulator takes too long for that.
    assert max(len(each.feeds) for each in found.to_run()) == 16


def test_given_inputs_of_a_long_mean_are_emulated_again_and_again(tmp_path: Path) -> None:
    arrays = {"x": np.full((1, 16), 3.3, np.float32), "mean": np.zeros((1, 16), np.float32)}
    np.savez(tmp_path / "given.npz", **arrays)  # type: ignore[arg-type]
    table = ValidateTable(inputs=str(tmp_path / "given.npz"))
    result = emulator(mean(0.999), tmp_path, validate=table).result()
    assert result.reason is not None
    assert "in step " in result.reason


def test_a_counter_is_emulated_until_float16_has_no_next_number(tmp_path: Path) -> None:
    made = parsed("""(float[1, 8] x, float[1, 1] step) =>
        (float[1, 8] y, float[1, 1] next_step) <float one = {1}> {
            next_step = Add (step, one)
            y = Add (next_step, x) }""")
    result = emulator(made, tmp_path).result()
    assert result.worst == "step 4,096"
    assert result.snr == pytest.approx(6, abs=0.1)


def test_what_counts_the_places_of_a_table_runs_until_it_ends(tmp_path: Path) -> None:
    made = parsed(
        """(float[1, 8] x, int64[1] step) =>
        (float[1, 8] y, int64[1] next_step) <int64[1] one = {1}> {
            next_step = Add (step, one)
            row = Gather (table, step)
            y = Add (row, x) }""",
        table=(100, 8),
    )
    found = emulator(made, tmp_path)
    assert found.result().samples == len(found.levels) + 1
    assert found.result().reason is None


def test_states_that_are_forgotten_are_run_no_longer(tmp_path: Path) -> None:
    for made in (mean(0.9), lstm()):
        path = save(made, tmp_path / "forgets.onnx")
        facts = reference(Model("a", path, MODEL), made).facts
        assert facts.states
        assert facts.long_steps == 0


def test_a_disagreement_where_the_emulation_is_equal_can_be_sent(tmp_path: Path) -> None:
    made, broken = (
        parsed(f"(float16[9] x) => (float16[9] y) {{ y = {op} (x) }}") for op in ("Abs", "Neg")
    )
    path = save(made, tmp_path / "a.onnx")
    session = open_session(save(broken, tmp_path / "broken.onnx"), cpu_options())
    spec = Model("a", path, MODEL)
    expected = reference(spec, made)
    found = Emulator(spec, onnx.load(path), path, FLOAT16, frozenset(), expected, QNN)
    result = compare_runs(session, expected, QNN, spec, "the model", "the CPU's", emulator=found)
    assert result.gap is None
    (problem,) = differences(result.agreements)
    assert "changes nothing for the sample 'random', so the EP computes" in problem.message


def test_a_disagreement_names_the_first_diverging_node(tmp_path: Path) -> None:
    made = log_of_power()
    emulator(made, tmp_path)
    spec = Model("a", tmp_path / "a.onnx", MODEL)
    broken = onnx.ModelProto()
    broken.CopyFrom(made)
    broken.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.float32(1), "floor"))
    session = open_session(save(broken, tmp_path / "broken.onnx"), cpu_options())
    expected = reference(spec, made)
    found = Emulator(spec, made, tmp_path / "a.onnx", FLOAT16, frozenset(), expected, QNN)
    result = compare_runs(
        session,
        expected,
        QNN,
        spec,
        "the model",
        "the CPU's",
        runs=[each.run for each in found.levels if each.margin < 0 and each.run.usual],
        emulator=found,
    )
    (problem,) = differences(result.agreements)
    assert "The first diverging node: Add floor uses 1e-10" in problem.message


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
    found = emulator(detector(), tmp_path)
    assert found.worst.output in ("boxes", "scores")
    assert found.margin > 25


def test_integers_are_left_alone(tmp_path: Path) -> None:
    made = parsed(
        "(int64[1, 20] ids) => (float[20, 8] y) { y = Gather (table, ids) }", table=(100, 8)
    )
    found = emulator(made, tmp_path)
    assert found.result().reason is None
    assert found.levels[0].margin > 20


@pytest.mark.parametrize(("layers", "is_worth_it"), [(1, False), (5, True)])
def test_a_cut_behind_the_first_diverging_node_is_proposed(
    tmp_path: Path, layers: int, is_worth_it: bool
) -> None:
    names = ["level", *(f"h{index}" for index in range(1, layers)), "y"]
    products = " ".join(
        f"[{after}] {after} = MatMul ({before}, w)" for before, after in pairwise(names)
    )
    made = parsed(
        f"""(float[1, 64] x) => (float[1, 64] y) <float floor = {{1e-10}}> {{
            [square] power = Mul (x, x)
            [floor] positive = Add (power, floor)
            [log] level = Log (positive)
            {products} }}""",
        w=(64, 64),
    )
    found = emulator(made, tmp_path)
    run = min((each for each in found.levels if each.run.usual), key=lambda each: each.margin).run
    text = found.explanation(run, found.level(run).margin)
    assert "Add floor uses 1e-10" in text
    assert ('(cut = { inputs = ["level"] })' in text) == is_worth_it


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
def test_an_output_that_changes_by_less_than_a_step_is_sensitive(
    tmp_path: Path, offsets: list[float], is_flat: bool
) -> None:
    made = parsed(
        """(float[1, 16] x) => (float[1, 16] y) <float scale = {0.1}> {
            t = Tanh (x)
            small = Mul (t, scale)
            y = Add (small, offset) }""",
        offset=np.array(offsets, np.float32),
    )
    result = emulator(made, tmp_path).result()
    assert result.snr is not None
    assert result.snr > 50
    assert (result.reason is not None) == is_flat
    assert result.reason is None or "1000" in result.reason


@pytest.mark.parametrize("suffering", ["all", "some"])
def test_what_the_target_has_shown_counts_more_than_its_emulation(
    tmp_path: Path, suffering: str
) -> None:
    found = emulator(log_of_power(), tmp_path)
    assert found.margin < 0
    runs = found.to_run()
    worst = found.level(runs[-1])
    right = [replace(found.level(run), margin=40.0, snr=60.0) for run in runs]
    found.correct(right if suffering == "all" else [*right[:-1], worst])
    assert found.margin == (40.0 if suffering == "all" else pytest.approx(worst.spare, abs=10))


@pytest.mark.parametrize("opset", [7, 8])
def test_faults_are_emulated_in_older_opsets(tmp_path: Path, opset: int) -> None:
    text = "(float[1, 16] x, float two) => (float[1, 16] y) <float two = {2}> { y = Pow (x, two) }"
    made = parsed(text, opset, ir_version=3)
    found = emulator(made, tmp_path, replace(FLOAT16, faults=(POWER,)))
    assert found.worst.snr < 20
