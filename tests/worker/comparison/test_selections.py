from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.errors import Key
from hatch_epcontext.graph.arrays import Array, Arrays
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.comparison.compare import compare_outputs
from hatch_epcontext.worker.comparison.measures import Numbers, compare
from hatch_epcontext.worker.comparison.reference import reference
from hatch_epcontext.worker.comparison.runs import Reference, read_reference, write_reference
from hatch_epcontext.worker.comparison.selections import (
    Columns,
    IndexOutput,
    Selection,
    Selections,
    select,
    selections,
)
from hatch_epcontext.worker.comparison.suppression import expose_reads
from hatch_epcontext.worker.results import Agreement, differences
from hatch_epcontext.worker.session import cpu_options, open_session
from hatch_epcontext.worker.tensors import run
from tests.models import parsed, save, value

HALF = Tolerance(20, 0.99, unit=0.1)
CANDIDATES, CLASSES, KEPT = 400, 3, 50
RNG = np.random.default_rng(1)
BOXES = RNG.uniform(0, 640, (1, CANDIDATES, 4)).astype(np.float32)
LOGITS = (RNG.standard_normal((1, CANDIDATES, CLASSES)) * 2 - 3).astype(np.float32)

Form = Literal["one output", "several outputs", "two stages", "one class", "by number"]
FORMS: tuple[Form, ...] = ("one output", "several outputs", "two stages", "one class", "by number")


FIRST_STAGE = """
    best = ReduceMax <axes = [2], keepdims = 0> (all)
    unused, first = TopK <axis = 1> (best, kept)
    first_column = Unsqueeze (first, last)
    first_rows = Tile (first_column, by_classes)
    first_boxes = Tile (first_column, by_4)
    some = GatherElements <axis = 1> (all, first_rows)
    some_boxes = GatherElements <axis = 1> (boxes, first_boxes)"""
ONE_CLASS = """
    best = ReduceMax <axes = [2], keepdims = 0> (all)
    scores, row = TopK <axis = 1> (best, kept)
    which = ArgMax <axis = 2, keepdims = 0> (all)
    classes = GatherElements <axis = 1> (which, row)"""
ALL_CLASSES = """
    flat = Flatten ({})
    scores, number = TopK <axis = 1> (flat, kept)
    classes = Mod (number, count)
    row = Div (number, count)"""
BY_NUMBER = """
    gathered = Gather <axis = 1> (boxes, row)
    chosen = Squeeze (gathered, first_axis)"""
BY_ELEMENTS = """
    column = Unsqueeze (row, last)
    tiled = Tile (column, by_4)
    chosen = GatherElements <axis = 1> ({}, tiled)"""
JOINED = """
    score_column = Unsqueeze (scores, last)
    class_column = Unsqueeze (classes, last)
    class_floats = Cast <to = 1> (class_column)
    y = Concat <axis = -1> (chosen, score_column, class_floats)"""


def head(form: Form) -> onnx.ModelProto:
    """``boxes`` (1 x 400 x 4) and ``logits`` (1 x 400 x 3) -> the 50 rows with the largest scores."""
    scores, boxes = ("some", "some_boxes") if form == "two stages" else ("all", "boxes")
    nodes = "all = Sigmoid (logits)" + FIRST_STAGE * (form == "two stages")
    nodes += ONE_CLASS if form == "one class" else ALL_CLASSES.format(scores)
    nodes += BY_NUMBER if form == "by number" else BY_ELEMENTS.format(boxes)
    outputs = "float[1, 50, 6] y"
    if form == "several outputs":
        outputs = "float[1, 50, 4] chosen, float[1, 50] scores, int64[1, 50] classes"
    else:
        nodes += JOINED
    return parsed(
        f"(float[1, 400, 4] boxes, float[1, 400, 3] logits) => ({outputs}) {{ {nodes} }}",
        kept=[KEPT],
        count=[CLASSES],
        last=[2],
        first_axis=[0],
        by_4=[1, 1, 4],
        by_classes=[1, 1, CLASSES],
    )


