"""How often a Loop repeats its body, where constants alone decide it."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.unrolling.scope import Scope
from hatch_epcontext.worker.session import cpu_options, open_session


def trip_count(
    loop: onnx.NodeProto, scope: Scope, opsets: onnx.ModelProto, limit: int
) -> int | None:
    """How often ``loop``, which is in ``scope``, runs its body; ``limit`` + 1 if it is more often.

    None if data decides it. What decides is run on the CPU, without the rest of the body: ``opsets`` is
    the model, of which only the versions are taken.
    """
    body: onnx.GraphProto = graph.attribute(loop, "body", None)
    trips, condition, *initial = (*loop.input, "", "")[: max(2, len(loop.input))]
    number = scope.constant(trips) if trips else None
    if (trips and number is None) or not body.output:
        return None
    most = limit + 1 if number is None else min(int(number.reshape(-1)[0]), limit + 1)
    # Before the condition decides, the number of trips does.
    if most <= 0:
        return 0
    first = scope.constant(condition) if condition else None
    if condition and first is None:
        return None
    if first is not None and not first.reshape(-1)[0]:
        return 0
    model = _deciding_part(body, initial, scope, opsets, most)
    return None if model is None else _run(model)


def _deciding_part(
    body: onnx.GraphProto,
    initial: list[str],
    scope: Scope,
    opsets: onnx.ModelProto,
    most: int,
) -> onnx.ModelProto | None:
    """A model that runs only what decides on the condition, and returns it for each trip."""
    producers = {name: node for node in body.node for name in node.output if name}
    stored = {tensor.name: tensor for tensor in body.initializer}
    carried = {value.name: index for index, value in enumerate(body.input[2:])}
    waiting, wanted = [body.output[0].name], set[str]()
    states: list[int] = []
    outer: dict[str, onnx.TensorProto] = {}
    while waiting:
        name = waiting.pop()
        if name in wanted:
            continue
        wanted.add(name)
        if name in producers:
            if graph.is_random(producers[name]):
                return None
            waiting += graph.read_by(producers[name])
        elif name in carried:
            states.append(carried[name])
            waiting.append(body.output[1 + carried[name]].name)
        elif name not in stored and name not in [value.name for value in body.input[:2]]:
            if scope.constant(name) is None:
                return None
            outer[name] = _named(scope, name)
    if any(scope.constant(initial[index]) is None for index in states):
        return None
    return _loop_alone(body, sorted(states), initial, wanted, outer, scope, opsets, most)


def _loop_alone(
    body: onnx.GraphProto,
    states: list[int],
    initial: list[str],
    wanted: set[str],
    outer: dict[str, onnx.TensorProto],
    scope: Scope,
    opsets: onnx.ModelProto,
    most: int,
) -> onnx.ModelProto:
    condition = body.output[0].name
    nodes = [node for node in body.node if wanted & set(node.output)]
    ends = [body.output[0].name, *(body.output[1 + index].name for index in states)]
    names = [f"epcontext.end{index}" for index in range(len(ends) + 1)]
    # An output may be an input, or two outputs the same value: each gets a name of its own.
    nodes += [
        helper.make_node("Identity", [end], [name])
        for end, name in zip([*ends, condition], names, strict=True)
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in names]
    for value, index in zip(outputs[1:], states, strict=False):
        value.type.CopyFrom(body.input[2 + index].type)
        value.type.tensor_type.ClearField("shape")
    for value in (outputs[0], outputs[-1]):
        value.type.CopyFrom(helper.make_tensor_type_proto(onnx.TensorProto.BOOL, None))
    inputs = [*body.input[:2], *(body.input[2 + index] for index in states)]
    stored = [tensor for tensor in body.initializer if tensor.name in wanted]
    part = helper.make_graph(nodes, "part", inputs, outputs, stored)
    starts = [f"epcontext.start{index}" for index in states]
    results = [f"epcontext.result{index}" for index in states]
    loop = helper.make_node(
        "Loop", ["epcontext.trips", "", *starts], [*results, "epcontext.count"], body=part
    )
    constants = [numpy_helper.from_array(np.asarray(most, np.int64), "epcontext.trips")]
    for name, index in zip(starts, states, strict=True):
        start = _named(scope, initial[index])
        start.name = name
        constants.append(start)
    count = onnx.ValueInfoProto(name="epcontext.count", type=outputs[-1].type)
    main = helper.make_graph([loop], "main", [], [count], [*constants, *outer.values()])
    model = onnx.ModelProto(ir_version=opsets.ir_version, graph=main)
    model.opset_import.extend(opsets.opset_import)
    return model


def _named(scope: Scope, name: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto()
    stored = scope.stored[name]
    assert stored is not None, "only the names of constants come here"
    tensor.CopyFrom(stored)
    tensor.name = name
    return tensor


def _run(model: onnx.ModelProto) -> int | None:
    options = cpu_options()
    options.log_severity_level = 4
    try:
        (conditions,) = open_session(model.SerializeToString(), options).run(None, {})
    except Exception:
        # A part that cannot be run decides nothing: the loop stays as it is.
        return None
    return len(conditions)
