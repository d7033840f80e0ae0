"""Whether a node fails because of the sizes of the model's inputs, whatever values these have."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.dependencies import Dependencies
from hatch_epcontext.graph.limits import FIXED_SHAPES

_OF_EQUAL_SIZES = (
    "Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Equal", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mul", "Or", "PRelu", "Pow", "Sub",
    "Sum", "Where", "Xor",
)  # fmt: skip
"""Operators whose operands are broadcast. Not those that divide: integers can be zero."""

_OF_CERTAIN_SIZES = (
    "AveragePool", "BatchNormalization", "Concat", "Conv", "ConvInteger", "ConvTranspose", "DepthToSpace",
    "Einsum", "Flatten", "Gemm", "GlobalAveragePool", "GroupNormalization", "InstanceNormalization",
    "LayerNormalization", "LpPool", "MatMul", "MatMulInteger", "MaxPool", "QLinearConv", "QLinearMatMul",
    "SpaceToDepth", "Transpose",
)  # fmt: skip
"""Operators that take operands of certain sizes, and all values."""

_VALUES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys((*_OF_EQUAL_SIZES, *_OF_CERTAIN_SIZES), ()),
    **dict.fromkeys(("Expand", "Reshape", "Split", "Squeeze", "Tile", "Gather"), (1,)),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), (4,)),
    "Slice": (1, 2, 3, 4),
}
"""Operators, with their operands because of whose values they can fail."""


def only_sizes_matter(node: onnx.NodeProto, main: onnx.GraphProto) -> bool:
    """Whether ``node``, which fails, does so for all values of the inputs of ``main``.

    False where that is not known, as for a node inside another one.
    """
    flow = Dependencies(main)
    values = _VALUES.get(graph.operator(node))
    if values is None or not node.output or flow.maker(node.output[0]) is None:
        return False
    if _depends(flow, node, values):
        return False
    behind = [other for name in node.input for other in flow.behind(name)]
    return not any(_has_size_of_values(other, flow) for other in behind)


def _has_size_of_values(node: onnx.NodeProto, flow: Dependencies) -> bool:
    """Whether the sizes of what ``node`` makes can depend on the values of inputs."""
    # Nobody looks into these.
    if node.domain not in graph.STANDARD or graph.inner_graphs(node):
        return True
    operator = graph.operator(node)
    if operator.startswith(("Sequence", "Optional", "SplitToSequence", "ConcatFromSequence")):
        return True
    values = FIXED_SHAPES.shapes_from.get(operator, _MORE_SIZES_FROM.get(operator, ()))
    return _depends(flow, node, values)


_MORE_SIZES_FROM: Mapping[str, tuple[int, ...]] = {
    "NonMaxSuppression": (0, 1, 2),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
}
"""The same as in `Limits.shapes_from`, for what some EPs take nevertheless."""


def _depends(flow: Dependencies, node: onnx.NodeProto, operands: tuple[int, ...]) -> bool:
    names = (node.input[index] for index in operands if index < len(node.input))
    return flow.depends(name for name in names if name)
