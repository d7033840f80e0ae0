"""Samples between two others, in which a value is between two numbers with which the graph compares it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import operators
from hatch_epcontext.graph.dtypes import Array, Arrays, is_float
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.worker.comparison.runs import ReferenceRun

_MOST = 48
"""The most samples between two: about as many as separate two thresholds that differ by a millionth."""

Frames = list[dict[str, Array]]

Result = Callable[[Frames], ReferenceRun | None]


@dataclass(frozen=True)
class Comparisons:
    """What a graph compares: ``pairs`` of the names of operands, or of constants."""

    pairs: tuple[tuple[str | Array, str | Array], ...]

    @staticmethod
    def of(scope: Scope, names: Iterable[str]) -> Comparisons:
        """Those in ``scope`` on which the values called ``names`` depend."""
        nodes = [scope.nodes[index] for index in scope.needed_nodes(names)]
        return Comparisons(
            tuple(
                (_operand(node.input[0], scope), _operand(node.input[1], scope))
                for node in nodes
                if node.op_type in operators.COMPARES and scope.varies(node.output)
            )
        )

    @property
    def names(self) -> frozenset[str]:
        """The operands that are no constants."""
        return frozenset(name for pair in self.pairs for name in pair if isinstance(name, str))

    def sides(self, run: ReferenceRun) -> set[tuple[int, int]]:
        """On which sides of each other the operands of each pair are in ``run``: at least and at most."""
        result = set()
        for feeds, (outputs, inner) in zip(run.frames, run.results, strict=True):
            known = {**feeds, **outputs, **inner}
            for number, (one, other) in enumerate(self.pairs):
                for sign in _signs(_value(one, known), _value(other, known)):
                    result.add((number, sign))
        return result


def _operand(name: str, scope: Scope) -> str | Array:
    constant = scope.constant(name)
    return name if constant is None else constant


def _value(operand: str | Array, known: Arrays) -> Array | None:
    return known.get(operand) if isinstance(operand, str) else operand


def _signs(one: Array | None, other: Array | None) -> Iterator[int]:
    """The least and the largest sign of the difference of two values, if these are numbers."""
    if one is None or other is None or "O" in (one.dtype.kind, other.dtype.kind):
        return
    signs = np.sign(np.nan_to_num(one.astype(np.float64) - other.astype(np.float64)))
    if signs.size:
        yield from (int(signs.min()), int(signs.max()))


def between(
    one: ReferenceRun,
    other: ReferenceRun,
    comparisons: Comparisons,
    result: Result,
    is_wanted: Callable[[ReferenceRun], bool],
) -> ReferenceRun | None:
    """The first run that ``is_wanted`` of those half-way between two whose ``comparisons`` differ, from
    ``one`` and ``other`` on; None if there is none. ``result``: of frames, None if they cannot be run.
    """
    waiting = deque([(one, other)])
    for _ in range(_MOST):
        if not waiting:
            return None
        first, last = waiting.popleft()
        middle = result(half_way(first, last))
        if middle is None:
            continue
        if is_wanted(middle):
            return middle
        sides = comparisons.sides(middle)
        waiting += (
            pair
            for pair in ((first, middle), (middle, last))
            if sides != comparisons.sides(pair[0]) or sides != comparisons.sides(pair[1])
        )
    return None


def half_way(one: ReferenceRun, other: ReferenceRun) -> Frames:
    """The frames half-way from ``one`` to ``other``, which may lack inputs."""
    return [
        {name: _mean(array, ends[name]) if name in ends else array for name, array in frame.items()}
        for frame, ends in zip(one.frames, other.frames, strict=True)
    ]


def _mean(one: Array, other: Array) -> Array:
    if one.dtype.kind in "bcOSU":
        return one
    middle = (one.astype(np.float64) + other.astype(np.float64)) / 2
    return np.asarray(middle if is_float(one.dtype) else np.rint(middle)).astype(one.dtype)
