"""The values that nodes accept as their operands: indices, lengths, sizes, masks, and clipped values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Literal

import numpy as np
import onnx

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.dtypes import is_float
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.linear import INVALID, ends

_MAX_CLIP = 1e4
"""The largest limit that describes the values: exporters also write the limits of a dtype."""

_MAX_KEPT = 0.01
"""The largest number that only keeps a divisor from 0."""

_KEEPING_SIGNS = operators.MOVES | operators.EXTREMES | operators.MEANS
_KEEPING_SIGNS |= {"Abs", "Cast", "Clip", "ReduceSum"}
"""Operators whose result is near 0 only if their first operand is."""

_OF_EACH = operators.LAYOUT | {"Cast", "Div", "Expand", "Mul", "Pow", "Sqrt"}
"""Operators each of whose results is near 0 only if one of its operands is."""

_ADDING = operators.MEANS | {"ReduceSum"}

_OF_AMOUNTS = _OF_EACH | _ADDING | operators.EXTREMES | operators.MOVES
_OF_AMOUNTS |= {"Add", "Concat", "Log", "Max", "Min", "Reciprocal", "Sub"}
"""Operators that quantities of one sign have: no activation, and no size of a number."""

_MAX_CHANGED = 8
"""The largest size that an input may set freely, such as a number of repetitions."""

HIDING = 1000.0
"""The size of a number that hides scores from a Softmax."""

_OF_LARGEST = frozenset({"LogSoftmax", "ReduceMax", "Softmax"})
"""Operators to which small scores do not matter beside larger ones."""

_OF_SCORES = operators.MOVES | {"Add", "Cast"}
"""Operators between a mask and the Softmax of the scores that it hides."""

_OF_POSITIONS = operators.MOVES - operators.GATHERS
_OF_POSITIONS |= {"Add", "Cast", "Clip", "Max", "Mul", "Sub", "Where"}
"""Operators between counted integers and the table of which these are indices."""


@dataclass(frozen=True)
class Bound:
    """The operand number ``operand`` is between ``low`` and ``high``, both included.

    ``kind``: an ``"index"`` must stay within the bounds, and so must integers of few bits; a ``"length"``
    too, whose ``high`` is infinite if the graph does not show what it measures; values beyond a ``"clip"``
    have no effect; a ``"mask"`` is true or false; a ``"choice"`` is one of the values with which a number is
    compared, a ``"member"`` one of several in order; an ``"image"`` is convolved; a ``"divisor"`` is not near
    0; a ``"factor"`` is multiplied with other values, or divides them; values beyond a ``"turn"`` repeat
    those within.
    ``usual``: the value in normal use. ``whole``: it is rounded first.
    """

    operand: int
    low: float
    high: float
    kind: Literal[
        "index", "length", "clip", "mask", "choice", "member", "image", "divisor", "factor", "turn"
    ] = "index"
    usual: float | None = None
    whole: bool = False


_Rule = Callable[[onnx.NodeProto, Scope], Iterable[Bound]]


def bounds(node: onnx.NodeProto, scope: Scope) -> list[Bound]:
    """Return the bounds of the operands of ``node``; none for a malformed one."""
    if (rule := _RULES.get(graph.operator(node))) is None:
        return []
    try:
        of_node = list(rule(node, scope))
    except INVALID:
        return []
    return [
        bound for bound in of_node if bound.operand < len(node.input) and bound.low <= bound.high
    ]


def _indices(operand: int, size: int | None) -> Iterator[Bound]:
    """An index below ``size``."""
    if size:
        yield Bound(operand, 0, size - 1)


def _lengths(operand: int, size: int | None) -> Iterator[Bound]:
    """A length of at most ``size``."""
    high = math.inf if size is None else size
    if size is None or size > 0:
        yield Bound(operand, 1, high, "length", size)


@dataclass(frozen=True)
class _Divisor:
    """The value ``name``, by which something is divided, perhaps a ``stored`` number.

    ``unit``: its usual size. ``is_each``: whether none of its numbers is near 0, because each divides, or is
    one of a mean that divides a stored number. ``is_sum``: whether these are added.
    """

    name: str
    stored: float
    unit: float
    is_each: bool = True
    is_sum: bool = False

    @classmethod
    def of(cls, node: onnx.NodeProto, scope: Scope) -> _Divisor:
        """That of ``node``: a stored number and its quotient share the digits."""
        numbers = ends(node.input[0], scope) if node.op_type == "Div" else ()
        stored = max(map(abs, numbers), default=0.0)
        return cls(node.input[-1], stored, math.sqrt(stored or 1.0))

    def operands(self, node: onnx.NodeProto, scope: Scope) -> Iterator[_Divisor]:
        """Those of ``node``, which makes it."""
        operator = node.op_type
        is_sum = self.is_sum or operator in _ADDING
        # Each of several squares may be near 0.
        is_power = operator == "Pow" or (operator == "Mul" and not [*_constants(node, scope)])
        is_each = operator in _OF_EACH or (operator in _ADDING and self.stored > 0)
        is_each &= self.is_each and not (is_sum and is_power)
        for name, unit in _of_divisor(node, self.unit, scope):
            yield _Divisor(name, self.stored, unit, is_each, is_sum)


def divisors(node: onnx.NodeProto, scope: Scope) -> Iterator[tuple[str, Bound]]:
    """Yield what a Div or a Reciprocal divides by: also of what it is a mean, a power, a product or a sum, if
    nothing else reads that, or none of its numbers is near 0, and other nodes only calculate with them.
    Factors, and a stored number that is divided, show the unit.
    """
    waiting = [_Divisor.of(node, scope)] if node.op_type in ("Div", "Reciprocal") else []
    seen = set[str]()
    while waiting:
        divisor = waiting.pop()
        if divisor.name in seen:
            continue
        seen.add(divisor.name)
        readers = scope.nodes_reading(divisor.name)
        is_amount = divisor.is_each and all(_is_of_amounts(reader, scope) for reader in readers)
        if len(readers) > 1 and not is_amount:
            continue
        yield divisor.name, Bound(0, 0.5 * divisor.unit, 1.5 * divisor.unit, "divisor")
        maker = scope.maker(divisor.name)
        # A Constant in a branch has no inputs.
        if maker is not None and maker.input:
            # Of a malformed exponent there is no unit.
            with contextlib.suppress(*INVALID):
                waiting += divisor.operands(maker, scope)


def _is_of_amounts(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether ``node`` is arithmetic, as of quantities, and no number's sign matters to it."""
    compares = node.op_type in operators.COMPARES and 0 not in _constants(node, scope)
    return compares or node.op_type in _OF_AMOUNTS


