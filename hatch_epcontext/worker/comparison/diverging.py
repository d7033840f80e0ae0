"""Where another form of a model begins to differ: all values inside both are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from hatch_epcontext.graph.dtypes import Array, Arrays
from hatch_epcontext.graph.external import load_whole
from hatch_epcontext.graph.rounding import expose
from hatch_epcontext.graph.scope import Scope, Types
from hatch_epcontext.worker.comparison.runs import Reference, ReferenceRun, run_steps
from hatch_epcontext.worker.protocol import step
from hatch_epcontext.worker.session import open_unoptimized
from hatch_epcontext.worker.value_types import value_types

_WRONG = 0.1
"""The relative error of a value from which it is wrong."""

_MATTERS = 0.01
"""The relative error after a clamped value, or after a number that the format lacks, from which it matters:
in masks, which only hide values, it does not."""

_JUMPS = (10.0, 3.0)
"""The ratios of a result's error to the errors of its operands from which a node counts as the cause."""

_MAX_VALUES = 2**28
"""The most values inside a model of which all are compared: 2 GiB for both runs."""


@dataclass(frozen=True)
class Inner:
    """All values of a step: ``exact``, and those of another form of the model, by the same names."""

    exact: Arrays
    other: Arrays

    @cached_property
    def errors(self) -> Mapping[str, float]:
        """The relative error of each value."""
        return {
            name: relative(exact, self.other[name])
            for name, exact in self.exact.items()
            if exact.dtype == np.float32
            and name in self.other
            and exact.shape == self.other[name].shape
        }

    def behind(self, node: onnx.NodeProto) -> float:
        """The largest error of the results of ``node``."""
        return max((self.errors.get(name, 0.0) for name in node.output), default=0.0)

    def before(self, node: onnx.NodeProto) -> float:
        """The largest error of its operands."""
        return max((self.errors.get(name, 0.0) for name in node.input), default=0.0)

    def words(self, node: onnx.NodeProto) -> str:
        """The errors of ``node``, in words."""
        behind, before = map(_percent, (self.behind(node), self.before(node)))
        return f"{named(node)} has an error of {behind}, and its operands of {before}"

    def largest(self, node: onnx.NodeProto) -> float:
        """The largest magnitude of its results."""
        return max((largest(array) for array in self._results(node)), default=0.0)

    def size(self, node: onnx.NodeProto) -> float:
        """The root mean square of its first result."""
        arrays = (array.astype(np.float64) for array in self._results(node) if array.size)
        return next((float(np.sqrt(np.mean(array**2))) for array in arrays), 0.0)

    def range(self, name: str) -> tuple[float, float]:
        """The smallest and the largest value of ``name``."""
        array = self.exact.get(name)
        if array is None or not array.size:
            return math.inf, -math.inf
        return float(np.min(array)), float(np.max(array))

    def matters(self, node: onnx.NodeProto, scope: Scope) -> bool:
        """Whether an error in the values of ``node`` still exists after the nodes that read them."""
        for name in node.output:
            if name not in self.errors or not _differ(self.exact[name], self.other[name]):
                continue
            readers = [scope.nodes[index] for index in scope.readers.get(name, ())]
            if not readers or any(self.behind(reader) > _MATTERS for reader in readers):
                return not all(self._hides(reader, scope) for reader in readers) or not readers
        return False

    def _hides(self, node: onnx.NodeProto, scope: Scope) -> bool:
        """Whether the following nodes hide the error in the result of ``node``, as a Softmax does."""
        readers = [
            scope.nodes[index] for name in node.output for index in scope.readers.get(name, ())
        ]
        if self.behind(node) <= _MATTERS:
            return True
        return bool(readers) and all(self.behind(reader) <= _MATTERS for reader in readers)

    def _results(self, node: onnx.NodeProto) -> Iterator[Array]:
        for name in node.output:
            if name in self.errors:
                yield self.exact[name]


Suspects = Callable[[onnx.NodeProto, "Inner"], bool]
"""Whether a node is of some kind, as all values show it."""


