"""Loops around one cell as the recurrent layer that the cell's equations define.

The equations are those that ONNX defines LSTM, GRU and RNN by, in any way that multiplies out to the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.dtypes import Array, Numbers
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewrites.loops import SCANS_WITHOUT_BATCH, scanned_along, trip_count
from hatch_epcontext.graph.rewrites.recurrent import DEFAULT_ACTIVATIONS
from hatch_epcontext.graph.rewrites.rows import (
    Body,
    Expression,
    Function,
    Rows,
    Value,
    add,
    multiply,
    one,
    state,
)
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope


class _NoCellError(Exception):
    """The loop is not around a cell; the message says why."""


class _Gate(NamedTuple):
    """A ``function`` of ``of``, or what it is less than 1, as the ``value`` of a gate."""

    value: Expression
    of: Expression
    function: Function


class _Cell(NamedTuple):
    """What ONNX defines a layer by: its gates before the functions, in its order, and these.

    ``recurrent``: of a GRU, what the reset gate multiplies after the weights.
    """

    operator: str
    gates: tuple[Expression, ...]
    functions: tuple[Function, ...]
    recurrent: Expression | None = None


def _gates(*values: Expression) -> list[_Gate]:
    """The functions in the terms of ``values``, as gates."""
    gates: dict[bytes, _Gate] = {}
    for function in (f for value in values for factors, _ in value.terms for f in factors):
        if not isinstance(function, Function) or function.key in gates:
            continue
        single = one(function)
        gates[function.key] = _Gate(single, function.of, function)
        # The function of the opposite is the rest to 1.
        if function.name == "Sigmoid" or function.parameters[1:] == (0.5,):
            rest = _rest(single)
            gates[rest.key] = _Gate(rest, function.of.scaled(-1), function)
    return [*gates.values()]


def _rest(value: Expression) -> Expression:
    return add([Expression(np.ones(value.size)), value.scaled(-1)])


def _are_alike(*gates: _Gate) -> bool:
    return len({(gate.function.name, gate.function.parameters) for gate in gates}) == 1


def _lstm(hidden: Expression, cell: Expression, before: Expression) -> _Cell | None:
    """The LSTM with the next ``hidden`` state and ``cell``, which was ``before``."""
    for forget, first, new in itertools.product(_gates(cell), repeat=3):
        if add([multiply(forget.value, before), multiply(first.value, new.value)]).key != cell.key:
            continue
        for last, result in itertools.product(_gates(hidden), repeat=2):
            is_hidden = multiply(last.value, result.value).key == hidden.key
            if is_hidden and result.of.key == cell.key and _are_alike(forget, first, last):
                gates = (first.of, last.of, forget.of, new.of)
                functions = (first.function, new.function, result.function)
                return _Cell("LSTM", gates, functions)
    return None


def _gru(hidden: Expression, before: Expression) -> _Cell | None:
    """The GRU with the next ``hidden`` state, which was ``before``."""
    for update, new in itertools.product(_gates(hidden), repeat=2):
        parts = [multiply(update.value, before), multiply(_rest(update.value), new.value)]
        if add(parts).key == hidden.key:
            return _with_reset(update, new, before)
    return None


def _with_reset(update: _Gate, new: _Gate, before: Expression) -> _Cell | None:
    """The GRU with these gates, if a third one multiplies the state, or its product, in ``new``."""
    linear = new.of.linear
    rest = Expression(new.of.bias, tuple(pair for pair in linear if isinstance(pair[0], str)))
    products = [(source, matrix) for source, matrix in linear if not isinstance(source, str)]
    late = [f for factors, _ in new.of.terms for f in factors if isinstance(f, Expression)]
    for reset in _gates(new.of, *(source for source, _ in products)):
        if not _are_alike(update, reset):
            continue
        gates, functions = (update.of, reset.of), (update.function, new.function)
        if len(late) == 1 and add([rest, multiply(reset.value, late[0])]).key == new.of.key:
            return _Cell("GRU", (*gates, rest), functions, late[0])
        reading = multiply(reset.value, before)
        if not new.of.terms and [source.key for source, _ in products] == [reading.key]:
            ((name, _),), ((_, matrix),) = before.linear, products
            recurrent = Expression(0 * rest.bias, ((name, matrix),))
            return _Cell("GRU", (*gates, add([rest, recurrent])), functions)
    return None


def _rnn(hidden: Expression) -> _Cell | None:
    for gate in _gates(hidden):
        if gate.value.key == hidden.key:
            return _Cell("RNN", (gate.of,), (gate.function,))
    return None


class _Sequence(NamedTuple):
    """The items, each of ``size`` columns, of a value outside of a loop that its iterations read."""

    name: str
    axis: int
    indices: tuple[int, ...]
    size: int

    @property
    def source(self) -> str:
        return f"{self.name}[{self.axis}]{self.indices}"


class _State(NamedTuple):
    """The names of a state: in the body, of its next value, and of its first value outside."""

    own: str
    next: str
    start: str


@dataclass
class _Loop:
    """A ``Loop`` or ``Scan`` of ``trips`` iterations that read ``sequences``.

    ``results``: the names of what is collected, with axes, and whether backwards. ``values``: those in the
    body that are known. ``last``: those of counters after the last iteration. ``fixed``: states that do not
    change.
    """

    trips: int
    states: list[_State]
    results: list[tuple[str, int, int]]
    sequences: list[_Sequence] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    last: dict[str, Array] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()

    def read(self, name: str, sequence: _Sequence, batch: tuple[int, ...]) -> None:
        """Let the value ``name`` be an item of ``sequence``, whose shape begins with ``batch``."""
        if sequence not in self.sequences:
            self.sequences.append(sequence)
        self.values[name] = Rows(batch, state(sequence.source, sequence.size))


@rewrites("Loop", "Scan")
def loop_as_layer(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A loop around the cell of an LSTM, GRU or RNN, as Keras and PyTorch write it, as the layer."""
    body = graph.attribute(node, "body", None)
    if not isinstance(body, onnx.GraphProto) or body.sparse_initializer:
        return Declined("its body is missing, or has sparse tensors")
    try:
        loop = (_loop if node.op_type == "Loop" else _scan)(node, body, scope, builder)
        computed = _computed(loop, body, scope, builder)
        cell, names = _cell(loop, computed)
        return _outputs(loop, cell, names, computed, scope, builder)
    except _NoCellError as error:
        return Declined(f"it is no layer: {error}")


