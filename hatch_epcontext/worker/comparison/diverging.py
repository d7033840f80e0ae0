"""The first node of a model that an EP's number format makes wrong, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.dtypes import Array, Arrays, Numbers
from hatch_epcontext.graph.facts import NodeFacts, short_name
from hatch_epcontext.graph.rounding import applies, decisive, exposed, rounded
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.worker.comparison.emulation import FormattedModel
from hatch_epcontext.worker.comparison.levels import WORTH_RUNNING, Levels
from hatch_epcontext.worker.comparison.runs import Reference, ReferenceRun, run_frames
from hatch_epcontext.worker.session import open_unoptimized

_LOST = 0.5
"""The relative error from which a format counts as lacking a stored number."""

_MAX_VALUES = 2**28
"""The most values inside a model of which all are compared: 2 GiB for both runs."""

_WRONG = 0.1
"""The relative error of a value from which it is wrong."""

_MATTERS = 0.01
"""The relative error after a clamped value, or after a number that the format lacks, from which it matters:
in masks, which only hide values, it does not."""

_LINEAR = operators.MOVES | operators.MEANS | {"Add", "Div", "Mul", "Neg", "ReduceSum", "Sub"}
"""Operators that hide no error in their operands."""


@dataclass(frozen=True)
class _Inner:
    """All values of a frame: ``exact``, and in the number format (``rounded``), by the same names.

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

        A Softmax may be the second one, which hides the error of a mask. Nodes that only scale or add do not
        count.
        """
        changed = (n for n in node.output if n in self.errors)
        is_changed = any(_differ(self.exact[name], self.rounded[name]) for name in changed)
        return is_changed and self._lasts(node, scope, 2)

    def _lasts(self, node: onnx.NodeProto, scope: Scope, number: int) -> bool:
        """Whether an error still exists ``number`` nodes behind ``node``, or at the end of the model."""
        readers = [reader for name in node.output for reader in scope.nodes_reading(name)]
        if not number or not readers:
            return True
        behind = (reader for reader in readers if self.behind(reader) > _MATTERS)
        return any(
            self._lasts(reader, scope, number - (reader.op_type not in _LINEAR))
            for reader in behind
        )


@dataclass(frozen=True)
class Divergence:
    """What the format of ``model`` changes inside it for samples of the ``reference``."""

    model: FormattedModel
    reference: Reference

    def first(self, run: ReferenceRun) -> NodeFacts | None:
        """The first node whose results are wrong for ``run``, and why; None if there is none."""
        inner = self._inner(run)
        if inner is None:
            return None
        return self._overflow(inner) or self._first_wrong(inner, min(_WRONG, inner.error / 2))

    def overflow(self, run: ReferenceRun) -> NodeFacts | None:
        """The first node with integers for ``run`` that have more bits than the EP's; None if none has."""
        inner = self._inner(run) if self.model.integer_bits < 64 else None
        return None if inner is None else self._overflow(inner)

    def _overflow(self, inner: _Inner) -> NodeFacts | None:
        end, bits = 2.0 ** (self.model.integer_bits - 1), self.model.integer_bits
        for node in self.model.computed:
            results = (inner.exact[name] for name in node.output if name in inner.exact)
            sizes = [_largest(array.astype(float)) for array in results if array.dtype == np.int64]
            if (largest := max(sizes, default=0.0)) > end:
                reason = f"reaches {_number(largest)}; the EP computes integers in {bits} bits"
                return NodeFacts(node.name, graph.operator(node), reason)
        return None

    def culprit(self, run: ReferenceRun) -> NodeFacts | None:
        """The first node of which the format loses the results for ``run``: a limit allows no such error.

        Or the first one that reads or makes values which are not finite, if the format has none.
        """
        inner = self._inner(run)
        if inner is None or not self.model.format.seen:
            return None
        if node_facts := self._first_wrong(inner, _WRONG):
            return node_facts
        infinite = {name for name, array in inner.exact.items() if not np.isfinite(array).all()}
        for node in self.model.computed:
            if not infinite.isdisjoint((*node.input, *node.output)):
                reason = (
                    f"has values that are not finite, which the EP's {self.model.format.name} lacks"
                )
                return NodeFacts(node.name, graph.operator(node), reason)
        return None

    def hurt(self, levels: Levels) -> Iterator[str]:
        """Nodes whose values are clamped, or that use a number that the format cannot represent."""
        first, worst = levels[0].run, levels.worst.run
        for run in (first,) if worst is first else (first, worst):
            is_right = levels.of(run).snr > 2 * WORTH_RUNNING
            is_hurt = self._lost or (not is_right and self._exceeds(run))
            inner = self._inner(run) if is_hurt else None
            if inner is not None and (node := self._first_wrong(inner, math.inf)):
                yield describe(node)

    def _first_wrong(self, inner: _Inner, error: float) -> NodeFacts | None:
        """The first node whose values the format clamps, that uses a number which it lacks, or whose results
        have a larger ``error``, with the reason.

        What has no effect counts as right, as in a mask.
        """
        for node in self.model.scope.nodes:
            is_clamped = inner.largest(node) > self.model.format.largest
            if is_clamped or not self._lost.keys().isdisjoint(node.input):
                is_wrong = inner.matters(node, self.model.scope)
            else:
                is_wrong = inner.behind(node) > error
            if is_wrong:
                return NodeFacts(node.name, graph.operator(node), self._words(node, inner))
        return None

    def _inner(self, run: ReferenceRun) -> _Inner | None:
        """All values of the first wrong frame of ``run``, or of its last frame.

        None if they are too many, or if the model cannot run with all of them as outputs.
        """
        # Those of the last run only: they may take gigabytes.
        if run.name not in self._last:
            self._last.clear()
            self._last[run.name] = self._inner_anew(run)
        return self._last[run.name]

    @cached_property
    def _last(self) -> dict[str, _Inner | None]:
        """What `_inner` gave last, by the name of the sample."""
        return {}

    def _inner_anew(self, run: ReferenceRun) -> _Inner | None:
        if self._exact is None or self._inexact is None:
            return None
        outputs = frozenset((*run.outputs[0], *self.reference.facts.selections.reads))
        frames = (self._values(session, run) for session in (self._exact, self._inexact))
        for exact, inexact in zip(*frames, strict=True):
            inner = _Inner(exact, inexact, outputs)
            if inner.error > _WRONG:
                # Errors in later frames come from this one.
                break
        return inner

    def _values(self, session: ort.InferenceSession, run: ReferenceRun) -> Iterator[Arrays]:
        """All values of ``session`` in each frame of ``run``, with its inputs."""
        states, fed = self.reference.facts.states, dict[str, Array]()
        frames = run_frames(session, run.frames, states)
        for feeds, outputs in zip(run.frames, frames, strict=True):
            fed.update(feeds)
            yield {**fed, **outputs}
            fed.update({name: outputs[last] for name, last in states.items() if last in outputs})

    @cached_property
    def _exact(self) -> ort.InferenceSession | None:
        """A session that returns all values of the prepared model."""
        results = (name for node in self.model.scope.nodes for name in node.output)
        size = sum(math.prod(self.model.scope.shape(name) or (1,)) for name in results)
        return None if size > _MAX_VALUES else _open(self._exposed)

    @cached_property
    def _inexact(self) -> ort.InferenceSession | None:
        """The same in the number format."""
        return _open(self.model.rounding(self._exposed))

    @property
    def _exposed(self) -> onnx.ModelProto:
        return exposed(self.model.prepared, self.model.scope)

    def _exceeds(self, run: ReferenceRun) -> bool:
        """Whether values of ``run`` are beyond the format's largest."""
        return self._exact is not None and any(
            array.dtype == np.float32 and _largest(array) > self.model.format.largest
            for values in self._values(self._exact, run)
            for array in values.values()
        )

    @cached_property
    def _lost(self) -> Mapping[str, float]:
        """The stored numbers that the format cannot represent."""
        lost = {}
        for tensor in self.model.prepared.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT and math.prod(tensor.dims) == 1:
                value = onnx.numpy_helper.to_array(tensor).reshape(1)
                if _relative(value, rounded(value, self.model.format)) > _LOST:
                    lost[tensor.name] = float(value[0])
        return lost

    def _words(self, node: onnx.NodeProto, inner: _Inner) -> str:
        """The fault in the result of ``node``, as the end of a sentence about it."""
        format_ = self.model.format
        if lost := [self._lost[operand] for operand in node.input if operand in self._lost]:
            return f"uses {lost[0]:g}, which {format_.name} does not have"
        largest = inner.largest(node)
        wide = node.op_type in format_.sums
        if largest > (ends := format_.largest_of_sums if wide else format_.largest):
            return f"reaches {_number(largest)}; {format_.name} ends at {_number(ends)}"
        for fault in format_.faults_of(graph.operator(node)):
            if fault.gives is not None and applies(fault, node, self.model.scope):
                operands = (self._fed(name, inner) for name in node.input)
                fed = decisive(fault, [*operands])
                if ((fed >= fault.low) & (fed <= fault.high)).any():
                    return fault.text
        error = min(100 * inner.behind(node), 100)
        return f"has an error of {float(f'{error:.2g}'):g} %"

    def _fed(self, name: str, inner: _Inner) -> Numbers:
        """The values ``name`` in the number format, or stored; none if they are unknown."""
        value = inner.rounded.get(name, self.model.scope.constant(name))
        return np.asarray(() if value is None else value, np.float64)