class Divergence:
    """Two forms of a model on the CPU, whose values have the same names; the ``other`` one may be wrong.

    ``scope``: of one of them, with the nodes in order. ``exact`` and ``other`` return the forms, with all
    their values as outputs, when they are needed.
    """

    def __init__(
        self,
        reference: Reference,
        scope: Scope,
        exact: Callable[[], onnx.ModelProto],
        other: Callable[[], onnx.ModelProto],
    ) -> None:
        self._reference, self._scope = reference, scope
        self._forms = exact, other
        self._inner: dict[str, Inner | None] = {}

    def find(
        self, run: ReferenceRun, is_hidden: Suspects, is_cause: Suspects
    ) -> onnx.NodeProto | None:
        """The first node whose error is much larger than that of its operands, or that ``is_cause`` accepts.

        Nodes that ``is_hidden`` accepts have errors without effect. None without an error, or if the values
        are unknown.
        """
        if (inner := self.inner(run)) is None:
            return None
        wrong = min(_WRONG, self.error(run, inner) / 2)
        grown = [
            (node, inner.behind(node), inner.before(node))
            for node in self._scope.nodes
            if inner.behind(node) > wrong and not is_hidden(node, inner)
        ]
        for jump in _JUMPS:
            causes = {node.output[0] for node, behind, before in grown if behind > jump * before}
            for node in self._scope.nodes:
                if node.output[0] in causes or is_cause(node, inner):
                    return node
        if not grown:
            return None
        node, *_ = max(grown, key=lambda item: item[1] / max(item[2], 1e-9))
        return node

    def inner(self, run: ReferenceRun) -> Inner | None:
        """All values of the first wrong step of ``run``, or of its last step, in both forms.

        None if they are too many, or if the model cannot run with all of them as outputs.
        """
        if run.name not in self._inner:
            self._inner[run.name] = self._compute_inner(run)
        return self._inner[run.name]

    def exact_steps(self, run: ReferenceRun) -> Iterator[Arrays] | None:
        """All values of the exact form in each step of ``run``; None if they are unknown."""
        return None if self._exact is None else self._steps(self._exact, run)

    def _compute_inner(self, run: ReferenceRun) -> Inner | None:
        if self._exact is None or self._other is None:
            return None
        inner = None
        steps = (self._steps(session, run) for session in (self._exact, self._other))
        for exact, other in zip(*steps, strict=True):
            inner = Inner(exact, other)
            if self.error(run, inner) > _WRONG:
                # Errors in later steps come from this one.
                break
        return inner

    def error(self, run: ReferenceRun, inner: Inner) -> float:
        """The largest error of the compared values."""
        names = (*run.outputs[0], *self._reference.facts.selections.reads)
        return max((inner.errors.get(name, 0.0) for name in names), default=0.0)

    @cached_property
    def _exact(self) -> ort.InferenceSession | None:
        results = (name for node in self._scope.nodes for name in node.output)
        size = sum(math.prod(self._scope.shape(name) or (1,)) for name in results)
        step("looking for the first node that differs")
        return None if size > _MAX_VALUES else _open(self._forms[0])

    @cached_property
    def _other(self) -> ort.InferenceSession | None:
        return _open(self._forms[1])

    def _steps(self, session: ort.InferenceSession, run: ReferenceRun) -> Iterator[Arrays]:
        """All values of ``session`` in each step of ``run``, with its inputs."""
        states, fed = self._reference.facts.states, dict[str, Array]()
        what = "the model with all its values"
        steps = run_steps(session, run.feeds, states, what)
        for feeds, outputs in zip(run.feeds, steps, strict=True):
            fed.update(feeds)
            yield {**fed, **outputs}
            fed.update({name: outputs[last] for name, last in states.items() if last in outputs})


def _open(form: Callable[[], onnx.ModelProto]) -> ort.InferenceSession | None:
    try:
        return open_unoptimized(form().SerializeToString())
    except Exception:
        # Some models cannot run with other outputs; then no node is named.
        return None


def _never(node: onnx.NodeProto, inner: Inner) -> bool:
    return False


def first_difference(exact: Path, other: Path, reference: Reference, run: ReferenceRun) -> str:
    """A sentence about the first node of the file ``other`` whose result differs from the file ``exact``.

    Both are forms of one model, and the CPU runs them. Empty if the node is unknown.
    """
    try:
        forms = [load_whole(path) for path in (exact, other)]
        types = [value_types(form, path) for form, path in zip(forms, (exact, other), strict=True)]
        opened = (partial(exposed, *form) for form in zip(forms, types, strict=True))
        divergence = Divergence(reference, Scope.of(forms[1], types[1]), *opened)
        node = divergence.find(run, _never, _never)
        inner = divergence.inner(run)
    except Exception:
        # ONNX Runtime raises many types for models that cannot run with other outputs.
        return ""
    # Without an error in floats that are compared, the smallest error would count.
    if node is None or inner is None or not divergence.error(run, inner):
        return ""
    return f"The first diverging node: {inner.words(node)}."


def exposed(model: onnx.ModelProto, types: Types) -> onnx.ModelProto:
    """A copy of ``model`` with all its floats as outputs; ``types``: of its values."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    expose(copy, types)
    return copy


def named(node: onnx.NodeProto) -> str:
    """The operator and the name of ``node``, for messages."""
    return f"{node.op_type} {node.name or node.output[0]}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 1 else "100 % and more"


def largest(array: NDArray[Any]) -> float:
    """The largest magnitude in ``array``; 0 without values."""
    return float(np.abs(array).max()) if array.size else 0.0


def relative(exact: Array, other: Array) -> float:
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
