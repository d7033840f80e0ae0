from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from hatch_epcontext.config.settings import Model
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.errors import ModelError
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.dtypes import Array
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.advice import Subject, explain, warning
from hatch_epcontext.worker.comparison.compare import Comparison, compare_runs
from hatch_epcontext.worker.comparison.runs import (
    Facts,
    Reference,
    ReferenceRun,
    read_reference,
    sides,
    write_reference,
)
from hatch_epcontext.worker.covered import describe_values
from hatch_epcontext.worker.reference import reference
from hatch_epcontext.worker.results import AgreementStatus
from hatch_epcontext.worker.session import cpu_options, open_session
from hatch_epcontext.worker.source import fix_inputs
from tests.models import parsed, save
from tests.worker.actions.test_compile import MODEL
from tests.worker.test_states import lstm

HALF = Tolerance(20, 0.99, unit=0.1)


def referred(made: onnx.ModelProto, folder: Path, **settings: Any) -> tuple[Model, Reference]:
    path = save(made, folder / "a.onnx")
    spec = Model("a", path, MODEL, **settings)
    return spec, reference(spec, made)


def check(changed: onnx.ModelProto, expected: Reference, folder: Path) -> Comparison:
    """Compare ``changed``, run on the CPU, with the reference."""
    session = open_session(save(changed, folder / "changed.onnx"), cpu_options())
    return compare_runs(session, expected, HALF)


def table(size: int = 100, *, named: str = "ids") -> onnx.ModelProto:
    """Sums of squares of the rows of a table: what 20 indices choose."""
    return parsed(
        f"""(int64[1, 20] {named}) => (float[1, 8] y) {{
            rows = Gather (table, {named})
            y = ReduceSumSquare <axes = [1], keepdims = 0> (rows) }}""",
        table=(size, 8),
    )


def clipped(made: onnx.ModelProto, limit: float) -> onnx.ModelProto:
    """``made`` with its last result saturated, as in a float type that ends there."""
    changed = onnx.ModelProto()
    changed.CopyFrom(made)
    last = changed.graph.node[-1]
    name, last.output[0] = last.output[0], "raw"
    for bound, number in (("lo", -limit), ("hi", limit)):
        changed.graph.initializer.append(
            numpy_helper.from_array(np.array(number, np.float32), bound)
        )
    changed.graph.node.append(helper.make_node("Clip", ["raw", "lo", "hi"], [name]))
    return changed


def test_a_disagreement_on_large_floats_that_nothing_bounds_is_a_warning(tmp_path: Path) -> None:
    made = parsed("(float[1, 300] x) => (float[1, 300] y) <float k = {10000}> { y = Mul (x, k) }")
    _, expected = referred(made, tmp_path)
    session = open_session(save(clipped(made, 65504), tmp_path / "changed.onnx"), cpu_options())
    runs = [each for each in expected.runs if each.name in ("random", "random at 8")]
    found = compare_runs(session, expected, HALF, runs)
    assert found.agreements[0].status is AgreementStatus.AGREES
    (difference,) = found.unusual
    text = warning(difference, describe_values(difference.run, found.agreed))
    assert text.startswith("inputs as in the sample 'random at 8', 'x' from -")
    assert "may give wrong answers: of 'y', signal to noise " in text


def test_integers_that_nothing_bounds_are_bytes(tmp_path: Path) -> None:
    made = parsed("""(int64[1, 600] ids) => (float[1, 600] y) <float k = {2}> {
            f = Cast <to = 1> (ids)
            y = Mul (f, k) }""")
    _, expected = referred(made, tmp_path)
    fed = expected.feeds["ids"]
    assert (fed.min(), fed.max()) == (0, 255)


def test_states_are_fed_back(tmp_path: Path) -> None:
    made = lstm()
    spec, expected = referred(made, tmp_path)
    sequence = expected.runs[2]
    assert (len(sequence.frames), sequence.on_target) == (8, True)
    assert not sequence.frames[0]["h0"].any()
    assert set(sequence.frames[1]) == {"x"}
    check_second_frame(spec, sequence)


def check_second_frame(spec: Model, sequence: ReferenceRun) -> None:
    """It has the states that the first one gives."""
    session = open_session(Path(spec.path), cpu_options())
    states = {"h0": sequence.outputs[0]["h1"], "c0": sequence.outputs[0]["c1"]}
    second = session.run(["h1"], {**sequence.frames[1], **states})[0]
    assert np.array_equal(second, sequence.outputs[1]["h1"])


