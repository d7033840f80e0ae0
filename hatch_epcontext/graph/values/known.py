"""What is known of the values of a graph without running it: their shapes, and small constants."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.arrays import Array
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.graph.scope import Scope, Sizes

_MAX_VALUES = 2**16
"""Values of a constant that is looked at: tables of weights are larger."""

_MAX_PAIRS = 2**24
"""The product of the sizes of all operands of a computed constant."""

_MAX_DEPTH = 100
"""Nodes in a row from which a constant is computed."""


Operands = Sequence[Any]
"""The inputs of a node as arrays; None for one that is left out."""

_IR_VERSION = 8
"""That of a model of one node; it does not concern the operators."""


class KnownValues(Scope):
    """Shapes and small constants of all graphs of ``model`` with these ``inputs``.

    Everything is None that cannot be known, also where the model is invalid: opening a session reports why.
    """

    def __init__(self, model: onnx.ModelProto, inputs: Iterable[TensorFacts]) -> None:
        super().__init__(model.graph, nested=True)
        self._model = model
        self._given: dict[str, Sizes] = {
            each.name: tuple(size if isinstance(size, int) else None for size in each.shape)
            for each in inputs
        }
        self._values: dict[str, Array | None] = {}

    @cached_property
    def _inferred(self) -> Scope:
        return Scope(graph.inferred(self._model), nested=True)

    def sizes(self, name: str) -> Sizes | None:
        """The shape of a value, with None for open dimensions; None if its rank is unknown."""
        found = self._given.get(name, super().sizes(name))
        found = self._inferred.sizes(name) if found is None else found
        value = self.value(name) if found is None else None
        return found if value is None else value.shape

    def size(self, name: str, axis: object) -> int | None:
        """The size of the value ``name`` along ``axis``."""
        shape = self.sizes(name)
        if shape is None or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
            return None
        return shape[axis]

    def value(self, name: str, depth: int = 0) -> Array | None:
        """The values of the constant ``name``, if it is a small one that simple operators compute."""
        if name in self._values or depth > _MAX_DEPTH:
            return self._values.get(name)
        # An invalid graph can use a value to compute it.
        self._values[name] = None
        if (tensor := self.stored.get(name)) is not None:
            self._values[name] = _array(tensor)
        elif (node := self.maker(name)) is not None:
            # onnx and NumPy raise many things for operands that do not fit.
            with contextlib.suppress(Exception):
                self._values[name] = _small(self._computed(node, depth))
        return self._values[name]

    def _computed(self, node: onnx.NodeProto, depth: int) -> Array | None:
        if node.op_type in ("Shape", "Size"):
            return self._measured(node)
        if node.domain not in graph.STANDARD or node.op_type not in _COMPUTED:
            return None
        operands: list[Array | None] = []
        for each in node.input:
            operand = self.value(each, depth + 1) if each else None
            if each and operand is None:
                return None
            operands.append(operand)
        return (
            None
            if _is_large(node, operands)
            else _evaluated(node, operands, graph.opset(self._model))
        )

    def _measured(self, node: onnx.NodeProto) -> Array | None:
        shape = self.sizes(node.input[0]) if node.input else None
        if shape is None:
            return None
        if node.op_type == "Shape":
            start, end = (graph.attribute(node, name, None) for name in ("start", "end"))
            shape = shape[start:end]
        sizes = [size for size in shape if size is not None]
        if len(sizes) < len(shape):
            return None
        return np.asarray(math.prod(sizes) if node.op_type == "Size" else sizes, dtype=np.int64)


def _small(array: Array | None) -> Array | None:
    return array if array is not None and array.size <= _MAX_VALUES else None


def _array(tensor: onnx.TensorProto | None) -> Array | None:
    # External data is not read: what is looked at is small, and inside the model.
    if tensor is None or math.prod(tensor.dims) > _MAX_VALUES:
        return None
    array = graph.array_of(tensor)
    return array if array is not None and array.dtype.kind in "iufb" else None


_BROADCASTING = {
    "Add", "Sub", "Mul", "Div", "Min", "Max", "Expand",
}  # fmt: skip
_COMPUTED = _BROADCASTING | {
    "Cast", "Ceil", "Concat", "ConstantOfShape", "Floor", "Gather", "Identity", "Neg", "Range", "Reshape",
    "Slice", "Sqrt", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators of which constants are computed: those with which exporters compute shapes."""


def _is_large(node: onnx.NodeProto, operands: Operands) -> bool:
    """Whether the result has more values than are looked at, as far as its operands show it."""
    if node.op_type == "ConstantOfShape":
        return math.prod(map(int, operands[0])) > _MAX_VALUES
    if node.op_type == "Range":
        start, limit, delta = (np.asarray(each).item() for each in operands)
        return not delta or (limit - start) / delta > _MAX_VALUES
    if node.op_type == "Expand":
        sizes = np.broadcast_shapes(np.shape(operands[0]), tuple(map(int, operands[1])))
        return math.prod(sizes) > _MAX_VALUES
    if node.op_type in _BROADCASTING:
        return (
            math.prod(max(np.size(each), 1) for each in operands if each is not None) > _MAX_PAIRS
        )
    return False


def _evaluated(node: onnx.NodeProto, operands: Operands, opset: int) -> Array:
    """The output of ``node``, as onnx's reference computes it; it raises whatever NumPy does."""
    feeds = {name: each for name, each in zip(node.input, operands, strict=True) if name}
    inputs, outputs = (
        [onnx.ValueInfoProto(name=name) for name in names] for names in (feeds, node.output)
    )
    alone = onnx.helper.make_graph([node], "node", inputs, outputs)
    model = onnx.ModelProto(ir_version=_IR_VERSION, graph=alone)
    model.opset_import.add(domain="", version=opset)
    # Few models need it, and it imports all operators.
    from onnx.reference import ReferenceEvaluator

    with np.errstate(all="ignore"):
        (found,) = ReferenceEvaluator(model).run(None, feeds)
    return np.asarray(found)
