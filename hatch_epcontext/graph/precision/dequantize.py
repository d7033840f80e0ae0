"""Undo the quantization of a model: integer arithmetic becomes float arithmetic, with dequantized weights.

Dynamic quantization measures each activation when the model runs, which NPUs cannot do. What it computes is
``(q - zero_point) * scale`` of integers, and so an approximation of a float operator, which takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.limits import DYNAMIC_QUANTIZATION

Floats = np.ndarray[Any, np.dtype[np.float32]]

_MICROSOFT = "com.microsoft"

_QUANTIZATION = {*DYNAMIC_QUANTIZATION, "QuantizeLinear", "DequantizeLinear"}

_MOVING = frozenset(
    {"Gather", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Slice", "Identity", "Flatten"}
)
"""Operators that only move the values of their first input."""

_CLIP_WITH_INPUTS = 11
"""The opset since which Clip has its bounds as inputs."""

_SAME_NUMBERS = _MOVING | {"MaxPool", "Split"}
"""Operators that quantizers apply to integers, because they give the same with floats."""


def dequantize(model: onnx.ModelProto, *, static: bool = False) -> int:
    """Undo dynamic quantization in ``model``, in place, and return the number of operators undone.

    Stored weights that are only dequantized become floats too, unless the model also has static quantization
    (QuantizeLinear), which NPUs take as it is; with ``static`` that is undone as well. A node whose
    surroundings are not those of a known quantizer stays as it is. All tensors must have their values.
    """
    before = _count(model)
    rewriter = _Rewriter.of(model)
    rewriter.undo_dynamic()
    if static:
        rewriter.undo_pairs()
    if static or not any(node.op_type == "QuantizeLinear" for node in model.graph.node):
        rewriter.undo_stored()
    rewriter.finish()
    return before - _count(model)


def _count(model: onnx.ModelProto) -> int:
    return sum(graph.operator(node) in _QUANTIZATION for node in model.graph.node)


@dataclass(frozen=True)
class _Quantized:
    """An activation as integers: ``real`` are its floats, and ``scale`` the name of their scale."""

    real: str
    scale: str
    zero_point: str


@dataclass(frozen=True)
class _Scale:
    """A number that is ``factor`` times the scale ``scale``, which is known only when the model runs.

    Without a name it is ``factor`` alone.
    """

    scale: str
    factor: Floats


@dataclass(frozen=True)
class _Sum:
    """The integers of a product of an activation with ``weight`` (float, not scaled): real / ``scale``.

    ``bias`` is added to it after it is scaled, with the factor ``biased``.
    """

    node: onnx.NodeProto
    real: str
    scale: str
    weight: Floats
    bias: Floats | None = None
    biased: Floats | None = None


@dataclass(frozen=True)
class _Bias:
    """Integers that are ``value`` divided by ``by``, rounded."""

    value: Floats
    by: _Scale


_Known = _Quantized | _Scale | _Sum | _Bias


class _Stored:
    """The stored tensors of a graph by name, as floats, which are made when they are needed."""

    def __init__(self, tensors: Mapping[str, onnx.TensorProto]) -> None:
        self._tensors = tensors

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Floats:
        return np.asarray(numpy_helper.to_array(self._tensors[name]), np.float32)

    def get(self, name: str) -> Floats | None:
        """The tensor ``name``, None if it is not stored, or is not of numbers."""
        tensor = self._tensors.get(name)
        return None if tensor is None or tensor.data_type not in _NUMBERS else self[name]

    def limits(self, name: str) -> tuple[int, int] | None:
        """The smallest and the largest integer of the dtype of the tensor ``name``; None if it has none."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.data_type not in _NUMBERS - {TensorProto.FLOAT}:
            return None
        info = np.iinfo(helper.tensor_dtype_to_np_dtype(tensor.data_type))
        return int(info.min), int(info.max)


_NUMBERS = frozenset(
    {
        TensorProto.FLOAT,
        TensorProto.INT8,
        TensorProto.UINT8,
        TensorProto.INT16,
        TensorProto.UINT16,
        TensorProto.INT32,
    }
)
"""The element types of what a quantizer stores, and casts to."""


