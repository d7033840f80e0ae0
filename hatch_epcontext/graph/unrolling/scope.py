"""What is known of the values that a graph can use: those of its outer graphs too."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping
from dataclasses import dataclass, field

import onnx
from onnx import helper, numpy_helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.arrays import Array


@dataclass(frozen=True)
class Tensor:
    """A value's ONNX element type and its shape; -1 for sizes that are open."""

    elem_type: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Scope:
    """The stored tensors by name, and the types of values as far as they are known."""

    stored: MutableMapping[str, onnx.TensorProto | None] = field(default_factory=dict)
    types: MutableMapping[str, Tensor | None] = field(default_factory=dict)

    def inside(self, part: onnx.GraphProto) -> Scope:
        """The scope of ``part``, a graph in this scope; its own values hide others of the same name."""
        stored: dict[str, onnx.TensorProto | None] = {}
        types: dict[str, Tensor | None] = {}
        for value in (*part.input, *part.output, *part.value_info):
            stored[value.name] = None
            types[value.name] = _tensor(value)
        for node in part.node:
            for name in node.output:
                stored[name] = _constant(node)
                types.setdefault(name, None)
        stored |= {tensor.name: tensor for tensor in part.initializer}
        for name, tensor in stored.items():
            if tensor is not None:
                types[name] = Tensor(tensor.data_type, tuple(tensor.dims))
        return Scope(ChainMap(stored, self.stored), ChainMap(types, self.types))

    def constant(self, name: str) -> Array | None:
        """The value of ``name``; None if it is not constant, or in external data."""
        tensor = self.stored.get(name)
        if tensor is None or graph.is_external(tensor):
            return None
        return numpy_helper.to_array(tensor)

    def type_of(self, name: str) -> Tensor | None:
        """The type of ``name``; None if its element type or its rank is unknown."""
        return self.types.get(name)


def _tensor(value: onnx.ValueInfoProto) -> Tensor | None:
    tensor = value.type.tensor_type
    if not tensor.elem_type or not tensor.HasField("shape"):
        return None
    sizes = (graph.size(dim) for dim in tensor.shape.dim)
    return Tensor(tensor.elem_type, tuple(s if isinstance(s, int) else -1 for s in sizes))


def _constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The value of a Constant node; None for another node, or a value that is no dense tensor."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or not node.attribute:
        return None
    (attribute,) = node.attribute[:1]
    if attribute.name == "value":
        return attribute.t
    types = {"int": onnx.TensorProto.INT64, "float": onnx.TensorProto.FLOAT}
    kind = attribute.name.removeprefix("value_").removesuffix("s")
    if kind not in types:
        return None
    values = helper.get_attribute_value(attribute)
    several = isinstance(values, (list, tuple))
    shape = [len(values)] if several else []
    return helper.make_tensor("", types[kind], shape, values if several else [values])
