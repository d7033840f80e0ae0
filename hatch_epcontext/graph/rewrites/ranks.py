"""Operators with many dimensions as equivalent ones with few."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope

_FEW = 4
"""The number of dimensions that every EP supports."""

_RESHAPING = operators.RESHAPING - {"Identity"}
_FAMILY = _RESHAPING | {"Gather", "Transpose"}


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


@rewrites("Transpose", family=_FAMILY)
def reduce_rank_of_transpose(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Transpose of many dimensions as one of fewer, or else as several."""
    value = node.input[0]
    sizes, result = scope.shape(value), scope.shape(node.output[0])
    if len(scope.sizes(value) or ()) <= _FEW:
        return None
    if sizes is None or result is None:
        return Declined("a shape is not fixed")
    reverse = range(len(sizes) - 1, -1, -1)
    own = _Permutation(sizes, tuple(graph.attribute(node, "perm", reverse)))
    simplest = own.simplest()
    steps = [simplest] if len(simplest.perm) < len(own.perm) else own.steps()
    for step in steps if len(simplest.perm) > 1 else ():
        value = builder.transpose(builder.reshape(value, step.sizes), step.perm)
    return [builder.reshape(value, result)]


@rewrites("Gather", family=_FAMILY)
def reduce_rank_of_gather(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Gather of many dimensions, or that gives many, as one along the second of three."""
    value, indices = node.input
    ranks = [len(scope.sizes(name) or ()) for name in (value, node.output[0])]
    if max(ranks) <= _FEW:
        return None
    sizes, result = scope.shape(value), scope.shape(node.output[0])
    if sizes is None or result is None:
        return Declined("a shape is not fixed")
    axis = graph.number(node, "axis", 0) % len(sizes)
    before, after = math.prod(sizes[:axis]), math.prod(sizes[axis + 1 :])
    rows = builder.reshape(value, (before, sizes[axis], after))
    if len(scope.shape(indices) or ()) != 1:
        indices = builder.reshape(indices, [-1])
    return [builder.reshape(builder.add("Gather", rows, indices, axis=1), result)]


@rewrites(*_RESHAPING, family=_FAMILY)
def join_reshapes(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Reshape of a reshaped value with many dimensions, which skips that value."""
    source, before = scope.trace(node.input[0], _RESHAPING)
    if all(len(scope.sizes(reshape.output[0]) or ()) <= _FEW for reshape in before):
        return None
    shape = scope.shape(node.output[0])
    # A size of zero means that of the input.
    if shape is None or 0 in shape:
        return Declined("the shape of its result is not fixed")
    return [builder.reshape(source, shape)]
