"""Chains of Reshape, Transpose and Gather with many dimensions, as equivalent ones with few."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs, Rewrite, remove_unused, replace
from hatch_epcontext.graph.scope import Scope, Types

_FEW = 4
"""The number of dimensions that every EP supports."""

_RESHAPING = graph.RESHAPING - {"Identity"}

_OPERATORS = _RESHAPING | {"Gather", "Transpose"}


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


def _joined(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Reshape of a reshaped value with many dimensions, which skips that value."""
    shape, source = scope.shape(node.output[0]), node.input[0]
    # A size of zero means that of the input.
    if shape is None or 0 in shape:
        return None
    many = False
    while (maker := scope.maker(source)) is not None and maker.op_type in _RESHAPING:
        many = many or len(scope.shape(source) or ()) > _FEW
        source = maker.input[0]
    return [builder.reshape(source, shape)] if many else None


def _apply(model: onnx.ModelProto, types: Types, refused: frozenset[str]) -> int:
    rules = {"Transpose": _transposed, "Gather": _gathered}
    replaced = replace(model, rules, types, nested=False)
    # The results of the new nodes have shapes now.
    replaced += replace(model, dict.fromkeys(_RESHAPING, _joined), types, nested=False)
    if replaced:
        remove_unused(model.graph, lambda node: node.op_type in _OPERATORS)
    return replaced


FEW_DIMENSIONS = Rewrite("Reshape, Transpose or Gather with fewer dimensions", _OPERATORS, _apply)
