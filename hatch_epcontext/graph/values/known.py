"""What is known of a graph's values without running it: their shapes, and small constants."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.arrays import Array
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.graph.scope import Scope, Sizes

_MAX_VALUES = 2**16
"""The most values of a constant that is read: weights are larger."""

_MAX_PAIRS = 2**24
"""The largest product of the sizes of all operands of a computed constant."""

_MAX_DEPTH = 100
"""The longest chain of nodes from which a constant is computed."""


Operands = Sequence[Any]
"""The inputs of a node as arrays; None for an omitted one."""

_IR_VERSION = 8
"""The IR version of a model of one node; it does not affect the operators."""


class KnownValues(Scope):
    """Shapes and small constants of all graphs of ``model`` with these ``inputs``.

    Unknown values are None, also in an invalid model: opening a session reports the reason.
    """

    def __init__(self, model: onnx.ModelProto, inputs: Iterable[TensorFacts]) -> None:
        super().__init__(model.graph, nested=True)
        self._model = model
        self._given: dict[str, Sizes] = {
            each.name: tuple(size if isinstance(size, int) else None for size in each.shape)
            for each in inputs
            if each.shape is not None
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
        # In an invalid graph a value may depend on itself.
        self._values[name] = None
        if (tensor := self.stored.get(name)) is not None:
            self._values[name] = _array(tensor)
        elif (node := self.maker(name)) is not None:
            # onnx and NumPy raise many types for operands that do not fit.
            with contextlib.suppress(Exception):
                self._values[name] = _small(self._computed(node, depth))
        return self._values[name]

    def _computed(self, node: onnx.NodeProto, depth: int) -> Array | None:
        if node.op_type in operators.SHAPES:
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
    # External data is not read: small constants are inside the model.
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
"""Operators that are evaluated for constants: those with which exporters compute shapes."""


def _is_large(node: onnx.NodeProto, operands: Operands) -> bool:
    """Whether the result has too many values to read, as far as its operands show it."""
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
    """The output of ``node`` as onnx's reference implementation computes it; raises NumPy's exceptions."""
    feeds = {name: each for name, each in zip(node.input, operands, strict=True) if name}
    inputs, outputs = (
        [onnx.ValueInfoProto(name=name) for name in names] for names in (feeds, node.output)
    )
    alone = onnx.helper.make_graph([node], "node", inputs, outputs)
    model = onnx.ModelProto(ir_version=_IR_VERSION, graph=alone)
    model.opset_import.add(domain="", version=opset)
    # Imported here: few models need it, and it imports all operators.
    from onnx.reference import ReferenceEvaluator

    with np.errstate(all="ignore"):
        (found,) = ReferenceEvaluator(model).run(None, feeds)
    return np.asarray(found)
