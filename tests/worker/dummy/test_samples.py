from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.errors import Key
from hatch_epcontext.graph.facts import Range, TensorFacts
from hatch_epcontext.worker.dummy.samples import MAX_GIVEN, Sample, given_sequences, samples

X = TensorFacts("x", "float32", (2, 50))
I = TensorFacts("i", "int64", (300,))  # noqa: E741
M = TensorFacts("m", "int64", (1, 6))
OPEN = Range(-8, 8, known=False)


def spec(inputs: object = "random") -> Model:
    return Model(
        "a", Path("a.onnx"), Key(("models", 0)), validate=ValidateTable(inputs=str(inputs))
    )


def named(inputs: Sequence[TensorFacts], **ranges: Range) -> dict[str, dict[str, object]]:
    return {each.name: dict(each.feeds) for each in samples(inputs, spec(), ranges)}


def test_samples_are_different_and_the_same_in_every_run() -> None:
    ranges = {"x": OPEN, "i": Range(0, 256, known=True, whole=True)}
    one, two = (samples([X, I], spec(), ranges) for _ in range(2))
    assert [each.name for each in one] == [
        *("random", "sorted", "zeros", "ones", "largest", "smallest", "scaled"),
    ]
    for a, b in zip(one, two, strict=True):
        assert all(np.array_equal(a.feeds[name], b.feeds[name]) for name in ("x", "i"))
    assert [each.bounded for each in one] == [True, *[False] * 6]
    assert [each.is_extreme for each in one] == [*[False] * 4, *[True] * 3]
    assert set(one[0].feeds["i"].tolist()) == set(range(257))
    assert [int(each.feeds["i"].max()) for each in one[2:6]] == [0, 1, 256, 0]
    assert [float(each.feeds["x"].astype(float).max()) for each in one[2:6]] == [0, 1, 8, -8]
    assert (np.diff(one[1].feeds["i"].astype(int)) >= 0).all()
    assert 3 < np.abs(one[6].feeds["x"].astype(float)).std() < 8


def test_extremes_of_what_the_graph_bounds_are_bounded() -> None:
    ranges = {"x": Range(-1, 6, known=True), "i": Range(2, 4, known=True, whole=True)}
    found = samples([X, I], spec(), ranges)
    assert [each.name for each in found] == [
        *("random", "sorted", "zeros", "ones", "largest", "smallest"),
    ]
    assert all(each.bounded for each in found)
    for each in found:
        assert {*each.feeds["i"].tolist()} <= {2, 3, 4}
        x = each.feeds["x"].astype(float)
        assert -1 <= x.min() <= x.max() <= 6


def test_equal_samples_are_left_out() -> None:
    ranges = {"i": Range(0, 1, known=True, whole=True)}
    found = samples([TensorFacts("i", "int64", (1,))], spec(), ranges)
    assert len(found) == len({int(each.feeds["i"][0].item()) for each in found}) == 2


def test_usual_values_stay_and_padding_is_masked_once() -> None:
    length = TensorFacts("n", "int64", (1,))
    found = named(
        [M, length],
        m=Range(0, 1, known=True, usual=1, whole=True),
        n=Range(1, 6, known=True, usual=6, whole=True),
    )
    assert {name: np.asarray(feeds["m"]).tolist() for name, feeds in found.items()} == {
        "random": [[1] * 6],
        "smallest": [[1, 1, 1, 0, 0, 0]],
    }
    assert all(np.asarray(feeds["n"]).tolist() == [6] for feeds in found.values())


@pytest.mark.parametrize("inputs", ["zeros", "ones"])
def test_chosen_values_are_the_only_sample(inputs: str) -> None:
    (sample,) = samples([X], spec(inputs), {})
    assert (sample.name, sample.bounded) == (inputs, True)
    assert set(sample.feeds["x"].ravel().tolist()) == {float(inputs == "ones")}


def test_inputs_from_a_file_are_the_only_sample(tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", x=np.full((2, 50), 3, np.float32))
    (sample,) = samples([X], spec(tmp_path / "inputs.npz"), {})
    assert sample.name == "given"
    assert (sample.feeds["x"] == 3).all()


def test_each_file_of_a_folder_is_a_sample_with_its_name(tmp_path: Path) -> None:
    for name in ("b", "a"):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((2, 50), np.float32))
    assert [(each.name, each.bounded) for each in samples([X], spec(tmp_path), {})] == [
        ("a", True),
        ("b", True),
    ]


def test_an_archive_of_very_many_samples_is_read_in_part(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", x=np.zeros((MAX_GIVEN + 3, 2, 50), np.float32))
    found = samples([X], spec(tmp_path / "all.npz"), {})
    assert [found[0].name, found[-1].name] == ["all[0]", f"all[{MAX_GIVEN - 1}]"]


def test_consecutive_numbers_are_the_steps_of_a_sequence() -> None:
    names = ["a-1", "a-2", "a-4", "a-5", "a-6", "b-7", "c", "a-b"]
    given = [
        Sample(name, {"x": np.full(1, index)}, bounded=True) for index, name in enumerate(names)
    ]
    found = [
        (first.name, [int(feeds["x"][0]) for feeds in steps])
        for first, steps in given_sequences(given)
    ]
    assert found == [("a-1", [0, 1]), ("a-4", [2, 3, 4])]
