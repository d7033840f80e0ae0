"""LSTM, GRU and RNN as the matrix products and functions of each position, and without default attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}

DEFAULT_ACTIVATIONS = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}
"""The activations of one direction of each layer."""

ACTIVATIONS: Mapping[str, str] = {
    name.casefold(): name for name in ("Sigmoid", "Tanh", "Relu", "HardSigmoid")
}
"""The operators that layers may have as activations, by their names in lower case."""

_FLAT = 20.0
"""Where sigmoid and tanh are flat in float32. QNN's HTP fuses a sum with the function after it: with errors
of 0.007, and wrong if Split follows; a Clip at this value between them prevents that."""

Activation = tuple[str, dict[str, float | None]]
"""An operator, and its attributes."""

Cell = Callable[[str, Sequence[str]], list[str]]
"""From the input's part of the gates (batch x gates * hidden) and the states to the new states."""


@dataclass(frozen=True)
class _Layer:
    """One ``direction`` of a node, with its builder, and with what all its directions have in common."""

    node: onnx.NodeProto
    builder: Builder
    length: int
    batch: int
    hidden: int
    directions: int
    direction: int = 0

    def of_direction(self, index: int) -> str:
        """The part of a weight for the direction."""
        return self.builder.item(self.node.input[index], 0, self.direction)

    def weight(self, index: int) -> str:
        """A weight matrix for the direction, with its two dimensions exchanged."""
        return self.builder.transpose(self.of_direction(index), [1, 0])

    def state(self, index: int) -> str:
        """The initial state for the direction (batch x hidden), zeros without one."""
        if not (initial := graph.operand(self.node, index)):
            return self.builder.store(np.zeros((self.batch, self.hidden), self.builder.dtype))
        return self.builder.item(initial, 0, self.direction)

    def gate(self, function: Activation, value: str) -> str:
        """``function`` of ``value``, within the bounds that the layer has."""
        name, parameters = function
        if bound := graph.attribute(self.node, "clip", 0.0):
            value = self.builder.clip(value, -bound, bound)
        return self.builder.add(name, value, **parameters)

    def of_sum(self, function: Activation, value: str) -> str:
        """``function`` of the sum ``value``, which is within `_FLAT`."""
        name, parameters = function
        if name in ("Sigmoid", "Tanh"):
            value = self.builder.clip(value, -_FLAT, _FLAT)
        return self.builder.add(name, value, **parameters)

    def gate_of_sum(self, function: Activation, value: str) -> str:
        """The `gate` of the sum ``value``."""
        is_bounded = graph.attribute(self.node, "clip", 0.0)
        return (self.gate if is_bounded else self.of_sum)(function, value)

    def add(self, op: str, *inputs: str) -> str:
        """A node."""
        return self.builder.add(op, *inputs)

    def parts(self, value: str, axis: int, count: int) -> list[str]:
        """``value`` in ``count`` parts of the hidden size."""
        return self.builder.split(value, axis, [self.hidden] * count)

    def per_position(self, value: str) -> list[str]:
        """The rows of ``value``, (length * batch) x anything, of each position."""
        return self.builder.split(value, 0, [self.batch] * self.length)


def _named_activations(node: onnx.NodeProto) -> list[str]:
    """The activations that ``node`` names, by their operators where these are known."""
    names = (name.decode("utf-8", "replace") for name in graph.attribute(node, "activations", []))
    return [ACTIVATIONS.get(name.casefold(), name) for name in names]


def _activations(node: onnx.NodeProto, directions: int) -> list[list[Activation]] | Declined:
    """The activations of each direction of ``node``."""
    defaults = DEFAULT_ACTIVATIONS[node.op_type]
    names = _named_activations(node) or [*defaults] * directions
    if node.op_type == "RNN":
        # The default names functions for two directions; one direction uses only the first.
        names = names[:directions]
    if len(names) != directions * len(defaults):
        return Declined(f"it has {len(names)} activations, not {directions * len(defaults)}")
    if unknown := sorted({*names}.difference(ACTIVATIONS.values())):
        return Declined(f"its activation {unknown[0]!r} is not known")
    values = {
        key: iter(graph.attribute(node, f"activation_{key}", [])) for key in ("alpha", "beta")
    }
    functions: list[Activation] = []
    for name in names:
        # The others have no parameters. Those that are missing have the operator's defaults.
        own = {key: next(values[key], None) for key in values if name == "HardSigmoid"}
        functions.append((name, own))
    return [functions[at : at + len(defaults)] for at in range(0, len(functions), len(defaults))]


