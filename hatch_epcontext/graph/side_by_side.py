"""Integer operators, and the float operators with which `dequantize` replaces them, in one graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import copy_of
from hatch_epcontext.graph.scope import Scope

_ADDED = "hatch_epcontext.float."
"""The prefix of the names of added nodes and values."""

_ROUNDING = frozenset({"DynamicQuantizeLinear", "com.microsoft.DynamicQuantizeMatMul"})
"""Operators that round their first input to integers, with a measured scale."""


@dataclass(frozen=True)
class Undone:
    """A ``node`` of the source that was undone, and the names of its results in ``integers`` and ``floats``.

    ``step``: the result's step for one more in the sum of integers, to which an integer bias rounds; empty if
    it is unknown.
    """

    node: onnx.NodeProto
    integers: str
    floats: str
    step: str = ""


def add_floats(source: onnx.ModelProto, dequantized: onnx.ModelProto) -> tuple[Undone, ...]:
    """Add to ``source``, in place, the float operators of its copy ``dequantized``, made by `dequantize`.

    The results of both become outputs. The float operators read the values of ``source`` itself, rounded to
    its integers: so errors do not add up from layer to layer, and only float rounding and a step may differ.
    A recurrent layer rounds its state in each step, so both forms run one step, from a state whose rows all
    have the same range.
    """
    adding = _Adding(source)
    before = {node.SerializeToString() for node in source.graph.node}
    new = (node for node in dequantized.graph.node if node.SerializeToString() not in before)
    found = tuple(undone for node in new for undone in adding.add(node))
    main = source.graph
    stored = {tensor.name for tensor in main.initializer}
    main.initializer.extend(t for t in dequantized.graph.initializer if t.name not in stored)
    main.initializer.extend(adding.stored)
    outputs = {value.name for value in main.output}
    names = dict.fromkeys(n for each in found for n in (each.integers, each.floats, each.step) if n)
    main.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
    return found


class _Adding:
    """Adds nodes to ``source``; ``rounded``: values after they were quantized and dequantized."""

    def __init__(self, source: onnx.ModelProto) -> None:
        self.main = source.graph
        self.scope = Scope(source.graph)
        self.makers = {name: n for n in map(copy_of, self.main.node) for name in n.output if name}
        self.measured = {n.input[0] for n in self.main.node if graph.operator(n) in _ROUNDING}
        self.rounded: dict[str, str] = {}
        self.stored: list[onnx.TensorProto] = []
        self.count = 0

    def add(self, node: onnx.NodeProto) -> Iterator[Undone]:
        """Add ``node``, which is not in the source, and yield what it replaces."""
        replaced = {name: self.makers[name] for name in node.output if name in self.makers}
        for maker in replaced.values():
            if maker.op_type == "DynamicQuantizeLSTM":
                yield from self._add_step(maker, node)
                return
        names = {name: self._round(name) for name in node.input if name in self.measured}
        self._copy(node, names, {name: f"{_ADDED}{name}" for name in replaced})
        for name, maker in replaced.items():
            yield Undone(maker, name, f"{_ADDED}{name}", self._step(maker))

    def _step(self, maker: onnx.NodeProto) -> str:
        """The scale with which ``maker`` multiplies a sum of integers, if it does."""
        if maker.op_type != "Mul":
            return ""
        made = [name for name in maker.input if name in self.makers]
        scales = [name for name in made if self.makers[name].op_type != "Cast"]
        return scales[0] if len(scales) == 1 else ""

    def _add_step(self, integers: onnx.NodeProto, floats: onnx.NodeProto) -> Iterator[Undone]:
        """Add one step of a recurrent layer in both forms."""
        shape = self.scope.shape(integers.input[2])
        assert shape is not None, "only a layer whose weights are stored is undone"
        directions, size, _ = shape
        value = integers.input[0]
        first = self._make("Slice", value, *self._store([0], [1], [0]))
        batch = self._make("Slice", self._make("Shape", value), *self._store([1], [2]))
        before, after = self._store([directions], [size])
        sizes = self._make("Concat", before, batch, after, axis=0)
        (row,) = self._store(np.linspace(-1, 1, size, dtype=np.float32))
        state = self._make("Expand", row, sizes)
        kinds = []
        for node, kind, inputs in (
            (integers, "integers", (first, state)),
            (floats, "floats", (self._round(first), self._round(state))),
        ):
            names = {name: f"{_ADDED}{kind}.{name}" for name in node.output if name}
            new = self._copy(node, {}, names)
            # Without lengths, which are for all steps.
            given = [*new.input, *[""] * 6][: max(len(new.input), 6)]
            given[0], given[4], given[5] = inputs[0], "", inputs[1]
            # ONNX Runtime cannot convert shared weights to another integer type.
            new.input[:] = [self._own(name) for name in given]
            kinds.append(names)
        of_integers, of_floats = kinds
        for name in of_integers.keys() & of_floats:
            yield Undone(integers, of_integers[name], of_floats[name])

    def _copy(
        self, node: onnx.NodeProto, inputs: Mapping[str, str], outputs: Mapping[str, str]
    ) -> onnx.NodeProto:
        new = copy_of(node)
        new.name = self._fresh(node.op_type)
        new.input[:] = [inputs.get(name, name) for name in node.input]
        new.output[:] = [outputs.get(name, name) for name in node.output]
        self.main.node.append(new)
        return self.main.node[-1]

    def _round(self, value: str) -> str:
        """``value``, quantized as in the source and dequantized."""
        if value not in self.rounded:
            integers = [self._fresh(each) for each in ("quantized", "scale", "zero_point")]
            self.main.node.append(helper.make_node("DynamicQuantizeLinear", [value], integers))
            self.rounded[value] = self._make("DequantizeLinear", *integers)
        return self.rounded[value]

    def _make(self, op: str, *inputs: str, **attributes: Any) -> str:
        result = self._fresh(op)
        self.main.node.append(helper.make_node(op, inputs, [result], **attributes))
        return result

    def _store(self, *values: Any) -> list[str]:
        arrays = [np.asarray(each) for each in values]
        tensors = [numpy_helper.from_array(each, self._fresh("stored")) for each in arrays]
        self.stored += tensors
        return [tensor.name for tensor in tensors]

    def _own(self, name: str) -> str:
        """A copy of a stored tensor; other values themselves."""
        array = self.scope.constant(name) if name else None
        return name if array is None else self._store(array)[0]

    def _fresh(self, name: str) -> str:
        self.count += 1
        return f"{_ADDED}{name}.{self.count}"
