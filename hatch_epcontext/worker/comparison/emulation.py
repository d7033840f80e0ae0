"""The effect of an EP's number format on a model, emulated on the CPU: for which samples, and where."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.arrays import Array, Arrays, is_float
from hatch_epcontext.graph.external import read_data
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.graph.number_format import NumberFormat
from hatch_epcontext.graph.parts import WrongCut, part_between
from hatch_epcontext.graph.rounding import applies, emulate, expose, hidden_faults, rounded, widen
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.text import to_toml
from hatch_epcontext.worker.advice import keep
from hatch_epcontext.worker.comparison.diverging import (
    WRONG,
    Inner,
    inner_steps,
    largest,
    named,
    relative,
)
from hatch_epcontext.worker.comparison.measures import Numbers, compare
from hatch_epcontext.worker.comparison.runs import Reference, ReferenceRun, run_steps, with_telling
from hatch_epcontext.worker.comparison.selections import select
from hatch_epcontext.worker.comparison.suppression import expose_reads
from hatch_epcontext.worker.progress import step
from hatch_epcontext.worker.results import FEW_SAMPLES, GAIN, NOTHING, SENSITIVE, Emulation
from hatch_epcontext.worker.session import cpu_options, open_session, open_unoptimized
from hatch_epcontext.worker.value_types import value_types

_WORTH_RUNNING = 45.0
"""Decibels of an emulated sample above which a run on the target shows nothing more."""

_WORST = 3
"""The number of worst samples, of different natures, that the target runs."""

_JUMPS = (10.0, 3.0)
"""The ratios of a result's error to the errors of its operands from which a node counts as the cause."""

_MAX_CUTS = 3
"""The most nodes after which a cut is tried."""

_MAX_CUT = 4
"""The most tensors of a proposed cut: the app has to compute them."""

_LOST = 0.5
"""The relative error from which a format counts as lacking a stored number."""

_FLAT = 0.1
"""The share of an output's places that may change by less than a step of the format."""

_BITS: Mapping[str, int] = {"float16": 10, "bfloat16": 7}
"""The bits after the point of a number between 1 and 2."""

_MAX_VALUES = 2**28
"""The most values inside a model of which all are compared: 2 GiB for both runs."""


@dataclass(frozen=True)
class Level:
    """How near the emulated ``run`` is to the source's: ``margin`` in decibels above the limits, negative
    below them, and the ``snr`` of the output nearest to its limit; both infinite if all are equal.
    ``step``: of a long run. ``ran``: whether the target ran it.
    """

    run: ReferenceRun
    output: str
    margin: float
    snr: float
    step: int = 0
    ran: bool = False

    @property
    def spare(self) -> float:
        """``margin``, increased for inputs that an app may never have: there only a difference counts."""
        return self.margin if self.run.usual else self.margin + SENSITIVE


