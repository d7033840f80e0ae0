"""The ranges of the inputs of a model.

Each input is followed forwards, through nodes that keep its values or change them linearly, to the nodes
that bound it: tables that it indexes, positions, lengths, limits. Shapes and indices are often computed:
more is found in a graph in which a simplifier has folded these.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx

from hatch_epcontext.graph.dtypes import dtype_bounds, is_float, numpy_dtype
from hatch_epcontext.graph.facts import Far, Range, TensorFacts
from hatch_epcontext.graph.number_format import FUSING
from hatch_epcontext.graph.operators import REPEATING
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.bounds import Bound, bounds, divisors
from hatch_epcontext.graph.values.components import center_away_from_pole
from hatch_epcontext.graph.values.conventions import (
    DEVIATIONS,
    MAX_OF_BYTES,
    is_length_name,
    is_mask_name,
    is_scale,
    looks_like_image,
    looks_like_sound,
)
from hatch_epcontext.graph.values.far import FULL_SCALE, with_far
from hatch_epcontext.graph.values.linear import LinearTerm, LinearTerms
from hatch_epcontext.graph.values.powers import powers_of
from hatch_epcontext.graph.values.uses import Uses, UsesOfInputs

_SCALED = 0.03
"""The factor below which a graph scales bytes to about 1: usual factors are 1/255 to 1/57."""

_FAINT = 0.5
"""The largest value that filters make of values up to 1, below which these are for bytes: theirs are 0.04 to
0.25, and others' 1 (a mean) to 60.
"""

_TURN, _MAX_TURN = 3 * math.pi, 1000.0
"""A turn and a half in radians, and the largest, of degrees and hours: times since a start have many."""

_CENTERED = -60.0
"""The offset below which a graph subtracts the mean of bytes."""


def input_ranges(main: onnx.GraphProto, inputs: Sequence[TensorFacts]) -> dict[str, Range]:
    """Return the range of each of the ``inputs`` that has numbers; ``main`` has the types of its values.

    Integers that nothing bounds are bytes; floats have a normal distribution, with a range of 8 standard
    deviations on either side.
    """
    tensors = [facts for facts in inputs if _is_number(facts)]
    of_inputs, uses = _bounds(main, tensors)
    ranges = {facts.name: _range(facts, of_inputs[facts.name], tensors) for facts in tensors}
    open_inputs = {
        facts.name: facts
        for facts in tensors
        if (not (range_ := ranges[facts.name]).known and range_.usual is None)
        or _is_weight(facts, uses.of[facts.name], of_inputs[facts.name])
    }
    for name, center in _centers(uses.scope):
        if name in open_inputs and ranges[name].is_open:
            # Where each divides the others, they vary around that.
            ranges[name] = replace(ranges[name], standardized=center)
    whole = frozenset(name for name in open_inputs if ranges[name].whole)
    factors = [name for name, range_ in ranges.items() if range_.usual == 1 and not range_.known]
    powers = powers_of(main, open_inputs, uses.scope, whole, factors)
    for facts in open_inputs.values():
        of_levels = FULL_SCALE if looks_like_sound(facts) else None
        own = uses.of[facts.name]
        own.powers = powers.size_of(facts.name, of_levels)
        range_, is_amount = ranges[facts.name], facts.name in powers.amounts
        ranges[facts.name] = replace(
            range_,
            low=max(range_.low, 0.0) if is_amount and range_.whole else range_.low,
            signed=not is_amount,
            squared=facts.name in powers.differences,
        )
    return {
        facts.name: with_far(facts, ranges[facts.name], uses.of[facts.name]) for facts in tensors
    }


def _centers(scope: Scope) -> Iterator[tuple[str, Far]]:
    """The inputs of which a component divides something, and around what they are."""
    for node in scope.nodes:
        if (component := center_away_from_pole(node, scope)) is not None:
            name, center = component
            centers = tuple(map(float, center))
            yield name, Far(centers=centers, spreads=(1.0,) * center.size, shape=center.shape)


def _is_weight(facts: TensorFacts, uses: Uses, reached: Sequence[Bound]) -> bool:
    """Whether only its name makes an input a mask, and the graph uses its floats as numbers."""
    is_named = is_mask_name(facts.name) and is_float(numpy_dtype(facts.dtype))
    return is_named and uses.is_weight and all(bound.kind != "mask" for bound in reached)


def _is_number(facts: TensorFacts) -> bool:
    try:
        return facts.dtype != "string" and numpy_dtype(facts.dtype).kind != "O"
    except TypeError:
        return False


def _bounds(
    main: onnx.GraphProto, tensors: Sequence[TensorFacts]
) -> tuple[Mapping[str, list[Bound]], UsesOfInputs]:
    """The bounds that each of the inputs ``tensors`` reaches, of the input's own values, and their uses."""
    terms = LinearTerms(
        main,
        {
            facts.name: LinearTerm(facts.name, truth="itself" if facts.dtype == "bool" else "")
            for facts in tensors
        },
    )
    reached: defaultdict[str, list[Bound]] = defaultdict(list)
    uses = UsesOfInputs(terms)
    # Of a formula's quantities, such as a speed, none is a factor of what layers compute.
    has_layers = any(node.op_type in FUSING | REPEATING for node in terms.scope.nodes)
    for node in terms.follow():
        uses.add(node)
        for bound in bounds(node, terms.scope):
            of_operand = terms.of(node.input[bound.operand])
            for term in of_operand:
                # Columns with means of their own have no limits in common.
                is_shared = bound.kind != "clip" or _is_shared(term, of_operand)
                if is_shared and _concerns(bound, term):
                    reached[term.input].append(_of_input(bound, term))
        if node.op_type in ("Conv", "ConvInteger", "QLinearConv", "FusedConv"):
            gain = _gain(node, terms.scope)
            for term in terms.of(node.input[0]):
                is_faint = term.scale < _SCALED or term.scale * gain < _FAINT
                of_bytes = (term.scale > 0 and is_faint) or term.offset < _CENTERED
                high = MAX_OF_BYTES if of_bytes else 1.0
                reached[term.input].append(Bound(0, 0.0, high, "image"))
        for name in _factors(node, terms) if has_layers else ():
            reached[name].append(Bound(0, 0.5, 1.5, "factor"))
    names = {facts.name for facts in tensors}
    for node in terms.scope.nodes:
        for name, bound in divisors(node, terms.scope):
            if name in names:
                reached[name].append(bound)
    uses.add_outputs(value.name for value in main.output)
    for facts in tensors:
        if numpy_dtype(facts.dtype).kind in "iu" and uses.of[facts.name].scale < 1:
            # What is scaled is a number, also if it hides others where it is 0, as distances without an echo.
            own = reached[facts.name]
            reached[facts.name] = [bound for bound in own if bound.kind != "mask"]
    return reached, uses