def save_frames(folder: Path, *names: str) -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir()
    for name in names:
        shapes = {"x": (2, 1, 3), "h0": (1, 1, 4), "c0": (1, 1, 4)}
        arrays = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
        np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    return folder


def test_given_samples_are_all_run_and_eight_of_them_on_the_target(tmp_path: Path) -> None:
    made = parsed("(float[1, 3] x) => (float[1, 3] y) { y = Relu (x) }")
    (tmp_path / "samples").mkdir()
    for index in range(10):
        np.savez(tmp_path / "samples" / f"{index}.npz", x=np.full((1, 3), index, np.float32))
    given = ValidateTable(inputs=str(tmp_path / "samples"))
    _, expected = referred(made, tmp_path, validate=given)
    assert [run.name for run in expected.runs] == [str(index) for index in range(10)]
    assert [run.on_target for run in expected.runs] == [True] * 8 + [False] * 2
    difference = check(clipped(made, 6.0), expected, tmp_path).difference
    assert difference is not None
    assert difference.run.name == "7"


def test_given_frames_are_run_with_the_states_of_the_model(tmp_path: Path) -> None:
    made = lstm()
    given = save_frames(tmp_path / "samples", "a-1", "a-2", "a-3", "b-1", "b-2")
    spec, expected = referred(made, tmp_path, validate=ValidateTable(inputs=str(given)))
    on_target = [(run.name, len(run.frames)) for run in expected.runs if run.on_target]
    assert on_target == [("a-1", 1), ("3 frames from 'a-1'", 3), ("2 frames from 'b-1'", 2)]
    sequence = expected.runs[-1]
    assert sequence.frames[0]["h0"].any()
    check_second_frame(spec, sequence)


def test_a_given_sample_that_the_model_refuses_is_an_error(tmp_path: Path) -> None:
    made = table(4)
    (tmp_path / "samples").mkdir()
    for name, index in (("a", 1), ("b", 9)):
        ids = np.full((1, 20), index, np.int64)
        np.savez(tmp_path / "samples" / f"{name}.npz", ids=ids)
    given = ValidateTable(inputs=str(tmp_path / "samples"))
    with pytest.raises(ModelError, match="out of"):
        referred(made, tmp_path, validate=given)


def test_errors_that_grow_from_frame_to_frame_are_found(tmp_path: Path) -> None:
    def counter(rate: float) -> onnx.ModelProto:
        return parsed(
            """(float[1, 40] x, float[1, 40] state) => (float[1, 40] next) {
            kept = Mul (state, rate)
            next = Add (kept, x) }""",
            rate=np.float32(rate),
        )

    spec, expected = referred(
        counter(2.0), tmp_path, validate=ValidateTable(states={"state": "next"})
    )
    difference = check(counter(2.1), expected, tmp_path).difference
    assert difference is not None
    (item,) = explain(difference, HALF, Subject(spec), expected.facts)
    assert re.search(r"in frame \d+ of .*, with its own states", item.agreement.reason or "")
    spec, expected = referred(counter(2.0), tmp_path)
    assert not any(len(run.frames) > 1 for run in expected.runs)
    assert check(counter(2.1), expected, tmp_path).difference is None


def test_what_depends_on_chance_is_not_compared(tmp_path: Path) -> None:
    made = parsed("""(float[1, 10] x) => (float[1, 10] y, float[1, 10] z) {
            noise = RandomNormalLike (x)
            y = Add (x, noise)
            z = Relu (x) }""")
    _, expected = referred(made, tmp_path)
    assert expected.facts.of("y").is_random
    statuses = {a.output: a.status for a in check(made, expected, tmp_path).agreements}
    assert statuses == {"y": AgreementStatus.RANDOM, "z": AgreementStatus.AGREES}


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ("y = Add (x, zero)", None),
        ("n = Mul (x, zero) y = Div (n, zero)", "the CPU's values are NaN or Inf everywhere"),
        ("n = Mul (x, zero) y = Cos (n)", "the CPU's value is 1.0 everywhere, for all inputs"),
    ],
)
def test_a_reference_that_proves_nothing_is_inconclusive(
    tmp_path: Path, nodes: str, reason: str | None
) -> None:
    made = parsed(f"(float[1, 10] x) => (float[1, 10] y) <float zero = {{0}}> {{ {nodes} }}")
    _, expected = referred(made, tmp_path)
    assert expected.facts.of("y").inconclusive == (reason or "")
    (agreement,) = check(made, expected, tmp_path).agreements
    assert agreement.reason == reason
    wanted = AgreementStatus.AGREES if reason is None else AgreementStatus.INCONCLUSIVE
    assert agreement.status is wanted