def _of_divisor(node: onnx.NodeProto, unit: float, scope: Scope) -> Iterator[tuple[str, float]]:
    """The operands of ``node``, which makes a divisor of about one ``unit``, each with its own unit."""
    operator, first = node.op_type, node.input[0]
    constants = [*_constants(node, scope)]
    number = constants[0] if len(constants) == 1 else 0.0
    factor = abs(number)
    if operator == "Sqrt":
        yield first, unit**2
    elif operator in _KEEPING_SIGNS:
        yield first, unit
    elif operator in ("Div", "Pow") and factor and scope.constant(first) is None:
        yield first, unit * factor if operator == "Div" else unit ** (1 / number)
    elif operator == "Mul":
        own = unit / factor if factor else math.sqrt(unit)
        yield from ((name, own) for name in dict.fromkeys(node.input))
    elif operator in ("Add", "Max") and max(map(abs, constants), default=0.0) <= _MAX_KEPT:
        # A small number only keeps a sum from 0.
        yield from ((name, unit) for name in dict.fromkeys(node.input))


def _constants(node: onnx.NodeProto, scope: Scope) -> Iterator[float]:
    """The ends of the operands of ``node`` that are constants."""
    return (end for name in node.input for end in ends(name, scope))


_Axis = int | tuple[str, int]
"""An axis, or the attribute that names it, and its default."""


def _size(node: onnx.NodeProto, scope: Scope, operand: int, axis: _Axis) -> int | None:
    """The size of an operand along ``axis``; None if it is unknown."""
    sizes = scope.sizes(graph.operand(node, operand)) or ()
    along = axis if isinstance(axis, int) else int(graph.attribute(node, *axis))
    return sizes[along] if -len(sizes) <= along < len(sizes) else None


