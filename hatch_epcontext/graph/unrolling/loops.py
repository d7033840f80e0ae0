"""Loop and Scan with a known number of trips, as copies of their bodies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.unrolling.builder import Builder, TooManyNodesError, instantiate
from hatch_epcontext.graph.unrolling.scope import Scope
from hatch_epcontext.graph.unrolling.trips import trip_count


class Body:
    """The graph that a loop repeats: what is the same in all trips is added to ``builder`` at once."""

    def __init__(self, body: onnx.GraphProto, builder: Builder) -> None:
        self._builder = builder
        self._varying: list[onnx.NodeProto] = []
        self._outer: dict[str, str] = {}
        self._outputs = [value.name for value in body.output]
        self._inputs = [value.name for value in body.input]
        for tensor in body.initializer:
            hoisted = onnx.TensorProto()
            hoisted.CopyFrom(tensor)
            hoisted.name = self._outer[tensor.name] = builder.names.fresh(tensor.name)
            builder.constants.append(hoisted)
        changing = set(self._inputs)
        for node in body.node:
            if graph.is_random(node) or not changing.isdisjoint(graph.read_by(node)):
                changing.update(node.output)
                self._varying.append(node)
            else:
                instantiate([node], self._outer, builder, "")

    def repeat(self, trip: int, inputs: Sequence[str]) -> list[str]:
        """Add the nodes of one trip with ``inputs``, and return the names of its outputs."""
        renamed = self._outer | dict(zip(self._inputs, inputs, strict=True))
        instantiate(self._varying, renamed, self._builder, f"/{trip}")
        return [renamed.get(name, name) for name in self._outputs]


def unroll_loop(
    node: onnx.NodeProto,
    body: onnx.GraphProto,
    scope: Scope,
    model: onnx.ModelProto,
    builder: Builder,
) -> int | None:
    """Add what ``node``, a Loop, computes; ``body`` is its body, in which other loops may be unrolled.

    Returns the number of trips; None, and nothing is added, where it is unknown or nothing is left.
    Raises TooManyNodesError.
    """
    trips = trip_count(node, scope, model, builder.limit)
    initial = list(node.input[2:])
    scanned = len(body.output) - 1 - len(initial)
    if trips is None or (trips == 0 and scanned > 0):
        return None
    if trips > builder.limit:
        raise TooManyNodesError(builder.limit)
    hint = node.name or node.op_type
    states, scans = initial, [list[str]() for _ in range(scanned)]
    if trips:
        repeated = Body(body, builder)
        true = builder.constant(np.ones(_shape(body, 1), np.bool_), f"{hint}/true")
    for trip in range(trips):
        number = builder.constant(np.full(_shape(body, 0), trip, np.int64), f"{hint}/trip")
        _, *outputs = repeated.repeat(trip, [number, true, *states])
        states = outputs[: len(initial)]
        for values, output in zip(scans, outputs[len(initial) :], strict=True):
            values.append(output)
    results = [*states, *(_stack(values, 0, hint, builder) for values in scans)]
    _give_outputs(node, results, builder)
    return trips


def unroll_scan(
    node: onnx.NodeProto, body: onnx.GraphProto, scope: Scope, builder: Builder
) -> int | None:
    """Add what ``node``, a Scan of opset 9 or newer, computes, as `unroll_loop` does."""
    count = graph.number(node, "num_scan_inputs", 0)
    states, scanned = list(node.input[: len(node.input) - count]), node.input[-count:]
    axes = graph.attribute(node, "scan_input_axes", [0] * count)
    types = [scope.type_of(name) for name in scanned]
    if builder.opset < 9 or count < 1 or not all(types):
        return None
    lengths = {each.shape[axis] for each, axis in zip(types, axes, strict=True) if each is not None}
    length: int = min(lengths)
    if len(lengths) > 1 or length < 1:
        return None
    if length > builder.limit:
        raise TooManyNodesError(builder.limit)
    hint = node.name or node.op_type
    backward = graph.attribute(node, "scan_input_directions", [0] * count)
    # A negative axis counts from the end, which Gather of older opsets does not know.
    axes = [
        axis % len(each.shape) for axis, each in zip(axes, types, strict=True) if each is not None
    ]
    repeated, initial = Body(body, builder), len(states)
    scans = [list[str]() for _ in body.output[initial:]]
    for trip in range(length):
        items = [
            builder.item(
                name, axis, length - 1 - trip if reverse else trip, f"{hint}/{name}/{trip}"
            )
            for name, axis, reverse in zip(scanned, axes, backward, strict=True)
        ]
        outputs = repeated.repeat(trip, [*states, *items])
        states = outputs[:initial]
        for values, output in zip(scans, outputs[initial:], strict=True):
            values.append(output)
    axes = graph.attribute(node, "scan_output_axes", [0] * len(scans))
    reversed_ = graph.attribute(node, "scan_output_directions", [0] * len(scans))
    results = [
        _stack(values[::-1] if reverse else values, axis, hint, builder)
        for values, axis, reverse in zip(scans, axes, reversed_, strict=True)
    ]
    _give_outputs(node, [*states, *results], builder)
    return length


def _give_outputs(node: onnx.NodeProto, values: Sequence[str], builder: Builder) -> None:
    for output, value in zip(node.output, values, strict=False):
        builder.copy_to(value, output, node.name or node.op_type)


def _stack(values: Sequence[str], axis: int, hint: str, builder: Builder) -> str:
    """``values`` one after another along a new ``axis``."""
    rows = [builder.unsqueeze(value, axis, f"{hint}/row") for value in values]
    return builder.concat(rows, axis, f"{hint}/rows")


def _shape(body: onnx.GraphProto, index: int) -> list[int]:
    """The shape that ``body`` wants of the number of the trip, or of the condition: [] or [1]."""
    return [1] * len(body.input[index].type.tensor_type.shape.dim)
