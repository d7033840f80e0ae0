"""Where operators leave the batch, by ONNX's `Operators.md` and ONNX Runtime's `ContribOperators.md`.

A rule gets a node of which an operand has rows, and returns where they are in all results, or in each. If it
raises an error, they are mixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import onnx

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.batch.sizes import ROWS, Numbers, sections
from hatch_epcontext.graph.scope import Sizes


@dataclass(frozen=True)
class Batch:
    """Where the rows of a value are: the index on ``axis`` is (outer * rows + row) * ``inner`` + another."""

    axis: int
    inner: int = 1


MIXED = Batch(-1)
"""A value whose rows depend on each other, on their positions or on their number."""


@dataclass(frozen=True)
class Call:
    """A ``node`` with the batch of each operand, None for one without rows, and the ``shapes`` of these.

    ``results``: the shapes of its results. ``numbers``: the operands that are known.
    """

    node: onnx.NodeProto
    opset: int
    batches: Sequence[Batch | None]
    shapes: Sequence[Sizes]
    numbers: Sequence[Numbers | None]
    results: Sequence[Sizes]

    @property
    def batch(self) -> Batch:
        """That of the first operand, if no other one has rows. Raises ValueError otherwise."""
        if self.batches[0] is None or any(self.batches[1:]):
            raise ValueError("another operand has rows")
        return self.batches[0]

    @property
    def rank(self) -> int:
        return len(self.shapes[0])

    def number(self, name: str, default: int) -> int:
        return graph.number(self.node, name, default)

    def integers(self, name: str, operand: int, default: Sequence[int] | None = None) -> list[int]:
        """An attribute, or in later opsets an operand. Raises ValueError if it is not known."""
        if graph.operand(self.node, operand):
            numbers = self.numbers[operand]
            if numbers is None or not numbers.is_fixed:
                raise ValueError(f"{name} is not known")
            return [int(number) for number in numbers.fixed.ravel()]
        values = graph.attribute(self.node, name, default)
        if values is None:
            raise ValueError(f"{name} is missing")
        return [values] if isinstance(values, int) else [*values]


Rule = Callable[[Call], Batch | Sequence[Batch]]
_OneBatch = Callable[[Call], Batch]


def _aligned(call: Call, operands: Iterable[int], rank: int) -> Batch:
    """The batch in a result of ``rank`` axes to which ``operands`` are broadcast from the last axis on."""
    numbers = [number for number in operands if graph.operand(call.node, number)]
    batches = {
        replace(batch, axis=batch.axis + rank - len(call.shapes[number]))
        for number in numbers
        if (batch := call.batches[number])
    }
    (batch,) = batches
    for number in numbers:
        axis = batch.axis - rank + len(call.shapes[number])
        if call.batches[number] is None and axis >= 0 and call.shapes[number][axis] != 1:
            return MIXED
    return batch


def _first(call: Call) -> Batch:
    """Each value of the first operand by itself, with parameters of the whole or along another axis."""
    axis = call.number("axis", 1) % max(1, call.rank)
    others = (_size(size) for shape in call.shapes[1:] for size in shape)
    is_apart = axis != call.batch.axis or all(size == 1 for size in others)
    return call.batch if is_apart and not call.number("block_size", 0) else MIXED


def _along(axes: Callable[[Call], Iterable[int]]) -> _OneBatch:
    """Values along ``axes`` depend on each other, or on their positions; the result may lack these axes."""

    def rule(call: Call) -> Batch:
        batch, mixed = call.batch, {axis % call.rank for axis in axes(call)}
        if batch.axis in mixed:
            return MIXED
        is_removed = len(call.results[0]) < call.rank
        return replace(batch, axis=batch.axis - is_removed * sum(a < batch.axis for a in mixed))

    return rule


def _axis(default: int) -> Callable[[Call], Iterable[int]]:
    return lambda call: (call.number("axis", default),)


def _from_axis(call: Call) -> Iterable[int]:
    return range(call.number("axis", -1) % call.rank, call.rank)


def _softmax(call: Call) -> Iterable[int]:
    # Before opset 13 all axes from this one on were one.
    if call.opset < 13:
        return range(call.number("axis", 1) % call.rank, call.rank)
    return (call.number("axis", -1),)


def _reduced(call: Call) -> Iterable[int]:
    axes = call.integers("axes", 1, ())
    return axes or (() if call.number("noop_with_empty_axes", 0) else range(call.rank))


def _skip(call: Call) -> Batch:
    """A sum that is normalized along the last axis."""
    batch = _aligned(call, range(len(call.node.input)), call.rank)
    return MIXED if batch.axis == call.rank - 1 else batch


def _dft(call: Call) -> Iterable[int]:
    axis = call.integers("axis", 2, (1 if call.opset < 20 else -2,))
    return (*axis, -1)


def _dropout(call: Call) -> Batch:
    is_training = call.integers("training_mode", 2, (0,))
    return MIXED if any(is_training) else call.batch


def _normalized(call: Call) -> Batch:
    """A BatchNormalization with stored statistics."""
    is_training = call.number("training_mode", 0) or len([*filter(None, call.node.output)]) > 1
    return MIXED if is_training else _along(lambda call: (1,))(call)


def _samples(*operands: int) -> _OneBatch:
    """Operators of independent samples along the first axis of ``operands``."""

    def rule(call: Call) -> Batch:
        batches = {
            b for n, b in enumerate(call.batches) if b or (n in operands and call.node.input[n])
        }
        others = (b for n, b in enumerate(call.batches) if n not in operands)
        (batch,) = batches
        return batch if batch and batch.axis == 0 and not any(others) else MIXED

    return rule


def _reshape(call: Call) -> Batch:
    """The same order of values: rows begin at the same distances."""
    batch, result = call.batch, [*map(_size, call.results[0])]
    behind = math.prod(map(_size, call.shapes[0][batch.axis + 1 :])) * batch.inner
    (axis,) = (axis for axis, size in enumerate(result) if size % ROWS == 0)
    inner, rest = divmod(behind, math.prod(result[axis + 1 :]))
    return MIXED if rest or not inner else Batch(axis, inner)


def _size(size: int | None) -> int:
    if not size:
        raise ValueError("an unknown or empty size")
    return size


def _transpose(call: Call) -> Batch:
    order = graph.attribute(call.node, "perm", None) or range(call.rank)[::-1]
    return replace(call.batch, axis=[*order].index(call.batch.axis))


def _concat(call: Call) -> Batch:
    batch = _aligned(call, range(len(call.node.input)), call.rank)
    return MIXED if call.number("axis", 1) % call.rank == batch.axis else batch


def _slice(call: Call) -> Batch:
    batch = call.batches[0]
    for axis, (start, end, stride) in sections(call.node, call.numbers):
        if batch is not None and axis % call.rank == batch.axis:
            is_whole = int(start.of_rows) == 0 and int(stride.of_rows) == 1
            if not is_whole or int(end.of_rows) < _size(call.shapes[0][batch.axis]):
                return MIXED
        elif not (start.is_fixed and end.is_fixed):
            return MIXED
    return call.batch


def _pad(call: Call) -> Batch:
    pads = call.integers("pads" if call.opset > 1 else "paddings", 1)
    axes = call.integers("axes", 3, [*range(call.rank)])
    ends = zip([axis % call.rank for axis in axes] * 2, pads, strict=True)
    return MIXED if any(axis == call.batch.axis and pad for axis, pad in ends) else call.batch


def _resize(call: Call) -> Batch:
    mode = graph.text(call.node, "coordinate_transformation_mode")
    policy = graph.text(call.node, "keep_aspect_ratio_policy") or "stretch"
    axis = call.batch.axis
    is_same = call.results[0][axis] == call.shapes[0][axis]
    is_apart = is_same and mode != "tf_crop_and_resize" and policy == "stretch"
    return call.batch if is_apart else MIXED


def _expand(call: Call) -> Batch:
    if call.batches[0] is not None:
        shift = len(call.results[0]) - call.rank
        axis = call.batches[0].axis + shift
        is_same = call.results[0][axis] == call.shapes[0][axis - shift]
        return replace(call.batches[0], axis=axis) if is_same else MIXED
    return _repeated(call, 1)


def _repeated(call: Call, operand: int) -> Batch:
    """The same values in each row, whose shape is known."""
    sizes = call.numbers[operand]
    if sizes is None:
        return MIXED
    ((axis,),) = sizes.per_row.nonzero()
    own = axis + call.rank - len(call.results[0]) if operand else -1
    is_plain = not sizes.fixed[axis] and (own < 0 or call.shapes[0][own] == 1)
    return Batch(int(axis), int(sizes.per_row[axis])) if is_plain else MIXED


def _tile(call: Call) -> Batch:
    repeats = call.numbers[1]
    if call.batches[0] is not None:
        # Repeated rows are independent too: what is repeated comes first.
        return call.batch
    if repeats is None:
        return MIXED
    ((axis,),) = repeats.per_row.nonzero()
    inner = int(repeats.per_row[axis]) * _size(call.shapes[0][axis])
    return MIXED if repeats.fixed[axis] else Batch(int(axis), inner)


def _gather(call: Call) -> Batch:
    data, indices = call.batches[:2]
    axis = call.number("axis", 0) % call.rank
    if data is None and indices is not None:
        return replace(indices, axis=axis + indices.axis)
    batch = call.batch
    shift = len(call.shapes[1]) - 1 if batch.axis > axis else 0
    return MIXED if batch.axis == axis else replace(batch, axis=batch.axis + shift)


def _gather_elements(call: Call) -> Batch:
    data, indices = call.batches[:2]
    axis = call.number("axis", 0) % call.rank
    if indices is None or (data is None and indices.axis != axis):
        return MIXED
    return MIXED if data is not None and (data != indices or data.axis == axis) else indices


def _gather_nd(call: Call) -> Batch:
    data, indices = call.batches[:2]
    first, rank = call.number("batch_dims", 0), len(call.shapes[1])
    if data is not None and indices is not None:
        return data if data == indices and data.axis < first else MIXED
    if indices is not None:
        return indices if first <= indices.axis < rank - 1 else MIXED
    behind = call.batch.axis - first - _size(call.shapes[1][-1])
    return MIXED if behind < 0 else replace(call.batch, axis=rank - 1 + behind)


def _scatter_elements(call: Call) -> Batch:
    (batch,) = {*call.batches}
    axis = call.number("axis", 0) % call.rank
    return MIXED if batch is None or batch.axis == axis else batch


def _one_hot(call: Call) -> Batch:
    axis = call.number("axis", -1) % (call.rank + 1)
    return replace(call.batch, axis=call.batch.axis + (axis <= call.batch.axis))


def _reverse_sequence(call: Call) -> Batch:
    time, rows = call.number("time_axis", 0), call.number("batch_axis", 1)
    batch, lengths = call.batches[:2]
    if batch is None or batch.axis == time:
        return MIXED
    expected = Batch(0, batch.inner) if batch.axis == rows else None
    return batch if lengths == expected else MIXED


def _recurrent(call: Call) -> Batch | Sequence[Batch]:
    is_first = call.number("layout", 0) == 1
    axes = {0: 0 if is_first else 1, 4: 0, 5: 0 if is_first else 1, 6: 0 if is_first else 1}
    present = {n: call.batches[n] for n in range(len(call.batches)) if call.node.input[n]}
    (inner,) = {batch.inner for batch in present.values() if batch}
    expected = {n: Batch(axes[n], inner) if n in axes else None for n in present}
    if present != expected:
        return MIXED
    last = Batch(0 if is_first else 1, inner)
    return Batch(0 if is_first else 2, inner), last, last


def _matmul(second: int = 1, parameters: Sequence[int] = ()) -> Rule:
    """A product of the first operand and ``second``. ``parameters``: operands that belong to rows of the
    first one or of the result, unless they are one number.
    """

    def rule(call: Call) -> Batch:
        one, other = call.shapes[0], call.shapes[second]
        own, batches = (len(one), len(other)), (call.batches[0], call.batches[second])
        rank = len(call.results[0])
        before = rank - (own[0] > 1) - (own[1] > 1)
        results = set()
        for number, (batch, size) in enumerate(zip(batches, own, strict=True)):
            if batch is None:
                continue
            if size == 1 or batch.axis == size - 1 - number:
                return MIXED
            is_side = batch.axis == size - 2 + number
            side = rank - 1 if number or own[1] == 1 else rank - 2
            axis = side if is_side else before - (size - 2) + batch.axis
            results.add(replace(batch, axis=axis))
        (batch,) = results
        for shape, operand in zip((one, other), batches, strict=True):
            axis = batch.axis - before + len(shape) - 2
            is_broadcast = batch.axis < before and axis >= 0
            if operand is None and is_broadcast and shape[axis] != 1:
                return MIXED
        for number, operand in enumerate(call.batches):
            is_parameter = number in parameters and call.node.input[number]
            if is_parameter and math.prod(map(_size, call.shapes[number])) != 1:
                return MIXED
            if operand and number not in (0, second):
                return MIXED
        return batch

    return rule


def _gemm(call: Call) -> Batch:
    one, other = call.batches[:2]
    sides = (call.number("transA", 0), 1 - call.number("transB", 0))
    if one is not None and other is not None:
        return MIXED
    factor, axis, side = (other, 1, sides[1]) if one is None else (one, 0, sides[0])
    if factor is not None and factor.axis != side:
        return MIXED
    result = replace(factor, axis=axis) if factor is not None else None
    sum_ = 2 if graph.operand(call.node, 2) else None
    if sum_ is None or result is None:
        return result or MIXED
    shape, bias = call.shapes[2], call.batches[2]
    own = axis - 2 + len(shape)
    if bias is None:
        return result if own < 0 or shape[own] == 1 else MIXED
    return result if replace(bias, axis=bias.axis + 2 - len(shape)) == result else MIXED


def _einsum(call: Call) -> Batch:
    equation = graph.text(call.node, "equation")
    terms, result = operators.einsum_terms(equation, [*map(len, call.shapes)])
    batches = zip(terms, call.batches, strict=True)
    ((letter, inner),) = {(term[b.axis], b.inner) for term, b in batches if b is not None}
    for term, shape, batch in zip(terms, call.shapes, call.batches, strict=True):
        if term.count(letter) > (batch is not None) and shape[term.index(letter)] != 1:
            return MIXED
    return Batch(result.index(letter), inner) if letter in result else MIXED


_GELUS = [f"com.microsoft.{name}" for name in ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")]
_SKIPS = ["com.microsoft.SkipLayerNormalization", "com.microsoft.SkipSimplifiedLayerNormalization"]

SAME_TYPE: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(_GELUS, (0,)),
    **dict.fromkeys(_SKIPS, (0, 3)),
    "SimplifiedLayerNormalization": (0,),
    **dict.fromkeys(("GroupNormalization", "MeanVarianceNormalization"), (0,)),
}
"""Operators whose types onnx does not infer, with the results that have the type of the first operand."""

_REDUCTIONS = """
ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
ReduceSumSquare
"""

_OF_SAMPLES = """
AveragePool Col2Im Conv ConvInteger ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool
GroupNormalization InstanceNormalization LpPool QLinearConv STFT SpaceToDepth
"""

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(operators.RESHAPING, _reshape),
    **dict.fromkeys(
        [*operators.ELEMENTWISE, *_GELUS],
        lambda call: _aligned(call, range(len(call.node.input)), len(call.results[0])),
    ),
    **dict.fromkeys(("CastLike", "DequantizeLinear", "QuantizeLinear"), _first),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), _along(_softmax)),
    **dict.fromkeys(("ArgMax", "ArgMin", "Split"), _along(_axis(0))),
    **dict.fromkeys(("LpNormalization", "TopK"), _along(_axis(-1))),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _along(_from_axis)),
    "SimplifiedLayerNormalization": _along(_from_axis),
    **dict.fromkeys(_SKIPS, _skip),
    **dict.fromkeys(_REDUCTIONS.split(), _along(_reduced)),
    "CumSum": _along(lambda call: call.integers("axis", 1)),
    "DFT": _along(_dft),
    "LRN": _along(lambda call: (1,)),
    "MeanVarianceNormalization": _along(lambda call: call.integers("axes", 1, (0, 2, 3))),
    "Trilu": _along(lambda call: (-2, -1)),
    "BatchNormalization": _normalized,
    "Dropout": _dropout,
    **dict.fromkeys(_OF_SAMPLES.split(), _samples(0)),
    "DeformConv": _samples(0, 2, 4),
    "GridSample": _samples(0, 1),
    # The indices of the largest values are those in the whole operand.
    "MaxPool": lambda call: (_samples(0)(call), MIXED),
    "RotaryEmbedding": _samples(0, 3),
    "Transpose": _transpose,
    "Concat": _concat,
    "ConstantOfShape": lambda call: _repeated(call, 0),
    "Expand": _expand,
    "Tile": _tile,
    "Slice": _slice,
    "Pad": _pad,
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterElements": _scatter_elements,
    "OneHot": _one_hot,
    "ReverseSequence": _reverse_sequence,
    **dict.fromkeys(operators.LAYERS, _recurrent),
    "MatMul": _matmul(),
    "MatMulInteger": _matmul(parameters=(2,)),
    "QLinearMatMul": _matmul(second=3, parameters=(1, 2, 6, 7)),
    "Gemm": _gemm,
    "Einsum": _einsum,
}
"""Operators after their domain, without which they are ONNX's own. All others mix rows."""
