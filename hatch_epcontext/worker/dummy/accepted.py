"""Samples that a model accepts: gentler ones if it rejects the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.errors import ModelError
from hatch_epcontext.graph.facts import Range, TensorFacts
from hatch_epcontext.graph.values.conventions import is_length_name
from hatch_epcontext.worker.dummy.samples import Sample, samples

T = TypeVar("T")

Ranges = Mapping[str, Range]

_MAX_SIZES = 4
"""Sizes that are tried as a length."""


def run_samples(
    run: Callable[[Sample], T],
    inputs: Sequence[TensorFacts],
    model: Model,
    ranges: Ranges,
    multiply_adds: int = 1,
    states: Mapping[str, str] | None = None,
) -> tuple[list[tuple[Sample, T]], Ranges]:
    """Return the samples of ``inputs``, each with the result of ``run``, and their ranges.

    ``multiply_adds`` and ``states``: see `samples`.

    If ``run`` raises an error for the first one, gentler inputs are tried; later samples for which it does so
    are left out, unless they were given. Raises ModelError at once, and the first error if all inputs fail.
    """
    failure: _FailedRun | None = None
    for gentler in _gentler(inputs, model, ranges):
        first, *others = samples(inputs, model, gentler, multiply_adds, states)
        result = _try(run, first)
        if isinstance(result, _FailedRun):
            failure = failure or result
            continue
        if model.validate.inputs not in SYNTHETIC:
            return [(first, result), *((sample, run(sample)) for sample in others)], gentler
        results = ((sample, _try(run, sample)) for sample in others)
        # Samples that fail are extremes that the graph rejects, although its ranges do not show it.
        accepted = [(sample, it) for sample, it in results if not isinstance(it, _FailedRun)]
        return [(first, result), *accepted], gentler
    assert failure is not None
    raise failure.error


@dataclass(frozen=True)
class _FailedRun:
    error: Exception


def _try(run: Callable[[Sample], T], sample: Sample) -> T | _FailedRun:
    try:
        return run(sample)
    except ModelError:
        raise
    except Exception as error:
        return _FailedRun(error)


def _gentler(inputs: Sequence[TensorFacts], model: Model, ranges: Ranges) -> Iterator[Ranges]:
    """Yield ``ranges``, then gentler ones: other lengths, and values that are all 1 or 0."""
    yield ranges
    if model.validate.inputs != "random":
        return
    seen = [ranges]
    lengths = [name for name, range_ in ranges.items() if _is_length(name, range_)]
    sizes = {
        size
        for tensor in inputs
        if tensor.name not in lengths
        for size in tensor.sizes
        if isinstance(size, int) and size > 1
    }
    whole = [name for name, range_ in ranges.items() if range_.whole]
    longest = sorted(sizes, reverse=True)[:_MAX_SIZES]
    for names, numbers in ((lengths, longest), (whole, (1, 0)), (list(ranges), (1, 0))):
        for number in numbers:
            gentler = {**ranges, **{name: _only(ranges[name], number) for name in names}}
            if gentler not in seen:
                seen.append(gentler)
                yield gentler


def _is_length(name: str, range_: Range) -> bool:
    return range_.whole and (is_length_name(name) or (range_.low == 1 and range_.usual is not None))


def _only(range_: Range, number: float) -> Range:
    """``range_`` with ``number`` as the usual value, even outside of it: the graph may show too little."""
    low, high = min(range_.low, number), max(range_.high, number)
    return replace(range_, low=low, high=high, usual=float(number))
