"""How often a Loop repeats its body, where constants alone decide it."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.arrays import Array
from hatch_epcontext.graph.builder import Builder
from hatch_epcontext.graph.scope import Scope


def trip_count(loop: onnx.NodeProto, scope: Scope, builder: Builder) -> int | None:
    """How often ``loop``, which is in ``scope``, runs its body; the limit + 1 if it is more often.

    None if data decides it. What decides is run by onnx, without the rest of the body.
    """
    assert builder.limit is not None, "a loop can be endless"
    body: onnx.GraphProto = graph.attribute(loop, "body", None)
    trips, condition, *initial = (*loop.input, "", "")[: max(2, len(loop.input))]
    number = scope.constant(trips) if trips else None
    if (trips and number is None) or not body.output:
        return None
    most = builder.limit + 1
    if number is not None:
        most = min(int(number.reshape(-1)[0]), most)
    # Before the condition decides, the number of trips does.
    if most <= 0:
        return 0
    first = scope.constant(condition) if condition else None
    if condition and first is None:
        return None
    if first is not None and not first.reshape(-1)[0]:
        return 0
    return _count(body, initial, scope, builder.model, most)


def _count(
    body: onnx.GraphProto, initial: list[str], scope: Scope, opsets: onnx.ModelProto, most: int
) -> int | None:
    """The number of trips, at most ``most``, from the part of ``body`` that decides on its condition.

    ``opsets``: the model, of which only the versions are taken.
    """
    number, given, *carried = (value.name for value in body.input)
    condition, *results = (value.name for value in body.output)
    inner = Scope(body)
    stored = {tensor.name: tensor for tensor in body.initializer}
    feeds = {number: filled(body, 0, 0), given: filled(body, 1, True)}
    states: dict[str, str] = {}
    wanted, waiting = set[str](), [condition]
    while waiting:
        name = waiting.pop()
        if name in wanted:
            continue
        wanted.add(name)
        if (maker := inner.maker(name)) is not None:
            if graph.is_random(maker):
                return None
            waiting += graph.read_by(maker)
        elif name not in stored and name not in feeds:
            outer = name
            if name in carried:
                index = carried.index(name)
                outer, states[name] = initial[index], results[index]
                waiting.append(results[index])
            value = scope.constant(outer)
            if value is None:
                return None
            feeds[name] = value
    # Inputs that are outputs, and outputs of one name, need names of their own.
    ends = [f"epcontext.end{index}" for index in range(1 + len(states))]
    nodes = [node for node in body.node if wanted & set(node.output)]
    nodes += [
        helper.make_node("Identity", [name], [end])
        for name, end in zip((condition, *states.values()), ends, strict=True)
    ]
    part = helper.make_graph(
        nodes,
        "part",
        [onnx.ValueInfoProto(name=name) for name in feeds],
        [onnx.ValueInfoProto(name=name) for name in ends],
        [tensor for name, tensor in stored.items() if name in wanted],
    )
    model = onnx.ModelProto(ir_version=opsets.ir_version, graph=part)
    model.opset_import.extend(opsets.opset_import)
    try:
        evaluator = ReferenceEvaluator(model)
        # What depends on nothing else is the same in all trips.
        for trip in range(most if states or number in wanted else 1):
            feeds[number] = filled(body, 0, trip)
            goes_on, *values = map(np.asarray, evaluator.run(None, feeds))
            if not goes_on.reshape(-1)[0]:
                return trip + 1
            feeds |= dict(zip(states, values, strict=True))
    except Exception:
        # A part that cannot be run decides nothing: the loop stays as it is.
        return None
    return most


def filled(body: onnx.GraphProto, index: int, value: int) -> Array:
    """``value`` as ``body`` takes it as its input ``index``: a number or a list of one."""
    dtype = (np.int64, np.bool_)[index]
    return np.full([1] * len(body.input[index].type.tensor_type.shape.dim), value, dtype)
