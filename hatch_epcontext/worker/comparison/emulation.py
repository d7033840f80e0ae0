"""The effect of an EP's number format on a model, emulated on the CPU: for which samples, and where."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.dtypes import Array, Arrays, is_float
from hatch_epcontext.graph.external import read_data
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.graph.number_format import NumberFormat
from hatch_epcontext.graph.rounding import applies, emulate, exposed, hidden_faults, rounded, widen
from hatch_epcontext.graph.scope import Scope, Types
from hatch_epcontext.graph.selections import with_reads
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.comparison.runs import (
    Facts,
    Reference,
    ReferenceRun,
    run_steps,
    with_telling,
)
from hatch_epcontext.worker.ort_values import value_types
from hatch_epcontext.worker.protocol import step
from hatch_epcontext.worker.results import (
    FEW_SAMPLES,
    GAIN,
    NOTHING,
    SENSITIVE,
    Agreement,
    Emulation,
)
from hatch_epcontext.worker.session import open_unoptimized

_WORTH_RUNNING = 45.0
"""Decibels of an emulated sample above which a run on the target shows nothing more."""

_WORST = 3
"""The number of worst samples, of different natures, that the target runs."""

_LOST = 0.5
"""The relative error from which a format counts as lacking a stored number."""

_MAX_VALUES = 2**28
"""The most values inside a model of which all are compared: 2 GiB for both runs."""

_FLAT = 0.1
"""The share of an output's places that may change by less than a step of the format."""

_BITS: Mapping[str, int] = {"float16": 10, "bfloat16": 7}
"""The bits after the point of a number between 1 and 2."""


_WRONG = 0.1
"""The relative error of a value from which it is wrong."""

_MATTERS = 0.01
"""The relative error after a clamped value, or after a number that the format lacks, from which it matters:
in masks, which only hide values, it does not."""


@dataclass(frozen=True)
class Level:
    """How near ``run`` is to the source's: of its outputs the ``nearest`` to the limits, if any.

    ``limit``: the signal-to-noise ratio of its limits. ``ran``: whether the target ran it.
    """

    run: ReferenceRun
    nearest: Agreement | None
    limit: float
    ran: bool = False

    @staticmethod
    def of(
        run: ReferenceRun, agreements: Iterable[Agreement], facts: Facts, limits: Tolerance
    ) -> Level:
        """The level of ``run`` with these ``agreements`` of outputs with the ``limits``."""
        nearest = min(agreements, key=lambda agreement: agreement.above, default=None)
        name = "" if nearest is None else nearest.output
        return Level(run, nearest, facts.of(name).within(limits.of(name)).snr)

    @property
    def margin(self) -> float:
        """The decibels above the limits, negative below them; infinite if all outputs are equal."""
        return math.inf if self.nearest is None else self.nearest.above

    @property
    def snr(self) -> float:
        """The signal-to-noise ratio of a whole output with that margin."""
        return self.margin if self.margin == NOTHING else self.margin + self.limit

    @property
    def spare(self) -> float:
        """``margin``, increased for inputs that an app may never have: there only a difference counts."""
        return self.margin if self.run.usual else self.margin + SENSITIVE


