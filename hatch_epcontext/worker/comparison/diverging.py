"""All values inside a model, exact and in an EP's number format, which show where its error begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from hatch_epcontext.graph.dtypes import Array, Arrays
from hatch_epcontext.graph.scope import Scope

WRONG = 0.1
"""The relative error of a value from which it is wrong."""

_MATTERS = 0.01
"""The relative error after a clamped value, or after a number that the format lacks, from which it matters:
in masks, which only hide values, it does not."""


@dataclass(frozen=True)
class Inner:
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
            name: relative(exact, self.rounded[name])
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
        return max((largest(array) for array in self._results(node)), default=0.0)

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

    def _results(self, node: onnx.NodeProto) -> Iterator[Array]:
        for name in node.output:
            if name in self.errors:
                yield self.exact[name]


def named(node: onnx.NodeProto) -> str:
    """The operator and the name of ``node``, for messages."""
    return f"{node.op_type} {node.name or node.output[0]}"


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
    return bool((np.abs(one - two) > WRONG * np.abs(one)).any())