def _index(operand: int, table: int, axis: _Axis) -> _Rule:
    """The operand is an index into the operand ``table``."""
    return lambda node, scope: _indices(operand, _size(node, scope, table, axis))


def _length(operand: int, axis: _Axis, table: int = 0) -> _Rule:
    """The operand is a length within the operand ``table``."""
    return lambda node, scope: _lengths(operand, _size(node, scope, table, axis))


def _fixed(*fixed: Bound) -> _Rule:
    return lambda node, scope: fixed


def _all(*rules: _Rule) -> _Rule:
    return lambda node, scope: (bound for rule in rules for bound in rule(node, scope))


def _gather_nd(node: onnx.NodeProto, scope: Scope) -> Iterator[Bound]:
    first, depth = int(graph.attribute(node, "batch_dims", 0)), _size(node, scope, 1, -1)
    sizes = scope.sizes(graph.operand(node, 0))
    if sizes and depth and first >= 0:
        indexed = sizes[first : first + depth]
        yield from _indices(1, min((size for size in indexed if size), default=None))


def _one_hot(node: onnx.NodeProto, scope: Scope) -> Iterator[Bound]:
    depth = scope.constant(graph.operand(node, 1))
    if depth is not None and depth.size == 1:
        yield from _indices(0, int(depth.item()))


def _equal(node: onnx.NodeProto, scope: Scope) -> Iterator[Bound]:
    """A member of a stored range, as exporters write one-hot tables, or a number with special values."""
    for operand, members in _compared(node, scope):
        if members.size == 1:
            yield Bound(operand, members[0], members[0], "choice")
        elif _is_range(members):
            yield Bound(operand, members[0], members[-1], "member")


def _compare(node: onnx.NodeProto, scope: Scope) -> Iterator[Bound]:
    """A length that is compared with positions."""
    for operand, members in _compared(node, scope):
        if members.size > 1 and members[0] in (0, 1) and _is_range(members):
            yield from _lengths(operand, int(members[-1] - members[0]) + 1)


def _compared(node: onnx.NodeProto, scope: Scope) -> Iterator[tuple[int, np.ndarray]]:
    """Each operand that is compared with a constant, and the different values of that in order."""
    for operand, other in ((0, 1), (1, 0)):
        value = scope.constant(graph.operand(node, other))
        if value is not None and value.size and value.dtype.kind in "iufb":
            yield operand, np.unique(value).astype(np.float64)


def _is_range(members: np.ndarray) -> bool:
    return bool((np.diff(members) == 1).all())


def _slice(node: onnx.NodeProto, scope: Scope) -> Iterator[Bound]:
    sizes = scope.sizes(graph.operand(node, 0)) or ()
    axes = scope.constant(graph.operand(node, 3))
    cut = sizes if axes is None else [sizes[int(axis)] for axis in axes.ravel()]
    size = min((size for size in cut if size), default=1)
    yield from (Bound(1, 0, size - 1, usual=0), Bound(2, 1, size, usual=size), Bound(4, 1, 1))


def _tensor_scatter(node: onnx.NodeProto, scope: Scope) -> Iterator[Bound]:
    """The first position in a cache of the new part."""
    size, length = (_size(node, scope, operand, ("axis", -2)) for operand in (0, 1))
    if size and length:
        yield from _indices(2, size - length + 1)


def _clip(node: onnx.NodeProto, scope: Scope) -> Iterator[Bound]:
    low, high = (
        graph.attribute(node, name, next(iter(ends(graph.operand(node, operand), scope)), limit))
        for operand, name, limit in ((1, "min", -math.inf), (2, "max", math.inf))
    )
    if max(abs(low), abs(high)) <= _MAX_CLIP:
        yield Bound(0, low, high, "clip")


def _quantize(node: onnx.NodeProto, scope: Scope) -> Iterator[Bound]:
    """The values that do not saturate."""
    scale, zero = (scope.constant(graph.operand(node, number)) for number in (1, 2))
    if scale is None or zero is None or scale.size != 1 or zero.size != 1:
        return
    if zero.dtype.kind in "iu":
        info, factor, middle = np.iinfo(zero.dtype.name), float(scale.item()), int(zero.item())
        yield Bound(0, (info.min - middle) * factor, (info.max - middle) * factor, "clip")


