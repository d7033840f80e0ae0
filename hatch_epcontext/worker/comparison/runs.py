"""Runs of a model on samples, and the reference that consists of them, also as a file."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import onnxruntime as ort

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.dtypes import Array, Arrays, is_float
from hatch_epcontext.graph.facts import Cost, Range
from hatch_epcontext.graph.selections import Selections
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.comparison.measures import Elsewhere, OutputFacts, compare_values
from hatch_epcontext.worker.comparison.selections import align
from hatch_epcontext.worker.ort_values import not_finite, run
from hatch_epcontext.worker.results import FEW_SAMPLES, Agreement, AgreementStatus
from hatch_epcontext.worker.samples import Sample


@dataclass(frozen=True)
class ReferenceRun(Sample):
    """One sample, with the source's ``outputs`` in each of its frames.

    ``candidates``: in each frame the values inside the source that its selections need. ``on_target``:
    whether the target runs it too, if no emulation chooses samples.
    """

    outputs: tuple[Arrays, ...] = ()
    on_target: bool = False
    candidates: tuple[Arrays, ...] = ()

    @property
    def largest(self) -> float:
        """The largest finite float among the outputs."""
        arrays = (array for outputs in self.outputs for array in outputs.values())
        floats = (np.abs(a[np.isfinite(a)]) for a in arrays if a.dtype == np.float32)
        return max((float(array.max(initial=0.0)) for array in floats), default=0.0)

    @property
    def results(self) -> Iterator[tuple[Arrays, Arrays]]:
        """The outputs of each frame, and its candidates."""
        return zip(self.outputs, self.candidates or [{}] * len(self.outputs), strict=True)


@dataclass(frozen=True)
class Facts:
    """What is known of the source model: its ``states`` and ``outputs``, with the values inside it that are
    compared like outputs; and what a TopK, an ArgMax or a NonMaxSuppression selects (``selections``).

    ``is_lasting``: whether states decay so slowly that errors in them add up. ``integers``: how near
    dynamic integers are to the float form, if that is the reference. ``batch``: see `Validated`.
    ``ranges``: of the inputs, if they are random. ``deciders``: the values that decide which branch runs.
    ``cost``: about what a run of the graph computes.
    """

    states: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, OutputFacts] = field(default_factory=dict)
    selections: Selections = Selections()
    is_lasting: bool = False
    integers: Agreement | None = None
    batch: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    deciders: tuple[str, ...] = ()
    cost: Cost = Cost()

    def of(self, output: str) -> OutputFacts:
        """What is known of ``output``."""
        return self.outputs.get(output, OutputFacts())


@dataclass(frozen=True)
class Reference:
    """The source model's outputs for each of its samples."""

    runs: tuple[ReferenceRun, ...]
    facts: Facts

    @property
    def feeds(self) -> Arrays:
        """The first sample."""
        return self.runs[0].feeds

    def elsewhere(self, output: str) -> Elsewhere:
        """The values of ``output`` for the first usual samples."""
        if output not in self._elsewhere:
            self._elsewhere[output] = Elsewhere(values_of(output, self.usual))
        return self._elsewhere[output]

    def compare_run(
        self, session: ort.InferenceSession, run: ReferenceRun, limits: Tolerance
    ) -> Iterator[list[Agreement]]:
        """Run ``session`` on the frames of ``run``, and compare each."""
        for number, outputs in enumerate(run_frames(session, run.frames, self.facts.states)):
            yield self.compare(run, number, outputs, limits)

    def compare(
        self, run: ReferenceRun, frame: int, outputs: Arrays, limits: Tolerance
    ) -> list[Agreement]:
        """Compare the ``outputs`` of what was made of the model with those of a frame of ``run``.

        Without values that would be compared, only those with NaN or Inf, if there are any.
        """
        facts = self.facts
        source, inner = run.outputs[frame], run.candidates[frame] if run.candidates else {}
        random = [name for name, output in facts.outputs.items() if output.is_random]
        outputs = {name: array for name, array in outputs.items() if name not in random}
        if gaps := not_finite(outputs, {**inner, **source}):
            return gaps
        agreements = [
            Agreement(name, 0.0, None, status=AgreementStatus.RANDOM, reason="it is random")
            for name in random
        ]
        others = [arrays for run in self.usual for arrays in run.outputs]
        selected = align(facts.selections, outputs, source, inner, limits.unit, others)
        for name, aligned in selected.items():
            own = facts.of(name)
            # What is far from the ordinary has outputs of another size.
            elsewhere = Elsewhere(values_of(name, [run])) if run.far else self.elsewhere(name)
            agreement = compare_values(name, aligned, limits.of(name), own, elsewhere)
            if own.inconclusive and not agreement.differs:
                status = AgreementStatus.INCONCLUSIVE
                agreement = replace(agreement, status=status, reason=own.inconclusive)
            agreements.append(agreement)
        return agreements

    def with_inconclusive(self, reasons: Mapping[str, str]) -> Reference:
        """This reference, whose comparison of the outputs in ``reasons`` proves nothing."""
        own = {
            name: replace(facts, inconclusive=facts.inconclusive or reasons.get(name, ""))
            for name, facts in self.facts.outputs.items()
        }
        return replace(self, facts=replace(self.facts, outputs=own))

    @cached_property
    def usual(self) -> Sequence[ReferenceRun]:
        """The first usual samples."""
        return [*itertools.islice((run for run in self.runs if run.usual), FEW_SAMPLES)]

    @cached_property
    def _elsewhere(self) -> dict[str, Elsewhere]:
        return {}


