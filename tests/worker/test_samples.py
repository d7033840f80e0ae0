from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.errors import Key
from hatch_epcontext.graph.facts import Far, Range, TensorFacts
from hatch_epcontext.worker.inputs import MAX_GIVEN, samples_of
from hatch_epcontext.worker.samples import (
    Sample,
    number_of_frames,
    number_of_samples,
    run_samples,
    sequences,
)

X = TensorFacts("x", "float32", (2, 50))
I = TensorFacts("i", "int64", (300,))  # noqa: E741
M = TensorFacts("m", "int64", (1, 6))
OPEN = Range(-8, 8, known=False)


def spec(inputs: object = "random") -> Model:
    return Model(
        "a", Path("a.onnx"), Key(("models", 0)), validate=ValidateTable(inputs=str(inputs))
    )


def fed(
    inputs: Sequence[TensorFacts], ranges: dict[str, Range], multiply_adds: int = 1
) -> tuple[Sample, ...]:
    return samples_of(inputs, spec(), ranges, multiply_adds)


def test_samples_are_different_and_the_same_in_every_run() -> None:
    ranges = {"x": OPEN, "i": Range(0, 256, known=True, whole=True)}
    one, two = (fed([X, I], ranges) for _ in range(2))
    assert len(one) > 30
    assert len({each.name for each in one}) == len(one)
    for a, b in zip(one, two, strict=True):
        assert all(np.array_equal(a.feeds[name], b.feeds[name]) for name in ("x", "i"))
    assert one[0].name == "random"
    assert set(one[0].feeds["i"].tolist()) == set(range(257))
    levels = [float(np.abs(each.feeds["x"].astype(float)).max()) for each in one]
    assert min(levels) == 0
    assert max(levels) > 20
    assert sum(0 < each < 2e-2 for each in levels) > 5
    # Signed zeros count: squares of them are wrong on some NPUs.
    assert any(np.signbit(each.feeds["x"].astype(float)).all() for each in one if not each.usual)


def test_the_first_samples_have_different_natures() -> None:
    ranges = {"x": OPEN, "i": Range(0, 256, known=True, whole=True)}
    assert len({each.nature for each in fed([X, I], ranges, 10**11)}) == 8
    assert [each.name for each in fed([X, I], ranges, 10**11)] == [
        each.name for each in fed([X, I], ranges)[:8]
    ]


def test_silence_constants_and_large_floats_are_not_usual() -> None:
    found = fed([X], {"x": replace(OPEN, sound=True)})
    usual = {each.name: each.usual for each in found}
    assert all(usual[each] for each in ("random", "tone at 0.1", "pink at 0.01"))
    assert not any(usual[each] for each in ("zeros at 1", "constant at 1", "tone at 0.0001"))
    assert not usual["random at 8"]


def test_noise_as_sound_is_as_loud_as_speech_and_full_scale_is_not_usual() -> None:
    found = {sample.name: sample for sample in fed([X], {"x": replace(OPEN, sound=True)})}
    levels = {name: np.std(sample.feeds["x"].astype(float)) for name, sample in found.items()}
    assert levels["random"] == pytest.approx(0.05, rel=0.2)
    assert max(levels[name] for name, sample in found.items() if sample.usual) < 0.15
    assert levels["square at 1"] > 0.9
    loud = {"square at 1", "tone at 1", "random at 8"}
    assert {name for name in ("pink at 1", *loud) if not found[name].usual} == loud


def test_only_sound_is_nearly_silent() -> None:
    names = [each.name for each in fed([X], {"x": OPEN})]
    assert not any("0.001" in name or "0.0001" in name for name in names)
    # It ends at a thousandth of its level.
    assert [name for name in names if "decay" in name] == ["decay at 0.1", "decay at 1"]


