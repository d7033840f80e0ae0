"""How large the values inside a model become, read out while it runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.arrays import Arrays

_NEVER_LARGER = frozenset(
    {
        *("Identity", "Dropout", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"),
        *("Expand", "Tile", "Slice", "Split", "Concat", "Gather", "GatherElements", "GatherND"),
        *("Relu", "Clip", "MaxPool", "GlobalMaxPool", "AveragePool", "GlobalAveragePool", "Max"),
        *("Min", "ReduceMax", "ReduceMin", "ReduceMean", "DepthToSpace", "SpaceToDepth", "Where"),
        *("Sigmoid", "HardSigmoid", "Tanh", "Softmax", "Erf", "Sin", "Cos", "Sign", "Neg", "Abs"),
        *("Pad", "Constant", "ConstantOfShape", "Shape", "Size", "Range", "QuantizeLinear"),
        *("OneHot", "EyeLike", "LayerNormalization", "LSTM", "GRU", "RNN", "TopK", "NonZero"),
    }
)
"""Operators whose results are no larger than their inputs, or than 1, or are constants."""

_PREFIX = "hatch_epcontext.magnitude."

_FLOATS = frozenset(
    {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.DOUBLE,
        onnx.TensorProto.BFLOAT16,
    }
)


def with_magnitudes(model: onnx.ModelProto, sizes: Mapping[str, onnx.TypeProto]) -> list[str]:
    """Add outputs to ``model``, in place, with the largest magnitudes of the values inside it.

    ``sizes``: the inferred types by value: those of unknown type are left out, and so are values inside
    the graphs of nodes. Returns the names of the values. Read what they are with `read`.
    """
    main = model.graph
    values = []
    for node in list(main.node):
        if node.domain not in ("", "ai.onnx", "com.microsoft") or node.op_type in _NEVER_LARGER:
            continue
        for name in filter(None, node.output):
            type_ = sizes.get(name)
            if type_ is not None and type_.tensor_type.elem_type in _FLOATS:
                values.append(name)
                _add(main, name)
    return values


def _add(main: onnx.GraphProto, value: str) -> None:
    output = f"{_PREFIX}{value}"
    # As float: not every type has kernels on the CPU.
    main.node.append(
        onnx.helper.make_node(
            "Cast", [value], [f"{output}.float"], f"{output}.cast", to=onnx.TensorProto.FLOAT
        )
    )
    main.node.append(onnx.helper.make_node("Abs", [f"{output}.float"], [f"{output}.abs"]))
    main.node.append(onnx.helper.make_node("ReduceMax", [f"{output}.abs"], [output], keepdims=0))
    main.output.append(onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, []))


def read(outputs: Arrays) -> tuple[dict[str, float], Arrays]:
    """Split the outputs of a run into magnitudes by value, and the model's own.

    Values with NaN or Inf have no magnitude: there is nothing to compare, and finite ones must count.
    """
    found = {}
    own = {}
    for name, array in outputs.items():
        if name.startswith(_PREFIX):
            largest = float(array)
            if math.isfinite(largest):
                found[name.removeprefix(_PREFIX)] = largest
        else:
            own[name] = array
    return found, own


def largest(found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The largest magnitude of each value in what `read` has ``found`` in several runs."""
    result: dict[str, float] = {}
    for each in found:
        for name, magnitude in each.items():
            result[name] = max(magnitude, result.get(name, 0.0))
    return result


def types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """The types that ONNX infers for the values of ``model``."""
    inferred = graph.inferred(model)
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    return {value.name: value.type for value in values}
