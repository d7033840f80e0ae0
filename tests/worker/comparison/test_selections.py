from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies

from hatch_epcontext.config.settings import Model
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.errors import Key
from hatch_epcontext.graph.dtypes import Array, Arrays, Numbers
from hatch_epcontext.graph.selections import Choice, Selections, Ties, find_selections, with_reads
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.comparison.measures import OutputFacts, compare_values
from hatch_epcontext.worker.comparison.runs import Reference, read_reference, write_reference
from hatch_epcontext.worker.comparison.selections import align
from hatch_epcontext.worker.ort_values import run
from hatch_epcontext.worker.reference import reference
from hatch_epcontext.worker.results import Agreement
from hatch_epcontext.worker.session import cpu_options, open_session
from tests.models import parsed, save, value

HALF = Tolerance(20, 0.99, unit=0.1)
CANDIDATES, CLASSES, KEPT = 400, 3, 50
RNG = np.random.default_rng(1)
BOXES = RNG.uniform(0, 640, (1, CANDIDATES, 4)).astype(np.float32)
LOGITS = (RNG.standard_normal((1, CANDIDATES, CLASSES)) * 2 - 3).astype(np.float32)

Variant = Literal[
    "one output", "several outputs", "two stages", "one class", "by number", "by index"
]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


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
BY_INDEX = """
    column = Unsqueeze (row, last)
    chosen = GatherND <batch_dims = 1> (boxes, column)"""
BY_ELEMENTS = """
    column = Unsqueeze (row, last)
    tiled = Tile (column, by_4)
    chosen = GatherElements <axis = 1> ({}, tiled)"""
JOINED = """
    score_column = Unsqueeze (scores, last)
    class_column = Unsqueeze (classes, last)
    class_floats = Cast <to = 1> (class_column)
    y = Concat <axis = -1> (chosen, score_column, class_floats)"""


def head(variant: Variant, *, is_sorted: bool = True) -> onnx.ModelProto:
    """``boxes`` (1 x 400 x 4) and ``logits`` (1 x 400 x 3) -> the 50 rows with the largest scores."""
    scores, boxes = ("some", "some_boxes") if variant == "two stages" else ("all", "boxes")
    nodes = "all = Sigmoid (logits)" + FIRST_STAGE * (variant == "two stages")
    nodes += ONE_CLASS if variant == "one class" else ALL_CLASSES.format(scores)
    gathers = {"by number": BY_NUMBER, "by index": BY_INDEX}
    nodes += gathers.get(variant, BY_ELEMENTS).format(boxes)
    if not is_sorted:
        nodes = nodes.replace("TopK <axis = 1>", "TopK <axis = 1, sorted = 0>")
    outputs = "float[1, 50, 6] y"
    if variant == "several outputs":
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
        ((self.wanted, self.candidates),) = self.expected.runs[0].results

    def compare(self, outputs: Arrays, limits: Tolerance = HALF) -> Sequence[Agreement]:
        return self.expected.compare(self.expected.runs[0], 0, outputs, limits)

    def is_near(self, outputs: Arrays, limits: Tolerance = HALF) -> bool:
        return not any(agreement.differs for agreement in self.compare(outputs, limits))


class Head(Compared):
    """A head, whose outputs are changed as tables of 50 x (box, score, class)."""

    def __init__(
        self, folder: Path, variant: Variant, logits: Array = LOGITS, *, is_sorted: bool = True
    ) -> None:
        self.variant = variant
        super().__init__(folder, head(variant, is_sorted=is_sorted), boxes=BOXES, logits=logits)

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
        return self.is_near(own, limits)


