"""Pools of any kernel as the largest, or the sum, of slices along one axis after the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.dtypes import Array
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewrites.matching import spatial
from hatch_epcontext.graph.rewriting import corrects, rewrites
from hatch_epcontext.graph.scope import Scope

_MAX_SLICES = 256


_PADDING = ("auto_pad", "ceil_mode", "count_include_pad", "pads")
"""The attributes of pools that say what is beyond the borders."""


@dataclass(frozen=True)
class _Window:
    """A pool along one axis: ``result`` windows of ``kernel`` values, in ``size`` values with padding."""

    axis: int
    size: int
    result: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int

    def of(self, offset: int) -> slice:
        """The values at ``offset`` of all windows."""
        start = offset * self.dilation
        return slice(start, start + (self.result - 1) * self.stride + 1, self.stride)

    @property
    def total(self) -> int:
        """The values that the windows cover, with padding, and what is beyond it in the last window."""
        return max(self.last, self.before + self.size + self.after)

    @property
    def last(self) -> int:
        """The values that the windows cover up to the end of the last one, with padding."""
        return (self.result - 1) * self.stride + (self.kernel - 1) * self.dilation + 1

    def counts(self, *, padding: bool) -> Array:
        """How many values each window has, with or without those of the padding."""
        start, end = self.before, self.before + self.size
        present = np.zeros(self.total)
        present[0 if padding else start : end + self.after * padding] = 1
        parts = [present[self.of(offset)] for offset in range(self.kernel)]
        return np.asarray(np.sum(parts, axis=0))


@rewrites("AveragePool", "LpPool", "MaxPool")
def pool_as_slices(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A pool as the largest or the sum of slices."""
    (value,) = node.input
    shape, result = scope.fixed_shape(value), scope.fixed_shape(node.output[0])
    if builder.dtype.kind != "f" or builder.opset < 10:
        return Declined("its opset is below 10, or it pools no floats")
    windows = _windows(node, shape, result)
    if len(node.output) > 1 and node.output[1]:
        return _with_indices(node, value, shape, windows, builder)
    if sum(window.kernel for window in windows) > _MAX_SLICES:
        return Declined("its kernel is large")
    if node.op_type == "MaxPool":
        return [_pooled("Max", value, shape, windows, float(np.finfo(builder.dtype).min), builder)]
    power = graph.number(node, "p", 2)
    if node.op_type == "LpPool":
        value = builder.add("Abs", value)
        value = builder.add("Pow", value, builder.number(power)) if power != 1 else value
    value = _pooled("Add", value, shape, windows, 0.0, builder)
    if node.op_type == "LpPool":
        return [builder.add("Pow", value, builder.number(1 / power)) if power != 1 else value]
    padding = bool(graph.number(node, "count_include_pad", 0))
    counts = _counts(windows, padding=padding)
    return [builder.add("Mul", value, builder.store((1 / counts).astype(builder.dtype)))]