def describe(node: NodeFacts) -> str:
    """A sentence about ``node``, without its period."""
    return f"{node.op} {short_name(node.name)} {node.reason}"


def _open(model: onnx.ModelProto) -> ort.InferenceSession | None:
    try:
        return open_unoptimized(model.SerializeToString())
    except Exception:
        # Some models cannot run with other outputs; then no node is named.
        return None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value < 1e7 else f"{value:.2g}"


def _largest(array: NDArray[Any]) -> float:
    """The largest magnitude in ``array``; 0 without values."""
    return max(float(array.max()), -float(array.min())) if array.size else 0.0


def _relative(exact: Array, other: Array) -> float:
    """The error of ``other`` relative to ``exact``, as root mean squares."""
    one, two = (np.asarray(array, np.float64) for array in (exact, other))
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        one, two = np.nan_to_num(one), np.nan_to_num(two)
    with np.errstate(over="ignore", invalid="ignore"):
        error = np.sqrt(((one - two) ** 2).sum() / max((one**2).sum(), 1e-60))
    # Masks contain the largest float32.
    return float(error) if np.isfinite(error) else 1.0


def _differ(exact: Array, other: Array) -> bool:
    """Whether any value differs by a tenth."""
    one, two = np.asarray(exact, np.float64), np.asarray(other, np.float64)
    return bool((np.abs(one - two) > _WRONG * np.abs(one)).any())
