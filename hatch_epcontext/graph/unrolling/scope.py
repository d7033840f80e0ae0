"""What is known of the values that a graph can use: those of its outer graphs too."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping
from dataclasses import dataclass, field

import onnx

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
                stored[name] = graph.constant_tensor(node)
                types.setdefault(name, None)
        stored |= {tensor.name: tensor for tensor in part.initializer}
        for name, tensor in stored.items():
            if tensor is not None:
                types[name] = Tensor(tensor.data_type, tuple(tensor.dims))
        return Scope(ChainMap(stored, self.stored), ChainMap(types, self.types))

    def constant(self, name: str) -> Array | None:
        """The value of ``name``; None if it is not constant, or in external data."""
        return graph.array_of(self.stored.get(name))

    def type_of(self, name: str) -> Tensor | None:
        """The type of ``name``; None if its element type or its rank is unknown."""
        return self.types.get(name)


def _tensor(value: onnx.ValueInfoProto) -> Tensor | None:
    tensor = value.type.tensor_type
    if not tensor.elem_type or not tensor.HasField("shape"):
        return None
    sizes = (graph.size(dim) for dim in tensor.shape.dim)
    return Tensor(tensor.elem_type, tuple(s if isinstance(s, int) else -1 for s in sizes))
