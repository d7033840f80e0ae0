"""Repairs of what ONNX Runtime and exporters make of a model."""

from __future__ import annotations

import onnx
from onnx import helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import (
    Builder,
    copy_of,
    name_graph_anew,
    remove_unused,
    set_nodes,
)

_INLINED = "_inlfunc_"
"""The prefix of values inside the body of a function that ONNX Runtime put there instead of a node."""


def without_prefix(model: onnx.ModelProto, prefix: str) -> onnx.ModelProto:
    """``model`` itself, changed: names that begin with ``prefix`` lose it, and stay unique."""
    builder = Builder(model)

    def new(name: str) -> str:
        if not name.startswith(prefix):
            return name
        return builder.fresh(f"{name.removeprefix(prefix)}/cast")

    name_graph_anew(model.graph, {}, new)
    return model


def restore_inlined(source: onnx.GraphProto, model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` itself, changed: nodes of ``source`` that ONNX Runtime replaced by their function's body.

    It does so where the CPU has no kernel, as for Softmax in float16, although EPs have one. A node whose
    inputs or body are no longer known stays replaced.
    """
    main = model.graph
    makers = {name: node for node in main.node for name in node.output}
    stored = {tensor.name for tensor in main.initializer}
    known = {*makers, *stored, *(value.name for value in main.input)}
    restored: dict[str, onnx.NodeProto] = {}
    for node in source.node:
        outputs = [name for name in node.output if name]
        if len(outputs) != 1 or outputs[0] not in makers:
            continue
        prefix = f"{_INLINED}{node.op_type}_"
        body, read = [makers[outputs[0]]], set[str]()
        for inner in body:
            names = set(graph.read_by(inner))
            read |= {name for name in names if not name.startswith(prefix)}
            body += [makers[name] for name in names - read if name in makers]
        missing = [name for name in node.input if name and name not in known]
        others = read - stored - set(node.input)
        if len(body) < 2 or len(missing) > 1 or (missing and len(others) != 1):
            continue
        copy = copy_of(node)
        copy.input[:] = [max(others) if name in missing else name for name in node.input]
        restored[outputs[0]] = copy
    if restored:
        nodes = (restored.get(next(iter(node.output), ""), copy_of(node)) for node in main.node)
        set_nodes(main, [*nodes])
        remove_unused(main, lambda node: node.output[0].startswith(_INLINED))
    return model


def separate_outputs(model: onnx.ModelProto) -> bool:
    """Give each output of a graph inside a node of ``model`` its own value; False if all had one.

    Older exporters return the state of a recurrent cell as its result too, by the same name. ONNX Runtime
    then leaves one of both uninitialized.
    """
    bodies = [body for body in graph.graphs(model.graph) if body is not model.graph]
    if all(len({value.name for value in body.output}) == len(body.output) for body in bodies):
        return False
    builder = Builder(model)
    for body in bodies:
        names = set[str]()
        for value in body.output:
            if value.name in names:
                name = builder.fresh(f"{value.name}/output")
                body.node.append(helper.make_node("Identity", [value.name], [name], name))
                value.name = name
            names.add(value.name)
    return True
