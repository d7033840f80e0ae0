"""What operators do with values: which pass them on, and which operands decide a size or a failure.

ONNX's `Operators.md` defines each. The names of other domains' operators begin with their domain.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Literal

RESHAPING = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators whose result has all values of their first input, in the same order."""

LAYOUT = RESHAPING | {"Transpose"}
"""Operators whose result has all values of their first input once."""

GATHERS = frozenset({"Gather", "GatherElements", "GatherND"})
"""Operators whose second input has indices into the first."""

PICKS = GATHERS | {"Compress", "Slice", "Split"}
"""Operators whose results have some values of their first input."""

MOVES = (
    LAYOUT
    | PICKS
    | {"DepthToSpace", "Dropout", "Expand", "ReverseSequence", "SpaceToDepth", "Tile"}
)
"""Operators whose results have values of their first input, and no others."""

PADS = frozenset({"Pad", "Trilu"})
"""Operators that add constants to the values of their first input."""

EXTREMES = frozenset({"GlobalMaxPool", "MaxPool", "ReduceMax", "ReduceMin"})
"""Operators whose result has the largest or smallest of some values. A TopK also gives their indices."""

MEANS = frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean"})
"""Operators whose result has means of some values."""

COMPARES = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})

DECIDES = COMPARES - {"Equal"} | {"ArgMax", "ArgMin", "Ceil", "Floor", "Mod", "Round", "TopK"}
"""Operators whose results jump where operands differ little. So does a Cast of floats to integers."""

QUANTIZES = frozenset({"QuantizeLinear", "com.microsoft.QuantizeLinear"})
DEQUANTIZES = frozenset({"DequantizeLinear", "com.microsoft.DequantizeLinear"})

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

StaticFormat = Literal["QDQ", "QOperator"]
"""ONNX Runtime's names of static quantization: around operators of floats, which can be undone, and with
operators of integers.
"""


def is_of_integers(op_type: str) -> bool:
    """Whether an operator, without its domain, computes with statically quantized values."""
    return op_type.startswith("QLinear") or op_type == "QGemm"


_ELEMENTWISE = """
Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil
Celu Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity
IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu
Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where
Xor
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
"""Operators that compute each value of the result from one of each operand, which are broadcast."""

LAYERS = frozenset({"GRU", "LSTM", "RNN"})
"""The recurrent layers."""

REPEATING = LAYERS | {"Loop"}
"""Operators that repeat what they compute for each position, and that can be unrolled."""

SHAPES = frozenset({"Shape", "Size"})
"""Operators whose outputs depend on the shape of their input only."""

SIZES_FROM: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("ConstantOfShape", "NonZero", "Unique"), (0,)),
    **dict.fromkeys(("Compress", "Expand", "OneHot", "Reshape", "Split", "Squeeze"), (1,)),
    **dict.fromkeys(("Tile", "TopK", "Unsqueeze", "Upsample"), (1,)),
    **dict.fromkeys(("NonMaxSuppression", "Range"), (0, 1, 2)),
    "Pad": (1, 3),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
}
"""Operators with the operands whose values decide the sizes of the results."""

_SAFE = """
Abs Add And AveragePool BatchNormalization BitShift BitwiseAnd BitwiseOr BitwiseXor Ceil Celu Clip Concat
Constant Conv ConvInteger ConvTranspose Cos DepthToSpace Einsum Elu Equal Erf Exp Flatten Floor Gelu Gemm
GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual GroupNormalization HardSigmoid HardSwish Identity
InstanceNormalization LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax LpPool MatMul MatMulInteger
Max MaxPool Mean Min Mish Mul Neg Not Or PRelu Pow QLinearConv QLinearMatMul Reciprocal Relu Round Selu Shape
Sigmoid Sign Sin Softmax Softplus Softsign SpaceToDepth Sqrt Sub Sum Tan Tanh ThresholdedRelu Transpose Where
Xor
"""
_BY_SECOND = """
CumSum Expand Gather GatherElements GatherND OneHot ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin
ReduceProd ReduceSum ReduceSumSquare Reshape ScatterElements ScatterND Split Squeeze Tile TopK Unsqueeze
"""

FAILS_ON: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(_SAFE.split(), ()),
    **dict.fromkeys(_BY_SECOND.split(), (1,)),
    **dict.fromkeys(LAYERS, (4,)),
    "ConstantOfShape": (0,),
    "Slice": (1, 2, 3, 4),
}
"""Operators with the operands whose values can make them fail. Those that are missing may always fail.

A Div is missing: integers can be zero.
"""


def einsum_terms(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The letters of the operands of an Einsum, which have these ``ranks``, and of its result.

    The dimensions of an ellipsis get letters too. Raises ValueError for another number of operands.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    counts = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    # The last dimensions correspond, as in broadcasting.
    most = max(counts)
    ellipsis = "".join([letter for letter in string.ascii_letters if letter not in equation][:most])
    terms = [
        term.replace("...", ellipsis[most - count :])
        for term, count in zip(terms, counts, strict=True)
    ]
    if not arrow:
        letters = "".join(terms)
        single = sorted(e for e in set(letters) - set(ellipsis) if letters.count(e) == 1)
        right = f"...{''.join(single)}"
    return terms, right.replace("...", ellipsis)
