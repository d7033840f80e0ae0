from __future__ import annotations

import onnx
import pytest

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.cost import multiply_adds


@pytest.mark.parametrize(
    ("body", "given", "stored", "cost"),
    [
        ("y = MatMul(x, w)", "float[4, 8] x", "float[8, 16] w", 4 * 16 * 8),
        ("y = Gemm<transA = 1>(x, w)", "float[8, 4] x", "float[8, 16] w", 4 * 16 * 8),
        (
            "y = Conv<pads = [1, 1, 1, 1], group = 2>(x, w)",
            "float[1, 4, 10, 10] x",
            "float[6, 2, 3, 3] w",
            6 * 100 * 2 * 9,
        ),
        ("y = ConvTranspose(x, w)", "float[1, 4, 10] x", "float[4, 6, 3] w", 4 * 10 * 6 * 3),
        ("y = Relu(x)", "float[4, 8] x", "float[1] w", 32),
        ("a = Relu(x) y = Relu(a)", "float[4, 8] x", "float[1] w", 64),
    ],
)
def test_a_product_counts_for_each_of_its_terms(
    body: str, given: str, stored: str, cost: int
) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>'
        f"agraph ({given}, {stored}) => (float y) {{ {body} }}"
    )
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert multiply_adds(graph.inferred(model)) == cost


def test_what_is_inside_of_nodes_counts_and_unknown_sizes_are_one() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>'
        "agraph (bool c, float[n, 8] x) => (float[n, 8] y) {"
        "y = If (c) <then_branch = one () => (float[n, 8] a) { a = Relu(x) }, "
        "else_branch = two () => (float[n, 8] b) { b = Neg(x) }> }"
    )
    assert multiply_adds(model.graph) == 8 + 8 + 8
