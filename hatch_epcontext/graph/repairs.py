"""Repairs of what ONNX Runtime and exporters make of a model."""

from __future__ import annotations

from collections import Counter

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


def name_nodes(main: onnx.GraphProto) -> bool:
    """Give each node of ``main`` a name of its own: that of its first output, if it has none, and
    a number if another node has it. Returns whether a name changed.
    """
    nodes = graph.compute_nodes(main)
    names, counts = {node.name for node in nodes}, Counter[str]()
    own, changed = {""}, False
    for node in nodes:
        if node.name in own:
            stem = unique = node.name or next(filter(None, node.output), node.op_type)
            while unique in names:
                counts[stem] += 1
                unique = f"{stem}_{counts[stem]}"
            node.name, changed = unique, True
            names.add(unique)
        own.add(node.name)
    return changed


def order_layout_changes(main: onnx.GraphProto) -> None:
    """Give the nodes of ``main`` an order and names that are the same in every run.

    ONNX Runtime adds ReorderOutput, which changes the layout for a CPU, in the order of addresses in memory.
    Graphs without it stay as they are.
    """
    for body in graph.graphs(main):
        added = [node for node in body.node if node.op_type == "ReorderOutput"]
        for node in added:
            node.name = f"{node.op_type}_{node.output[0]}"
        if added:
            depths: dict[str, int] = {}
            for node in body.node:
                depth = 1 + max((depths.get(name, 0) for name in graph.read_by(node)), default=0)
                depths.update(dict.fromkeys(node.output, depth))
            order = sorted(body.node, key=lambda node: (depths[node.output[0]], node.output[0]))
            del body.node[:]
            body.node.extend(order)
