"""Operators with many dimensions as equivalent ones with few."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.builder import (
    Builder,
    Outputs,
    Rewrite,
    Rule,
    remove_unused,
    replace,
)
from hatch_epcontext.graph.scope import Scope, Types

_FEW = 4
"""The number of dimensions that every EP supports."""

_RESHAPING = operators.RESHAPING - {"Identity"}

_NAMES = """
Abs Add And Cast Div Equal Erf Exp Expand Greater GreaterOrEqual Less LessOrEqual Log Max Min Mod Mul
Neg Not Or Pow PRelu Reciprocal Relu Sigmoid Sqrt Sub Tanh Where
"""
_BY_VALUE = frozenset(_NAMES.split())
"""Operators with a result for each value, or for each of several values that are broadcast."""

_REDUCING = frozenset({"ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"})

_OPERATORS = _RESHAPING | _BY_VALUE | _REDUCING | {"Concat", "Gather", "Tile", "Transpose"}


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

    def steps(self) -> list[_Permutation]:
        """Permutations of few dimensions that have the same effect, one after the other.

        Each exchanges two neighbouring blocks of dimensions.
        """
        order = list(range(len(self.perm)))
        result = []
        for start, wanted in enumerate(self.perm):
            middle = order.index(wanted)
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


def _transposed(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Transpose of many dimensions as one of fewer, or else as several."""
    sizes, result = scope.shape(node.input[0]), scope.shape(node.output[0])
    if sizes is None or result is None or len(sizes) <= _FEW:
        return None
    reverse = range(len(sizes) - 1, -1, -1)
    own = _Permutation(sizes, tuple(graph.attribute(node, "perm", reverse)))
    simplest = own.simplest()
    steps = [simplest] if len(simplest.perm) < len(own.perm) else own.steps()
    value = node.input[0]
    for step in steps if len(simplest.perm) > 1 else ():
        value = builder.transpose(builder.reshape(value, step.sizes), step.perm)
    return [builder.reshape(value, result)]


def _gathered(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Gather of many dimensions, or that gives many, as one along the second of three."""
    value, indices = node.input
    sizes, result = scope.shape(value), scope.shape(node.output[0])
    if sizes is None or result is None or max(len(sizes), len(result)) <= _FEW:
        return None
    axis = graph.number(node, "axis", 0) % len(sizes)
    before, after = math.prod(sizes[:axis]), math.prod(sizes[axis + 1 :])
    rows = builder.reshape(value, (before, sizes[axis], after))
    if len(scope.shape(indices) or ()) != 1:
        indices = builder.reshape(indices, [-1])
    return [builder.reshape(builder.add("Gather", rows, indices, axis=1), result)]


def _groups(keys: Iterable[tuple[int, object]]) -> list[list[int]]:
    """Neighbouring axes with equal keys, for pairs of an axis and its key."""
    return [
        [axis for axis, _ in group] for _, group in itertools.groupby(keys, lambda pair: pair[1])
    ]


def _merged(sizes: Sequence[int], groups: Iterable[Sequence[int]]) -> list[int]:
    """``sizes`` with one dimension for each of ``groups``."""
    return [math.prod(sizes[axis] for axis in group) for group in groups]


def _by_value(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """An operator by value, after neighbouring dimensions that are broadcast alike have become one."""
    names = node.input[:1] if node.op_type == "Expand" else node.input
    result, shapes = scope.shape(node.output[0]), [scope.shape(name) for name in names]
    known = [shape for shape in shapes if shape is not None]
    if result is None or len(known) < len(shapes) or len(result) <= _FEW or 0 in result:
        return None
    wide = [(*[1] * (len(result) - len(shape)), *shape) for shape in known]
    groups = _groups(
        (axis, tuple(shape[axis] == 1 for shape in wide))
        for axis, size in enumerate(result)
        if size != 1
    )
    operands = [
        builder.reshape(name, _merged(shape, groups))
        for name, shape in zip(names, wide, strict=True)
    ]
    if node.op_type == "Expand":
        operands.append(builder.integers(_merged(result, groups)))
    (value,) = builder.add_like(node, node.op_type, operands)
    return [builder.reshape(value, result)]


def _reduced(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A reduction, after neighbouring dimensions that are reduced, or kept, have become one."""
    sizes, result, axes = scope.shape(node.input[0]), scope.shape(node.output[0]), scope.axes(node)
    if sizes is None or result is None or axes is None or len(sizes) <= _FEW:
        return None
    groups = _groups((axis, axis in axes) for axis in range(len(sizes)))
    merged = [index for index, group in enumerate(groups) if group[0] in axes]
    value = builder.reshape(node.input[0], _merged(sizes, groups))
    return [builder.reshape(builder.reduced(node.op_type, value, merged, keepdims=1), result)]


def _tiled(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Tile, after each dimension that is not repeated has become part of the one before it."""
    sizes, result = scope.shape(node.input[0]), scope.shape(node.output[0])
    repeats = scope.constant(node.input[1])
    if sizes is None or result is None or repeats is None or len(sizes) <= _FEW:
        return None
    starts = itertools.accumulate(int(count != 1) for count in repeats)
    groups = _groups(enumerate(starts))
    counts = builder.integers([int(repeats[group[0]]) for group in groups])
    value = builder.reshape(node.input[0], _merged(sizes, groups))
    return [builder.reshape(builder.add("Tile", value, counts), result)]


def _concatenated(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Concat of many dimensions as one along the second of three."""
    result, shapes = scope.shape(node.output[0]), [scope.shape(name) for name in node.input]
    known = [shape for shape in shapes if shape is not None]
    if result is None or len(known) < len(shapes) or len(result) <= _FEW:
        return None
    axis = graph.number(node, "axis", 0) % len(result)
    before, after = math.prod(result[:axis]), math.prod(result[axis + 1 :])
    parts = [
        builder.reshape(name, [before, shape[axis], after])
        for name, shape in zip(node.input, known, strict=True)
    ]
    return [builder.reshape(builder.concat(parts, 1), result)]


def _joined(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Reshape of a reshaped value with many dimensions, which skips that value."""
    shape = scope.shape(node.output[0])
    # A size of zero means that of the input.
    if shape is None or 0 in shape:
        return None
    source, before = scope.trace(node.input[0], _RESHAPING)
    many = any(len(scope.shape(reshape.output[0]) or ()) > _FEW for reshape in before)
    return [builder.reshape(source, shape)] if many else None


def _apply(model: onnx.ModelProto, types: Types, refused: frozenset[str]) -> int:
    rules: dict[str, Rule] = {"Transpose": _transposed, "Gather": _gathered}
    others: dict[str, Rule] = {
        "Concat": _concatenated,
        "Tile": _tiled,
        **dict.fromkeys(_BY_VALUE, _by_value),
        **dict.fromkeys(_REDUCING, _reduced),
    }
    # EPs may take these with more dimensions than the ones above.
    rules |= {operator: rule for operator, rule in others.items() if operator in refused}
    replaced = replace(model, rules, types, nested=False)
    # The results of the new nodes have shapes now.
    replaced += replace(model, dict.fromkeys(_RESHAPING, _joined), types, nested=False)
    if replaced:
        remove_unused(model.graph, lambda node: node.op_type in _OPERATORS)
    return replaced


FEW_DIMENSIONS = Rewrite("fewer dimensions", _OPERATORS, _apply)
