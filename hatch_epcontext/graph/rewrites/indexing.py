"""Operators whose indices follow from sizes: Pad, OneHot, ReverseSequence, and rows of a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import MAX_VALUES, Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope


@rewrites("Pad")
def pad_as_concat(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Pad as a Concat with stored values, or as a Gather of repeated ones."""
    value, pads_name, filler_name, axes_name = graph.operands(node, 4)
    shape, dtype = scope.fixed_shape(value), scope.known_dtype(value)
    own = np.array(graph.attribute(node, "pads", []))
    pads = scope.stored_values(pads_name) if pads_name else own
    axes = scope.stored_values(axes_name) if axes_name else np.arange(len(shape))
    mode = graph.text(node, "mode") or "constant"
    filler = np.array(graph.attribute(node, "value", 0.0), dtype)
    stored = scope.constant(filler_name) if filler_name else filler
    sizes = [*shape]

    def filled(block: Sequence[int]) -> str:
        if stored is None:
            return builder.add("Expand", filler_name, builder.integers(block))
        return builder.store(np.full(block, stored.item(), dtype))

    for index, axis in enumerate(int(axis) % len(shape) for axis in axes):
        before, after = int(pads[index]), int(pads[index + axes.size])
        added, numbers = (max(before, 0), max(after, 0)), np.arange(sizes[axis])
        if mode != "constant":
            numbers, added = np.pad(numbers, added, mode), (0, 0)  # type: ignore[call-overload]
        numbers = numbers[max(-before, 0) : numbers.size - max(-after, 0)]
        if not np.array_equal(numbers, np.arange(sizes[axis])):
            value = builder.add("Gather", value, builder.store(numbers), axis=axis)
        blocks = [[*sizes[:axis], amount, *sizes[axis + 1 :]] for amount in added]
        if (largest := max(map(math.prod, blocks))) > MAX_VALUES:
            return Declined(f"it adds {largest:,} values")
        first, last = (filled(block) if block[axis] else "" for block in blocks)
        value = builder.concat([*filter(None, (first, value, last))], axis)
        sizes[axis] = numbers.size + sum(added)
    return [value]


