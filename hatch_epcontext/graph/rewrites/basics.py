"""Operators of ONNX that few EPs support in all forms, as simpler ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs, Rewrite, by_node, copy_of
from hatch_epcontext.graph.scope import Scope, Types
from hatch_epcontext.graph.unrolling.activations import DEFAULTS, named_activations

_MAX_VALUES = 2**24
"""The most values of a stored mask: 16 MB."""

_NEUTRAL = {"add": 0, "max": -np.inf}
"""The neutral value of each way to join rows."""


def _gemm(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    alpha, beta = (graph.attribute(node, name, 1.0) for name in ("alpha", "beta"))
    if alpha == beta == 1:
        # ONNX Runtime would turn the product into a Gemm again.
        return None
    operands = [
        builder.transpose(name, [1, 0]) if graph.number(node, f"trans{letter}", 0) else name
        for name, letter in zip(node.input[:2], "AB", strict=True)
    ]
    product = builder.scaled(builder.add("MatMul", *operands), alpha)
    if not (bias := graph.operand(node, 2)):
        return [product]
    return [builder.add("Add", product, builder.scaled(bias, beta))]


def _mean(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    total, *others = node.input
    for each in others:
        total = builder.add("Add", total, each)
    return [builder.add("Mul", total, builder.number(1 / len(node.input)))]


def _triangle(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    value, diagonal = graph.operands(node, 2)
    shape = scope.shape(value)
    offset = scope.constant(diagonal) if diagonal else np.array(0)
    dtype = scope.dtype(value)
    if shape is None or offset is None or dtype is None or np.prod(shape[-2:]) > _MAX_VALUES:
        return None
    ones = np.ones(shape[-2:], np.bool_)
    cut = np.triu if graph.number(node, "upper", 1) else np.tril
    mask = builder.store(cut(ones, int(offset.item())))
    return [builder.add("Where", mask, value, builder.store(np.array(0, dtype)))]


def _one_hot(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    indices, depth_name, levels_name = node.input
    shape, dtype = scope.shape(indices), scope.dtype(indices)
    depth, levels = scope.constant(depth_name), scope.constant(levels_name)
    if shape is None or dtype is None or dtype.kind not in "iu" or depth is None or levels is None:
        return None
    axis = graph.number(node, "axis", -1) % (len(shape) + 1)
    wide = builder.reshape(indices, [*shape[:axis], 1, *shape[axis:]])
    after = [1] * (len(shape) - axis)
    hit = _is_at(wide, np.arange(depth.item()).reshape(-1, *after), dtype, builder)
    low, high = (builder.store(levels[i : i + 1]) for i in (0, 1))
    return [builder.add("Where", hit, high, low)]


def _is_at(indices: str, places: NDArray[Any], dtype: np.dtype[Any], builder: Builder) -> str:
    """Where ``indices``, which may be negative, equal each of all ``places``."""
    sides = (places, places - places.size) if dtype.kind == "i" else (places,)
    equal = [builder.add("Equal", indices, builder.store(side.astype(dtype))) for side in sides]
    return equal[0] if len(equal) == 1 else builder.add("Or", *equal)


def _scattered(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Rows that are added to those of ``data``, or whose maximum with these is taken."""
    data, indices, rows = node.input
    to, shape = scope.shape(data), scope.shape(rows)
    if not to or shape is None or graph.number(node, "axis", 0) or builder.dtype.kind != "f":
        return None
    made = scope.maker(indices)
    if made is not None and made.op_type in ("Expand", "Tile"):
        indices = made.input[0]
    given, dtype = scope.shape(indices), scope.dtype(indices)
    if given is None or dtype is None or 0 in (*to, *shape):
        return None
    # All values of a row have one index, and are a whole row.
    (count, *inner), wide = shape, [*[1] * (len(shape) - len(given)), *given]
    if wide != [count, *[1] * len(inner)] or inner != [*to[1:]]:
        return None
    size, start = math.prod(inner), scope.constant(data)
    kind = graph.text(node, "reduction")
    if kind not in _NEUTRAL or to[0] * count * (size if kind == "max" else 1) > _MAX_VALUES:
        return None
    places = np.arange(to[0]).reshape(-1, 1)
    hit = _is_at(builder.reshape(indices, [1, count]), places, dtype, builder)
    if kind == "add":
        ones = builder.add("Cast", hit, to=scope.elem_type(rows))
        result = builder.add("MatMul", ones, builder.reshape(rows, [count, size]))
    else:
        each = builder.reshape(rows, [1, count, size])
        other = builder.reshape(data, [to[0], 1, size])
        result = builder.add("Where", builder.unsqueeze(hit, 2), each, other)
        result = builder.reduced("ReduceMax", result, [1], keepdims=0)
    result = builder.reshape(result, to)
    if start is not None and (start == _NEUTRAL[kind]).all():
        return [result]
    return [builder.add(kind.capitalize(), data, result)]