def _gain(node: onnx.NodeProto, scope: Scope) -> float:
    """The largest value that most filters of a convolution can make of values from -1 to 1; infinite if its
    filters are no stored floats.
    """
    filters = scope.constant(node.input[1])
    if filters is None or not is_float(filters.dtype) or filters.ndim < 2:
        return math.inf
    sums = np.abs(filters.astype(np.float64)).reshape(len(filters), -1).sum(axis=1)
    # One of zeros computes nothing. NumPy's own median imports a large module.
    some = np.sort(sums[sums > 0])
    middle = some[(some.size - 1) // 2 : some.size // 2 + 1]
    return float(middle.mean()) if some.size else math.inf


def _factors(node: onnx.NodeProto, terms: LinearTerms) -> Iterator[str]:
    """The inputs of which ``node`` is a product with other values, or a quotient."""
    if node.op_type in ("Div", "Mul"):
        for one, other in (node.input, reversed(node.input)):
            if terms.scope.constant(other) is None:
                yield from (term.input for term in terms.of(one))


def _is_shared(term: LinearTerm, terms: Iterable[LinearTerm]) -> bool:
    """Whether all ``terms`` of its input are 0 for the same number as ``term``."""
    zero, others = term.input_of(0.0), (other for other in terms if other.input == term.input)
    return all(math.isclose(other.input_of(0.0), zero, rel_tol=1e-6) for other in others)


def _concerns(bound: Bound, term: LinearTerm) -> bool:
    """Whether a value with this ``term`` is what ``bound`` is about: booleans are masks, and no numbers."""
    if bound.kind == "mask":
        return term.truth == "itself"
    if bound.kind == "clip" and term.several and term.scale < 0:
        # What is subtracted from something that is clipped.
        return False
    return not term.truth or bound.kind in ("length", "clip")


def _of_input(bound: Bound, term: LinearTerm) -> Bound:
    """``bound`` for the input of ``term``."""
    low, high = sorted(map(term.input_of, (bound.low, bound.high)))
    usual = None if bound.usual is None else term.input_of(bound.usual)
    return replace(bound, low=low, high=high, usual=usual, whole=term.whole)


def _range(facts: TensorFacts, reached: Sequence[Bound], tensors: Sequence[TensorFacts]) -> Range:
    """The range of an input that reaches these bounds; ``tensors``: all inputs."""
    dtype = numpy_dtype(facts.dtype)
    if dtype.kind == "b":
        return Range(0.0, 1.0, True, _usual_of_mask(facts, reached))
    known = _known_range(facts, reached, tensors)
    if is_float(dtype) or dtype.kind == "c":
        return known or _open_range(facts, reached)
    lowest, highest = dtype_bounds(facts)
    if known is None:
        is_byte = highest <= MAX_OF_BYTES
        low, high = (lowest, highest) if is_byte else (0.0, MAX_OF_BYTES)
        for bound in (bound for bound in reached if bound.kind == "divisor"):
            # Integers are not divided by 0.
            low = max(low, min(math.ceil(bound.low), highest // 3))
            high = max(high, min(math.floor(bound.high), highest))
        picture = dtype == np.uint8 and looks_like_image(facts)
        return Range(low, high, known=False, whole=True, picture=picture)
    low, high = math.ceil(known.low - 1e-6), math.floor(known.high + 1e-6)
    low, high = _both((low, max(low, high)), (lowest, highest)) or (lowest, highest)
    usual = None if known.usual is None else float(round(known.usual))
    kinds = {bound.kind for bound in reached}
    loose = usual is None and kinds <= {"choice", "clip", "member", "image", "turn"}
    return Range(float(low), float(high), True, usual, whole=True, loose=loose)


def _usual_of_mask(facts: TensorFacts, reached: Iterable[Bound]) -> float | None:
    """1 in a mask, as its name or what it hides shows; None if an input only chooses."""
    is_mask = is_mask_name(facts.name) or any(bound.usual is not None for bound in reached)
    return 1.0 if is_mask else None


def _is_single(facts: TensorFacts) -> bool:
    return facts.shape is not None and all(size == 1 for size in facts.shape)


def _is_of_members(facts: TensorFacts, tensors: Sequence[TensorFacts]) -> bool:
    """Whether there is one number for each member of a batch of one of ``tensors``."""
    several = [size for size in facts.sizes if size != 1]
    batches = [other.sizes[0] for other in tensors if len(other.sizes) > 1]
    is_flat = facts.shape is not None and len(several) <= 1
    return is_flat and (not several or not isinstance(several[0], int) or several[0] in batches)


def _known_range(
    facts: TensorFacts, reached: Sequence[Bound], tensors: Sequence[TensorFacts]
) -> Range | None:
    """The range that the graph, or the input's name, implies; None if neither does."""
    kinds: defaultdict[str, list[Bound]] = defaultdict(list)
    for bound in reached:
        kinds[bound.kind].append(bound)
    is_integer = not is_float(numpy_dtype(facts.dtype))
    indices = [*kinds["index"], *kinds["member"]]
    if (is_mask_name(facts.name) or kinds["mask"]) and not indices:
        return Range(0.0, 1.0, True, _usual_of_mask(facts, kinds["mask"]))
    is_length = kinds["length"] or (is_length_name(facts.name) and _is_of_members(facts, tensors))
    if is_integer and is_length and not indices:
        return _length(facts, kinds["length"], tensors)
    firm = [*kinds["index"], *kinds["member"], *kinds["length"]]
    if firm or kinds["clip"]:
        return _intersection(firm, kinds["clip"])
    if turns := [bound for bound in kinds["turn"] if _TURN < bound.high - bound.low < _MAX_TURN]:
        return Range(min(bound.low for bound in turns), max(bound.high for bound in turns), True)
    if is_integer and kinds["choice"] and _is_single(facts):
        # The first of the values with which a single number is compared.
        value = kinds["choice"][0].low
        return Range(value, value, True) if value not in (0, 1) else Range(0.0, 1.0, True)
    return None


def _intersection(firm: Sequence[Bound], clips: Sequence[Bound]) -> Range | None:
    """The values within all bounds, as far as these fit; None if there are only clips, open at a side."""
    low, high = -math.inf, math.inf
    # Bounds of negative indices, to which graphs add the size, come last: an index cannot have both.
    for bound in (*sorted(firm, key=lambda bound: bound.high < 0), *clips):
        low, high = _both((low, high), (bound.low, bound.high)) or (low, high)
    if not firm and math.inf in (-low, high):
        return None
    low = low if math.isfinite(low) else min(0.0, high)
    high = high if math.isfinite(high) else max(low, MAX_OF_BYTES)
    usual = next((bound.usual for bound in reversed(firm) if bound.usual is not None), None)
    if usual is not None:
        usual = min(max(usual, low), high)
    return Range(low, high, True, usual, any(bound.whole for bound in firm))


def _length(facts: TensorFacts, lengths: Iterable[Bound], tensors: Sequence[TensorFacts]) -> Range:
    highs = [bound.high for bound in lengths if 1 <= bound.high < math.inf]
    high = math.floor(min(highs, default=_measured_size(facts, tensors)))
    return Range(1.0, high, True, high)


def _measured_size(facts: TensorFacts, tensors: Sequence[TensorFacts]) -> int:
    """The size that the length ``facts`` measures, as far as names and shapes show it, or else 1.

    Axis 1 is that of time, unless the axis 2 is longer: features can come first.
    """
    others = [other for other in tensors if other.name != facts.name and len(other.sizes) > 1]
    named = [other for other in others if _is_named_after(facts.name, other.name)]
    for other in named or others:
        sizes = [size for size in other.sizes[1:3] if isinstance(size, int)]
        if sizes:
            return max(sizes)
    return 1


def _is_named_after(length: str, name: str) -> bool:
    """Whether ``length``, such as ``x_lengths``, is the length of the input ``name``."""
    return length.lower().startswith(name.lower()) or name.lower() == length.lower().split("_")[0]


def _both(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float] | None:
    low, high = max(one[0], other[0]), min(one[1], other[1])
    return (low, high) if low <= high else None


def _open_range(facts: TensorFacts, reached: Sequence[Bound]) -> Range:
    """The range of floats that nothing bounds."""
    images = [bound.high for bound in reached if bound.kind == "image"]
    if images and looks_like_image(facts):
        return Range(0.0, min(images), known=False, picture=True)
    if is_scale(facts) and any(bound.kind == "factor" for bound in reached):
        return Range(0.5, 1.5, known=False, usual=1.0)
    for bound in reached:
        if bound.kind == "divisor":
            return Range(bound.low, bound.high, known=False)
    return Range(-DEVIATIONS, DEVIATIONS, known=False)
