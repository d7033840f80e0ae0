"""The number format in which an EP computes float32 graphs, and the faults of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from hatch_epcontext.frozen import dataclass

FUSING = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators that EPs fuse with the addition and the activation after them."""

RewriteName = Literal[
    "square",
    "mean",
    "clip-inputs",
    "transposed-outputs",
    "pool-padding",
    "quantized-signs",
    "variance",
    "small-angle",
    "split-integers",
    "factors",
    "log-power",
    "log-floor",
    "log-sum-exp",
    "scaled-square",
    "scaled-product",
    "long-sums",
    "ratio",
    "unfuse-activation",
    "truncate",
    "modulo",
    "truth",
    "bytes",
    "indices",
    "hard-swish",
    "reciprocals",
    "floor",
    "comparison",
    "scaled-division",
    "broadcast",
]
"""The rewrites of nodes that EPs compute wrong, or inexactly: see `rewrites.precise`."""

WHOLE: tuple[RewriteName, ...] = (
    *("truncate", "modulo", "truth", "bytes", "indices"),
    *("hard-swish", "reciprocals", "broadcast"),
)
"""Those of `rewrites.integers`."""

ALWAYS: tuple[RewriteName, ...] = (
    *("square", "mean", "clip-inputs", "transposed-outputs", "pool-padding"),
    *("quantized-signs", "variance", "small-angle"),
    # Before remainders are rewritten, from which no range can be read.
    "split-integers",
    "factors",
    *WHOLE,
)
"""The rewrites that lose nothing, and are applied to every model with such a fault."""

FOR_RANGES: tuple[RewriteName, ...] = (
    # Products are found before a scale hides them, and divisions of the others are scaled too.
    *("log-power", "log-floor", "log-sum-exp", "scaled-square", "scaled-product", "floor"),
    *("comparison", "long-sums", "ratio", "scaled-division"),
)
"""Those that avoid losses that an emulation of the number format shows, or wrong values of a kernel."""

FOR_KERNELS: tuple[RewriteName, ...] = ("unfuse-activation",)
"""Those that avoid inexact kernels of an EP, which only a run shows."""

CORRECTIONS = (FOR_RANGES, FOR_KERNELS)
"""Those that add nodes, in the groups that are tried one after the other if outputs differ, or may differ."""

_FOR_SMALL_RANGES = frozenset[RewriteName]({"mean", "variance", "factors", *FOR_RANGES})
"""Those that keep sums, squares and their differences within the range of float16."""


@dataclass(frozen=True)
class Fault:
    """Nodes of ``operator`` that an EP computes wrong, although its number format can represent the results.

    ``text``: the fault, as the end of a sentence about the node. ``rewrite``: the name of the rewrite that
    avoids it, None if there is none. ``operand``: the number, from 0, of the operand that decides: results
    are wrong if it is from ``low`` to ``high``, and then ``gives`` at worst (None if more than one element
    decides, or if results are only less exact). If ``high`` is -0.0, 0.0 is right.

    Its conditions: ``exponent``, of a Pow; ``computed``: the operand is no single stored number; ``behind``:
    the node directly follows one of these operators, with or without an Add between; ``inputs``: how many;
    ``logarithm``: ``low`` and ``high`` are of the natural logarithm of a power's size, not of an operand;
    ``attributes``: names, and the values that each may have, ``""`` for a missing one; ``whole``: the operand
    has integers, else floats.
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
    whole: bool = False
    logarithm: bool = False

    def concerns(self, operator: str, inputs: int, attributes: Mapping[str, str]) -> bool:
        """Whether a node with so many inputs and these string attributes may have the fault.

        ``exponent``, ``computed`` and ``behind`` depend on other nodes: the caller checks them.
        """
        return (
            operator == self.operator
            and self.operand < inputs
            and self.inputs in (None, inputs)
            and all(attributes.get(name, "") in values for name, values in self.attributes)
        )


@dataclass(frozen=True)
class NumberFormat:
    """How an EP rounds floats; results of the operators ``sums`` saturate at ``largest_of_sums``.

    ``seen``: where that was measured, such as "the simulator of onnxruntime-qnn 2.7.0"; empty if it was not:
    then its emulation decides nothing. ``inexact``: operators whose kernels are less exact than the format.
    ``has_reciprocals``: whether a / b is a * (1 / b), where 1 / b is rounded too.
    """

    name: Literal["float16", "bfloat16"]
    largest: float
    largest_of_sums: float
    sums: frozenset[str] = frozenset()
    seen: str = ""
    faults: tuple[Fault, ...] = ()
    inexact: frozenset[str] = frozenset()
    has_reciprocals: bool = False

    @property
    def unit(self) -> float:
        """The distance between the numbers from 1 to 2."""
        return 2.0**-10 if self.name == "float16" else 2.0**-7

    @property
    def least(self) -> float:
        """The smallest number with all bits."""
        return 2.0**-14 if self.name == "float16" else 2.0**-126

    def faults_of(self, operator: str) -> tuple[Fault, ...]:
        """The faults that nodes of ``operator`` may have."""
        return tuple(fault for fault in self.faults if fault.operator == operator)

    @property
    def rewrites(self) -> frozenset[RewriteName]:
        """Those of `ALWAYS` and `CORRECTIONS` that avoid a fault of the format."""
        avoided = {fault.rewrite for fault in self.faults if fault.rewrite}
        return frozenset(avoided) | (_FOR_SMALL_RANGES if self.name == "float16" else frozenset())


FLOAT16 = NumberFormat("float16", 65504.0, 65504.0)
BFLOAT16 = NumberFormat("bfloat16", 3.3895e38, 3.3895e38)