def test_nothing_is_lost_in_the_arithmetic() -> None:
    names = [sample.name for sample in fed([X], {"x": replace(OPEN, least=0.1)})]
    assert {name.rpartition(" ")[2] for name in names if " at " in name} == {"0.1", "1", "8"}
    names = [sample.name for sample in fed([X], {"x": replace(OPEN, least=5e3)})]
    assert {name.rpartition(" ")[2] for name in names if " at " in name} == {"1", "8"}


def test_a_spike_among_many_values_is_lost_in_powers_of_their_mean() -> None:
    for count, is_kept in ((64, True), (1024, False)):
        found = fed([replace(X, shape=(count,))], {"x": replace(OPEN, least=0.5)})
        assert ("spike at 1" in {sample.name for sample in found}) == is_kept
        assert "tone at 1" in {sample.name for sample in found}


def test_integers_far_from_the_ordinary_share_samples_and_floats_have_their_own() -> None:
    ids = Range(0, 255, False, whole=True, far=(Far(-9, 9), Far(-(2**31), 2**31 - 1)))
    floats = replace(
        OPEN, far=(Far(centers=(293.15,), spreads=(0.3,)), Far(centers=(0,), spreads=(8000,)))
    )
    j = TensorFacts("j", "int64", (5,))
    found = [each for each in fed([X, I, j], {"x": floats, "i": ids, "j": ids}) if each.far]
    assert [[*each.far] for each in found] == [["i", "j"], ["i", "j"], ["x"], ["x"]]
    assert not any(each.usual for each in found)
    assert np.abs(found[0].feeds["i"]).max() <= 9
    assert found[0].feeds["i"].min() < 0
    assert np.abs(found[1].feeds["j"]).max() > 2**15
    assert np.abs(found[2].feeds["x"].astype(float) - 293.15).max() < 3
    assert np.abs(found[3].feeds["x"].astype(float)).max() > 8000
    assert found[2].feeds["i"].min() >= 0


def test_many_columns_share_the_samples_far_from_the_ordinary() -> None:
    columns = [TensorFacts(f"c{number}", "float32", (1,)) for number in range(20)]
    ranges = {
        column.name: replace(OPEN, far=(Far(centers=(1000.0 + number,), spreads=(1.0,)),))
        for number, column in enumerate(columns)
    }
    found = [sample for sample in fed(columns, ranges) if sample.far]
    assert len(found) == 10
    assert {name for each in found for name in each.far} == {each.name for each in columns}
    # Those with the same offset are in one.
    (one,) = (sample for sample in fed(columns, dict.fromkeys(ranges, ranges["c0"])) if sample.far)
    assert one.far.keys() == ranges.keys()


def test_standardized_values_vary_around_their_means() -> None:
    means = Far(centers=(1013.0, 20.0), spreads=(8.0, 9.0), shape=(2,))
    tensor = TensorFacts("x", "float32", (50, 2))
    ranges = {"x": replace(OPEN, standardized=means, least=1.0)}
    first, *others = fed([tensor], ranges)
    assert first.feeds["x"].mean(axis=0) == pytest.approx((1013, 20), rel=0.1)
    assert first.feeds["x"].std(axis=0) == pytest.approx((8, 9), rel=0.2)
    assert all(abs(sample.feeds["x"].mean() - 516) < 80 for sample in others)


def test_single_values_beside_an_offset_have_several_samples() -> None:
    offsets = tuple(Far(centers=(9.0,), spreads=(s,), is_offset=True) for s in (0.5, 0.1))
    for size, number in ((1, 10), (20, 2)):
        tensor = TensorFacts("x", "float32", (size,))
        found = [s for s in fed([tensor], {"x": replace(OPEN, far=offsets)}) if s.far]
        assert len({float(sample.feeds["x"].ravel()[0]) for sample in found}) == number


