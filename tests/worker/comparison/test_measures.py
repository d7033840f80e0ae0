from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from hatch_epcontext.graph.dtypes import Array, Numbers
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.comparison.measures import (
    Aligned,
    Elsewhere,
    Nature,
    OutputFacts,
    Scores,
    compare_values,
)
from hatch_epcontext.worker.results import NOTHING, Agreement, AgreementStatus

PLAIN = OutputFacts()
HALF = Tolerance(20, 0.99, unit=0.1)
RNG = np.random.default_rng(1)
LOGITS = RNG.standard_normal((4, 50)) * 5
SHARES = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)


def noise(reference: Array, part: float) -> Array:
    """``reference`` with noise that is ``part`` of its largest value."""
    values = np.asarray(reference, np.float64)
    return np.asarray(values + part * np.abs(values).max() * RNG.standard_normal(values.shape))


def compared(
    output: ArrayLike, reference: ArrayLike, limits: Tolerance = HALF, nature: Nature = "any"
) -> Agreement:
    return compare("y", output, reference, limits, OutputFacts(nature))


def compare(
    name: str,
    output: ArrayLike,
    reference: ArrayLike,
    limits: Tolerance,
    facts: OutputFacts = PLAIN,
    elsewhere: Elsewhere | None = None,
) -> Agreement:
    aligned = Aligned(np.asarray(output), np.asarray(reference))
    return compare_values(name, aligned, limits, facts, elsewhere)


def agrees(output: ArrayLike, reference: ArrayLike, nature: Nature = "any") -> bool:
    return not compared(output, reference, nature=nature).differs


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_noise_counts_relative_to_the_signal(scale: float) -> None:
    reference = RNG.standard_normal((20, 50)) * scale
    assert agrees(noise(reference, 0.01), reference)
    assert not agrees(noise(reference, 0.1), reference)
    assert not agrees(2 * reference, reference), "its cosine is 1"
    assert not agrees(-reference, reference)
    assert not agrees(reference[::-1], reference)


def test_a_signal_of_zeros_has_a_finite_ratio() -> None:
    """A worker's reply is JSON."""
    agreement = compared([1, 0, 0, 1], [0, 0, 0, 0])
    assert (agreement.differs, agreement.snr) == (True, NOTHING)


def test_the_largest_of_many_differences_alone_fails_nothing() -> None:
    reference = RNG.standard_normal((100, 100))
    output = reference.copy()
    output[3, 4] += 1.0
    assert agrees(output, reference)
    strict = compared(output, reference, Tolerance(20, 0.99, atol=0.5))
    assert strict.excess == "largest difference 1 (at most atol 0.5, rtol 0)"


def head(scores: Array) -> Array:
    """The output of a detector: four coordinates up to 640, and the scores of three classes."""
    boxes = np.random.default_rng(2).uniform(0, 640, (1, 4, 300))
    return np.concatenate([boxes, scores[None]], axis=1)


def test_wrong_scores_beside_large_boxes_fail() -> None:
    scores = np.random.default_rng(3).uniform(0, 1, (3, 300))
    reference = head(scores)
    output = head(np.random.default_rng(4).uniform(0, 1, (3, 300)))
    found = compared(output, reference)
    assert found.snr is not None
    assert found.snr > 50, "as a whole it is near"
    assert found.worst is not None
    assert found.worst.text in ("[:, 4, :]", "[:, 5, :]", "[:, 6, :]")
    assert "in [:, " in found.excess
    assert agrees(head(noise(scores, 0.005)), reference)


