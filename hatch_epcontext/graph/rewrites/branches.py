"""An ``If`` whose condition depends on the data: both branches run, and one result is selected."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.arrays import Array
from hatch_epcontext.graph.builder import Builder, Outputs, by_node
from hatch_epcontext.graph.scope import Scope, Types

_OF_FLOATS = frozenset({"Cast", "Div", "Pow"})
"""Operators that never fail for floats; with integers they may divide by zero."""

_MAX_CONDITIONS = 3
"""The most conditions of which all combinations are tried."""


def _both_branches(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    shape = scope.shape(node.input[0])
    if shape is None or any(size != 1 for size in shape):
        return None
    branches = [graph.attribute(node, name, None) for name in ("then_branch", "else_branch")]
    scopes = [Scope(branch, scope) for branch in branches]
    if not all(_is_safe(each, scope) for scope in scopes for each in scope.part.node):
        return None
    ends = list(zip(*([each.name for each in branch.output] for branch in branches), strict=True))
    forms = [
        [_form(name, scope) for name, scope in zip(pair, scopes, strict=True)] for pair in ends
    ]
    if any(one is None or one != other for one, other in forms):
        return None
    new_names: list[dict[str, str]] = [{}, {}]
    for branch, names in zip(branches, new_names, strict=True):
        builder.store_all(branch, names)
        builder.copy(branch.node, names)
    result = []
    for pair in ends:
        rank = len(scopes[0].sizes(pair[0]) or ())
        condition = node.input[0]
        if len(shape) > rank:
            condition = builder.reshape(condition, [1] * rank)
        taken = [names.get(name, name) for names, name in zip(new_names, pair, strict=True)]
        result.append(builder.add("Where", condition, *taken))
    return result


BRANCHES = by_node("If as both branches and Where", {"If": _both_branches}, nested=False)


def _form(name: str, scope: Scope) -> tuple[int, tuple[int, ...]] | None:
    elem_type, shape = scope.elem_type(name), scope.shape(name)
    return None if elem_type is None or shape is None else (elem_type, shape)


def _is_safe(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether ``node`` has a result of a known shape for any data."""
    if node.domain or any(_form(name, scope) is None for name in filter(None, node.output)):
        return False
    if node.op_type in _OF_FLOATS:
        dtypes = [scope.dtype(name) for name in node.input]
        return all(dtype is not None and dtype.kind == "f" for dtype in dtypes)
    operands = {**operators.SIZES_FROM, **operators.FAILS_ON}.get(node.op_type, (0,))
    names = node.input[1:] if operands else ()
    return 0 not in operands and all(scope.constant(name) is not None for name in names if name)


def removed(before: onnx.ModelProto, after: onnx.ModelProto) -> tuple[str, ...]:
    """The conditions of the ``If`` nodes of ``before`` that ``after`` no longer has."""
    left = {name for node in after.graph.node if node.op_type == "If" for name in node.output}
    found = (
        node.input[0]
        for node in before.graph.node
        if node.op_type == "If" and left.isdisjoint(node.output)
    )
    return tuple(dict.fromkeys(found))


def with_inputs(model: onnx.ModelProto, names: Iterable[str], types: Types) -> onnx.ModelProto:
    """A copy of ``model`` in which the conditions ``names`` are inputs; ``types``: as for `Scope.of`."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    scope, builder = Scope.of(model, types), Builder(result)
    given = {value.name for value in result.graph.input}
    for name in names:
        if name in given:
            continue
        for node in result.graph.node:
            node.output[:] = [builder.fresh(name) if each == name else each for each in node.output]
        shape = scope.shape(name)
        assert shape is not None, "it was a condition of one value"
        result.graph.input.append(
            helper.make_tensor_value_info(name, onnx.TensorProto.BOOL, list(shape))
        )
        for value in [each for each in result.graph.value_info if each.name == name]:
            result.graph.value_info.remove(value)
    return result


def assignments(
    conditions: tuple[str, ...], shapes: Mapping[str, Sequence[int]]
) -> Iterator[dict[str, Array]]:
    """Values for ``conditions``: all combinations of a few; for many, all equal or one different."""
    combinations: Iterable[tuple[bool, ...]] = itertools.product(
        (True, False), repeat=len(conditions)
    )
    if len(conditions) > _MAX_CONDITIONS:
        count = range(len(conditions))
        combinations = [
            tuple((each == one) is given for each in count)
            for given in (True, False)
            for one in (-1, *count)
        ]
    for given in combinations:
        yield {
            name: np.full(shapes[name], value)
            for name, value in zip(conditions, given, strict=True)
        }
