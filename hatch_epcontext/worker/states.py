"""The states of recurrent models: inputs to which the app feeds an output of the frame before."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx

from hatch_epcontext.errors import Key, Kind, ModelError, Problem
from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.worker.source import unknown_name

_LAYERS: Mapping[str, Mapping[int, int]] = {
    "LSTM": {5: 1, 6: 2},
    "DynamicQuantizeLSTM": {5: 1, 6: 2},
    "GRU": {5: 1},
    "RNN": {5: 1},
}
"""For each layer the inputs with its first states, and the outputs with its last ones."""

_CACHES: Mapping[str, Sequence[int]] = {
    "Attention": (4, 5),
    "GroupQueryAttention": (3, 4),
    "MultiHeadAttention": (6, 7),
}
"""For each attention the inputs with the keys and values of earlier frames. The app moves on in them, so that
fed back at one position they are no states."""

_UPDATES: Mapping[str, Sequence[int]] = {
    "ScatterElements": (0, 2),
    "ScatterND": (0, 2),
    "TensorScatter": (0, 1),
    "Where": (1, 2),
}
"""Operators whose results have values of these operands, and no others."""

_GATES = frozenset({"Sigmoid", "HardSigmoid"})

_STATES = frozenset(
    {*("state", "states", "hidden", "cell", "memory", "cache", "buffer", "h", "c", "hx", "cx")}
    | {*("count", "counter", "mean", "step")}
)
"""Words in the names of states."""

_TIMES = frozenset(
    {*("in", "out", "input", "output", "prev", "previous", "last", "next", "new", "init")}
    | {*("initial", "first", "past", "present", "n", "t", "0")}
)
"""Words in names for a state before a frame, or after it."""

_ACTIVATIONS = ("hidden", "states")
"""What the layers of a transformer pass on is called so, though it is no state."""


def state_pairs(model: onnx.ModelProto, configured: Mapping[str, str], key: Key) -> dict[str, str]:
    """The states of ``model``: inputs, each with the output that is its next value.

    ``configured``: those of the user, at ``key``; without any, the states of LSTM, GRU and RNN layers, or
    pairs with such names: ``"state"`` and ``"stateN"``. Raises ModelError when one of these is invalid.
    """
    inputs = {tensor.name: tensor for tensor in graph.input_facts(model.graph)}
    outputs = {tensor.name: tensor for tensor in graph.output_facts(model.graph)}
    ModelError.check(_check(configured, inputs, outputs, key))
    if configured:
        return dict(configured)
    pairs: dict[str, str] = {}
    caches = _values_of(model.graph, _CACHES)
    called = _called_states((name for name in inputs if name not in caches), outputs)
    for first, last in itertools.chain(_guesses(model.graph), called):
        if first in inputs and last in outputs and _fit(inputs[first], outputs[last]):
            pairs.setdefault(first, last)
    # An app does not feed one output back to two inputs.
    return pairs if len(set(pairs.values())) == len(pairs) else {}


def _check(
    configured: Mapping[str, str],
    inputs: Mapping[str, TensorFacts],
    outputs: Mapping[str, TensorFacts],
    key: Key,
) -> Iterator[Problem]:
    for first, last in configured.items():
        if first not in inputs:
            yield unknown_name(key / first, first, "input", list(inputs))
        elif last not in outputs:
            yield unknown_name(key / first, last, "output", list(outputs))
        elif not _fit(inputs[first], outputs[last]):
            message = (
                f"the output {last!r} ({_describe(outputs[last])}) cannot be fed to the input {first!r} "
                f"({_describe(inputs[first])})."
            )
            yield Problem.at(key / first, Kind.VALUE_MISMATCH, message)


def _describe(tensor: TensorFacts) -> str:
    return f"{tensor.dtype} {tensor.shape_text}".rstrip()


def _fit(first: TensorFacts, last: TensorFacts) -> bool:
    """Whether the output ``last`` can be the input ``first``, as far as their shapes are known."""
    return (
        first.dtype == last.dtype
        and (None in (first.shape, last.shape) or len(first.sizes) == len(last.sizes))
        and all(
            a == b or not (isinstance(a, int) and isinstance(b, int))
            for a, b in zip(first.sizes, last.sizes, strict=False)
        )
    )


def _guesses(main: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """The first and last values of layers' states, traced back to inputs and on to outputs."""
    onward, back = _moves(main)
    inputs = [value.name for value in main.input]
    outputs = [value.name for value in main.output]
    for node in graph.nodes(main):
        for first, last in _LAYERS.get(node.op_type, {}).items():
            if len(node.input) <= first or len(node.output) <= last:
                continue
            begins = _reached([node.input[first]], back)
            # An exporter may use the last of all hidden states instead of the layer's own output.
            ends = _reached([node.output[last]], onward)
            if last == 1 and not ends.intersection(outputs):
                ends |= _reached([node.output[0]], onward)
            yield from ((b, e) for b in inputs if b in begins for e in outputs if e in ends)
    makers = {name: node for node in main.node for name in node.output}
    for node in main.node:
        if kept := list(_kept(node, makers)):
            begins, ends = _reached(kept, back), _reached(node.output, onward)
            yield from ((b, e) for b in inputs if b in begins for e in outputs if e in ends)


