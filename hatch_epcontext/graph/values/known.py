"""What is known of the values of a graph without running it: their shapes, and small constants."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.arrays import Array
from hatch_epcontext.graph.facts import TensorFacts

Sizes = tuple[int | None, ...]
"""A shape; an open dimension is None."""

_MAX_VALUES = 2**16
"""Values of a constant that is looked at: tables of weights are larger."""

_MAX_PAIRS = 2**24
"""The product of the sizes of all operands of a computed constant."""

_DEEPEST = 100
"""Nodes in a row from which a constant is computed."""


_Operands = Sequence[Array | None]
_Compute = Callable[[onnx.NodeProto, _Operands], Array | None]


class Known:
    """Shapes and small constants of all graphs of ``model`` with these ``inputs``.

    Everything is None that cannot be known, also where the model is invalid: opening a session says why.
    """

    def __init__(self, model: onnx.ModelProto, inputs: Iterable[TensorFacts]) -> None:
        self._model = model
        self._shapes: dict[str, Sizes] = {
            each.name: tuple(size if isinstance(size, int) else None for size in each.shape)
            for each in inputs
        }
        self._tensors: dict[str, onnx.TensorProto] = {}
        self._producers: dict[str, onnx.NodeProto] = {}
        self._values: dict[str, Array | None] = {}
        self._is_inferred = False
        for part in graph.graphs(model.graph):
            for tensor in graph.stored_tensors(part):
                self._tensors[tensor.name] = tensor
                self._shapes.setdefault(tensor.name, tuple(tensor.dims))
            for node in part.node:
                self._producers.update(dict.fromkeys(node.output, node))
        self._add_shapes(model.graph)

    def shape(self, name: str) -> Sizes | None:
        """The shape of the value ``name``."""
        if name not in self._shapes and not self._is_inferred:
            self._is_inferred = True
            # onnx raises errors of many kinds for graphs that are invalid.
            with contextlib.suppress(Exception):
                light = _without_weights(self._model)
                self._add_shapes(onnx.shape_inference.infer_shapes(light, data_prop=True).graph)
        if name not in self._shapes and (value := self.value(name)) is not None:
            return value.shape
        return self._shapes.get(name)

    def size(self, name: str, axis: object) -> int | None:
        """The size of the value ``name`` along ``axis``."""
        shape = self.shape(name)
        if shape is None or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
            return None
        return shape[axis]

    def value(self, name: str, depth: int = 0) -> Array | None:
        """The values of the constant ``name``, if it is a small one that simple operators compute."""
        if name in self._values or depth > _DEEPEST:
            return self._values.get(name)
        # An invalid graph can use a value to compute it.
        self._values[name] = None
        if name in self._tensors:
            self._values[name] = _array(self._tensors[name])
        elif (node := self._producers.get(name)) is not None:
            # NumPy's errors for operands that do not fit.
            with contextlib.suppress(
                ValueError, TypeError, IndexError, OverflowError, ArithmeticError, KeyError
            ):
                self._values[name] = _small(self._computed(node, depth))
        return self._values[name]

    def producer(self, name: str) -> onnx.NodeProto | None:
        """The node that computes the value ``name``; None for inputs and stored tensors."""
        return self._producers.get(name)

    def _computed(self, node: onnx.NodeProto, depth: int) -> Array | None:
        if node.op_type == "Constant":
            return _constant(node)
        if node.op_type in ("Shape", "Size"):
            return self._measured(node)
        compute = _COMPUTED.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        return None if compute is None else self._of_operands(compute, node, depth)

    def _of_operands(self, compute: _Compute, node: onnx.NodeProto, depth: int) -> Array | None:
        operands = []
        for each in node.input:
            operand = self.value(each, depth + 1) if each else None
            if each and operand is None:
                return None
            operands.append(operand)
        # More than a broadcast of them all can have.
        if math.prod(max(each.size, 1) for each in operands if each is not None) > _MAX_PAIRS:
            return None
        with np.errstate(all="ignore"):
            return compute(node, operands)

    def _measured(self, node: onnx.NodeProto) -> Array | None:
        shape = self.shape(node.input[0]) if node.input else None
        if shape is None:
            return None
        if node.op_type == "Shape":
            start, end = (graph.attribute(node, name, None) for name in ("start", "end"))
            shape = shape[start:end]
        sizes = [size for size in shape if size is not None]
        if len(sizes) < len(shape):
            return None
        return np.asarray(math.prod(sizes) if node.op_type == "Size" else sizes, dtype=np.int64)

    def _add_shapes(self, main: onnx.GraphProto) -> None:
        for part in graph.graphs(main):
            if isinstance(part, onnx.GraphProto):
                for value in (*part.input, *part.value_info, *part.output):
                    tensor = value.type.tensor_type
                    if tensor.HasField("shape"):
                        self._shapes.setdefault(value.name, _sizes(tensor.shape))


def _sizes(shape: onnx.TensorShapeProto) -> Sizes:
    sizes = map(graph.size, shape.dim)
    return tuple(size if isinstance(size, int) else None for size in sizes)


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``model`` whose large tensors are inputs: inferring shapes would copy them twice."""
    light = onnx.ModelProto()
    light.ir_version = model.ir_version
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    light.graph.name = model.graph.name
    light.graph.node.extend(model.graph.node)
    light.graph.input.extend(model.graph.input)
    light.graph.value_info.extend(model.graph.value_info)
    light.graph.output.extend(model.graph.output)
    listed = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= _MAX_VALUES and not graph.is_external(tensor):
            light.graph.initializer.append(tensor)
        elif tensor.name not in listed:
            light.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    return light