def test_a_sample_in_which_an_output_has_several_values_is_run_on_the_target(
    tmp_path: Path,
) -> None:
    text = "(float[1, 10] x) => (bool[1, 10] y) { y = Greater (x, limit) }"
    made = parsed(text, limit=np.linspace(4, 5, 10, dtype=np.float32))
    _, expected = referred(made, tmp_path)
    assert not any(output.inconclusive for output in expected.facts.outputs.values())
    chosen = [each.name for each in expected.runs if each.on_target]
    assert chosen[0] == "random"
    assert len(chosen) == 5
    wrong = parsed(text, limit=np.full(10, 100, np.float32))
    assert check(wrong, expected, tmp_path).unusual


def test_the_first_sample_is_one_in_which_scores_say_something(tmp_path: Path) -> None:
    made = parsed("""(float[1, 512] x) => (float[1, 1] y) <float limit = {0.9}, float scale = {100}> {
            size = Abs (x)
            mean = ReduceMean <axes = [1], keepdims = 1> (size)
            above = Sub (mean, limit)
            scaled = Mul (above, scale)
            y = Sigmoid (scaled) }""")
    _, expected = referred(made, tmp_path)
    assert expected.runs[0].name != "random"
    assert expected.runs[0].on_target
    assert expected.runs[0].outputs[0]["y"].item() > 0.05
    assert len(expected.runs) == len({each.name for each in expected.runs})


def test_a_text_has_no_score_and_a_shape_needs_no_input(tmp_path: Path) -> None:
    made = parsed("""(float[1, 4] x) => (string[1, 4] y, int64[2] length) {
            score = Sigmoid (x)
            y = Cast <to = 8> (score)
            length = Shape (x) }""")
    _, expected = referred(made, tmp_path)
    assert expected.runs[0].name == "random"
    assert not any(output.inconclusive for output in expected.facts.outputs.values())


@pytest.mark.parametrize("name", ["long", "with/slashes", "../up"])
def test_a_reference_is_kept_in_a_file(tmp_path: Path, name: str) -> None:
    made = lstm()
    # Names in an archive have at most 65535 bytes.
    made.graph.node[-1].output[0] = made.graph.output[0].name = name * 20_000
    _, expected = referred(made, tmp_path)
    path = write_reference(expected, tmp_path / "reference.bin")
    found = read_reference(path)
    assert found.facts == expected.facts
    for one, other in zip(found.runs, expected.runs, strict=True):
        assert (one.name, one.usual, one.on_target) == (other.name, other.usual, other.on_target)
        for a, b in zip((*one.frames, *one.outputs), (*other.frames, *other.outputs), strict=True):
            assert a.keys() == b.keys()
            assert all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "array",
    [
        np.array([["é", ""], ["a", "b"]], object),
        np.array([1, -2], ml_dtypes.bfloat16),
        np.array([0.5, -4], ml_dtypes.float8_e5m2),
        np.array([7, -8, -1], ml_dtypes.int4),
        np.array(True),
    ],
    ids=lambda array: str(array.dtype),
)
def test_a_file_keeps_the_values_of_every_type(tmp_path: Path, array: Array) -> None:
    numbers = np.array([1, 2], np.float32)
    tensors = {"before": numbers, "x": array, "after": numbers}
    run = ReferenceRun("a", (tensors,), outputs=(tensors,), on_target=True)
    written = write_reference(Reference((run,), Facts()), tmp_path / "reference.bin")
    found = read_reference(written).runs[0].outputs[0]
    assert {name: (each.dtype, each.tolist()) for name, each in found.items()} == {
        name: (each.dtype, each.tolist()) for name, each in tensors.items()
    }


X_TO_Y = {"inputs": {"x": 0}, "outputs": {"y": 0}}

ROWS = "(float[N, 4, 8] x) => (float[N, 4, 8] y)"


def masked(hides: str) -> onnx.ModelProto:
    """What is chosen of a table's rows by scores of which some are hidden."""
    return parsed(
        f"""(int64[1, 6] ids, float[6] x) => (float[8] y)
        <int64 none = {{0}}, float far = {{-1e9}}> {{
            h = Equal (ids, none) {hides} y = MatMul (p, rows) }}""",
        rows=(6, 8),
    )