def test_single_moments_that_are_counted_have_several_samples() -> None:
    far = tuple(Far(size / 2, size, is_counted=True) for size in (2400.0, 9600.0))
    for size, number in ((1, 10), (20, 2)):
        tensor = TensorFacts("x", "float32", (size,))
        hours = [s for s in fed([tensor], {"x": replace(OPEN, far=far)}) if s.far]
        assert len({float(sample.feeds["x"].ravel()[0]) for sample in hours}) == number
        # Between two float16s.
        numbers = np.concatenate([sample.feeds["x"] for sample in hours])
        distances = np.abs(np.spacing(numbers.astype(np.float16)).astype(np.float64))
        shares = np.abs(numbers - numbers.astype(np.float16).astype(np.float64)) / distances
        assert all((shares > 0.45) & (shares < 0.5))


def test_what_the_graph_bounds_is_usual_and_within_its_range() -> None:
    ranges = {"x": Range(-1, 6, known=True), "i": Range(2, 4, known=True, whole=True)}
    found = fed([X, I], ranges)
    assert len(found) > 30
    for sample in found:
        # But for a picture of one colour.
        x = sample.feeds["x"].astype(float)
        assert sample.usual == (x.min() < x.max())
        assert {*sample.feeds["i"].tolist()} <= {2, 3, 4}
        assert -1 <= x.min() <= x.max() <= 6


@pytest.mark.parametrize("known", [False, True])
def test_a_picture_without_structure_is_not_usual(known: bool) -> None:
    x = TensorFacts("x", "float32", (1, 3, 16, 16))
    found = fed([x], {"x": Range(0, 255, known, picture=True)})
    usual = {sample.nature for sample in found if sample.usual}
    assert usual == {"random", "clouds", "boxes", "text", "other clouds"}
    unusual = {sample.nature for sample in found if not sample.usual}
    assert {"white", "gradient", "spot", "dark noise", "half noise"} <= unusual
    # As of a mask.
    bounded = fed([x], {"x": Range(0, 1, known)})
    assert {"gradient", "half noise"} <= {sample.nature for sample in bounded if sample.usual}


def test_a_picture_of_bytes_has_the_natures_of_pictures() -> None:
    x = TensorFacts("x", "uint8", (1, 16, 16, 3))
    floats = fed([x], {"x": Range(0, 255, known=False, picture=True)})
    found = fed([x], {"x": Range(0, 255, known=False, whole=True, picture=True)})
    assert [(s.name, s.usual) for s in found] == [(s.name, s.usual) for s in floats]
    pixels = found[0].feeds["x"]
    assert pixels.dtype == np.uint8
    assert (pixels.min(), pixels.max()) == (0, 255)
    # Not cut off to the next lower one.
    difference = pixels.astype(float).mean() - floats[0].feeds["x"].astype(float).mean()
    assert difference == pytest.approx(0.5, abs=0.05)


def picture(nature: str, *shape: int) -> np.ndarray:
    """The first plane of a picture of this shape."""
    x = TensorFacts("x", "float32", shape)
    found = fed([x], {"x": Range(0, 1, known=False, picture=True)})
    return next(sample.feeds["x"][0, 0] for sample in found if sample.nature == nature)


def test_a_picture_of_boxes_has_edges_of_all_sizes() -> None:
    boxes = picture("boxes", 1, 3, 160, 320)
    assert len(np.unique(boxes)) > 60
    changes = np.flatnonzero(np.diff(boxes.ravel()))
    lengths = np.diff(changes)
    # In pixels along the rows.
    assert (lengths < 5).any()
    assert (lengths > 80).any()
    assert 0.8 < (np.diff(boxes, axis=1) == 0).mean() < 0.98


def test_a_picture_of_text_has_lines_of_letters_if_there_is_room() -> None:
    page = picture("text", 1, 3, 160, 320)
    assert {*np.unique(page)} == {0.0, 1.0}
    blank = (page == 1).all(axis=1)
    # A letter has 7 dots of 2 pixels, and a line 12 dots.
    assert np.array_equal(blank.reshape(-1, 2)[:, 0], blank.reshape(-1, 2)[:, 1])
    lines = ~blank[:144].reshape(6, 24)
    assert (lines.any(axis=1).all(), lines[:, :4].any(), lines[:, 18:].any()) == (
        True,
        False,
        False,
    )
    assert 0.1 < (page == 0).mean() < 0.3
    # Dots instead.
    assert 0 < (picture("text", 1, 3, 11, 11) == 0).mean() < 0.3


