"""The source model on the CPU EP, with which everything is compared: its inputs, outputs, and magnitudes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import ModelError
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.arrays import Array, Arrays, is_float
from hatch_epcontext.worker.comparison import magnitudes
from hatch_epcontext.worker.comparison.outputs import (
    ancestors,
    depend_on_chance,
    depend_on_inputs,
    natures,
)
from hatch_epcontext.worker.comparison.run_errors import source_failed
from hatch_epcontext.worker.comparison.runs import Facts, Reference, Run, run_steps, values_of
from hatch_epcontext.worker.comparison.states import state_pairs
from hatch_epcontext.worker.configured import ranges_for
from hatch_epcontext.worker.dummy.attempts import run_samples
from hatch_epcontext.worker.dummy.inputs import constant
from hatch_epcontext.worker.dummy.samples import Sample
from hatch_epcontext.worker.facts import Magnitude
from hatch_epcontext.worker.progress import step
from hatch_epcontext.worker.session import cpu_options, open_session, set_model_path

_STEPS = 8
"""How often a recurrent model is run with its own states: errors grow from step to step."""

_MUCH_LARGER = 2.0
"""A sample is run on the target too if values inside the model become this much larger in it than in those
that are run, unless they are harmless."""

_HARMLESS = 8.0
"""The exponential function of larger values begins to leave the range of float16."""

_HARMLESS_IF_EXTREME = 1024.0
"""The same for samples with inputs that are perhaps larger than the app's ever are."""

_NEAR_LIMIT = 65504 / 4
"""The magnitude from which a value is near the largest one of float16, which is 65504."""

_LARGER = 1.1
"""The same as `_MUCH_LARGER` for values near the limit."""


