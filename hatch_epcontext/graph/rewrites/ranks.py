"""Operators with more than 4 dimensions as equal ones with fewer, between Reshapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope

_MOST = 4
"""The number of dimensions that all NPUs support for all operators."""

_RESHAPING = operators.RESHAPING - {"Identity"}

_ELEMENTWISE = """
Abs Add And Cast Ceil Celu Clip Cos Div Elu Equal Erf Exp Expand Floor Gelu Greater GreaterOrEqual
HardSigmoid HardSwish Identity LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or
PRelu Pow Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Sub Sum Tan Tanh Where
Xor
"""

_ALONG_AXIS = ("ArgMax", "ArgMin", "Concat", "GatherElements", "LogSoftmax", "Softmax", "Split")

_REDUCING = ("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")

_SOFTMAX_OF_ONE_AXIS = 13


def _is_high(node: onnx.NodeProto, scope: Scope) -> bool:
    return any(len(scope.sizes(name) or ()) > _MOST for name in (*node.input, *node.output) if name)


@dataclass(frozen=True)
class _Permutation:
    """A Transpose: the sizes of its input's dimensions, and the source of each output dimension."""

    sizes: tuple[int, ...]
    perm: tuple[int, ...]

    def simplest(self) -> _Permutation:
        """The same order of values with as few dimensions as possible."""
        # A dimension of size 1 moves no value.
        kept = [axis for axis in self.perm if self.sizes[axis] != 1]
        # Dimensions that stay neighbours become one.
        groups: list[list[int]] = []
        position = {axis: i for i, axis in enumerate(sorted(kept))}
        for axis in kept:
            if groups and position[axis] == position[groups[-1][-1]] + 1:
                groups[-1].append(axis)
            else:
                groups.append([axis])
        before = sorted(groups)
        sizes = tuple(math.prod(self.sizes[axis] for axis in group) for group in before)
        return _Permutation(sizes, tuple(before.index(group) for group in groups))

    def swaps(self) -> list[_Permutation]:
        """Permutations of few dimensions that have the same effect, one after the other.

        Each exchanges two neighbouring blocks of dimensions.
        """
        order = list(range(len(self.perm)))
        result = []
        for start, source in enumerate(self.perm):
            middle = order.index(source)
            end = middle
            # All that follow in the right order move along.
            while order[end : end + 1] == list(self.perm[start + end - middle :][:1]) != []:
                end += 1
            blocks = order[:start], order[start:middle], order[middle:end], order[end:]
            if blocks[1]:
                sizes = (math.prod(self.sizes[axis] for axis in block) for block in blocks)
                result.append(_Permutation(tuple(sizes), (0, 2, 1, 3)).simplest())
            order = [*blocks[0], *blocks[2], *blocks[1], *blocks[3]]
        return result


