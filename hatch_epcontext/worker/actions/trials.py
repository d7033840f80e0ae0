"""Write the small graphs that an unknown EP is tried with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import DTypeLike
from onnx import TensorProto, helper, numpy_helper

from hatch_epcontext.worker.requests import TrialGraph, TrialsReply, TrialsRequest

_OPSET, _IR_VERSION = 17, 8
"""Old enough for all plugin EPs, and the oldest opset with LayerNormalization."""

_Shape = Sequence[int | str]


class _Graph:
    """A graph that is written node by node. Each method returns the name of a value."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._stored: list[onnx.TensorProto] = []
        # The same weights in each run.
        self._random = np.random.default_rng(0)

    def weights(self, *shape: int, scale: float = 0.3) -> str:
        """Random float32 weights."""
        return self.stored(scale * self._random.standard_normal(shape), np.float32)

    def whole_weights(self, *shape: int) -> str:
        """Random int8 weights, as a quantizer makes them."""
        return self.stored(self._random.integers(-100, 100, shape), np.int8)

    def stored(self, values: Any, dtype: DTypeLike) -> str:
        """An initializer."""
        name = f"stored_{len(self._stored)}"
        self._stored.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def node(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """The first of the outputs of a node; names of inputs may be empty."""
        name = f"{op.lower()}_{len(self._nodes)}"
        made = [name, *(f"{name}_{index}" for index in range(1, outputs))]
        self._nodes.append(helper.make_node(op, inputs, made, name, **attributes))
        return name

    def model(self, shape: _Shape, result: str, result_shape: _Shape) -> onnx.ModelProto:
        """The model from the float input ``x`` to the value ``result``, which becomes the output ``y``."""
        self._nodes[-1].output[0] = "y"
        assert self._nodes[-1].name == result, "the last node makes the output"
        graph = helper.make_graph(
            self._nodes,
            "trial",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, result_shape)],
            self._stored,
        )
        opsets = [helper.make_opsetid("", _OPSET)]
        made = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
        onnx.checker.check_model(made, full_check=True)
        return made


def handle(request: TrialsRequest) -> TrialsReply:
    """Write the request's graphs."""
    made = []
    for name in request.names:
        path = Path(request.folder, f"{name}.onnx")
        onnx.save(_MAKERS[name](), path)
        made.append(TrialGraph(name, str(path), {"batch": 3} if name == "dynamic" else {}))
    return TrialsReply(tuple(made))


def _gemm() -> onnx.ModelProto:
    graph = _Graph()
    hidden = graph.node("Gemm", "x", graph.weights(32, 16), graph.weights(32), transB=1)
    hidden = graph.node("Relu", hidden)
    scores = graph.node("Gemm", hidden, graph.weights(10, 32), graph.weights(10), transB=1)
    return graph.model([1, 16], graph.node("Softmax", scores, axis=-1), [1, 10])


def _conv() -> onnx.ModelProto:
    graph = _Graph()
    around = [1, 1, 1, 1]
    first = graph.node(
        "Conv", "x", graph.weights(8, 3, 3, 3), graph.weights(8), pads=around, strides=[2, 2]
    )
    first = graph.node("Relu", first)
    deep = graph.node(
        "Conv", first, graph.weights(8, 1, 3, 3), graph.weights(8), pads=around, group=8
    )
    deep = graph.node("Sigmoid", deep)
    added = graph.node("Add", graph.node("Mul", deep, first), first)
    pooled = graph.node("MaxPool", added, kernel_shape=[2, 2], strides=[2, 2])
    pooled = graph.node("GlobalAveragePool", pooled)
    flat = graph.node("Flatten", pooled)
    result = graph.node("Gemm", flat, graph.weights(5, 8), graph.weights(5), transB=1)
    return graph.model([1, 3, 16, 16], result, [1, 5])


