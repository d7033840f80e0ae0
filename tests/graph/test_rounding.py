from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from hatch_epcontext.graph.number_format import BFLOAT16, FLOAT16, Fault, NumberFormat
from hatch_epcontext.graph.rounding import emulate, expose, widen
from tests.models import model, value

WIDE = replace(FLOAT16, largest_of_sums=131008.0, sums=frozenset({"Add", "Mul"}))
SQUARE = Fault("Pow", "is -4 for -0.0", low=-3e-8, high=3e-8, gives=-4.0, exponent=2.0)

Floats = NDArray[np.float32]


def emulated(
    nodes: Sequence[onnx.NodeProto],
    x: Sequence[float],
    format_: NumberFormat = FLOAT16,
    skipped: frozenset[str] = frozenset(),
    **stored: float,
) -> list[float]:
    """What ``nodes``, of which the last one makes ``y``, give for ``x``."""
    tensors = [numpy_helper.from_array(np.float32(each), name) for name, each in stored.items()]
    made = model(list(nodes), [value("x", [len(x)])], [value("y", [len(x)])], tensors)
    emulate(made, {}, format_, skipped)
    onnx.checker.check_model(made)
    (found,) = ReferenceEvaluator(made).run(None, {"x": np.array(x, np.float32)})
    return [float(each) for each in np.asarray(found)]


def test_results_are_rounded() -> None:
    scaled = [helper.make_node("Mul", ["x", "k"], ["y"])]
    assert emulated(scaled, [1.0, 3.0], k=1 / 3) == [np.float16(1 / 3), 1.0]
    third = float(np.float32(np.float16(1 / 3)))
    assert emulated(scaled, [1.0], k=1 / 3) == [third]
    # Denormals are kept, and what is smaller is zero.
    assert emulated(scaled, [1e-3, 1e-5], k=1e-3) == [float(np.float16(1e-6)), 0.0]


def test_numbers_that_the_format_does_not_have_are_lost() -> None:
    nodes = [helper.make_node("Add", ["x", "k"], ["y"])]
    assert emulated(nodes, [0.0], k=1e-10) == [0.0]
    assert emulated(nodes, [0.0], BFLOAT16, k=1e-10)[0] == pytest.approx(1e-10, rel=0.01)


@pytest.mark.parametrize(("format_", "largest"), [(FLOAT16, 65504.0), (WIDE, 131008.0)])
def test_values_saturate(format_: NumberFormat, largest: float) -> None:
    nodes = [helper.make_node("Mul", ["x", "x"], ["y"])]
    assert emulated(nodes, [300.0, 1e9], format_) == [min(largest, 90000.0), largest]


def test_nodes_on_the_cpu_are_exact() -> None:
    nodes = [helper.make_node("Mul", ["x", "x"], ["y"], name="square")]
    assert emulated(nodes, [1000.0], skipped=frozenset({"square"})) == [1e6]


def test_stored_numbers_are_rounded_as_data_only() -> None:
    third = 1 / 3

    def found(
        node: onnx.NodeProto, stored: Sequence[float], skipped: str = ""
    ) -> NDArray[np.float32]:
        node.name = "n"
        tensor = numpy_helper.from_array(np.array(stored, np.float32), "k")
        if node.op_type == "DequantizeLinear":
            tensor = numpy_helper.from_array(np.float32(stored[0]), "k")
        dtype = TensorProto.INT8 if node.op_type == "DequantizeLinear" else TensorProto.FLOAT
        made = model([node], [value("x", [1, 4], dtype)], [value("y", ["a", "b"])], [tensor])
        emulate(made, {}, FLOAT16, {skipped})
        (kept,) = (each for each in made.graph.initializer if each.name == "k")
        return numpy_helper.to_array(kept).ravel()

    rounded = np.float32(np.float16(third))
    assert found(helper.make_node("Mul", ["x", "k"], ["y"]), [third]) == rounded
    for node in (
        helper.make_node("Resize", ["x", "", "k"], ["y"]),
        helper.make_node("DequantizeLinear", ["x", "k"], ["y"]),
    ):
        assert found(node, [third, third])[0] == np.float32(third)
    on_cpu = helper.make_node("Mul", ["x", "k"], ["y"])
    assert found(on_cpu, [third], skipped="n") == np.float32(third)


def test_what_comes_from_outside_is_rounded_where_it_enters() -> None:
    scaled = [helper.make_node("Mul", ["x", "k"], ["y"])]
    # 1e-10 is nothing, and 2e5 is cut off, before anything is computed.
    assert emulated(scaled, [1e-10, 2e5, 1.0], k=0.5) == [0.0, 32752.0, 0.5]
    nodes = [helper.make_node("Add", ["x", "k"], ["a"], name="first"), *scaled]
    nodes[1] = helper.make_node("Mul", ["a", "two"], ["y"])
    assert emulated(nodes, [0.0], k=1e-10, two=2.0, skipped=frozenset({"first"})) == [0.0]
    on_cpu = frozenset({"first", "second"})
    nodes[1].name = "second"
    assert emulated(nodes, [0.0], k=1e-10, two=2.0, skipped=on_cpu)[0] == pytest.approx(2e-10)


