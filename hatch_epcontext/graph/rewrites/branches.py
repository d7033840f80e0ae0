"""An ``If`` whose condition depends on the data: both branches run, and one result is selected."""

from __future__ import annotations

import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope

_OF_FLOATS = frozenset({"Cast", "Div", "Pow"})
"""Operators that never fail for floats; with integers they may divide by zero."""


@rewrites("If", nested=False)
def if_as_where(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Both branches, and a Where of their results."""
    condition = node.input[0]
    shape = scope.shape(condition)
    if shape is None or any(size != 1 for size in shape):
        return Declined(f"its condition {condition!r} is not one value")
    branches = [graph.attribute(node, name, None) for name in ("then_branch", "else_branch")]
    scopes = [Scope(branch, scope) for branch in branches]
    for branch in scopes:
        for inner in branch.body.node:
            if not _is_safe(inner, branch):
                what = f"{inner.op_type} {inner.name!r}"
                return Declined(f"in a branch, {what} may fail for some values")
    ends = list(zip(*([value.name for value in branch.output] for branch in branches), strict=True))
    for names in ends:
        one, other = map(_type_and_shape, names, scopes)
        if one is None or one != other:
            return Declined("its branches have results of different types, or of open shapes")
    new_names: list[dict[str, str]] = [{}, {}]
    for branch, copied in zip(branches, new_names, strict=True):
        builder.store_all(branch, copied)
        builder.copy(branch.node, copied)
    result = []
    for names in ends:
        rank = len(scopes[0].sizes(names[0]) or ())
        wide = builder.reshape(condition, [1] * rank) if len(shape) > rank else condition
        values = [copied.get(name, name) for copied, name in zip(new_names, names, strict=True)]
        result.append(builder.add("Where", wide, *values))
    return result


def _type_and_shape(name: str, scope: Scope) -> tuple[int, tuple[int, ...]] | None:
    elem_type, shape = scope.elem_type(name), scope.shape(name)
    return None if elem_type is None or shape is None else (elem_type, shape)


def _is_safe(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether ``node`` has a result of a known shape for any data."""
    results = (_type_and_shape(name, scope) for name in node.output if name)
    if node.domain or None in results:
        return False
    if node.op_type in _OF_FLOATS:
        return all(scope.kind(name) == "f" for name in node.input)
    operands = {**operators.SIZES_FROM, **operators.FAILS_ON}.get(node.op_type, (0,))
    names = node.input[1:] if operands else ()
    return 0 not in operands and all(scope.constant(name) is not None for name in names if name)
