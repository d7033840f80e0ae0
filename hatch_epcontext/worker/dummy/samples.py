"""Several dummy inputs of a model, of different natures, with which its inner values differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hatch_epcontext.config.settings import Model
from hatch_epcontext.graph.arrays import Array, Arrays
from hatch_epcontext.graph.facts import Range, TensorFacts
from hatch_epcontext.worker.dummy.inputs import dummy_inputs, generated_inputs
from hatch_epcontext.worker.dummy.synthetic import RANDOM, Pattern, assumed_range, patterns

STEPS = 8
"""How often a recurrent model is run with its own states: errors grow from step to step."""

_MAX_BYTES = 2**25
"""Bytes of one sample beyond which there is only the first: all are in memory at once."""

_FEW = 8
"""The natures that every model is tried with, however much a run of it takes."""

_MANY = 80

_BUDGET = 4e9
"""Multiplications with additions that all samples of a model may take, from `_FEW` to `_MANY`: about a second
of a processor's time, and the same number of samples on all machines."""


@dataclass(frozen=True)
class Sample:
    """Dummy inputs of one run, or of several ``steps`` in which states are fed back: the first has them.

    ``name`` says what they are like, such as ``"tone at 0.01"``, or ``"given"`` for those from a file;
    ``nature`` the same without the level. ``usual``: whether an app can have such values: all that are within
    what the graph bounds. Floats that nothing bounds may never be all zero, near silence, or very large.
    """

    name: str
    steps: tuple[Arrays, ...]
    nature: str = ""
    usual: bool = True

    @property
    def feeds(self) -> Arrays:
        """The inputs of the first step."""
        return self.steps[0]


def number_of_samples(multiply_adds: int) -> int:
    """How many samples a model gets of which a run takes that many multiplications with additions."""
    return int(min(_MANY, max(_FEW, _BUDGET / max(multiply_adds, 1))))


def samples(
    inputs: Sequence[TensorFacts],
    model: Model,
    ranges: Mapping[str, Range],
    number: int = _FEW,
    states: Mapping[str, str] | None = None,
) -> tuple[Sample, ...]:
    """Return up to ``number`` different samples, the first of which is what `dummy_inputs` returns.

    There is one alone where the inputs of ``model`` are not ``"random"``, or where a sample is large; one
    more has steps if there are ``states``. ``ranges``: those of the inputs that have numbers. Raises
    ModelError as `dummy_inputs` does.
    """
    first = dummy_inputs(inputs, model, ranges)
    if model.validate.inputs != "random":
        name = model.validate.inputs if model.validate.inputs in ("zeros", "ones") else "given"
        found = [Sample(name, (first,), name)]
        if states:
            found.append(Sample(f"{name}, {STEPS} steps", _same_steps(first, states, name), name))
        return tuple(found)
    found = [Sample("random", (first,), "random")]
    if sum(array.nbytes for array in first.values()) > _MAX_BYTES:
        return tuple(found)
    of_inputs = {each.name: ranges.get(each.name) or assumed_range(each) for each in inputs}
    seen = {_digest(found[0].steps)}
    names: dict[str, int] = {}
    for index, pattern in enumerate(patterns()):
        if len(found) >= number:
            break
        if pattern == RANDOM and not states:
            continue
        steps = _steps(pattern, inputs, model, ranges, index, states or {})
        if (digest := _digest(steps)) in seen:
            continue
        seen.add(digest)
        found.append(_named(pattern, steps, [*of_inputs.values()], names))
    return tuple(found)


def _named(
    pattern: Pattern, steps: tuple[Arrays, ...], ranges: Sequence[Range], names: dict[str, int]
) -> Sample:
    nature = pattern.nature(ranges)
    is_open = any(each.is_open and each.usual is None for each in ranges)
    name = f"{nature} at {pattern.level:g}" if is_open else nature
    names[name] = names.get(name, 0) + 1
    if names[name] > 1:
        name = f"{name} ({names[name]})"
    return Sample(name, steps, nature, pattern.usual or not is_open)


def _steps(
    pattern: Pattern,
    inputs: Sequence[TensorFacts],
    model: Model,
    ranges: Mapping[str, Range],
    index: int,
    states: Mapping[str, str],
) -> tuple[Arrays, ...]:
    if not states:
        return (generated_inputs(pattern, inputs, model, ranges, number=index),)
    whole = generated_inputs(pattern, inputs, model, ranges, number=index, steps=STEPS)
    rest = {name: array for name, array in whole.items() if name not in states}
    # As an app begins.
    first = {name: np.zeros_like(array[0]) for name, array in whole.items() if name in states}
    return tuple(
        {**(first if step == 0 else {}), **{name: array[step] for name, array in rest.items()}}
        for step in range(STEPS)
    )


def _same_steps(first: Arrays, states: Mapping[str, str], name: str) -> tuple[Arrays, ...]:
    """The same inputs in each step; states that are not given begin with zeros."""
    rest = {name: array for name, array in first.items() if name not in states}
    begin: dict[str, Array] = dict(first)
    if name != "given":
        begin.update({each: np.zeros_like(first[each]) for each in states if each in first})
    return (begin, *[rest] * (STEPS - 1))


def _digest(steps: Sequence[Arrays]) -> int:
    return hash(
        tuple(
            array.tobytes() if array.dtype != object else str(array.tolist())
            for each in steps
            for array in each.values()
        )
    )
