from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Key, Kind, ModelError, Problem
from hatch_epcontext.graph.facts import Range, TensorFacts
from hatch_epcontext.worker.dummy.samples import Sample, run_samples

SPEC = Model("a", Path("a.onnx"), Key(("models", 0)))
X = TensorFacts("x", "float32", (1, 7, 12))
N = TensorFacts("n", "int64", (1,))
COSTLY = 10**11
"""Multiplications of a model that gets few samples."""
RANGES = {
    "x": Range(-8, 8, known=False),
    "n": Range(1, 12, known=True, usual=12, whole=True),
}


def number(sample: Sample) -> int:
    return int(sample.feeds["n"].astype(int)[0])


def test_inputs_that_the_model_takes_are_left_as_they_are() -> None:
    found, ranges = run_samples(number, [X, N], SPEC, RANGES, COSTLY)
    assert (found[0][0].name, found[0][1]) == ("random", 12)
    assert len(found) == 8
    assert ranges == RANGES


@pytest.mark.parametrize("taken", [7, 1, 0])
def test_other_lengths_and_gentler_values_are_tried(taken: int) -> None:
    def run(sample: Sample) -> int:
        if number(sample) != taken:
            raise RuntimeError("refused")
        return number(sample)

    found, ranges = run_samples(run, [X, N], SPEC, RANGES)
    assert {result for _, result in found} == {taken}
    assert ranges["n"].usual == taken
    assert ranges["n"].low <= taken
    assert np.ptp(found[0][0].feeds["x"].astype(float)) > 1


def test_the_first_error_is_raised_when_all_inputs_fail() -> None:
    def run(sample: Sample) -> None:
        raise RuntimeError(f"n = {number(sample)}")

    with pytest.raises(RuntimeError, match="n = 12"):
        run_samples(run, [X, N], SPEC, RANGES)


def test_an_error_of_the_package_is_raised_at_once() -> None:
    runs = []

    def run(sample: Sample) -> None:
        runs.append(sample.name)
        raise ModelError(Problem(Kind.WORKER_TIMEOUT, "", "too slow"))

    with pytest.raises(ModelError, match="too slow"):
        run_samples(run, [X, N], SPEC, RANGES)
    assert runs == ["random"]


def test_extremes_that_fail_are_left_out() -> None:
    def run(sample: Sample) -> str:
        if sample.name in ("pink at 1", "spike at 1"):
            raise RuntimeError("refused")
        return sample.name

    found, _ = run_samples(run, [X, N], SPEC, RANGES, COSTLY)
    assert [result for _, result in found] == [
        "random",
        "zeros at 1",
        "tone at 0.1",
        "low tone at 1",
        "decay at 0.1",
        "burst at 1",
    ]