@dataclass(frozen=True)
class _Inner:
    """All values of a step: ``exact``, and in the number format (``rounded``), by the same names.

    ``outputs``: the names of those that are compared.
    """

    exact: Arrays
    rounded: Arrays
    outputs: frozenset[str]

    @property
    def error(self) -> float:
        """The largest error of the compared values."""
        return max((self.errors.get(name, 0.0) for name in self.outputs), default=0.0)

    @cached_property
    def errors(self) -> Mapping[str, float]:
        """The relative error of each value."""
        return {
            name: _relative(exact, self.rounded[name])
            for name, exact in self.exact.items()
            if exact.dtype == np.float32
            and name in self.rounded
            and exact.shape == self.rounded[name].shape
        }

    def behind(self, node: onnx.NodeProto) -> float:
        """The largest error of the results of ``node``."""
        return max((self.errors.get(name, 0.0) for name in node.output), default=0.0)

    def largest(self, node: onnx.NodeProto) -> float:
        """The largest magnitude of its results."""
        results = (self.exact[name] for name in node.output if name in self.errors)
        return max(map(_largest, results), default=0.0)

    def matters(self, node: onnx.NodeProto, scope: Scope) -> bool:
        """Whether an error in the values of ``node`` still exists after the next two nodes that read them.

        A Softmax may be the second one, which hides the error of a mask.
        """
        changed = (n for n in node.output if n in self.errors)
        is_changed = any(_differ(self.exact[name], self.rounded[name]) for name in changed)
        return is_changed and self._lasts(node, scope, 2)

    def _lasts(self, node: onnx.NodeProto, scope: Scope, number: int) -> bool:
        """Whether an error still exists ``number`` nodes behind ``node``, or at the end of the model."""
        readers = [
            scope.nodes[index] for name in node.output for index in scope.readers.get(name, ())
        ]
        return (
            not number
            or not readers
            or any(
                self.behind(reader) > _MATTERS and self._lasts(reader, scope, number - 1)
                for reader in readers
            )
        )


