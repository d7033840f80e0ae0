"""The sizes at which powers of inputs, and products of several, leave a number format or cancel each other.

Each value is followed as a sum of terms: a factor, and a degree in the inputs. Where all terms of a sum have
the same degree, as in the mean of squares less the square of the mean, no size of the inputs is more usual
than another. Where they have not, as in ``a x² + b x + c``, the terms are as large as each other at a size
that the factors show. So does the factor of a single power. A root, a logarithm or a quotient of powers is
small, whatever the size of the inputs. A product that nothing makes smaller leaves the format at a size that
its factor shows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace

import numpy as np
import onnx

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.number_format import FLOAT16
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.linear import INVALID, ends

_MAX_TERMS = 8
"""The most terms of one value that are followed."""

_MAX_DEGREE = 4

_COUNTED = 2.0**19
"""The size of counts and amounts of which a quotient is taken."""

_OF_LOGARITHMS, _OF_ROOTS = 2.0**17, 2.0**19
"""The sizes of amounts of which a logarithm or a root is taken: kernels end the first at 65504, as float16,
and the second at 131008 too.
"""

_LARGEST, _WIDEST = FLOAT16.largest, 4096.0
"""Where a product leaves the format; and the largest inputs, of up to 12 bits, for which it matters."""

_KEEPING_SIGNS = (
    operators.MOVES | operators.EXTREMES | operators.MEANS | {"Cast", "Div", "Min", "Mul"}
)
"""Operators whose result is negative only if an operand is."""

_DEVIATION, _DIVISOR = 1 / 8, 2.0**-16
"""That of one value of 64 that is not 0, and the divisor from which reciprocals are float16s."""

_SCALED = 100.0
"""The size from which a factor is for large inputs: smaller ones are those of means."""


@dataclass(frozen=True)
class _Term:
    """At most ``factor`` times a product of so many values of these ``inputs`` as its ``degree``."""

    inputs: frozenset[str] = frozenset()
    degree: float = 0.0
    factor: float = 1.0

    def times(self, other: _Term) -> _Term:
        factor = self.factor * other.factor
        return _Term(self.inputs | other.inputs, self.degree + other.degree, factor)


@dataclass(frozen=True)
class _Sum:
    """The ``terms`` of a value.

    ``positive``: whether it is never negative; ``rising``: or if the inputs are not. ``power``: whether
    inputs were multiplied with each other on the path; ``weighted``: whether weights of both signs are, as
    those of layers.
    """

    terms: tuple[_Term, ...]
    positive: bool = False
    power: bool = False
    weighted: bool = False
    rising: bool = False

    @property
    def degrees(self) -> set[float]:
        return {term.degree for term in self.terms}

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset().union(*(term.inputs for term in self.terms))

    def times(self, other: _Sum) -> _Sum:
        terms = tuple(one.times(two) for one in self.terms for two in other.terms)
        power = self.power or other.power or bool(self.inputs and other.inputs)
        weighted = self.weighted or other.weighted
        positive, rising = self.positive and other.positive, self.rising and other.rising
        return _Sum(terms, positive, power, weighted, rising)


@dataclass(frozen=True)
class SizeOfPowers:
    """The ``size`` up to which powers of an input matter, the largest ``degree`` of those of which a quotient
    is taken, and whether such values differ in size (``is_wide``).
    """

    size: float = 0.0
    degree: float = 0.0
    is_wide: bool = False

    @property
    def least(self) -> float:
        """The level of floats, relative to their usual one, below which the powers are lost."""
        return _DIVISOR ** (1 / self.degree) / _DEVIATION if self.degree else 0.0


@dataclass(frozen=True)
class Powers:
    """The ``sizes`` up to which powers of inputs matter, infinite if no size is more usual than another, and
    the ``amounts``: inputs of which a logarithm or a root is taken, or by which something is divided, so that
    none is negative. ``levels``: of which the mean of squares is taken, as of sound. ``degrees``: the
    largest of inputs of whose powers a quotient is taken; 0 for those of a root or a logarithm, which
    rewrites compute for small ones. ``differences``: inputs of which powers of one degree are subtracted
    from each other. ``remaining``: inputs of whose differences a logarithm or a root is taken.
    """

    sizes: dict[str, float] = field(default_factory=dict)
    amounts: set[str] = field(default_factory=set)
    levels: set[str] = field(default_factory=set)
    degrees: dict[str, float] = field(default_factory=dict)
    differences: set[str] = field(default_factory=set)
    remaining: set[str] = field(default_factory=set)

    def size_of(self, name: str, of_levels: float | None) -> SizeOfPowers:
        """That of the input ``name``; ``of_levels``: the size of ``levels`` of which nothing else shows it,
        if this may be one.
        """
        size = math.inf if name in self.degrees else 0.0
        if of_levels is not None and name in self.levels:
            size = of_levels
        size = self.sizes.get(name, size)
        return SizeOfPowers(size, self.degrees.get(name, 0.0), name in self.remaining)


def powers_of(
    main: onnx.GraphProto,
    names: Iterable[str],
    scope: Scope,
    whole: frozenset[str] = frozenset(),
    factors: Iterable[str] = (),
) -> Powers:
    """Return what the inputs ``names`` of ``main`` are by their powers; ``scope``: of its values.

    ``whole``: those that are integers, such as sizes of pictures: what is multiplied by them is a share.
    ``factors``: other inputs, which are about 1.
    """
    follower = _Follower(scope, names, whole, factors)
    follower.follow(main)
    follower.grow(value.name for value in main.output)
    return follower.found


class _Follower:
    """Follows the powers of inputs, and notes in ``found`` what these are by them."""

    def __init__(
        self, scope: Scope, names: Iterable[str], whole: frozenset[str], factors: Iterable[str]
    ) -> None:
        self.found = Powers()
        self._whole = whole
        self._scope = scope
        self._inputs = frozenset(names)
        self._sums = {
            name: _Sum((_Term(frozenset({name}), 1.0),), rising=True) for name in self._inputs
        }
        self._sums |= dict.fromkeys(factors, _Sum((_Term(),), positive=True, rising=True))

    def follow(self, body: onnx.GraphProto) -> None:
        """Follow the values through ``body``, the branches in it, and once through what it repeats."""
        for node in body.node:
            for inner in graph.inner_graphs(node):
                skipped = 2 if node.op_type == "Loop" else 0
                operands = [] if node.op_type == "If" else node.input[skipped:]
                states = [value.name for value in inner.input][skipped:]
                self._pass(operands, states)
                self.follow(inner)
                results = [value.name for value in inner.output][node.op_type == "Loop" :]
                for state, result in zip(states, results, strict=False):
                    self._repeat(state, result)
                self._pass(results, node.output)
            with contextlib.suppress(*INVALID):
                self._add(node)

    def _pass(self, names: Sequence[str], others: Sequence[str]) -> None:
        """Make values called ``others`` those called ``names``."""
        for name, other in zip(names, others, strict=False):
            if (value := self._operand(name)) is not None:
                self._sums[other] = value

    def _repeat(self, state: str, result: str) -> None:
        """Note the amounts in a ``state`` of which a Loop makes such a ``result``: more or less of the same,
        as of money with its interest.
        """
        before, after = self._sums.get(state), self._sums.get(result)
        if before is None or after is None or before.weighted or after.weighted:
            return
        own = {(term.inputs, term.degree) for term in before.terms if term.degree == 1}
        if not own.isdisjoint((term.inputs, term.degree) for term in after.terms):
            for term in after.terms:
                self._reach(term.inputs if term.degree == 1 else frozenset(), _COUNTED)

    def _add(self, node: onnx.NodeProto) -> None:
        if node.op_type in ("Log", "Sqrt"):
            self._claim(node.input[0])
        elif self._is_fractional_power(node):
            # As a root, also of a quotient.
            self._reach(self._claim(node.input[0]), _OF_LOGARITHMS)
        rule = _RULES.get(node.op_type) if node.domain in graph.STANDARD else None
        if rule is None or not any(name in self._sums for name in node.input):
            return
        operands = [self._operand(name) for name in node.input if name]
        if None in operands[: _READ.get(node.op_type, 1)]:
            return
        result = rule(self, node, [operand or _Sum(()) for operand in operands])
        if result is None or not 0 < len(result.terms) <= _MAX_TERMS:
            return
        if max(result.degrees) > _MAX_DEGREE:
            return
        if all(0 < term.factor < math.inf for term in result.terms):
            self._sums.update(dict.fromkeys(node.output, result))

    def _operand(self, name: str) -> _Sum | None:
        if name in self._sums:
            return self._sums[name]
        value = self._scope.constant(name)
        if value is None or value.dtype.kind not in "iuf" or not value.size:
            return None
        largest = float(np.abs(value.astype(np.float64)).max())
        positive = bool((value >= 0).all())
        return _Sum((_Term(factor=largest),) if largest else (), positive, rising=positive)

    def sum(self, node: onnx.NodeProto, operands: Sequence[_Sum]) -> _Sum | None:
        one, other = operands[:2]
        is_added = node.op_type == "Add"
        is_positive = is_added and one.positive and other.positive
        # A small number that keeps a square from 0 is no term of its own.
        kept = [side for side in (one, other) if side.inputs or not is_positive]
        strongest: dict[tuple[frozenset[str], float], _Term] = {}
        for term in (term for side in kept for term in side.terms):
            key = (term.inputs, term.degree)
            known = strongest.get(key, term)
            strongest[key] = term if term.factor >= known.factor else known
        total = _Sum(
            tuple(strongest.values()),
            is_positive,
            one.power or other.power,
            one.weighted or other.weighted,
            is_added and one.rising and other.rising,
        )
        if is_positive and one.power and other.power:
            # As of the parts of a spectrum.
            self.found.levels.update(total.inputs)
        elif total.power and not (is_positive or total.weighted):
            self._note(total)
        return total

    def _note(self, total: _Sum) -> None:
        """Note the size at which the terms of ``total`` are as large as each other."""
        if len(total.degrees) == 1:
            self._reach(total.inputs, math.inf)
            self.found.differences.update(total.inputs)
        for high in total.terms:
            for low in total.terms:
                if high.degree >= 2 and low.degree < high.degree:
                    ratio = low.factor / high.factor
                    # What both have in common cancels, as an amount in the sum with its interest.
                    names = high.inputs - low.inputs or high.inputs
                    self._reach(names, ratio ** (1 / (high.degree - low.degree)))

    def grow(self, names: Iterable[str]) -> None:
        """Note the sizes at which products among the values ``names`` leave a number format."""
        for name in names:
            if name in self._sums:
                self._grow(self._sums[name])

    def _grow(self, value: _Sum) -> None:
        """The same for one ``value``."""
        if not value.power or value.weighted:
            return
        for term in value.terms:
            size = (_LARGEST / term.factor) ** (1 / term.degree) if term.degree >= 2 else math.inf
            if size <= _WIDEST:
                # Up to beyond it.
                self._reach(term.inputs, 2 * size)

    def _reach(self, names: frozenset[str], size: float) -> None:
        for name in self._measured(names):
            self.found.sizes[name] = max(size, self.found.sizes.get(name, 0.0))

    def _measured(self, names: frozenset[str]) -> frozenset[str]:
        """Those of the inputs ``names`` that have a size: integers, if there are some."""
        return self._whole & names or names

    def divide(self, node: onnx.NodeProto, operands: Sequence[_Sum]) -> _Sum | None:
        one, other = operands[:2]
        if not other.inputs:
            inverse = (replace(term, factor=1 / term.factor) for term in other.terms)
            return self._scaled(one.times(replace(other, terms=tuple(inverse))))
        self._rise(other)
        if one.weighted or other.weighted:
            return None
        is_share = one.degrees == other.degrees and len(one.degrees) == 1
        if is_share and (one.power or other.power):
            # What is divided by its own norm may have any.
            self._reach(one.inputs & other.inputs, math.inf)
            self._undo(one, is_share=True)
            self._undo(other, is_share=True)
        elif other.rising and max(other.degrees) == 1:
            # A quotient of counts, or a mean with weights, the sum of which divides that of products; or a
            # change relative to one of the values.
            is_of_own = other.inputs <= one.inputs
            most = 2 if is_of_own and one.rising else 1
            if (one.rising or (is_share and is_of_own)) and 1 <= max(one.degrees) <= most:
                self._reach(one.inputs | other.inputs, _COUNTED)
        if not is_share:
            self._grow(one)
        return None

    def _undo(self, value: _Sum, *, is_share: bool = False) -> None:
        """Note the inputs of a power ``value`` of which something small is made."""
        degree = max(value.degrees, default=0.0)
        if degree >= 2 and value.power and not value.weighted and len(value.degrees) == 1:
            for name in self._measured(value.inputs):
                self.found.degrees[name] = max(degree * is_share, self.found.degrees.get(name, 0.0))

    def _is_fractional_power(self, node: onnx.NodeProto) -> bool:
        """Whether ``node`` is a power that is no number for negative values."""
        if node.op_type != "Pow" or len(node.input) != 2:
            return False
        exponent = self._scope.constant(node.input[1])
        return exponent is None or bool((exponent != np.rint(exponent)).any())

    def _claim(self, name: str) -> frozenset[str]:
        """The inputs of which ``name`` is a product or a quotient: none of these is negative."""
        waiting, seen, claimed = [name], set[str](), set[str]()
        while waiting:
            name = waiting.pop()
            maker = self._scope.maker(name)
            if name in self._inputs:
                claimed.add(name)
            if maker is not None and maker.op_type in _KEEPING_SIGNS:
                others = {*maker.input} - seen
                # A square has any sign, and what is at least a positive number too.
                if len(maker.input) != 2 or len({*maker.input}) == 2:
                    waiting += others
                seen |= others
        self.found.amounts.update(claimed)
        return frozenset(claimed)

    def _rise(self, value: _Sum) -> None:
        """Note inputs that are not negative, because ``value`` is not: a product, but for squares."""
        if value.rising and all(len(term.inputs) == term.degree for term in value.terms):
            self.found.amounts.update(value.inputs)

    def multiply(self, node: onnx.NodeProto, operands: Sequence[_Sum]) -> _Sum | None:
        one, other = operands[:2]
        product = self._scaled(one.times(other))
        return replace(product, positive=product.positive or node.input[0] == node.input[1])

    def _scaled(self, product: _Sum) -> _Sum:
        """``product``; inputs for which it is 1 have the size that its factor shows, if that is large."""
        if product.power and not product.weighted and len(product.terms) == 1:
            (term,) = product.terms
            if term.degree >= 2 and (size := term.factor ** (-1 / term.degree)) >= _SCALED:
                self._reach(term.inputs, size)
        return product

    def power(self, node: onnx.NodeProto, operands: Sequence[_Sum]) -> _Sum | None:
        exponent = self._scope.constant(node.input[1])
        if exponent is None or exponent.size != 1 or exponent.item() not in (0.5, 1, 2, 3, 4):
            return None
        base, number = operands[0], float(exponent.item())
        if number == 0.5:
            return self.root(node, operands)
        result = base
        for _ in range(int(number) - 1):
            result = result.times(base)
        return replace(result, positive=base.positive or number % 2 == 0)

    def logarithm(self, node: onnx.NodeProto, operands: Sequence[_Sum]) -> None:
        self._bend(node, operands[0], _OF_LOGARITHMS)

    def _bend(self, node: onnx.NodeProto, base: _Sum, size: float) -> None:
        """Note the inputs of ``base``, of which ``node`` makes something small; amounts have a ``size``."""
        self._rise(base)
        self._undo(base)
        # A difference that is kept from being negative is an amount too.
        is_amount = (base.rising or base.positive) and not base.inputs & self._whole
        is_amount &= not self._is_share(node.input[0])
        if is_amount and max(base.degrees, default=0.0) == 1:
            self._reach(base.inputs, size)
            if not base.rising:
                self.found.remaining.update(base.inputs)

    def _is_share(self, name: str) -> bool:
        """Whether something smaller than 1 keeps a value from 0, as that of a spectrum."""
        maker = self._scope.maker(name)
        kept = maker.input if maker and maker.op_type in ("Add", "Clip", "Max") else ()
        return any(0 < end < 1 for operand in kept for end in ends(operand, self._scope))

    def root(self, node: onnx.NodeProto, operands: Sequence[_Sum]) -> _Sum | None:
        base = operands[0]
        self._bend(node, base, _OF_ROOTS)
        if len(base.degrees) != 1:
            return None
        terms = (replace(t, degree=t.degree / 2, factor=math.sqrt(t.factor)) for t in base.terms)
        return replace(base, terms=tuple(terms), positive=True)

    def square(self, node: onnx.NodeProto, operands: Sequence[_Sum]) -> _Sum | None:
        self.found.levels.update(operands[0].inputs)
        return replace(operands[0].times(operands[0]), positive=True)

    def norm(self, node: onnx.NodeProto, operands: Sequence[_Sum]) -> _Sum | None:
        total = self.square(node, operands)
        return total and self.root(node, [total])

    def join(self, node: onnx.NodeProto, operands: Sequence[_Sum]) -> _Sum | None:
        """Values of several operands; constants are limits."""
        kept = [operand for operand in operands if operand.inputs]
        is_larger = node.op_type == "Max" and any(operand.positive for operand in operands)
        return _Sum(
            tuple(dict.fromkeys(term for operand in kept for term in operand.terms)),
            is_larger or all(operand.positive for operand in kept),
            any(operand.power for operand in kept),
            any(operand.weighted for operand in kept),
            all(operand.rising for operand in kept),
        )

    def scatter(self, node: onnx.NodeProto, operands: Sequence[_Sum]) -> _Sum | None:
        """Updates in data, as in a histogram."""
        data, _, updates = operands
        return self.join(node, [data, updates])

    def clip(self, node: onnx.NodeProto, operands: Sequence[_Sum]) -> _Sum | None:
        low = self._operand(graph.operand(node, 1))
        is_kept = low is not None and low.positive
        is_kept |= graph.attribute(node, "min", -1.0) >= 0
        return replace(operands[0], positive=operands[0].positive or is_kept)

    def product(self, node: onnx.NodeProto, operands: Sequence[_Sum]) -> _Sum | None:
        """That of the values along axes, as of the sides of boxes."""
        sizes, axes = self._scope.sizes(node.input[0]), self._scope.axes(node)
        size = math.prod(sizes[axis] or 0 for axis in axes) if sizes and axes else 0
        if not 0 < size <= _MAX_DEGREE:
            return None
        result = operands[0]
        for _ in range(size - 1):
            result = result.times(operands[0])
        return result

    def reduce(self, node: onnx.NodeProto, operands: Sequence[_Sum]) -> _Sum | None:
        if operands[0].power:
            self.found.levels.update(operands[0].inputs)
        return operands[0]

    def size_of(self, node: onnx.NodeProto, operands: Sequence[_Sum]) -> _Sum | None:
        rising = node.op_type == "Relu" and operands[0].rising
        return replace(operands[0], positive=True, rising=rising)

    def combine(self, node: onnx.NodeProto, operands: Sequence[_Sum]) -> _Sum | None:
        """Sums of products with weights, or of two values with each other."""
        one, other = operands[:2]
        weights = [side for side in (one, other) if not side.inputs]
        is_weighted = any(not side.positive for side in weights)
        return replace(one.times(other), weighted=is_weighted or one.weighted or other.weighted)


_Rule = Callable[[_Follower, onnx.NodeProto, Sequence[_Sum]], "_Sum | None"]

_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(
        operators.MOVES | operators.PADS | operators.EXTREMES | {"Cast"},
        lambda follower, node, operands: operands[0],
    ),
    **dict.fromkeys(operators.MEANS | {"ReduceSum"}, _Follower.reduce),
    **dict.fromkeys(("Add", "Sub"), _Follower.sum),
    **dict.fromkeys(("Concat", "Max", "Min"), _Follower.join),
    **dict.fromkeys(("MatMul", "Gemm", "Conv"), _Follower.combine),
    **dict.fromkeys(("Abs", "Relu"), _Follower.size_of),
    "Clip": _Follower.clip,
    # Differences of running sums are small.
    "CumSum": lambda follower, node, operands: replace(operands[0], power=True),
    "Div": _Follower.divide,
    "Log": _Follower.logarithm,
    "Mul": _Follower.multiply,
    "Neg": lambda follower, node, operands: replace(operands[0], positive=False, rising=False),
    "Pow": _Follower.power,
    **dict.fromkeys(("ScatterElements", "ScatterND"), _Follower.scatter),
    "ReduceL2": _Follower.norm,
    "ReduceProd": _Follower.product,
    "ReduceSumSquare": _Follower.square,
    "Sqrt": _Follower.root,
}

_READ = dict.fromkeys(("Add", "Sub", "MatMul", "Gemm", "Conv", "Div", "Mul", "Pow"), 2)
"""The operators of two operands that are followed."""
