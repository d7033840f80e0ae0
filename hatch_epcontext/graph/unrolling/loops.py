"""Loops with a known number of iterations, as copies of their bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs, TooManyNodesError
from hatch_epcontext.graph.dtypes import Array
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope


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


@rewrites("Loop")
def unroll_loop(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Copies of the body; loops in it may already be unrolled. Raises TooManyNodesError."""
    body = graph.attribute(node, "body", None)
    if not isinstance(body, onnx.GraphProto) or body.sparse_initializer or not body.output:
        return Declined("its body is missing, or has sparse tensors, or no output")
    trips = _trip_count(node, body, scope, builder)
    if isinstance(trips, Declined):
        return trips
    states = list(node.input[2:])
    if not trips:
        has_scans = len(body.output) - 1 > len(states)
        return Declined("it has no iteration, and its results are empty") if has_scans else states
    if builder.limit is not None and trips > builder.limit:
        raise TooManyNodesError(builder.limit)
    # The first output is the condition to continue.
    repeated = Body(body, body.output[1:], states, builder)
    true = builder.store(_filled(body, 1, True))
    for trip in range(trips):
        repeated.repeat(trip, [builder.store(_filled(body, 0, trip)), true, *repeated.states])
    return [*repeated.states, *(builder.stack(values, 0) for values in repeated.scans)]


def _trip_count(
    loop: onnx.NodeProto, body: onnx.GraphProto, scope: Scope, builder: Builder
) -> int | Declined:
    """The number of iterations of ``loop``, which is in ``scope``; at most the limit + 1.

    onnx runs the part of the body that decides.
    """
    assert builder.limit is not None, "a loop can be endless"
    trips, condition = graph.operands(loop, 2)
    number, first = (scope.constant(name) if name else None for name in (trips, condition))
    if trips and number is None:
        return Declined(f"its number of iterations {trips!r} is computed")
    most = builder.limit + 1 if number is None else min(int(number.item()), builder.limit + 1)
    # The maximum number of iterations counts before the condition.
    if most <= 0:
        return 0
    if condition and first is None:
        return Declined(f"its condition {condition!r} is computed")
    if first is not None and not first.item():
        return 0
    decision = _Decision.of(body, loop.input[2:])
    feeds = {name: scope.constant(outer) for name, outer in decision.reads.items()}
    known = {name: value for name, value in feeds.items() if value is not None}
    if any(map(graph.is_random, decision.nodes)) or len(known) < len(feeds):
        return Declined("its number of iterations depends on data or chance")
    return decision.count(known, most, builder.model)


@dataclass(frozen=True)
class _Decision:
    """The part of a loop's body that computes its condition.

    ``states``: the carried values that it needs, with their values in the next iteration; ``reads``: all
    values that it needs before the first iteration, with their names outside the body.
    """

    body: onnx.GraphProto
    nodes: Sequence[onnx.NodeProto]
    stored: Sequence[onnx.TensorProto]
    states: Mapping[str, str]
    reads: Mapping[str, str]

    @staticmethod
    def of(body: onnx.GraphProto, initial: Sequence[str]) -> _Decision:
        """That of ``body``, whose carried values begin as those named ``initial``."""
        carried = [value.name for value in body.input[2:]]
        condition, *results = (value.name for value in body.output)
        # The next iteration gets the state from the last one.
        following = dict(zip(carried, results, strict=False))
        returns = [helper.make_node("Identity", [result], [n]) for n, result in following.items()]
        looped = Scope(helper.make_graph([*body.node, *returns], "looped", [], []))
        needed = set(looped.ancestors([condition]))
        nodes = [node for node in body.node if not needed.isdisjoint(node.output)]
        stored = [tensor for tensor in body.initializer if tensor.name in needed]
        own = {name for node in nodes for name in node.output}
        own |= {tensor.name for tensor in stored} | {value.name for value in body.input[:2]}
        starts = dict(zip(carried, initial, strict=False))
        states = {name: result for name, result in following.items() if name in needed}
        return _Decision(body, nodes, stored, states, {n: starts.get(n, n) for n in needed - own})

    def count(
        self, values: Mapping[str, Array], most: int, opsets: onnx.ModelProto
    ) -> int | Declined:
        """The number of iterations, at most ``most``, if the first one reads ``values``.

        ``opsets``: a model with the versions of its operators.
        """
        # Imported here: few models need it, and it imports all operators.
        from onnx.reference import ReferenceEvaluator

        number, condition = (value.name for value in self.body.input[:2])
        feeds = {**values, number: _filled(self.body, 0, 0), condition: _filled(self.body, 1, True)}
        # Inputs that are outputs, and outputs of one name, need names of their own.
        results = (self.body.output[0].name, *self.states.values())
        ends = {f"epcontext.end{index}": name for index, name in enumerate(results)}
        part = helper.make_graph(
            [*self.nodes, *(helper.make_node("Identity", [ends[end]], [end]) for end in ends)],
            "part",
            [onnx.ValueInfoProto(name=name) for name in feeds],
            [onnx.ValueInfoProto(name=name) for name in ends],
            self.stored,
        )
        model = onnx.ModelProto(ir_version=opsets.ir_version, graph=part)
        model.opset_import.extend(opsets.opset_import)
        needs_number = any(number in graph.read_by(node) for node in part.node)
        try:
            evaluator = ReferenceEvaluator(model)
            # A condition that depends on nothing else is the same in all iterations.
            for trip in range(most if self.states or needs_number else 1):
                feeds[number] = _filled(self.body, 0, trip)
                goes_on, *state = map(np.asarray, evaluator.run(None, feeds))
                if not goes_on.item():
                    return trip + 1
                feeds |= dict(zip(self.states, state, strict=True))
        except Exception as error:
            # onnx runs less than ONNX Runtime.
            return Declined(f"onnx does not compute its condition: {' '.join(str(error).split())}")
        return most


def _filled(body: onnx.GraphProto, index: int, value: int) -> Array:
    """``value`` in the shape of the body's input ``index``: a number or a list of one."""
    dtype = (np.int64, np.bool_)[index]
    return np.full([1] * len(body.input[index].type.tensor_type.shape.dim), value, dtype)
