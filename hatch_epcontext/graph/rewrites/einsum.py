"""``Einsum`` as Transpose, Reshape, MatMul, Mul and ReduceSum."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs, by_node
from hatch_epcontext.graph.scope import Scope

_MAX_DIMENSIONS = 4
"""The most dimensions of an operand that every EP multiplies; more are joined."""


@dataclass(frozen=True)
class _Operand:
    """A value, and a letter for each of its dimensions, which are all different."""

    value: str
    labels: str


@dataclass(frozen=True)
class _Sums:
    """Writes the nodes; ``sizes`` are those of the letters."""

    builder: Builder
    sizes: Mapping[str, int]

    def summed(self, operand: _Operand, kept: str) -> _Operand:
        """``operand`` summed over the letters that are not in ``kept``."""
        axes = tuple(i for i, label in enumerate(operand.labels) if label not in kept)
        if not axes:
            return operand
        labels = "".join(label for label in operand.labels if label in kept)
        return _Operand(self.builder.reduced("ReduceSum", operand.value, axes, keepdims=0), labels)

    def ordered(self, operand: _Operand, labels: str) -> _Operand:
        """``operand`` with its dimensions in the order of ``labels``."""
        if labels == operand.labels:
            return operand
        perm = [operand.labels.index(label) for label in labels]
        return _Operand(self.builder.transpose(operand.value, perm), labels)

    def grouped(self, operand: _Operand, groups: Sequence[str]) -> str:
        """``operand`` with one dimension for each of ``groups``, of size 1 for an empty one."""
        value = self.ordered(operand, "".join(groups)).value
        if all(len(group) == 1 for group in groups):
            return value
        return self.builder.reshape(value, [self.size(group) for group in groups])

    def size(self, labels: str) -> int:
        return math.prod(self.sizes[label] for label in labels)

    def multiplied(self, a: _Operand, b: _Operand, kept: str) -> _Operand:
        """The product of ``a`` and ``b``, summed over the letters that are not in ``kept``."""
        both = [label for label in a.labels if label in b.labels]
        a = self.summed(a, kept + b.labels)
        b = self.summed(b, kept + a.labels)
        shared = "".join(label for label in both if label in kept)
        inner = "".join(label for label in both if label not in kept)
        left = "".join(label for label in a.labels if label not in both)
        right = "".join(label for label in b.labels if label not in both)
        batch = list(shared) if len(shared) + 2 <= _MAX_DIMENSIONS else [shared]
        if inner:
            operands = (
                self.grouped(a, [*batch, left, inner]),
                self.grouped(b, [*batch, inner, right]),
            )
            product = self.builder.add("MatMul", *operands)
        else:
            operands = self.grouped(a, [*batch, left, ""]), self.grouped(b, [*batch, "", right])
            product = self.builder.add("Mul", *operands)
        labels = shared + left + right
        if not all(len(group) == 1 for group in [*batch, left, right]):
            product = self.builder.reshape(product, [self.sizes[label] for label in labels])
        return _Operand(product, labels)


def _expand(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    shapes = [scope.shape(name) for name in node.input]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    parsed = _parse(graph.text(node, "equation"), known)
    if parsed is None:
        return None
    terms, result = parsed
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, known, strict=True):
        for label, size in zip(term, shape, strict=True):
            # NumPy's broadcasting of a size 1 is rare here.
            if sizes.setdefault(label, size) != size:
                return None
    sums = _Sums(builder, sizes)
    first, *others = (_Operand(n, term) for n, term in zip(node.input, terms, strict=True))
    while others:
        second, *others = others
        kept = result + "".join(each.labels for each in others)
        first = sums.multiplied(first, second, kept)
    return [sums.ordered(sums.summed(first, result), result).value]


def _parse(equation: str, shapes: Sequence[tuple[int, ...]]) -> tuple[list[str], str] | None:
    """The letters of the operands and of the result; None for an unknown form.

    The dimensions of an ellipsis get letters too.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        return None
    unused = [label for label in string.ascii_letters if label not in equation]
    counts = [
        len(shape) - len(term.replace("...", "")) for term, shape in zip(terms, shapes, strict=True)
    ]
    if any(
        count < 0 or (count and "..." not in term)
        for term, count in zip(terms, counts, strict=True)
    ):
        return None
    most = max(counts)
    if most > len(unused):
        return None
    # The last dimensions correspond, as in broadcasting.
    ellipsis = "".join(unused[:most])
    terms = [
        term.replace("...", ellipsis[most - count :])
        for term, count in zip(terms, counts, strict=True)
    ]
    if not arrow:
        letters = "".join(terms)
        right = "".join(sorted(e for e in set(letters) - set(ellipsis) if letters.count(e) == 1))
        right = f"...{right}"
    result = right.replace("...", ellipsis)
    if any(len(set(each)) < len(each) for each in [*terms, result]):
        # The diagonal of an operand.
        return None
    return None if set(result) - set("".join(terms)) else (terms, result)


EINSUM = by_node("Einsum as MatMul, Mul and ReduceSum", {"Einsum": _expand})
