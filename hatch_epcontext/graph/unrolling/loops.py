"""Loop and Scan with a known number of trips, as copies of their bodies."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, TooManyNodesError
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.unrolling.trips import filled, trip_count


class Body:
    """The graph that a loop repeats: what is the same in all trips is added to ``builder`` at once."""

    def __init__(self, body: onnx.GraphProto, builder: Builder) -> None:
        self._builder = builder
        self._varying: list[onnx.NodeProto] = []
        self._outer: dict[str, str] = {}
        self._outputs = [value.name for value in body.output]
        self._inputs = [value.name for value in body.input]
        builder.store_all(body, self._outer)
        changing = set(self._inputs)
        for node in body.node:
            if graph.is_random(node) or not changing.isdisjoint(graph.read_by(node)):
                changing.update(node.output)
                self._varying.append(node)
            else:
                builder.copy([node], self._outer)

    def repeat(self, trip: int, inputs: Sequence[str]) -> list[str]:
        """Add the nodes of one trip with ``inputs``, and return the names of its outputs."""
        renamed = self._outer | dict(zip(self._inputs, inputs, strict=True))
        self._builder.copy(self._varying, renamed, f"/{trip}")
        return [renamed.get(name, name) for name in self._outputs]


def unroll_loop(
    node: onnx.NodeProto, scope: Scope, builder: Builder
) -> tuple[int, list[str]] | None:
    """Add what ``node``, a Loop, computes; other loops in its body may be unrolled already.

    Returns the number of trips and the outputs; None where that is unknown or nothing is left. Raises
    TooManyNodesError.
    """
    if (body := _body(node)) is None:
        return None
    trips = trip_count(node, scope, builder)
    states = list(node.input[2:])
    scanned = len(body.output) - 1 - len(states)
    if trips is None or (trips == 0 and scanned > 0):
        return None
    _check(trips, builder)
    scans = [list[str]() for _ in range(scanned)]
    if trips:
        repeated, true = Body(body, builder), builder.store(filled(body, 1, True))
    for trip in range(trips):
        number = builder.store(filled(body, 0, trip))
        _, *outputs = repeated.repeat(trip, [number, true, *states])
        states, items = outputs[: len(states)], outputs[len(states) :]
        for values, output in zip(scans, items, strict=True):
            values.append(output)
    return trips, [*states, *(builder.stack(values, 0) for values in scans)]


def unroll_scan(
    node: onnx.NodeProto, scope: Scope, builder: Builder
) -> tuple[int, list[str]] | None:
    """Add what ``node``, a Scan of opset 9 or newer, computes, as `unroll_loop` does."""
    count = graph.number(node, "num_scan_inputs", 0)
    states, scanned = list(node.input[: len(node.input) - count]), node.input[-count:]
    axes = graph.attribute(node, "scan_input_axes", [0] * count)
    shapes = [sizes for name in scanned if (sizes := scope.sizes(name)) is not None]
    body = _body(node)
    if body is None or builder.opset < 9 or count < 1 or len(shapes) < count:
        return None
    length, *others = {sizes[axis] for sizes, axis in zip(shapes, axes, strict=True)}
    if others or not length:
        return None
    _check(length, builder)
    backward = graph.attribute(node, "scan_input_directions", [0] * count)
    # A negative axis counts from the end, which Gather of older opsets does not know.
    axes = [axis % len(sizes) for axis, sizes in zip(axes, shapes, strict=True)]
    repeated = Body(body, builder)
    scans = [list[str]() for _ in body.output[len(states) :]]
    for trip in range(length):
        items = [
            builder.item(name, axis, length - 1 - trip if reverse else trip)
            for name, axis, reverse in zip(scanned, axes, backward, strict=True)
        ]
        outputs = repeated.repeat(trip, [*states, *items])
        states, items = outputs[: len(states)], outputs[len(states) :]
        for values, output in zip(scans, items, strict=True):
            values.append(output)
    axes = graph.attribute(node, "scan_output_axes", [0] * len(scans))
    reversed_ = graph.attribute(node, "scan_output_directions", [0] * len(scans))
    results = [
        builder.stack(values[::-1] if reverse else values, axis)
        for values, axis, reverse in zip(scans, axes, reversed_, strict=True)
    ]
    return length, [*states, *results]


def _body(node: onnx.NodeProto) -> onnx.GraphProto | None:
    """What ``node`` repeats; None if it has none that can be copied."""
    body = graph.attribute(node, "body", None)
    usable = isinstance(body, onnx.GraphProto) and not body.sparse_initializer
    return body if usable else None


def _check(trips: int, builder: Builder) -> None:
    """Raise TooManyNodesError if there are more ``trips`` than nodes may be added."""
    if builder.limit is not None and trips > builder.limit:
        raise TooManyNodesError(builder.limit)