def test_ids_have_the_special_tokens() -> None:
    found = fed([I], {"i": Range(0, 999, known=True, whole=True)})
    by_nature = {each.nature: each.feeds["i"].tolist() for each in found}
    assert by_nature["special"][:4] == [0, 1, 2, 3]
    assert by_nature["special"][-1] == 999
    assert by_nature["padded"][150:] == [0] * 150
    assert by_nature["ascending"][:3] == [0, 1, 2]
    assert len({*by_nature["all the same"]}) == 1


def test_states_are_zero_in_the_first_frame_and_fed_back_then() -> None:
    ranges = {"x": OPEN, "h": OPEN}
    inputs = [X, TensorFacts("h", "float32", (1, 4))]
    first, second, third, *_ = samples_of(inputs, spec(), ranges, 10**6, {"h": "h1"})
    assert len(first.frames) == 1
    assert [*second.frames[0]] == ["h", "x"] or [*second.frames[0]] == ["x", "h"]
    assert not second.frames[0]["h"].any()
    assert all([*each] == ["x"] for each in second.frames[1:])
    assert (len(second.frames), second.name, len(third.frames)) == (16, "16 frames", 8)
    assert np.array_equal(second.frames[3]["x"], third.frames[3]["x"])
    assert sum("h" in each for each in second.frames) == 1
    assert not np.array_equal(second.frames[0]["x"], second.frames[1]["x"])


@pytest.mark.parametrize(
    ("cost", "frames", "number"),
    [(1, 16, 80), (4 * 10**7, 12, 80), (10**8, 8, 40), (10**11, 8, 8), (10**13, 8, 2)],
)
def test_costly_models_get_fewer_frames_and_samples(cost: int, frames: int, number: int) -> None:
    assert (number_of_frames(cost), number_of_samples(cost)) == (frames, number)


def test_equal_samples_are_left_out() -> None:
    ranges = {"i": Range(0, 1, known=True, whole=True)}
    found = fed([TensorFacts("i", "int64", (1,))], ranges)
    assert len(found) == len({int(each.feeds["i"][0].item()) for each in found}) == 2


def test_usual_values_stay_and_padding_is_masked_once() -> None:
    length = TensorFacts("n", "int64", (1,))
    found = fed(
        [M, length],
        {
            "m": Range(0, 1, known=True, usual=1, whole=True),
            "n": Range(1, 6, known=True, usual=6, whole=True),
        },
    )
    assert [each.feeds["m"].tolist() for each in found] == [[[1] * 6], [[1, 1, 1, 0, 0, 0]]]
    assert all(each.feeds["n"].tolist() == [6] for each in found)


@pytest.mark.parametrize("inputs", ["zeros", "ones"])
def test_chosen_values_are_the_only_sample(inputs: str) -> None:
    (sample,) = samples_of([X], spec(inputs), {})
    assert (sample.name, sample.usual) == (inputs, True)
    assert set(sample.feeds["x"].ravel().tolist()) == {float(inputs == "ones")}