class Emulator:
    """The model ``prepared`` in ``format_``; ``skipped``: the names of nodes that run on the CPU.

    It is in the file ``path``, and its external data is read into it. ``expected``: the source model's
    results; ``runs``: those that are emulated, by default all.
    """

    def __init__(
        self,
        model: Model,
        prepared: onnx.ModelProto,
        path: Path,
        format_: NumberFormat,
        skipped: Set[str],
        expected: Reference,
        tolerance: Tolerance,
        runs: Sequence[ReferenceRun] | None = None,
    ) -> None:
        step(f"emulating {format_.name} on the CPU")
        self._model, self._path, self._format, self._skipped = model, path, format_, skipped
        self._expected, self._tolerance = expected, tolerance
        read_data(prepared, path.parent)
        self._prepared = prepared
        widen(self._prepared)
        graph.name_nodes(self._prepared.graph)
        self._types = value_types(self._prepared, path)
        emulated = self._copy()
        emulate(emulated, self._types, format_, skipped)
        if (rest := expected.facts.selections.rest) is not None:
            expose_reads(emulated, rest)
        session = open_unoptimized(emulated.SerializeToString())
        self.levels = [self._level(session, each) for each in runs or expected.runs]
        self._long = self._long_level(session) if expected.facts.long_steps else None
        self._emulated = (*self._all,)

    @staticmethod
    def is_possible(model: onnx.ModelProto) -> bool:
        """Whether ``model`` can be emulated: it fits into memory twice, and has fixed shapes."""
        sizes = (math.prod(each.dims) * 4 for each in graph.stored_tensors(model.graph))
        return sum(sizes) < PROTOBUF_LIMIT // 2 and all(
            graph.facts(each).is_fixed for each in graph.inputs(model.graph)
        )

    @cached_property
    def scope(self) -> Scope:
        """The values of the prepared model."""
        return Scope.of(self._prepared, self._types)

    @cached_property
    def optimistic(self) -> str | None:
        """A node that the EP computes less exactly than its format, which the emulation cannot show."""
        for node in self._computed:
            if node.op_type in self._format.inexact:
                return f"{named(node)}, whose kernel is less exact than {self._format.name}"
            if fault := next(hidden_faults(self._format, node, self.scope), None):
                return f"{named(node)}, which {fault.text}"
        return None

    @property
    def _computed(self) -> Iterator[onnx.NodeProto]:
        """The nodes that the EP computes."""
        return (each for each in self.scope.nodes if each.name not in self._skipped)

    @property
    def worst(self) -> Level:
        """The level of the sample that is nearest to the limits."""
        return min(self._all, key=lambda each: (each.margin, not each.run.usual))

    @property
    def margin(self) -> float:
        """The smallest `Level.spare` of a sample, in decibels."""
        return max(min(each.spare for each in self._all), NOTHING)

    @property
    def _all(self) -> list[Level]:
        return self.levels if self._long is None else [*self.levels, self._long]

    def to_run(self) -> list[ReferenceRun]:
        """The first sample, and those that may differ on the target: for large models only one of them."""
        first, *others = self.levels
        if self._model.validate.inputs not in SYNTHETIC:
            # Inputs that the app has count more than inputs that may be worse.
            return [each for each in self._expected.runs if each.on_target]
        chosen = [first.run]
        longest = max(
            (each.run for each in others), key=lambda run: len(run.feeds), default=first.run
        )
        if len(longest.feeds) > 1:
            # The emulation does not show what kernels add to the states.
            chosen.append(longest)
        natures = {run.nature for run in chosen}
        # Each step of a recurrent model is a run, and simulators run large models for long.
        is_large = len(self.levels) <= FEW_SAMPLES and len(chosen) == 1
        most = len(chosen) + (1 if is_large or len(chosen) > 1 else _WORST)
        # Unusual samples come last: they only warn.
        for each in sorted(others, key=lambda each: (not each.run.usual, each.margin)):
            worth = each.snr < _WORTH_RUNNING or self.optimistic
            if len(chosen) == most:
                break
            if worth and each.run.nature not in natures:
                natures.add(each.run.nature)
                chosen.append(each.run)
        if is_large:
            chosen = [min(chosen, key=lambda run: self.level(run).margin)]
        return with_telling(chosen, self._expected.runs)

    def level(self, run: ReferenceRun) -> Level:
        """The level of ``run``, one of the reference's."""
        return next(each for each in self.levels if each.run is run)

    def correct(self, ran: Sequence[Level]) -> None:
        """Use the levels that samples had on the target. If the worst samples of different natures are right
        there, no other sample counts.
        """
        suffering = [each for each in ran if self.level(each.run).margin < SENSITIVE]
        if suffering and all(each.margin >= SENSITIVE for each in suffering):
            self.levels = [*ran]
        else:
            seen = {each.run.name: each for each in ran}
            self.levels = [seen.get(each.run.name, each) for each in self.levels]

    def result(self) -> Emulation:
        """The result, with a sentence about it."""
        worst, margin, reason, hurt = self.worst, self.margin, None, None
        if margin < SENSITIVE:
            first = min(
                self._all,
                key=lambda each: (each.spare >= SENSITIVE, not each.run.usual, each.spare),
            )
            reason = f"{self._describe(first)}{self._at(first)}"
        elif hurt := next(self._hurt(), None) or self._flat():
            reason = hurt
        return Emulation(
            self._format.name,
            self._format.seen,
            len(self._emulated),
            worst.run.name,
            max(worst.snr, NOTHING) if worst.snr < math.inf else None,
            margin if math.isfinite(margin) else None,
            reason,
            inexact=tuple(sorted({each.op_type for each in self._computed} & self._format.inexact)),
            in_format=hurt is not None or min(each.spare for each in self._emulated) < SENSITIVE,
        )

    def _describe(self, level: Level) -> str:
        snr = f"{level.snr:.0f} dB" if math.isfinite(level.snr) else "no number"
        place = f"in step {level.step:,}" if level.step else f"for the sample {level.run.name!r}"
        who = "the target" if level.ran else f"{self._format.name}, emulated on the CPU,"
        if level.snr == math.inf:
            return f"{who} changes nothing {place}"
        return f"{who} leaves {snr} of {level.output!r} {place}"

    def _at(self, level: Level) -> str:
        if level.step:
            return ": rounding errors add up in the states, unless the app resets them"
        found = self.first_diverging(level.run)
        return f": {found}" if found else ""

    def explanation(self, run: ReferenceRun, margin: float) -> str:
        """Why the target may differ for ``run``, by ``margin``: a sentence about the first diverging node."""
        level = self.level(run)
        if level.margin < min(SENSITIVE, margin + GAIN) and (found := self.first_diverging(run)):
            return f"The first diverging node: {found}.{self._cut(run)}"
        text = f"{self._describe(level)}, so the EP computes an operator wrong"
        return f"{text}: perhaps {self.optimistic}." if self.optimistic else f"{text}."

    def first_diverging(self, run: ReferenceRun) -> str | None:
        """The node that causes the error of ``run``, and why, in words; None if there is none."""
        node, inner = self._diverging(run), self._inner(run)
        return None if node is None or inner is None else self._words(node, inner)

    def _cut(self, run: ReferenceRun) -> str:
        """A sentence about the first cut, after the first diverging node, with which the model is right."""
        # The emulation does not cover operators that the EP computes less exactly.
        node = None if self.optimistic else self._diverging(run)
        for _ in range(_MAX_CUTS):
            if node is None:
                break
            if text := self._cut_behind(node):
                return text
            # What the format cannot represent is lost at the cut too, if it is in the values there.
            readers = [*self.scope.readers.get(node.output[0], ())]
            node = self.scope.nodes[readers[0]] if len(readers) == 1 else None
        return ""

    def _cut_behind(self, node: onnx.NodeProto) -> str:
        """A sentence about the cut after ``node``, if it makes the rest of the model right."""
        before = set(self.scope.above(node.output))
        exact = [self.scope.nodes[index] for index in before]
        behind = [each for i, each in enumerate(self.scope.nodes) if i not in before]
        read = {name for each in behind for name in graph.read_by(each)}
        made = {name for each in exact for name in each.output}
        given = {each.name for each in graph.inputs(self._prepared.graph)}
        inputs = sorted(read & (made | given))
        # A smaller part is not worth a model of its own.
        if not read & made or len(behind) <= len(exact) or len(inputs) > _MAX_CUT:
            return ""
        source = onnx.load(self._model.path, load_external_data=False).graph
        cut = replace(self._model.cut, inputs=tuple(inputs))
        if isinstance(part_between(source, cut, self._model.constants), WrongCut):
            return ""
        emulated = self._copy()
        skipped = {*self._skipped, *(each.name for each in exact)}
        emulate(emulated, self._types, self._format, skipped)
        session = open_unoptimized(emulated.SerializeToString())
        levels = [self._level(session, each) for each in self._expected.runs if each.usual]
        level = min(levels, key=lambda each: each.margin)
        if level.margin < SENSITIVE:
            return ""
        left = f"at least {level.snr:.0f} dB" if math.isfinite(level.snr) else "no error"
        return (
            f" If the app computes {' and '.join(map(repr, inputs))} itself (cut = "
            f"{to_toml(keep(cut, self._model.key).value)}), {self._format.name} leaves {left}."
        )

    def _diverging(self, run: ReferenceRun) -> onnx.NodeProto | None:
        """The node that causes the error of ``run``."""
        if not (inner := self._inner(run)):
            return None
        final = self._final(run, inner)
        wrong = min(WRONG, final / 2)
        grown = [
            (each, inner.behind(each), inner.before(each))
            for each in self.scope.nodes
            if inner.behind(each) > wrong and not self._is_hidden(each, inner)
        ]
        for jump in _JUMPS:
            to_blame = {node.output[0] for node, behind, before in grown if behind > jump * before}
            for node in self.scope.nodes:
                if node.output[0] in to_blame or self._misses(node, inner):
                    return node
        if not grown:
            return None
        node, *_ = max(grown, key=lambda each: each[1] / max(each[2], 1e-9))
        return node

    def _is_hidden(self, node: onnx.NodeProto, inner: Inner) -> bool:
        """Whether only the format's limits change the values of ``node``, without effect, as in a mask."""
        return inner.largest(node) > self._format.largest and not inner.matters(node, self.scope)

    def _final(self, run: ReferenceRun, inner: Inner) -> float:
        """The largest error of the compared values."""
        names = (*run.outputs[0], *self._expected.facts.selections.reads)
        return max((inner.errors.get(name, 0.0) for name in names), default=0.0)

    def _hurt(self) -> Iterator[str]:
        """Nodes whose values are clamped, or that use a number that the format cannot represent."""
        worst = min(self.levels, key=lambda each: (each.margin, not each.run.usual))
        for run in (self.levels[0].run, worst.run):
            is_right = self.level(run).snr > 2 * _WORTH_RUNNING
            if not self._lost and (is_right or not self._exceeds(run)):
                continue
            if not (inner := self._inner(run)):
                return
            for node in self.scope.nodes:
                is_cut = inner.largest(node) > self._format.largest
                if (is_cut and inner.matters(node, self.scope)) or self._misses(node, inner):
                    yield self._words(node, inner)

    def _exceeds(self, run: ReferenceRun) -> bool:
        """Whether values of ``run`` are beyond the format's largest; True if that is unknown."""
        exact = self._exact
        steps = () if exact is None else self._inner_steps(exact, run)
        return exact is None or any(
            array.dtype == np.float32 and largest(array) > self._format.largest
            for values in steps
            for array in values.values()
        )

    def _flat(self) -> str | None:
        """An output that changes between inputs by less than a step of the format, in words."""
        runs, facts = self._expected.runs, self._expected.facts
        for name, first in runs[0].outputs[0].items():
            is_any = facts.natures.get(name, "any") == "any" and name not in facts.random
            usual = (each.outputs[0][name] for each in runs if each.usual)
            found = [each for each in usual if each.shape == first.shape]
            if not is_any or not is_float(first.dtype) or not found:
                continue
            middle, changes = _spread(found)
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

    def _misses(self, node: onnx.NodeProto, inner: Inner) -> bool:
        """Whether ``node`` uses a number that the format cannot represent, and that matters."""
        return not self._lost.keys().isdisjoint(node.input) and inner.matters(node, self.scope)

    @cached_property
    def _lost(self) -> Mapping[str, float]:
        """The stored numbers that the format cannot represent."""
        found = {}
        for tensor in self._prepared.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT and math.prod(tensor.dims) == 1:
                value = onnx.numpy_helper.to_array(tensor).reshape(1)
                if relative(value, rounded(value, self._format)) > _LOST:
                    found[tensor.name] = float(value[0])
        return found

    def _words(self, node: onnx.NodeProto, inner: Inner) -> str:
        """A description of ``node`` and of the fault in its result."""
        name, format_ = named(node), self._format
        if lost := [self._lost[each] for each in node.input if each in self._lost]:
            return f"{name} uses {lost[0]:g}, which {format_.name} does not have"
        largest = inner.largest(node)
        wide = node.op_type in format_.sums
        if largest > (ends := format_.largest_of_sums if wide else format_.largest):
            return f"{name} reaches {_number(largest)}; {format_.name} ends at {_number(ends)}"
        for fault in format_.faults_of(graph.operator(node)):
            if fault.gives is not None and applies(fault, node, self.scope):
                low, high = inner.range(node.input[fault.operand])
                if low <= fault.high and high >= fault.low:
                    return f"{name} {fault.text}"
        low, _ = inner.smallest(node)
        if format_.name == "float16" and 0 < low < 2.0**-14:
            return f"{name} has values of {low:.1g}; {format_.name} has few digits below {2.0**-14:.1g}"
        return inner.words(node)

    def _inner(self, run: ReferenceRun) -> Inner | None:
        """All values of the first wrong step of ``run``, or of the last step, exact and emulated.

        None if they are too many, or if the model cannot run with all of them as outputs.
        """
        if run.name not in self._inners:
            self._inners[run.name] = self._compute_inner(run)
        return self._inners[run.name]

    @cached_property
    def _inners(self) -> dict[str, Inner | None]:
        return {}

    @cached_property
    def _exact(self) -> ort.InferenceSession | None:
        """A session of the prepared model with all its values; None if they are too many."""
        size = sum(
            math.prod(self.scope.shape(name) or (1,))
            for node in self.scope.nodes
            for name in node.output
        )
        if size > _MAX_VALUES:
            return None
        step(f"looking for the node that {self._format.name} makes wrong")
        exact = self._copy()
        expose(exact, self._types)
        return _open_or_none(exact)

    @cached_property
    def _inexact(self) -> ort.InferenceSession | None:
        """The same of the emulated model."""
        emulated = self._copy()
        expose(emulated, self._types)
        emulate(emulated, self._types, self._format, self._skipped)
        return _open_or_none(emulated)

    def _inner_steps(
        self, session: ort.InferenceSession, run: ReferenceRun
    ) -> Iterator[Mapping[str, Array]]:
        states = self._expected.facts.states
        return inner_steps(session, run, states, self._model, "the emulated model")

    def _compute_inner(self, run: ReferenceRun) -> Inner | None:
        if self._exact is None or self._inexact is None:
            return None
        steps = (self._inner_steps(session, run) for session in (self._exact, self._inexact))
        for one, other in zip(*steps, strict=True):
            inner = Inner(one, other)
            if self._final(run, inner) > WRONG:
                # Errors in later steps come from this one.
                break
        return inner

    def _copy(self) -> onnx.ModelProto:
        copy = onnx.ModelProto()
        copy.CopyFrom(self._prepared)
        return copy

    def _level(self, session: ort.InferenceSession, run: ReferenceRun) -> Level:
        states = self._expected.facts.states
        steps = run_steps(session, run.feeds, states, self._model, "the emulated model")
        levels = (
            self._compared(run, own, wanted, candidates)
            for own, (wanted, candidates) in zip(steps, run.steps, strict=True)
        )
        return min(levels, key=lambda each: each.margin)

    def _long_level(self, session: ort.InferenceSession) -> Level | None:
        """The level of a long run, at its first checked step beyond the limits, or at its worst one.

        It repeats all sequences that an app can have, and stores none: the prepared model runs beside it as
        the reference.
        """
        facts, found = self._expected.facts, []
        sequences = [each for each in self._expected.runs if each.usual and len(each.feeds) > 1]
        steps = [step for each in sequences for step in each.feeds]
        exact, emulated = (
            run_steps(each, self._shifted(steps), facts.states, self._model, "the emulated model")
            for each in (open_session(self._path, cpu_options()), session)
        )
        for number, (wanted, own) in enumerate(zip(_possible(exact), emulated, strict=False), 1):
            if number & (number - 1) == 0 or number == facts.long_steps:
                run = ReferenceRun(f"step {number:,}", (), (), "long", usual=True, on_target=False)
                found.append(replace(self._compared(run, own, wanted, {}), step=number))
                if found[-1].margin < 0:
                    return found[-1]
        return min(found, key=lambda each: each.margin, default=None)

    def _shifted(self, steps: Sequence[Arrays]) -> Iterator[Arrays]:
        """``steps`` again and again, with a mean added: without one, states decay before errors add up."""
        facts = self._expected.facts
        for each in itertools.islice(itertools.cycle(steps), facts.long_steps):
            more = {n: each[n] + each[n].dtype.type(1) for n in facts.unbounded if n in each}
            yield {**each, **more}

    def _compared(
        self, run: ReferenceRun, own: Arrays, wanted: Arrays, candidates: Arrays
    ) -> Level:
        """How near the outputs of one step of ``run`` are to the ``wanted`` ones."""
        level, facts = Level(run, "", math.inf, math.inf), self._expected.facts
        selected = select(facts.selections, own, wanted, candidates, self._tolerance.unit)
        for name, output in own.items():
            if name not in selected.wanted or name in facts.random:
                continue
            if _has_gaps(output, selected.wanted[name]):
                return Level(run, name, -math.inf, -math.inf)
            limits = self._tolerance.of(name)
            found = compare(
                name,
                output,
                selected.wanted[name],
                limits,
                elsewhere=self._expected.elsewhere(name),
                nature=facts.natures.get(name, "any"),
                quantization_step=facts.quantization_steps.get(name, 0.0),
                rows=selected.rows.get(name),
                is_state=name in facts.states.values(),
            )
            if found.margin < level.margin:
                level = Level(run, name, found.margin, found.snr)
        return level


