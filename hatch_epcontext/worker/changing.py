"""Samples in which outputs change that are the same in all others, or that take a branch as no other does.

What an app rarely sees, such as an alert, needs values of other sizes than ordinary samples have, or values
that stand out in their series. Many are tried on the CPU, those near the ordinary first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hatch_epcontext.graph.dtypes import Array, Arrays, is_float
from hatch_epcontext.graph.facts import Far, Range, TensorFacts
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.text import listing
from hatch_epcontext.worker.candidates import GROWTH, around_constants, candidate
from hatch_epcontext.worker.comparison.runs import ReferenceRun, finite, sides, tells, values_of
from hatch_epcontext.worker.crossing import Comparisons, between, half_way
from hatch_epcontext.worker.samples import BUDGET, MAX_BYTES, Sample
from hatch_epcontext.worker.synthetic import NEAR, generator

_MOST = 512
"""The most candidates."""

_SHARE = 1 / 8
"""The multiply-adds of all candidates, relative to those of all ordinary samples."""

_ENOUGH = 3
"""Samples for each output: an EP's number format may be too coarse for one of them."""

_HALVINGS = 10
"""How often a sample is at most moved half-way to an ordinary one."""

_FIRST_SEED = 1000
"""That of the first candidate: other samples have lower ones."""

_SAME, _TOLERANCE = 0.99, 0.1
"""The share of an output's values that stays the same if its inputs are rounded; and the part of its largest
float within which one does.
"""

_MAX_VALUES = 8
"""The most different values of an output that are counted."""

_MAX_INPUTS = 16
"""The most inputs of which each is tried with its ordinary values."""

_MAX_NAMED = 3
"""The most outputs in the name of a sample."""