def _lstm() -> onnx.ModelProto:
    graph = _Graph()
    hidden = 8
    # The steps first, as LSTM takes them.
    steps = graph.node("Transpose", "x", perm=[1, 0, 2])
    weights = [graph.weights(1, 4 * hidden, size) for size in (6, hidden)]
    layer = graph.node(
        "LSTM", steps, *weights, graph.weights(1, 8 * hidden), outputs=3, hidden_size=hidden
    )
    flat = graph.node("Squeeze", layer, graph.stored([1], np.int64))
    result = graph.node("MatMul", flat, graph.weights(hidden, 4))
    return graph.model([1, 5, 6], result, [5, 1, 4])


def _attention() -> onnx.ModelProto:
    graph = _Graph()
    length, width, heads = 8, 16, 2
    size = width // heads
    split = graph.stored([1, length, heads, size], np.int64)

    def head(value: str, order: list[int]) -> str:
        made = graph.node("MatMul", value, graph.weights(width, width))
        return graph.node("Transpose", graph.node("Reshape", made, split), perm=order)

    normal = _normalized(graph, "x", width)
    query, values = head(normal, [0, 2, 1, 3]), head(normal, [0, 2, 1, 3])
    scores = graph.node("MatMul", query, head(normal, [0, 2, 3, 1]))
    scores = graph.node("Mul", scores, graph.stored(size**-0.5, np.float32))
    mixed = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), values)
    mixed = graph.node("Transpose", mixed, perm=[0, 2, 1, 3])
    mixed = graph.node("Reshape", mixed, graph.stored([1, length, width], np.int64))
    mixed = graph.node("MatMul", mixed, graph.weights(width, width))
    first = graph.node("Add", mixed, "x")
    wide = graph.node("MatMul", _normalized(graph, first, width), graph.weights(width, 2 * width))
    wide = _gelu(graph, graph.node("Add", wide, graph.weights(2 * width)))
    result = graph.node("Add", graph.node("MatMul", wide, graph.weights(2 * width, width)), first)
    return graph.model([1, length, width], result, [1, length, width])


def _normalized(graph: _Graph, value: str, width: int) -> str:
    scale, bias = graph.stored(np.ones(width), np.float32), graph.weights(width)
    return graph.node("LayerNormalization", value, scale, bias, axis=-1)


def _gelu(graph: _Graph, value: str) -> str:
    """GELU as exporters write it for this opset."""
    inner = graph.node("Div", value, graph.stored(2**0.5, np.float32))
    inner = graph.node("Add", graph.node("Erf", inner), graph.stored(1, np.float32))
    return graph.node("Mul", graph.node("Mul", value, inner), graph.stored(0.5, np.float32))


def _qdq() -> onnx.ModelProto:
    graph = _Graph()
    taken = _quantized(graph, "x", 0.03)
    weights = graph.whole_weights(4, 3, 3, 3)
    scale, zero = graph.stored(0.01, np.float32), graph.stored(0, np.int8)
    kernel = graph.node("DequantizeLinear", weights, scale, zero)
    bias = graph.node(
        "DequantizeLinear",
        graph.stored([100, -200, 300, 0], np.int32),
        graph.stored(0.0003, np.float32),
        graph.stored(0, np.int32),
    )
    made = graph.node("Conv", taken, kernel, bias, pads=[1, 1, 1, 1])
    return graph.model([1, 3, 8, 8], _quantized(graph, graph.node("Relu", made), 0.1), [1, 4, 8, 8])


def _quantized(graph: _Graph, value: str, scale: float) -> str:
    parameters = graph.stored(scale, np.float32), graph.stored(128, np.uint8)
    return graph.node(
        "DequantizeLinear", graph.node("QuantizeLinear", value, *parameters), *parameters
    )


def _dynamic() -> onnx.ModelProto:
    graph = _Graph()
    made = graph.node("Conv", "x", graph.weights(4, 3, 3, 3), graph.weights(4), pads=[1, 1, 1, 1])
    flat = graph.node("Flatten", graph.node("Relu", made))
    result = graph.node("Gemm", flat, graph.weights(256, 5), graph.weights(5))
    return graph.model(["batch", 3, 8, 8], result, ["batch", 5])


_MAKERS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "gemm": _gemm,
    "conv": _conv,
    "lstm": _lstm,
    "attention": _attention,
    "qdq": _qdq,
    "dynamic": _dynamic,
}