def test_a_division_can_be_a_product_with_the_reciprocal() -> None:
    nodes = [helper.make_node("Mul", ["x", "k"], ["a"]), helper.make_node("Div", ["x", "a"], ["y"])]
    format_ = replace(FLOAT16, has_reciprocals=True)
    # k is nothing in float16.
    assert emulated(nodes, [0.0, 0.5], format_, k=1e-10) == [0.0, 32752.0]


def test_a_fault_of_computed_values_is_none_of_stored_ones() -> None:
    fault = Fault("Div", "is 0", operand=1, low=10, high=20, gives=0.0, computed=True)
    format_ = replace(FLOAT16, faults=(fault,))
    stored = [helper.make_node("Div", ["x", "k"], ["y"])]
    assert emulated(stored, [16.0], format_, k=16.0) == [1.0]
    computed = [helper.make_node("Neg", ["x"], ["a"]), helper.make_node("Neg", ["a"], ["b"])]
    computed.append(helper.make_node("Div", ["x", "b"], ["y"]))
    assert emulated(computed, [16.0, 8.0], format_) == [0.0, 1.0]


def test_sums_are_exact_up_to_the_addition_behind_them() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["sum"]),
        helper.make_node("Add", ["sum", "b"], ["y"]),
    ]
    tensors = [
        numpy_helper.from_array(np.array([[1000.0], [1000.0]], np.float32), "w"),
        numpy_helper.from_array(np.array([-60000.0], np.float32), "b"),
    ]
    made = model(nodes, [value("x", [1, 2])], [value("y", [1, 1])], tensors)
    emulate(made, {}, FLOAT16)
    (found,) = ReferenceEvaluator(made).run(None, {"x": np.array([[50, 60]], np.float32)})
    # 110,000 is beyond the format, and 50,000 is not.
    assert float(np.asarray(found).item()) == pytest.approx(50_016, abs=32)


def test_faults_are_emulated() -> None:
    nodes = [helper.make_node("Pow", ["x", "k"], ["y"])]
    faulty = replace(FLOAT16, faults=(SQUARE,))
    assert emulated(nodes, [-0.0, 3.0], faulty, k=2.0) == [-4.0, 9.0]
    assert emulated(nodes, [-0.0, 3.0], faulty, k=4.0) == [0.0, 81.0]


def test_what_is_quantized_is_not_rounded() -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "scale", "zero"], ["float"]),
        helper.make_node("Mul", ["float", "float"], ["product"]),
        helper.make_node("QuantizeLinear", ["product", "scale", "zero"], ["y"]),
    ]
    tensors = [
        numpy_helper.from_array(np.float32(0.5), "scale"),
        numpy_helper.from_array(np.uint8(0), "zero"),
    ]
    made = model(
        nodes,
        [value("x", [1], TensorProto.UINT8)],
        [value("y", [1], TensorProto.UINT8)],
        tensors,
    )
    emulate(made, {}, FLOAT16)
    assert [each.op_type for each in made.graph.node] == [each.op_type for each in nodes]


def test_all_floats_can_be_outputs() -> None:
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["square"]),
        helper.make_node("Greater", ["square", "x"], ["larger"]),
        helper.make_node("Where", ["larger", "square", "x"], ["y"]),
    ]
    made = model(nodes, [value("x", [2])], [value("y", [2])])
    expose(made, {})
    assert [each.name for each in made.graph.output] == ["y", "square"]


def test_a_widened_model_keeps_its_interface_and_its_operators() -> None:
    half = TensorProto.FLOAT16
    inner = helper.make_graph(
        [helper.make_node("Mul", ["s", "k"], ["r"])], "g", [], [value("r", [2], half)]
    )
    nodes = [
        helper.make_node("Softmax", ["x"], ["s"]),
        helper.make_node("Cast", ["c"], ["h"], to=half),
        helper.make_node("If", ["b"], ["i"], then_branch=inner, else_branch=inner),
        helper.make_node("Add", ["i", "h"], ["y"]),
    ]
    inputs = [value("x", [2], half), value("c", [2]), value("b", [], TensorProto.BOOL)]
    stored = [numpy_helper.from_array(np.float16(0.1), "k")]
    made = model(nodes, inputs, [value("y", [2], half)], stored)
    widen(made)
    onnx.checker.check_model(made, full_check=True)
    third = np.array([1, 1 / 3], np.float32)
    fed = {"x": np.array([1, 2], np.float16), "c": third, "b": np.array(True)}
    (result,) = ReferenceEvaluator(made).run(None, fed)
    found = np.asarray(result)
    share = np.exp([1.0, 2.0]) / np.exp([1.0, 2.0]).sum()
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, share * 0.1 + third, rtol=1e-3)
    assert [node.op_type for node in made.graph.node] == [
        *("Cast", "Softmax", "Cast", "If", "Add", "Cast"),
    ]
