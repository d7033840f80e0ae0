"""Whether the rows of a batch are independent: a proof by the graph, for any number of rows.

The batch is followed from the inputs to the outputs. What joins rows, depends on the position of a row or on
how many there are, or is not known, is mixed; only what decides sizes may depend on the number of rows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
import onnx.inliner
from onnx import helper

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.batch.rules import MIXED, RULES, SAME_TYPE, Batch, Call
from hatch_epcontext.graph.batch.sizes import ROWS, Numbers, compute
from hatch_epcontext.graph.dtypes import Arrays
from hatch_epcontext.graph.scope import Sizes
from hatch_epcontext.graph.values.linear import INVALID

_MAX_NUMBERS = 2**10
"""The most numbers in a value that decides sizes."""


def batch_of_outputs(
    model: onnx.ModelProto,
    shapes: Mapping[str, Sequence[int]],
    axes: Mapping[str, int],
    constants: Arrays,
) -> dict[str, int] | None:
    """The axis of the batch in each output of ``model``; None if it is not proven that rows are independent.

    ``axes``: that of the batch in each input; ``shapes``: of the inputs, for any number of rows.
    ``constants``: the values of other inputs.
    """
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    follower = _Follower(model)
    for value in graph.inputs(model.graph):
        name, tensor = value.name, value.type.tensor_type
        if name in constants:
            follower.store(name, onnx.numpy_helper.from_array(constants[name]))
        elif name in axes:
            shape = [*shapes[name]]
            shape[axes[name]] = ROWS
            follower.types[name] = helper.make_tensor_type_proto(tensor.elem_type, shape)
            follower.batches[name] = Batch(axes[name])
        else:
            follower.batches[name] = MIXED
    follower.follow(model.graph)
    result = {}
    for value in model.graph.output:
        batch, sizes = follower.batches.get(value.name, MIXED), follower.sizes(value.name)
        # All of a row is together, or outputs could not be joined.
        if batch is MIXED or not sizes or sizes[batch.axis] != ROWS * batch.inner:
            return None
        result[value.name] = batch.axis
    return result


class _Follower:
    """Follows the batch. A value that is not in ``batches`` has no rows; ``numbers`` are known values."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.types: dict[str, onnx.TypeProto] = {}
        self.batches: dict[str, Batch] = {}
        self.numbers: dict[str, Numbers] = {}
        self._sizes: dict[str, Sizes | None] = {}
        self._opsets, self._ir_version = [*model.opset_import], model.ir_version
        self._opset = graph.opset(model)

    def sizes(self, name: str) -> Sizes | None:
        """The shape of a value with `ROWS` rows; None if its rank is unknown."""
        if name not in self._sizes and name in self.types:
            self._sizes[name] = graph.sizes(self.types[name])
        return self._sizes.get(name)

    def store(self, name: str, tensor: onnx.TensorProto) -> None:
        """Add a value that is stored."""
        self.types[name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        if math.prod(tensor.dims) <= _MAX_NUMBERS:
            array = graph.array_of(tensor)
            if array is not None and array.dtype.kind in "iufb":
                self.numbers[name] = Numbers.of(array)

    def follow(self, body: onnx.GraphProto) -> None:
        """Add the values of ``body``."""
        for tensor in body.initializer:
            self.store(tensor.name, tensor)
        for node in body.node:
            outputs = [*filter(None, node.output)]
            try:
                batches = self._results(node)
            except Exception:
                # Invalid nodes raise many types; opening a session reports the reason.
                batches = dict.fromkeys(outputs, MIXED)
            for name in outputs:
                batch = batches.get(name)
                if batch is not MIXED and not self._is_consistent(name, batch):
                    batch = MIXED
                if batch is not None:
                    self.batches[name] = batch

    def _is_consistent(self, name: str, batch: Batch | None) -> bool:
        """Whether no other size of a value depends on the number of rows."""
        sizes = self.sizes(name)
        if batch is None:
            return not any(size and size >= ROWS for size in sizes or ())
        if sizes is None or not 0 <= batch.axis < len(sizes):
            return False
        own = sizes[batch.axis]
        others = sizes[: batch.axis] + sizes[batch.axis + 1 :]
        is_own = own is not None and own > 0 and own % (ROWS * batch.inner) == 0
        return is_own and not any(size and size >= ROWS for size in others)

    def _results(self, node: onnx.NodeProto) -> Mapping[str, Batch]:
        """The batches of the results of ``node``, whose types and numbers are added."""
        if (tensor := graph.constant_tensor(node)) is not None:
            self.store(node.output[0], tensor)
            return {}
        inner = {"If": self._branch, "Loop": self._loop, "Scan": self._scan}
        if (follow := inner.get(graph.operator(node))) is not None:
            return follow(node)
        with contextlib.suppress(Exception):
            self._infer(node)
        if (numbers := self._compute(node)) is not None:
            pairs = [*zip(node.output, numbers, strict=True)]
            self.numbers.update(pairs)
            return {name: MIXED for name, result in pairs if not result.is_fixed}
        return self._by_rule(node)

    def _by_rule(self, node: onnx.NodeProto) -> Mapping[str, Batch]:
        operator = graph.operator(node)
        batches = [self.batches.get(name) for name in node.input]
        sizes = [
            number
            for number in operators.SIZES_FROM.get(operator, ())
            if number < len(batches) and batches[number] is MIXED
            if node.input[number] in self.numbers
        ]
        for number in sizes:
            batches[number] = None
        if MIXED in batches or graph.is_random(node):
            return dict.fromkeys(node.output, MIXED)
        if not any(batches) and not sizes:
            return {}
        shapes, results = self._shapes(node.input), self._shapes(node.output)
        numbers = [self.numbers.get(name) for name in node.input]
        left = RULES[operator](Call(node, self._opset, batches, shapes, numbers, results))
        if isinstance(left, Batch):
            return dict.fromkeys(node.output, left)
        return dict(zip(node.output, left, strict=False))

    def _branch(self, node: onnx.NodeProto) -> Mapping[str, Batch]:
        """The results of an If: of the branch that runs, if that is known, or of both, which must agree."""
        condition = node.input[0]
        if condition in self.batches:
            return dict.fromkeys(node.output, MIXED)
        branches: tuple[str, ...] = ("else_branch", "then_branch")
        if (known := self.numbers.get(condition)) is not None:
            branches = branches[bool(known.fixed) :][:1]
        bodies = [graph.attribute(node, branch, None) for branch in branches]
        for body in bodies:
            self.follow(body)
        results: dict[str, Batch] = {}
        for name, *values in zip(node.output, *(body.output for body in bodies), strict=True):
            batches = {self.batches.get(value.name) for value in values}
            sizes = {self.sizes(value.name) for value in values}
            if len(sizes) == 1 and None not in sizes:
                self.types[name] = self.types[values[0].name]
            if len(values) == 1 and values[0].name in self.numbers:
                self.numbers[name] = self.numbers[values[0].name]
            if batches != {None}:
                results[name] = MIXED if len(batches) > 1 else self.batches[values[0].name]
        return results

    def _loop(self, node: onnx.NodeProto) -> Mapping[str, Batch]:
        """The results of a Loop, which runs an unknown number of times."""
        body = graph.attribute(node, "body", None)
        counter, condition, *states = (value.name for value in body.input)
        goes_on, *outputs = (value.name for value in body.output)
        self.types[counter] = helper.make_tensor_type_proto(onnx.TensorProto.INT64, ())
        self.types[condition] = helper.make_tensor_type_proto(onnx.TensorProto.BOOL, ())
        for first, state in zip(node.input[2:], states, strict=True):
            self._copy(first, state)
        self.follow(body)
        if any(name in self.batches for name in (*node.input[:2], goes_on)):
            return dict.fromkeys(node.output, MIXED)
        return self._repeated(node, states, outputs, [0] * len(outputs), None)

    def _scan(self, node: onnx.NodeProto) -> Mapping[str, Batch]:
        """The results of a Scan."""
        body, count = graph.attribute(node, "body", None), graph.number(node, "num_scan_inputs", 0)
        names, outputs = ([value.name for value in values] for values in (body.input, body.output))
        states, length = names[: len(names) - count], None
        for first, name in zip(node.input, names, strict=True):
            self._copy(first, name)
        axes = graph.attribute(node, "scan_input_axes", [0] * count)
        for name, axis in zip(names[len(states) :], axes, strict=True):
            length = self._take(name, axis)
        self.follow(body)
        axes = graph.attribute(node, "scan_output_axes", [0] * (len(outputs) - len(states)))
        return self._repeated(node, states, outputs, axes, length)

    def _repeated(
        self,
        node: onnx.NodeProto,
        states: Sequence[str],
        outputs: Sequence[str],
        axes: Sequence[int],
        length: int | None,
    ) -> Mapping[str, Batch]:
        """The results of a ``node`` whose body has the ``outputs``: first the ``states``, which must stay as
        they were, then parts along ``axes``.
        """
        for state, last in zip(states, outputs, strict=False):
            is_kept = self.batches.get(state) == self.batches.get(last)
            if not is_kept or self._shapes([state]) != self._shapes([last]):
                return dict.fromkeys(node.output, MIXED)
        for number, (name, output) in enumerate(zip(node.output, outputs, strict=True)):
            self._copy(output, name)
            if name and number >= len(states):
                self._insert(name, axes[number - len(states)], length)
        return {name: self.batches[name] for name in node.output if name in self.batches}

    def _copy(self, value: str, name: str) -> None:
        """Give ``name`` the type and the batch of ``value``."""
        if name:
            self.types[name] = self.types[value]
            if (batch := self.batches.get(value)) is not None:
                self.batches[name] = batch

    def _take(self, name: str, axis: int) -> int | None:
        """Let ``name`` be one of its parts along ``axis``; return how many there are."""
        (sizes,), batch = self._shapes([name]), self.batches.get(name)
        axis %= len(sizes)
        self._set_sizes(name, sizes[:axis] + sizes[axis + 1 :])
        if batch is not None and batch is not MIXED:
            is_axis = batch.axis == axis
            shifted = replace(batch, axis=batch.axis - (axis < batch.axis))
            self.batches[name] = MIXED if is_axis else shifted
        return sizes[axis]

    def _insert(self, name: str, axis: int, size: int | None) -> None:
        """Let ``name`` be several of it along the new ``axis``."""
        (sizes,), batch = self._shapes([name]), self.batches.get(name)
        axis %= len(sizes) + 1
        self._set_sizes(name, (*sizes[:axis], size, *sizes[axis:]))
        if batch is not None and batch is not MIXED:
            self.batches[name] = replace(batch, axis=batch.axis + (axis <= batch.axis))

    def _set_sizes(self, name: str, sizes: Sizes) -> None:
        elem_type = self.types[name].tensor_type.elem_type
        self._sizes[name], self.types[name] = sizes, helper.make_tensor_type_proto(elem_type, sizes)

    def _shapes(self, names: Sequence[str]) -> list[Sizes]:
        """The shapes of values. Raises ValueError if a rank is unknown."""
        shapes = [self.sizes(name) if name else () for name in names]
        if None in shapes:
            raise ValueError("an unknown rank")
        return [shape for shape in shapes if shape is not None]

    def _infer(self, node: onnx.NodeProto) -> None:
        """Add the types of the results of ``node``, as far as onnx infers them."""
        if (same := SAME_TYPE.get(graph.operator(node))) is not None:
            for number, name in enumerate(node.output):
                if name and number in same:
                    self.types[name] = self.types[node.input[0]]
            return
        if node.domain not in graph.STANDARD:
            return
        schema = onnx.defs.get_schema(node.op_type, self._opset)
        names = [name for name in node.input if name]
        known = {
            name: onnx.numpy_helper.from_array(self.numbers[name].of_rows, name)
            for name in names
            if name in self.numbers
        }
        types = {name: self.types[name] for name in names}
        self.types |= onnx.shape_inference.infer_node_outputs(
            schema, node, types, known, opset_imports=self._opsets, ir_version=self._ir_version
        )

    def _compute(self, node: onnx.NodeProto) -> list[Numbers] | None:
        """The results of ``node``, if they are known numbers."""
        if graph.operator(node) in operators.SHAPES:
            return self._measure(node)
        operands = {name: self.numbers[name] for name in node.input if name in self.numbers}
        if not operands or operands.keys() != {*filter(None, node.input)}:
            return None
        for shape in self._shapes(node.output):
            if None in shape or math.prod(size or 0 for size in shape) > _MAX_NUMBERS:
                return None
        try:
            return compute(node, operands, self._opset)
        except INVALID:
            return None

    def _measure(self, node: onnx.NodeProto) -> list[Numbers] | None:
        """The result of a Shape or a Size."""
        batch, sizes = self.batches.get(node.input[0]), self.sizes(node.input[0])
        if node.input[0] in self.numbers:
            batch = None
        if batch is MIXED or sizes is None or None in sizes:
            return None
        fixed = np.array(sizes, np.int64)
        per_row = np.zeros_like(fixed)
        if batch is not None:
            per_row[batch.axis], fixed[batch.axis] = fixed[batch.axis] // ROWS, 0
        if node.op_type == "Size":
            # Either is the size of an axis.
            count, none = np.array((fixed + per_row).prod()), np.array(0)
            return [Numbers(count, none) if batch is None else Numbers(none, count)]
        part = slice(graph.number(node, "start", 0), graph.attribute(node, "end", None))
        return [Numbers(fixed[part], per_row[part])]
