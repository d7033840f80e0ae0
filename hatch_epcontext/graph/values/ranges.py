"""The values that the inputs of a model accept, as far as its graph shows them.

Each input is followed forwards, through nodes that keep its values or change them linearly, to the nodes
that bound it: tables that it indexes, positions, lengths, limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.arrays import is_float, numpy_dtype
from hatch_epcontext.graph.facts import Range, TensorFacts
from hatch_epcontext.graph.values.forms import Bounds, Forms, LinearForm, follow
from hatch_epcontext.graph.values.kinds import (
    DEVIATIONS,
    image_range,
    is_length_name,
    is_mask_name,
    is_scale,
    looks_like_image,
)
from hatch_epcontext.graph.values.known import KnownValues
from hatch_epcontext.graph.values.operands import Limit, limits

_MAX_OF_BYTES = 255.0
"""The largest value of an integer that nothing bounds."""

_MAX_EXACT = 2.0**53
"""The integer up to which floats represent all integers."""

_MIN_OF_MASKS = 1000.0
"""The size from which an added value hides the other summand."""

_EVERYTHING = (-math.inf, math.inf)


@dataclass
class _Reached:
    """The limits that an input reaches, each with the form in which it does, and the first convolution."""

    limits: list[tuple[LinearForm, Limit]] = field(default_factory=list)
    convolved: LinearForm | None = None
    is_mask: bool = False


def input_ranges(
    model: onnx.ModelProto, inputs: Sequence[TensorFacts] | None = None
) -> dict[str, Range]:
    """Return the range of each input of ``model`` that has numbers.

    ``inputs``: its inputs with their later shapes, if those in ``model`` are still open. Integers that
    nothing bounds are bytes; floats have a normal distribution, with a range of 8 standard deviations on
    either side.
    """
    tensors = [
        each
        for each in inputs or [graph.facts(value) for value in graph.inputs(model.graph)]
        if _is_number(each)
    ]
    reached = _reached(model, tensors, KnownValues(model, tensors))
    return {each.name: _range_of(each, reached[each.name], tensors) for each in tensors}


def _is_number(facts: TensorFacts) -> bool:
    try:
        return facts.dtype != "string" and numpy_dtype(facts.dtype).kind != "O"
    except TypeError:
        return False


def _reached(
    model: onnx.ModelProto, tensors: Sequence[TensorFacts], known: KnownValues
) -> dict[str, _Reached]:
    forms: Forms = {
        each.name: (
            LinearForm(((each.name, (1.0, 1.0)),), truth="itself" if each.dtype == "bool" else ""),
        )
        for each in tensors
    }
    reached = {each.name: _Reached() for each in tensors}
    for node in follow(model.graph, forms, known):
        for limit in limits(node, known):
            for form in forms.get(node.input[limit.operand], ()):
                for name, _ in form.scales:
                    reached[name].limits.append((form, limit))
        for name, form in _convolved(node, forms):
            reached[name].convolved = reached[name].convolved or form
        for name in _measured(node, forms):
            limit = Limit(0, 1, math.inf, "length")
            reached[name].limits.append((LinearForm(((name, (1.0, 1.0)),)), limit))
    for form in {each for found in forms.values() for each in found}:
        if _hides(form):
            reached[form.scales[0][0]].is_mask = True
    return reached


def _convolved(node: onnx.NodeProto, forms: Forms) -> Iterator[tuple[str, LinearForm]]:
    if node.op_type in ("Conv", "ConvInteger", "QLinearConv", "FusedConv"):
        for form in forms.get(node.input[0], ()):
            if len(form.scales) == 1:
                yield form.scales[0][0], form


def _measured(node: onnx.NodeProto, forms: Forms) -> Iterator[str]:
    """The inputs that are compared with positions up to their own value: they are lengths."""
    if node.op_type in ("Less", "LessOrEqual", "Greater", "GreaterOrEqual"):
        for one, other in ((0, 1), (1, 0)):
            counted = {
                name for form in _at(node, one, forms) if form.counted for name, _ in form.scales
            }
            compared = {name for form in _at(node, other, forms) for name, _ in form.scales}
            yield from counted & compared


def _at(node: onnx.NodeProto, operand: int, forms: Forms) -> tuple[LinearForm, ...]:
    return forms.get(graph.operand(node, operand), ())


def _hides(form: LinearForm) -> bool:
    """Whether ``form`` is an added mask: 0 for a 1, and a large negative number for a 0."""
    if len(form.scales) != 1:
        return False
    low, high = form.scales[0][1]
    return low == high >= _MIN_OF_MASKS and math.isclose(form.offset[0], -low, rel_tol=1e-3)


def _range_of(facts: TensorFacts, reached: _Reached, tensors: Sequence[TensorFacts]) -> Range:
    found = _known_range(facts, reached, tensors)
    if found is None:
        return _guess(facts, reached)
    if is_float(numpy_dtype(facts.dtype)):
        return found
    return _within_dtype(_of_integers(found), facts)


def _known_range(
    facts: TensorFacts, reached: _Reached, tensors: Sequence[TensorFacts]
) -> Range | None:
    """The range that the graph, or the input's name, implies; None if neither does."""
    indices = [each for each in reached.limits if each[1].kind == "index" and not each[0].truth]
    is_integer = not is_float(numpy_dtype(facts.dtype))
    if facts.dtype == "bool":
        usual = 1.0 if is_mask_name(facts.name) or not _is_single(facts) else None
        return Range(0.0, 1.0, True, usual)
    if is_mask_name(facts.name) or (reached.is_mask and not indices):
        return Range(0.0, 1.0, True, 1.0)
    lengths = [each for each in reached.limits if each[1].kind == "length"]
    if is_integer and not indices and (lengths or (is_length_name(facts.name) and _is_flat(facts))):
        return _length(facts, lengths, tensors)
    if indices or lengths:
        return _bounded(facts.name, [*indices, *lengths], reached)
    if (clipped := _clipped(facts.name, reached)) is not None:
        return clipped
    return _chosen(facts, reached) if is_integer else None