@rewrites("Transpose")
def reduce_rank_of_transpose(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Transpose of many dimensions as one of fewer, or else as several."""
    value = node.input[0]
    if not _is_high(node, scope):
        return None
    sizes, result = scope.fixed_shape(value), scope.fixed_shape(node.output[0])
    reverse = range(len(sizes) - 1, -1, -1)
    own = _Permutation(sizes, tuple(graph.attribute(node, "perm", reverse)))
    simplest = own.simplest()
    swaps = [simplest] if len(simplest.perm) <= _MOST else own.swaps()
    for swap in swaps if len(simplest.perm) > 1 else ():
        value = builder.transpose(builder.reshape(value, swap.sizes), swap.perm)
    return [builder.reshape(value, result)]


@rewrites("Gather")
def reduce_rank_of_gather(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Gather of many dimensions, or that gives many, as one along the second of three."""
    value, indices = node.input
    if not _is_high(node, scope):
        return None
    sizes, result = scope.fixed_shape(value), scope.fixed_shape(node.output[0])
    axis = graph.number(node, "axis", 0) % len(sizes)
    before, after = math.prod(sizes[:axis]), math.prod(sizes[axis + 1 :])
    rows = builder.reshape(value, (before, sizes[axis], after))
    if len(scope.shape(indices) or ()) != 1:
        indices = builder.reshape(indices, [-1])
    return [builder.reshape(builder.add("Gather", rows, indices, axis=1), result)]


@rewrites(*_ELEMENTWISE.split(), *_ALONG_AXIS, *_REDUCING, "Slice")
def reduce_rank(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """An operator of each value, or along some axes, with the other dimensions joined."""
    if not _is_high(node, scope):
        return None
    known = {name: scope.fixed_shape(name) for name in (*node.input, *node.output) if name}
    rank = max(map(len, known.values()), default=0)
    axes = _axes(node, rank, scope, builder)
    if axes is None:
        return Declined("its axes are not fixed")
    is_moved = node.op_type in ("Expand", "Slice", "Split", *_REDUCING)
    inputs = node.input[:1] if is_moved else node.input
    results = [known[name] for name in node.output if name]
    apart = [0 if node.op_type in _REDUCING else axis for axis in axes]
    marks = dict(zip(axes, apart, strict=True))
    groups = _groups([known[name] for name in inputs if name], results, marks, rank)
    if len(groups) > _MOST:
        return Declined(f"{len(groups)} of its dimensions cannot be joined")
    values = [name and _grouped(name, known[name], groups, rank, builder) for name in inputs]
    at = [index for index, group in enumerate(groups) if group[0] in axes]
    if node.op_type in _REDUCING:
        value = builder.reduced(node.op_type, values[0], at, keepdims=1)
        return [builder.reshape(value, results[0])]
    if node.op_type == "Expand":
        sizes = [math.prod(results[0][axis] for axis in group) for group in groups]
        values.append(builder.integers(sizes))
    elif node.op_type == "Split":
        values += node.input[1:]
    elif node.op_type == "Slice":
        # Each of the axes is a group of its own.
        numbers = builder.integers([at[sorted(axes).index(axis)] for axis in axes])
        values += [*node.input[1:3], numbers, *node.input[4:]]
    outputs = builder.add_like(node, node.op_type, values)
    own = builder.nodes[-1]
    kept = [entry for entry in own.attribute if entry.name not in ("axis", "keepdims")]
    del own.attribute[:]
    own.attribute.extend(kept)
    if at and node.op_type != "Slice":
        own.attribute.append(onnx.helper.make_attribute("axis", at[0]))
    pairs = zip(outputs, node.output, strict=True)
    return [name and builder.reshape(name, known[old]) for name, old in pairs]


def _axes(node: onnx.NodeProto, rank: int, scope: Scope, builder: Builder) -> list[int] | None:
    """The axes along which ``node`` computes; None if they are unknown."""
    if node.op_type in _REDUCING:
        return scope.axes(node)
    if node.op_type == "Slice":
        axes = scope.constant(graph.operand(node, 3))
        return None if axes is None else [int(axis) % rank for axis in axes]
    if node.op_type not in _ALONG_AXIS:
        return []
    is_softmax = node.op_type in ("LogSoftmax", "Softmax")
    if is_softmax and builder.opset < _SOFTMAX_OF_ONE_AXIS:
        return None
    return [graph.number(node, "axis", -1 if is_softmax else 0) % rank]


def _groups(
    inputs: Sequence[tuple[int, ...]],
    outputs: Sequence[tuple[int, ...]],
    axes: Mapping[int, int],
    rank: int,
) -> list[list[int]]:
    """Neighbouring dimensions that all values have, or repeat, together.

    Those of ``axes`` are joined only with others of the same number.
    """
    full = [(*[1] * (rank - len(shape)), *shape) for shape in inputs]
    if not axes:
        full += [(*[1] * (rank - len(shape)), *shape) for shape in outputs]
    largest = [max(shape[axis] for shape in full) for axis in range(rank)]
    repeats = [tuple(shape[axis] == largest[axis] for shape in full) for axis in range(rank)]
    groups: list[list[int]] = []
    for axis in range(rank):
        last = groups[-1] if groups else []
        apart = any(axes.get(other) != axes.get(axis) for other in last)
        same = (
            last
            and not apart
            and (
                repeats[axis] == repeats[last[0]]
                or largest[axis] == 1
                or all(largest[i] == 1 for i in last)
            )
        )
        if same:
            last.append(axis)
            last.sort(key=lambda other: (largest[other] == 1, other))
        else:
            groups.append([axis])
    return [sorted(group) for group in groups]


def _grouped(
    name: str, shape: tuple[int, ...], groups: Sequence[Sequence[int]], rank: int, builder: Builder
) -> str:
    if len(shape) == 0:
        return name
    full = (*[1] * (rank - len(shape)), *shape)
    return builder.reshape(name, [math.prod(full[axis] for axis in group) for group in groups])


@rewrites(*_RESHAPING)
def join_reshapes(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Reshape of a reshaped value with many dimensions, which skips that value."""
    source, before = scope.origin_and_moves(node.input[0], _RESHAPING)
    if all(len(scope.sizes(reshape.output[0]) or ()) <= _MOST for reshape in before):
        return None
    shape = scope.shape(node.output[0])
    # A size of zero means that of the input.
    if shape is None or 0 in shape:
        return Declined("the shape of its result is not fixed")
    return [builder.reshape(source, shape)]
