"""A model in an EP's number format, emulated on the CPU."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.dtypes import Array, Arrays
from hatch_epcontext.graph.external import read_data
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT, NodeFacts
from hatch_epcontext.graph.number_format import NumberFormat
from hatch_epcontext.graph.repairs import name_nodes
from hatch_epcontext.graph.rewrites.branches import if_as_where
from hatch_epcontext.graph.rewriting import apply
from hatch_epcontext.graph.rounding import emulate as round_values
from hatch_epcontext.graph.rounding import (
    hidden_faults,
    rounded,
    widen,
    with_moved_decisions,
    with_thresholds,
)
from hatch_epcontext.graph.scope import Scope, Types
from hatch_epcontext.graph.selections import with_reads
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.comparison.levels import (
    MAX_RARE,
    WORTH_RUNNING,
    Level,
    Levels,
    is_whole,
)
from hatch_epcontext.worker.comparison.runs import (
    Reference,
    ReferenceRun,
    are_enough,
    run_frames,
)
from hatch_epcontext.worker.ort_values import value_types
from hatch_epcontext.worker.results import SENSITIVE
from hatch_epcontext.worker.session import open_unoptimized
from hatch_epcontext.worker.synthetic import NEAR, far_values

_HALVINGS = 4
"""How often the span of sizes in which wrong results begin is halved: to less than a tenth of a size."""

_MAX_UNDECIDED = 1 / 4
"""The share of usual samples up to which those are exceptions in which rounding flips decisions. Measured
with float16: up to 22 % where images are uniform, or scores nearly equal; 32 % where all pitches are the same
one, at the border of two notes.
"""

_MOVES = 4
"""How often floats by which a model decides are moved: a single one may flip in one direction only."""

_DRAWS = 3
"""How many other numbers of a size are tried. Measured with float16: all are wrong, or one in eight, where a
sum of terms of both signs is about 0.
"""

_MAX_TRIALS = 1e9
"""The most multiply-adds for that: less than a second."""


@dataclass(frozen=True)
class FormattedModel:
    """A ``prepared`` model, whose values have the ``types``, that an EP computes in ``format``.

    ``skipped``: the names of nodes that run on the CPU. ``integer_bits``: those of the EP's integers.
    """

    prepared: onnx.ModelProto
    types: Types
    format: NumberFormat
    skipped: Set[str]
    integer_bits: int = 64

    @staticmethod
    def load(
        path: Path,
        format_: NumberFormat,
        skipped: Set[str] = frozenset(),
        integer_bits: int = 64,
    ) -> FormattedModel | None:
        """The model in the file ``path``; None if it does not fit into memory twice, or has open shapes."""
        prepared = onnx.load(path, load_external_data=False)
        sizes = (math.prod(tensor.dims) * 4 for tensor in graph.stored_tensors(prepared.graph))
        is_fixed = all(graph.facts(value).is_fixed for value in graph.inputs(prepared.graph))
        if sum(sizes) >= PROTOBUF_LIMIT // 2 or not is_fixed:
            return None
        read_data(prepared, path.parent)
        widen(prepared)
        name_nodes(prepared.graph)
        types = value_types(prepared, path)
        # Rounding does not look into branches.
        apply(prepared, [if_as_where], None, types, kept=skipped)
        return FormattedModel(prepared, types, format_, skipped, integer_bits)

    @cached_property
    def scope(self) -> Scope:
        """The values of the prepared model."""
        return Scope.of(self.prepared, self.types)

    @cached_property
    def optimistic(self) -> NodeFacts | None:
        """A node that the EP computes less exactly than its format, which the emulation cannot show."""
        for node in self.computed:
            if node.op_type in self.format.inexact:
                reason = f"has a kernel that is less exact than {self.format.name}"
                return NodeFacts(node.name, graph.operator(node), reason)
            if fault := next(hidden_faults(self.format, node, self.scope), None):
                return NodeFacts(node.name, graph.operator(node), fault.text)
        return None

    @property
    def computed(self) -> list[onnx.NodeProto]:
        """The nodes that the EP computes."""
        return [node for node in self.scope.nodes if node.name not in self.skipped]

    def rounding(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """A copy of ``model``, the prepared one or that with more outputs, which rounds to the format where
        the EP computes it.
        """
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        round_values(copy, self.scope, self.format, self.skipped)
        return copy


def emulate(model: FormattedModel, reference: Reference, limits: Tolerance) -> Levels:
    """Compute ``model`` in its format on all samples of the ``reference``."""
    rounding = _session(model.rounding(model.prepared), reference)
    return Levels(_level(rounding, run, reference, limits) for run in reference.runs)


def conditioned(
    levels: Levels, model: FormattedModel, reference: Reference, limits: Tolerance
) -> Levels:
    """``levels`` without ordinary samples after the first at which the source itself is wrong if only its
    inputs are as inexact as the format of ``model``, or numbers with which it compares values are a little
    larger or smaller: these are near a pole or a threshold, and say nothing of others. All, if too few are
    left. Also without those looked for that the format makes wrong: it may be exact enough in others; and
    without large integers of which an output is a float that the format lacks.
    """
    levels = Levels(
        level
        for level in levels
        if (not level.run.changes or level.margin >= 0)
        and not (is_whole(level.run) and level.run.largest > model.format.largest)
    )
    poor = [level for level in levels[1:] if not level.run.far and level.snr < WORTH_RUNNING]
    nearby = [*_nearby(model, reference)] if poor else []
    dropped = [
        level
        for level in poor
        if any(
            agreement.above < SENSITIVE
            for session, change in nearby
            for frame in reference.compare_run(session, _changed(level.run, change), limits)
            for agreement in frame
        )
    ]
    kept = Levels(level for level in levels if all(level is not other for other in dropped))
    left, every = ((level.run for level in some) for some in (kept, levels))
    return kept if are_enough(left, every) else levels


@dataclass(frozen=True)
class Decisions:
    """Those of the source in runs of the ``reference``: which boxes, above which limit, rounded to what."""

    model: FormattedModel
    reference: Reference
    limits: Tolerance

    def flip(self, run: ReferenceRun, outputs: Iterable[str]) -> bool:
        """Whether the source itself is wrong in all ``outputs`` for ``run`` if it decides by floats that are
        as inexact as the format: then their values there say nothing of others.
        """
        left = {*outputs}
        if not left or run.far:
            return False
        for session in self._moved:
            # Of indices that become too large no result is known.
            with contextlib.suppress(Exception):
                for frame in self.reference.compare_run(session, run, self.limits):
                    left -= {agreement.output for agreement in frame if agreement.above < SENSITIVE}
            if not left:
                return True
        return False

    @cached_property
    def _moved(self) -> list[ort.InferenceSession]:
        rng, unit = np.random.default_rng(0), self.model.format.unit
        prepared, scope = self.model.prepared, self.model.scope
        models = (with_moved_decisions(prepared, scope, unit, rng) for _ in range(_MOVES))
        return [_session(model, self.reference) for model in models if model is not None]


def decided(levels: Levels, decisions: Decisions) -> tuple[Levels, Mapping[str, str]]:
    """``levels`` without samples that the format makes wrong because its rounding flips ``decisions``; and
    the outputs of which that are too many, with the reason why they are inconclusive. All samples, if too few
    are left.
    """
    flipped = [
        level for level in levels if level.margin < 0 and decisions.flip(level.run, level.wrong)
    ]
    left = Levels(level for level in levels if all(level is not other for other in flipped))
    if not are_enough((level.run for level in left), (level.run for level in levels)):
        return levels, {}
    usual = sum(level.run.usual for level in levels)
    counts = Counter(name for level in flipped if level.run.usual for name in level.wrong)
    return left, {
        name: f"rounding to {decisions.model.format.name} flips what it depends on in {count} of {usual} "
        "samples"
        for name, count in counts.items()
        if count > _MAX_UNDECIDED * usual
    }


def without_chance(
    levels: Levels, model: FormattedModel, reference: Reference, limits: Tolerance
) -> Levels:
    """``levels`` without larger numbers that the format makes wrong by chance, such as differences of about
    equal sums: other numbers of the same size are right.
    """
    facts = {value.name: graph.facts(value) for value in graph.inputs(model.prepared.graph)}
    rng, trials = np.random.default_rng(0), _Trials(model, reference, limits)

    def is_by_chance(run: ReferenceRun) -> bool:
        if not run.larger <= facts.keys() or not trials.can_run(run, _DRAWS):
            return False
        draws = (
            {name: far_values(facts[name], run.far[name], rng) for name in sorted(run.larger)}
            for _ in range(_DRAWS)
        )
        return not any(trials.is_wrong(run, {**run.feeds, **larger}) for larger in draws)

    return Levels(
        level
        for level in levels
        if not (level.run.is_larger and level.margin < 0 and is_by_chance(level.run))
    )


def with_rare(levels: Levels) -> Levels:
    """``levels``, of which the usual ones that the format makes wrong are rare, if they are few, without the
    first: the EP computes as its format does, and an app may never have such inputs.
    """
    usual = [level for level in levels if level.run.usual]
    wrong = [level for level in usual if level.margin < 0]
    if levels[0].margin < 0 or len(wrong) > MAX_RARE * len(usual):
        return levels
    return Levels(replace(level, rare=level.run.usual and level.margin < 0) for level in levels)


@dataclass(frozen=True)
class _Trials:
    """Runs the source and its emulation in the format of ``model`` on other feeds."""

    model: FormattedModel
    reference: Reference
    limits: Tolerance

    def can_run(self, run: ReferenceRun, number: int) -> bool:
        """Whether it can do so with feeds like those of ``run``, and ``number`` times does not take long."""
        cost = 2 * number * self.reference.facts.cost.multiply_adds
        return len(run.frames) == 1 and not run.candidates and cost <= _MAX_TRIALS

    def is_wrong(self, run: ReferenceRun, feeds: Arrays) -> bool:
        """Whether the format makes ``feeds`` wrong, instead of those of ``run``."""
        exact, rounding = self._sessions
        outputs = tuple(run_frames(exact, [feeds], self.reference.facts.states))
        trial = replace(run, frames=(feeds,), outputs=outputs)
        return _level(rounding, trial, self.reference, self.limits).margin < 0

    @cached_property
    def _sessions(self) -> tuple[ort.InferenceSession, ort.InferenceSession]:
        model = self.model
        rounding = model.rounding(model.prepared)
        return _session(model.prepared, self.reference), _session(rounding, self.reference)


def narrowed(
    run: ReferenceRun, model: FormattedModel, reference: Reference, limits: Tolerance
) -> ReferenceRun:
    """``run``, in which the format makes larger numbers wrong, as one that is far only in the inputs that are
    wrong alone, if there are some, and above the size at which that begins. The same ``run`` if the emulation
    shows nothing, or would take long.
    """
    larger = [name for name in run.far if name in run.larger]
    trials = _Trials(model, reference, limits)
    if not trials.can_run(run, len(larger) + _HALVINGS):
        return run

    def is_wrong(names: Sequence[str], factor: float = 1.0) -> bool:
        feeds = dict(run.feeds)
        for name in larger:
            array = run.feeds[name]
            numbers = array.astype(np.float64) * factor
            scaled = np.rint(numbers) if array.dtype.kind in "iu" else numbers
            feeds[name] = scaled.astype(array.dtype) if name in names else reference.feeds[name]
        return trials.is_wrong(run, feeds)

    if not is_wrong(larger):
        return run
    wrong = [name for name in larger if is_wrong([name])] or larger
    right, factor = run.far[wrong[0]].low / run.far[wrong[0]].high, 1.0
    # What is counted may be right by chance, at some of its moments.
    is_counted = any(run.far[name].is_counted for name in wrong)
    for _ in range(0 if is_counted else _HALVINGS):
        middle = math.sqrt(right * factor)
        right, factor = (right, middle) if is_wrong(wrong, middle) else (middle, factor)
    others = {name: far for name, far in run.far.items() if name not in larger}
    ends = {name: float(f"{right * run.far[name].high:.2g}") for name in wrong}
    beyond = {name: replace(run.far[name], low=low) for name, low in ends.items()}
    return replace(run, far={**others, **beyond})


def _nearby(
    model: FormattedModel, reference: Reference
) -> Iterator[tuple[ort.InferenceSession, Callable[[Array], Array]]]:
    """Sessions of the source, some with thresholds beside its own, and what makes its inputs inexact."""
    half, exact = model.format.unit / 2, _session(model.prepared, reference)
    rng = np.random.default_rng(0)

    def move(array: Array) -> Array:
        signs = rng.choice((-1, 1), array.shape)
        return np.asarray(array.astype(np.float64) * (1 + half * signs), np.float32)

    yield exact, partial(rounded, format_=model.format)
    yield exact, move
    for change in (-NEAR, NEAR):
        least = math.copysign(model.format.least, change)
        if (moved := with_thresholds(model.prepared, 1 + change, least)) is not None:
            yield _session(moved, reference), move


def _changed(run: ReferenceRun, change: Callable[[Array], Array]) -> ReferenceRun:
    """``run`` with floats that ``change`` returns."""
    frames = (
        {name: change(a) if a.dtype == np.float32 else a for name, a in frame.items()}
        for frame in run.frames
    )
    return replace(run, frames=tuple(frames))


def _session(model: onnx.ModelProto, reference: Reference) -> ort.InferenceSession:
    with_inner = with_reads(model, reference.facts.selections.rest)
    return open_unoptimized(with_inner.SerializeToString())


def _level(
    session: ort.InferenceSession, run: ReferenceRun, reference: Reference, limits: Tolerance
) -> Level:
    agreements = itertools.chain(*reference.compare_run(session, run, limits))
    return Level.of(run, agreements, reference.facts, limits)