@rewrites(*DEFAULT_ACTIVATIONS)
def drop_default_activations(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A layer without ``activations``, if these are the defaults: EPs refuse the attribute."""
    names = _named_activations(node)
    directions = 2 if graph.text(node, "direction") == "bidirectional" else 1
    if not names:
        return None
    if names != [*DEFAULT_ACTIVATIONS[node.op_type]] * directions:
        return Declined("its activations are not the default ones")
    # The default activations have no parameters.
    dropped = dict.fromkeys(("activations", "activation_alpha", "activation_beta"))
    return builder.add_like(node, node.op_type, node.input, "", **dropped)


@rewrites(*_GATES)
def unroll_recurrent(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The products and functions of each position. Raises TooManyNodesError."""
    layer = _layer(node, scope, builder)
    if isinstance(layer, Declined):
        return layer
    functions = _activations(node, layer.directions)
    if isinstance(functions, Declined):
        return functions
    # All values of a position together; -1 stands for the features, the one size that may be unknown.
    rows = builder.reshape(node.input[0], [layer.length * layer.batch, -1])
    within = _within(layer, scope)
    sequences, last = list[list[str]](), list[list[str]]()
    for direction, of_direction in enumerate(functions):
        layer = replace(layer, direction=direction)
        run, states, fixed = _PREPARE[node.op_type](layer, of_direction)
        backward = direction == 1 or graph.attribute(node, "direction", b"forward") == b"reverse"
        gates = _input_part(layer, rows, fixed)
        order = range(layer.length)[::-1] if backward else range(layer.length)
        hidden = [""] * layer.length
        for at in order:
            new = run(gates[at], states)
            if not within:
                states, hidden[at] = new, new[0]
                continue
            # After a sequence's end (backward: before it) its states stay, and its outputs are 0.
            pairs = zip(new, states, strict=True)
            states = [_select(layer, within[at], state, old) for state, old in pairs]
            hidden[at] = layer.add("Mul", states[0], within[at])
        sequences.append(hidden)
        last.append(states)
    return _outputs(layer, sequences, last)


def _layer(node: onnx.NodeProto, scope: Scope, builder: Builder) -> _Layer | Declined:
    if graph.number(node, "layout", 0):
        # Nor does ONNX Runtime's CPU run it.
        return Declined("its batch comes first")
    x, r = (scope.sizes(name) or () for name in (node.input[0], node.input[2]))
    if len(x) != 3 or len(r) != 3 or scope.dtype(node.input[0]) is None:
        return Declined("the type of its input or of its weights is not known")
    (length, batch), hidden = x[:2], r[2]
    both = graph.attribute(node, "direction", b"forward") == b"bidirectional"
    if not (length and batch and hidden):
        return Declined("its length or its batch is not fixed")
    return _Layer(node, builder, length, batch, hidden, 1 + both)


def _within(layer: _Layer, scope: Scope) -> list[str]:
    """For each position 1 for the sequences that have it, else 0 (batch x 1); empty if all have all."""
    if not (name := graph.operand(layer.node, 4)):
        return []
    lengths = scope.constant(name)
    if lengths is not None and (lengths == layer.length).all():
        return []
    builder = layer.builder
    dtype = helper.np_dtype_to_tensor_dtype(builder.dtype)
    # Less of opsets before 9 has no integers.
    ends = builder.add("Cast", name, to=dtype)
    positions = np.tile(np.arange(layer.length).reshape(-1, 1), (1, layer.batch))
    less = builder.add("Less", builder.store(positions.astype(builder.dtype)), ends)
    value = builder.add("Cast", less, to=dtype)
    return layer.per_position(builder.reshape(value, [layer.length * layer.batch, 1]))


def _select(layer: _Layer, within: str, new: str, old: str) -> str:
    """``new`` where ``within`` is 1, and ``old`` where it is 0."""
    change = layer.add("Mul", layer.add("Sub", new, old), within)
    return layer.add("Add", old, change)


def _input_part(layer: _Layer, rows: str, fixed: str) -> list[str]:
    """What the input, ``rows`` of (length * batch) x features, adds to the gates at each position; ``fixed``
    is the bias, or empty.
    """
    value = layer.add("MatMul", rows, layer.weight(1))
    return layer.per_position(layer.add("Add", value, fixed) if fixed else value)


def _biases(layer: _Layer) -> tuple[str, str]:
    """The biases of the input and of the state; empty without them."""
    if not graph.operand(layer.node, 3):
        return "", ""
    gates = _GATES[layer.node.op_type]
    bias = layer.of_direction(3)
    first, second = layer.builder.split(bias, 0, [gates * layer.hidden] * 2)
    return first, second


def _bias(layer: _Layer) -> str:
    first, second = _biases(layer)
    return layer.add("Add", first, second) if first else ""


def _lstm(layer: _Layer, functions: Sequence[Activation]) -> tuple[Cell, list[str], str]:
    f, g, h = functions
    weight = layer.weight(2)
    is_coupled = graph.number(layer.node, "input_forget", 0) != 0
    peepholes = list[str]()
    if graph.operand(layer.node, 7):
        peepholes = layer.parts(layer.of_direction(7), 0, 3)

    def with_peephole(part: str, at: int, cell: str) -> str:
        """The input of the gate ``at``, of input, output and forget gate, with what it reads of ``cell``."""
        return layer.add("Add", part, layer.add("Mul", peepholes[at], cell)) if peepholes else part

    def run(inputs: str, states: Sequence[str]) -> list[str]:
        hidden, cell = states
        gates = layer.add("Add", inputs, layer.add("MatMul", hidden, weight))
        *parts, c = layer.parts(gates, 1, 4)
        first = [with_peephole(part, at, cell) for at, part in ((0, parts[0]), (2, parts[2]))]
        i, forget = (layer.gate(f, part) for part in first)
        if is_coupled:
            forget = layer.add("Sub", layer.builder.number(1), i)
        new = layer.add("Mul", i, layer.gate(g, c))
        cell = layer.add("Add", layer.add("Mul", forget, cell), new)
        o = layer.gate(f, with_peephole(parts[1], 1, cell))
        # ONNX Runtime clips gates, but not the cell.
        return [layer.add("Mul", o, layer.of_sum(h, cell)), cell]

    states = [layer.state(5), layer.state(6)]
    return run, states, _bias(layer)


def _gru(layer: _Layer, functions: Sequence[Activation]) -> tuple[Cell, list[str], str]:
    f, g = functions
    sizes = [2 * layer.hidden, layer.hidden]
    weight = layer.of_direction(2)
    outer, inner = (
        layer.builder.transpose(part, [1, 0]) for part in layer.builder.split(weight, 0, sizes)
    )
    first, second = _biases(layer)
    late = graph.number(layer.node, "linear_before_reset", 0) != 0
    outer_bias, inner_bias = layer.builder.split(second, 0, sizes) if late and second else ("", "")
    fixed = first if late or not first else layer.add("Add", first, second)
    one = layer.builder.number(1)

    def reset_product(reset: str, hidden: str) -> str:
        if not late:
            return layer.add("MatMul", layer.add("Mul", reset, hidden), inner)
        value = layer.add("MatMul", hidden, inner)
        if inner_bias:
            value = layer.add("Add", value, inner_bias)
        return layer.add("Mul", reset, value)

    def run(inputs: str, states: Sequence[str]) -> list[str]:
        (hidden,) = states
        to_outer, to_inner = layer.builder.split(inputs, 1, sizes)
        gates = layer.add("Add", to_outer, layer.add("MatMul", hidden, outer))
        if outer_bias:
            gates = layer.add("Add", gates, outer_bias)
        update, reset = (layer.gate(f, part) for part in layer.parts(gates, 1, 2))
        new = layer.gate_of_sum(g, layer.add("Add", to_inner, reset_product(reset, hidden)))
        kept = layer.add("Mul", update, hidden)
        return [layer.add("Add", layer.add("Mul", layer.add("Sub", one, update), new), kept)]

    return run, [layer.state(5)], fixed


def _rnn(layer: _Layer, functions: Sequence[Activation]) -> tuple[Cell, list[str], str]:
    weight = layer.weight(2)

    def run(inputs: str, states: Sequence[str]) -> list[str]:
        gate = layer.add("Add", inputs, layer.add("MatMul", states[0], weight))
        return [layer.gate_of_sum(functions[0], gate)]

    return run, [layer.state(5)], _bias(layer)


_PREPARE = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}


def _outputs(
    layer: _Layer, sequences: Sequence[Sequence[str]], last: Sequence[Sequence[str]]
) -> list[str]:
    """The outputs of the node: the hidden states of each position, then the last states."""
    builder = layer.builder
    names = (*layer.node.output, "", "", "")[:3]
    values = [""] * 3
    if names[0]:
        every = [layer.length, 1, layer.batch, layer.hidden]
        joined = (builder.concat(hidden, 0) for hidden in sequences)
        values[0] = builder.concat([builder.reshape(value, every) for value in joined], 1)
    shape = [1, layer.batch, layer.hidden]
    for index, states in enumerate(zip(*last, strict=True), start=1):
        if names[index]:
            values[index] = builder.concat([builder.reshape(state, shape) for state in states], 0)
    return values