def _is_single(facts: TensorFacts) -> bool:
    return facts.shape is not None and all(size == 1 for size in facts.shape)


def _is_flat(facts: TensorFacts) -> bool:
    """Whether there is one number for each member of a batch."""
    return facts.shape is not None and sum(size != 1 for size in facts.shape) <= 1


def _bounded(name: str, found: Sequence[tuple[LinearForm, Limit]], reached: _Reached) -> Range:
    bounds = _EVERYTHING
    usual: float | None = None
    whole = False
    each_bounds = [_inverse(name, form, (limit.low, limit.high)) for form, limit in found]
    # Limits of negative indices, to which graphs add the size, come last: an index cannot have both.
    for its in sorted(each_bounds, key=lambda its: its[1] < 0):
        bounds = _both(bounds, its) or bounds
    for form, limit in found:
        whole = whole or form.whole
        if limit.usual is not None:
            usual = _value_for(name, form, limit.usual)
    if (clipped := _clipped(name, reached)) is not None:
        bounds = _both(bounds, (clipped.low, clipped.high)) or bounds
    return _finite(bounds, usual, whole=whole)


def _finite(bounds: Bounds, usual: float | None, *, whole: bool = False) -> Range:
    low, high = bounds
    low = low if math.isfinite(low) else min(0.0, high)
    high = high if math.isfinite(high) else max(low, _MAX_OF_BYTES)
    if usual is not None:
        usual = min(max(usual, low), high)
    return Range(low, high, True, usual, whole)


def _clipped(name: str, reached: _Reached) -> Range | None:
    """The range outside which values have no effect, if the graph clips them."""
    bounds = _EVERYTHING
    for form, limit in reached.limits:
        if limit.kind == "clip" and len(form.scales) == 1:
            bounds = _both(bounds, _inverse(name, form, (limit.low, limit.high))) or bounds
    return None if math.inf in (bounds[1], -bounds[0]) else _finite(bounds, None)


def _chosen(facts: TensorFacts, reached: _Reached) -> Range | None:
    """The first of the values with which a single number is compared, or a mask."""
    choices = [
        (form, limit) for form, limit in reached.limits if limit.kind == "choice" and not form.truth
    ]
    if _is_single(facts) and choices:
        values = [_value_for(facts.name, form, limit.low) for form, limit in choices]
        named = [value for value in values if value is not None]
        if named and named[0] not in (0, 1):
            return Range(named[0], named[0], True)
        return Range(0.0, 1.0, True)
    masks = (
        form for form, limit in reached.limits if limit.kind == "mask" and form.truth == "itself"
    )
    if any(masks):
        return Range(0.0, 1.0, True, 1.0)
    return None