def reference(model: Model, fixed: onnx.ModelProto, path: Path | None = None) -> Reference:
    """Run the source model on the CPU, with its constants fed as inputs.

    ``fixed``: the model with what its configuration fixes, whose inputs are those that are fed. ``path``: the
    file of another form of the source, which is run in its place. Raises ModelError when it cannot be run.
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
        session = _open(source, path)
        opened = f"; opening it took {time.monotonic() - start:.1f} s"
        cpu = _Source(session, frozen, model, opened)
        tried, ranges = run_samples(
            lambda each: cpu.run(each, (each.feeds,), states),
            inputs,
            model,
            ranges_for(fixed, model),
        )
        chosen, measured = [sample for sample, _ in tried], [found for _, found in tried]
        random: tuple[str, ...] = ()
        if depend_on_chance(source.graph):
            again, _ = cpu.run(chosen[0], (chosen[0].feeds,), states)
            random = tuple(_different(measured[0][0].outputs[0], again.outputs[0]))
        runs = _choose(measured)
        if states:
            runs.append(cpu.run(chosen[0], _steps(chosen[0], states), states)[0])
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(source_failed(model, fixed, error)) from error
    facts = Facts(
        states,
        natures(fixed.graph),
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
        tuple(_large(source.graph, [found for _, found in measured])),
    )
    return Reference(tuple(runs), facts)


def _open(source: onnx.ModelProto, path: Path) -> ort.InferenceSession:
    """A session that also reads out magnitudes; without them where ONNX Runtime refuses such a graph."""
    probed = onnx.ModelProto()
    probed.CopyFrom(source)
    try:
        if not magnitudes.with_magnitudes(probed, magnitudes.types(source)):
            return open_session(path, cpu_options())
        options = cpu_options()
        set_model_path(path, options)
        return open_session(probed.SerializeToString(), options)
    except Exception:
        # Shape inference, the 2 GiB of protobuf, and kernels that are missing are no faults of the source.
        return open_session(path, cpu_options())


@dataclass(frozen=True)
class _Source:
    """The source model in a session; ``frozen``: its constants; ``opened``: for messages."""

    session: ort.InferenceSession
    frozen: Arrays
    model: Model
    opened: str

    def run(
        self, sample: Sample, feeds: tuple[Arrays, ...], states: Mapping[str, str]
    ) -> tuple[Run, dict[str, float]]:
        """The run of ``feeds``, and the largest magnitudes of the values inside the model."""
        given = tuple({**each, **self.frozen} for each in feeds)
        what = "the source model on the CPU"
        steps = run_steps(self.session, given, states, self.model, what, self.opened)
        found, outputs = zip(*map(magnitudes.read, steps), strict=True)
        several = len(feeds) > 1
        name = f"{len(feeds)} steps" if several else sample.name
        made = Run(name, feeds, outputs, sample.bounded, several, sample.is_extreme)
        return made, magnitudes.largest(found)


def _steps(sample: Sample, states: Mapping[str, str]) -> tuple[Arrays, ...]:
    """The inputs of several steps: as an app begins, with zeros as states, unless they are given."""
    first = dict(sample.feeds)
    if sample.name != "given":
        first.update({name: np.zeros_like(first[name]) for name in states if name in first})
    rest = {name: array for name, array in sample.feeds.items() if name not in states}
    if sample.name == "given":
        return (first, *[rest] * (_STEPS - 1))
    return (
        first,
        *(
            # The same values in another order are as random, and stay within their range.
            {name: np.roll(array, 7 * number) for name, array in rest.items()}
            for number in range(1, _STEPS)
        ),
    )


def _choose(measured: Sequence[tuple[Run, Mapping[str, float]]]) -> list[Run]:
    """The runs; on the target the first one, and those in which values become much larger."""
    (first, covered), *others = measured
    covered = dict(covered)
    chosen = {first.name}
    # Those with the largest values first: often they cover the others.
    for each, largest in sorted(
        others, key=lambda pair: max(pair[1].values(), default=0), reverse=True
    ):
        harmless = _HARMLESS_IF_EXTREME if each.is_extreme else _HARMLESS
        if any(
            (magnitude > harmless and magnitude > _MUCH_LARGER * covered.get(name, 0.0))
            or (magnitude > _NEAR_LIMIT and magnitude > _LARGER * covered.get(name, 0.0))
            for name, magnitude in largest.items()
        ):
            chosen.add(each.name)
            covered = {n: max(m, covered.get(n, 0.0)) for n, m in largest.items()}
    for output in first.outputs[0]:
        if not _tells(output, [each for each, _ in measured if each.name in chosen]):
            # The target may be right there by accident, as with zeros behind a Relu.
            telling = (each for each, _ in others if _tells(output, [first, each]))
            chosen.update(each.name for each in itertools.islice(telling, 1))
    return [replace(each, on_target=each.name in chosen) for each, _ in measured]


def _tells(output: str, runs: Sequence[Run]) -> bool:
    """Whether ``output`` has values in ``runs`` that are finite, and not all the same."""
    values = values_of(output, runs)
    return values[0].dtype.kind in "OSU" or not (_is_nowhere_finite(values) or _is_constant(values))


def _different(one: Arrays, other: Arrays) -> Iterator[str]:
    for name, array in one.items():
        equal_nan = is_float(array.dtype) and array.dtype.kind == "f"
        if not np.array_equal(array, other[name], equal_nan=equal_nan):
            yield name


def _inconclusive(
    runs: Sequence[Run], depending: Iterable[str], random: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """The outputs whose reference proves nothing, each with the reason."""
    for name in runs[0].outputs[0]:
        values = values_of(name, runs)
        if name in random or values[0].dtype.kind in "OSU":
            continue
        if not any(array.size for array in values):
            yield name, "it has no values"
        elif _is_nowhere_finite(values_of(name, (each for each in runs if each.on_target))):
            yield name, "the CPU's values are NaN or Inf everywhere"
        elif name in depending and _is_constant(values):
            value = next(array[_finite(array)][0] for array in values if _finite(array).any())
            yield name, f"the CPU's value is {value} everywhere, for all inputs"


def _is_nowhere_finite(values: Sequence[Array]) -> bool:
    return not any(_finite(array).any() for array in values)


def _is_constant(values: Sequence[Array]) -> bool:
    # One number alone cannot differ.
    if len(values) == 1 and values[0].size == 1:
        return False
    numbers = [array[_finite(array)] for array in values]
    first = next((array[:1] for array in numbers if array.size), None)
    return first is None or all(bool((array == first).all()) for array in numbers)


def _finite(array: Array) -> Array:
    if is_float(array.dtype):
        finite: Array = np.isfinite(array.astype(np.float64))
        return finite
    return np.ones(array.shape, bool)


def _large(main: onnx.GraphProto, found: Iterable[Mapping[str, float]]) -> Iterator[Magnitude]:
    """For each output the largest value inside the model before it, if that is near float16's limit."""
    largest = magnitudes.largest(found)
    near = {name: each for name, each in largest.items() if each >= _NEAR_LIMIT}
    if not near:
        return
    for output, before in ancestors(main).items():
        if names := sorted(before & near.keys()):
            value = max(names, key=lambda name: near[name])
            yield Magnitude(output, value, near[value])
