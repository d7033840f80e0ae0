"""Small ONNX models, built by the tests that use them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = Sequence[int | str | None]


def value(name: str, shape: Shape | None, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """An input or output."""
    return helper.make_tensor_value_info(name, dtype, shape)


def weights(name: str, *shape: int) -> onnx.TensorProto:
    """A float32 initializer with random values, the same in every run."""
    rng = np.random.default_rng(len(name))
    return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) * 0.3, name)


def shapes(made: onnx.ModelProto) -> dict[str, list[int | str]]:
    """The shapes of all inputs and outputs."""
    return {
        each.name: [dim.dim_value or dim.dim_param for dim in each.type.tensor_type.shape.dim]
        for each in (*made.graph.input, *made.graph.output)
    }


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
    ir_version: int = 8,
    domain: str = "",
) -> onnx.ModelProto:
    """A checked model of opset 17, and with ``domain`` also of version 1 of that."""
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
    onnx.checker.check_model(made)
    return made


def network(batch: int | str | None = "batch") -> onnx.ModelProto:
    """``x`` (batch x 1 x 8 x 8) -> convolution, ReLU, matrix product -> ``y`` (batch x 10)."""
    return model(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"], "relu"),
            helper.make_node("Flatten", ["r"], ["f"], "flatten"),
            helper.make_node("MatMul", ["f", "dense"], ["y"], "dense"),
        ],
        [value("x", [batch, 1, 8, 8])],
        [value("y", [batch, 10])],
        [weights("w", 4, 1, 3, 3), weights("b", 4), weights("dense", 256, 10)],
    )


def of_any_rank() -> onnx.ModelProto:
    """``x`` -> ReLU -> ``y``, without shapes, which ONNX Runtime accepts."""
    made = model([helper.make_node("Relu", ["x"], ["y"])], [value("x", [1])], [value("y", [1])])
    for each in (*made.graph.input, *made.graph.output):
        each.type.tensor_type.ClearField("shape")
    return made


def initializer_among_the_inputs() -> onnx.ModelProto:
    """A matrix product of ``x`` and stored ``w``, which is an input too, as before ONNX IR 4."""
    return model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [value("x", [1, 2]), value("w", [2, 2])],
        [value("y", [1, 2])],
        [weights("w", 2, 2)],
        ir_version=3,
    )


def half_for_the_cpu() -> onnx.ModelProto:
    """A matrix product, followed by an operator that no NPU has."""
    return model(
        [
            helper.make_node("MatMul", ["x", "w"], ["m"], "product"),
            helper.make_node("Relu", ["m"], ["r"], "relu"),
            helper.make_node("NonZero", ["r"], ["y"], "where"),
        ],
        [value("x", [2, 4])],
        [value("y", [2, None], TensorProto.INT64)],
        [weights("w", 4, 4)],
    )


def interrupted() -> onnx.ModelProto:
    """Two matrix products, with an operator between them that QNN leaves to the CPU."""
    return model(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
            helper.make_node("Relu", ["a"], ["b"], "relu"),
            helper.make_node("Hardmax", ["b"], ["c"], "hardmax"),
            helper.make_node("Add", ["c", "b"], ["d"], "sum"),
            helper.make_node("MatMul", ["d", "w"], ["y"], "second"),
        ],
        [value("x", [4, 8])],
        [value("y", [4, 8])],
        [weights("w", 8, 8)],
    )


def transformer(length: int) -> onnx.ModelProto:
    """Matrix products and ReLUs on ``x`` (1 x ``length`` x 256), with the same weights at any length."""
    nodes, current = [], "x"
    for layer in range(4):
        nodes += [
            helper.make_node("MatMul", [current, f"w{layer}"], [f"m{layer}"], f"product{layer}"),
            helper.make_node("Relu", [f"m{layer}"], [f"r{layer}"], f"relu{layer}"),
        ]
        current = f"r{layer}"
    return model(
        nodes,
        [value("x", [1, length, 256])],
        [value(current, [1, length, 256])],
        [weights(f"w{layer}", 256, 256) for layer in range(4)],
    )


def choosing_nothing() -> onnx.ModelProto:
    """A single operator, which no NPU has."""
    return model(
        [helper.make_node("NonZero", ["x"], ["y"], "where")],
        [value("x", [2, 4])],
        [value("y", [2, None], TensorProto.INT64)],
    )


def unknown_operator() -> onnx.ModelProto:
    """A single operator, which no EP has."""
    return model(
        [helper.make_node("Strange", ["x"], ["y"], "strange", domain="our.own")],
        [value("x", [2, 4])],
        [value("y", [2, 4])],
        domain="our.own",
    )


def with_weights_left_over() -> onnx.ModelProto:
    """A matrix product, and a separate operator with weights that QNN leaves to the CPU."""
    rng = np.random.default_rng(0)
    kernel = rng.integers(0, 255, (16, 4, 5, 5)).astype(np.uint8)
    return model(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"], "product"),
            helper.make_node("ConvInteger", ["image", "kernel"], ["z"], "convolution"),
        ],
        [value("x", [4, 64]), value("image", [1, 4, 9, 9], TensorProto.UINT8)],
        [value("y", [4, 64]), value("z", [1, 16, 5, 5], TensorProto.INT32)],
        [weights("w", 64, 64), numpy_helper.from_array(kernel, "kernel")],
    )


def save(made: onnx.ModelProto, path: Path) -> Path:
    """Save ``made`` at ``path``; the folder is created if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(made, path)
    return path


def save_with_data(made: onnx.ModelProto, path: Path, location: str = "network.data") -> Path:
    """Save ``made`` at ``path``, with its initializers in the file ``location`` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(made, path, save_as_external_data=True, location=location, size_threshold=0)
    return path
