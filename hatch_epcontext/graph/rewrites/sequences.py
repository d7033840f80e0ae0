"""Sequences whose tensors are known one by one, as these tensors: ``Split``, ``Concat`` and names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.base import Rewrite, Values, consumers, copy

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

Known = dict[str, list[str]]
"""The tensors of each sequence, by its name."""


def _apply(values: Values, refused: frozenset[str]) -> int:
    parts = [each for each in graph.graphs(values.model.graph) if isinstance(each, onnx.GraphProto)]
    return sum(_replace(part, values) for part in parts)


SEQUENCES = Rewrite("sequences as tensors", _OPERATORS, _apply)


def _replace(part: onnx.GraphProto, values: Values) -> int:
    """Replace in ``part``, in place, what takes tensors of known sequences; returns how many nodes."""
    known: Known = {}
    result: list[onnx.NodeProto] = []
    taken = 0
    for node in part.node:
        operator = graph.operator(node)
        new = None
        if operator in _MAKERS:
            result += _make(node, known, values)
        elif operator in _TAKERS and node.input[0] in known:
            new = _take(node, known[node.input[0]], values)
        taken += new is not None
        result += [copy(node)] if new is None else new
    if not taken:
        return 0
    del part.node[:]
    part.node.extend(result)
    _remove_unused(part, known)
    return taken


def _make(node: onnx.NodeProto, known: Known, values: Values) -> list[onnx.NodeProto]:
    """Enter what ``node`` makes into ``known``; returns nodes that make its tensors."""
    first = known.get(node.input[0]) if node.input else None
    output, operator = node.output[0], node.op_type
    if operator == "SequenceEmpty":
        known[output] = []
    elif operator == "SequenceConstruct":
        known[output] = list(node.input)
    elif operator == "SplitToSequence":
        return _split(node, known, values)
    elif first is not None:
        position = len(first) if operator == "SequenceInsert" else len(first) - 1
        index = 2 if operator == "SequenceInsert" else 1
        if len(node.input) > index and node.input[index]:
            given = _position(node.input[index], len(first), values)
            if given is None:
                return []
            position = given
        if operator == "Identity":
            known[output] = first
        elif operator == "SequenceInsert":
            known[output] = [*first[:position], node.input[1], *first[position:]]
        elif position < len(first):
            known[output] = [*first[:position], *first[position + 1 :]]
    return []


def _position(name: str, length: int, values: Values) -> int | None:
    """The constant ``name`` as a position from 0 to ``length``; None for any other one."""
    array = values.constant(name)
    if array is None or array.size != 1:
        return None
    position = int(array.reshape(-1)[0])
    position += length if position < 0 else 0
    return position if 0 <= position <= length else None


def _split(node: onnx.NodeProto, known: Known, values: Values) -> list[onnx.NodeProto]:
    value, chunks = (*node.input, "")[:2]
    shape = values.shape(value)
    axis = graph.number(node, "axis", 0)
    if shape is None or not -len(shape) <= axis < len(shape):
        return []
    axis %= len(shape)
    sizes = _sizes(chunks, shape[axis], values)
    if not sizes or sum(sizes) != shape[axis] or min(sizes) < 1:
        return []
    output = node.output[0]
    names = [values.fresh(f"{output}/{index}") for index in range(len(sizes))]
    name = values.fresh(f"{output}/Split")
    if values.opset >= 13:
        stored = values.store(f"{output}/sizes", np.asarray(sizes, np.int64))
        result = [helper.make_node("Split", [value, stored], names, name, axis=axis)]
    else:
        result = [helper.make_node("Split", [value], names, name, axis=axis, split=sizes)]
    if not chunks and not graph.number(node, "keepdims", 1):
        inner = [size for index, size in enumerate(shape) if index != axis]
        target = values.store(f"{output}/shape", np.asarray(inner, np.int64))
        squeezed = [values.fresh(f"{output}/{index}") for index in range(len(sizes))]
        result += [
            helper.make_node("Reshape", [name, target], [new], values.fresh(f"{new}/Reshape"))
            for name, new in zip(names, squeezed, strict=True)
        ]
        names = squeezed
    known[output] = names
    return result


def _sizes(chunks: str, total: int, values: Values) -> list[int] | None:
    """The sizes of the parts of ``total``: 1 each, all of one size but the last, or as they are given."""
    if not chunks:
        return [1] * total
    array = values.constant(chunks)
    if array is None or array.ndim > 1:
        return None
    if array.ndim == 1:
        return [int(size) for size in array]
    size = int(array)
    return [min(size, total - at) for at in range(0, total, size)] if size > 0 else None


def _take(
    node: onnx.NodeProto, tensors: Sequence[str], values: Values
) -> list[onnx.NodeProto] | None:
    """Nodes that compute ``node`` from the tensors of its sequence; None if it stays."""
    output = node.output[0]
    if node.op_type == "SequenceLength":
        length = values.store(f"{output}/length", np.asarray(len(tensors), np.int64))
        return [_node("Identity", [length], output, values)]
    if node.op_type == "SequenceAt":
        position = _position(node.input[1], len(tensors), values)
        if position is None or position >= len(tensors):
            return None
        return [_node("Identity", [tensors[position]], output, values)]
    if not tensors:
        return None
    axis = graph.number(node, "axis", 0)
    if not graph.number(node, "new_axis", 0):
        return [_node("Concat", list(tensors), output, values, axis=axis)]
    result: list[onnx.NodeProto] = []
    rows: list[str] = []
    for tensor in tensors:
        row = values.fresh(f"{output}/row")
        if values.opset >= 13:
            axes = values.store(f"{output}/axes", np.asarray([axis], np.int64))
            result.append(_node("Unsqueeze", [tensor, axes], row, values))
        else:
            result.append(_node("Unsqueeze", [tensor], row, values, axes=[axis]))
        rows.append(row)
    return [*result, _node("Concat", rows, output, values, axis=axis)]


def _node(
    operator: str, inputs: list[str], output: str, values: Values, **attributes: Any
) -> onnx.NodeProto:
    name = values.fresh(f"{output}/{operator}")
    return helper.make_node(operator, inputs, [output], name, **attributes)


def _remove_unused(part: onnx.GraphProto, known: Known) -> None:
    """Remove what makes known sequences that nothing takes any more."""
    outputs = {value.name for value in part.output}
    while True:
        used = outputs | consumers(part).keys()
        kept = [copy(node) for node in part.node if not known.keys() & set(node.output) - set(used)]
        if len(kept) == len(part.node):
            return
        del part.node[:]
        part.node.extend(kept)