def _length(
    facts: TensorFacts, found: Iterable[tuple[LinearForm, Limit]], tensors: Sequence[TensorFacts]
) -> Range:
    highs = [
        high
        for form, limit in found
        if math.isfinite(limit.high)
        for high in _inverse(facts.name, form, (limit.low, limit.high))[1:]
        if 1 <= high < math.inf
    ]
    high = min(highs) if highs else float(max(measured_sizes(facts, tensors), default=1))
    return Range(1.0, math.floor(high), True, math.floor(high))


def measured_sizes(facts: TensorFacts, tensors: Sequence[TensorFacts]) -> list[int]:
    """The sizes that the length ``facts`` may measure, as far as names and shapes show it.

    Axis 1 is that of time, unless the axis 2 is longer: features can come first.
    """
    others = [each for each in tensors if each.name != facts.name and len(each.sizes) > 1]
    named = [each for each in others if _is_named_after(facts.name, each.name)]
    for each in named or others:
        sizes = [size for size in each.sizes[1:3] if isinstance(size, int)]
        if sizes:
            return [max(sizes)]
    return []


def _is_named_after(length: str, name: str) -> bool:
    """Whether ``length``, such as ``x_lengths``, is the length of the input ``name``."""
    return length.lower().startswith(name.lower()) or name.lower() == length.lower().split("_")[0]


def _inverse(name: str, form: LinearForm, target: Bounds) -> Bounds:
    """The values of the input ``name`` for which ``form`` is in ``target``; several inputs share it."""
    scale = dict(form.scales)[name]
    if scale[1] < 0:
        return _inverse(name, form.times((-1.0, -1.0)), (-target[1], -target[0]))
    low = -math.inf if form.within[0] >= target[0] else target[0] - form.offset[0]
    high = math.inf if form.within[1] <= target[1] else target[1] - form.offset[1]
    if scale[0] <= 0:
        return _EVERYTHING
    low, high = low / len(form.scales), high / len(form.scales)
    low = low / (scale[0] if low >= 0 else scale[1])
    high = high / (scale[1] if high >= 0 else scale[0])
    return low, high


def _value_for(name: str, form: LinearForm, target: float) -> float | None:
    """The value of the input ``name`` for which ``form`` is ``target``."""
    scale = dict(form.scales)[name]
    if len(form.scales) > 1 or scale[0] != scale[1] or not scale[0]:
        return None
    return (target - form.offset[0]) / scale[0]


def _both(one: Bounds, other: Bounds) -> Bounds | None:
    low, high = max(one[0], other[0]), min(one[1], other[1])
    return (low, high) if low <= high else None


def _of_integers(found: Range) -> Range:
    low, high = math.ceil(found.low - 1e-6), math.floor(found.high + 1e-6)
    usual = None if found.usual is None else float(round(found.usual))
    return replace(found, low=float(low), high=float(max(low, high)), usual=usual, whole=True)


def _within_dtype(found: Range, facts: TensorFacts) -> Range:
    limit = _dtype_bounds(facts)
    low, high = _both((found.low, found.high), limit) or limit
    return replace(found, low=low, high=high)


def _dtype_bounds(facts: TensorFacts) -> Bounds:
    dtype = numpy_dtype(facts.dtype)
    if dtype.kind == "b":
        return 0.0, 1.0
    if dtype.kind == "c":
        return -_MAX_EXACT, _MAX_EXACT
    info = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    return max(float(info.min), -_MAX_EXACT), min(float(info.max), _MAX_EXACT)


def _guess(facts: TensorFacts, reached: _Reached) -> Range:
    """The range of an input that nothing bounds."""
    dtype = numpy_dtype(facts.dtype)
    if is_float(dtype) or dtype.kind == "c":
        if reached.convolved is not None and looks_like_image(facts):
            return image_range(reached.convolved.scales[0][1], reached.convolved.offset)
        if is_scale(facts):
            return Range(0.5, 1.5, known=False, usual=1.0)
        return Range(-DEVIATIONS, DEVIATIONS, known=False)
    low, high = _dtype_bounds(facts)
    if high <= _MAX_OF_BYTES:
        return Range(low, high, known=False, whole=True)
    return Range(0.0, _MAX_OF_BYTES, known=False, whole=True)
