"""Where another form of a model begins to differ: all values inside both are compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from hatch_epcontext.config.settings import Model
from hatch_epcontext.graph.arrays import Array, Arrays
from hatch_epcontext.graph.external import load_whole
from hatch_epcontext.graph.rounding import expose
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.worker.comparison.runs import ReferenceRun, run_steps
from hatch_epcontext.worker.progress import step
from hatch_epcontext.worker.session import open_unoptimized
from hatch_epcontext.worker.value_types import value_types

WRONG = 0.1
"""The relative error of a value from which it is wrong."""

_MATTERS = 0.01
"""The relative error after a clamped value, or after a number that the format lacks, from which it matters:
in masks, which only hide values, it does not."""


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
        return max((largest(each) for each in self._results(node)), default=0.0)

    def smallest(self, node: onnx.NodeProto) -> tuple[float, float]:
        """The root mean square and the largest magnitude of its results."""
        found = [each.astype(np.float64) for each in self._results(node) if each.size]
        if not found:
            return 0.0, 0.0
        return float(np.sqrt(np.mean(found[0] ** 2))), largest(found[0])

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
            if not readers or any(self.behind(each) > _MATTERS for each in readers):
                return not all(self._hides(each, scope) for each in readers) or not readers
        return False

    def _hides(self, node: onnx.NodeProto, scope: Scope) -> bool:
        """Whether the following nodes hide the error in the result of ``node``, as a Softmax does."""
        readers = [
            scope.nodes[index] for name in node.output for index in scope.readers.get(name, ())
        ]
        if self.behind(node) <= _MATTERS:
            return True
        return bool(readers) and all(self.behind(each) <= _MATTERS for each in readers)

    def _results(self, node: onnx.NodeProto) -> Iterator[Array]:
        for name in node.output:
            if name in self.errors:
                yield self.exact[name]


def first_difference(
    exact: Path, other: Path, model: Model, states: Mapping[str, str], run: ReferenceRun
) -> str:
    """A sentence about the first node of the file ``other`` whose result differs from the file ``exact``.

    Both are forms of ``model``, and the CPU runs them. Empty if the node is unknown.
    """
    step("looking for the first node that differs")
    try:
        nodes = onnx.load(other, load_external_data=False).graph.node
        steps = (
            inner_steps(_exposed(path), run, states, model, "the model with all its values")
            for path in (exact, other)
        )
        for one, two in zip(*steps, strict=True):
            inner = Inner(one, two)
            final = max((inner.errors.get(name, 0.0) for name in run.outputs[0]), default=0.0)
            for node in nodes:
                if final and inner.behind(node) > min(WRONG, final / 2):
                    return f"The first diverging node: {inner.words(node)}."
    except Exception:
        # ONNX Runtime raises many types for models that cannot run with other outputs.
        return ""
    return ""


def inner_steps(
    session: ort.InferenceSession,
    run: ReferenceRun,
    states: Mapping[str, str],
    model: Model,
    what: str,
) -> Iterator[dict[str, Array]]:
    """All values of ``session`` in each step of ``run``, with its inputs."""
    fed: dict[str, Array] = {}
    steps = run_steps(session, run.feeds, states, model, what)
    for given, found in zip(run.feeds, steps, strict=True):
        fed.update(given)
        yield {**fed, **found}
        fed.update({first: found[last] for first, last in states.items() if last in found})


def _exposed(path: Path) -> ort.InferenceSession:
    model = load_whole(path)
    expose(model, value_types(model, path))
    return open_unoptimized(model.SerializeToString())


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
        found = np.sqrt(((one - two) ** 2).sum() / max((one**2).sum(), 1e-60))
    # Masks contain the largest float32.
    return float(found) if np.isfinite(found) else 1.0


def _differ(exact: Array, other: Array) -> bool:
    """Whether any value differs by a tenth."""
    one, two = np.asarray(exact, np.float64), np.asarray(other, np.float64)
    return bool((np.abs(one - two) > WRONG * np.abs(one)).any())
