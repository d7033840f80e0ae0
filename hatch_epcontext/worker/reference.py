"""The source model on the CPU EP, the reference of all comparisons: its inputs and outputs.

The integers of a dynamically quantized model are noisy themselves. If its quantization is undone, the float
form is the reference, and says how far the integers are from it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph, inference
from hatch_epcontext.graph.batch.follow import batch_of_outputs
from hatch_epcontext.graph.branches import Branching, branchings
from hatch_epcontext.graph.cost import cost
from hatch_epcontext.graph.dequantize import dequantize, is_quantized
from hatch_epcontext.graph.dtypes import Array, Arrays, is_float
from hatch_epcontext.graph.external import load_whole, save_whole
from hatch_epcontext.graph.facts import Cost
from hatch_epcontext.graph.repairs import separate_outputs
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.selections import find_selections
from hatch_epcontext.graph.values.bounds import HIDING, hidden_scores
from hatch_epcontext.graph.versions import usual_versions
from hatch_epcontext.worker.changing import Aims, Trials, changing_runs
from hatch_epcontext.worker.comparison.measures import OutputFacts
from hatch_epcontext.worker.comparison.natures import output_facts
from hatch_epcontext.worker.comparison.runs import (
    Facts,
    Reference,
    ReferenceRun,
    are_enough,
    finite,
    for_other_numbers,
    is_constant,
    is_nowhere_finite,
    run_frames,
    sides,
    tells,
    values_of,
    with_branches,
    with_changes,
    with_telling,
)
from hatch_epcontext.worker.inputs import constant, samples_of, sized
from hatch_epcontext.worker.noise import compared, with_noise
from hatch_epcontext.worker.protocol import announce
from hatch_epcontext.worker.results import FEW_SAMPLES, Agreement
from hatch_epcontext.worker.samples import MANY, SOME, Sample, run_samples
from hatch_epcontext.worker.session import cpu_options, open_session, set_model_path
from hatch_epcontext.worker.source import ranges_for, running_source, typed_graph
from hatch_epcontext.worker.states import recomputed, state_pairs

_NO_SCORE = 0.05
"""Scores and probabilities up to this value mean that nothing was detected."""

_FEW = 4
"""The most samples for a model that computes as the CPU does."""

_LASTS = 0.5
"""The part of a difference between states from which, after 16 frames, they are lasting: LSTMs leave less."""

_SLOW = 2e10
"""Multiply-adds from which two samples are not run at once: a run takes about a second."""

_SAME = 1e-3
"""The relative difference that another order of additions may make in float32; ten times that in float16."""

_SMALLER = 2.0**-4
"""The factor of a sample that is smaller than another one: exact, and no index becomes too large."""


def reference(
    model: Model,
    fixed: onnx.ModelProto,
    path: Path | None = None,
    folded: onnx.GraphProto | None = None,
    *,
    emulated: bool = True,
) -> Reference:
    """Run the source model on the CPU, with its constants fed as inputs.

    ``fixed``: the model after its configuration was applied; its inputs are fed. ``path``: the file of
    another model to run instead. ``folded``: the `typed_graph` of ``fixed``, or of that simplified, which
    shows more of the inputs and outputs. ``emulated``: whether a number format is emulated on the samples; if
    not, a few are enough, unless an output is the same in all of them. Raises ModelError when it cannot be
    run.
    """
    inputs = [graph.facts(value) for value in graph.inputs(fixed.graph)]
    states = state_pairs(fixed, model.validate.states, model.key / "validate" / "states")
    synthetic = model.validate.inputs in SYNTHETIC
    announce("opening the source model on the CPU")
    with running_source(model, fixed):
        chosen, scope = find_selections(fixed), Scope(fixed.graph)
        typed, opset = inference.inferred(fixed), graph.opset(fixed)
        if folded is None:
            folded = typed_graph(fixed, model)
        needs = _cost(typed, folded)
        parts = [*branchings(fixed.graph, folded)]
        deciders = tuple(dict.fromkeys(part.condition for part in parts if part.condition))
        fed = {tensor.name for tensor in inputs}
        # One mask is usually that of all layers.
        scores = set() if path else {*hidden_scores(scope)[:1]} - chosen.values
        inner = chosen.values.union(scores, (name for name in deciders if name not in fed))
        cpu = _SourceSession.open(model, path or model.path, states, inner)
        ranges = ranges_for(folded, inputs, model)
        names = [value.name for value in fixed.graph.output]
        for most in (MANY,) if emulated else (SOME, MANY):
            feeds = samples_of(inputs, model, ranges, needs.multiply_adds, states, most)
            announce("running the source model on the CPU")
            runs = run_samples(cpu.run, feeds, synthetic=synthetic)
            if all(tells(name, runs) for name in names):
                break
        outputs = output_facts(typed, chosen.reads, opset) | output_facts(folded, names, opset)
        random = cpu.random(runs[0])
        has_batch = all(tensor.is_fixed for tensor in inputs) and needs.multiply_adds < _SLOW
        batch = cpu.batch(runs) if has_batch else {}
        if ranges:
            own = [name for name in names if name not in random]
            trials = Trials(cpu.run, cpu.reading, sized(inputs, model), ranges, states)
            runs += changing_runs(Aims.of(runs, own, deciders, scope), trials, needs.multiply_adds)
        if synthetic and scores:
            runs = _with_something_left(runs, scores)
        runs = _choose(runs, outputs, deciders, synthetic=synthetic)
        rounding = recomputed(fixed.graph, states)
        is_lasting = not chosen.values and cpu.is_lasting(runs, rounding)
    reasons = dict(_inconclusive(runs, scope))
    if synthetic:
        reasons = dict(_untaken(runs, parts)) | reasons
    outputs = _with_behaviour(outputs, states, random, reasons)
    facts = Facts(states, outputs, chosen, is_lasting, None, batch, ranges, deciders, needs)
    return Reference(tuple(runs), facts)


def _cost(typed: onnx.GraphProto, folded: onnx.GraphProto) -> Cost:
    """That of a graph, of which sizes that it computes itself are known only once they are ``folded``."""
    plain, needs = cost(typed), cost(folded)
    return replace(needs, multiply_adds=max(plain.multiply_adds, needs.multiply_adds))


def _with_something_left(runs: list[ReferenceRun], scores: Set[str]) -> list[ReferenceRun]:
    """``runs`` without those after the first in which a mask hides all ``scores``, so that nothing is left to
    choose from. All, if too few are left. They do not keep the scores.
    """

    def is_hidden(run: ReferenceRun) -> bool:
        frames = (frame[name] for frame in run.candidates for name in scores if name in frame)
        return any(array.size and float(array.max()) <= -HIDING for array in frames)

    left = [run for index, run in enumerate(runs) if index == 0 or not is_hidden(run)]
    runs = left if are_enough(left, runs) else runs
    others = frozenset(name for frame in runs[0].candidates for name in frame) - scores
    return [
        replace(run, candidates=tuple(_some(c, others) for c in run.candidates if others))
        for run in runs
    ]


def _with_behaviour(
    outputs: Mapping[str, OutputFacts],
    states: Mapping[str, str],
    random: Container[str],
    reasons: Mapping[str, str],
) -> dict[str, OutputFacts]:
    """``outputs``, with which of them are states or random, and why others are inconclusive."""
    return {
        name: replace(
            facts,
            is_state=name in states.values(),
            is_random=name in random,
            inconclusive="" if name in random else reasons.get(name, ""),
        )
        for name, facts in outputs.items()
    }


@dataclass(frozen=True)
class _SourceSession:
    """The model ``source`` in a session that also returns the values ``inner``."""

    session: ort.InferenceSession
    source: onnx.ModelProto
    path: Path
    model: Model
    states: Mapping[str, str]
    inner: frozenset[str]

    @staticmethod
    def open(
        model: Model, path: Path, states: Mapping[str, str], inner: frozenset[str]
    ) -> _SourceSession:
        """Open the file ``path``, made of ``model``."""
        source = onnx.load(path, load_external_data=False)
        return _SourceSession(_open(source, path, inner), source, path, model, states, inner)

    @cached_property
    def frozen(self) -> Arrays:
        """The values of the inputs that the configuration makes constants."""
        return {
            value.name: constant(self.model, graph.facts(value))
            for value in self.source.graph.input
            if value.name in self.model.constants
        }

    def run(self, sample: Sample) -> ReferenceRun:
        """The run of ``sample``."""
        feeds = ({**arrays, **self.frozen} for arrays in sample.frames)
        frames = [*run_frames(self.session, feeds, self.states)]
        outputs = frozenset(value.name for value in self.source.graph.output)
        return ReferenceRun(
            sample.name,
            sample.frames,
            sample.nature,
            sample.usual,
            sample.far,
            outputs=tuple(_some(arrays, outputs) for arrays in frames),
            candidates=tuple(_some(arrays, self.inner) for arrays in frames) if self.inner else (),
        )

    def reading(self, names: frozenset[str]) -> Callable[[Sample], ReferenceRun]:
        """What `run` does, in a session that also returns the values ``names``."""
        inner = self.inner | names
        return replace(self, session=_open(self.source, self.path, inner), inner=inner).run

    def random(self, first: ReferenceRun) -> frozenset[str]:
        """The outputs that differ between ``first`` and another run of the same sample."""
        if not any(map(graph.is_random, self.source.graph.node)):
            return frozenset()
        return _differing(first, self.run(first))

    def batch(self, runs: Sequence[ReferenceRun]) -> Mapping[str, Mapping[str, int]]:
        """The axis of the batch: see `Validated`. ``runs``: those of single samples."""
        shapes = {name: array.shape for name, array in runs[0].feeds.items()}
        for inputs in self._batch_axes(shapes):
            outputs = batch_of_outputs(self.source, shapes, inputs, self.frozen)
            if outputs is None:
                continue
            # The graph may reject another batch, or such values; and no output may differ.
            with contextlib.suppress(Exception):
                if self._are_apart(runs, inputs, outputs):
                    return {"inputs": inputs, "outputs": outputs}
        return {}

    def _are_apart(
        self, runs: Sequence[ReferenceRun], inputs: Mapping[str, int], outputs: Mapping[str, int]
    ) -> bool:
        """Whether two samples in one run, if possible of different size, have the outputs of two runs."""
        first = runs[0]
        others = [run for run in runs[1:] if run.usual]
        other = max(others, key=lambda run: len(_differing(first, run)), default=first)
        small = {
            name: np.multiply(array, _SMALLER, dtype=array.dtype)
            if is_float(array.dtype)
            else array
            for name, array in other.feeds.items()
        }
        if other is first:
            small = {name: np.flip(array) for name, array in small.items()}
        # Outputs that are the same for all inputs show nothing.
        pairs = ((first, run) for run in (self.run(Sample("", (small,))), other))
        pair = next((pair for pair in pairs if _differing(*pair)), ())
        together = {
            name: np.concatenate([run.feeds[name] for run in pair], axis)
            for name, axis in inputs.items()
        }
        (both,) = self.run(Sample("", (together,))).outputs
        halves = {name: np.split(both[name], 2, axis) for name, axis in outputs.items()}
        return all(
            _is_same(halves[name][number], run.outputs[0][name])
            for name in outputs
            for number, run in enumerate(pair)
        )

    def _batch_axes(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
        """What may be the axis of the batch in all inputs with these ``shapes``."""
        values = [value for value in self.session.get_inputs() if value.name in shapes]
        symbols = (size for value in values[:1] for size in value.shape)
        for symbol in (*(size for size in symbols if isinstance(size, str)), None):
            axes = {value.name: _open_axis(value.shape, symbol) for value in values}
            if -1 not in axes.values():
                yield axes

    def is_lasting(self, runs: Sequence[ReferenceRun], names: Iterable[str]) -> bool:
        """Whether a difference in the first states called ``names`` lasts for the frames of the longest of
        ``runs``.
        """
        longest = max(runs, key=lambda run: len(run.frames))
        floats = [name for name in names if is_float(longest.feeds[name].dtype)]
        return len(longest.frames) > 1 and self._left_of(longest, floats) > _LASTS

    def _left_of(self, run: ReferenceRun, names: Iterable[str]) -> float:
        """The part of a difference in the first states ``names`` that is left after the frames of ``run``.

        Means and counters keep it; the gates of LSTMs turn it into other differences.
        """
        first, *others = run.frames
        rng, left = np.random.default_rng(0), 0.0
        # The graph may reject such values.
        with contextlib.suppress(Exception), np.errstate(invalid="ignore"):
            more = {name: rng.integers(1, 3, first[name].shape) for name in names}
            changed = {
                n: np.add(first[n], array).astype(first[n].dtype) for n, array in more.items()
            }
            again = self.run(Sample("", ({**first, **changed}, *others)))
            for name, array in more.items():
                last = self.states[name]
                behind = np.subtract(
                    again.outputs[-1][last], run.outputs[-1][last], dtype=np.float64
                )
                left = max(left, float((behind * array).sum() / (array**2).sum()))
        return left


def _open(source: onnx.ModelProto, path: Path, inner: frozenset[str]) -> ort.InferenceSession:
    """A session that also returns the values called ``inner``, unless ONNX Runtime cannot."""
    options = cpu_options()
    set_model_path(path, options)
    opset = graph.opset(source)
    source = usual_versions(source)
    is_changed = separate_outputs(source) or graph.opset(source) != opset
    if inner - {value.name for value in source.graph.output}:
        with contextlib.suppress(Exception):
            return open_session(graph.with_outputs(source, inner).SerializeToString(), options)
    if is_changed:
        return open_session(source.SerializeToString(), options)
    return open_session(path, cpu_options())


def _some(arrays: Arrays, names: frozenset[str]) -> Arrays:
    return {name: array for name, array in arrays.items() if name in names}


def _differing(one: ReferenceRun, other: ReferenceRun) -> frozenset[str]:
    """The outputs that differ between the first frames of two runs."""
    return frozenset(
        name
        for name, array in one.outputs[0].items()
        if not np.array_equal(array, other.outputs[0][name], equal_nan=array.dtype.kind == "f")
    )


def _open_axis(shape: Sequence[int | str | None], symbol: str | None) -> int:
    """The only axis of the size ``symbol``, or without that the only open one; -1 if there is no such axis.

    Converters name each tensor's batch differently, or not at all.
    """
    axes = [
        axis
        for axis, size in enumerate(shape)
        if size == symbol or (symbol is None and not isinstance(size, int))
    ]
    return axes[0] if len(axes) == 1 else -1


def _is_same(out: Array, ref: Array) -> bool:
    """Whether values are equal within the rounding of floats, and others exactly."""
    if out.shape != ref.shape or not is_float(ref.dtype):
        return bool(np.array_equal(out, ref))
    limit = _SAME if ref.dtype.itemsize > 2 else 10 * _SAME
    out, ref = out.astype(np.float64), ref.astype(np.float64)
    sizes = np.sort(np.abs(ref[np.isfinite(ref) & (ref != 0)]))
    # What is nearly zero among larger values is rounding. NumPy's own median imports a large module.
    atol = limit * float(sizes[sizes.size // 2]) if sizes.size else 0.0
    return bool(np.allclose(out, ref, limit, atol, equal_nan=True))


def _choose(
    runs: Sequence[ReferenceRun],
    outputs: Mapping[str, OutputFacts],
    deciders: Sequence[str],
    *,
    synthetic: bool,
) -> list[ReferenceRun]:
    """``runs``; the target runs the first few too, and those in which an output shows more.

    Of given ones those are the sequences of frames.
    """
    if synthetic:
        runs = _scoring_first(runs, outputs)
        on_target = with_branches(
            with_telling(with_changes(runs[:_FEW], runs), runs), runs, deciders
        )
    else:
        sequences = [run for run in runs if len(run.frames) > 1]
        number = 1 if len(sequences) > 1 else FEW_SAMPLES
        on_target = [*runs[:number], *sequences]
    names = {run.name for run in on_target}
    return [replace(run, on_target=run.name in names) for run in runs]


def _scoring_first(
    runs: Sequence[ReferenceRun], outputs: Mapping[str, OutputFacts]
) -> list[ReferenceRun]:
    """``runs``, first one in which all or most scores are not near zero: zeros are right by accident."""
    first = runs[0]

    def score(run: ReferenceRun) -> float:
        scores = (outputs[name].scores_of(array) for name, array in run.outputs[0].items())
        largest = (np.abs(array).max(initial=0) for array in scores if array is not None)
        return min(map(float, largest), default=math.inf)

    if score(first) < _NO_SCORE:
        single = (run for run in runs if run.usual and len(run.frames) == 1)
        first = max(single, key=score, default=first)
    return [first, *(run for run in runs if run is not first)]


def _inconclusive(runs: Sequence[ReferenceRun], scope: Scope) -> Iterator[tuple[str, str]]:
    """The outputs whose comparison is inconclusive, each with the reason."""
    for name in runs[0].outputs[0]:
        values = values_of(name, runs)
        if values[0].dtype.kind in "OSU":
            continue
        if not any(array.size for array in values):
            yield name, "it has no values"
        elif is_nowhere_finite(values_of(name, (run for run in runs if run.usual))):
            yield name, "the CPU's values are NaN or Inf everywhere"
        elif scope.varies([name]) and is_constant(values):
            value = next(array[finite(array)][0] for array in values if finite(array).any())
            yield name, f"the CPU's value is {value} everywhere, for all inputs"


def _untaken(runs: Sequence[ReferenceRun], parts: Iterable[Branching]) -> Iterator[tuple[str, str]]:
    """The outputs that depend on a branch that none of ``runs`` takes, each with the reason."""
    for part in parts:
        taken = frozenset(side for run in runs for _, side in sides(run, [part.condition]))
        if reason := part.untaken(taken):
            yield from ((name, reason) for name in part.outputs)


def write_float_form(source: Path, result: Path, *, static: bool = False) -> int:
    """Write the model at ``source`` to ``result`` without dynamic quantization; with ``static`` without any.

    Returns the number of operators undone; if that is 0, nothing is written.
    """
    announce("undoing the quantization of the model")
    onnx_model = load_whole(source)
    if undone := dequantize(onnx_model, static=static):
        save_whole(onnx_model, result)
    return undone


def source_reference(
    model: Model,
    fixed: onnx.ModelProto,
    path: Path,
    floats: Path | None,
    folded: onnx.GraphProto | None = None,
    *,
    emulated: bool = True,
) -> Reference:
    """The reference of ``model``: its float form, if there is one, and how near its integers are to that.
    Else the source, and its noise if it is quantized.

    ``fixed``, ``folded`` and ``emulated``: as for `reference`; ``path``: the file of ``fixed``; ``floats``:
    that of its float form. Raises BuildError when an output of that has another shape than the source's, and
    ModelError when the model cannot be run.
    """
    if floats is None:
        expected = reference(model, fixed, folded=folded, emulated=emulated)
        return with_noise(path, expected) if is_quantized(fixed) else expected
    form = onnx.load(floats, load_external_data=False)
    expected = reference(model, form, floats, folded, emulated=emulated)
    with running_source(model, fixed):
        session = open_session(path, cpu_options())
        announce("running the source model on the CPU")
        integers = [*compared(session, for_other_numbers(expected))]
    equal = Agreement("", 0.0, 1.0)
    nearest = min(
        integers, key=lambda item: math.inf if item.snr is None else item.snr, default=equal
    )
    return replace(expected, facts=replace(expected.facts, integers=nearest))
