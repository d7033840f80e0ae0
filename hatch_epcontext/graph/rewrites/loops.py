"""Loops with a known number of iterations, as copies of their bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs, TooManyNodesError, copy_of
from hatch_epcontext.graph.dtypes import Array
from hatch_epcontext.graph.facts import INSIDE, Declined
from hatch_epcontext.graph.rewriting import Operators, Rewrite, rewrites
from hatch_epcontext.graph.scope import Scope

SCANS_WITHOUT_BATCH = 9
"""The opset from which Scan has no batches and lengths."""

_STATELESS = 11
"""The opset from which a Loop may have no state."""


@rewrites("Loop")
def unroll_loop(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Copies of the body; loops in it may already be unrolled. Raises TooManyNodesError."""
    body = graph.attribute(node, "body", None)
    if not isinstance(body, onnx.GraphProto) or body.sparse_initializer or not body.output:
        return Declined("its body is missing, or has sparse tensors, or no output")
    assert builder.limit is not None, "a loop can be endless"
    counted = trip_count(node, body, scope, builder, builder.limit)
    if isinstance(counted, Declined):
        return counted
    trips, _ = counted
    states = list(node.input[2:])
    if not trips:
        has_scans = len(body.output) - 1 > len(states)
        return Declined("it has no iteration, and its results are empty") if has_scans else states
    true = builder.store(_filled(body, 1, True))

    def inputs(trip: int) -> tuple[list[str], list[str]]:
        return [builder.store(_filled(body, 0, trip)), true], []

    # The first output is the condition to continue.
    states, scans = _copies(body, builder, trips, states, inputs)
    return [*states, *(builder.stack(values, 0) for values in scans)]


