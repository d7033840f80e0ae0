"""Small ONNX models, built by the tests that use them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def parsed(
    text: str, opset: int = 17, ir_version: int = 8, check: bool = True, **stored: Any
) -> onnx.ModelProto:
    """A model of ``(inputs) => (outputs) { nodes }``, in ONNX's own notation.

    ``stored``: initializers that the text does not have, as arrays or as the shapes of `weights`.
    """
    domains = {"": opset, "com.microsoft": 1, "ai.onnx.ml": 3, "our.own": 1}
    opsets = [
        f'"{name}" : {number}' for name, number in domains.items() if not name or name in text
    ]
    made: onnx.ModelProto = onnx.parser.parse_model(
        f"<ir_version: {ir_version}, opset_import: [{', '.join(opsets)}]> graph {text}"
    )
    for name, each in reversed(stored.items()):
        array = numpy_helper.from_array(np.asarray(each), name)
        # Before those of the text.
        made.graph.initializer.insert(0, weights(name, *each) if isinstance(each, tuple) else array)
    if check:
        onnx.checker.check_model(made)
    return made


def untyped(text: str, opset: int = 17) -> onnx.ModelProto:
    """As `parsed`, with an output ``y`` of the type that onnx infers."""
    model = parsed(text.replace("(y)", "(float y)"), opset, check=False)
    model.graph.output[0].ClearField("type")
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def network(batch: int | str | None = "batch") -> onnx.ModelProto:
    """``x`` (batch x 1 x 8 x 8) -> convolution, ReLU, matrix product -> ``y`` (batch x 10)."""
    size = "?" if batch is None else batch
    return parsed(
        f"""(float[{size}, 1, 8, 8] x) => (float[{size}, 10] y) {{
            [conv] c = Conv <pads = [1, 1, 1, 1]> (x, w, b)
            [relu] r = Relu (c)
            [flatten] f = Flatten (r)
            [dense] y = MatMul (f, dense) }}""",
        w=(4, 1, 3, 3), b=(4,), dense=(256, 10),
    )  # fmt: skip


def of_any_rank() -> onnx.ModelProto:
    """``x`` -> ReLU -> ``y``, without shapes, which ONNX Runtime accepts."""
    return parsed("(float[] x) => (float[] y) { y = Relu (x) }", check=False)


def initializer_among_the_inputs() -> onnx.ModelProto:
    """A matrix product of ``x`` and stored ``w``, which is an input too, as before ONNX IR 4."""
    text = "(float[1, 2] x, float[2, 2] w) => (float[1, 2] y) { y = MatMul (x, w) }"
    return parsed(text, ir_version=3, w=(2, 2))


def half_for_the_cpu() -> onnx.ModelProto:
    """A matrix product, followed by an operator that no NPU has."""
    return parsed(
        """(float[2, 4] x) => (int64[2, ?] y) {
            [product] m = MatMul (x, w)
            [relu] r = Relu (m)
            [where] y = NonZero (r) }""",
        w=(4, 4),
    )


def interrupted() -> onnx.ModelProto:
    """Two matrix products, with an operator between them that QNN leaves to the CPU."""
    return parsed(
        """(float[4, 8] x) => (float[4, 8] y) {
            [first] a = MatMul (x, w)
            [relu] b = Relu (a)
            [hardmax] c = Hardmax (b)
            [sum] d = Add (c, b)
            [second] y = MatMul (d, w) }""",
        w=(8, 8),
    )


def with_refused() -> onnx.ModelProto:
    """Two matrix products, with an operator between them that QNN refuses and no rewrite replaces."""
    return parsed(
        """(float[4, 8] x) => (float[4, 8] y) {
            a = MatMul (x, w)
            b = Relu (a)
            [infinite] i = IsInf (b)
            c = Where (i, x, b)
            y = MatMul (c, w) }""",
        w=(8, 8),
    )


def transformer(length: int) -> onnx.ModelProto:
    """Matrix products and ReLUs on ``x`` (1 x ``length`` x 256), with the same weights at any length."""
    names = ["x", "r0", "r1", "r2", "r3"]
    nodes = "".join(
        f"[product{layer}] m{layer} = MatMul ({names[layer]}, w{layer})\n"
        f"[relu{layer}] r{layer} = Relu (m{layer})\n"
        for layer in range(4)
    )
    text = f"(float[1, {length}, 256] x) => (float[1, {length}, 256] r3) {{ {nodes} }}"
    matrices: dict[str, Any] = {f"w{layer}": (256, 256) for layer in range(4)}
    return parsed(text, **matrices)


def unknown_operator() -> onnx.ModelProto:
    """A single operator, which no EP has."""
    return parsed("(float[2, 4] x) => (float[2, 4] y) { [strange] y = our.own.Strange (x) }")


def with_weights_left_over() -> onnx.ModelProto:
    """A matrix product, and a separate operator with weights that QNN leaves to the CPU."""
    return parsed(
        """(float[4, 64] x, uint8[1, 4, 9, 9] image) => (float[4, 64] y, int32[1, 16, 5, 5] z) {
            [product] y = MatMul (x, w)
            [convolution] z = ConvInteger (image, kernel) }""",
        w=(64, 64),
        kernel=np.random.default_rng(0).integers(0, 255, (16, 4, 5, 5)).astype(np.uint8),
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
