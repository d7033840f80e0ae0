"""Values at computed indices, as those at the number of each one or as sums: slices, gathers and scatters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import MAX_VALUES, Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope

_JOINS: Mapping[str, tuple[str, str, float | None]] = {
    "add": ("ReduceSum", "Add", 0),
    "max": ("ReduceMax", "Max", None),
    "min": ("ReduceMin", "Min", None),
    "mul": ("ReduceProd", "Mul", 1),
}
"""How values are joined along an axis, and two of them, and what changes none; None for the largest."""

_LEAST = {"max": -np.inf, "min": np.inf}


@rewrites("Slice")
def slice_as_gather(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Slice with a computed start and a known length, along one axis."""
    value, start, _, axes_name, strides = graph.operands(node, 5)
    if not start or scope.constant(start) is not None:
        return None
    starts, dtype = scope.shape(start), scope.known_dtype(start)
    stride = scope.stored_values(strides) if strides else np.array([1])
    axes = scope.stored_values(axes_name) if axes_name else np.arange(starts[0] if starts else 1)
    if axes.size != 1:
        return Declined(f"its start has {axes.size} axes")
    shape, result = scope.fixed_shape(value), scope.fixed_shape(node.output[0])
    axis = int(axes[0]) % len(shape)
    offsets = np.arange(result[axis], dtype=dtype) * stride.astype(dtype)
    # Starts may be negative: a slice beyond the end would be shorter.
    indices = builder.add("Add", start, builder.store(offsets))
    return [builder.add("Gather", value, indices, axis=axis)]


@rewrites("ScatterND")
def scatter_as_elements(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Parts of ``data`` at several indices as rows, and those at the number of each one."""
    data, indices, updates = node.input
    shape, index_shape = scope.fixed_shape(data), scope.fixed_shape(indices)
    rows = [math.prod(index_shape[:-1]), math.prod(shape[index_shape[-1] :])]
    index = builder.reshape(_flat_indices(indices, shape, scope, builder), [-1, 1])
    result = builder.add(
        "ScatterElements",
        builder.reshape(data, [-1, rows[1]]),
        builder.add("Expand", index, builder.integers(rows)),
        builder.reshape(updates, rows),
        axis=0,
        reduction=graph.text(node, "reduction") or None,
    )
    return [builder.reshape(result, shape)]


@rewrites("GatherND")
def gather_nd_as_gather(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Parts of ``data`` at several indices as rows at the number of each one."""
    data, indices = node.input
    shape, index_shape = scope.fixed_shape(data), scope.fixed_shape(indices)
    count = graph.number(node, "batch_dims", 0)
    rows = math.prod(shape[count + index_shape[-1] :])
    index = _flat_indices(indices, shape[count:], scope, builder)
    if count:
        size, dtype = math.prod(shape[count : count + index_shape[-1]]), scope.dtype(indices)
        firsts = np.arange(math.prod(shape[:count]), dtype=dtype).reshape(*shape[:count]) * size
        firsts = firsts.reshape(*shape[:count], *[1] * (len(index_shape) - count - 1))
        index = builder.add("Add", index, builder.store(firsts))
    flat = builder.reshape(data, [-1, rows])
    result = builder.add("Gather", flat, builder.reshape(index, [-1]), axis=0)
    return [builder.reshape(result, scope.fixed_shape(node.output[0]))]


def _flat_indices(name: str, shape: Sequence[int], scope: Scope, builder: Builder) -> str:
    """The number, among all parts of a ``shape``, of those that ``name`` has as indices of several axes."""
    dtype, depth = scope.known_dtype(name), scope.fixed_shape(name)[-1]
    sizes = np.array(shape[:depth], dtype)
    index = builder.from_start(name, sizes)
    factors = np.append(np.cumprod(sizes[:0:-1])[::-1], 1).astype(dtype)
    parts = builder.add("Mul", index, builder.store(factors)) if depth > 1 else index
    return builder.reduced("ReduceSum", parts, [len(scope.fixed_shape(name)) - 1], keepdims=0)


@rewrites("ScatterElements")
def scatter_as_matmul(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Values that are joined with those of ``data``, such as the rows of graph networks."""
    data, indices, updates = node.input
    if (expand := scope.maker(indices, "Expand")) is not None:
        indices = expand.input[0]
    kind = graph.text(node, "reduction") or "none"
    if kind not in _JOINS:
        return Declined(f"its reduction is {kind}")
    reduction, operator, neutral = _JOINS[kind]
    shape, rows, own = map(scope.fixed_shape, (data, updates, indices))
    dtype, axis = scope.known_dtype(indices), graph.number(node, "axis", 0) % len(shape)
    order = [axis, *(other for other in range(len(shape)) if other != axis)]
    if any(shape[other] != rows[other] for other in order[1:]):
        return Declined("it scatters into a part of the other axes")
    height, count, size = shape[axis], rows[axis], math.prod(rows) // max(rows[axis], 1)
    # All values of a row have one index.
    column = (count, *[1] * (len(rows) - 1))
    is_of_rows = not axis and (*[1] * (len(rows) - len(own)), *own) == column
    is_product = is_of_rows and kind == "add" and builder.dtype.kind == "f"
    mask = height * count * (1 if is_product else size)
    if not size or not 0 < mask <= MAX_VALUES:
        return Declined(f"its mask has {mask:,} values")

    def moved(name: str, sizes: Sequence[int]) -> str:
        """``name`` with the axis first."""
        return builder.reshape(builder.transpose(name, order), sizes)

    wide = [1, count, 1 if is_of_rows else size]
    index = moved(indices if is_of_rows else node.input[1], wide)
    numbers = np.arange(height, dtype=dtype).reshape(-1, 1, 1)
    # Indices may count from the end.
    sides = (numbers, numbers - height)
    hit = builder.add("Or", *(builder.add("Equal", index, builder.store(side)) for side in sides))
    start = moved(data, [height, 1, size])
    if is_product:
        ones = builder.add(
            "Cast", builder.reshape(hit, [height, count]), to=scope.elem_type(updates)
        )
        result = builder.add("MatMul", ones, builder.reshape(updates, [count, size]))
    else:
        other = start if neutral is None else builder.number(neutral)
        joined = builder.add("Where", hit, moved(updates, [1, count, size]), other)
        result = builder.reduced(reduction, joined, [1], keepdims=0)
    stored = scope.constant(data)
    if stored is None or not (stored == (_LEAST[kind] if neutral is None else neutral)).all():
        result = builder.add(operator, builder.reshape(start, [height, size]), result)
    result = builder.reshape(result, [shape[other] for other in order])
    return [builder.transpose(result, np.argsort(order).tolist())]