@pytest.mark.parametrize(
    "hides",
    [
        "f = Cast <to = 1> (h) m = Mul (f, far) s = Add (x, m) p = Softmax (s)",
        "s = Where (h, far, x) p = Softmax (s)",
        "f = Cast <to = 1> (h) m = Mul (f, far) s = Add (x, m) p = ReduceMax <keepdims = 0, axes = [0]> (s)",
    ],
)
def test_no_sample_hides_all_scores(hides: str, tmp_path: Path) -> None:
    _, expected = referred(masked(hides), tmp_path)
    hidden = [(run.feeds["ids"] == 0) for run in expected.runs]
    assert any(ids.any() for ids in hidden)
    assert not any(ids.all() for ids in hidden)
    assert not any(run.candidates for run in expected.runs)


def test_largest_integers_are_scores_too(tmp_path: Path) -> None:
    made = parsed(
        """(int64[1, 6] ids) => (int64[1, 1] y) <int64 far = {-1000000}, int64 none = {0}> {
            h = Equal (ids, none) s = Where (h, far, ids) y = ReduceMax <axes = [1]> (s) }"""
    )
    _, expected = referred(made, tmp_path)
    assert not any((run.feeds["ids"] == 0).all() for run in expected.runs)


def test_samples_count_that_all_hide_their_scores(tmp_path: Path) -> None:
    _, expected = referred(masked("s = Where (h, far, far) p = Softmax (s)"), tmp_path)
    assert len(expected.runs) > 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ROWS} {{ y = MatMul (x, w) }}", X_TO_Y),
        # Each sample is a column.
        (
            (
                "(float[8, N] x, int64[1, N] i) => (float[1, 8, N] y, int64[N] z) "
                "{ t = MatMul (w, x) zero = Constant <value = int64[1] {0}> () y = Unsqueeze (t, zero) "
                "z = Squeeze (i, zero) }"
            ),
            {"inputs": {"x": 1, "i": 1}, "outputs": {"y": 2, "z": 0}},
        ),
        # The second of two symbols: the axis of time is mixed.
        (
            "(float[T, N, 8] x) => (float[T, N, 8] y) { y = Softmax <axis = 0> (x) }",
            {"inputs": {"x": 1}, "outputs": {"y": 1}},
        ),
        # As converters from TensorFlow write it: each tensor has an own symbol, or none.
        (
            (
                "(float[unk1, 8] x, float[unk2, 8] h) => (float[?, 16] y) "
                "{ y = Concat <axis = 1> (x, h) }"
            ),
            {"inputs": {"x": 0, "h": 0}, "outputs": {"y": 0}},
        ),
        # A state is an input too.
        (
            (
                "(float[N, 8] x, float[N, 8] h) => (float[N, 8] y, float[N, 8] h_out) "
                "{ y = Add (x, h) h_out = Tanh (y) }"
            ),
            {"inputs": {"x": 0, "h": 0}, "outputs": {"y": 0, "h_out": 0}},
        ),
        (f"{ROWS} {{ y = Softmax <axis = 0> (x) }}", {}),
        (f"{ROWS} {{ m = ReduceMean <axes = [0]> (x) y = Sub (x, m) }}", {}),
        (f"{ROWS} {{ y, m, v = BatchNormalization <training_mode = 1> (x, s, b, m0, v0) }}", {}),
        (
            f"{ROWS} {{ k = Shape <start = 0, end = 1> (x) y, i = TopK <axis = 0> (x, k) }}",
            {},
        ),
        (
            (
                "(float[N, 8] x) => (float[N, 8] y) { t = Transpose (x) a = MatMul (x, t) "
                "p = Softmax (a) y = MatMul (p, x) }"
            ),
            {},
        ),
        # Rows of the first sample reach the second.
        (f"{ROWS} {{ zero = Constant <value = int64 {{0}}> () y = CumSum (x, zero) }}", {}),
        # It depends only on the size.
        (
            f"{ROWS} {{ n = Shape <start = 0, end = 1> (x) f = Cast <to = 1> (n) y = Div (x, f) }}",
            {},
        ),
        # Other batches fail.
        (
            (
                "(float[N, 8] x) => (float[N, 2, 4] y) { sizes = Constant <value = int64[3] {2, 2, 4}> () "
                "y = Reshape (x, sizes) }"
            ),
            {},
        ),
        ("(float[N, 8] x, float[8] c) => (float[N, 8] y) { y = Add (x, c) }", {}),
        ("(float[N, 8] x) => (float[1, 8] y) { y = ReduceMax <axes = [0]> (x) }", {}),
        ("(float[N, N] x) => (float[N, N] y) { y = Relu (x) }", {}),
        ("(float[1, 8] x) => (float[1, 8] y) { y = Relu (x) }", {}),
        # Every sample has the same outputs, which shows nothing.
        (
            (
                "(float[N, 8] x) => (float[N, 8] y) { l = Constant <value = float {0}> () a = Abs (x) "
                "n = Neg (a) y = Max (n, l) }"
            ),
            {},
        ),
        # It is random.
        (f"{ROWS} {{ r = RandomNormalLike (x) y = Add (x, r) }}", {}),
    ],
)
def test_a_batch_is_an_axis_whose_rows_do_not_mix(
    tmp_path: Path, text: str, expected: dict[str, dict[str, int]]
) -> None:
    stored: dict[str, Any] = {
        "w": (8, 8),
        "s": (4,),
        "b": (4,),
        "m0": np.zeros(4, "f"),
        "v0": np.ones(4, "f"),
    }
    used = {name: value for name, value in stored.items() if re.search(rf"\b{name}\b", text)}
    assert batch_of(parsed(text, **used), tmp_path) == expected


