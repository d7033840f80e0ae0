"""The floats in which an EP computes, and what it computes wrong, for graphs that stand in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FUSING = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators that EPs compute together with the addition and the activation behind them."""

RewriteName = Literal[
    "square",
    "mean",
    "clip-inputs",
    "barrier",
    "exp",
    "hypot",
    "log-power",
    "scaled-square",
    "softplus",
    "log-softmax",
    "sigmoid",
]
"""The rewrites of what EPs compute wrong, or inexactly, in float16: see `rewrites.precise`."""

ALWAYS: tuple[RewriteName, ...] = ("square", "mean", "clip-inputs")
"""The rewrites that lose nothing, and are applied to all models where they avoid something."""

REMEDIES: tuple[RewriteName, ...] = (
    "barrier",
    "exp",
    "hypot",
    "log-power",
    "scaled-square",
    "softplus",
    "log-softmax",
    "sigmoid",
)
"""Those that add nodes, in the order in which they are tried where outputs differ, or may differ."""

_FOR_SMALL_RANGES: frozenset[RewriteName] = frozenset(
    {"mean", "hypot", "log-power", "scaled-square"}
)
"""Those that keep sums and squares within the range of float16."""


@dataclass(frozen=True)
class Fault:
    """Nodes of ``operator`` that an EP computes wrong, although its number format has their results.

    ``text``: what is wrong, the end of a sentence about the node. ``rewrite``: the name of the rewrite that
    avoids it, None if there is none. ``operand``: the number, from 0, of the operand that decides: results
    are wrong where it is from ``low`` to ``high``, and then they are ``gives`` (None where that is not one
    value). ``exponent``: that of a Pow. ``behind``: it is wrong only directly behind these operators, with or
    without an Add between.
    """

    operator: str
    text: str
    rewrite: RewriteName | None = None
    operand: int = 0
    low: float = 0.0
    high: float = 0.0
    gives: float | None = None
    exponent: float | None = None
    behind: frozenset[str] = frozenset()


@dataclass(frozen=True)
class NumberFormat:
    """How an EP rounds floats; for ``sums``, operators, it saturates at ``largest_of_sums``.

    ``seen``: where that was measured, such as "the simulator of onnxruntime-qnn 2.7.0"; empty if it was not:
    then nothing that is computed with it decides. ``inexact``: operators whose kernels are less exact
    than their format.
    """

    name: Literal["float16", "bfloat16"]
    largest: float
    largest_of_sums: float
    sums: frozenset[str] = frozenset()
    seen: str = ""
    faults: tuple[Fault, ...] = ()
    inexact: frozenset[str] = frozenset()

    @property
    def rewrites(self) -> frozenset[RewriteName]:
        """Those of `ALWAYS` and `REMEDIES` that avoid something of it."""
        avoided = {fault.rewrite for fault in self.faults if fault.rewrite}
        return frozenset(avoided) | (_FOR_SMALL_RANGES if self.name == "float16" else frozenset())


FLOAT16 = NumberFormat("float16", 65504.0, 65504.0)
BFLOAT16 = NumberFormat("bfloat16", 3.3895e38, 3.3895e38)