def _loop(node: onnx.NodeProto, body: onnx.GraphProto, scope: Scope, builder: Builder) -> _Loop:
    names, results = ([v.name for v in values] for values in (body.input[2:], body.output[1:]))
    states = [*map(_State, names, results, node.input[2:])]
    inner = Scope(body, scope)
    fixed = {s.own: s.start for s in states if inner.origin(s.next, {"Identity"}) == s.own}
    loop = _Loop(0, states, [(name, 0, 0) for name in results[len(states) :]])
    loop.fixed = frozenset(fixed)
    constants = {own: scope.constant(start) for own, start in fixed.items()}
    loop.values |= {own: value for own, value in constants.items() if value is not None}
    reads = [*_reads(body, fixed, scope)]
    if not reads:
        raise _NoCellError("it reads no items of a value with a fixed shape")
    kinds = {s: scope.kind(s.start) for s in states if s.own not in fixed}
    counters = [s.next for s, kind in kinds.items() if kind not in ("", "f")]
    wanted = [*(gather.input[1] for gather, _, _, _ in reads), *counters]
    longest = max(shape[axis] for _, _, axis, shape in reads)
    counted = trip_count(node, body, scope, builder, longest, wanted)
    if isinstance(counted, Declined):
        raise _NoCellError(counted.reason)
    loop.trips, values = counted
    if not 0 < loop.trips == len(values):
        raise _NoCellError("it has no iteration, or all read the same item")
    loop.last = dict(zip(counters, values[-1][len(reads) :], strict=True))
    for index, (gather, name, axis, shape) in enumerate(reads):
        numbers = [by_trip[index] for by_trip in values]
        if all(number.size == 1 for number in numbers):
            positions = tuple(int(number.item()) % shape[axis] for number in numbers)
            batch = (*shape[:axis], *numbers[0].shape, *shape[axis + 1 : -1])
            loop.read(gather.output[0], _Sequence(name, axis, positions, shape[-1]), batch)
    return loop


