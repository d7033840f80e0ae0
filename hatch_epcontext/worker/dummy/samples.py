"""Several dummy inputs of a model, of different kinds, with which its intermediate values differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.graph.arrays import Array, Arrays
from hatch_epcontext.graph.facts import Range, TensorFacts
from hatch_epcontext.worker.dummy.given import given_samples
from hatch_epcontext.worker.dummy.inputs import dummy_inputs, generated_inputs
from hatch_epcontext.worker.dummy.synthetic import SampleName, assumed_range

_MAX_BYTES = 2**25
"""Bytes of one sample beyond which there is only the first: all are in memory at once."""

MAX_GIVEN = 64
"""Given samples that are run on the CPU: with their outputs they are in memory at once."""

_EXTREMES: tuple[SampleName, ...] = ("largest", "smallest", "scaled")


@dataclass(frozen=True)
class Sample:
    """Dummy inputs, by name.

    ``name``: ``"random"``, ``"zeros"`` and so on; ``"given"`` for the only one from files, and for one of
    several as `given_samples` names it. ``bounded``: whether
    an app can have such values: the random ones, and others of inputs that the graph bounds. Floats that
    nothing bounds may never be all zero, rising, or as large as in the others.
    """

    name: str
    feeds: dict[str, Array]
    bounded: bool

    @property
    def is_extreme(self) -> bool:
        """Whether it has inputs that are larger than usual, although nothing says that they can be."""
        return self.name in _EXTREMES and not self.bounded


def samples(
    inputs: Sequence[TensorFacts], model: Model, ranges: Mapping[str, Range]
) -> tuple[Sample, ...]:
    """Return up to seven different samples, the first of which is what `dummy_inputs` returns.

    There is one alone where the inputs of ``model`` are zeros or ones, or where a sample is large. Of those
    that are given as files there are the first `MAX_GIVEN`.
    ``ranges``: those of the inputs that have numbers. Raises ModelError as `dummy_inputs` does.
    """
    kind = model.validate.inputs
    if kind not in SYNTHETIC:
        read = given_samples(Path(kind), inputs, model.key / "validate" / "inputs")
        given = list(itertools.islice(read, MAX_GIVEN))
        return tuple(
            Sample(name if len(given) > 1 else "given", feeds, bounded=True)
            for name, feeds in given
        )
    first = dummy_inputs(inputs, model, ranges)
    if kind != "random":
        return (Sample(kind, first, bounded=True),)
    chosen = [Sample("random", first, bounded=True)]
    if sum(array.nbytes for array in first.values()) <= _MAX_BYTES:
        # As in real data, and unlike in noise, neighbours are alike: what a model adds up becomes larger.
        smooth = {name: _sorted(array) for name, array in first.items()}
        has_open = any((ranges.get(each.name) or assumed_range(each)).is_open for each in inputs)
        for sample in (
            Sample("sorted", smooth, bounded=not has_open),
            *_further(inputs, model, ranges, has_open=has_open),
        ):
            if not any(_are_equal(sample.feeds, other.feeds) for other in chosen):
                chosen.append(sample)
    return tuple(chosen)


def _further(
    inputs: Sequence[TensorFacts],
    model: Model,
    ranges: Mapping[str, Range],
    *,
    has_open: bool,
) -> Iterator[Sample]:
    """The other samples; ``has_open``: whether nothing bounds some of the floats."""
    for name in ("zeros", "ones", *_EXTREMES):
        # Without open floats it would be one more random sample.
        if name != "scaled" or has_open:
            yield Sample(name, generated_inputs(name, inputs, model, ranges), bounded=not has_open)


def _sorted(array: Array) -> Array:
    if array.dtype.kind not in "iuf":
        return array
    return np.sort(array, axis=None).reshape(array.shape)


def _are_equal(one: Arrays, other: Arrays) -> bool:
    return all(np.array_equal(array, other[name]) for name, array in one.items())


def given_sequences(given: Sequence[Sample]) -> list[tuple[Sample, tuple[Arrays, ...]]]:
    """Return the first sample of each sequence in ``given``, and the inputs of all its steps.

    ``speech-1`` and ``speech-2`` are consecutive steps of a recurrent model, and ``speech-4`` begins again.
    """
    found: list[tuple[Sample, list[Arrays]]] = []
    before: tuple[str, int] | None = None
    for each in given:
        stem, _, number = each.name.rpartition("-")
        place = (stem, int(number)) if stem and number.isdecimal() else None
        if place and before and place == (before[0], before[1] + 1):
            found[-1][1].append(each.feeds)
        elif place:
            found.append((each, [each.feeds]))
        before = place
    return [(first, tuple(steps)) for first, steps in found if len(steps) > 1]