def test_an_archive_of_very_many_samples_is_read_in_part(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", x=np.zeros((MAX_GIVEN + 3, 2, 50), np.float32))
    found = samples_of([X], spec(tmp_path / "all.npz"), {})
    assert [found[0].name, found[-1].name] == ["all[0]", f"all[{MAX_GIVEN - 1}]"]


def test_consecutive_numbers_are_the_frames_of_a_sequence() -> None:
    names = ["a-1", "a-2", "a-4", "a-5", "a-6", "b-7", "c", "a-b"]
    given = [Sample(name, ({"x": np.full(1, index)},), name) for index, name in enumerate(names)]
    found = [
        (each.nature, [int(feeds["x"].astype(int)[0]) for feeds in each.frames])
        for each in sequences(given, {"h": "h1"})
    ]
    assert found == [("a-1", [0, 1]), ("a-4", [2, 3, 4])]


def test_extremes_that_fail_are_left_out() -> None:
    def run(sample: Sample) -> str:
        if sample.name in ("pink at 1", "spike at 1"):
            raise RuntimeError("refused")
        return sample.name

    found = run_samples(run, samples_of([X], spec(), {"x": OPEN}, 10**11), synthetic=True)
    names = ("random", "zeros at 1", "tone at 0.1", "low tone at 1", "decay at 0.1", "burst at 1")
    assert found == list(names)


@pytest.mark.parametrize(("synthetic", "failing"), [(True, 1), (False, 2)])
def test_errors_of_the_first_sample_and_of_given_ones_are_raised(
    *, synthetic: bool, failing: int
) -> None:
    names = []

    def run(sample: Sample) -> None:
        names.append(sample.name)
        if len(names) == failing:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        run_samples(run, samples_of([X], spec(), {"x": OPEN}), synthetic=synthetic)
    assert len(names) == failing


def test_larger_floats_of_all_inputs_are_in_one_sample() -> None:
    larger = replace(OPEN, far=(Far(16, 32), Far(64, 128)))
    ranges = {
        name: replace(larger, far=(*larger.far, Far(centers=(center,), spreads=(1.0,))))
        for name, center in (("a", 5.0), ("b", 6.0))
    }
    columns = [replace(X, name=name) for name in ranges]
    far = [sample for sample in fed(columns, ranges) if sample.far]
    assert [[*each.far] for each in far] == [["a", "b"], ["a", "b"], ["a"], ["b"]]
    assert [each.is_larger for each in far] == [True, True, False, False]
    assert all(array.min() >= 16 and array.max() <= 32 for array in far[0].feeds.values())


def test_larger_numbers_take_each_branch_and_are_beside_spans_that_have_a_size() -> None:
    ranges = {
        "x": replace(OPEN, far=(Far(8, 32), Far(32, 128))),
        "z": OPEN,
        "i": Range(7, 7, True, whole=True, loose=True, far=(Far(centers=(8.0,), spreads=(0.0,)),)),
    }
    columns = [X, replace(X, name="z"), replace(I, shape=(1,))]
    larger = [sample for sample in fed(columns, ranges) if sample.is_larger]
    assert [[*sample.far] for sample in larger] == [["x"], ["x", "i"]]
    assert [sample.feeds["i"].item() for sample in larger] == [7, 8]
    for sample in larger:
        assert (np.diff(sample.feeds["z"].ravel()) >= 0).all()


def test_no_value_is_so_near_a_threshold_that_rounding_moves_it_over() -> None:
    edges = (-1.0, 0.0, 0.1, 0.10003)
    open_, known = replace(OPEN, thresholds=edges), Range(0, 1, True, thresholds=edges)
    for sample in fed([X, replace(X, name="z")], {"x": open_, "z": known}):
        for name, array in sample.feeds.items():
            away = np.abs(array.astype(np.float64)[..., None] - edges)
            least = np.abs(edges) / 512
            assert (away >= least).all() or sample.far, (name, sample.name)


def test_no_integer_is_on_a_threshold_of_floats() -> None:
    ids = Range(0, 255, False, whole=True, thresholds=(100.0000015, 255.0))
    for sample in fed([I], {"i": ids}):
        assert 100 not in sample.feeds["i"]
        assert 0 <= sample.feeds["i"].min() <= sample.feeds["i"].max() <= 255


def test_what_is_not_signed_has_no_negative_values() -> None:
    for sample in fed([X], {"x": replace(OPEN, signed=False)}):
        assert sample.feeds["x"].min() >= 0
