"""Sequences whose tensors are known one by one, as these tensors: ``Split``, ``Concat`` and names."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs, Rewrite, remove_unused
from hatch_epcontext.graph.scope import Scope, Types

_MAKERS = frozenset(
    {
        "Identity",
        "SequenceConstruct",
        "SequenceEmpty",
        "SequenceErase",
        "SequenceInsert",
        "SplitToSequence",
    }
)
_TAKERS = frozenset({"ConcatFromSequence", "SequenceAt", "SequenceLength"})
_OPERATORS = (_MAKERS - {"Identity"}) | _TAKERS


class _Sequences:
    """The tensors of each sequence by its name, in each graph; ``taken``: the number of replaced readers."""

    def __init__(self) -> None:
        self.known: defaultdict[Scope, dict[str, list[str]]] = defaultdict(dict)
        self.taken = 0

    def make(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        """Record the sequence that ``node`` makes, and add nodes for its tensors; the node itself stays."""
        known = self.known[scope]
        first = known.get(node.input[0]) if node.input else None
        output, operator = node.output[0], node.op_type
        if operator == "SequenceEmpty":
            known[output] = []
        elif operator == "SequenceConstruct":
            known[output] = list(node.input)
        elif operator == "SplitToSequence":
            if tensors := _split(node, scope, builder):
                known[output] = [*tensors]
                builder.append(node)
                return [output]
        elif operator == "Identity" and first is not None:
            known[output] = first
        elif first is not None:
            index = 2 if operator == "SequenceInsert" else 1
            position: int | None = len(first) if operator == "SequenceInsert" else len(first) - 1
            if given := graph.operand(node, index):
                position = _position(given, len(first), scope)
            if position is None:
                return None
            if operator == "SequenceInsert":
                known[output] = [*first[:position], node.input[1], *first[position:]]
            elif position < len(first):
                known[output] = [*first[:position], *first[position + 1 :]]
        return None

    def take(self, node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        """The result of ``node`` from the tensors of its sequence."""
        tensors = self.known[scope].get(node.input[0])
        result = None if tensors is None else _taken(node, tensors, scope, builder)
        self.taken += result is not None
        return None if result is None else [result]


def _position(name: str, length: int, scope: Scope) -> int | None:
    """The constant ``name`` as a position from 0 to ``length``; None for any other one."""
    array = scope.constant(name)
    if array is None or array.size != 1:
        return None
    position = int(array.reshape(-1)[0])
    position += length if position < 0 else 0
    return position if 0 <= position <= length else None


def _split(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    value, chunks = graph.operands(node, 2)
    shape = scope.shape(value)
    axis = graph.number(node, "axis", 0)
    if shape is None or not -len(shape) <= axis < len(shape):
        return None
    axis %= len(shape)
    sizes = _sizes(chunks, shape[axis], scope)
    if not sizes or sum(sizes) != shape[axis] or min(sizes) < 1:
        return None
    tensors = builder.split(value, axis, sizes)
    if chunks or graph.number(node, "keepdims", 1):
        return tensors
    return [builder.reshape(tensor, [*shape[:axis], *shape[axis + 1 :]]) for tensor in tensors]


def _sizes(chunks: str, total: int, scope: Scope) -> list[int] | None:
    """The sizes of the parts of ``total``: all 1, all equal but the last, or as given."""
    if not chunks:
        return [1] * total
    array = scope.constant(chunks)
    if array is None or array.ndim > 1:
        return None
    if array.ndim == 1:
        return [int(size) for size in array]
    size = int(array)
    return [min(size, total - at) for at in range(0, total, size)] if size > 0 else None


def _taken(node: onnx.NodeProto, tensors: list[str], scope: Scope, builder: Builder) -> str | None:
    if node.op_type == "SequenceLength":
        return builder.store(np.int64(len(tensors)))
    if node.op_type == "SequenceAt":
        position = _position(node.input[1], len(tensors), scope)
        return None if position is None or position >= len(tensors) else tensors[position]
    if not tensors:
        return None
    axis = graph.number(node, "axis", 0)
    if graph.number(node, "new_axis", 0):
        return builder.stack(tensors, axis)
    return builder.concat(tensors, axis)


def _apply(model: onnx.ModelProto, types: Types, refused: frozenset[str]) -> int:
    builder, sequences = Builder(model), _Sequences()
    rules = dict.fromkeys(_MAKERS, sequences.make) | dict.fromkeys(_TAKERS, sequences.take)
    builder.replace(Scope.of(model, types), rules)
    if sequences.taken:
        builder.write()
        made = {name for known in sequences.known.values() for name in known}
        for part in graph.graphs(model.graph):
            remove_unused(part, lambda node: not made.isdisjoint(node.output))
    return sequences.taken


SEQUENCES = Rewrite("sequences as tensors", _OPERATORS, _apply)