@dataclass
class _Rewriter:
    """What is known of the values of the main graph of ``model`` while its nodes are replaced."""

    model: onnx.ModelProto
    stored: _Stored
    known: dict[str, _Known] = field(default_factory=dict)
    makers: Mapping[str, onnx.NodeProto] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    @staticmethod
    def of(model: onnx.ModelProto) -> _Rewriter:
        stored = {each.name: each for each in model.graph.initializer}
        for node in model.graph.node:
            for attribute in node.attribute if node.op_type == "Constant" else ():
                if attribute.name == "value":
                    stored[node.output[0]] = attribute.t
        taken = {name for node in graph.nodes(model.graph) for name in (node.name, *node.output)}
        taken |= {*stored, *(value.name for value in model.graph.input)}
        return _Rewriter(model, _Stored(stored), _taken=taken)

    def undo_dynamic(self) -> None:
        """Replace the operators of dynamic quantization, where the scales of their results are known."""
        rules: dict[str, Callable[[onnx.NodeProto], list[onnx.NodeProto] | None]] = {
            "DynamicQuantizeLinear": self._quantize,
            "ConvInteger": self._product,
            "MatMulInteger": self._product,
            "Cast": self._same,
            "Floor": self._same,
            "Round": self._same,
            "Reshape": self._same,
            "Mul": self._multiply,
            "Div": self._divide,
            "Add": self._add,
            "DequantizeLinear": self._dequantize,
            f"{_MICROSOFT}.DynamicQuantizeMatMul": self._quantize_and_multiply,
            f"{_MICROSOFT}.MatMulIntegerToFloat": self._multiply_to_float,
            f"{_MICROSOFT}.DynamicQuantizeLSTM": self._lstm,
            f"{_MICROSOFT}.QAttention": self._attention,
        }
        self.makers = self._makers()
        nodes: list[onnx.NodeProto] = []
        for node in self.model.graph.node:
            rule = rules.get(graph.operator(node))
            made = rule(node) if rule else None
            if made is None and graph.operator(node) in _SAME_NUMBERS:
                made = self._move(node)
            nodes += [node] if made is None else made
        self._replace(nodes)

    def undo_pairs(self) -> None:
        """Connect what goes into QuantizeLinear with what comes out of DequantizeLinear behind it.

        The range of the integers stays, as a Clip: quantizers leave out a Relu that it replaces.
        """
        floats: dict[str, str] = {}
        nodes: list[onnx.NodeProto] = []
        for node in self.model.graph.node:
            if node.op_type == "QuantizeLinear" and (clip := self._clip(node)) is not None:
                floats[node.output[0]] = clip.output[0]
                nodes.append(clip)
            if node.op_type == "DequantizeLinear" and node.input[0] in floats:
                nodes.append(helper.make_node("Identity", [floats[node.input[0]]], node.output))
                continue
            data = node.input if node.op_type == "Concat" else node.input[:1]
            same = node.op_type in (*_SAME_NUMBERS, "Concat", "Resize") and not node.domain
            if same and data and all(name in floats for name in data):
                # The same with floats, beside the node itself, which goes if nobody reads it any more.
                copied = onnx.NodeProto()
                copied.CopyFrom(node)
                copied.input[: len(data)] = [floats[name] for name in data]
                copied.output[:] = [self._name(f"{name}_floats") for name in node.output]
                floats |= dict(zip(node.output, copied.output, strict=True))
                copied.name = self._name(f"{node.name}_floats")
                nodes.append(copied)
            nodes.append(node)
        self._replace(nodes)

    def _clip(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """The Clip to the range of a QuantizeLinear; None if that is not one for all values."""
        value, scale, zero = (*node.input, "")[:3]
        factor, offset = self.stored.get(scale), self.stored.get(zero)
        limits = self.stored.limits(zero) if zero else (0, 255)
        if factor is None or factor.size != 1 or limits is None:
            return None
        if zero and (offset is None or offset.size != 1):
            return None
        middle = 0.0 if offset is None else float(offset.reshape(()))
        low, high = ((limit - middle) * float(factor.reshape(())) for limit in limits)
        output = self._name(f"{node.output[0]}_floats")
        name = self._name(f"{node.name}_range")
        if self.opset < _CLIP_WITH_INPUTS:
            return helper.make_node("Clip", [value], [output], name, min=low, max=high)
        bounds = [
            self._store(f"{output}_{end}", np.float32(each))
            for end, each in (("min", low), ("max", high))
        ]
        return helper.make_node("Clip", [value, *bounds], [output], name)

    @property
    def opset(self) -> int:
        """The version of ONNX's own operators."""
        return next((each.version for each in self.model.opset_import if not each.domain), 1)

    def undo_stored(self) -> None:
        """Store the floats of weights that are only dequantized, perhaps after they are moved."""
        self.makers = self._makers()
        nodes: list[onnx.NodeProto] = []
        for node in self.model.graph.node:
            made = self._stored_floats(node) if node.op_type == "DequantizeLinear" else None
            # Nodes that only the integers go through are removed at the end.
            nodes += made or [node]
        self._replace(nodes)

    def _stored_floats(self, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        """What makes the result of a DequantizeLinear if its integers are stored; None if they are not."""
        path = self._to_stored(node.input[0])
        floats = self._floats(node, path[1], moved=bool(path[0])) if path else None
        if path is None or floats is None:
            return None
        made, current = self._moved(path[0], self._store(f"{path[1]}_dequantized", floats))
        return [*made, helper.make_node("Identity", [current], node.output, node.name)]

    def _moved(
        self, moves: Sequence[onnx.NodeProto], first: str
    ) -> tuple[list[onnx.NodeProto], str]:
        """Copies of the nodes ``moves``, the last one first, which move ``first``; and their result."""
        made = []
        for move in reversed(moves):
            copied = onnx.NodeProto()
            copied.CopyFrom(move)
            copied.input[0], copied.name = first, self._name(f"{move.name}_dequantized")
            first = copied.output[0] = self._name(f"{move.output[0]}_dequantized")
            made.append(copied)
        return made, first

    def _makers(self) -> Mapping[str, onnx.NodeProto]:
        return {name: node for node in self.model.graph.node for name in node.output}

    def finish(self) -> None:
        """Remove the nodes and the weights that nobody reads any more."""
        main = self.model.graph
        used = {value.name for value in main.output}
        kept: list[onnx.NodeProto] = []
        for node in reversed(main.node):
            if used.intersection(node.output):
                kept.append(node)
                used.update(graph.read_by(node))
        self._replace(kept[::-1])
        _keep(main.initializer, lambda each: each.name in used)
        made = {name for node in main.node for name in node.output}
        _keep(main.value_info, lambda each: each.name in made)

    # The rules of dynamic quantization: what a node is replaced with, None if it stays.

    def _quantize(self, node: onnx.NodeProto) -> None:
        quantized, scale, zero_point = node.output
        self.known[quantized] = _Quantized(node.input[0], scale, zero_point)
        self.known[scale] = _Scale(scale, np.ones((), np.float32))

    def _move(self, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        """A copy of ``node`` for the floats of quantized integers, beside the node itself."""
        known = self.known.get(node.input[0]) if node.input else None
        if not isinstance(known, _Quantized):
            return None
        copied = onnx.NodeProto()
        copied.CopyFrom(node)
        copied.input[0], copied.name = known.real, self._name(f"{node.name}_dequantized")
        copied.output[:] = [self._name(f"{name}_dequantized") for name in node.output]
        for name, real in zip(node.output, copied.output, strict=True):
            self.known[name] = replace(known, real=real)
        return [copied, node]

    def _dequantize(self, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        known = self.known.get(node.input[0])
        if not isinstance(known, _Quantized):
            return None
        if list(node.input[1:]) != [known.scale, known.zero_point]:
            return None
        return [helper.make_node("Identity", [known.real], node.output, node.name)]

    def _product(self, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        left, right, left_zero, right_zero = (*node.input, "", "")[:4]
        if (weight := self.stored.get(right)) is None:
            return None
        # The zero point of a convolution is that of each output channel.
        channels = weight.ndim if node.op_type == "ConvInteger" else None
        zero = self._zero_point(right_zero, weight, channels)
        known = self.known.get(left)
        made: list[onnx.NodeProto] = []
        if not isinstance(known, _Quantized) and (path := self._to_stored(left)):
            # Rows of a table that is stored as integers, which have a stored scale.
            offset = self.stored.get(left_zero)
            if offset is not None and offset.size == 1:
                table = self._store(f"{path[1]}_floats", self.stored[path[1]] - offset.reshape(()))
                made, real = self._moved(path[0], table)
                known = _Quantized(real, "", left_zero)
        if isinstance(known, _Quantized) and left_zero == known.zero_point and zero is not None:
            self.known[node.output[0]] = _Sum(node, known.real, known.scale, weight - zero)
        return [*made, node]

    def _zero_point(self, name: str, weight: Floats, channels: int | None) -> Floats | None:
        if not name:
            return np.zeros((), np.float32)
        if (zero := self.stored.get(name)) is None:
            return None
        if zero.size > 1 and channels is not None:
            return zero.reshape(-1, *[1] * (channels - 1))
        # That of each column, or of each column of each matrix.
        return zero if zero.size == 1 or zero.ndim > 1 else zero[..., np.newaxis, :]

    def _same(self, node: onnx.NodeProto) -> None:
        if node.op_type == "Cast" and graph.attribute(node, "to", 0) not in _NUMBERS:
            return
        if (known := self.known.get(node.input[0])) is None or isinstance(known, _Quantized):
            return
        if node.op_type == "Reshape":
            if not isinstance(known, _Bias):
                return
            # Only sizes of 1 are added, which `_bias_of` does too.
            known = replace(known, value=known.value.reshape(-1))
        self.known[node.output[0]] = known

    def _multiply(self, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        for one, other in (node.input, reversed(node.input)):
            scale, product = self._scale_of(one), self.known.get(other)
            if scale is not None and isinstance(product, _Sum):
                return self._as_floats(product, scale, node)
            factor = self._scale_of(other)
            if scale and factor and not (scale.scale and factor.scale):
                name = scale.scale or factor.scale
                self.known[node.output[0]] = _Scale(name, scale.factor * factor.factor)
        return None

    def _scale_of(self, name: str) -> _Scale | None:
        """What is known of a scale: a stored one belongs to stored integers."""
        known, stored = self.known.get(name), self.stored.get(name)
        if isinstance(known, _Scale):
            return known
        return None if stored is None else _Scale("", stored)

    def _divide(self, node: onnx.NodeProto) -> None:
        value, by = self.stored.get(node.input[0]), self.known.get(node.input[1])
        if value is not None and isinstance(by, _Scale):
            self.known[node.output[0]] = _Bias(value, by)

    def _add(self, node: onnx.NodeProto) -> None:
        for one, other in (node.input, reversed(node.input)):
            product, bias = self.known.get(one), self.known.get(other)
            if not isinstance(product, _Sum) or not isinstance(bias, _Bias):
                continue
            if product.bias is None and bias.by.scale == product.scale:
                its = replace(product, bias=bias.value, biased=bias.by.factor)
                self.known[node.output[0]] = its

    def _as_floats(
        self, product: _Sum, scale: _Scale, node: onnx.NodeProto
    ) -> list[onnx.NodeProto] | None:
        """The float operator for ``product`` times ``scale``, the result of ``node``."""
        if scale.scale != product.scale:
            return None
        factor, weight = scale.factor, product.weight
        is_convolution = product.node.op_type == "ConvInteger"
        if is_convolution and factor.size > 1:
            factor = factor.reshape(-1, *[1] * (weight.ndim - 1))
        floats = self._store(f"{product.node.input[1]}_dequantized", weight * factor)
        bias = None
        if product.bias is not None and product.biased is not None:
            # It was divided by one factor, and is multiplied with another.
            bias = product.bias * (scale.factor.reshape(-1) / product.biased.reshape(-1))
        if is_convolution:
            inputs = [product.real, floats]
            if bias is not None:
                inputs.append(
                    self._store(f"{node.output[0]}_bias", np.broadcast_to(bias, len(weight)))
                )
            made = onnx.NodeProto(
                op_type="Conv", name=product.node.name, input=inputs, output=node.output
            )
            made.attribute.extend(product.node.attribute)
            return [made]
        return self._matrix_product(product.real, floats, bias, node.output[0], product.node.name)

    def _matrix_product(
        self, real: str, weight: str, bias: Floats | str | None, output: str, name: str
    ) -> list[onnx.NodeProto]:
        if bias is None:
            return [helper.make_node("MatMul", [real, weight], [output], name)]
        stored = bias if isinstance(bias, str) else self._store(f"{output}_bias", bias)
        product = self._name(f"{output}_product")
        return [
            helper.make_node("MatMul", [real, weight], [product], name),
            helper.make_node("Add", [product, stored], [output], f"{name}_bias"),
        ]

    def _quantize_and_multiply(self, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        real, weight, scale, zero, bias = (*node.input, "", "")[:5]
        floats = self._weight(weight, scale, zero)
        if floats is None:
            return None
        return self._matrix_product(real, floats, bias or None, node.output[0], node.name)

    def _multiply_to_float(self, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        left, weight, scale, its_scale, zero, its_zero, bias = (*node.input, "", "", "")[:7]
        known = self.known.get(left)
        if not isinstance(known, _Quantized) or (scale, zero) != (known.scale, known.zero_point):
            return None
        floats = self._weight(weight, its_scale, its_zero)
        if floats is None:
            return None
        return self._matrix_product(known.real, floats, bias or None, node.output[0], node.name)

    def _weight(self, weight: str, scale: str, zero: str) -> str | None:
        """The stored floats of a matrix with a scale for all, or for each column."""
        stored, factor = self.stored.get(weight), self.stored.get(scale)
        if (
            stored is None
            or factor is None
            or (offset := self._zero_point(zero, stored, None)) is None
        ):
            return None
        columns = factor if factor.size == 1 or factor.ndim > 1 else factor[..., np.newaxis, :]
        return self._store(f"{weight}_dequantized", (stored - offset) * columns)

    def _lstm(self, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        names = (*node.input, *[""] * 12)[:12]
        weights = []
        for weight, scale, zero in ((names[1], *names[8:10]), (names[2], *names[10:12])):
            stored, factor = self.stored.get(weight), self.stored.get(scale)
            offset = self.stored.get(zero)
            if stored is None or factor is None or offset is None:
                return None
            # One for each direction, or for each direction and gate.
            floats = (stored - _per_direction(offset)) * _per_direction(factor)
            # Directions x inputs x gates here, directions x gates x inputs in LSTM.
            weights.append(self._store(f"{weight}_dequantized", floats.transpose(0, 2, 1)))
        inputs = [names[0], *weights, *names[3:8]]
        while not inputs[-1]:
            inputs.pop()
        made = onnx.NodeProto(op_type="LSTM", name=node.name, input=inputs, output=node.output)
        made.attribute.extend(node.attribute)
        return [made]

    def _attention(self, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        names = (*node.input, *[""] * 9)[:9]
        known = self.known.get(names[0])
        if not isinstance(known, _Quantized) or (names[3], names[6]) != (
            known.scale,
            known.zero_point,
        ):
            return None
        floats = self._weight(names[1], names[4], names[7])
        if floats is None:
            return None
        inputs = [known.real, floats, names[2], names[5], names[8]]
        while not inputs[-1]:
            inputs.pop()
        made = onnx.NodeProto(
            op_type="Attention", domain=_MICROSOFT, name=node.name, input=inputs, output=node.output
        )
        made.attribute.extend(node.attribute)
        return [made]

    # What the rules have in common.

    def _to_stored(self, name: str) -> tuple[list[onnx.NodeProto], str] | None:
        """The nodes that move a stored tensor into the value ``name``, the last one first, and its name."""
        moves: list[onnx.NodeProto] = []
        while name not in self.stored:
            node = self.makers.get(name)
            if node is None or node.op_type not in _MOVING or node.domain:
                return None
            moves.append(node)
            name = node.input[0]
        return moves, name

    def _floats(self, node: onnx.NodeProto, first: str, *, moved: bool) -> Floats | None:
        """What the DequantizeLinear ``node`` makes of the stored tensor ``first``."""
        integers, factor = self.stored[first], self.stored.get(node.input[1])
        zero = node.input[2] if len(node.input) > 2 else ""
        offset = self.stored.get(zero) if zero else np.zeros((), np.float32)
        if factor is None or offset is None or graph.attribute(node, "block_size", 0):
            return None
        if factor.size == 1:
            return (integers - offset.reshape(())) * factor.reshape(())
        if moved:
            # Which axis has the scales is another one before it is moved.
            return None
        axis = graph.attribute(node, "axis", 1)
        shape = [1] * integers.ndim
        shape[axis] = -1
        return (integers - offset.reshape(shape if offset.size > 1 else ())) * factor.reshape(shape)

    def _store(self, name: str, values: Floats | np.float32) -> str:
        name = self._name(name)
        array = np.asarray(values, np.float32, order="C")
        self.model.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def _name(self, wanted: str) -> str:
        """A name that no value and no node of the model has."""
        name = wanted
        while name in self._taken:
            name = f"{name}_"
        self._taken.add(name)
        return name

    def _replace(self, nodes: Iterable[onnx.NodeProto]) -> None:
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del self.model.graph.node[:]
        self.model.graph.node.extend(copies)


def _per_direction(values: Floats) -> Floats:
    """``values`` (directions, or directions x gates) for a weight of directions x inputs x gates."""
    return values.reshape(len(values), 1, -1) if values.ndim else values


def _keep(tensors: Any, is_kept: Callable[[Any], bool]) -> None:
    kept = [each for each in tensors if is_kept(each)]
    del tensors[:]
    tensors.extend(kept)