@pytest.fixture(scope="module", params=VARIANTS)
def detector(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Head:
    return Head(tmp_path_factory.mktemp("head"), request.param)


def near_and_far(table: Numbers) -> tuple[int, int]:
    """Two rows whose scores differ by less than a hundredth, and by much more from the first one's."""
    near = int(np.argmin(np.abs(np.diff(table[:, 4]))))
    assert abs(table[near, 4] - table[near + 1, 4]) < 0.005
    assert table[0, 4] - table[-1, 4] > 0.2
    return near, near + 1


def with_noise(table: Numbers, size: float = 0.002) -> Numbers:
    """A copy of ``table`` whose scores have noise of this size."""
    noisy: Numbers = table.copy()
    noisy[:, 4] += size * np.random.default_rng(2).standard_normal(KEPT)
    return noisy


def test_rows_with_nearly_the_same_scores_change_order(detector: Head) -> None:
    table = detector.table
    one, other = near_and_far(table)
    table[[one, other]] = table[[other, one]]
    table[:, :4] += 0.1
    assert detector.agrees(with_noise(table))


def next_row(variant: Variant) -> list[float]:
    """The first row that a head does not keep."""
    scores = 1 / (1 + np.exp(-LOGITS[0]))
    if variant == "one class":
        scores = np.where(scores == scores.max(axis=1, keepdims=True), scores, 0)
    row, number = np.unravel_index(np.argsort(-scores, axis=None)[KEPT], scores.shape)
    return [*BOXES[0, row], scores[row, number], number]


def test_the_last_row_may_be_another(detector: Head) -> None:
    table = detector.table
    table[-1] = next_row(detector.variant)
    assert detector.agrees(with_noise(table))
    # It is one of those from which the source selects.
    table[-1, :4] = table[-1, [2, 3, 0, 1]]
    assert not detector.agrees(table)


def test_all_rows_may_be_others_if_all_scores_are_nearly_the_same(tmp_path: Path) -> None:
    detector = Head(tmp_path, "one output", LOGITS * 1e-3)
    table = with_noise(detector.table)
    table[:, :4] = BOXES[0, :KEPT]
    assert detector.agrees(table)
    # None is there twice, as in the source.
    copied = table.copy()
    copied[KEPT // 2] = table[KEPT // 2 + 1]
    assert not detector.agrees(copied)
    table[KEPT // 2, :4] = 0
    assert not detector.agrees(table)


@pytest.mark.parametrize(("others", "is_right"), [(KEPT // 3, True), (KEPT - 5, False)])
def test_most_rows_must_be_the_sources_if_nothing_shows_from_which_it_selects(
    tmp_path: Path, others: int, is_right: bool
) -> None:
    made = head("one output")
    made.graph.node[-5].output[0] = "selected"
    made.graph.node.insert(
        len(made.graph.node) - 4, onnx.helper.make_node("Abs", ["selected"], ["chosen"])
    )
    compared = Compared(tmp_path, made, boxes=BOXES, logits=LOGITS * 1e-3)
    y = compared.wanted["y"].copy()
    y[0, -others:, :4] = BOXES[0, :others]
    assert compared.is_near({"y": y}) == is_right


def test_rows_in_any_order_agree_if_the_topk_sorts_none(tmp_path: Path) -> None:
    detector = Head(tmp_path, "one output", is_sorted=False)
    table = detector.table[np.argsort(-detector.table[:, 4])]
    assert detector.agrees(table)
    for fault in {*FAULTS} - {"wrong order"}:
        assert not detector.agrees(faulty(table, fault))
    table[table[:, 4].argmin()] = next_row("one output")
    assert detector.agrees(with_noise(table))


@pytest.mark.parametrize("variant", ["one output", "one class"])
@given(data=strategies.data())
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_tied_rows_change_order_and_others_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, variant: Variant, data: strategies.DataObject
) -> None:
    levels = data.draw(strategies.integers(2, 40), label="levels")
    logits = np.round(LOGITS * levels / 10) * 10 / levels
    detector = Head(tmp_path_factory.mktemp("tied"), variant, logits.astype(np.float32))
    table = detector.table
    for score in np.unique(table[:, 4]):
        (tied,) = np.nonzero(table[:, 4] == score)
        table[tied] = table[data.draw(strategies.permutations(tied.tolist()))]
    assert detector.agrees(table)
    # Rows about as good as the last one may be others.
    (kept,) = np.nonzero(table[:, 4] > table[:, 4].min() + 0.15)
    assume(kept.size)
    row = data.draw(strategies.sampled_from(kept.tolist()), label="row")
    # Of one row, other classes may be tied.
    column = data.draw(strategies.integers(0, 4 if variant == "one class" else 5), label="column")
    wrong = table.copy()
    wrong[row, column] += [*[700] * 4, -0.2, 1][column]
    assert not detector.agrees(wrong)


def with_swapped_classes(table: Numbers) -> Numbers:
    """The classes of ``table``, of which those of the first row and of one of another class are swapped."""
    classes: Numbers = table[:, 5].copy()
    other = int(np.argmax(classes != classes[0]))
    classes[[0, other]] = classes[[other, 0]]
    return classes


FAULTS: dict[str, tuple[Any, Callable[[Numbers], Any]]] = {
    "wrong box": (np.s_[7, :4], lambda table: [10, 600, 30, 620]),
    "shifted boxes": (np.s_[:, 0], lambda table: table[:, 0] + 200),
    "box of another row": (np.s_[3, :4], lambda table: table[40, :4]),
    "wrong class": (np.s_[0, 5], lambda table: (table[0, 5] + 1) % CLASSES),
    "swapped classes": (np.s_[:, 5], with_swapped_classes),
    "no class": (np.s_[:, 5], lambda table: 7),
    "wrong score": (np.s_[0, 4], lambda table: table[0, 4] - 0.2),
    "wrong order": (np.s_[[0, -1]], lambda table: table[[-1, 0]]),
    "repeated row": (np.s_[1:], lambda table: table[0]),
}


def faulty(table: Numbers, fault: str) -> Numbers:
    """A copy of ``table`` with a fault."""
    indices, values = FAULTS[fault]
    wrong: Numbers = table.copy()
    wrong[indices] = values(table)
    return wrong


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_rows_fail(detector: Head, fault: str) -> None:
    assert detector.agrees(detector.table)
    assert not detector.agrees(faulty(detector.table, fault))


def test_boxes_near_zero_are_compared_with_those_of_other_samples(tmp_path: Path) -> None:
    boxes, logits = np.concatenate([0 * BOXES, BOXES]), np.concatenate([LOGITS, LOGITS])
    compared = Compared(tmp_path, head("one output"), boxes=boxes, logits=logits)
    y = compared.wanted["y"].copy()
    for error, is_right in ((0.01, True), (100, False)):
        y[0, 7, 0] = error
        assert compared.is_near({"y": y}) == is_right


def test_the_message_names_the_worst_row(tmp_path: Path) -> None:
    detector = Head(tmp_path, "one output")
    table = faulty(detector.table, "wrong box")
    (agreement,) = detector.compare({"y": table[None].astype(np.float32)})
    assert "signal to noise in [:, 7, :] 8.0 dB (at least 20 dB)" in agreement.excess


def topk(folder: Path, batch: int = 2, **attributes: int) -> Compared:
    """``x`` (batch x 50) -> its five largest values, and their indices."""
    text = "".join(f", {name} = {number}" for name, number in attributes.items())
    made = parsed(f"""(float[{batch}, 50] x) => (float[{batch}, 5] values, int64[{batch}, 5] numbers)
        <int64[1] k = {{5}}> {{ values, numbers = TopK <axis = 1{text}> (x, k) }}""")
    x = np.random.default_rng(3).uniform(0, 1, (batch, 50)).astype(np.float32)
    x[:, 7] = np.sort(x)[:, -5 if attributes.get("largest", 1) else 4]
    return Compared(folder, made, x=x)


@pytest.mark.parametrize("attributes", [{}, {"sorted": 0}, {"largest": 0}])
def test_the_indices_of_a_topk_are_those_of_its_values_but_of_the_last_one_if_that_is_tied(
    tmp_path: Path, attributes: dict[str, int]
) -> None:
    compared = topk(tmp_path, **attributes)
    values, numbers = compared.wanted["values"], compared.wanted["numbers"]
    assert compared.is_near(compared.wanted)
    last: Array = values == (values.min if attributes.get("largest", 1) else values.max)(1)[:, None]
    assert compared.is_near({"values": values, "numbers": np.where(last, 7, numbers)})
    single, far = numbers.copy(), np.abs(values - values[last][:, None])
    single.flat[far.argmax()] += 1
    for wrong in (
        single,
        np.where(last, numbers, 7),
        (numbers + 1) % 50,
        np.where(last, numbers, numbers[::-1]),
    ):
        assert not compared.is_near({"values": values, "numbers": wrong})


def test_columns_behind_some_of_unknown_width_are_those_of_the_rows(tmp_path: Path) -> None:
    made = parsed("""(float[1, 50] x, float[1, 50, 4] boxes, int64[1] width) => (float[1, 5, ?] y)
        <int64[1] k = {5}, int64[1] last = {2}, int64[1] zero = {0}> {
            values, numbers = TopK (x, k)
            column = Unsqueeze (numbers, last)
            rows = GatherND <batch_dims = 1> (boxes, column)
            some = Slice (rows, zero, width, last)
            scores = Unsqueeze (values, last)
            floats = Cast <to = 1> (column)
            y = Concat <axis = 2> (scores, some, floats) }""")
    rng = np.random.default_rng(3)
    x, boxes = rng.uniform(0, 0.7, (1, 50)), rng.uniform(0, 640, (1, 50, 4))
    x[0, :2] = 0.99999, 0.99998
    floats = {"x": x.astype(np.float32), "boxes": boxes.astype(np.float32)}
    compared = Compared(tmp_path, made, **floats, width=np.array([3]))
    y = compared.wanted["y"]
    assert y.shape == (1, 5, 5)
    assert compared.is_near({"y": y[:, [1, 0, 2, 3, 4]]})
    for column in (0, 2, 4):
        wrong = y.copy()
        wrong[0, 0, column] = y[0, 4, column]
        assert not compared.is_near({"y": wrong})


PEAKS = """(float[1, 6, 6] x) => (OUTPUTS) <int64[1] k = {4}, int64[1] flat = {-1},
    int64 six = {6}, float zero = {0}, int64[1] last = {1}, float low = {0.5}> {
        is_peak = Greater (x, low) peaks = Where (is_peak, x, zero) row = Reshape (peaks, flat)
        values, numbers = TopK <axis = 0> (row, k)
        below = Div (numbers, six) beside = Mod (numbers, six)"""


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Cast <to = 1> (below)",
        "f = Cast <to = 1> (numbers) y = Floor (f)",
        "a = Unsqueeze (below, last) b = Unsqueeze (beside, last) y = Concat <axis = 1> (a, b)",
        "y = Gather <axis = 0> (table, numbers) z = Neg (values)",
    ],
)
def test_indices_of_equal_values_say_nothing(nodes: str, tmp_path: Path) -> None:
    outputs = "int64[4, 2] y" if "Concat" in nodes else "float[4] y"
    outputs += ", float[4] z" if "z = " in nodes else ""
    x = np.zeros((1, 6, 6), np.float32)
    # Of the others any two are selected.
    x[0, 1, 4], x[0, 5, 2] = 0.9, 0.8
    table: dict[str, Any] = {"table": (36,)} if "table" in nodes else {}
    made = parsed(f"{PEAKS.replace('OUTPUTS', outputs)} {nodes} }}", **table)
    compared = Compared(tmp_path, made, x=x)
    assert compared.is_near(compared.wanted)
    y = compared.wanted["y"].astype(np.float64)
    for rows, is_near in ((slice(2, 4), True), (slice(0, 1), False)):
        other = y.copy()
        other[rows] += 3
        own = {**compared.wanted, "y": other.astype(compared.wanted["y"].dtype)}
        assert compared.is_near(own) == is_near


def test_indices_of_equal_values_say_nothing_behind_another_topk(tmp_path: Path) -> None:
    outputs = "int64[2] y, int64[2] which, int64[2] both"
    made = parsed(
        f"""{PEAKS.replace("OUTPUTS", outputs).replace("> {", ", int64[1] two = {2}> {", 1)}
        found = Gather <axis = 0> (table, numbers) best, which = TopK <axis = 0> (found, two)
        y = Gather <axis = 0> (numbers, which) both = Add (y, which) }}""",
        table=np.array([2, 1, *[0] * 8, 1.5, *[0] * 25], np.float32),
    )
    x = np.zeros((1, 6, 6), np.float32)
    x[0, 1, 4], x[0, 5, 2] = 0.9, 0.8
    compared = Compared(tmp_path, made, x=x)
    # The best one is one of the equal values, of which any two are selected; the other is the first peak.
    assert compared.wanted["y"].tolist() == [0, 10]
    for name in ("y", "which", "both"):
        for changed, is_near in (([3, 0], True), ([0, 3], False)):
            own = {**compared.wanted, name: np.add(compared.wanted[name], changed)}
            assert compared.is_near(own) == is_near, name


@pytest.mark.parametrize("hidden", [0.0, -np.inf])
def test_selected_values_are_tied_with_equal_candidates(hidden: float) -> None:
    rows = np.array([[3, hidden, 1, hidden], [hidden, 2, 2, 1]])
    picked = np.array([[3, 1, hidden], [2, 2, 1]])
    tied = Ties("rows", "picked").of({"rows": rows, "picked": picked})
    assert tied.tolist() == [[False, False, True], [True, True, False]]


def test_what_is_gathered_in_another_order_than_that_of_a_topk_has_no_ties() -> None:
    made = parsed(
        """(float[9] x, int64[4] order) => (int64[4] y, int64[4] z) <int64[1] k = {4}> {
            r = Relu (x) values, numbers = TopK <axis = 0> (r, k)
            y = Gather (numbers, order) z = Neg (numbers) }"""
    )
    assert {*find_selections(made).ties} == {"z"}


def test_not_all_ways_are_followed_where_sums_join_what_is_gathered_again_and_again() -> None:
    steps = (
        f"g{n} = Gather (i{n}, best) i{n + 1} = Add (g{n}, i{n})" if n else "i1 = Neg (i0)"
        for n in range(40)
    )
    made = parsed(
        f"""(float[9] x) => (int64[9] y) <int64[1] k = {{9}}> {{
            r = Relu (x) best = ArgMax <axis = 0> (r) values, i0 = TopK (r, k)
            {" ".join(steps)} y = Identity (i40) }}""",
        check=False,
    )
    assert 0 < len(find_selections(made).ties["y"]) < 10_000


def test_other_uses_of_a_topk_are_no_selections() -> None:
    made = parsed("""(float[2, 50] x) => (float[2, 5] y) <int64[1] k = {5}> {
            values, numbers = TopK (x, k)
            y = Neg (values) }""")
    assert find_selections(made) == Selections()


@pytest.mark.parametrize("operator", ["ArgMax", "ArgMin"])
def test_the_numbers_of_the_largest_are_a_choice(operator: str) -> None:
    made = parsed(f"""(float[1, 5, 8, 8] x) => (int32[1, 64] y) <int64 one = {{1}}> {{
            scores = Relu (x)
            numbers = {operator} <axis = 1, keepdims = 1> (scores)
            counted = Add (numbers, one)
            flat = Flatten (counted)
            y = Cast <to = 6> (flat) }}""")
    chosen = find_selections(made)
    assert chosen == Selections((), {"y": Choice("scores", 1, operator == "ArgMin")})
    assert chosen.values == {"scores"}


def classes(shape: tuple[int, ...] = (1, 5, 16, 16)) -> tuple[Numbers, Array]:
    """Scores of five classes, and the best ones."""
    scores: Numbers = np.random.default_rng(5).standard_normal(shape)
    return scores, np.asarray(scores.argmax(axis=1))


def agrees(scores: Numbers, numbers: Array, wanted: Array, axis: int = 1, **more: Any) -> bool:
    found = Selections(choices={"y": Choice("scores", axis, **more)})
    chosen = align(found, {"y": numbers}, {"y": wanted}, {"scores": scores}, 0.1)
    return not compare_values("y", chosen["y"], HALF, OutputFacts("indices")).differs


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("shape", [(1, 5, 16, 16), (2, 5), (1, 5)])
def test_a_class_with_nearly_the_same_score_may_be_chosen(
    shape: tuple[int, ...], first: int
) -> None:
    scores, wanted = classes(shape)
    second: Array = np.asarray(np.argsort(scores, axis=1).take(-2, axis=1))
    assert not agrees(scores, second + first, wanted + first)
    tied = np.sort(scores, axis=1).take([-1], axis=1) * 0.999
    np.put_along_axis(scores, np.expand_dims(second, 1), tied, 1)
    assert agrees(scores, second + first, wanted + first)
    assert agrees(-scores, second + first, wanted + first, least=True)


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
    assert agrees(scores, wanted, wanted)
    assert not agrees(scores, np.zeros_like(wanted), wanted)


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
            indices = Gather <axis = 1> (rows, box_columns)
            chosen = GatherND (boxes, indices)
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
        rest = self.expected.facts.selections.rest
        assert rest is not None
        made = with_reads(self.source, rest if exposed else None)
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
    # Inside a context nothing shows what it reads.
    assert suppressing.disagreement({suppressing.name: own[suppressing.name]}) == suppressing.name


@pytest.mark.parametrize(
    ("indices", "values", "read"),
    [(np.s_[..., 2], lambda x: x[..., 2] * 0.2, "boxes"),
     (np.s_[..., 4], lambda x: x[..., 5], "by_class")],
)  # fmt: skip
def test_wrong_boxes_and_scores_before_a_suppression_fail(
    suppressing: Suppressing, indices: Any, values: Callable[[Array], Array], read: str
) -> None:
    x = suppressing.x.copy()
    x[indices] = values(x)
    assert suppressing.disagreement(suppressing.outputs(x)) == read


def test_wrong_rows_behind_a_suppression_fail(suppressing: Suppressing) -> None:
    own = suppressing.outputs(suppressing.near)
    right = own[suppressing.name]
    another_row, another_class = right.copy(), right.copy()
    another_row[7] = right[40]
    column = 1 if right.shape[1] == 3 else 5
    another_class[5, column] = (right[5, column] + 1) % CLASSES
    for wrong in (another_row, another_class, right[1:]):
        for outputs in (own, {}):
            assert (
                suppressing.disagreement({**outputs, suppressing.name: wrong}) == suppressing.name
            )


def test_a_rest_that_reads_an_input_is_not_computed_apart() -> None:
    made = suppression("rows")
    made.graph.node[5].input[1] = "given"
    made.graph.input.append(value("given", [1, CLASSES, CANDIDATES]))
    assert find_selections(made).rest is None