def _small(array: Array | None) -> Array | None:
    return array if array is not None and array.size <= _MAX_VALUES else None


def _array(tensor: onnx.TensorProto) -> Array | None:
    # External data is not read: what is looked at is small, and inside the model.
    if graph.is_external(tensor) or math.prod(tensor.dims) > _MAX_VALUES:
        return None
    try:
        array: Array = onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError):
        return None
    return array if array.dtype.kind in "iufb" else None


def _constant(node: onnx.NodeProto) -> Array | None:
    for name in ("value", "value_int", "value_ints", "value_float", "value_floats"):
        given = graph.attribute(node, name, None)
        if isinstance(given, onnx.TensorProto):
            return _array(given)
        if given is not None:
            return np.asarray(given)
    return None


def _numbers(operand: Array | None) -> tuple[int, ...]:
    return () if operand is None else tuple(int(each) for each in operand.ravel())


def _axes(node: onnx.NodeProto, operands: _Operands) -> tuple[int, ...]:
    if len(operands) > 1:
        return _numbers(operands[1])
    return tuple(graph.attribute(node, "axes", ()))


def _cast(node: onnx.NodeProto, operands: _Operands) -> Array | None:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(graph.attribute(node, "to", 0))
    return None if operands[0] is None else operands[0].astype(dtype)


def _squeeze(node: onnx.NodeProto, operands: _Operands) -> Array | None:
    return np.squeeze(_first(operands), _axes(node, operands) or None)


def _slice(node: onnx.NodeProto, operands: _Operands) -> Array | None:
    data = _first(operands)
    if len(operands) > 1:
        starts, ends, axes, steps = (
            _numbers(each) for each in (*operands[1:], None, None, None)[:4]
        )
    else:
        starts, ends, axes = (
            tuple(graph.attribute(node, name, ())) for name in ("starts", "ends", "axes")
        )
        steps = ()
    parts = [slice(None)] * data.ndim
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        step = steps[index] if steps else 1
        # The smallest end of a negative step means that the first value is included.
        stop = None if step < 0 and end < -(2**31) else end
        parts[axes[index] if axes else index] = slice(start, stop, step)
    return data[tuple(parts)]


def _range(node: onnx.NodeProto, operands: _Operands) -> Array | None:
    start, limit, delta = (np.asarray(each).item() for each in operands)
    if not delta or (limit - start) / delta > _MAX_VALUES:
        return None
    return np.arange(start, limit, delta)


def _reshape(node: onnx.NodeProto, operands: _Operands) -> Array | None:
    data = _first(operands)
    sizes = _numbers(operands[1])
    return data.reshape([data.shape[i] if size == 0 else size for i, size in enumerate(sizes)])


def _filled(node: onnx.NodeProto, operands: _Operands) -> Array | None:
    value = graph.attribute(node, "value", None)
    fill = np.zeros(1, np.float32) if value is None else onnx.numpy_helper.to_array(value)
    sizes = _numbers(operands[0])
    return np.full(sizes, fill.ravel()[0]) if math.prod(sizes) <= _MAX_VALUES else None


def _expanded(node: onnx.NodeProto, operands: _Operands) -> Array | None:
    data = _first(operands)
    sizes = np.broadcast_shapes(data.shape, _numbers(operands[1]))
    return np.broadcast_to(data, sizes) if math.prod(sizes) <= _MAX_VALUES else None


def _divided(node: onnx.NodeProto, operands: _Operands) -> Array | None:
    a, b = _first(operands), _first(operands[1:])
    if a.dtype.kind in "iu":
        # ONNX rounds towards zero.
        return np.trunc(a.astype(np.float64) / b.astype(np.float64)).astype(a.dtype)
    return np.asarray(np.divide(a, b))


def _first(operands: _Operands) -> Array:
    """The first operand, which must not be left out."""
    if operands[0] is None:
        raise ValueError("a missing operand")
    return operands[0]


def _of_all(function: Callable[..., Array]) -> _Compute:
    def compute(node: onnx.NodeProto, operands: _Operands) -> Array | None:
        return np.asarray(function(*operands))

    return compute


_COMPUTED: Mapping[str, _Compute] = {
    "Identity": lambda node, operands: operands[0],
    "Cast": _cast,
    "Squeeze": _squeeze,
    "Unsqueeze": lambda node, operands: np.expand_dims(_first(operands), _axes(node, operands)),
    "Slice": _slice,
    "Range": _range,
    "Reshape": _reshape,
    "Expand": _expanded,
    "ConstantOfShape": _filled,
    "Div": _divided,
    "Gather": lambda node, operands: np.take(
        _first(operands), _first(operands[1:]).astype(np.int64), graph.attribute(node, "axis", 0)
    ),
    "Concat": lambda node, operands: np.concatenate(
        [each for each in operands if each is not None], graph.attribute(node, "axis", 0)
    ),
    "Transpose": lambda node, operands: np.transpose(
        _first(operands), graph.attribute(node, "perm", None)
    ),
    "Add": _of_all(np.add),
    "Sub": _of_all(np.subtract),
    "Mul": _of_all(np.multiply),
    "Neg": _of_all(np.negative),
    "Min": _of_all(lambda *each: np.minimum.reduce(np.broadcast_arrays(*each))),
    "Max": _of_all(lambda *each: np.maximum.reduce(np.broadcast_arrays(*each))),
    "Floor": _of_all(np.floor),
    "Ceil": _of_all(np.ceil),
    "Sqrt": _of_all(np.sqrt),
}
