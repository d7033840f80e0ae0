"""The floats in which an EP computes, and what it computes wrong, for graphs that stand in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FUSING = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators that EPs compute together with the addition and the activation behind them."""

RewriteName = Literal[
    "square",
    "mean",
    "clip-inputs",
    "exp",
    "hypot",
    "log-power",
    "log-scale",
    "variance",
    "scaled-square",
    "softplus",
    "barrier",
    "log-softmax",
    "sigmoid",
]
"""The rewrites of what EPs compute wrong, or inexactly, in float16: see `rewrites.precise`."""

ALWAYS: tuple[RewriteName, ...] = ("square", "mean", "clip-inputs")
"""The rewrites that lose nothing, and are applied to all models where they avoid something."""

FOR_RANGES: tuple[RewriteName, ...] = (
    *("exp", "hypot", "log-power", "log-scale", "variance", "scaled-square", "softplus"),
)
"""Those that avoid what an emulation of the number format shows, or values that a kernel gets wrong."""

REMEDIES: tuple[tuple[RewriteName, ...], ...] = (
    FOR_RANGES,
    ("barrier",),
    ("log-softmax", "sigmoid"),
)
"""Those that add nodes, in the groups in which they are tried where outputs differ, or may differ.

All but `FOR_RANGES` avoid inexact kernels of an EP, which only a run shows.
"""

_FOR_SMALL_RANGES: frozenset[RewriteName] = frozenset(
    {"mean", "hypot", "log-power", "log-scale", "variance", "scaled-square"}
)
"""Those that keep sums, squares and their differences within the range of float16."""


@dataclass(frozen=True)
class Fault:
    """Nodes of ``operator`` that an EP computes wrong, although its number format has their results.

    ``text``: what is wrong, the end of a sentence about the node. ``rewrite``: the name of the rewrite that
    avoids it, None if there is none. ``operand``: the number, from 0, of the operand that decides: results
    are wrong where it is from ``low`` to ``high``, and then they are ``gives``, or at worst (None where one
    element does not decide, or where results are only less exact). Where ``high`` is -0.0, 0.0 is right.

    Its conditions: ``exponent``, that of a Pow; ``computed``: only where the operand is no stored tensor;
    ``behind``: only directly behind these operators, with or without an Add between; ``inputs``: how many
    the node has; ``attributes``: names, and the values that each may have, ``""`` where the node does not
    have it.
    """

    operator: str
    text: str
    rewrite: RewriteName | None = None
    operand: int = 0
    low: float = 0.0
    high: float = 0.0
    gives: float | None = None
    exponent: float | None = None
    computed: bool = False
    behind: frozenset[str] = frozenset()
    inputs: int | None = None
    attributes: tuple[tuple[str, frozenset[str]], ...] = ()

    def concerns(self, operator: str, inputs: int, attributes: Mapping[str, str]) -> bool:
        """Whether a node with so many inputs, and these of its attributes that are strings, may have it.

        ``exponent``, ``computed`` and ``behind`` depend on other nodes, and are left to the caller.
        """
        return (
            operator == self.operator
            and self.operand < inputs
            and self.inputs in (None, inputs)
            and all(attributes.get(name, "") in values for name, values in self.attributes)
        )


@dataclass(frozen=True)
class NumberFormat:
    """How an EP rounds floats; for ``sums``, operators, it saturates at ``largest_of_sums``.

    ``seen``: where that was measured, such as "the simulator of onnxruntime-qnn 2.7.0"; empty if it was not:
    then nothing that is computed with it decides. ``inexact``: operators whose kernels are less exact
    than their format. ``has_reciprocals``: whether a / b is a * (1 / b), where 1 / b is rounded too.
    """

    name: Literal["float16", "bfloat16"]
    largest: float
    largest_of_sums: float
    sums: frozenset[str] = frozenset()
    seen: str = ""
    faults: tuple[Fault, ...] = ()
    inexact: frozenset[str] = frozenset()
    has_reciprocals: bool = False

    def faults_of(self, operator: str) -> tuple[Fault, ...]:
        """Those that nodes of ``operator`` may have."""
        return tuple(each for each in self.faults if each.operator == operator)

    @property
    def rewrites(self) -> frozenset[RewriteName]:
        """Those of `ALWAYS` and `REMEDIES` that avoid something of it."""
        avoided = {fault.rewrite for fault in self.faults if fault.rewrite}
        return frozenset(avoided) | (_FOR_SMALL_RANGES if self.name == "float16" else frozenset())


FLOAT16 = NumberFormat("float16", 65504.0, 65504.0)
BFLOAT16 = NumberFormat("bfloat16", 3.3895e38, 3.3895e38)