class Emulator:
    """The prepared model in the file ``path``, computed in ``format_`` on samples of the ``reference``.

    ``skipped``: the names of nodes that run on the CPU. `emulate` runs it.
    """

    levels: Sequence[Level] = ()

    def __init__(
        self,
        model: Model,
        path: Path,
        format_: NumberFormat,
        reference: Reference,
        limits: Tolerance,
        skipped: Set[str] = frozenset(),
    ) -> None:
        self._model, self._path, self._format, self._skipped = model, path, format_, skipped
        self._reference, self._limits = reference, limits
        self._prepared = onnx.load(path, load_external_data=False)

    def emulate(self) -> None:
        """Run it on all runs of the reference."""
        step(f"emulating {self._format.name} on the CPU")
        read_data(self._prepared, self._path.parent)
        widen(self._prepared)
        graph.name_nodes(self._prepared.graph)
        emulated = with_reads(
            self._in_format(self._prepared), self._reference.facts.selections.rest
        )
        session = open_unoptimized(emulated.SerializeToString())
        self.levels = [self._level(session, run) for run in self._reference.runs]
        self._emulated = (*self.levels,)

    @property
    def is_possible(self) -> bool:
        """Whether the model can be emulated: it fits into memory twice, and has fixed shapes."""
        tensors = graph.stored_tensors(self._prepared.graph)
        sizes = (math.prod(tensor.dims) * 4 for tensor in tensors)
        return sum(sizes) < PROTOBUF_LIMIT // 2 and all(
            graph.facts(value).is_fixed for value in graph.inputs(self._prepared.graph)
        )

    @cached_property
    def _types(self) -> Types:
        return value_types(self._prepared, self._path)

    @cached_property
    def scope(self) -> Scope:
        """The values of the prepared model."""
        return Scope.of(self._prepared, self._types)

    @cached_property
    def optimistic(self) -> str | None:
        """A node that the EP computes less exactly than its format, which the emulation cannot show."""
        for node in self._computed:
            if node.op_type in self._format.inexact:
                return f"{_named(node)}, whose kernel is less exact than {self._format.name}"
            if fault := next(hidden_faults(self._format, node, self.scope), None):
                return f"{_named(node)}, which {fault.text}"
        return None

    @property
    def _computed(self) -> Iterator[onnx.NodeProto]:
        """The nodes that the EP computes."""
        return (node for node in self.scope.nodes if node.name not in self._skipped)

    @property
    def worst(self) -> Level:
        """The level of the sample that is nearest to the limits."""
        return min(self.levels, key=lambda level: (level.margin, not level.run.usual))

    @property
    def margin(self) -> float:
        """The smallest `Level.spare` of a sample, in decibels."""
        return max(min(level.spare for level in self.levels), NOTHING)

    def to_run(self) -> list[ReferenceRun]:
        """The first sample, and those that may differ on the target: for large models only one of them."""
        first, *others = self.levels
        if self._model.validate.inputs not in SYNTHETIC:
            # Inputs that the app has count more than inputs that may be worse.
            return [run for run in self._reference.runs if run.on_target]
        chosen = [first.run]
        longest = max(
            (level.run for level in others), key=lambda run: len(run.steps), default=first.run
        )
        if len(longest.steps) > 1:
            # The emulation does not show what kernels add to the states.
            chosen.append(longest)
        natures = {run.nature for run in chosen}
        # Each step of a recurrent model is a run, and simulators run large models for long.
        is_large = len(self.levels) <= FEW_SAMPLES and len(chosen) == 1
        most = len(chosen) + (1 if is_large or len(chosen) > 1 else _WORST)
        # Unusual samples come last: they only warn.
        for level in sorted(others, key=lambda level: (not level.run.usual, level.margin)):
            worth = level.snr < _WORTH_RUNNING or self.optimistic
            if len(chosen) == most:
                break
            if worth and level.run.nature not in natures:
                natures.add(level.run.nature)
                chosen.append(level.run)
        if is_large:
            chosen = [min(chosen, key=lambda run: self.level(run).margin)]
        return with_telling(chosen, self._reference.runs)

    def level(self, run: ReferenceRun) -> Level:
        """The level of ``run``, one of the reference's."""
        return next(level for level in self.levels if level.run is run)

    def correct(self, ran: Sequence[Level]) -> None:
        """Use the levels that samples had on the target. If the worst samples of different natures are right
        there, no other sample counts.
        """
        suffering = [level for level in ran if self.level(level.run).margin < SENSITIVE]
        if suffering and all(level.margin >= SENSITIVE for level in suffering):
            self.levels = [*ran]
        else:
            by_name = {level.run.name: level for level in ran}
            self.levels = [by_name.get(level.run.name, level) for level in self.levels]

    def result(self) -> Emulation:
        """The result, with a sentence about it."""
        worst, margin, reason, hurt = self.worst, self.margin, None, None
        if margin < SENSITIVE:
            first = min(
                self.levels,
                key=lambda level: (level.spare >= SENSITIVE, not level.run.usual, level.spare),
            )
            description = self.first_diverging(first.run)
            reason = f"{self._describe(first)}{f': {description}' if description else ''}"
        elif hurt := next(self._hurt(), None) or self._flat():
            reason = hurt
        elif self._reference.facts.is_lasting:
            reason = (
                f"its states last, and what {self._format.name} rounds off adds up in them from step to "
                "step, unless the app resets them"
            )
        inexact = {node.op_type for node in self._computed} & self._format.inexact
        return Emulation(
            self._format.name,
            self._format.seen,
            len(self._emulated),
            self._nearest(worst),
            reason,
            inexact=tuple(sorted(inexact)),
            in_format=hurt is not None or min(level.spare for level in self._emulated) < SENSITIVE,
        )

    def _nearest(self, worst: Level) -> Agreement | None:
        if worst.nearest is None:
            return None
        # JSON has no infinity.
        snr, margin = (number if number < math.inf else None for number in (worst.snr, self.margin))
        return replace(worst.nearest, snr=snr, margin=margin)

    def _describe(self, level: Level) -> str:
        snr = f"{level.snr:.0f} dB" if level.snr > NOTHING else "no number"
        place = f"for the sample {level.run.name!r}"
        who = "the target" if level.ran else f"{self._format.name}, emulated on the CPU,"
        if level.nearest is None or level.snr == math.inf:
            return f"{who} changes nothing {place}"
        return f"{who} leaves {snr} of {level.nearest.output!r} {place}"

    def explanation(self, run: ReferenceRun, margin: float) -> str:
        """Why the target may differ for ``run``, by ``margin``: a sentence about the first diverging node."""
        level = self.level(run)
        limit = min(SENSITIVE, margin + GAIN)
        if level.margin < limit and (description := self.first_diverging(run)):
            return f"The first diverging node: {description}."
        text = f"{self._describe(level)}, so the EP computes an operator wrong"
        return f"{text}: perhaps {self.optimistic}." if self.optimistic else f"{text}."

    def first_diverging(self, run: ReferenceRun) -> str | None:
        """The first node whose results are wrong for ``run``, and why, in words; None if there is none."""
        inner = self._inner(run)
        return None if inner is None else self._first_wrong(inner, min(_WRONG, inner.error / 2))

    def _first_wrong(self, inner: _Inner, error: float) -> str | None:
        """The first node whose values the format clamps, that uses a number which it lacks, or whose results
        have a larger ``error``, in words.

        What has no effect counts as right, as in a mask.
        """
        for node in self.scope.nodes:
            is_clamped = inner.largest(node) > self._format.largest
            if is_clamped or not self._lost.keys().isdisjoint(node.input):
                is_wrong = inner.matters(node, self.scope)
            else:
                is_wrong = inner.behind(node) > error
            if is_wrong:
                return self._words(node, inner)
        return None

    def _inner(self, run: ReferenceRun) -> _Inner | None:
        """All values of the first wrong step of ``run``, or of its last step.

        None if they are too many, or if the model cannot run with all of them as outputs.
        """
        if self._exact is None or self._inexact is None:
            return None
        outputs = frozenset((*run.outputs[0], *self._reference.facts.selections.reads))
        steps = (self._values(session, run) for session in (self._exact, self._inexact))
        for exact, inexact in zip(*steps, strict=True):
            inner = _Inner(exact, inexact, outputs)
            if inner.error > _WRONG:
                # Errors in later steps come from this one.
                break
        return inner

    def _values(self, session: ort.InferenceSession, run: ReferenceRun) -> Iterator[Arrays]:
        """All values of ``session`` in each step of ``run``, with its inputs."""
        states, fed = self._reference.facts.states, dict[str, Array]()
        steps = run_steps(session, run.steps, states, "the model with all its values")
        for feeds, outputs in zip(run.steps, steps, strict=True):
            fed.update(feeds)
            yield {**fed, **outputs}
            fed.update({name: outputs[last] for name, last in states.items() if last in outputs})

    @cached_property
    def _exact(self) -> ort.InferenceSession | None:
        """A session that returns all values of the prepared model."""
        results = (name for node in self.scope.nodes for name in node.output)
        size = sum(math.prod(self.scope.shape(name) or (1,)) for name in results)
        step("looking for the first node that differs")
        return None if size > _MAX_VALUES else _open(exposed(self._prepared, self._types))

    @cached_property
    def _inexact(self) -> ort.InferenceSession | None:
        """The same in the number format."""
        return _open(self._in_format(exposed(self._prepared, self._types)))

    def _in_format(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """A copy of ``model`` that rounds to the format where the EP computes it."""
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        emulate(copy, self._types, self._format, self._skipped)
        return copy

    def _hurt(self) -> Iterator[str]:
        """Nodes whose values are clamped, or that use a number that the format cannot represent."""
        for run in (self.levels[0].run, self.worst.run):
            is_right = self.level(run).snr > 2 * _WORTH_RUNNING
            if (self._lost or (not is_right and self._exceeds(run))) and (
                inner := self._inner(run)
            ):
                yield from filter(None, [self._first_wrong(inner, math.inf)])

    def _exceeds(self, run: ReferenceRun) -> bool:
        """Whether values of ``run`` are beyond the format's largest."""
        return self._exact is not None and any(
            array.dtype == np.float32 and _largest(array) > self._format.largest
            for values in self._values(self._exact, run)
            for array in values.values()
        )

    def _flat(self) -> str | None:
        """An output that changes between inputs by less than a step of the format, in words."""
        facts, usual = self._reference.facts, self._reference.usual
        for name, first in self._reference.runs[0].outputs[0].items():
            is_any = facts.of(name).nature == "any" and not facts.of(name).is_random
            outputs = (run.outputs[0][name] for run in usual)
            arrays = [array.ravel() for array in outputs if array.shape == first.shape]
            if not is_any or not is_float(first.dtype) or not arrays:
                continue
            values = np.array(arrays, np.float64)
            # Places with Inf have no spread.
            with np.errstate(invalid="ignore"):
                middle, changes = values.mean(axis=0), values.std(axis=0)
            bits = _BITS[self._format.name]
            smallest = np.where(middle == 0, 0.0, 2.0 ** (np.frexp(middle)[1] - 1 - bits))
            flat = np.flatnonzero((changes > 0) & (changes < smallest))
            if flat.size > _FLAT * changes.size:
                place = flat[np.argmin((changes / smallest)[flat])]
                return (
                    f"{name!r} changes by {changes[place]:.2g} around {middle[place]:.6g}, where "
                    f"{self._format.name} has steps of {smallest[place]:.2g}"
                )
        return None

    @cached_property
    def _lost(self) -> Mapping[str, float]:
        """The stored numbers that the format cannot represent."""
        lost = {}
        for tensor in self._prepared.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT and math.prod(tensor.dims) == 1:
                value = onnx.numpy_helper.to_array(tensor).reshape(1)
                if _relative(value, rounded(value, self._format)) > _LOST:
                    lost[tensor.name] = float(value[0])
        return lost

    def _words(self, node: onnx.NodeProto, inner: _Inner) -> str:
        """A description of ``node`` and of the fault in its result."""
        name, format_ = _named(node), self._format
        if lost := [self._lost[operand] for operand in node.input if operand in self._lost]:
            return f"{name} uses {lost[0]:g}, which {format_.name} does not have"
        largest = inner.largest(node)
        wide = node.op_type in format_.sums
        if largest > (ends := format_.largest_of_sums if wide else format_.largest):
            return f"{name} reaches {_number(largest)}; {format_.name} ends at {_number(ends)}"
        for fault in format_.faults_of(graph.operator(node)):
            if fault.gives is not None and applies(fault, node, self.scope):
                fed = np.asarray(inner.rounded.get(node.input[fault.operand], ()), np.float64)
                if ((fed >= fault.low) & (fed <= fault.high)).any():
                    return f"{name} {fault.text}"
        return f"{name} has an error of {min(100 * inner.behind(node), 100):.2g} %"

    def _level(self, session: ort.InferenceSession, run: ReferenceRun) -> Level:
        what, limits = "the emulated model", self._limits
        steps = self._reference.compare_run(session, run, limits, what)
        return Level.of(run, itertools.chain(*steps), self._reference.facts, limits)


def _open(form: onnx.ModelProto) -> ort.InferenceSession | None:
    try:
        return open_unoptimized(form.SerializeToString())
    except Exception:
        # Some models cannot run with other outputs; then no node is named.
        return None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value < 1e7 else f"{value:.2g}"


def _named(node: onnx.NodeProto) -> str:
    """The operator and the name of ``node``, for messages."""
    return f"{node.op_type} {node.name or node.output[0]}"


def _largest(array: NDArray[Any]) -> float:
    """The largest magnitude in ``array``; 0 without values."""
    return float(np.abs(array).max()) if array.size else 0.0


def _relative(exact: Array, other: Array) -> float:
    """The error of ``other`` relative to ``exact``, as root mean squares."""
    one = np.nan_to_num(np.asarray(exact, np.float64))
    two = np.nan_to_num(np.asarray(other, np.float64))
    with np.errstate(over="ignore", invalid="ignore"):
        error = np.sqrt(((one - two) ** 2).sum() / max((one**2).sum(), 1e-60))
    # Masks contain the largest float32.
    return float(error) if np.isfinite(error) else 1.0


def _differ(exact: Array, other: Array) -> bool:
    """Whether any value differs by a tenth."""
    one, two = np.asarray(exact, np.float64), np.asarray(other, np.float64)
    return bool((np.abs(one - two) > _WRONG * np.abs(one)).any())
