"""Equivalent forms of nodes that EPs compute wrong, or inexactly, in float16.

Those of `number_format.ALWAYS` lose nothing and add hardly any nodes. Those of `number_format.REMEDIES` add
nodes, whose cost on NPUs is not measured: they are for models that, as a run has shown, need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.builder import BOUNDS_AS_INPUTS, Builder, Outputs, Rule
from hatch_epcontext.graph.number_format import FUSING, RewriteName
from hatch_epcontext.graph.rewriting import Rewrite, apply
from hatch_epcontext.graph.scope import Scope, Types

_BROADCASTING = 8
"""The opset from which Max and Min accept a number beside a tensor."""

_FLOAT_MAX = float(np.finfo(np.float32).max)


def _number(name: str, scope: Scope) -> float | None:
    """The stored number ``name``, also in a tensor of one value; None for anything else."""
    tensor = scope.stored.get(name)
    # Skips weights.
    array = graph.array_of(tensor) if tensor is not None and math.prod(tensor.dims) == 1 else None
    return None if array is None else float(array.item())


def _number_beside(value: str, name: str, scope: Scope) -> float | None:
    """The number ``name``, if ``value`` keeps its shape beside it."""
    rank, value_rank = (len(scope.sizes(operand) or ()) for operand in (name, value))
    return _number(name, scope) if rank <= value_rank else None


def _value_and_number(node: onnx.NodeProto, scope: Scope) -> tuple[str, float] | None:
    """The operands of a ``node`` that computes a value with a number, in any order."""
    names = list(node.input)
    # The upper bound of a Clip may be infinite.
    while names and (not names[-1] or (_number(names[-1], scope) or 0) >= _FLOAT_MAX):
        names.pop()
    for value, name in (names, names[::-1]) if len(names) == 2 else ():
        number = _number_beside(value, name, scope)
        if number is not None and scope.stored.get(value) is None:
            return value, number
    return None


def _maker(name: str, scope: Scope) -> str:
    """The operator that computes a value; empty for inputs and stored tensors."""
    node = scope.maker(name)
    return "" if node is None else graph.operator(node)


def _power(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    value, name = node.input
    number = _number_beside(value, scope.origin(name, ("Cast", "Identity")), scope)
    if number == 2:
        return [builder.add("Mul", value, value)]
    dtype = scope.dtype(value)
    is_float = dtype is not None and dtype.kind == "f"
    return [builder.add("Sqrt", value)] if number == 0.5 and is_float else None


def _mean(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A sum that is read only by its division by the number of its values."""
    operands = _value_and_number(node, scope)
    if operands is None or builder.dtype.kind != "f":
        return None
    name, number = operands
    total = scope.maker(name)
    if total is None or graph.operator(total) != "ReduceSum" or not _is_read_once(name, scope):
        return None
    sizes, axes = scope.sizes(total.input[0]), scope.axes(total)
    summed = [sizes[axis] for axis in axes] if sizes is not None and axes is not None else [None]
    known = [size for size in summed if size is not None]
    if node.op_type == "Div":
        if name != node.input[0] or not number:
            return None
        number = 1 / number
    if axes is None or known != summed or abs(number * math.prod(known) - 1) > 1e-6:
        return None
    keepdims = graph.number(total, "keepdims", 1)
    return [builder.reduced("ReduceMean", total.input[0], axes, keepdims)]


def _is_read_once(name: str, scope: Scope) -> bool:
    """Whether a value has one reader, and is not an output of the graph."""
    is_output = any(output.name == name for output in scope.part.output)
    return name in scope.makers and not is_output and len(scope.readers[name]) == 1


