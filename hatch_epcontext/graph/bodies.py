"""What ONNX Runtime (1.32) loses of the bodies of Loop, Scan and If, where an EP compiles nodes around them.

It drops stored tensors that only inner graphs read, and cannot write tensors of more than 127 bytes that are
stored in an inner graph. It keeps what a node of the main graph reads that no EP compiles. And it infers no
shape after a Loop, even if each iteration keeps the shape.
"""

from __future__ import annotations

import math

import onnx
from onnx import helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, rename_values
from hatch_epcontext.graph.scope import Scope

_READER = "SequenceConstruct"
_FIRST_OPSET = 11
"""An operator that no EP compiles, and that ONNX Runtime does not compute in advance; its first opset."""

_FEW = 15
"""The most numbers that an inner graph may keep: 127 bytes of int64."""


def fix_states(model: onnx.ModelProto) -> None:
    """Give the results of the Loops of ``model`` the fixed shapes that their bodies declare.

    Only where the first value has the same shape: there may be no iteration.
    """
    main = model.graph
    loops = [node for node in main.node if graph.operator(node) == "Loop"]
    bodies = [(node, body) for node in loops for body in graph.inner_graphs(node)]
    if not bodies:
        return
    scope = Scope.of(model)
    types = {value.name: value for value in (*main.output, *main.value_info)}
    for node, body in bodies:
        # Before them come the number of iterations and the condition, which is also the first output.
        states = zip(node.input[2:], body.output[1:], node.output, strict=False)
        for first, last, result in states:
            shape = scope.shape(first)
            if result and shape is not None and shape == graph.sizes(last.type):
                value = types.get(result) or main.value_info.add(name=result)
                value.type.CopyFrom(last.type)


def keep_weights(model: onnx.ModelProto) -> frozenset[str]:
    """Let a node of the main graph read each stored tensor that inner graphs of ``model`` read.

    Large tensors of inner graphs move to the main graph. Returns the names of the added nodes' outputs, for
    `remove_readers`; without any the model is unchanged.
    """
    main = model.graph
    if graph.opset(model) < _FIRST_OPSET:
        return frozenset()
    move_weights(model)
    builder = Builder(model)
    stored = {tensor.name for tensor in main.initializer}
    stored |= {name for node in main.node if graph.constant_tensor(node) for name in node.output}
    read = (name for n in main.node if graph.inner_graphs(n) for name in graph.read_by(n))
    outputs = {name: builder.fresh(f"{name}_kept") for name in read if name in stored}
    main.node.extend(helper.make_node(_READER, [name], [new]) for name, new in outputs.items())
    return frozenset(outputs.values())


def move_weights(model: onnx.ModelProto) -> bool:
    """Move large and external tensors of inner graphs of ``model`` to the main graph.

    Returns whether there are any.
    """
    builder = Builder(model)
    for body in [*graph.graphs(model.graph)][1:]:
        _move_large(body, builder)
    model.graph.initializer.extend(builder.stored)
    return bool(builder.stored)


def remove_readers(model: onnx.ModelProto, outputs: frozenset[str]) -> None:
    """Remove the nodes with the ``outputs`` that `keep_weights` added."""
    for node in [*model.graph.node]:
        if not outputs.isdisjoint(node.output):
            model.graph.node.remove(node)


def _move_large(body: onnx.GraphProto, builder: Builder) -> None:
    """Move large and external tensors of the inner graph ``body`` to those that ``builder`` stores."""
    bound = {value.name for value in (*body.input, *body.output)}
    names: dict[str, str] = {}

    def move(name: str, tensor: onnx.TensorProto | None) -> bool:
        if tensor is None or name in bound:
            return False
        if math.prod(tensor.dims) <= _FEW and not graph.is_external(tensor):
            return False
        moved = onnx.TensorProto.FromString(tensor.SerializeToString())
        moved.name = names[name] = builder.fresh(name)
        builder.stored.append(moved)
        return True

    for tensor in [*body.initializer]:
        if move(tensor.name, tensor):
            body.initializer.remove(tensor)
    for node in [*body.node]:
        if move(node.output[0] if node.output else "", graph.constant_tensor(node)):
            body.node.remove(node)
    rename_values(body.node, names)