def batch_of(source: onnx.ModelProto, folder: Path, **validate: Any) -> Any:
    """The batch of a model that is compiled for sizes of 2."""
    path = save(source, folder / "a.onnx")
    symbols = {
        size
        for value in source.graph.input
        for size in graph.facts(value).sizes
        if isinstance(size, str)
    }
    model = Model(
        "a", path, MODEL, dims=dict.fromkeys(symbols, 2), validate=ValidateTable(**validate)
    )
    fix_inputs(source, model)
    return reference(model, source).facts.batch


@pytest.mark.parametrize(("value", "expected"), [(None, X_TO_Y), (0.0, {})])
def test_one_given_sample_is_reversed_for_the_batch(
    tmp_path: Path, value: float | None, expected: dict[str, dict[str, int]]
) -> None:
    given = np.arange(64, dtype=np.float32) if value is None else np.full(64, value, np.float32)
    np.savez(tmp_path / "given.npz", x=given.reshape(2, 4, 8))
    source = parsed(f"{ROWS} {{ y = MatMul (x, w) }}", w=(8, 8))
    assert batch_of(source, tmp_path, inputs=str(tmp_path / "given.npz")) == expected


BRANCHES = """<then_branch = a () => (float[4] p) { p = Abs (x) },
    else_branch = b () => (float[4] q) { q = Neg (x) }>"""


def test_a_loop_is_run_and_is_skipped(tmp_path: Path) -> None:
    made = parsed(
        """(float[4] x, int64 n, bool c) => (float[4] y) {
        y = Loop (n, c, x) <body = b (int64 i, bool g, float[4] v) => (bool h, float[4] w)
            { h = Identity (g) w = Neg (v) }> }"""
    )
    made.graph.node[-1].name = "n"
    _, expected = referred(made, tmp_path)
    on_target = [run for run in expected.runs if run.on_target]
    taken = {side for run in on_target for side in sides(run, expected.facts.deciders)}
    assert taken == {(name, side) for name in ("n", "c") for side in (True, False)}
    assert expected.facts.of("y").inconclusive == ""


@pytest.mark.parametrize(
    ("nodes", "untaken"),
    [
        ("g = Identity (c)", ""),
        ("s = ReduceSum <keepdims = 0> (x) g = Less (s, one)", ""),
        ("s = ReduceSum <keepdims = 0> (x) g = Less (s, much)", "else"),
        ("s = ReduceMax <keepdims = 0> (x) g = Greater (s, much)", "then"),
    ],
)
def test_a_branch_that_no_sample_takes_is_named(nodes: str, untaken: str, tmp_path: Path) -> None:
    made = parsed(
        "(float[4] x, bool c) => (float[4] y) <float one = {1}, float much = {3000000000}> {"
        f"{nodes} y = If (g) {BRANCHES} }}"
    )
    made.graph.node[-1].name = "n"
    _, expected = referred(made, tmp_path)
    reason = f"no sample takes the branch {untaken!r} of the If 'n'" if untaken else ""
    assert expected.facts.of("y").inconclusive == reason
    on_target = [run for run in expected.runs if run.on_target]
    assert len({side for run in on_target for side in sides(run, expected.facts.deciders)}) == (
        1 if untaken else 2
    )
