"""The source model on the CPU EP, the reference of all comparisons: its inputs and outputs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.errors import ModelError
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.arrays import Arrays, is_float
from hatch_epcontext.graph.builder import separate_outputs
from hatch_epcontext.graph.cost import multiply_adds
from hatch_epcontext.worker.comparison.measures import Nature
from hatch_epcontext.worker.comparison.outputs import (
    depend_on_chance,
    depend_on_inputs,
    natures,
    quantization_steps,
)
from hatch_epcontext.worker.comparison.run_errors import source_failed
from hatch_epcontext.worker.comparison.runs import (
    Facts,
    Reference,
    ReferenceRun,
    finite,
    is_constant,
    is_nowhere_finite,
    run_steps,
    values_of,
    with_telling,
)
from hatch_epcontext.worker.comparison.selections import selections
from hatch_epcontext.worker.comparison.states import state_pairs
from hatch_epcontext.worker.configured import ranges_for
from hatch_epcontext.worker.dummy.attempts import run_samples
from hatch_epcontext.worker.dummy.inputs import constant
from hatch_epcontext.worker.dummy.samples import Sample, number_of_long_steps
from hatch_epcontext.worker.progress import step
from hatch_epcontext.worker.session import cpu_options, open_session, set_model_path

_MAX_ON_TARGET = 8
"""The most given samples that are run on the target too."""

_NO_SCORE = 0.05
"""Scores and probabilities up to this value mean that nothing was detected."""

_FEW = 4
"""The most samples for a model that computes as the CPU does."""


def reference(model: Model, fixed: onnx.ModelProto, path: Path | None = None) -> Reference:
    """Run the source model on the CPU, with its constants fed as inputs.

    ``fixed``: the model after its configuration was applied; its inputs are fed. ``path``: the file of
    another form of the source to run instead. Raises ModelError when it cannot be run.
    """
    path = path or Path(model.path)
    source = onnx.load(path, load_external_data=False)
    frozen = {
        value.name: constant(model, graph.facts(value))
        for value in graph.inputs(source.graph)
        if value.name in model.constants
    }
    inputs = [graph.facts(value) for value in graph.inputs(fixed.graph)]
    states = state_pairs(fixed, model.validate.states, model.key / "validate" / "states")
    step("opening the source model on the CPU")
    start = time.monotonic()
    try:
        chosen = selections(fixed)
        inner = chosen.values
        session = _open(source, path, inner)
        opened = f"; opening it took {time.monotonic() - start:.1f} s"
        outputs = [value.name for value in source.graph.output]
        cpu = _SourceSession(session, frozen, model, opened, outputs, inner)
        cost = multiply_adds(graph.inferred(fixed))
        tried, ranges = run_samples(
            lambda each: cpu.run(each, states),
            inputs,
            model,
            ranges_for(fixed, model),
            cost,
            states,
        )
        random: tuple[str, ...] = ()
        if depend_on_chance(source.graph):
            sample, first = tried[0]
            again = cpu.run(sample, states)
            random = tuple(_different(first.outputs[0], again.outputs[0]))
        runs = [run for _, run in tried]
        runs = (
            _choose(_scoring_first(runs, natures(fixed.graph)))
            if model.validate.inputs in SYNTHETIC
            else _choose_given(runs)
        )
        longest = max(runs, key=lambda each: len(each.feeds))
        left = cpu.left_of(states, longest) if len(longest.feeds) > 1 and not inner else 0.0
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(source_failed(model, fixed, error)) from error
    facts = Facts(
        states,
        natures(fixed.graph, chosen.reads),
        quantization_steps(fixed.graph, chosen.reads),
        random,
        dict(_inconclusive(runs, depend_on_inputs(fixed.graph), random)),
        tuple(
            each.name
            for each in inputs
            if each.name in ranges
            and not ranges[each.name].known
            and each.dtype not in ("bool", "string")
            and "float" not in each.dtype
        ),
        chosen,
        number_of_long_steps(left, len(longest.feeds), cost, len(list(graph.nodes(fixed.graph)))),
        tuple(
            each.name
            for each in inputs
            if "float" in each.dtype and each.name in ranges and ranges[each.name].is_open
        )
        if model.validate.inputs in SYNTHETIC
        else (),
    )
    return Reference(tuple(runs), facts)


def _open(source: onnx.ModelProto, path: Path, inner: frozenset[str]) -> ort.InferenceSession:
    """A session that also returns the values called ``inner``, unless ONNX Runtime refuses that."""
    options = cpu_options()
    set_model_path(path, options)
    is_changed = separate_outputs(source)
    if inner := inner - {value.name for value in source.graph.output}:
        probed = onnx.ModelProto()
        probed.CopyFrom(source)
        probed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
        with contextlib.suppress(Exception):
            return open_session(probed.SerializeToString(), options)
    if is_changed:
        return open_session(source.SerializeToString(), options)
    return open_session(path, cpu_options())


@dataclass(frozen=True)
class _SourceSession:
    """The source model in a session; ``frozen``: its constants; ``opened``: for messages; ``outputs``: their
    names; ``inner``: the values inside it that are needed too.
    """

    session: ort.InferenceSession
    frozen: Arrays
    model: Model
    opened: str
    outputs: Sequence[str]
    inner: frozenset[str]

    def run(self, sample: Sample, states: Mapping[str, str]) -> ReferenceRun:
        """The run of ``sample``."""
        given = tuple({**each, **self.frozen} for each in sample.steps)
        what = "the source model on the CPU"
        steps = [*run_steps(self.session, given, states, self.model, what, self.opened)]
        return ReferenceRun(
            sample.name,
            sample.steps,
            tuple({name: each[name] for name in self.outputs} for each in steps),
            sample.nature,
            sample.usual,
            on_target=False,
            candidates=tuple(_some(each, self.inner) for each in steps) if self.inner else (),
        )

    def left_of(self, states: Mapping[str, str], run: ReferenceRun) -> float:
        """The part of a difference in the first values of ``states`` that is left after the steps of ``run``.

        Means and counters keep it; the gates of LSTMs turn it into other differences.
        """
        first, *others = run.feeds
        rng, left = np.random.default_rng(0), 0.0
        # The graph may reject such values.
        with contextlib.suppress(Exception), np.errstate(invalid="ignore"):
            more = {name: rng.integers(1, 3, first[name].shape) for name in states}
            changed = {
                n: np.add(first[n], array).astype(first[n].dtype) for n, array in more.items()
            }
            again = self.run(Sample("", ({**first, **changed}, *others)), states)
            for name, last in states.items():
                behind = np.subtract(
                    again.outputs[-1][last], run.outputs[-1][last], dtype=np.float64
                )
                left = max(left, float((behind * more[name]).sum() / (more[name] ** 2).sum()))
        return left


def _some(outputs: Arrays, names: frozenset[str]) -> Arrays:
    return {name: array for name, array in outputs.items() if name in names}


def _choose_given(runs: Sequence[ReferenceRun]) -> list[ReferenceRun]:
    """``runs``, of which the target runs the first few too; or the sequences of steps."""
    sequences = [each for each in runs if len(each.feeds) > 1]
    number = 1 if len(sequences) > 1 else _MAX_ON_TARGET
    names = {each.name for each in (*runs[:number], *sequences)}
    return [replace(each, on_target=each.name in names) for each in runs]


def _scoring_first(runs: Sequence[ReferenceRun], kinds: Mapping[str, Nature]) -> list[ReferenceRun]:
    """``runs``, first one in which all or most scores are not near zero: zeros are right by accident."""
    first = runs[0]
    scores = [
        name
        for name, kind in kinds.items()
        if kind in ("unit", "probabilities") and is_float(first.outputs[0][name].dtype)
    ]

    def score(run: ReferenceRun) -> float:
        found = (np.abs(run.outputs[0][name]).max(initial=0) for name in scores)
        return min(map(float, found), default=math.inf)

    if score(first) < _NO_SCORE:
        single = (each for each in runs if each.usual and len(each.feeds) == 1)
        first = max(single, key=score, default=first)
    return [first, *(each for each in runs if each is not first)]


def _choose(runs: Sequence[ReferenceRun]) -> list[ReferenceRun]:
    """``runs``; the target runs the first few too, and those in which an output shows more."""
    names = {each.name for each in with_telling(runs[:_FEW], runs)}
    return [replace(each, on_target=each.name in names) for each in runs]


def _different(one: Arrays, other: Arrays) -> Iterator[str]:
    for name, array in one.items():
        equal_nan = is_float(array.dtype) and array.dtype.kind == "f"
        if not np.array_equal(array, other[name], equal_nan=equal_nan):
            yield name


def _inconclusive(
    runs: Sequence[ReferenceRun], depending: Iterable[str], random: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """The outputs whose comparison is inconclusive, each with the reason."""
    for name in runs[0].outputs[0]:
        values = values_of(name, runs)
        if name in random or values[0].dtype.kind in "OSU":
            continue
        if not any(array.size for array in values):
            yield name, "it has no values"
        elif is_nowhere_finite(values_of(name, (each for each in runs if each.usual))):
            yield name, "the CPU's values are NaN or Inf everywhere"
        elif name in depending and is_constant(values):
            value = next(array[finite(array)][0] for array in values if finite(array).any())
            yield name, f"the CPU's value is {value} everywhere, for all inputs"
