from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hatch_epcontext.worker.recorder import SAMPLES, _Kept

Array = np.ndarray[Any, Any]


def keep(process: Path, *arrays: Array) -> list[Array]:
    """Offer each of ``arrays`` as a sample; the kept ones, in order."""
    kept = _Kept({"name": "a"})
    for each in arrays:
        kept.begin({"x": each}, process)
    files = sorted((process / "a").iterdir(), key=lambda file: int(file.stem.split("-")[0]))
    found = []
    for file in files:
        with np.load(file, allow_pickle=False) as archive:
            found.append(archive["x"])
    return found


@pytest.mark.parametrize("order", [1, -1])
def test_the_first_sample_and_the_most_different_ones_are_kept(tmp_path: Path, order: int) -> None:
    noise = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    loud, quiet, silent, constant = 1000 * noise, 1e-4 * noise, 0 * noise, 0 * noise + 1
    others = [noise * (1 + index / 1000) for index in range(200)]
    rare = [loud, quiet, silent, constant]
    found = keep(tmp_path, noise, *(others + rare)[::order])
    assert len(found) == SAMPLES
    assert np.array_equal(found[0], noise)
    for each in rare:
        assert any(np.array_equal(each, one) for one in found)


def test_equal_samples_are_kept_once(tmp_path: Path) -> None:
    assert len(keep(tmp_path, *[np.ones(3)] * 20)) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([1, 1, 1, 9]), np.array([1, 2, 3, 9])),
        (np.array(["a", "bc"], object), np.array(["a", "a"], object)),
        (np.array([True, False]), np.array([True, True])),
        (np.zeros((0, 3), np.float32), np.ones((1, 3), np.float32)),
        (np.array([np.nan, 1.0]), np.array([np.inf, 1.0])),
    ],
)
def test_values_of_all_types_are_told_apart_and_read_back(
    tmp_path: Path, one: Array, other: Array
) -> None:
    found = keep(tmp_path, one, other)
    assert len(found) == 2
    assert found[0].tolist() == one.tolist() or np.isnan(found[0]).any()


def test_steps_of_a_sample_that_is_no_longer_kept_are_removed(tmp_path: Path) -> None:
    kept = _Kept({"name": "a"})
    same = np.full(4, 2.0)
    kept.begin({"x": np.ones(4)}, tmp_path)
    sequence = kept.begin({"x": same}, tmp_path)
    kept.add({"x": same}, sequence)
    assert (tmp_path / "a" / "2-2.npz").exists()
    for index in range(2, 10):
        kept.begin({"x": np.full(4, 1e3 * 10.0**index)}, tmp_path)
    kept.add({"x": same}, sequence)
    assert not list((tmp_path / "a").glob("2-*.npz"))