def _remainder(node: onnx.NodeProto, scope: Scope) -> Iterator[Bound]:
    """Floats, such as angles; integers may be identifiers."""
    dtype, turn = scope.dtype(node.input[0]), ends(node.input[1], scope)
    if dtype is not None and is_float(dtype) and len(turn) == 1:
        yield Bound(0, 0, turn[0], "turn")


def _counted(node: onnx.NodeProto, scope: Scope) -> Iterator[Bound]:
    """Integers of which positions in a table are made: those of a mask."""
    dtype = scope.dtype(node.input[0])
    if dtype is not None and dtype.kind in "iu" and _is_index(node.output[0], scope):
        yield Bound(0, 0, 1, "member")


def _is_index(name: str, scope: Scope) -> bool:
    """Whether ``name``, perhaps moved, masked or beside a constant, is an index."""
    return any(
        value in node.input[1:2] and node.op_type in operators.GATHERS
        for value, node in _readers_behind([name], scope, _OF_POSITIONS)
    )


def _positions(operand: int, table: int) -> _Rule:
    """Positions in a table of two dimensions."""

    def rule(node: onnx.NodeProto, scope: Scope) -> Iterator[Bound]:
        sizes = scope.sizes(graph.operand(node, table)) or ()
        if len(sizes) == 2:
            yield from _indices(operand, sizes[0])

    return rule


def _group_query_attention(node: onnx.NodeProto, scope: Scope) -> Iterator[Bound]:
    """The lengths of the cache with the new part: minus one, and of the whole batch.

    The cache grows by the new part, or has as many slots before as after it.
    """
    past, new = _size(node, scope, 3, 2) or 0, _size(node, scope, 0, 1) or 1
    slots = scope.sizes(node.output[1]) if len(node.output) > 1 else None
    total = past + new if past < new or (slots and slots[2] == past + new) else past
    yield Bound(5, 0, total - 1, usual=total - 1)
    yield Bound(6, 1, total, usual=total)


def _hiding(node: onnx.NodeProto, scope: Scope) -> Iterator[Bound]:
    """What is 0 or 1, or minus that: times a large number, it hides scores to which that is added."""
    for operand, factor in ((0, 1), (1, 0)):
        sizes = ends(node.input[factor], scope)
        if sizes and min(map(abs, sizes)) >= HIDING and _is_added_to_scores(node.output[0], scope):
            low, high = (0, 1) if sizes[0] < 0 else (-1, 0)
            yield Bound(operand, low, high, usual=0)


def _is_added_to_scores(name: str, scope: Scope) -> bool:
    """Whether a Softmax reads what ``name`` is added to."""
    readers = _readers_behind([name], scope, _OF_SCORES)
    return _are_scores([node.output[0] for _, node in readers if node.op_type == "Add"], scope)


def _are_scores(names: Iterable[str], scope: Scope) -> bool:
    """Whether a Softmax reads one of the values ``names``, perhaps moved, or added to."""
    readers = _readers_behind(names, scope, _OF_SCORES)
    return any(node.op_type in ("LogSoftmax", "Softmax") for _, node in readers)


def _readers_behind(
    names: Iterable[str], scope: Scope, through: Container[str]
) -> Iterator[tuple[str, onnx.NodeProto]]:
    """The values ``names`` with their readers, and so on behind those of the operators ``through``."""
    waiting = [*names]
    seen = {*waiting}
    while waiting:
        name = waiting.pop()
        for node in scope.nodes_reading(name):
            yield name, node
            if node.op_type in through and node.output[0] not in seen:
                seen.add(node.output[0])
                waiting.append(node.output[0])


def hidden_scores(scope: Scope) -> list[str]:
    """The scores in a graph of which only the largest count; none if no stored number hides any."""
    nodes = (node for node in scope.body.node if node.op_type in _OF_LARGEST)
    if not (scores := [*dict.fromkeys(node.input[0] for node in nodes)]):
        return []
    sizes = (ends(name, scope) for name, tensor in scope.stored.items() if tensor is not None)
    return scores if any(size[0] <= -HIDING for size in sizes if size) else []


