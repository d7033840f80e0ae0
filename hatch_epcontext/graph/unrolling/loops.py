"""Loop and Scan with a known number of iterations, as copies of their bodies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.arrays import Array
from hatch_epcontext.graph.builder import Builder, TooManyNodesError
from hatch_epcontext.graph.scope import Scope

_WITHOUT_BATCH = 9
"""The opset from which Scan has no batches of its own."""


class Body:
    """The graph that a loop repeats; nodes that are the same in all iterations are added to ``builder`` once.

    ``outputs``: ``states``, which the next iteration gets, or ``scans``, to which each iteration adds one.
    """

    def __init__(
        self,
        body: onnx.GraphProto,
        outputs: Sequence[onnx.ValueInfoProto],
        states: list[str],
        builder: Builder,
    ) -> None:
        self.states = states
        self.scans: list[list[str]] = [[] for _ in outputs[len(states) :]]
        self._builder = builder
        self._varying: list[onnx.NodeProto] = []
        self._outer: dict[str, str] = {}
        self._outputs = [value.name for value in outputs]
        self._inputs = [value.name for value in body.input]
        builder.store_all(body, self._outer)
        changing = set(self._inputs)
        for node in body.node:
            if graph.is_random(node) or not changing.isdisjoint(graph.read_by(node)):
                changing.update(node.output)
                self._varying.append(node)
            else:
                builder.copy([node], self._outer)

    def repeat(self, trip: int, inputs: Sequence[str]) -> None:
        """Add the nodes of one iteration with ``inputs``."""
        renamed = self._outer | dict(zip(self._inputs, inputs, strict=True))
        self._builder.copy(self._varying, renamed, f"/{trip}")
        outputs = [renamed.get(name, name) for name in self._outputs]
        self.states, scanned = outputs[: len(self.states)], outputs[len(self.states) :]
        for values, output in zip(self.scans, scanned, strict=True):
            values.append(output)


def unroll_loop(
    node: onnx.NodeProto, scope: Scope, builder: Builder
) -> tuple[int, list[str]] | None:
    """Unroll ``node``, a Loop; loops in its body may already be unrolled.

    Returns the number of iterations and the outputs; None if that is unknown or nothing is left. Raises
    TooManyNodesError.
    """
    if (body := _body(node)) is None:
        return None
    trips = _trip_count(node, scope, builder)
    states = list(node.input[2:])
    if not trips:
        return None if trips is None or len(body.output) - 1 > len(states) else (0, states)
    _check(trips, builder)
    # The first output is the condition to continue.
    repeated = Body(body, body.output[1:], states, builder)
    true = builder.store(_filled(body, 1, True))
    for trip in range(trips):
        repeated.repeat(trip, [builder.store(_filled(body, 0, trip)), true, *repeated.states])
    return trips, [*repeated.states, *(builder.stack(values, 0) for values in repeated.scans)]


def unroll_scan(
    node: onnx.NodeProto, scope: Scope, builder: Builder
) -> tuple[int, list[str]] | None:
    """Unroll ``node``, a Scan, as `unroll_loop` does."""
    if builder.opset < _WITHOUT_BATCH:
        return _unroll_batches(node, scope, builder)
    count = graph.number(node, "num_scan_inputs", 0)
    states, scanned = list(node.input[: len(node.input) - count]), node.input[-count:]
    axes = graph.attribute(node, "scan_input_axes", [0] * count)
    shapes = [sizes for name in scanned if (sizes := scope.sizes(name)) is not None]
    body = _body(node)
    if body is None or count < 1 or len(shapes) < count:
        return None
    length, *others = {sizes[axis] for sizes, axis in zip(shapes, axes, strict=True)}
    if others or not length:
        return None
    _check(length, builder)
    backward = graph.attribute(node, "scan_input_directions", [0] * count)
    # Gather of older opsets has no negative axes.
    axes = [axis % len(sizes) for axis, sizes in zip(axes, shapes, strict=True)]
    repeated = Body(body, body.output, states, builder)
    for trip in range(length):
        items = [
            builder.item(name, axis, length - 1 - trip if reverse else trip)
            for name, axis, reverse in zip(scanned, axes, backward, strict=True)
        ]
        repeated.repeat(trip, [*repeated.states, *items])
    none = [0] * len(repeated.scans)
    axes = graph.attribute(node, "scan_output_axes", none)
    backward = graph.attribute(node, "scan_output_directions", none)
    results = [
        builder.stack(values[::-1] if reverse else values, axis)
        for values, axis, reverse in zip(repeated.scans, axes, backward, strict=True)
    ]
    return length, [*repeated.states, *results]


def _unroll_batches(
    node: onnx.NodeProto, scope: Scope, builder: Builder
) -> tuple[int, list[str]] | None:
    """Unroll ``node``, a Scan of opset 8, which scans each sequence of a batch."""
    lengths, *values = node.input
    count = graph.number(node, "num_scan_inputs", 0)
    body, sizes = _body(node), scope.sizes(values[-1])
    batch, length = (sizes or (None, None))[:2]
    if body is None or count < 1 or not batch or not length:
        return None
    ends = scope.constant(lengths) if lengths else np.full(batch, length)
    if ends is None or (ends != length).any():
        return None
    _check(batch * length, builder)
    backward = graph.attribute(node, "directions", [0] * count)
    states = len(values) - count
    results: list[list[str]] = [[] for _ in body.output]
    for sequence in range(batch):
        own = [builder.item(name, 0, sequence) for name in values]
        first, others = own[:states], own[states:]
        repeated = Body(body, body.output, first, builder)
        for trip in range(length):
            items = [
                builder.item(name, 0, length - 1 - trip if reverse else trip)
                for name, reverse in zip(others, backward, strict=True)
            ]
            repeated.repeat(trip, [*repeated.states, *items])
        values_of_one = [*repeated.states, *(builder.stack(scan, 0) for scan in repeated.scans)]
        for result, value in zip(results, values_of_one, strict=True):
            result.append(value)
    return length, [builder.stack(result, 0) for result in results]


def _body(node: onnx.NodeProto) -> onnx.GraphProto | None:
    """The graph that ``node`` repeats; None if it cannot be copied."""
    body = graph.attribute(node, "body", None)
    usable = isinstance(body, onnx.GraphProto) and not body.sparse_initializer
    return body if usable else None


def _check(trips: int, builder: Builder) -> None:
    """Raise TooManyNodesError if there are more ``trips`` than nodes may be added."""
    if builder.limit is not None and trips > builder.limit:
        raise TooManyNodesError(builder.limit)


def _trip_count(loop: onnx.NodeProto, scope: Scope, builder: Builder) -> int | None:
    """The number of iterations of ``loop``, which is in ``scope``; at most the limit + 1.

    None if data decides it. onnx runs the part of the body that decides.
    """
    assert builder.limit is not None, "a loop can be endless"
    body: onnx.GraphProto = graph.attribute(loop, "body", None)
    trips, condition = graph.operands(loop, 2)
    number = scope.constant(trips) if trips else None
    if (trips and number is None) or not body.output:
        return None
    most = builder.limit + 1
    if number is not None:
        most = min(int(number.reshape(-1)[0]), most)
    # The maximum number of iterations counts before the condition.
    if most <= 0:
        return 0
    first = scope.constant(condition) if condition else None
    if condition and first is None:
        return None
    if first is not None and not first.reshape(-1)[0]:
        return 0
    return _count(body, loop.input[2:], scope, builder.model, most)


def _count(
    body: onnx.GraphProto, initial: Sequence[str], scope: Scope, opsets: onnx.ModelProto, most: int
) -> int | None:
    """The number of iterations, at most ``most``, from the part of ``body`` that computes its condition.

    ``opsets``: the model, only for the versions of its operators.
    """
    number, given, *carried = (value.name for value in body.input)
    condition, *results = (value.name for value in body.output)
    # The next iteration gets the state from the last one.
    following = [
        helper.make_node("Identity", [result], [state])
        for result, state in zip(results, carried, strict=False)
    ]
    looped = Scope(helper.make_graph([*body.node, *following], "looped", [], []))
    wanted = set(looped.ancestors([condition]))
    nodes = [node for node in body.node if not wanted.isdisjoint(node.output)]
    if any(map(graph.is_random, nodes)):
        return None
    stored = [tensor for tensor in body.initializer if tensor.name in wanted]
    own = {*(name for node in nodes for name in node.output), *(each.name for each in stored)}
    states = {
        name: result for name, result in zip(carried, results, strict=False) if name in wanted
    }
    feeds = {number: _filled(body, 0, 0), given: _filled(body, 1, True)}
    for name in wanted - own - {number, given}:
        value = scope.constant(initial[carried.index(name)] if name in states else name)
        if value is None:
            return None
        feeds[name] = value
    # Inputs that are outputs, and outputs of one name, need names of their own.
    ends = [f"epcontext.end{index}" for index in range(1 + len(states))]
    nodes += [
        helper.make_node("Identity", [name], [end])
        for name, end in zip((condition, *states.values()), ends, strict=True)
    ]
    part = helper.make_graph(
        nodes,
        "part",
        [onnx.ValueInfoProto(name=name) for name in feeds],
        [onnx.ValueInfoProto(name=name) for name in ends],
        stored,
    )
    model = onnx.ModelProto(ir_version=opsets.ir_version, graph=part)
    model.opset_import.extend(opsets.opset_import)
    # Imported here: few models need it, and it imports all operators.
    from onnx.reference import ReferenceEvaluator

    try:
        evaluator = ReferenceEvaluator(model)
        # A condition that depends on nothing else is the same in all iterations.
        for trip in range(most if states or number in wanted else 1):
            feeds[number] = _filled(body, 0, trip)
            goes_on, *values = map(np.asarray, evaluator.run(None, feeds))
            if not goes_on.reshape(-1)[0]:
                return trip + 1
            feeds |= dict(zip(states, values, strict=True))
    except Exception:
        # The part cannot be run: the loop stays as it is.
        return None
    return most


def _filled(body: onnx.GraphProto, index: int, value: int) -> Array:
    """``value`` in the shape of the body's input ``index``: a number or a list of one."""
    dtype = (np.int64, np.bool_)[index]
    return np.full([1] * len(body.input[index].type.tensor_type.shape.dim), value, dtype)