class Compared:
    """A model on the CPU with given inputs, and whether other outputs agree with its own."""

    def __init__(self, folder: Path, made: onnx.ModelProto, **inputs: Array) -> None:
        path = save(made, folder / "a.onnx")
        np.savez(folder / "inputs.npz", **inputs)  # type: ignore[arg-type]
        table = ValidateTable(inputs=str(folder / "inputs.npz"))
        self.model = Model("a", path, Key(("models", 0)), validate=table)
        # As workers get it.
        written = write_reference(reference(self.model, onnx.load(path)), folder / "reference")
        self.expected: Reference = read_reference(written)
        ((self.wanted, self.candidates),) = self.expected.runs[0].steps

    def compare(self, outputs: Arrays, limits: Tolerance = HALF) -> Sequence[Agreement]:
        wanted, candidates = self.wanted, self.candidates
        return compare_outputs(
            outputs, wanted, limits, self.model, "the CPU's", self.expected, candidates=candidates
        )


class Head(Compared):
    """A head, whose outputs are changed as tables of 50 x (box, score, class)."""

    def __init__(self, folder: Path, form: Form, logits: Array = LOGITS) -> None:
        self.form = form
        super().__init__(folder, head(form), boxes=BOXES, logits=logits)

    @property
    def table(self) -> Numbers:
        if "y" in self.wanted:
            return np.array(self.wanted["y"][0], np.float64)
        columns = (self.wanted["scores"][0, :, None], self.wanted["classes"][0, :, None])
        return np.concatenate([self.wanted["chosen"][0], *columns], axis=1, dtype=np.float64)

    def agrees(self, table: Numbers, limits: Tolerance = HALF) -> bool:
        outputs: Arrays = {
            "y": table[None].astype(np.float32),
            "chosen": table[None, :, :4].astype(np.float32),
            "scores": table[None, :, 4].astype(np.float32),
            "classes": table[None, :, 5].astype(np.int64),
        }
        own = {name: array for name, array in outputs.items() if name in self.wanted}
        return not differences(self.compare(own, limits))