def _is_padded_unevenly(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether windows of a sum may end in a padding other than that of a kernel with a middle value."""
    pads, kernel = (graph.attribute(node, name, [0]) for name in ("pads", "kernel_shape"))
    middle = {size // 2 for size in kernel if size % 2}
    is_even = not any(pads) or {*pads} == middle
    rounds_up = bool(graph.number(node, "ceil_mode", 0))
    return not is_even or graph.text(node, "auto_pad").startswith("SAME") or rounds_up


@corrects("pool-padding", "AveragePool", "LpPool", applies=_is_padded_unevenly)
def _pad_before(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The pool of values with zeros around them, times what makes means of its own counts."""
    (value,) = node.input
    shape, result = scope.shape(value), scope.shape(node.output[0])
    if shape is None or result is None:
        return None
    windows = _windows(node, shape, result)
    before = [window.before for window in windows]
    after = [max(0, window.last - window.before - window.size) for window in windows]
    pads = [0, 0, *before, 0, 0, *after]
    if any(pads):
        (value,) = builder.add_with("Pad", value, pads)
    (value,) = builder.add_like(node, node.op_type, [value], "", **dict.fromkeys(_PADDING))
    if node.op_type == "LpPool":
        return [value]
    padding = bool(graph.number(node, "count_include_pad", 0))
    counts = _counts(windows, padding=padding)
    factors = math.prod(window.kernel for window in windows) * (1 / counts)
    if (factors == 1).all():
        return [value]
    return [builder.add("Mul", value, builder.store(factors.astype(builder.dtype)))]


def _counts(windows: Sequence[_Window], *, padding: bool) -> NDArray[np.float64]:
    """How many values each window of all axes has, with or without those of the padding."""
    counts = np.ones(1)
    for window in windows:
        counts = np.multiply.outer(counts, window.counts(padding=padding))
    return counts


def _windows(
    node: onnx.NodeProto, shape: Sequence[int], result: Sequence[int]
) -> tuple[_Window, ...]:
    count = len(shape) - 2
    kernel = graph.attribute(node, "kernel_shape", [])
    strides, dilations, pads = spatial(node, count)
    auto, windows = graph.text(node, "auto_pad"), list[_Window]()
    facts = (shape[2:], result[2:], kernel, strides, dilations, pads[:count], pads[count:])
    for axis, numbers in enumerate(zip(*facts, strict=True), start=2):
        window = _Window(axis, *numbers)
        if auto.startswith("SAME"):
            padding = max(0, window.last - window.size)
            less, more = padding // 2, padding - padding // 2
            before, after = (less, more) if auto == "SAME_UPPER" else (more, less)
            window = replace(window, before=before, after=after)
        windows.append(window)
    return tuple(windows)


def _padded(
    value: str, shape: list[int], windows: Sequence[_Window], filler: float, builder: Builder
) -> str:
    for window in windows:
        after = window.total - window.before - window.size
        parts = []
        for amount, part in ((window.before, ""), (0, value), (after, "")):
            sizes = [*shape]
            sizes[window.axis] = amount
            if part or amount:
                filled = np.full(sizes, filler, builder.dtype)
                parts.append(part or builder.store(filled))
        value = builder.concat(parts, window.axis)
        shape[window.axis] = window.total
    return value


def _sliced(
    value: str, windows: Sequence[_Window], offsets: Sequence[int], builder: Builder
) -> str:
    slices = [window.of(offset) for window, offset in zip(windows, offsets, strict=True)]
    operands = (
        [part.start for part in slices],
        [part.stop for part in slices],
        [window.axis for window in windows],
        [part.step for part in slices],
    )
    return builder.add("Slice", value, *map(builder.integers, operands))


def _pooled(
    op: str,
    value: str,
    shape: Sequence[int],
    windows: Sequence[_Window],
    filler: float,
    builder: Builder,
) -> str:
    """``op`` of all values of each window."""
    sizes = [*shape]
    for window in windows:
        value = _padded(value, sizes, [window], filler, builder)
        parts = [_sliced(value, [window], [offset], builder) for offset in range(window.kernel)]
        sizes[window.axis] = window.result
        while len(parts) > 1:
            pairs = itertools.zip_longest(parts[::2], parts[1::2])
            parts = [builder.add(op, *pair) if pair[1] else pair[0] for pair in pairs]
        (value,) = parts
    return value


def _with_indices(
    node: onnx.NodeProto,
    value: str,
    shape: Sequence[int],
    windows: Sequence[_Window],
    builder: Builder,
) -> Outputs:
    """The largest values, and their numbers in the whole tensor."""
    if math.prod(window.kernel for window in windows) > _MAX_SLICES:
        return Declined("its kernel is large")
    spatial = np.arange(math.prod(shape[2:]))
    order: Literal["C", "F"] = "F" if graph.number(node, "storage_order", 0) else "C"
    numbers = (
        np.arange(math.prod(shape[:2])).reshape(*shape[:2], *[1] * len(windows)) * spatial.size
    )
    numbers = numbers + spatial.reshape(tuple(shape[2:]), order=order)
    pads = [(window.before, window.total - window.before - window.size) for window in windows]
    numbers = np.pad(numbers, [(0, 0), (0, 0), *pads]).astype(np.int64)
    padded = _padded(value, [*shape], windows, float(np.finfo(builder.dtype).min), builder)
    largest = index = ""
    for offsets in itertools.product(*(range(window.kernel) for window in windows)):
        part = _sliced(padded, windows, offsets, builder)
        slices = [window.of(offset) for window, offset in zip(windows, offsets, strict=True)]
        at = (slice(None), slice(None), *slices)
        own = builder.store(numbers[at])
        if largest:
            is_larger = builder.add("Greater", part, largest)
            index = builder.add("Where", is_larger, own, index)
            largest = builder.add("Max", part, largest)
        else:
            largest, index = part, own
    return [largest, index]
