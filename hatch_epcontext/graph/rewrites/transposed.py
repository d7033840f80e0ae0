"""Outputs of integers that an EP writes wrong behind a Transpose, which ONNX Runtime adds and moves."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.rewriting import Operators, Rewrite, corrects
from hatch_epcontext.graph.scope import Scope

_TRANSPOSED = frozenset(
    """
    AveragePool BatchNormalization Conv ConvTranspose DepthToSpace GlobalAveragePool GlobalMaxPool GridSample
    InstanceNormalization LRN LpPool MaxPool QLinearConv Resize SpaceToDepth Transpose Upsample
    """.split()  # noqa: SIM905
)
"""Transpose, and the operators around which ONNX Runtime adds one where an EP wants channels last."""

_MOVED_PAST = tuple(
    """
    Abs Add ArgMax ArgMin Cast Clip Concat Div Identity Max Min Mod Mul Neg Pad Pow ReduceMax ReduceMin
    ReduceSum Relu Reshape Sign Slice Split Squeeze Sub Tile Transpose Unsqueeze Where
    """.split()  # noqa: SIM905
)
"""Operators of integers behind which ONNX Runtime moves a Transpose."""

_NOT_MOVED_PAST = operators.GATHERS | {
    *("CumSum", "Expand", "Gemm", "MatMul", "ScatterElements", "ScatterND", "TopK", "Trilu")
}

_NOT_TRANSPOSED = (onnx.TensorProto.INT64, onnx.TensorProto.UINT8)
"""Types of outputs that an EP writes wrong from a Transpose, or whose Transpose it refuses."""

_OF_CPU = (
    *(onnx.TensorProto.INT8, onnx.TensorProto.INT16, onnx.TensorProto.UINT16),
    *(onnx.TensorProto.UINT64, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16),
)
"""Types that an EP lacks: the CPU casts outputs to them, and would then transpose them too."""


@corrects(
    "transposed-outputs",
    *_MOVED_PAST,
    applies=lambda node, scope: bool(_outputs_to_keep(scope.body)),
)
def _transposed_output(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A node behind which no Transpose can be moved, after one with an int64 or uint8 output of the graph:
    an Expand to its own shape, also after a Cast of floats, or for uint8 a Cast of a single dimension. For a
    Cast to a type that the EP lacks it is before it.
    """
    ends = _outputs_to_keep(scope.body).intersection(node.output)
    is_cast = node.op_type == "Cast" and scope.kind(node.input[0]) == "f"
    if is_cast and ends and scope.dtype(node.output[0]) == np.int64:
        return _expanded_cast(node, scope, builder)
    if not _is_transposed(ends, scope):
        return None
    if scope.elem_type(node.output[0]) in _OF_CPU:
        return _cast_at_the_end(node, scope, builder)
    if scope.dtype(node.output[0]) == np.uint8:
        return _bytes_in_one_dimension(node, scope, builder)
    values = builder.add_like(node, node.op_type, node.input)
    for index, name in enumerate(node.output):
        shape = scope.shape(name)
        if name in ends and shape and scope.dtype(name) == np.int64:
            values[index] = builder.add("Expand", values[index], builder.integers(shape))
    return values


def _expanded_cast(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Cast of floats to int64 that makes no output itself: an EP leaves such a one to the CPU."""
    shape = scope.fixed_shape(node.output[0])
    (whole,) = builder.add_like(node, node.op_type, node.input)
    expanded = builder.add("Expand", whole, builder.integers(shape or [1]))
    return [expanded if shape else builder.squeeze(expanded, [0])]


def _cast_at_the_end(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Cast of values in their order: ONNX Runtime removes an Expand to the same shape before it."""
    shape = scope.shape(node.output[0])
    if node.op_type != "Cast" or not shape:
        return None
    row = builder.reshape(node.input[0], [-1])
    row = builder.add("Expand", row, builder.integers([1, math.prod(shape)]))
    return builder.add_like(node, node.op_type, [builder.reshape(row, shape)])


def _bytes_in_one_dimension(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Bytes that are made in a single dimension, which no Transpose changes, and then get their shape."""
    (output,) = node.output[:1]
    shape = scope.shape(output)
    above = scope.needed_nodes([output], lambda name: scope.dtype(name) == np.uint8)
    makers = {graph.operator(scope.nodes[index]) for index in above}
    is_quantized = not operators.QUANTIZES.isdisjoint(makers) or any(
        map(operators.is_of_integers, makers)
    )
    # EPs take a Transpose of what is quantized.
    if not shape or len(node.output) > 1 or is_quantized:
        return None
    name, moves = output, list[onnx.NodeProto]()
    while (move := scope.maker(name, *operators.LAYOUT)) is not None:
        moves.append(move)
        name = move.input[0]
    if (cast := scope.maker(name, "Cast")) is not None:
        value = cast.input[0]
    else:
        made = name if moves else builder.add_like(node, node.op_type, node.input)[0]
        value = builder.add("Cast", made, to=onnx.TensorProto.INT32)
    for move in reversed(moves):
        (value,) = builder.add_like(move, move.op_type, [value, *move.input[1:]])
        # Others may still read what it makes of bytes.
        builder.nodes[-1].name = builder.fresh(move.name or move.op_type)
    flat = builder.add("Cast", builder.reshape(value, [-1]), to=onnx.TensorProto.UINT8)
    return [builder.reshape(flat, shape)]


def _is_transposed(names: Iterable[str], scope: Scope) -> bool:
    """Whether a Transpose could be moved to one of these values."""
    above = scope.needed_nodes(
        names, lambda name: scope.nodes[scope.makers[name]].op_type not in _NOT_MOVED_PAST
    )
    return not _TRANSPOSED.isdisjoint(scope.nodes[index].op_type for index in above)


def _outputs_to_keep(main: onnx.GraphProto) -> set[str]:
    typed = ((value.name, value.type.tensor_type.elem_type) for value in main.output)
    return {name for name, type_ in typed if type_ in (*_NOT_TRANSPOSED, *_OF_CPU)}


def _expand_int64_inputs(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """Any node, with an Expand and a Squeeze before the int64 inputs to which a Transpose could be moved.

    ONNX Runtime removes an Expand to the same shape in the middle of a graph.
    """
    inputs = list(node.input)
    for index, name in enumerate(inputs):
        shape = scope.shape(name)
        if shape and scope.dtype(name) == np.int64 and _is_transposed([name], scope):
            expanded = builder.add("Expand", name, builder.integers([1, *shape]))
            inputs[index] = builder.squeeze(expanded, [0])
    return None if inputs == node.input else builder.add_like(node, node.op_type, inputs)


expand_int64_inputs = Rewrite(
    "expand_int64_inputs",
    Operators(onnx.defs.has),
    _expand_int64_inputs,
    nested=False,
    fault="transposed-outputs",
)