@rewrites("OneHot")
def one_hot_as_where(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The comparison of indices with all numbers up to a stored depth."""
    indices, depth_name, values = node.input
    shape, size = scope.fixed_shape(indices), int(scope.stored_values(depth_name).item())
    axis = graph.number(node, "axis", -1) % (len(shape) + 1)
    index = builder.add("Cast", indices, to=TensorProto.INT32)
    index = builder.from_start(index, np.int32(size))
    index = builder.reshape(index, [*shape[:axis], 1, *shape[axis:]])
    numbers = np.arange(size, dtype=np.int32).reshape(-1, *[1] * (len(shape) - axis))
    hit = builder.add("Equal", index, builder.store(numbers))
    off, on = (builder.item(values, 0, number) for number in (0, 1))
    return [builder.add("Where", hit, on, off)]


@rewrites("ReverseSequence")
def reverse_sequence_as_gather(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The rows of all sequences, gathered by their numbers."""
    value, lengths_name = node.input
    lengths, shape = scope.constant(lengths_name), scope.fixed_shape(value)
    time, batch = graph.number(node, "time_axis", 0) % 2, graph.number(node, "batch_axis", 1) % 2
    length, count = shape[time], shape[batch]
    rows = np.arange(length, dtype=np.int64).reshape(-1, 1)
    offsets = np.arange(count, dtype=np.int64) * (1 if time == 0 else length)
    factor = count if time == 0 else 1
    if lengths is not None and lengths.size and (lengths == lengths[0]).all():
        numbers = np.where(rows < lengths[0], lengths[0] - 1 - rows, rows).reshape(-1)
        return [builder.add("Gather", value, builder.store(numbers.astype(np.int64)), axis=time)]
    if lengths is not None:
        numbers = np.where(rows < lengths, lengths - 1 - rows, rows) * factor + offsets
        numbers = numbers if time == 0 else numbers.T
        index = builder.store(np.ascontiguousarray(numbers).reshape(-1).astype(np.int64))
    else:
        stored = builder.store(rows)
        last = builder.add("Sub", lengths_name, builder.store(np.int64(1)))
        inside = builder.add("Less", stored, lengths_name)
        number = builder.add("Where", inside, builder.add("Sub", last, stored), stored)
        number = builder.add("Mul", number, builder.store(np.int64(factor)))
        number = builder.add("Add", number, builder.store(offsets))
        number = number if time == 0 else builder.transpose(number, [1, 0])
        index = builder.reshape(number, [-1])
    flat = builder.reshape(value, [length * count, math.prod(shape[2:])])
    return [builder.reshape(builder.add("Gather", flat, index, axis=0), shape)]


@rewrites("TensorScatter")
def tensor_scatter_as_where(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Rows of a cache of fixed size that are replaced from a computed one on, as language models write it."""
    cache, update, starts = graph.operands(node, 3)
    shape, rows = scope.fixed_shape(cache), scope.fixed_shape(update)
    dtype = scope.known_dtype(starts) if starts else np.dtype(np.int64)
    rank, axis = len(shape), graph.number(node, "axis", -2) % len(shape)
    size, length = shape[axis], rows[axis]
    if starts:
        first = builder.reshape(starts, [-1, *[1] * (rank - 1)])
    else:
        first = builder.store(np.zeros([1] * rank, np.int64))
    numbers = np.arange(size, dtype=dtype).reshape(-1, *[1] * (rank - axis - 1))
    if length > 1:
        # The last dimension is that of the rows of ``update``.
        if axis != rank - 2 or builder.dtype.kind != "f" or size * length > MAX_VALUES:
            return Declined(f"it writes {length} rows that are no matrices of floats")
        first = builder.add("Add", first, builder.store(np.arange(length, dtype=dtype)))
    if graph.text(node, "mode") == "circular":
        first = builder.add("Mod", first, builder.store(np.array(size, dtype)))
    hit = builder.add("Equal", first, builder.store(numbers))
    if length > 1:
        ones = builder.add("Cast", hit, to=scope.elem_type(cache))
        update = builder.add("MatMul", ones, update)
        hit = builder.reduced("ReduceMax", ones, [rank - 1], keepdims=1)
        hit = builder.add("Cast", hit, to=TensorProto.BOOL)
    return [builder.add("Where", hit, update, cache)]


@rewrites("AffineGrid")
def affine_grid_as_matmul(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The product of stored points in a unit cube with the transformations."""
    theta, name = node.input
    shape, size = scope.fixed_shape(theta), scope.stored_values(name)
    lines = []
    for count in map(int, size[2:]):
        line = np.linspace(-1, 1, count) if count > 1 else np.zeros(1)
        if not graph.number(node, "align_corners", 0):
            line = (2 * np.arange(count) + 1) / count - 1
        lines.append(line)
    grid = np.stack([*np.meshgrid(*lines, indexing="ij")][::-1], axis=-1)
    points = np.append(grid, np.ones((*grid.shape[:-1], 1)), axis=-1)
    points = points.reshape(1, -1, points.shape[-1]).astype(builder.dtype)
    product = builder.add("MatMul", builder.store(points), builder.transpose(theta, [0, 2, 1]))
    return [builder.reshape(product, [shape[0], *map(int, size[2:]), shape[1]])]


@rewrites("Max", "Mean", "Min", "Sum")
def drop_single(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The largest, or the sum, of one value: itself."""
    return list(node.input) if len(node.input) == 1 else None


@rewrites("MaxUnpool")
def unpool_as_scatter(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Zeros, in which values are written at their numbers."""
    value, indices, _ = graph.operands(node, 3)
    result = scope.fixed_shape(node.output[0])
    zeros = builder.store(np.zeros(math.prod(result), builder.dtype))
    flat = [builder.reshape(name, [-1]) for name in (indices, value)]
    return [builder.reshape(builder.add("ScatterElements", zeros, *flat, axis=0), result)]


@rewrites("TopK")
def top_of_last_axis(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A TopK along another axis as one along the last, between Transposes."""
    rank = len(scope.fixed_shape(node.input[0]))
    axis = graph.number(node, "axis", -1) % rank
    if axis == rank - 1:
        return None
    order = [*range(rank)]
    order[axis], order[-1] = order[-1], order[axis]
    value = builder.transpose(node.input[0], order)
    outputs = builder.add_like(node, "TopK", [value, *node.input[1:]], axis=rank - 1)
    return [name and builder.transpose(name, order) for name in outputs]


@rewrites("Compress")
def compress_as_gather(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Gather of what a stored condition keeps."""
    value, condition = node.input
    kept = scope.constant(condition)
    if kept is None:
        return None
    axis = graph.attribute(node, "axis", None)
    value = builder.reshape(value, [-1]) if axis is None else value
    indices = builder.store(np.flatnonzero(kept).astype(np.int64))
    return [builder.add("Gather", value, indices, axis=axis or 0)]


_SIZED = "a computed input decides the size of its result: freeze it with constants"

REASONS = {
    "Bernoulli": "its result is random",
    "BitCast": "NPUs read no bits as another type",
    "DeformConv": "NPUs have no convolution with computed offsets",
    "ImageDecoder": "NPUs read no files: decode pictures in the app",
    "IsInf": "in float16 an infinity is the same as a large value",
    "OptionalGetElement": "NPUs have no optional values",
    "RoiAlign": "NPUs gather no regions with computed borders",
    "Scatter": "ONNX has replaced it by ScatterElements, which the model's opset does not have",
    "TfIdfVectorizer": "NPUs count no sequences of tokens: count them in the app",
    **dict.fromkeys(("Compress", "NonZero", "Unique"), "the data decides the size of its result"),
    **dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"), _SIZED),
    **dict.fromkeys(("ConstantOfShape", "Range", "Tile"), _SIZED),
}
"""Why no rewrite is for these operators."""


@rewrites(*REASONS)
def decompose(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Nothing: it says why these operators stay."""
    return Declined(REASONS[node.op_type])
