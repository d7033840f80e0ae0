"""Operators with more than 4 dimensions as equal ones with fewer, between Reshapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope

_MOST, _TOO_MANY = 4, 6
"""The number of dimensions that all NPUs support for all operators, and one that few do for any."""

_RESHAPING = operators.RESHAPING - {"Identity"}

_ALONG_AXIS = frozenset({"Concat", "CumSum", "GatherElements", "ScatterElements", "Split"})
_ALONG_AXIS |= {"ArgMax", "ArgMin", "LogSoftmax", "Softmax", "TopK"}

_REDUCING = tuple(f"Reduce{name}" for name in ("L1", "L2", "Max", "Mean", "Min", "Prod", "Sum"))

_WITH_NUMBERS = ("CumSum", "Expand", "Slice", "Split", "TopK")
"""Operators whose second input, and others, are no values."""

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


@rewrites("Transpose", applies=_is_high)
def reduce_rank_of_transpose(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Transpose of many dimensions as one of fewer, or else as several."""
    value = node.input[0]
    sizes, result = scope.fixed_shape(value), scope.fixed_shape(node.output[0])
    reverse = range(len(sizes) - 1, -1, -1)
    own = _Permutation(sizes, tuple(graph.attribute(node, "perm", reverse)))
    simplest = own.simplest()
    swaps = [simplest] if len(simplest.perm) <= _MOST else own.swaps()
    for swap in swaps if len(simplest.perm) > 1 else ():
        value = builder.transpose(builder.reshape(value, swap.sizes), swap.perm)
    return [builder.reshape(value, result)]


