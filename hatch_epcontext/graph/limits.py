"""What EPs cannot compile, for graphs that are known before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hatch_epcontext.graph.operators import SIZES_FROM

TREES = frozenset({"TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"})
"""The operators of ``ai.onnx.ml`` that are ensembles of trees."""

DYNAMIC_QUANTIZATION = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeLinear",
        "MatMulInteger",
        "com.microsoft.DynamicQuantizeLSTM",
        "com.microsoft.DynamicQuantizeMatMul",
        "com.microsoft.MatMulIntegerToFloat",
        "com.microsoft.QAttention",
    }
)
"""Operators of models that quantize activations while they run, with their domains. NPUs support none."""


ValueKind = Literal["string", "sequence", "map", "optional"]
"""The kinds of values that are not tensors of numbers."""

VALUE_KINDS: tuple[ValueKind, ...] = ("string", "sequence", "map", "optional")


@dataclass(frozen=True)
class Limits:
    """Nodes that an EP leaves to the CPU whatever its options and its version are.

    ``domains``: those of which it has only the operators ``known``, which have their domains in their names.
    ``kinds``: kinds of values that none of its nodes reads or computes. ``shapes_from``: operators whose
    output shape depends on the values of these inputs, by their numbers from 0, and which it compiles only
    with constants there. ``loops``: whether it compiles loops whose number of iterations depends on the data.
    ``empty``: whether it compiles tensors with a size of 0.
    """

    domains: frozenset[str] = frozenset({"ai.onnx.ml"})
    known: frozenset[str] = frozenset()
    kinds: frozenset[ValueKind] = frozenset(VALUE_KINDS)
    shapes_from: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    loops: bool = True
    empty: bool = True


NUMBERS_ONLY = Limits()
"""The limits of an EP for neural networks that compiles open shapes."""

FIXED_SHAPES = Limits(
    shapes_from={
        name: SIZES_FROM[name]
        for name in (
            *("Compress", "ConstantOfShape", "Expand", "NonZero", "Range", "Reshape", "Tile"),
            *("TopK", "Unique"),
        )
    },
    loops=False,
)
"""The limits of an EP that compiles fixed shapes only."""