def _scattered_tensor(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Rows of a cache that are replaced from a computed place on, as language models write them."""
    cache, update, starts = graph.operands(node, 3)
    to, shape, elem_type = scope.shape(cache), scope.shape(update), scope.elem_type(cache)
    if to is None or shape is None or elem_type is None:
        return None
    rank, axis = len(to), graph.number(node, "axis", -2) % len(to)
    size, length = to[axis], shape[axis]
    dtype = scope.dtype(starts) if starts else np.int64
    if starts:
        first = builder.reshape(starts, [-1, *[1] * (rank - 1)])
    else:
        first = builder.store(np.zeros([1] * rank, np.int64))
    places = np.arange(size, dtype=dtype).reshape(-1, *[1] * (rank - axis - 1))
    if length > 1:
        # The last dimension is that of the rows of ``update``.
        if axis != rank - 2 or builder.dtype.kind != "f" or size * length > _MAX_VALUES:
            return None
        first = builder.add("Add", first, builder.store(np.arange(length, dtype=dtype)))
    if graph.text(node, "mode") == "circular":
        first = builder.add("Mod", first, builder.store(np.array(size, dtype)))
    hit = builder.add("Equal", first, builder.store(places))
    if length > 1:
        ones = builder.add("Cast", hit, to=elem_type)
        update = builder.add("MatMul", ones, update)
        hit = builder.add(
            "Cast", builder.reduced("ReduceMax", ones, [rank - 1], 1), to=TensorProto.BOOL
        )
    return [builder.add("Where", hit, update, cache)]


_CUBIC = ((0, -0.75, 1.5, -0.75), (1, 0, -2.25, 1.25), (0, 0.75, 1.5, -1.25), (0, 0, -0.75, 0.75))
"""The weights of four neighbours as polynomials of the distance from the second one."""


def _bicubic(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A bicubic GridSample as the weighted sum of its 16 nearest neighbours."""
    shape, target = (scope.shape(name) for name in node.input)
    if graph.text(node, "mode") not in ("bicubic", "cubic") or not shape or not target:
        return None
    aligned = graph.number(node, "align_corners", 0)
    if len(shape) != 4 or (aligned and 1 in shape[2:]):
        return None
    batch, channels = shape[:2]
    # Width and height: pixel = center + half * place.
    sides = np.array(shape[:1:-1], builder.dtype)
    half, center = (builder.store(each) for each in ((sides - aligned) / 2, (sides - 1) / 2))
    places = builder.reshape(node.input[1], [batch, 1, -1, 2])
    pixel = builder.add("Add", builder.add("Mul", places, half), center)
    second = builder.add("Floor", pixel)
    distance = builder.add("Sub", pixel, second)
    steps = np.stack(np.meshgrid(*[np.arange(-1, 3)] * 2), -1).reshape(1, 16, 1, 2)
    neighbours = builder.add("Add", second, builder.store(steps.astype(builder.dtype)))
    sampled = builder.add(
        "GridSample",
        node.input[0],
        builder.add("Div", builder.add("Sub", neighbours, center), half),
        mode="nearest",
        padding_mode=graph.text(node, "padding_mode") or "zeros",
        align_corners=aligned,
    )
    *others, weights = (
        builder.store(np.array(each, builder.dtype).reshape(1, 4, 1, 1))
        for each in zip(*_CUBIC, strict=True)
    )
    for each in reversed(others):
        weights = builder.add("Add", builder.add("Mul", weights, distance), each)
    x, y = (builder.item(weights, 3, index) for index in (0, 1))
    both = builder.add(
        "Mul", builder.reshape(x, [batch, 1, 4, -1]), builder.reshape(y, [batch, 4, 1, -1])
    )
    factors = builder.reshape(both, [batch, 1, 16, -1])
    total = builder.reduced("ReduceSum", builder.add("Mul", sampled, factors), [2], keepdims=0)
    return [builder.reshape(total, [batch, channels, *target[1:3]])]


def _gathered(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    value, indices = node.input[0], scope.constant(node.input[1])
    shape, result = scope.shape(value), scope.shape(node.output[0])
    if shape is None or result is None or indices is None or 0 in shape or not indices.size:
        return None
    batches = graph.number(node, "batch_dims", 0)
    named = batches + indices.shape[-1]
    sizes = np.array(shape[batches:named])
    # Indices may be negative. The indices of a place become one, into a list of all places.
    positive = np.where(indices < 0, indices + sizes, indices)
    inner = positive @ np.array([math.prod(sizes[i + 1 :]) for i in range(len(sizes))], np.int64)
    outer = np.arange(math.prod(shape[:batches])) * math.prod(sizes)
    places = inner + outer.reshape(*shape[:batches], *[1] * (inner.ndim - batches))
    flat = builder.reshape(value, [math.prod(shape[:named]), *shape[named:]])
    gathered = builder.add("Gather", flat, builder.integers(places.ravel().tolist()), axis=0)
    return [builder.reshape(gathered, result)]


SIMPLER = by_node(
    "operators as simpler ones",
    {
        "GatherND": _gathered,
        "Gemm": _gemm,
        "GridSample": _bicubic,
        "Mean": _mean,
        "OneHot": _one_hot,
        "ScatterElements": _scattered,
        "TensorScatter": _scattered_tensor,
        "Trilu": _triangle,
    },
)


def _without_dilations(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A ConvTranspose with zeros between the weights."""
    weights = scope.constant(node.input[1])
    if weights is None or max(dilations := graph.attribute(node, "dilations", [1])) == 1:
        return None
    sizes = [(n - 1) * step + 1 for n, step in zip(weights.shape[2:], dilations, strict=True)]
    wide = np.zeros((*weights.shape[:2], *sizes), weights.dtype)
    wide[tuple(slice(None, None, step) for step in (1, 1, *dilations))] = weights
    result = copy_of(node)
    result.input[1] = builder.store(wide)
    kept = [each for each in node.attribute if each.name not in ("dilations", "kernel_shape")]
    del result.attribute[:]
    result.attribute.extend(kept)
    builder.append(result)
    return list(node.output)


UNDILATED = by_node("ConvTranspose without dilations", {"ConvTranspose": _without_dilations})


def _as_gather(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Slice with a computed start and a known length, along one axis."""
    value, start, _, axes, steps = graph.operands(node, 5)
    shape, result = scope.shape(value), scope.shape(node.output[0])
    dtype = scope.dtype(start) if start else None
    step = scope.constant(steps) if steps else np.array([1])
    axis = scope.constant(axes) if axes else np.array([0])
    if shape is None or result is None or dtype is None or step is None or axis is None:
        return None
    if scope.shape(start) != (1,) or axis.size != 1 or scope.constant(start) is not None:
        return None
    at = int(axis[0]) % len(shape)
    offsets = np.arange(result[at], dtype=dtype) * step.astype(dtype)
    # Starts may be negative: a slice beyond the end would be shorter.
    indices = builder.add("Add", start, builder.store(offsets))
    return [builder.add("Gather", value, indices, axis=at)]


COMPUTED_PLACES = by_node("Slice as Gather", {"Slice": _as_gather})
_OF_ERF = (4.51351884, 6.57699078, -0.188808943, -10.2517888, 23.5176118, -25.1057926, 10.6676264)
"""Of the polynomial p for which tanh(x p(x²)) is erf(4x) up to 1, where that is 1 in float32."""


def _error(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """An Erf as the Tanh of a polynomial, whose factors float16 can represent."""
    value = builder.clip(builder.scaled(node.input[0], 0.25), -1.0, 1.0)
    square = builder.add("Mul", value, value)
    *others, factor = map(builder.number, _OF_ERF)
    for each in reversed(others):
        factor = builder.add("Add", builder.add("Mul", square, factor), each)
    return [builder.add("Tanh", builder.add("Mul", value, factor))]


ERROR_FUNCTION = by_node("Erf as the Tanh of a polynomial", {"Erf": _error})


def _reversed(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The ReverseSequence of constant lengths that are the same for all."""
    shape, lengths = scope.shape(node.input[0]), scope.constant(node.input[1])
    if shape is None or lengths is None or not lengths.size or (lengths != lengths[0]).any():
        return None
    axis = graph.number(node, "time_axis", 0) % len(shape)
    length = int(lengths[0])
    indices = np.arange(shape[axis], dtype=np.int64)
    indices[:length] = indices[:length][::-1]
    return [builder.add("Gather", node.input[0], builder.store(indices), axis=axis)]


REVERSED = by_node("ReverseSequence as Gather", {"ReverseSequence": _reversed})


_FIRST_OF_INTEGERS = 12
"""The opset from which Max and Min accept all integers."""


def _max_and_min(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Clip with bounds that are computed."""
    value, low, high = graph.operands(node, 3)
    dtype = scope.dtype(value)
    if len(node.input) < 2 or dtype is None:
        return None
    if dtype.kind != "f" and builder.opset < _FIRST_OF_INTEGERS:
        return None
    for operator, bound, limit in (("Max", low, -np.inf), ("Min", high, np.inf)):
        if bound and not _is(scope, bound, limit):
            value = builder.add(operator, value, bound)
    return [value]


def _is(scope: Scope, bound: str, limit: float) -> bool:
    """Whether ``bound`` is a stored ``limit``, which bounds nothing."""
    array = scope.constant(bound)
    return array is not None and array.size == 1 and array.dtype.kind == "f" and array == limit


COMPUTED_BOUNDS = by_node("Clip as Max and Min", {"Clip": _max_and_min})


_SMALL = frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16})


def _dequantized(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A cast of a small integer to float32 as its dequantization with the scale 1.

    Some EPs support small integers only as quantized values.
    """
    (value,) = node.input
    elem_type, dtype = scope.elem_type(value), scope.dtype(value)
    if graph.attribute(node, "to", 0) != TensorProto.FLOAT or dtype is None:
        return None
    if elem_type not in _SMALL:
        return None
    scale, zero = builder.store(np.float32(1)), builder.store(np.array(0, dtype))
    # ONNX's own operator does not exist, or not for 16 bits, in all opsets.
    return [builder.add("DequantizeLinear", value, scale, zero, domain=graph.MICROSOFT)]


INTEGER_CASTS = by_node("Cast of small integers as DequantizeLinear", {"Cast": _dequantized})


def _without_defaults(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """``node`` without ``activations``, if these are the defaults: EPs refuse the attribute."""
    given = named_activations(node)
    directions = 2 if graph.text(node, "direction") == "bidirectional" else 1
    if not given or given != [*DEFAULTS[node.op_type]] * directions:
        return None
    # The default activations have no parameters.
    unused = ("activations", "activation_alpha", "activation_beta")
    kept = [each for each in node.attribute if each.name not in unused]
    result = copy_of(node)
    del result.attribute[:]
    result.attribute.extend(kept)
    builder.append(result)
    return list(node.output)


DEFAULT_ACTIVATIONS = by_node(
    "default activations left out", dict.fromkeys(DEFAULTS, _without_defaults)
)


_COMPARISONS = frozenset({"GreaterOrEqual", "LessOrEqual"})
"""Functions of ONNX. ONNX Runtime infers no shapes for older versions, and some EPs need shapes."""


def _write_shapes(model: onnx.ModelProto, types: Types, refused: frozenset[str]) -> int:
    main, scope = model.graph, Scope.of(model, types)
    known = {value.name for value in (*main.value_info, *main.output)}
    found = [
        helper.make_tensor_value_info(name, elem_type, shape)
        for node in main.node
        if graph.operator(node) in _COMPARISONS & refused
        for name in node.output
        if name not in known
        and (elem_type := scope.elem_type(name)) is not None
        and (shape := scope.shape(name)) is not None
    ]
    main.value_info.extend(found)
    return len(found)


SHAPES = Rewrite("shapes of comparisons written down", _COMPARISONS, _write_shapes)
