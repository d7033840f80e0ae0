"""The operands of a node that have limits: indices, lengths, sizes, masks, and clipped values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.values.forms import INVALID, clip_bounds
from hatch_epcontext.graph.values.known import KnownValues

_MAX_CLIP = 1e4
"""The largest limit that describes the values: exporters also write the limits of a dtype."""

_MAX_CHANGED = 8
"""The largest size that an input may set freely, such as a number of repetitions."""


@dataclass(frozen=True)
class Limit:
    """The operand number ``operand`` is between ``low`` and ``high``, both included.

    ``kind``: an ``"index"`` must stay within the limits; so must a ``"length"``, whose ``high`` is infinite
    if the graph does not show what it measures; values beyond a ``"clip"`` have no effect; a ``"mask"`` is
    true or false; a ``"choice"`` is one of the values with which a number is compared. ``usual``: the value
    in normal use.
    """

    operand: int
    low: float
    high: float
    kind: Literal["index", "length", "clip", "mask", "choice"] = "index"
    usual: float | None = None


_Rule = Callable[[onnx.NodeProto, KnownValues], Iterable[Limit]]


def limits(node: onnx.NodeProto, known: KnownValues) -> list[Limit]:
    """Return the limits of the operands of ``node``; none for a malformed one."""
    rule = _RULES.get(graph.operator(node))
    try:
        found = [] if rule is None else list(rule(node, known))
    except INVALID:
        return []
    return [each for each in found if each.operand < len(node.input) and each.low <= each.high]


def _indices(operand: int, size: int | None) -> Iterator[Limit]:
    """An index below ``size``."""
    if size:
        yield Limit(operand, 0, size - 1)


def _lengths(operand: int, size: int | None) -> Iterator[Limit]:
    """A length of at most ``size``."""
    high = math.inf if size is None else size
    if size is None or size > 0:
        yield Limit(operand, 1, high, "length", None if size is None else size)


_Axis = int | tuple[str, int]
"""An axis, or the attribute that names it, and its default."""


def _size(node: onnx.NodeProto, known: KnownValues, of: int, axis: _Axis) -> int | None:
    along = axis if isinstance(axis, int) else graph.attribute(node, *axis)
    return known.size(graph.operand(node, of), along)


def _index(operand: int, of: int, axis: _Axis) -> _Rule:
    """The operand is an index into the operand ``of``."""
    return lambda node, known: _indices(operand, _size(node, known, of, axis))


def _length(operand: int, axis: _Axis) -> _Rule:
    """The operand is a length within the first one."""
    return lambda node, known: _lengths(operand, _size(node, known, 0, axis))


def _axis(operand: int) -> _Rule:
    """The operand is an axis of the first one."""
    return lambda node, known: _indices(operand, len(known.sizes(graph.operand(node, 0)) or ()))


def _fixed(*found: Limit) -> _Rule:
    return lambda node, known: found


def _all(*rules: _Rule) -> _Rule:
    return lambda node, known: (limit for rule in rules for limit in rule(node, known))


def _gather_nd(node: onnx.NodeProto, known: KnownValues) -> Iterator[Limit]:
    shape = known.sizes(graph.operand(node, 0))
    depth = known.size(graph.operand(node, 1), -1)
    first = graph.attribute(node, "batch_dims", 0)
    if shape and depth and isinstance(first, int) and first >= 0:
        chosen = shape[first : first + depth]
        yield from _indices(1, min((size for size in chosen if size), default=None))


def _one_hot(node: onnx.NodeProto, known: KnownValues) -> Iterator[Limit]:
    depth = known.value(graph.operand(node, 1))
    if depth is not None and depth.size == 1:
        yield from _indices(0, int(depth.item()))
    yield Limit(1, 1, _MAX_CHANGED, "index", _MAX_CHANGED)


def _equal(node: onnx.NodeProto, known: KnownValues) -> Iterator[Limit]:
    """A member of a stored range, as exporters write one-hot tables, or a number with special values."""
    for operand, other in ((0, 1), (1, 0)):
        value = known.value(graph.operand(node, other))
        if value is None or not value.size:
            continue
        if value.size == 1:
            yield Limit(operand, float(value.item()), float(value.item()), "choice")
            continue
        members = np.unique(value)
        if members.size > 1 and (np.diff(members.astype(np.float64)) == 1).all():
            yield Limit(operand, float(members[0]), float(members[-1]))


def _compare(node: onnx.NodeProto, known: KnownValues) -> Iterator[Limit]:
    """A length that is compared with positions."""
    for operand, other in ((0, 1), (1, 0)):
        value = known.value(graph.operand(node, other))
        if value is not None and value.size > 1 and value.dtype.kind in "iuf":
            members = np.unique(value).astype(np.float64)
            if members.size > 1 and members[0] in (0, 1) and (np.diff(members) == 1).all():
                yield from _lengths(operand, int(members[-1] - members[0]) + 1)


def _slice(node: onnx.NodeProto, known: KnownValues) -> Iterator[Limit]:
    shape = known.sizes(graph.operand(node, 0)) or ()
    axes = known.value(graph.operand(node, 3))
    chosen = range(len(shape)) if axes is None else [int(axis) for axis in axes.ravel()]
    sizes = [shape[axis] for axis in chosen if -len(shape) <= axis < len(shape)]
    size = min((each for each in sizes if each), default=1)
    yield Limit(1, 0, size - 1, usual=0)
    yield Limit(2, 1, size, usual=size)
    yield from _indices(3, len(shape))
    yield Limit(4, 1, 1)


def _trilu(node: onnx.NodeProto, known: KnownValues) -> Iterator[Limit]:
    size = known.size(graph.operand(node, 0), -1) or 1
    yield Limit(1, -size, size, usual=0)


def _resize(node: onnx.NodeProto, known: KnownValues) -> Iterator[Limit]:
    sizes = known.sizes(graph.operand(node, 0)) or ()
    yield Limit(2, 1, 2, usual=1)
    size = max((each for each in sizes if each), default=1)
    yield Limit(3, 1, size)


def _clip(node: onnx.NodeProto, known: KnownValues) -> Iterator[Limit]:
    low, high = clip_bounds(node, known)
    if max(abs(low), abs(high)) <= _MAX_CLIP:
        yield Limit(0, low, high, "clip")


def _quantize(node: onnx.NodeProto, known: KnownValues) -> Iterator[Limit]:
    """The values that do not saturate."""
    scale, zero = (known.value(graph.operand(node, number)) for number in (1, 2))
    if scale is None or zero is None or scale.size != 1 or zero.size != 1:
        return
    if zero.dtype.kind in "iu":
        info, factor, middle = np.iinfo(zero.dtype.name), float(scale.item()), int(zero.item())
        yield Limit(0, (info.min - middle) * factor, (info.max - middle) * factor, "clip")


def _positions(operand: int, table: int) -> _Rule:
    """Positions in a table of two dimensions."""

    def found(node: onnx.NodeProto, known: KnownValues) -> Iterator[Limit]:
        if len(known.sizes(graph.operand(node, table)) or ()) == 2:
            yield from _indices(operand, known.size(graph.operand(node, table), 0))

    return found


def _written(node: onnx.NodeProto, known: KnownValues) -> Iterator[Limit]:
    """The position of a write into a cache, which leaves room for the new values."""
    axis = graph.attribute(node, "axis", -2)
    room, written = (known.size(graph.operand(node, operand), axis) for operand in (0, 1))
    if room is not None and written is not None:
        yield from _indices(2, room - written + 1)


def _group_query_attention(node: onnx.NodeProto, known: KnownValues) -> Iterator[Limit]:
    """The lengths of the cache with the new part: minus one, and of the whole batch."""
    past, new = known.size(graph.operand(node, 3), 2), known.size(graph.operand(node, 0), 1)
    # Shapes after ONNX Runtime's operators are unknown: there is at least one new token.
    total = (past or 0) + (new or 1)
    yield Limit(5, 0, total - 1, usual=total - 1)
    yield Limit(6, 1, total, usual=total)


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(
        (
            "Gather",
            "GatherElements",
            "ScatterElements",
            "Scatter",
            "com.microsoft.GatherBlockQuantized",
        ),
        _index(1, 0, ("axis", 0)),
    ),
    **dict.fromkeys(("GatherND", "ScatterND"), _gather_nd),
    **dict.fromkeys(("Less", "LessOrEqual", "Greater", "GreaterOrEqual"), _compare),
    **dict.fromkeys(("LSTM", "GRU", "RNN", "com.microsoft.DynamicQuantizeLSTM"), _length(4, 0)),
    **dict.fromkeys(
        (
            *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1"),
            *("ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"),
            *("CumSum", "CumProd", "Squeeze", "Unsqueeze"),
        ),
        _axis(1),
    ),
    **dict.fromkeys(
        ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"),
        _index(1, 0, 1),
    ),
    # The limits of a detector's results.
    "NonMaxSuppression": _all(_length(2, 1), _fixed(Limit(3, 0, 1), Limit(4, 0, 1))),
    "RotaryEmbedding": _positions(3, 1),
    "TensorScatter": _written,
    "DFT": _axis(2),
    **dict.fromkeys(("Expand", "Tile"), _fixed(Limit(1, 1, _MAX_CHANGED, usual=1))),
    "ConstantOfShape": _fixed(Limit(0, 1, _MAX_CHANGED, usual=1)),
    "Loop": _fixed(Limit(0, 1, _MAX_CHANGED, usual=_MAX_CHANGED)),
    "OneHot": _one_hot,
    "Equal": _equal,
    "ReverseSequence": _length(1, ("time_axis", 0)),
    "Pad": _all(_fixed(Limit(1, 0, 2)), _axis(3)),
    "Slice": _slice,
    "TopK": _length(1, ("axis", -1)),
    "Trilu": _trilu,
    "Range": _fixed(Limit(0, 0, 0), Limit(1, 1, math.inf, "length"), Limit(2, 1, 1)),
    "Resize": _resize,
    "Clip": _clip,
    "QuantizeLinear": _quantize,
    "Where": _fixed(Limit(0, 0, 1, "mask", 1)),
    # Tokens, segments and positions, each with its table.
    "com.microsoft.EmbedLayerNormalization": _all(
        *(_index(operand, table, 0) for operand, table in ((0, 2), (1, 4), (8, 3))),
        _fixed(Limit(7, 0, 1, "mask", 1)),
    ),
    "com.microsoft.Attention": _fixed(Limit(3, 0, 1, "mask", 1)),
    "com.microsoft.MultiHeadAttention": _fixed(Limit(4, 0, 1, "mask", 1)),
    "com.microsoft.RotaryEmbedding": _positions(1, 2),
    "com.microsoft.GroupQueryAttention": _group_query_attention,
}