@rewrites("Gather", applies=_is_high)
def reduce_rank_of_gather(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Gather of many dimensions, or that gives many, as one along the second of three."""
    value, indices = node.input
    sizes, result = scope.fixed_shape(value), scope.fixed_shape(node.output[0])
    axis = graph.number(node, "axis", 0) % len(sizes)
    before, after = math.prod(sizes[:axis]), math.prod(sizes[axis + 1 :])
    rows = builder.reshape(value, (before, sizes[axis], after))
    if len(scope.shape(indices) or ()) != 1:
        indices = builder.reshape(indices, [-1])
    return [builder.reshape(builder.add("Gather", rows, indices, axis=1), result)]


@rewrites(*_REDUCING, applies=_is_high)
def reduce_rank_of_reduction(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A reduction of many dimensions as one along the second of three for all neighbours among its axes."""
    value, result = node.input[0], scope.fixed_shape(node.output[0])
    sizes, axes = [*scope.fixed_shape(value)], sorted(scope.fixed_axes(node))
    if {*axes} == {*range(len(sizes))}:
        axes = [0]
        sizes = [math.prod(sizes)]
    while axes:
        end = axes.pop() + 1
        begin = end - 1
        while axes and axes[-1] == begin - 1:
            begin = axes.pop()
        before, after = math.prod(sizes[:begin]), math.prod(sizes[end:])
        value = builder.reshape(value, [before, math.prod(sizes[begin:end]), after])
        value = builder.reduced(node.op_type, value, [1], keepdims=1)
        sizes[begin:end] = [1]
    return [builder.reshape(value, result)]


@rewrites("Tile", applies=_is_high)
def reduce_rank_of_tile(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Tile of many dimensions as those of two, for each of its axes."""
    value, sizes = node.input[0], [*scope.fixed_shape(node.input[0])]
    for axis, count in enumerate(map(int, scope.stored_values(node.input[1]))):
        if count != 1:
            value = builder.reshape(value, [math.prod(sizes[:axis]), math.prod(sizes[axis:])])
            value = builder.add("Tile", value, builder.integers([1, count]))
            sizes[axis] *= count
    return [builder.reshape(value, sizes)]


@rewrites(*operators.ELEMENTWISE, *_ALONG_AXIS, "Expand", "MatMul", "Slice", applies=_is_high)
def reduce_rank(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """An operator of each value, or along some axes, with the other dimensions joined."""
    known = {name: scope.fixed_shape(name) for name in (*node.input, *node.output) if name}
    rank = max(map(len, known.values()), default=0)
    axes = _axes(node, rank, scope, builder)
    if axes is None:
        return Declined("its axes are not fixed")
    inputs = node.input[:1] if node.op_type in _WITH_NUMBERS else node.input
    results = [known[name] for name in node.output if name]
    shapes = [known[name] for name in inputs if name]
    groups = _groups(shapes if axes else [*shapes, *results], axes, rank)
    if len(groups) > _MOST and len(groups) >= min(rank, _TOO_MANY):
        return Declined(f"{len(groups)} of its dimensions cannot be joined")
    values = [name and _grouped(name, known[name], groups, rank, builder) for name in inputs]
    at = [index for index, group in enumerate(groups) if group[0] in axes]
    if node.op_type == "Expand":
        sizes = [math.prod(results[0][axis] for axis in group) for group in groups]
        values.append(builder.integers(sizes))
    elif node.op_type == "CumSum":
        values.append(builder.store(np.int64(at[0])))
    elif node.op_type == "Slice":
        # Each of the axes is a group of its own.
        numbers = builder.integers([at[sorted(axes).index(axis)] for axis in axes])
        values += [*node.input[1:3], numbers, *node.input[4:]]
    elif node.op_type in _WITH_NUMBERS:
        values += node.input[1:]
    axis = at[0] if node.op_type in _ALONG_AXIS - {"CumSum"} else None
    outputs = builder.add_like(node, node.op_type, values, axis=axis, keepdims=None)
    pairs = zip(outputs, node.output, strict=True)
    return [name and builder.reshape(name, known[old]) for name, old in pairs]


def _axes(node: onnx.NodeProto, rank: int, scope: Scope, builder: Builder) -> list[int] | None:
    """The axes along which ``node`` computes; None if they are unknown."""
    if node.op_type in ("CumSum", "Slice"):
        axes = scope.constant(graph.operand(node, 1 if node.op_type == "CumSum" else 3))
        return None if axes is None else [int(axis) % rank for axis in axes.reshape(-1)]
    if node.op_type == "MatMul":
        is_of_matrices = all(len(scope.fixed_shape(name)) > 1 for name in node.input)
        return [rank - 2, rank - 1] if is_of_matrices else None
    if node.op_type not in _ALONG_AXIS:
        return []
    if node.op_type in ("GatherElements", "ScatterElements"):
        # All positions of joined dimensions must correspond.
        axis = graph.number(node, "axis", 0) % rank
        shapes = [[*scope.fixed_shape(name)] for name in node.input]
        for shape in shapes:
            del shape[axis]
        return [axis] if all(shape == shapes[0] for shape in shapes) else None
    is_softmax = node.op_type in ("LogSoftmax", "Softmax")
    if is_softmax and builder.opset < _SOFTMAX_OF_ONE_AXIS:
        return None
    return [graph.number(node, "axis", -1 if is_softmax or node.op_type == "TopK" else 0) % rank]


def _groups(shapes: Sequence[Sequence[int]], axes: Sequence[int], rank: int) -> list[list[int]]:
    """Neighbouring dimensions that all values of these ``shapes`` have, or repeat, together; each of ``axes``
    is one.
    """
    full = [(*[1] * (rank - len(shape)), *shape) for shape in shapes]
    largest = [max(shape[axis] for shape in full) for axis in range(rank)]
    repeats = [tuple(shape[axis] == largest[axis] for shape in full) for axis in range(rank)]
    groups: list[list[int]] = []
    for axis in range(rank):
        last = groups[-1] if groups else []
        can_join = bool(last) and axis not in axes and last[0] not in axes
        is_single = largest[axis] == 1 or all(largest[other] == 1 for other in last)
        if can_join and (is_single or repeats[axis] == repeats[last[0]]):
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