def _spread(values: Sequence[Array]) -> tuple[Numbers, Numbers]:
    """The mean and the standard deviation in each place of ``values``, one at a time: they may be large."""
    total, squares = np.zeros(values[0].size), np.zeros(values[0].size)
    for each in values:
        total += np.asarray(each, np.float64).ravel()
    middle = total / len(values)
    # Places with Inf have no spread.
    with np.errstate(invalid="ignore"):
        for each in values:
            squares += (np.asarray(each, np.float64).ravel() - middle) ** 2
    return middle, np.sqrt(squares / len(values))


def _possible(steps: Iterator[Arrays]) -> Iterator[Arrays]:
    """Those of ``steps`` that a model can run: some models end, as when they count through a table."""
    with contextlib.suppress(Exception):
        yield from steps


def _open_or_none(model: onnx.ModelProto) -> ort.InferenceSession | None:
    try:
        return open_unoptimized(model.SerializeToString())
    except Exception:
        # Some models cannot run with other outputs; then no node is named.
        return None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value < 1e7 else f"{value:.2g}"


def _has_gaps(output: Array, wanted: Array) -> bool:
    """Whether ``output`` has NaN or Inf where ``wanted`` has none, or another shape."""
    if output.shape != wanted.shape:
        return True
    if output.dtype.kind != "f":
        return False
    return bool((~np.isfinite(output) & np.isfinite(np.asarray(wanted, np.float64))).any())
