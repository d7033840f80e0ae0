"""Chains of Reshape and Transpose with many dimensions, as equal ones with few."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.base import Rewrite, Values, consumers, replace

_FEW = 4
"""Dimensions that every EP takes."""

_RESHAPING = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
"""Operators that change only the shape."""

_OPERATORS = _RESHAPING | {"Transpose"}


@dataclass(frozen=True)
class _Permutation:
    """A Transpose: the sizes of the dimensions before it, and where each one after it comes from."""

    sizes: tuple[int, ...]
    perm: tuple[int, ...]

    def simplest(self) -> _Permutation:
        """The same order of values with as few dimensions as possible."""
        # A dimension of size 1 moves no value.
        kept = [axis for axis in self.perm if self.sizes[axis] != 1]
        # Dimensions that stay neighbours are one.
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
            # All that follow in the right order come along.
            while order[end : end + 1] == list(self.perm[start + end - middle :][:1]) != []:
                end += 1
            blocks = order[:start], order[start:middle], order[middle:end], order[end:]
            if blocks[1]:
                sizes = (math.prod(self.sizes[axis] for axis in block) for block in blocks)
                result.append(_Permutation(tuple(sizes), (0, 2, 1, 3)).simplest())
            order = [*blocks[0], *blocks[2], *blocks[1], *blocks[3]]
        return result


def _transposed(node: onnx.NodeProto, values: Values) -> list[onnx.NodeProto] | None:
    """A Transpose of many dimensions as one of fewer, or else as several."""
    sizes, result = values.shape(node.input[0]), values.shape(node.output[0])
    if node.op_type != "Transpose" or sizes is None or result is None or len(sizes) <= _FEW:
        return None
    reverse = range(len(sizes) - 1, -1, -1)
    own = _Permutation(sizes, tuple(graph.attribute(node, "perm", reverse)))
    simplest = own.simplest()
    steps = [simplest] if len(simplest.perm) < len(own.perm) else own.steps()
    nodes: list[onnx.NodeProto] = []
    value = node.input[0]
    for step in steps if len(simplest.perm) > 1 else ():
        value = _reshaped(value, step.sizes, values, nodes)
        output = values.fresh(f"{node.output[0]}/Transpose")
        nodes.append(helper.make_node("Transpose", [value], [output], perm=list(step.perm)))
        value = output
    _reshaped(value, result, values, nodes, node.output[0])
    return nodes


def _reshaped(
    value: str,
    sizes: tuple[int, ...],
    values: Values,
    nodes: list[onnx.NodeProto],
    output: str = "",
) -> str:
    output = output or values.fresh(f"{value}/Reshape")
    shape = values.store(f"{output}/shape", np.array(sizes, np.int64))
    nodes.append(helper.make_node("Reshape", [value, shape], [output]))
    return output


def _join_reshapes(part: onnx.GraphProto, values: Values) -> int:
    """Let each Reshape of a value of many dimensions take what that was made of; returns how many do."""
    made_by = {name: node for node in part.node for name in node.output}
    joined = 0
    for node in part.node:
        shape = _known(values.shape(node.output[0])) if node.op_type in _RESHAPING else None
        source = node.input[0] if shape is not None else ""
        many = False
        while (maker := made_by.get(source)) is not None and maker.op_type in _RESHAPING:
            many = many or len(values.shape(source) or ()) > _FEW
            source = maker.input[0]
        if many and shape is not None:
            sizes = values.store(f"{node.output[0]}/shape", np.array(shape, np.int64))
            new = helper.make_node("Reshape", [source, sizes], node.output, node.name)
            node.CopyFrom(new)
            joined += 1
    return joined


def _known(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """``shape`` unless a size is zero, which Reshape takes for that of its input."""
    return None if shape is None or 0 in shape else shape


def _remove_unused(part: onnx.GraphProto) -> None:
    outputs = {value.name for value in part.output}
    while True:
        used = consumers(part).keys() | outputs
        unused = [
            node
            for node in part.node
            if node.op_type in _OPERATORS and used.isdisjoint(node.output)
        ]
        if not unused:
            return
        for node in unused:
            part.node.remove(node)


def _apply(values: Values, refused: frozenset[str]) -> int:
    main = values.model.graph
    replaced = replace(main, _transposed, values, frozenset({"Transpose"}))
    # What these reshape has shapes now too.
    joined = _join_reshapes(main, Values(values.model, values.types))
    if replaced + joined:
        _remove_unused(main)
    return replaced + joined


FEW_DIMENSIONS = Rewrite("Reshape and Transpose with fewer dimensions", _OPERATORS, _apply)
