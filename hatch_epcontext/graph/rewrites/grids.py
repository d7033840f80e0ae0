"""GridSample as Gathers of neighbours, whose indices and weights are computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
from onnx import TensorProto

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope

_CUBIC = -0.75
"""The coefficient of a bicubic GridSample."""


_Neighbours = Sequence[Sequence[tuple[str, str]]]
"""The neighbours along each axis: their indices and weights."""


@dataclass(frozen=True)
class _Axis:
    """One axis of the sampled values: its ``size``, and the ``position`` in it of each result, flat."""

    builder: Builder
    size: int
    position: str
    is_aligned: bool

    def neighbours(self, mode: str, padding: str) -> Iterator[tuple[str, str]]:
        """The index (int32) of each neighbour, and its weight: empty for 1, and 0 in a padding with zeros."""
        builder = self.builder
        if mode == "nearest":
            yield self._within(builder.add("Round", self.position), "", padding)
            return
        first = builder.add("Floor", self.position)
        distance = builder.add("Sub", self.position, first)
        offsets = (0, 1) if mode == "linear" else (-1, 0, 1, 2)
        for offset in offsets:
            index = builder.add("Add", first, builder.number(offset)) if offset else first
            weight = self._weight(distance, offset, mode)
            yield self._within(index, weight, padding)

    def _weight(self, distance: str, offset: int, mode: str) -> str:
        builder = self.builder
        if mode == "linear":
            return distance if offset else builder.add("Sub", builder.number(1), distance)
        away = builder.add("Abs", builder.add("Sub", distance, builder.number(offset)))
        near = [_CUBIC + 2, -(_CUBIC + 3), 0.0, 1.0]
        far = [_CUBIC, -5 * _CUBIC, 8 * _CUBIC, -4 * _CUBIC]
        first, *others = near if offset in (0, 1) else far
        result = builder.number(first)
        for coefficient in others:
            result = builder.add("Mul", result, away)
            result = builder.add("Add", result, builder.number(coefficient))
        return result

    def _within(self, index: str, weight: str, padding: str) -> tuple[str, str]:
        """``index`` as that of a value, and ``weight``, or 0 for one of no value."""
        builder, last = self.builder, self.size - 1
        if padding == "reflection":
            index = self.reflected(index)
        inside = builder.clip(index, 0, last)
        if padding == "zeros":
            # 1 inside, and 0 from a whole number outside on.
            away = builder.add("Abs", builder.add("Sub", index, inside))
            counts = builder.add("Sub", builder.number(1), builder.clip(away, 0, 1))
            weight = builder.add("Mul", weight, counts) if weight else counts
        return builder.add("Cast", inside, to=TensorProto.INT32), weight

    def reflected(self, position: str) -> str:
        """``position`` between the borders, at which it is reflected."""
        builder = self.builder
        low = 0.0 if self.is_aligned else -0.5
        span = self.size - 1 if self.is_aligned else self.size
        if not span:
            return builder.add("Mul", position, builder.number(0))
        moved = builder.add("Abs", builder.add("Sub", position, builder.number(low)))
        turns = builder.add("Floor", builder.add("Mul", moved, builder.number(0.5 / span)))
        rest = builder.add("Sub", moved, builder.add("Mul", turns, builder.number(2 * span)))
        # Up, and down again.
        away = builder.add("Abs", builder.add("Sub", rest, builder.number(span)))
        up = builder.add("Sub", builder.number(span), away)
        return builder.add("Add", up, builder.number(low))


@rewrites("GridSample")
def grid_sample_as_gathers(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The weighted sum of the neighbours of each point."""
    value, grid = node.input
    shape, grid_shape = scope.fixed_shape(value), scope.fixed_shape(grid)
    batch, channels, *sizes = shape
    count, points = len(sizes), math.prod(grid_shape[1:-1])
    mode = graph.text(node, "mode") or "linear"
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    padding = graph.text(node, "padding_mode") or "zeros"
    is_aligned = bool(graph.number(node, "align_corners", 0))
    axes = []
    for index, size in enumerate(sizes):
        # The last coordinate is that of the first axis.
        position = builder.item(grid, len(grid_shape) - 1, count - 1 - index)
        position = builder.reshape(position, [batch, points])
        half = (size - 1) / 2 if is_aligned else size / 2
        position = builder.add("Mul", position, builder.number(half))
        position = builder.add("Add", position, builder.number((size - 1) / 2))
        axis = _Axis(builder, size, position, is_aligned)
        if mode != "cubic" and padding == "reflection":
            axis = _Axis(builder, size, axis.reflected(position), is_aligned)
        if mode != "cubic" and padding != "zeros":
            axis = _Axis(builder, size, builder.clip(axis.position, 0, size - 1), is_aligned)
        axes.append(axis)
    rows = builder.transpose(value, [0, *range(2, count + 2), 1])
    rows = builder.reshape(rows, [batch * math.prod(sizes), channels])
    inner = padding if mode == "cubic" or padding == "zeros" else "border"
    neighbours = [[*axis.neighbours(mode, inner)] for axis in axes]
    result = _summed(rows, neighbours, shape, points, builder)
    result = builder.reshape(result, [batch, *grid_shape[1:-1], channels])
    return [builder.transpose(result, [0, count + 1, *range(1, count + 1)])]


def _summed(
    rows: str, neighbours: _Neighbours, shape: Sequence[int], points: int, builder: Builder
) -> str:
    """The sum of the neighbours in ``rows``, times the products of their weights."""
    (batch, _, *sizes), total = shape, ""
    starts = np.arange(batch, dtype=np.int32).reshape(-1, 1) * math.prod(sizes)
    for taps in itertools.product(*neighbours):
        index = weight = ""
        for (own, factor), size in zip(taps, sizes, strict=True):
            if index:
                index = builder.add("Mul", index, builder.store(np.int32(size)))
            index = builder.add("Add", index, own) if index else own
            weight = builder.add("Mul", weight, factor) if weight and factor else weight or factor
        if batch > 1:
            index = builder.add("Add", index, builder.store(starts.astype(np.int32)))
        part = builder.add("Gather", rows, builder.reshape(index, [batch * points]), axis=0)
        if weight:
            part = builder.add("Mul", part, builder.reshape(weight, [batch * points, 1]))
        total = builder.add("Add", total, part) if total else part
    return total