@rewrites("Scan")
def unroll_scan(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Copies of the body, each of which reads one item of the scanned values. Raises TooManyNodesError."""
    body, number = graph.attribute(node, "body", None), graph.number(node, "num_scan_inputs", 0)
    if not isinstance(body, onnx.GraphProto) or body.sparse_initializer or not number:
        return Declined("its body is missing, or has sparse tensors, or it scans nothing")
    if builder.opset < SCANS_WITHOUT_BATCH:
        return Declined(f"it is that of opset {builder.opset}, which has batches")
    states, scanned = [*node.input[:-number]], node.input[-number:]
    results = len(body.output) - len(states)
    axes, backward = scanned_along(node, "input", number)
    result_axes, result_backward = scanned_along(node, "output", results)
    trips = scope.fixed_shape(scanned[0])[axes[0]]

    def items(trip: int) -> tuple[list[str], list[str]]:
        return [], [
            builder.item(name, axis, trips - 1 - trip if is_backward else trip)
            for name, axis, is_backward in zip(scanned, axes, backward, strict=True)
        ]

    states, scans = _copies(body, builder, trips, states, items, first=0)
    stacked = (
        builder.stack(values[::-1] if is_backward else values, axis)
        for values, axis, is_backward in zip(scans, result_axes, result_backward, strict=True)
    )
    return [*states, *stacked]


def scanned_along(node: onnx.NodeProto, side: str, count: int) -> tuple[list[int], list[int]]:
    """The axes of the ``count`` inputs or outputs of a Scan, as ``side`` says, and which are backwards."""
    axes, directions = (
        [*graph.attribute(node, f"scan_{side}_{name}", [0] * count)]
        for name in ("axes", "directions")
    )
    return axes, directions


def _copies(
    body: onnx.GraphProto,
    builder: Builder,
    trips: int,
    states: list[str],
    inputs: Callable[[int], tuple[list[str], list[str]]],
    *,
    first: int = 1,
) -> tuple[list[str], list[list[str]]]:
    """Add a copy of ``body`` for each iteration; returns the last states, and the values of other results.

    ``inputs``: those of an iteration, before and after the states. ``first``: the first output that counts.
    Raises TooManyNodesError.
    """
    if builder.limit is not None and trips > builder.limit:
        raise TooManyNodesError(builder.limit)
    names = [value.name for value in body.input]
    outer: dict[str, str] = {}
    builder.store_all(body, outer)
    varying: list[onnx.NodeProto] = []
    changing = set(names)
    for inner in body.node:
        if graph.is_random(inner) or not changing.isdisjoint(graph.read_by(inner)):
            changing.update(inner.output)
            varying.append(inner)
        else:
            # It is the same in all iterations.
            builder.copy([inner], outer)
    count, scans = len(states), list[list[str]]()
    for trip in range(trips):
        before, after = inputs(trip)
        new_names = outer | dict(zip(names, (*before, *states, *after), strict=True))
        builder.copy(varying, new_names, f"/{trip}")
        outputs = [new_names.get(value.name, value.name) for value in body.output[first:]]
        states = outputs[:count]
        scans.append(outputs[count:])
    return states, [[*values] for values in zip(*scans, strict=True)]


def trip_count(
    loop: onnx.NodeProto,
    body: onnx.GraphProto,
    scope: Scope,
    builder: Builder,
    limit: int,
    names: Sequence[str] = (),
) -> tuple[int, Sequence[Sequence[Array]]] | Declined:
    """The number of iterations of ``loop``, which is in ``scope``; at most ``limit`` + 1.

    Also the values in the ``body`` that have these ``names``, in each iteration: onnx runs the part of the
    body that computes them and the condition.
    """
    trips, condition = graph.operands(loop, 2)
    number, first = (scope.constant(name) if name else None for name in (trips, condition))
    if trips and number is None:
        return Declined(f"its number of iterations {trips!r} is computed")
    most = limit + 1 if number is None else min(int(number.item()), limit + 1)
    # The maximum number of iterations counts before the condition.
    if most <= 0 or (first is not None and not first.item()):
        return 0, []
    if condition and first is None:
        return Declined(f"its condition {condition!r} is computed")
    # Imported here: few models need it, and it imports all operators.
    from onnx.reference import ReferenceEvaluator

    decision, states, reads = _decision(body, names)
    starts = dict(zip((value.name for value in body.input[2:]), loop.input[2:], strict=False))
    feeds = {name: scope.constant(starts.get(name, name)) for name in reads}
    known = {name: value for name, value in feeds.items() if value is not None}
    if any(map(graph.is_random, decision.node)) or len(known) < len(feeds):
        return Declined("its number of iterations depends on data or chance")
    model = onnx.ModelProto(ir_version=builder.model.ir_version, graph=decision)
    model.opset_import.extend(builder.model.opset_import)
    counter, condition = (value.name for value in body.input[:2])
    known[condition] = _filled(body, 1, True)
    needs_counter = any(counter in graph.read_by(node) for node in decision.node)
    results: list[Sequence[Array]] = []
    try:
        evaluator = ReferenceEvaluator(model)
        # A condition that depends on nothing else is the same in all iterations.
        for trip in range(most if states or needs_counter else 1):
            known[counter] = _filled(body, 0, trip)
            goes_on, *values = map(np.asarray, evaluator.run(None, known))
            results.append(values[: len(names)])
            if not goes_on.item():
                most = trip + 1
                break
            known |= dict(zip(states, values[len(names) :], strict=True))
    except Exception as error:
        # onnx runs less than ONNX Runtime.
        return Declined(f"onnx does not compute its condition: {' '.join(str(error).split())}")
    return most, results


def _decision(
    body: onnx.GraphProto, names: Sequence[str]
) -> tuple[onnx.GraphProto, Sequence[str], set[str]]:
    """The part of a loop's ``body`` that computes its condition, the values called ``names``, and then the
    next values of some states.

    Also the names of these states, and those of all values that the part reads before the first iteration.
    """
    condition, *results = (value.name for value in body.output)
    following = dict(zip((value.name for value in body.input[2:]), results, strict=False))
    # The next iteration gets the state from the last one.
    returns = [helper.make_node("Identity", [result], [name]) for name, result in following.items()]
    looped = Scope(helper.make_graph([*body.node, *returns], "looped", [], []))
    needed = set(looped.needed_values([condition, *names]))
    nodes = [node for node in body.node if not needed.isdisjoint(node.output)]
    stored = [tensor for tensor in body.initializer if tensor.name in needed]
    own = {name for node in nodes for name in node.output}
    own |= {tensor.name for tensor in stored} | {value.name for value in body.input[:2]}
    states = [name for name in following if name in needed]
    # Inputs that are outputs, and outputs of one name, need names of their own.
    results = [condition, *names, *map(following.__getitem__, states)]
    ends = [f"epcontext.end{index}" for index, _ in enumerate(results)]
    pairs = zip(results, ends, strict=True)
    feeds = {*needed - own, *(value.name for value in body.input[:2])}
    decision = helper.make_graph(
        [*nodes, *(helper.make_node("Identity", [result], [end]) for result, end in pairs)],
        "decision",
        [onnx.ValueInfoProto(name=name) for name in sorted(feeds)],
        [onnx.ValueInfoProto(name=name) for name in ends],
        stored,
    )
    return decision, states, needed - own


def _filled(body: onnx.GraphProto, index: int, value: int) -> Array:
    """``value`` in the shape of the body's input ``index``: a number or a list of one."""
    dtype = (np.int64, np.bool_)[index]
    return np.full([1] * len(body.input[index].type.tensor_type.shape.dim), value, dtype)


def _loop_once(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The same in a Loop of one iteration, which NPUs leave to the CPU."""
    inner = copy_of(node)
    inner.name = builder.fresh(f"{node.name}{INSIDE}")
    cond, goes_on = builder.fresh("cond"), builder.fresh("goes_on")
    state = [builder.fresh("state")] if builder.opset < _STATELESS else []
    results = [
        helper.make_tensor_value_info(flag, TensorProto.BOOL, [])
        for flag in (goes_on, *map(builder.fresh, state))
    ]
    flags = zip((cond, *state), [result.name for result in results], strict=True)
    passed = [
        helper.make_node("Identity", [flag], [result], f"{inner.name}/{flag}")
        for flag, result in flags
    ]
    for index, name in enumerate(node.output):
        if not name:
            continue
        inner.output[index] = builder.fresh(f"{name}/inside")
        if (type_ := scope.types.get(name)) is None:
            return Declined(f"the type of {name!r} is not known")
        results.append(onnx.ValueInfoProto(name=inner.output[index], type=type_))
    number = helper.make_tensor_value_info(builder.fresh("number"), TensorProto.INT64, [])
    conditions = [
        helper.make_tensor_value_info(flag, TensorProto.BOOL, []) for flag in (cond, *state)
    ]
    body = helper.make_graph(
        [*passed, inner], builder.fresh("once"), [number, *conditions], results
    )
    operands = [builder.store(np.int64(1)), *(builder.store(np.bool_(True)) for _ in conditions)]
    names = [name for name in node.output if name]
    outputs = builder.add_all("Loop", operands, [*state, *names], body=body)
    builder.nodes[-1].name = node.name
    values = []
    for output, name in zip(outputs[len(state) :], names, strict=True):
        shape = scope.shape(name)
        is_fixed = shape is not None and 0 not in shape
        values.append(
            builder.reshape(output, shape or ()) if is_fixed else builder.squeeze(output, [0])
        )
        builder.nodes[-1].name = builder.fresh(f"{inner.name}/{builder.nodes[-1].op_type}")
    results_of = iter(values)
    return [next(results_of) if name else "" for name in node.output]


leave_to_cpu = Rewrite("leave_to_cpu", Operators(lambda name: True), _loop_once)
"""Any operator, such that an NPU leaves it to the CPU."""
