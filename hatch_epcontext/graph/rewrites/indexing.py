"""Operators that read or write rows at computed places, as products, comparisons and Gather."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope

_MAX_VALUES = 2**24
"""The most values of a mask: 16 MB."""

_NEUTRAL = {"add": 0, "max": -np.inf}
"""The neutral value of each way to join rows."""


@rewrites("Slice")
def slice_as_gather(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Slice with a computed start and a known length, along one axis."""
    value, start, _, axes_name, steps = graph.operands(node, 5)
    if not start or scope.constant(start) is not None:
        return None
    shape, result, starts = (scope.shape(name) for name in (value, node.output[0], start))
    dtype = scope.dtype(start)
    step = scope.constant(steps) if steps else np.array([1])
    axes = scope.constant(axes_name) if axes_name else np.arange(starts[0] if starts else 1)
    if axes is None or step is None or dtype is None:
        return Declined("its axes or its steps are computed")
    if axes.size != 1:
        return Declined(f"its start has {axes.size} axes")
    if shape is None:
        return Declined(f"the shape of {value!r} is not fixed")
    if result is None:
        return Declined("the length of its result is not fixed")
    axis = int(axes[0]) % len(shape)
    offsets = np.arange(result[axis], dtype=dtype) * step.astype(dtype)
    # Starts may be negative: a slice beyond the end would be shorter.
    indices = builder.add("Add", start, builder.store(offsets))
    return [builder.add("Gather", value, indices, axis=axis)]


@rewrites("ReverseSequence")
def reverse_sequence_as_gather(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The ReverseSequence of stored lengths that are the same for all."""
    value, lengths = node.input[0], scope.constant(node.input[1])
    shape = scope.shape(value)
    if lengths is None or not lengths.size:
        return Declined("its lengths are computed")
    if (lengths != lengths[0]).any():
        return Declined("its lengths differ")
    if shape is None:
        return Declined(f"the shape of {value!r} is not fixed")
    axis = graph.number(node, "time_axis", 0) % len(shape)
    length = int(lengths[0])
    indices = np.arange(shape[axis], dtype=np.int64)
    indices[:length] = indices[:length][::-1]
    return [builder.add("Gather", value, builder.store(indices), axis=axis)]


@rewrites("ScatterElements")
def scatter_as_matmul(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Rows that are added to those of ``data``, or whose maximum with these is taken."""
    data, indices, rows = node.input
    data_shape, shape = scope.shape(data), scope.shape(rows)
    repeat = scope.maker(indices)
    if repeat is not None and repeat.op_type in ("Expand", "Tile"):
        indices = repeat.input[0]
    places, dtype = scope.shape(indices), scope.dtype(indices)
    if not data_shape or shape is None or places is None or dtype is None:
        return Declined("a shape is not fixed")
    kind = graph.text(node, "reduction") or "none"
    (count, *inner), wide = shape, [*[1] * (len(shape) - len(places)), *places]
    size, start = math.prod(inner), scope.constant(data)
    mask = data_shape[0] * count * (size if kind == "max" else 1)
    if declined := Declined.where(
        {
            f"its reduction is {kind}": kind not in _NEUTRAL,
            "it is not along the first axis": graph.number(node, "axis", 0),
            f"it scatters {builder.dtype}": builder.dtype.kind != "f",
            # All values of a row have one index, and are a whole row.
            "it does not scatter whole rows": wide != [count, *[1] * len(inner)]
            or inner != [*data_shape[1:]],
            "it scatters nothing": not mask * size,
            f"its mask has more than {_MAX_VALUES:,} values": mask > _MAX_VALUES,
        }
    ):
        return declined
    numbers = np.arange(data_shape[0]).reshape(-1, 1)
    hit = _is_at(builder.reshape(indices, [1, count]), numbers, dtype, builder)
    if kind == "add":
        ones = builder.add("Cast", hit, to=scope.elem_type(rows))
        result = builder.add("MatMul", ones, builder.reshape(rows, [count, size]))
    else:
        row = builder.reshape(rows, [1, count, size])
        other = builder.reshape(data, [data_shape[0], 1, size])
        result = builder.add("Where", builder.unsqueeze(hit, 2), row, other)
        result = builder.reduced("ReduceMax", result, [1], keepdims=0)
    result = builder.reshape(result, data_shape)
    if start is not None and (start == _NEUTRAL[kind]).all():
        return [result]
    return [builder.add(kind.capitalize(), data, result)]


def _is_at(indices: str, places: NDArray[Any], dtype: np.dtype[Any], builder: Builder) -> str:
    """Where ``indices``, which may be negative, equal each of all ``places``."""
    sides = (places, places - places.size) if dtype.kind == "i" else (places,)
    equal = [builder.add("Equal", indices, builder.store(side.astype(dtype))) for side in sides]
    return equal[0] if len(equal) == 1 else builder.add("Or", *equal)


@rewrites("TensorScatter")
def tensor_scatter_as_where(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Rows of a cache that are replaced from a computed place on, as language models write them."""
    cache, update, starts = graph.operands(node, 3)
    cache_shape, shape = scope.shape(cache), scope.shape(update)
    if cache_shape is None or shape is None:
        return Declined("a shape is not fixed")
    rank, axis = len(cache_shape), graph.number(node, "axis", -2) % len(cache_shape)
    size, length = cache_shape[axis], shape[axis]
    dtype = scope.dtype(starts) if starts else np.int64
    if starts:
        first = builder.reshape(starts, [-1, *[1] * (rank - 1)])
    else:
        first = builder.store(np.zeros([1] * rank, np.int64))
    places = np.arange(size, dtype=dtype).reshape(-1, *[1] * (rank - axis - 1))
    if length > 1:
        # The last dimension is that of the rows of ``update``.
        if axis != rank - 2 or builder.dtype.kind != "f":
            return Declined("it writes several rows that are no matrices of floats")
        if size * length > _MAX_VALUES:
            return Declined(f"its mask has more than {_MAX_VALUES:,} values")
        first = builder.add("Add", first, builder.store(np.arange(length, dtype=dtype)))
    if graph.text(node, "mode") == "circular":
        first = builder.add("Mod", first, builder.store(np.array(size, dtype)))
    hit = builder.add("Equal", first, builder.store(places))
    if length > 1:
        ones = builder.add("Cast", hit, to=scope.elem_type(cache))
        update = builder.add("MatMul", ones, update)
        hit = builder.reduced("ReduceMax", ones, [rank - 1], keepdims=1)
        hit = builder.add("Cast", hit, to=TensorProto.BOOL)
    return [builder.add("Where", hit, update, cache)]