@dataclass(frozen=True)
class Aims:
    """What is looked for in ``scope``: changes of ``outputs``, and another side of ``deciders`` than that of
    ``base``. ``far``: known samples that may meet this.
    """

    scope: Scope
    base: ReferenceRun
    far: tuple[ReferenceRun, ...]
    outputs: tuple[str, ...]
    deciders: tuple[str, ...]

    @staticmethod
    def of(
        runs: Sequence[ReferenceRun],
        outputs: Iterable[str],
        deciders: Iterable[str],
        scope: Scope,
    ) -> Aims:
        """Those of ``deciders`` that are the same in all ``runs``, and of ``outputs`` that depend on inputs
        in ``scope``, and are the same in all runs but those far from the ordinary: number formats are often
        too coarse for these.
        """
        near = [run for run in runs if not run.far]
        base = max((run for run in near if run.usual), key=lambda run: len(run.frames))
        return Aims(
            scope,
            base,
            tuple(run for run in runs if run.far and len(run.frames) == len(base.frames)),
            tuple(name for name in outputs if not tells(name, near) and scope.varies([name])),
            tuple(name for name in deciders if len(_sides(name, runs)) == 1),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """All outputs and deciders."""
        return (*self.outputs, *self.deciders)

    def met(self, run: ReferenceRun) -> frozenset[str]:
        """The outputs that change in ``run``, and the deciders that are on another side."""
        changing = (name for name in self.outputs if tells(name, [self.base, run]))
        new = sides(run, self.deciders) - sides(self.base, self.deciders)
        return frozenset((*changing, *(name for name, _ in new)))

    def variety(self, run: ReferenceRun) -> int:
        """How many different values the outputs have in ``run``."""
        arrays = (np.concatenate([*map(np.ravel, values_of(name, [run]))]) for name in self.outputs)
        return sum(min(np.unique(array).size, _MAX_VALUES) for array in arrays)


def _sides(name: str, runs: Iterable[ReferenceRun]) -> set[bool]:
    return {side for run in runs for _, side in sides(run, [name])}


Run = Callable[[Sample], ReferenceRun]


@dataclass
class Trials:
    """Runs a model with ``inputs`` in these ``ranges``, as long as runs are ``left``.

    ``reading``: returns a ``run`` that also has the inner values of these names. ``states``: as they are fed
    back.
    """

    run: Run
    reading: Callable[[frozenset[str]], Run]
    inputs: Sequence[TensorFacts]
    ranges: Mapping[str, Range]
    states: Mapping[str, str]
    left: int = 2 * _MOST

    def result(self, frames: Sequence[Arrays]) -> ReferenceRun | None:
        """The run of ``frames``; None if it fails, has values that are not finite, or no run is left."""
        self.left -= 1
        if self.left < 0:
            return None
        try:
            run = self.run(Sample("", tuple(frames), "changing", usual=False))
        except Exception:
            # ONNX Runtime raises many types for values that the graph rejects.
            return None
        arrays = (array for outputs in run.outputs for array in outputs.values())
        is_finite = all(array.dtype.kind in "OSU" or finite(array).all() for array in arrays)
        return run if is_finite else None

    def candidate(
        self, base: ReferenceRun, growth: float, rng: np.random.Generator
    ) -> ReferenceRun | None:
        """The run of other values with as many frames as ``base``, and the same first states."""
        return self._with(
            base,
            {
                tensor.name: candidate(
                    tensor, self.ranges[tensor.name], len(base.frames), growth, rng
                )
                for tensor in self._varied
            },
        )

    def around(self, base: ReferenceRun, rng: np.random.Generator) -> ReferenceRun | None:
        """The same of values around the constants of the graph, where it has some."""
        return self._with(
            base,
            {
                tensor.name: around_constants(
                    tensor, self.ranges[tensor.name], len(base.frames), rng
                )
                for tensor in self._varied
                if self.ranges[tensor.name].constants
            },
        )

    @property
    def _varied(self) -> Iterator[TensorFacts]:
        """The inputs with a range that are no states."""
        return (
            tensor
            for tensor in self.inputs
            if tensor.name in self.ranges and tensor.name not in self.states
        )

    def _with(self, base: ReferenceRun, fed: Arrays) -> ReferenceRun | None:
        """The run of ``base`` with the values ``fed``, of all frames."""
        return self.result(
            [
                {**frame, **{name: array[number] for name, array in fed.items()}}
                for number, frame in enumerate(base.frames)
            ]
        )


def changing_runs(aims: Aims, trials: Trials, multiply_adds: int) -> list[ReferenceRun]:
    """Return runs that meet the ``aims``, those that meet most of them first.

    They are as near to the ordinary sample as can be by halves, and no threshold is so near that rounding
    moves values over it. Empty if none is found among candidates whose number follows from the
    ``multiply_adds`` of one frame.
    """
    frames = aims.base.frames
    size = sum(array.nbytes for frame in frames for array in frame.values())
    cost = max(multiply_adds, 1) * len(frames)
    most = int(min(_MOST, _SHARE * BUDGET / cost, MAX_BYTES / (size + 1)))
    counts: Counter[str] = Counter()
    changing: list[ReferenceRun] = []
    for candidates, enough in (
        (_far, _ENOUGH),
        (_grown, _ENOUGH),
        (_among_constants, 1),
        (_crossing, 1),
    ):
        trials.left = 2 * most
        if all(counts[name] >= enough for name in aims.names):
            break
        for run in candidates(aims, trials, most):
            if all(counts[name] >= enough for name in aims.met(run)):
                continue
            if (nearest := _nearest(run, aims, trials)) is not None:
                changing.append(_named(nearest, aims, len(changing)))
                counts.update(aims.met(nearest))
            if all(counts[name] >= enough for name in aims.names):
                break
    return sorted(changing, key=lambda run: -len(run.changes))


def _far(aims: Aims, trials: Trials, most: int) -> Iterator[ReferenceRun]:
    """At most ``most`` of the known samples that are far from the ordinary."""
    yield from aims.far[:most]


def _grown(aims: Aims, trials: Trials, most: int) -> Iterator[ReferenceRun]:
    """The runs of ``most`` candidates, of growing size."""
    for number in range(most):
        growth = GROWTH * (number + 1) / most
        run = trials.candidate(aims.base, growth, generator(_FIRST_SEED + number))
        if run is not None:
            yield run


def _among_constants(aims: Aims, trials: Trials, most: int) -> Iterator[ReferenceRun]:
    """The runs of ``most`` candidates whose values are around those of tables, as of sizes of coins."""
    has_some = any(range_.constants for range_ in trials.ranges.values())
    for number in range(most if has_some else 0):
        if (run := trials.around(aims.base, generator(_FIRST_SEED + number))) is not None:
            yield run


def _crossing(aims: Aims, trials: Trials, most: int) -> Iterator[ReferenceRun]:
    """Runs between the ordinary sample and candidates, in which a value has crossed one threshold and not yet
    another one.
    """
    comparisons = Comparisons.of(aims.scope, aims.names)
    if not comparisons.pairs:
        return
    inner = replace(trials, run=trials.reading(comparisons.names), left=2 * most)
    base = inner.result(aims.base.frames)
    if base is None:
        return
    for run in _grown(aims, inner, most):
        if comparisons.sides(run) == comparisons.sides(base):
            continue
        middle = between(base, run, comparisons, inner.result, lambda run: bool(aims.met(run)))
        if middle is not None and (plain := trials.result(middle.frames)) is not None:
            yield plain


def _nearest(run: ReferenceRun, aims: Aims, trials: Trials) -> ReferenceRun | None:
    """A run that meets the same aims as ``run``, nearer to the ordinary sample; None if rounding decides
    whether it does.
    """
    wanted, base = aims.met(run), aims.base

    def nearer(frames: Sequence[Arrays]) -> ReferenceRun | None:
        result = trials.result(frames)
        return result if result is not None and wanted <= aims.met(result) else None

    # Inputs that do not matter stay as they are.
    for name in run.feeds if len(run.feeds) <= _MAX_INPUTS else ():
        frames = [
            {**frame, name: ordinary[name]} if name in ordinary else frame
            for frame, ordinary in zip(run.frames, base.frames, strict=True)
        ]
        run = nearer(frames) or run
    runs = [run]
    while len(runs) <= _HALVINGS and (half := nearer(half_way(runs[0], base))) is not None:
        runs = [half, *runs]
    # Of those with the same variety the nearest.
    ordered = sorted(runs, key=lambda one: -aims.variety(one))
    return next((one for one in ordered if _is_stable(one, aims, trials)), None)


def _is_stable(run: ReferenceRun, aims: Aims, trials: Trials) -> bool:
    """Whether outputs stay the same if the inputs of ``run`` are a little larger, smaller, or both."""
    rng, wanted = generator(), aims.met(run)
    for signs in ((1.0,), (-1.0,), (-1.0, 1.0)):
        other = trials.result(
            [
                {
                    name: _moved(array, rng.choice(signs, array.shape), trials.ranges.get(name))
                    for name, array in frame.items()
                }
                for frame in run.frames
            ]
        )
        if other is None or not wanted <= aims.met(other):
            return False
        pairs = (
            pair
            for name in aims.outputs
            for pair in zip(values_of(name, [run]), values_of(name, [other]), strict=True)
        )
        if any(_share_of_same(*pair) < _SAME for pair in pairs):
            return False
    return True


def _moved(array: Array, signs: Array, range_: Range | None) -> Array:
    """``array``, with larger or smaller floats, and integers that become floats."""
    is_rounded = range_ is not None and range_.floats is not None and not range_.is_firm
    if not (is_float(array.dtype) or is_rounded):
        return array
    numbers = array.astype(np.float64) * (1 + NEAR * signs.astype(np.float64))
    return np.asarray(numbers if is_float(array.dtype) else np.rint(numbers)).astype(array.dtype)


def _share_of_same(one: Array, other: Array) -> float:
    if one.shape != other.shape:
        return 0.0
    if not one.size:
        return 1.0
    if not is_float(one.dtype):
        return float(np.mean(one == other))
    first, second = one.astype(np.float64), other.astype(np.float64)
    return float(np.mean(np.abs(first - second) <= _TOLERANCE * np.abs(first).max()))


def _named(run: ReferenceRun, aims: Aims, number: int) -> ReferenceRun:
    """``run`` as a sample with values far from the ordinary."""
    changed = {
        name: Far()
        for frame, ordinary in zip(run.frames, aims.base.frames, strict=True)
        for name, array in frame.items()
        if not np.array_equal(array, ordinary[name])
    }
    changes = aims.met(run)
    name = f"values that change {listing(sorted(changes), _MAX_NAMED)}"
    name = f"{name} ({number + 1})" if number else name
    return replace(run, name=name, far=changed, changes=changes)