@pytest.mark.parametrize("shape", [(1, 256), (1, 384), (40, 256), (2, 1, 128), (1, 64)])
def test_one_feature_near_zero_fails_nothing(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    reference = rng.standard_normal(shape)
    reference[..., 17] *= 1e-4
    output = reference + 0.007 * rng.standard_normal(shape)
    assert agrees(output, reference)
    assert not agrees(1.2 * output, reference), "a whole output is never exempt"


def test_one_feature_of_many_fails_nothing_and_a_few_do() -> None:
    reference = np.random.default_rng(6).standard_normal((40, 256))
    output = reference.copy()
    output[:, 17] = 0
    assert agrees(output, reference)
    output[:, 50:60] = 0
    assert not agrees(output, reference)


BOXES, CLASSES, ROWS = 4, 6, 600
JOINED = OutputFacts(scores=Scores(3, 1, (False,) * BOXES + (True,) * CLASSES))


def detections(largest: float, seed: int) -> Numbers:
    """The boxes and scores of rows of which one in thirty is an object of one class."""
    rng = np.random.default_rng(seed)
    scores = rng.uniform(0, 0.005, (CLASSES, ROWS))
    rows = rng.choice(ROWS, ROWS // 30, replace=False)
    scores[np.arange(rows.size) % CLASSES, rows] = rng.uniform(0.5, 1, rows.size)
    return np.concatenate([rng.uniform(0, largest, (BOXES, ROWS)), scores])[None]


Damage = Callable[[Array, int], object]


def _lose(array: Array, column: int) -> None:
    scores = array[0, BOXES + column % CLASSES]
    scores[scores > 0.5] = 0.0


def _invent(array: Array, column: int) -> None:
    array[0, BOXES + column % CLASSES, ::100] = 0.9


def _swap_classes(array: Array, column: int) -> None:
    array[0, BOXES:] = np.roll(array[0, BOXES:], column % (CLASSES - 1) + 1, axis=0)


def _shift_box(array: Array, column: int) -> None:
    array[0, column % BOXES] += 0.3 * array[0, :BOXES].max()


def _shift_rows(array: Array, column: int) -> None:
    array[0] = np.roll(array[0], column + 1, axis=1)


def _forget_boxes(array: Array, column: int) -> None:
    array[0, column % BOXES] = 0.0


@given(
    largest=st.sampled_from([0.5, 3.0, 640.0]),
    seed=st.integers(0, 2**32 - 1),
    column=st.integers(0, 10),
    damage=st.sampled_from([_lose, _invent, _swap_classes, _shift_box, _shift_rows, _forget_boxes]),
    axis=st.sampled_from([1, 2]),
)
def test_damage_to_any_part_of_a_joined_output_is_seen(
    largest: float, seed: int, column: int, damage: Damage, axis: int
) -> None:
    reference = detections(largest, seed)
    output = reference + 0.002 * np.random.default_rng(seed).standard_normal(reference.shape)
    output[:, :BOXES] += 0.005 * largest * (output[:, :BOXES] - reference[:, :BOXES])
    facts = OutputFacts(scores=replace(JOINED.scores, axis=axis)) if JOINED.scores else JOINED
    one, other = (np.moveaxis(array, 1, axis) for array in (output, reference))
    right = compare("y", one, other, HALF, facts)
    assert not right.differs
    assert right.margin is not None
    assert right.margin >= 10
    damage(output, column)
    assert compare("y", one, other, HALF, facts).differs


@pytest.mark.parametrize("largest", [1.0, 640.0])
@pytest.mark.parametrize("left", [0.1, 0.5])
def test_one_lost_object_among_thousands_of_rows_is_seen(largest: float, left: float) -> None:
    reference: Numbers = np.tile(detections(largest, 1), 30)
    reference[:, BOXES:] = np.minimum(reference[:, BOXES:], 0.005)
    reference[0, BOXES + 1, 7000] = 0.9
    near, lost = reference + 0.002 * RNG.standard_normal(reference.shape), reference.copy()
    near[:, :BOXES] = lost[:, :BOXES]
    near[0, BOXES + 2, ::1000] += 0.04
    lost[0, BOXES + 1, 7000] = left
    assert not compare("y", near, reference, HALF, JOINED).differs
    found = compare("y", lost, reference, HALF, JOINED)
    assert "of its scores" in found.excess
    assert found.worst is not None
    assert found.worst.text == "[:, 5, :]"


def test_one_class_of_many_fails() -> None:
    reference = np.random.default_rng(7).uniform(0, 1, (2000, 84))
    output = reference.copy()
    output[:, 50] = output[::-1, 50]
    found = compared(output, reference)
    assert found.worst is not None
    assert found.worst.text == "[:, 50]"
    assert len(found.excesses) == 1, "as a whole it is near"


@pytest.mark.parametrize("classes", [100, 365])
def test_each_of_many_classes_beside_other_values_counts(classes: int) -> None:
    rng = np.random.default_rng(7)
    reference = np.concatenate(
        [rng.uniform(0, 640, (600, 4)), rng.uniform(0, 0.01, (600, classes))], 1
    )
    reference[np.arange(600), 4 + rng.integers(0, classes, 600)] = 0.8
    facts = OutputFacts(scores=Scores(2, 1, (False,) * 4 + (True,) * classes))
    output = reference + 0.002 * rng.standard_normal(reference.shape)
    assert not compare("y", output, reference, HALF, facts).differs
    output[:, 50] += 0.1
    found = compare("y", output, reference, HALF, facts)
    assert found.worst is not None
    assert found.worst.text == "[:, 50]"
    assert found.differs


def test_a_row_of_zeros_among_shares_fails() -> None:
    output = SHARES.copy()
    output[2] = 0
    assert not agrees(output, SHARES, "probabilities")
    assert agrees(SHARES + 0.004 * RNG.standard_normal(SHARES.shape), SHARES, "probabilities")


def test_small_differences_of_values_up_to_one_are_rounding() -> None:
    # A Sigmoid on an NPU gives 0 for 0.0026.
    assert agrees([[0.0]], [[0.0026]], "unit")
    assert not agrees([[0.0]], [[0.0026]])
    assert not agrees([[0.2]], [[0.0026]], "unit")
    assert agrees([[0.04]], [[0.0026]], "unit")
    assert not agrees([[0.04] * 4], [[0.0026] * 4], "unit"), "only of a single score"
    exact = Tolerance(20, 0.99)
    assert compared([[0.0]], [[0.0026]], exact, "unit").differs, "on a CPU it is not"


def test_what_is_near_zero_is_compared_with_other_samples() -> None:
    usual = np.sign(RNG.standard_normal((1, 50)))
    near_zero = usual * 0.001
    output = near_zero + 0.002 * np.ones((1, 50))
    found = compare("y", output, near_zero, HALF, elsewhere=Elsewhere([usual]))
    assert not found.differs
    assert found.cosine is None
    assert compare("y", output, near_zero, HALF).differs


def test_a_few_scales_of_a_quantized_output_near_zero_are_rounding() -> None:
    scale = 0.02
    near_zero = np.array([[0, 1, -2, 0, 1, 3]]) * scale

    def off(scales: float) -> Agreement:
        output = near_zero + scales * scale
        return compare("y", output, near_zero, HALF, OutputFacts(scale=scale))

    assert not agrees(near_zero + scale, near_zero), "nothing says that it is quantized"
    margin = off(1).margin
    assert margin is not None
    assert margin >= 10
    assert not off(3).differs
    assert off(4).differs
    scores = np.tile(near_zero, 2000)
    facts = OutputFacts("unit", scale=scale)
    assert not compare("y", scores + scale, scores, Tolerance(15, 0.98), facts).differs


def test_where_the_reference_is_infinite_an_output_is_as_large_as_it_can_be() -> None:
    reference = np.array([[-np.inf, -3.0, 2.0, np.inf, 11.0, np.nan]])
    assert agrees([[-65504.0, -3.0, 2.0, 131008.0, 11.0, 5.0]], reference)
    assert not agrees([[-7.6, -3.0, 2.0, 131008.0, 11.0, 5.0]], reference)
    assert not agrees([[-65504.0, -3.0, 2.0, -65504.0, 11.0, 5.0]], reference)


def test_indices_booleans_and_strings_are_equal_or_not() -> None:
    reference = np.arange(40)
    output = reference.copy()
    output[3] = 39
    assert agrees(output, reference, "indices"), "a near tie"
    output[10:20] = 0
    assert not agrees(output, reference, "indices")
    words = np.array(["x", "y"], object)
    assert agrees(words, words)
    assert not agrees(words[::-1], words)
    assert not agrees([True, False], [True, True])


@pytest.mark.parametrize(
    ("output", "reference"),
    [
        (np.zeros((1, 2)), [[2.0, 1.0]]),
        ([[0.002, 0.001]], np.zeros((1, 2))),
        # A wrong score of a few rows beside large numbers.
        (np.tile([600.0, 300.0, 0.45], (20, 1)), np.tile([600.0, 300.0, 0.9], (20, 1))),
    ],
)
def test_what_is_only_near_as_a_whole_fails(output: ArrayLike, reference: ArrayLike) -> None:
    assert not agrees(output, reference)


def test_equal_outputs_have_no_noise() -> None:
    for values in ([0.0, 0.0], [], [1.0, 2.0], [np.nan, 1.0], [np.inf]):
        found = compared(values, values)
        assert not found.differs
        assert (found.max_abs, found.snr, found.worst) == (0.0, None, None)


def test_another_shape_is_an_error() -> None:
    agreement = compare("y", np.zeros(2), np.zeros((1, 2)), HALF)
    assert agreement.status is AgreementStatus.OTHER_SHAPE
    assert agreement.reason == "the output 'y' has the shape [2], but [1, 2] on the CPU."


def test_single_scalars_of_a_state_fail_nothing() -> None:
    state = np.random.default_rng(1).standard_normal((2, 1, 128))
    wrong = state.copy()
    wrong[1, 0, :4] = 0
    assert compare("h", wrong, state, HALF).differs
    assert not compare("h", wrong, state, HALF, OutputFacts(is_state=True)).differs
    half = state + 0.12 * np.random.default_rng(2).standard_normal(state.shape)
    assert compare("h", half, state, HALF).differs
    assert not compare("h", half, state, HALF, OutputFacts(is_state=True)).differs
    # A whole layer does.
    wrong[1] *= 0.5
    assert compare("h", wrong, state, HALF, OutputFacts(is_state=True)).differs