def _choice(node: onnx.NodeProto, scope: Scope) -> Iterator[Bound]:
    """What chooses between two values: either; a mask, if it chooses the scores that count."""
    constants = (scope.constant(name) for name in node.input[1:])
    hides = any(value is not None and (value <= -HIDING).any() for value in constants)
    is_mask = hides or _are_scores(node.output, scope)
    yield Bound(0, 0, 1, "mask", 1 if is_mask else None)


def _negative_bits(node: onnx.NodeProto, scope: Scope) -> Iterator[Bound]:
    """Integers of few bits, the upper half of which is made negative."""
    condition = scope.maker(node.input[0])
    if condition is None or condition.op_type not in operators.COMPARES:
        return
    compared = [
        (condition.input[number], members[0])
        for number, members in _compared(condition, scope)
        if members.size == 1
    ]
    for operand, other in ((1, 2), (2, 1)):
        shifted = scope.maker(node.input[other])
        if shifted is None or shifted.op_type not in ("Add", "Sub"):
            continue
        name = node.input[operand]
        end, *others = map(abs, ends(shifted.input[1], scope) or (0.0,))
        is_half = any(n == name and half in (end / 2, end / 2 - 1) for n, half in compared)
        if is_half and shifted.input[0] == name and not others and math.frexp(end)[0] == 0.5:
            yield Bound(operand, 0, end - 1)


def _mask(operand: int) -> _Rule:
    return _fixed(Bound(operand, 0, 1, "mask", 1))


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(
        (
            *("Gather", "GatherElements", "ScatterElements", "Scatter"),
            "com.microsoft.GatherBlockQuantized",
        ),
        _index(1, 0, ("axis", 0)),
    ),
    **dict.fromkeys(("GatherND", "ScatterND"), _gather_nd),
    **dict.fromkeys(("Less", "LessOrEqual", "Greater", "GreaterOrEqual"), _compare),
    **dict.fromkeys(("LSTM", "GRU", "RNN", "com.microsoft.DynamicQuantizeLSTM"), _length(4, 0)),
    **dict.fromkeys(("Expand", "Tile"), _fixed(Bound(1, 1, _MAX_CHANGED, usual=1))),
    **dict.fromkeys(("Sin", "Cos"), _fixed(Bound(0, -math.pi, 2 * math.pi, "turn"))),
    "ConstantOfShape": _fixed(Bound(0, 1, _MAX_CHANGED, usual=1)),
    "Mod": _remainder,
    "Mul": _hiding,
    "Loop": _fixed(Bound(0, 1, _MAX_CHANGED, usual=_MAX_CHANGED)),
    # The limits of a detector's results.
    "NonMaxSuppression": _all(_length(2, 1), _fixed(Bound(3, 0, 1), Bound(4, 0, 1))),
    "RotaryEmbedding": _positions(3, 1),
    "Attention": _length(6, -2, 1),
    "TensorScatter": _tensor_scatter,
    "OneHot": _one_hot,
    "Equal": _equal,
    "ReverseSequence": _length(1, ("time_axis", 0)),
    "Pad": _fixed(Bound(1, 0, 2)),
    "Slice": _slice,
    "TopK": _length(1, ("axis", -1)),
    "Range": _fixed(Bound(0, 0, 0), Bound(1, 1, math.inf, "length"), Bound(2, 1, 1)),
    "Resize": _fixed(Bound(2, 1, 2, usual=1)),
    "Upsample": _fixed(Bound(1, 1, 2, usual=1)),
    "Clip": _clip,
    "CumSum": _counted,
    "QuantizeLinear": _quantize,
    "Where": _all(_choice, _negative_bits),
    # Tokens, segments and positions, each with its table.
    "com.microsoft.EmbedLayerNormalization": _all(
        *(_index(operand, table, 0) for operand, table in ((0, 2), (1, 4), (8, 3))), _mask(7)
    ),
    "com.microsoft.Attention": _mask(3),
    "com.microsoft.MultiHeadAttention": _mask(4),
    "com.microsoft.RotaryEmbedding": _positions(1, 2),
    "com.microsoft.GroupQueryAttention": _group_query_attention,
}