def are_enough(left: Iterable[ReferenceRun], runs: Iterable[ReferenceRun]) -> bool:
    """Whether a third of the usual ``runs`` is ``left``, so that what was left out are exceptions."""
    usual_left, usual = (sum(run.usual for run in some) for some in (left, runs))
    return 3 * usual_left >= usual


def values_of(output: str, runs: Iterable[ReferenceRun]) -> list[Array]:
    """The values of ``output``, or of a candidate, in all frames of ``runs``."""
    frames = (frame for run in runs for frame in run.results)
    arrays = (outputs.get(output, candidates.get(output)) for outputs, candidates in frames)
    return [array for array in arrays if array is not None]


def with_telling(
    chosen: Sequence[ReferenceRun], runs: Sequence[ReferenceRun]
) -> list[ReferenceRun]:
    """``chosen``; and for each output that is constant in these, one of ``runs`` in which it is not.

    The target may be right by accident if an output is constant, as with zeros after a Relu.
    """
    result = [*chosen]
    for output in runs[0].outputs[0]:
        if not tells(output, result):
            telling = (run for run in runs if tells(output, [chosen[0], run]))
            result += itertools.islice(telling, 1)
    return result


def with_changes(
    chosen: Sequence[ReferenceRun],
    runs: Iterable[ReferenceRun],
    others: Sequence[ReferenceRun] = (),
) -> list[ReferenceRun]:
    """``chosen``; and one of ``runs`` for each output that changes only in samples that were looked for, and
    each branch that only these take, unless an output changes in ``others``, which also run.
    """
    result, met = [*chosen], set[str]()
    # With the first run twice a single number is constant too.
    known = [chosen[0], *chosen, *others]
    for other in runs:
        new = other.changes - met
        if any(name not in other.outputs[0] or not tells(name, known) for name in new):
            result.append(other)
            met |= other.changes
    return result


Side = tuple[str, bool]
"""A value that decides which branch runs, and whether it is true, or above 0."""


def sides(run: ReferenceRun, deciders: Iterable[str]) -> set[Side]:
    """The sides that the ``deciders`` have in ``run``."""
    frames = [{**feeds, **inner} for feeds, (_, inner) in zip(run.frames, run.results, strict=True)]
    return {
        (name, bool((np.asarray(values[name]) > 0).any()))
        for name in deciders
        for values in frames
        if name in values
    }


def with_branches(
    chosen: Sequence[ReferenceRun], runs: Sequence[ReferenceRun], deciders: Sequence[str]
) -> list[ReferenceRun]:
    """``chosen``; and for each branch that these do not take, one of ``runs`` that takes it."""
    result = [*chosen]
    taken = {side for run in result for side in sides(run, deciders)}
    for other in sorted(runs, key=lambda other: not other.usual) if deciders else ():
        if new := sides(other, deciders) - taken:
            result.append(other)
            taken |= new
    return result


def tells(output: str, runs: Sequence[ReferenceRun]) -> bool:
    """Whether ``output`` has different finite values in ``runs``."""
    values = values_of(output, runs)
    return values[0].dtype.kind in "OSU" or not (is_nowhere_finite(values) or is_constant(values))


def is_nowhere_finite(values: Sequence[Array]) -> bool:
    """Whether all ``values`` are NaN or Inf."""
    return not any(finite(array).any() for array in values)


def is_constant(values: Sequence[Array]) -> bool:
    """Whether all finite ``values`` are the same number."""
    # A single number cannot differ.
    if len(values) == 1 and values[0].size == 1:
        return False
    numbers = (array[finite(array)] for array in values)
    some = (array for array in numbers if array.size)
    if (first := next(some, None)) is None:
        return True
    return all(bool((array == first[0]).all()) for array in itertools.chain((first,), some))


def finite(array: Array) -> Array:
    """The finite values of ``array``."""
    if is_float(array.dtype):
        return np.asarray(np.isfinite(array.astype(np.float64)))
    return np.ones(array.shape, bool)


def run_frames(
    session: ort.InferenceSession, feeds: Iterable[Arrays], states: Mapping[str, str]
) -> Iterator[dict[str, Array]]:
    """Yield the outputs of each frame of ``session``, with its own ``states``."""
    outputs: dict[str, Array] = {}
    for arrays in feeds:
        own = {first: outputs[last] for first, last in states.items() if last in outputs}
        outputs = run(session, {**arrays, **own})
        yield outputs


def for_other_numbers(expected: Reference) -> Reference:
    """Return ``expected`` for a model that computes with other numbers than the source, quantized or not.

    A quantizer scales to the range of values, and is inexact for constants, which have no range. So only the
    first sample is compared, and the first frames of a recurrent model.
    """
    sequence = next((run for run in expected.runs if len(run.frames) > 1), None)
    runs = tuple(
        replace(run, on_target=index == 0 or run is sequence)
        for index, run in enumerate(expected.runs)
    )
    return Reference(runs, expected.facts)


def write_reference(reference: Reference, path: Path) -> str:
    """Write ``reference`` to ``path``, for other workers of this build, and return that."""
    with path.open("wb") as file:
        # NumPy's own format takes longer than a small model, and lacks types.
        pickle.dump((reference.runs, reference.facts), file, pickle.HIGHEST_PROTOCOL)
    return str(path)


def read_reference(path: str) -> Reference:
    """Return what `write_reference` wrote."""
    with Path(path).open("rb") as file:
        # Another worker of this build has written it.
        return Reference(*pickle.load(file))  # noqa: S301
