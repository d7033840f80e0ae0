"""What several rewrites look for in a graph: products, squares, stored numbers, and attributes of nodes."""

from __future__ import annotations

import math

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder
from hatch_epcontext.graph.scope import Scope


def number_beside(value: str, name: str, scope: Scope) -> float | None:
    """The stored number ``name``, also in a tensor of one value, if ``value`` keeps its shape beside it."""
    rank, value_rank = (len(scope.sizes(operand) or ()) for operand in (name, value))
    tensor = scope.stored.get(name)
    # Skips weights.
    if tensor is None or math.prod(tensor.dims) != 1 or rank > value_rank:
        return None
    array = graph.array_of(tensor)
    return None if array is None else float(array.item())


def beside_number(name: str, operator: str, scope: Scope) -> tuple[str, float] | None:
    """What ``operator`` makes ``name`` of, in any order: a value, and a stored number, not negative."""
    node = scope.maker(name, operator)
    if node is None or len(node.input) != 2:
        return None
    number, value = sorted(node.input, key=lambda operand: scope.stored.get(operand) is None)
    least = number_beside(value, number, scope)
    return None if least is None or least < 0 else (value, least)


def is_read_once(name: str, scope: Scope) -> bool:
    """Whether a value has one reader, and is not an output of the graph."""
    is_output = any(output.name == name for output in scope.body.output)
    return name in scope.makers and not is_output and len(scope.readers[name]) == 1


def value_squared(name: str, scope: Scope) -> str | None:
    """The value whose square is ``name``."""
    node = scope.maker(name, "Mul", "Pow")
    if node is None:
        return None
    value, other = graph.operands(node, 2)
    is_square = value == other if node.op_type == "Mul" else number_beside(value, other, scope) == 2
    return value if is_square else None


def factors_of(name: str, scope: Scope) -> tuple[str, str] | None:
    """The two values whose product is ``name``."""
    if value := value_squared(name, scope):
        return value, value
    node = scope.maker(name, "Mul")
    return None if node is None else (node.input[0], node.input[1])


def is_scaled(value: str, scope: Scope) -> bool:
    """Whether ``value`` is divided by what is computed too."""
    maker = scope.maker(value, "Div")
    return maker is not None and scope.constant(maker.input[1]) is None


def scale_of(largest: str, least: float, factor: int, builder: Builder) -> str:
    """By what values are divided so that the largest, or at least ``least``, is about ``factor``."""
    part = builder.add("Mul", largest, builder.number(1 / factor))
    # QNN's Div is right for divisors from 1.53e-5 to 16384 only.
    return builder.add("Max", part, builder.number(max(2**-14, least / factor)))


def spatial(node: onnx.NodeProto, count: int) -> tuple[list[int], list[int], list[int]]:
    """The strides and dilations of a node along ``count`` axes, and its pads before and after all of them."""
    defaults = {"strides": [1] * count, "dilations": [1] * count, "pads": [0] * 2 * count}
    strides, dilations, pads = (
        [*graph.attribute(node, name, default)] for name, default in defaults.items()
    )
    return strides, dilations, pads