def _reads(
    body: onnx.GraphProto, fixed: dict[str, str], scope: Scope
) -> Iterator[tuple[onnx.NodeProto, str, int, tuple[int, ...]]]:
    """The Gathers of ``body`` that read a value from outside: its name, the axis and its shape."""
    own = {name for node in body.node for name in node.output}
    own |= {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
    for node in body.node:
        name = node.input[0] if node.op_type == "Gather" else ""
        name = fixed.get(name, "" if name in own else name)
        shape = scope.shape(name) if name else None
        axis = graph.number(node, "axis", 0)
        if shape and scope.constant(name) is None and axis % len(shape) < len(shape) - 1:
            yield node, name, axis % len(shape), shape


def _scan(node: onnx.NodeProto, body: onnx.GraphProto, scope: Scope, builder: Builder) -> _Loop:
    count = graph.number(node, "num_scan_inputs", 0)
    if builder.opset < SCANS_WITHOUT_BATCH or not count:
        raise _NoCellError("it scans nothing, or has batches")
    names, results = ([v.name for v in values] for values in (body.input, body.output))
    states = [*map(_State, names[:-count], results, node.input[:-count])]
    collected = results[len(states) :]
    sides = scanned_along(node, "output", len(collected))
    loop = _Loop(0, states, [*zip(collected, *sides, strict=True)])
    inner = Scope(body, scope)
    loop.fixed = frozenset(s.own for s in states if inner.origin(s.next, {"Identity"}) == s.own)
    sides = scanned_along(node, "input", count)
    for own, name, number, is_backward in zip(
        names[-count:], node.input[-count:], *sides, strict=True
    ):
        shape = scope.shape(name)
        if not shape or number % len(shape) == len(shape) - 1:
            raise _NoCellError(f"{name!r} has no fixed shape, or its columns are scanned")
        axis, loop.trips = number % len(shape), shape[number]
        positions = tuple(range(loop.trips)[:: -1 if is_backward else 1])
        batch = (*shape[:axis], *shape[axis + 1 : -1])
        loop.read(own, _Sequence(name, axis, positions, shape[-1]), batch)
    return loop


def _computed(loop: _Loop, body: onnx.GraphProto, scope: Scope, builder: Builder) -> Body:
    """The values of ``body`` in one iteration."""
    read = {name for node in body.node for name in graph.read_by(node) if name}
    inside = {name for node in body.node for name in node.output}
    inside |= {value.name for value in body.input}
    constants = {name: scope.constant(name) for name in read - inside}
    values: dict[str, Value] = {k: value for k, value in constants.items() if value is not None}
    values |= {tensor.name: numpy_helper.to_array(tensor) for tensor in body.initializer}
    values |= loop.values
    batches = [math.prod(v.batch) for v in loop.values.values() if isinstance(v, Rows)]
    if not batches:
        raise _NoCellError("it reads several items at once")
    rows = batches[0]
    for own, following, start in loop.states:
        shape = scope.shape(start)
        if own in loop.fixed or following in loop.last:
            continue
        if not shape or math.prod(shape[:-1]) != rows:
            raise _NoCellError(f"the shape of the state {own!r} is not that of a batch")
        values[own] = Rows(shape[:-1], state(own, shape[-1]))
    computed = Body(builder.opset, rows, values)
    for node in body.node:
        if node.output[0] not in values:
            computed.compute(node)
    return computed


def _cell(loop: _Loop, body: Body) -> tuple[_Cell, tuple[str, ...]]:
    """The cell, and the names of its states, the hidden one first."""
    following: dict[str, Expression] = {}
    for own, name, _ in loop.states:
        value = body.values.get(name)
        if own not in loop.fixed and name not in loop.last:
            if not isinstance(value, Rows):
                raise _NoCellError(f"its body does more than a cell for the state {own!r}")
            following[own] = value.row
    for names in itertools.permutations(following):
        before = [state(name, following[name].size) for name in names]
        cell = None
        if len(names) == 2:
            cell = _lstm(following[names[0]], following[names[1]], before[1])
        elif len(names) == 1:
            cell = _gru(following[names[0]], before[0]) or _rnn(following[names[0]])
        if cell:
            return cell, names
    raise _NoCellError("its states follow other equations than those of LSTM, GRU and RNN")


def _outputs(
    loop: _Loop, cell: _Cell, names: tuple[str, ...], body: Body, scope: Scope, builder: Builder
) -> Outputs:
    """The layer instead of ``loop``; ``names``: of its states."""
    size = cell.gates[0].size
    own = {state.own: state for state in loop.states}
    weights = _weights(cell, loop.sequences, names[0])
    inputs = [
        builder.concat([_items(loop, s, scope, builder, body.rows) for s in loop.sequences], 2)
    ]
    inputs += [builder.store(weight.astype(builder.dtype)) for weight in weights]
    starts = [builder.reshape(own[name].start, [1, body.rows, size]) for name in names]
    every, *ends = builder.add_all(
        cell.operator,
        [*inputs, "", *starts],
        ["Y", "Y_h", "Y_c"][: 1 + len(names)],
        hidden_size=size,
        linear_before_reset=1 if cell.recurrent else None,
        **_activations(cell),
    )
    last = dict(zip(names, ends, strict=True))
    outputs: list[str] = []
    for name, following, start in loop.states:
        if name in last:
            outputs.append(builder.reshape(last[name], scope.shape(start) or ()))
        else:
            outputs.append(start if name in loop.fixed else builder.store(loop.last[following]))
    return [*outputs, *_collected(loop, every, own[names[0]].next, body, builder)]


def _collected(loop: _Loop, every: str, hidden: str, body: Body, builder: Builder) -> Iterator[str]:
    """The results of ``loop``, if they are ``every`` value of its state, which is next called ``hidden``."""
    expected = body.values[hidden]
    assert isinstance(expected, Rows), "it is a state of the cell"
    for name, axis, is_backward in loop.results:
        value = body.values.get(name)
        if not isinstance(value, Rows) or value.row.key != expected.row.key:
            raise _NoCellError(f"its result {name!r} is not the hidden state")
        result = builder.reshape(every, [loop.trips, *value.shape])
        if is_backward:
            result = builder.add("Gather", result, builder.integers(range(loop.trips)[::-1]))
        order = [*range(1, len(value.shape) + 1)]
        order.insert(axis % (len(order) + 1), 0)
        yield builder.transpose(result, order)


def _activations(cell: _Cell) -> dict[str, Any]:
    """The attributes for functions that are not those of the layer by default."""
    names = [function.name for function in cell.functions]
    if names == [*DEFAULT_ACTIVATIONS[cell.operator]]:
        return {}
    parameters = [f.parameters for f in cell.functions if f.parameters]
    alpha, beta = zip(*parameters, strict=True) if parameters else (None, None)
    return {"activations": names, "activation_alpha": alpha, "activation_beta": beta}


def _items(loop: _Loop, sequence: _Sequence, scope: Scope, builder: Builder, rows: int) -> str:
    """The items of ``sequence``, trips x rows x columns."""
    value, axis = sequence.name, sequence.axis
    shape = scope.shape(value) or ()
    if sequence.indices != tuple(range(shape[axis])):
        value = builder.add("Gather", value, builder.integers(sequence.indices), axis=axis)
    value = builder.transpose(value, [axis, *(i for i in range(len(shape)) if i != axis)])
    return builder.reshape(value, [loop.trips, rows, sequence.size])


def _weights(
    cell: _Cell, sequences: Sequence[_Sequence], name: str
) -> tuple[Numbers, Numbers, Numbers]:
    """The weights of ``cell`` for its input and for the state called ``name``, and its biases."""
    sources, recurrent = [sequence.source for sequence in sequences], cell.recurrent
    size = cell.gates[0].size
    inputs, states, biases = list[Numbers](), list[Numbers](), list[Numbers]()
    late = [Expression(np.zeros(size))] * len(cell.gates)
    if recurrent:
        late[-1] = recurrent
    for gate, added in zip(cell.gates, late, strict=True):
        own, more = dict(gate.linear), dict(added.linear)
        has_others = gate.terms or added.terms or not {*own} <= {*sources, name}
        is_read_twice = recurrent and added is recurrent and name in own
        if has_others or is_read_twice or not {*more} <= {name}:
            raise _NoCellError("its gates depend on more than a sequence and the hidden state")
        parts = [own.get(s.source, np.zeros((s.size, size))) for s in sequences]
        inputs.append(np.concatenate(parts).T)
        states.append((own | more).get(name, np.zeros((size, size))).T)
        biases.append(gate.bias)
    biases += [gate.bias for gate in late]
    return np.vstack(inputs)[None], np.vstack(states)[None], np.concatenate(biases)[None]
