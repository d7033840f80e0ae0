"""Values of a graph as linear forms of its inputs, where they are linear."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.values.known import KnownValues

Bounds = tuple[float, float]
"""The smallest and the largest value of a tensor."""

_MAX_FORMS = 8
"""The most paths to one value that are followed."""

INVALID = (ValueError, TypeError, IndexError, KeyError, ArithmeticError)
"""The errors of malformed nodes: opening a session reports the reason."""

_EVERYTHING = (-math.inf, math.inf)

Truth = Literal["", "itself", "compared"]


@dataclass(frozen=True)
class LinearForm:
    """A value that is, for each of ``scales``, a factor times that input, plus ``offset``.

    ``within``: the bounds that a limit on the path guarantees for any input. ``whole``: it was rounded on the
    path. ``truth``: whether it became a boolean, by ``"itself"`` or because it was ``"compared"``.
    ``selected``: it is 0 wherever it is masked. ``counted``: it counts from 0 up to the input.
    """

    scales: tuple[tuple[str, Bounds], ...]
    offset: Bounds = (0.0, 0.0)
    within: Bounds = _EVERYTHING
    whole: bool = False
    truth: Truth = ""
    selected: bool = False
    counted: bool = False

    def plus(self, offset: Bounds) -> LinearForm:
        return replace(self, offset=_sum(self.offset, offset), within=_sum(self.within, offset))

    def times(self, factor: Bounds) -> LinearForm:
        return replace(
            self,
            scales=tuple((name, _product(scale, factor)) for name, scale in self.scales),
            offset=_product(self.offset, factor),
            within=_product(self.within, factor),
        )

    def clipped(self, low: float, high: float) -> LinearForm:
        return replace(self, within=(max(self.within[0], low), min(self.within[1], high)))

    def with_form(self, other: LinearForm) -> Iterator[LinearForm]:
        """The sum with ``other``: of different inputs, or of selected parts of one, of which it is either."""
        if self.selected and other.selected:
            yield from (self, other)
        elif not {name for name, _ in self.scales} & {name for name, _ in other.scales}:
            yield self._added(other)

    def _added(self, other: LinearForm) -> LinearForm:
        return LinearForm(
            self.scales + other.scales,
            _sum(self.offset, other.offset),
            _sum(self.within, other.within),
            self.whole and other.whole,
        )


Forms = dict[str, tuple[LinearForm, ...]]
"""The forms of each value that has some."""


def follow(part: graph.Part, forms: Forms, known: KnownValues) -> Iterator[onnx.NodeProto]:
    """Add to ``forms`` those of all values in ``part`` and the graphs inside it.

    Yields each node that reads a value with forms, when the forms of its operands are complete.
    """
    for node in part.node:
        inner = graph.inner_graphs(node)
        is_followed = any(name in forms for name in node.input)
        if is_followed:
            yield node
        for each in inner:
            forms.update(_entering(node, each, forms))
            yield from follow(each, forms, known)
        if inner:
            forms.update(_leaving(node, inner, forms))
        elif is_followed and node.domain in graph.STANDARD:
            forms.update(_results(node, forms, known))


def _entering(node: onnx.NodeProto, inner: onnx.GraphProto, forms: Forms) -> Forms:
    """The forms of the values that a loop passes to its body."""
    given = list(node.input)
    # A Loop counts its iterations itself; all other values have the same position as outside.
    return {
        value.name: forms[name]
        for value, name in zip(inner.input, given, strict=False)
        if name in forms and node.op_type in ("Loop", "Scan")
    }


def _leaving(node: onnx.NodeProto, inner: Iterable[onnx.GraphProto], forms: Forms) -> Forms:
    """The forms of the values that the graphs inside ``node`` return."""
    skipped = 1 if node.op_type == "Loop" else 0
    return {
        outside: forms[value.name]
        for each in inner
        for outside, value in zip(node.output, list(each.output)[skipped:], strict=False)
        if value.name in forms
    }


def _results(node: onnx.NodeProto, forms: Forms, known: KnownValues) -> Forms:
    rule = _RULES.get(node.op_type)
    if rule is None:
        return {}
    try:
        given = [forms.get(name, ()) for name in node.input]
        found = tuple(dict.fromkeys(rule(node, given, known)))[:_MAX_FORMS]
    except INVALID:
        return {}
    outputs = node.output if node.op_type == "Split" else node.output[:1]
    return dict.fromkeys(outputs, found) if found else {}


_Given = Sequence[Sequence[LinearForm]]
"""The forms of each operand of a node."""

_Rule = Callable[[onnx.NodeProto, _Given, KnownValues], Iterable[LinearForm]]


def _any(given: _Given) -> Iterable[LinearForm]:
    """The forms of all operands: the result has values of each."""
    return (form for each in given for form in each)


def _cast(node: onnx.NodeProto, given: _Given, known: KnownValues) -> Iterator[LinearForm]:
    to = graph.attribute(node, "to", 0)
    for form in given[0]:
        if to == onnx.TensorProto.BOOL:
            yield replace(form, truth=form.truth or "itself")
        else:
            yield replace(form, whole=form.whole or to in _WHOLE)


def _equal(node: onnx.NodeProto, given: _Given, known: KnownValues) -> Iterator[LinearForm]:
    """Booleans: the forms of all operands, if the others are 0, 1 or booleans too."""
    for name in node.input:
        value = known.value(name)
        if value is not None and (value.size != 1 or value.item() not in (0, 1)):
            return
    for form in _any(given):
        yield replace(form, truth=form.truth or "itself")


def _added(node: onnx.NodeProto, given: _Given, known: KnownValues) -> Iterator[LinearForm]:
    first, second = node.input[:2]
    sign = -1.0 if node.op_type == "Sub" else 1.0
    if (bounds := constant_bounds(second, known)) is not None:
        yield from (form.plus(_product(bounds, (sign, sign))) for form in given[0])
    elif (bounds := constant_bounds(first, known)) is not None:
        yield from (form.times((sign, sign)).plus(bounds) for form in given[1])
    else:
        for a in given[0]:
            for b in given[1]:
                yield from a.with_form(b.times((sign, sign)))


def _multiplied(node: onnx.NodeProto, given: _Given, known: KnownValues) -> Iterator[LinearForm]:
    for one, other in ((0, 1), (1, 0)):
        if (bounds := constant_bounds(node.input[other], known)) is not None:
            yield from (form.times(bounds) for form in given[one])
        elif any(form.truth for form in given[other]):
            yield from (replace(form, selected=True) for form in given[one])


def _divided(node: onnx.NodeProto, given: _Given, known: KnownValues) -> Iterator[LinearForm]:
    bounds = constant_bounds(node.input[1], known)
    if bounds is not None and (bounds[0] > 0 or bounds[1] < 0):
        factor = (1 / bounds[1], 1 / bounds[0])
        yield from (form.times(factor) for form in given[0])


def _summed(node: onnx.NodeProto, given: _Given, known: KnownValues) -> Iterator[LinearForm]:
    """Sums of at most all values."""
    shape = known.sizes(node.input[0])
    count = math.prod(size or 1 for size in shape) if shape else 1
    for form in given[0]:
        yield form if form.truth else form.times((1.0, float(max(count, 1))))


def _limited(node: onnx.NodeProto, given: _Given, known: KnownValues) -> Iterator[LinearForm]:
    low, high = clip_bounds(node, known)
    yield from (form.clipped(low, high) for form in _any(given))


_KEEPING = operators.MOVES | operators.PADS | operators.EXTREMES | operators.MEANS
_KEEPING |= {"Abs", "DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear", "TopK"}
"""Operators whose results are within the values of their first operand, or nearly."""

_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_KEEPING, lambda node, given, known: given[0]),
    **dict.fromkeys(
        ("Floor", "Ceil", "Round"),
        lambda node, given, known: (replace(form, whole=True) for form in given[0]),
    ),
    **dict.fromkeys(
        ("ScatterElements", "ScatterND", "Scatter"),
        # The data and the updates.
        lambda node, given, known: (*given[0], *given[2]),
    ),
    **dict.fromkeys(("Equal", "Not", "And", "Or"), _equal),
    **dict.fromkeys(
        ("Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
        lambda node, given, known: (replace(form, truth="compared") for form in _any(given)),
    ),
    **dict.fromkeys(("Add", "Sub"), _added),
    **dict.fromkeys(("ReduceSum", "CumSum"), _summed),
    **dict.fromkeys(("Min", "Max", "Clip"), _limited),
    "Cast": _cast,
    "Concat": lambda node, given, known: _any(given),
    "Where": lambda node, given, known: (*given[1], *given[2]),
    "Mul": _multiplied,
    "Div": _divided,
    "Neg": lambda node, given, known: (form.times((-1.0, -1.0)) for form in given[0]),
    "Range": lambda node, given, known: (
        replace(form.plus((-1.0, -1.0)), counted=True) for form in given[1]
    ),
}

_WHOLE = frozenset(
    onnx.TensorProto.DataType.Value(f"{sign}INT{bits}")
    for sign in ("", "U")
    for bits in (8, 16, 32, 64)
)


def constant_bounds(name: str, known: KnownValues) -> Bounds | None:
    """The smallest and the largest value of the constant ``name``; None if it is not a finite constant."""
    value = known.value(name)
    if value is None or not value.size:
        return None
    low, high = float(value.min()), float(value.max())
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def clip_bounds(node: onnx.NodeProto, known: KnownValues) -> Bounds:
    """The constants between which ``node``, a Clip, Min or Max, keeps its values."""
    if node.op_type == "Clip":
        low, high = (_clip_bound(node, i, name, known) for i, name in ((1, "min"), (2, "max")))
        return (-math.inf if low is None else low, math.inf if high is None else high)
    bounds = [each for name in node.input if (each := constant_bounds(name, known)) is not None]
    if node.op_type == "Min":
        return -math.inf, min((high for _, high in bounds), default=math.inf)
    return max((low for low, _ in bounds), default=-math.inf), math.inf


def _clip_bound(node: onnx.NodeProto, operand: int, name: str, known: KnownValues) -> float | None:
    given = graph.attribute(node, name, None)
    if isinstance(given, float):
        return given if math.isfinite(given) else None
    bounds = constant_bounds(graph.operand(node, operand), known)
    return bounds[0] if bounds else None


def _sum(a: Bounds, b: Bounds) -> Bounds:
    return a[0] + b[0], a[1] + b[1]


def _product(a: Bounds, b: Bounds) -> Bounds:
    # 0 times infinity is not a possible value.
    with np.errstate(all="ignore"):
        products = [0.0 if 0 in (x, y) else x * y for x in a for y in b]
    return min(products), max(products)