def _kept(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto]) -> Iterator[str]:
    """The value that a gate of ``node`` keeps, if ``node`` adds two gated values: the cell of a layer that is
    written as single operators.
    """
    parts = [makers.get(name) for name in node.input]
    if node.op_type == "Add" and all(part is not None and part.op_type == "Mul" for part in parts):
        for part in filter(None, parts):
            gates = [makers.get(name) for name in part.input]
            if any(gate is not None and gate.op_type in _GATES for gate in gates):
                yield from part.input


def _called_states(inputs: Iterable[str], outputs: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Inputs and outputs with names of a state, for layers that are written as single operators."""
    behind = {_stem(output): output for output in outputs}
    for name in inputs:
        stem = _stem(name)
        if stem in behind and stem != _ACTIVATIONS and not _STATES.isdisjoint(stem):
            yield name, behind[stem]


def _stem(name: str) -> tuple[str, ...]:
    """The words of ``name`` without those for before and after, also in ``"hn"`` and ``"state_in"``."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
    lower = (word.lower() for word in words)
    return tuple({"hn": "h", "cn": "c"}.get(word, word) for word in lower if word not in _TIMES)


def recomputed(main: onnx.GraphProto, states: Mapping[str, str]) -> set[str]:
    """The inputs of the ``states`` of which nodes compute a next value. What overwrites or moves them, as the
    rows of a cache, adds up no rounding.
    """
    scope = Scope(main, nested=True)
    back = dict(_moves(main)[1])
    for node in scope.nodes:
        if node.op_type in _UPDATES and graph.text(node, "reduction") in ("", "none"):
            back[node.output[0]] = [node.input[index] for index in _UPDATES[node.op_type]]
    origins = (name for name in _reached(states.values(), back) if name not in back)
    computed = {name for name in origins if scope.maker(name) is not None}
    return states.keys() & set(scope.needed_values(computed))


def first_states(main: onnx.GraphProto) -> set[str]:
    """The values from which the first states of layers in ``main`` and its inner graphs come."""
    return _values_of(main, _LAYERS)


def _values_of(main: onnx.GraphProto, operands: Mapping[str, Iterable[int]]) -> set[str]:
    """The values from which these ``operands`` of operators in ``main`` and its inner graphs come."""
    values = (
        graph.operand(node, index)
        for node in graph.nodes(main)
        for index in operands.get(node.op_type, ())
    )
    return _reached(values, _moves(main)[1])


_Moves = Mapping[str, Sequence[str]]


def _moves(main: onnx.GraphProto) -> tuple[_Moves, _Moves]:
    """For each value, those to which nodes pass it unchanged, and those from which it comes unchanged."""
    onward, back = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for node in graph.nodes(main):
        pairs: list[tuple[str, str]] = []
        if node.op_type == "If":
            for branch in graph.inner_graphs(node):
                pairs += zip((value.name for value in branch.output), node.output, strict=False)
        elif node.op_type in operators.MOVES | {"Cast", "Concat"}:
            data = node.input if node.op_type == "Concat" else node.input[:1]
            pairs += itertools.product(data, node.output)
        for origin, to in pairs:
            onward[origin].append(to)
            back[to].append(origin)
    return onward, back


def _reached(names: Iterable[str], moves: _Moves) -> set[str]:
    """``names``, and all values that ``moves`` lead to from there."""
    reached, waiting = set[str](), list(names)
    while waiting:
        if (name := waiting.pop()) not in reached:
            reached.add(name)
            waiting += moves.get(name, ())
    return reached