@pytest.fixture(scope="module", params=FORMS)
def detector(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Head:
    return Head(tmp_path_factory.mktemp("head"), request.param)


def near_and_far(table: Numbers) -> tuple[int, int]:
    """Two rows whose scores differ by less than a hundredth, and by much more from the first one's."""
    near = int(np.argmin(np.abs(np.diff(table[:, 4]))))
    assert abs(table[near, 4] - table[near + 1, 4]) < 0.005
    assert table[0, 4] - table[-1, 4] > 0.2
    return near, near + 1


def test_rows_with_nearly_the_same_scores_change_places(detector: Head) -> None:
    table = detector.table
    one, other = near_and_far(table)
    table[[one, other]] = table[[other, one]]
    table[:, :4] += 0.1
    table[:, 4] += 0.002 * np.random.default_rng(2).standard_normal(KEPT)
    assert detector.agrees(table)


def test_the_last_row_may_be_another(detector: Head) -> None:
    scores = 1 / (1 + np.exp(-LOGITS[0]))
    if detector.form == "one class":
        scores = np.where(scores == scores.max(axis=1, keepdims=True), scores, 0)
    table = detector.table
    row, number = np.unravel_index(np.argsort(-scores, axis=None)[KEPT], scores.shape)
    assert 0 < table[-1, 4] - scores[row, number] < 0.01
    table[-1] = [*BOXES[0, row], scores[row, number], number]
    assert detector.agrees(table)


FAULTS: dict[str, tuple[Any, Callable[[Numbers], Any]]] = {
    "wrong box": (np.s_[7, :4], lambda table: [10, 600, 30, 620]),
    "shifted boxes": (np.s_[:, 0], lambda table: table[:, 0] + 200),
    "box of another row": (np.s_[3, :4], lambda table: table[40, :4]),
    "wrong class": (np.s_[0, 5], lambda table: (table[0, 5] + 1) % CLASSES),
    "no class": (np.s_[:, 5], lambda table: 7),
    "wrong score": (np.s_[0, 4], lambda table: table[0, 4] - 0.2),
    "wrong order": (np.s_[[0, -1]], lambda table: table[[-1, 0]]),
    "repeated row": (np.s_[1:], lambda table: table[0]),
}


def faulty(table: Numbers, fault: str) -> Numbers:
    """A copy of ``table`` with a fault."""
    places, values = FAULTS[fault]
    wrong: Numbers = table.copy()
    wrong[places] = values(table)
    return wrong


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_rows_fail(detector: Head, fault: str) -> None:
    assert detector.agrees(detector.table)
    assert not detector.agrees(faulty(detector.table, fault))


def test_a_row_may_have_a_class_with_nearly_its_score(tmp_path: Path) -> None:
    logits, best = LOGITS.copy(), LOGITS.argmax(axis=2)[..., None]
    second = (best + 1) % CLASSES
    np.put_along_axis(logits, second, np.take_along_axis(logits, best, 2) - 1e-4, 2)
    detector = Head(tmp_path, "one class", logits)
    table = detector.table
    table[:, 5] = (table[:, 5] + 1) % CLASSES
    assert detector.agrees(table)
    for fault in {*FAULTS} - {"shifted boxes", "repeated row"}:
        assert not detector.agrees(faulty(table, fault))


def test_the_message_names_the_worst_row(tmp_path: Path) -> None:
    detector = Head(tmp_path, "one output")
    table = faulty(detector.table, "wrong box")
    (agreement,) = detector.compare({"y": table[None].astype(np.float32)})
    assert "dB in [:, 7, :] (at least 20)" in (agreement.reason or "")


def test_the_values_and_numbers_of_a_topk_are_a_selection() -> None:
    made = parsed("""(float[2, 50] x) => (float[2, 5] values, int64[2, 5] numbers) <int64[1] k = {5}>
        { values, numbers = TopK (x, k) }""")
    (selection,) = selections(made).rows
    assert selection.candidates == "x"
    assert selection.classes is not None
    assert selection.rows == ()


def topk(batch: int) -> tuple[Selection, dict[str, Array], dict[str, Array]]:
    """The selection of five of 50 values, its outputs, and its candidates."""
    x = np.random.default_rng(3).standard_normal((batch, 50)).astype(np.float32)
    numbers = np.argsort(-x, axis=1)[:, :5]
    values: Array = np.take_along_axis(x, numbers, 1)
    outputs: dict[str, Array] = {"values": values, "numbers": numbers}
    return Selection(Columns("values"), "x", Columns("numbers")), outputs, {"x": x}


def selected(selection: Selection, outputs: Arrays, wanted: Arrays, candidates: Arrays) -> Any:
    """The rows of each output, in decibels."""
    return select(Selections((selection,)), outputs, wanted, candidates, 0.1).rows


def test_wrong_numbers_of_a_topk_are_rows_with_much_noise() -> None:
    selection, outputs, candidates = topk(2)
    unused = np.setdiff1d(np.arange(50), outputs["numbers"])
    candidates["x"][:, unused[:3]] = [-np.inf, np.nan, -np.inf]
    same = selected(selection, outputs, outputs, candidates)["values"]
    assert same.min() > 200
    assert same.shape == (2, 5)
    wrong = {**outputs, "numbers": (outputs["numbers"] + 1) % 50}
    assert selected(selection, wrong, outputs, candidates)["values"].min() < 20


def test_the_number_of_a_row_is_that_of_its_candidate() -> None:
    selection, outputs, candidates = topk(1)
    boxes = np.random.default_rng(4).uniform(0, 640, (1, 50, 4))
    outputs["boxes"] = boxes[:, outputs["numbers"][0]]
    candidates["all"] = boxes
    both = replace(selection, rows=(Columns("boxes", values="all", axis=1),))
    assert selected(both, outputs, outputs, candidates)["boxes"].min() > 200
    wrong = {**outputs, "numbers": outputs["numbers"][:, ::-1]}
    assert selected(both, wrong, outputs, candidates)["boxes"].min() < 20


@pytest.mark.parametrize("shape", [(1, 49, 4), (3, 50, 4), (1, 0, 4)])
def test_candidates_of_other_shapes_are_not_compared_with(shape: tuple[int, ...]) -> None:
    selection, outputs, candidates = topk(2)
    outputs["boxes"] = np.zeros((2, 5, 4))
    candidates["all"] = np.zeros(shape)
    both = replace(selection, rows=(Columns("boxes", values="all", axis=-2),))
    assert not selected(both, outputs, outputs, candidates)


def test_other_uses_of_a_topk_are_no_selections() -> None:
    made = parsed("""(float[2, 50] x) => (float[2, 5] y) <int64[1] k = {5}> {
            values, numbers = TopK (x, k)
            y = Relu (values) }""")
    assert selections(made) == Selections()


@pytest.mark.parametrize("operator", ["ArgMax", "ArgMin"])
def test_the_numbers_of_the_largest_are_a_choice(operator: str) -> None:
    made = parsed(f"""(float[1, 5, 8, 8] x) => (int32[1, 64] y) {{
            scores = Relu (x)
            numbers = {operator} <axis = 1, keepdims = 1> (scores)
            flat = Flatten (numbers)
            y = Cast <to = 6> (flat) }}""")
    found = selections(made)
    assert found == Selections((), (IndexOutput("y", "scores", 1, operator == "ArgMin"),))
    assert found.values == {"scores"}


@pytest.mark.parametrize(
    ("operators", "scale", "offset"),
    [
        (("Add",), 1.0, 1.0),
        (("Mul", "Add"), 2.0, 1.0),
        (("Add", "Mul"), 2.0, 2.0),
        (("Sub", "Mul"), 2.0, -2.0),
        (("Sub from",), -1.0, 1.0),
    ],
)
def test_a_choice_is_followed_through_constants(
    operators: tuple[str, ...], scale: float, offset: float
) -> None:
    nodes = "scores = Relu (x) v0 = ArgMax <axis = 1, keepdims = 0> (scores)"
    for index, operator in enumerate(operators):
        names = [f"v{index}", "two" if operator == "Mul" else "one"]
        names = names[::-1] if operator == "Sub from" else names
        nodes += f" v{index + 1} = {operator.split()[0]} ({', '.join(names)})"
    output = f"v{len(operators)}"
    text = f"(float[1, 5, 64] x) => (int64[1, 64] {output}) {{ {nodes} }}"
    found = selections(parsed(text, one=[1], two=[2]))
    assert found.choices == (IndexOutput(output, "scores", 1, False, scale, offset),)
    scores, best = classes((1, 5, 64))
    wanted: Array = found.choices[0].values(best).astype(np.int64)
    for wrong, agreeing in ((wanted, True), (wanted + int(scale), False), (wanted - 9, False)):
        chosen = select(found, {output: wrong}, {output: wanted}, {"scores": scores}, 0.1)
        rows = chosen.rows[output]
        made = compare(output, wrong, chosen.wanted[output], HALF, rows=rows)
        assert (not made.excesses) is agreeing


def classes(shape: tuple[int, ...] = (1, 5, 16, 16)) -> tuple[Numbers, Array]:
    """Scores of five classes, and the best ones."""
    scores: Numbers = np.random.default_rng(5).standard_normal(shape)
    return scores, np.asarray(scores.argmax(axis=1))


def agrees(scores: Numbers, numbers: Array, wanted: Array, axis: int = 1, **more: Any) -> bool:
    found = Selections(choices=(IndexOutput("y", "scores", axis, **more),))
    chosen = select(found, {"y": numbers}, {"y": wanted}, {"scores": scores}, 0.1)
    rows = chosen.rows.get("y")
    return not compare("y", numbers, chosen.wanted["y"], HALF, nature="indices", rows=rows).excesses


@pytest.mark.parametrize("shape", [(1, 5, 16, 16), (2, 5), (1, 5)])
def test_a_class_with_nearly_the_same_score_may_be_chosen(shape: tuple[int, ...]) -> None:
    scores, wanted = classes(shape)
    second: Array = np.asarray(np.argsort(scores, axis=1).take(-2, axis=1))
    assert not agrees(scores, second, wanted)
    tied = np.sort(scores, axis=1).take([-1], axis=1) * 0.999
    np.put_along_axis(scores, np.expand_dims(second, 1), tied, 1)
    assert agrees(scores, second, wanted)
    assert agrees(-scores, second, wanted, least=True)


def test_other_classes_are_wrong_but_one_of_a_hundred() -> None:
    scores, wanted = classes()
    numbers = wanted.copy()
    for wrong in (2, 5):
        numbers[0, 3, :wrong] = scores.argmin(axis=1)[0, 3, :wrong]
        assert agrees(scores, numbers, wanted) == (wrong == 2)
    # Masked classes excuse none.
    scores, wanted = classes((1, 5))
    scores[0, np.argsort(scores[0])[:2]] = -np.inf
    assert agrees(scores, wanted, wanted)
    for wrong in (np.argsort(scores[0])[2], -1, 5):
        assert not agrees(scores, np.full_like(wanted, wrong), wanted)
    # A single number has no axis.
    single, one = np.array([0.0, 3.0, 1.0]), np.array(1)
    assert agrees(single, one, one, axis=0)
    assert not agrees(single, one + 1, one, axis=0)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_classes_of_which_a_cast_loses_some_are_compared_as_they_are(scale: float) -> None:
    scores, best = classes()
    wanted = np.multiply(scale, best).astype(np.int64 if scale < 1 else np.bool_)
    assert agrees(scores, wanted, wanted, scale=scale)
    assert not agrees(scores, np.zeros_like(wanted), wanted, scale=scale)


SUPPRESSED = {"rows": "int64[?, 3] rows", "gathered": "float[?, 6] y"}


def suppression(outputs: str) -> onnx.ModelProto:
    """``x`` (1 x 400 x 7) -> what a NonMaxSuppression selects: its rows, or box, score and class of each."""
    return parsed(
        f"""(float[1, 400, 7] x) => ({SUPPRESSED[outputs]})
        <int64[3] sizes = {{2, 2, 3}}, int64[1] most = {{100}}, int64[1] second = {{1}},
        int64[2] box_columns = {{0, 2}}, float[1] overlap = {{0.5}},
        float[1] least = {{0.2}}> {{
            corners, extents, logits = Split <axis = 2> (x, sizes)
            ends = Add (corners, extents)
            boxes = Concat <axis = 2> (corners, ends)
            by_box = Sigmoid (logits)
            by_class = Transpose <perm = [0, 2, 1]> (by_box)
            rows = NonMaxSuppression (boxes, by_class, most, overlap, least)
            classes = Gather <axis = 1> (rows, second)
            class_column = Cast <to = 1> (classes)
            places = Gather <axis = 1> (rows, box_columns)
            chosen = GatherND (boxes, places)
            scores = GatherND (by_class, rows)
            score_column = Unsqueeze (scores, second)
            y = Concat <axis = 1> (chosen, score_column, class_column) }}"""
    )


class Suppressing(Compared):
    """A model with a NonMaxSuppression, and what another one gives that is fed other values."""

    def __init__(self, folder: Path, outputs: str) -> None:
        self.source = suppression(outputs)
        corners = BOXES[..., :2]
        extents = np.random.default_rng(7).uniform(10, 200, corners.shape)
        self.x = np.concatenate([corners, extents, LOGITS], axis=2, dtype=np.float32)
        self.near = self.x * (1 + 0.004 * np.random.default_rng(8).standard_normal(self.x.shape))
        super().__init__(folder, self.source, x=self.x)
        self.name = next(iter(self.wanted))

    def outputs(self, x: Array, *, exposed: bool = True) -> dict[str, Array]:
        made = onnx.ModelProto()
        made.CopyFrom(self.source)
        rest = self.expected.facts.selections.rest
        assert rest is not None
        if exposed:
            expose_reads(made, rest)
        session = open_session(made.SerializeToString(), cpu_options())
        return run(session, {"x": x.astype(np.float32)})

    def disagreement(self, outputs: dict[str, Array]) -> str | None:
        """The first output that differs."""
        return next((each.output for each in self.compare(outputs) if each.differs), None)


@pytest.fixture(params=SUPPRESSED)
def suppressing(request: pytest.FixtureRequest, tmp_path: Path) -> Suppressing:
    return Suppressing(tmp_path, request.param)


def test_other_boxes_and_another_number_may_be_selected_of_nearly_the_same(
    suppressing: Suppressing,
) -> None:
    own, wanted = suppressing.outputs(suppressing.near), suppressing.wanted[suppressing.name]
    assert len(own[suppressing.name]) != len(wanted)
    assert suppressing.disagreement(own) is None
    # Without what it reads nothing says why there are others.
    alone = suppressing.outputs(suppressing.near, exposed=False)
    assert suppressing.disagreement(alone) == suppressing.name


@pytest.mark.parametrize(
    ("places", "values", "read"),
    [(np.s_[..., 2], lambda x: x[..., 2] * 0.2, "boxes"),
     (np.s_[..., 4], lambda x: x[..., 5], "by_class")],
)  # fmt: skip
def test_wrong_boxes_and_scores_before_a_suppression_fail(
    suppressing: Suppressing, places: Any, values: Callable[[Array], Array], read: str
) -> None:
    x = suppressing.x.copy()
    x[places] = values(x)
    assert suppressing.disagreement(suppressing.outputs(x)) == read


def test_wrong_rows_behind_a_suppression_fail(suppressing: Suppressing) -> None:
    own = suppressing.outputs(suppressing.near)
    right = own[suppressing.name]
    another_row, another_class = right.copy(), right.copy()
    another_row[7] = right[40]
    column = 1 if right.shape[1] == 3 else 5
    another_class[5, column] = (right[5, column] + 1) % CLASSES
    for wrong in (another_row, another_class, right[1:]):
        assert suppressing.disagreement({**own, suppressing.name: wrong}) == suppressing.name


def test_a_rest_that_reads_an_input_is_not_computed_apart() -> None:
    made = suppression("rows")
    made.graph.node[5].input[1] = "given"
    made.graph.input.append(value("given", [1, CLASSES, CANDIDATES]))
    assert selections(made).rest is None