def _clip(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Clip of an opset in which the bounds are attributes."""
    if builder.opset >= BOUNDS_AS_INPUTS:
        return None
    value = node.input[0]
    for operator, bound in (("Max", "min"), ("Min", "max")):
        number = graph.attribute(node, bound, _FLOAT_MAX)
        if abs(number) < _FLOAT_MAX:
            value = builder.add(operator, value, builder.number(number))
    return [value]


_FUSING = FUSING | {"Add", "Sub"}
_FUSED_THROUGH = operators.RESHAPING | {"Mul", "Slice", "Split"}
"""Operators that EPs fuse with an activation, and those that may come between."""


def _unfuse_activation(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Max between an activation and what computes its operand, so that an EP cannot fuse the two.

    At the number, and below it, the activation is 0 or -1: the result is the same.
    """
    value = node.input[0]
    maker = scope.maker(value)
    while maker is not None and graph.operator(maker) in _FUSED_THROUGH:
        computed = (name for name in maker.input if scope.stored.get(name) is None)
        maker = scope.maker(next(computed, ""))
    if maker is None or graph.operator(maker) not in _FUSING:
        return None
    return [builder.add(node.op_type, builder.add("Max", value, builder.number(-60000)))]


_MIN_NORMAL = 2.0**-14
"""The smallest normal number of float16."""

_PART = 1 / 8
"""The factor of the largest value, the common divisor: QNN's simulator returns 0 for divisors above 16384."""

_MAX_DEPTH = 8
"""The most nodes from a root down to its squares."""

_WITH_NUMBERS = frozenset({"Add", "Clip", "Max"})
_MEANS = frozenset({"ReduceMean"})
_SUMS = frozenset({"Add", "ReduceSum"})


@dataclass(frozen=True)
class _Roots:
    """Square roots of sums of squares, through values of about 1, whose squares are in float16's range.

    ``operators``: those that may sum them.
    """

    scope: Scope
    builder: Builder
    operators: frozenset[str]

    def of(self, name: str, offset: float = 0.0, max_depth: int = _MAX_DEPTH) -> str | None:
        """Sqrt(name + offset); None if ``name`` is not a sum of squares."""
        node = self.scope.maker(name)
        if node is None or not max_depth:
            return None
        operator = graph.operator(node)
        if value := _squared(node, self.scope):
            return self._scaled([self.magnitude(value)], offset)
        if operator in _WITH_NUMBERS and (operands := _value_and_number(node, self.scope)):
            return self._beside(operator, operands, offset, max_depth - 1)
        if operator in operators.LAYOUT and (
            inner := self.of(node.input[0], offset, max_depth - 1)
        ):
            return self.builder.add_like(node, operator, [inner, *node.input[1:]])[0]
        return self._summed(node, offset, max_depth - 1) if operator in self.operators else None

    def magnitude(self, value: str) -> str:
        """The absolute value of ``value``."""
        positive = _maker(value, self.scope) in ("Abs", "Relu", "Sqrt")
        return value if positive else self.builder.add("Abs", value)

    def _beside(
        self, operator: str, operands: tuple[str, float], offset: float, max_depth: int
    ) -> str | None:
        value, number = operands
        if number < 0 or (offset and operator != "Add"):
            return None
        if operator == "Add":
            return self.of(value, offset + number, max_depth)
        least = self.builder.number(math.sqrt(number))
        inner = self.of(value, 0, max_depth)
        return inner and self.builder.add("Max", inner, least)

    def _summed(self, node: onnx.NodeProto, offset: float, max_depth: int) -> str | None:
        operator = graph.operator(node)
        if operator == "Add":
            roots = [root for name in node.input if (root := self.of(name, 0, max_depth))]
            return self._scaled(roots, offset) if len(roots) == 2 else None
        if operator == "MatMul":
            return self._weighted(node, offset, max_depth)
        inner = self.of(node.input[0], 0, max_depth)
        return inner and self.over_axes(node, operator, inner, offset)

    def over_axes(
        self, node: onnx.NodeProto, operator: str, value: str, offset: float = 0.0
    ) -> str | None:
        """The root of ``operator``, applied to the squares of ``value`` over the axes of ``node``."""
        axes, shape = self.scope.axes(node), self.scope.shape(node.output[0])
        keeps = graph.number(node, "keepdims", 1)
        if axes is None or (shape is None and not keeps):
            return None

        def total(square: str) -> str:
            return self.builder.reduced(operator, square, axes, keepdims=1)

        root = self._scaled([value], offset, axes, total)
        return root if keeps or shape is None else self.builder.reshape(root, shape)

    def _weighted(self, node: onnx.NodeProto, offset: float, max_depth: int) -> str | None:
        """For squares times a stored matrix without negative values, such as the filters of a spectrogram."""
        for axis, (squares, weights) in ((-1, node.input), (-2, reversed(node.input))):
            matrix = self.scope.constant(weights)
            if matrix is None or matrix.ndim < 2 or (matrix < 0).any():
                continue
            if inner := self.of(squares, 0, max_depth):

                def total(square: str, of: str = squares) -> str:
                    names = (square if name == of else name for name in node.input)
                    return self.builder.add("MatMul", *names)

                return self._scaled([inner], offset, [axis], total)
        return None

    def _scaled(
        self,
        values: Sequence[str],
        offset: float,
        axes: Sequence[int] = (),
        total: Callable[[str], str] | None = None,
    ) -> str:
        """The root of the sum of the squares of ``values``, plus ``offset``; ``total`` sums over ``axes``."""
        builder, least = self.builder, math.sqrt(offset)
        largest = builder.add("Max", *values) if len(values) > 1 else values[0]
        if total is not None:
            largest = builder.reduced("ReduceMax", largest, axes, keepdims=1)
        elif len(values) == 1 and not offset:
            return largest
        floor = builder.number(max(_MIN_NORMAL, least * _PART))
        scale = builder.add("Max", builder.scaled(largest, _PART), floor)
        squares = [self._squared_part(value, scale) for value in values]
        if total is not None:
            squares = [total(squares[0])]
        if offset:
            squares.append(self._squared_part(builder.number(least), scale))
        result, *others = squares
        for square in others:
            result = builder.add("Add", result, square)
        return builder.add("Mul", builder.add("Sqrt", result), scale)

    def _squared_part(self, value: str, scale: str) -> str:
        part = self.builder.add("Div", value, scale)
        return self.builder.add("Mul", part, part)


def _squared(node: onnx.NodeProto, scope: Scope) -> str | None:
    """The value of which ``node`` is the square; None if that is already scaled."""
    value, other = graph.operands(node, 2)
    if (operator := graph.operator(node)) == "Pow":
        is_square = _number_beside(value, other, scope) == 2
    else:
        is_square = operator == "Mul" and value == other
    maker = scope.maker(value)
    is_scaled = (
        maker is not None and maker.op_type == "Div" and _maker(maker.input[1], scope) == "Max"
    )
    return value if is_square and not is_scaled else None


def _hypot(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A root of a sum of squares: a Sqrt, or a ReduceL2."""
    if node.op_type == "Sqrt":
        root = _Roots(scope, builder, _SUMS).of(node.input[0])
    else:
        roots = _Roots(scope, builder, _SUMS)
        root = roots.over_axes(node, "ReduceSum", roots.magnitude(node.input[0]))
    return [root] if root else None


def _scaled_square(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A root of a mean of squares."""
    count = len(builder.nodes)
    root = _Roots(scope, builder, _MEANS).of(node.input[0])
    has_mean = any(new.op_type in _MEANS for new in builder.nodes[count:])
    return [root] if root and has_mean else None


def _variance(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The mean of squares less the square of the mean: for nearly equal values both are nearly equal."""
    squares, square = (scope.maker(name) for name in graph.operands(node, 2))
    if squares is None or square is None or squares.op_type not in _MEANS:
        return None
    inner, mean = scope.maker(squares.input[0]), _squared(square, scope)
    value = inner and _squared(inner, scope)
    maker = scope.maker(mean) if mean else None
    if not value or not mean or maker is None or maker.op_type not in _MEANS:
        return None
    axes, keeps = scope.axes(squares), graph.number(squares, "keepdims", 1)
    if maker.input[0] != value or axes is None or scope.axes(maker) != axes:
        return None
    if not graph.number(maker, "keepdims", 1):
        mean = builder.reduced("ReduceMean", value, axes, keepdims=1)
    away = builder.add("Sub", value, mean)
    return [builder.reduced("ReduceMean", builder.add("Mul", away, away), axes, keepdims=keeps)]


def _log(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The logarithm of a square as twice that of its root, whose exponent is half as large."""
    root = _Roots(scope, builder, _SUMS | _MEANS | {"MatMul"}).of(node.input[0])
    return [builder.scaled(builder.add("Log", root), 2)] if root else None


_RULES: Mapping[RewriteName, tuple[Rule, tuple[str, ...]]] = {
    "square": (_power, ("Pow",)),
    "mean": (_mean, ("Mul", "Div")),
    "clip-inputs": (_clip, ("Clip",)),
    "hypot": (_hypot, ("Sqrt", "ReduceL2")),
    "log-power": (_log, ("Log",)),
    "variance": (_variance, ("Sub",)),
    "scaled-square": (_scaled_square, ("Sqrt",)),
    "unfuse-activation": (_unfuse_activation, ("Sigmoid", "Tanh")),
}

PRECISE: Mapping[RewriteName, Rewrite] = {
    name: Rewrite(name, frozenset(operators), rule) for name, (rule, operators) in _RULES.items()
}
"""Those of `ALWAYS`, and then of `REMEDIES`, in the order in which they are applied."""


def applicable(main: onnx.GraphProto) -> tuple[RewriteName, ...]:
    """Those of `PRECISE` for whose operators ``main`` has nodes: it has no form that others change."""
    operators = {graph.operator(node) for node in graph.nodes(main)}
    if "ReduceSum" not in operators:
        # No sum is divided.
        operators -= PRECISE["mean"].operators
    return tuple(
        name for name, rewrite in PRECISE.items() if not operators.isdisjoint(rewrite.operators)
    )


def remedy(
    model: onnx.ModelProto, types: Types, names: Collection[RewriteName]
) -> tuple[RewriteName, ...]:
    """Apply those of `PRECISE` that ``names`` has, to ``model``, in place, one after the other.

    ``types``: the known types of its values. Returns the names of those that changed something.
    """
    if graph.opset(model) < _BROADCASTING:
        return ()
    return tuple(
        name
        for name, rewrite in PRECISE.items()
        if name in names and apply(model, [rewrite], rewrite.operators, types).names
    )
