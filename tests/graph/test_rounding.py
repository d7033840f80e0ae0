from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from hatch_epcontext.graph.number_format import BFLOAT16, FLOAT16, Fault, NumberFormat
from hatch_epcontext.graph.rounding import emulate, exposed, widen
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.providers import PROVIDERS
from tests.models import parsed

WIDE = replace(FLOAT16, largest_of_sums=131008.0, sums=frozenset({"Add", "Mul"}))
SQUARE = Fault("Pow", "is -4 for -0.0", low=-3e-8, high=3e-8, gives=-4.0, exponent=2.0)

Floats = NDArray[np.float32]


def emulated(
    nodes: str,
    x: Sequence[float],
    format_: NumberFormat = FLOAT16,
    skipped: Sequence[str] = (),
    **stored: float,
) -> list[float]:
    """What ``nodes``, of which the last one makes ``y``, give for ``x``."""
    tensors: dict[str, Any] = {name: np.float32(number) for name, number in stored.items()}
    made = parsed(f"(float[{len(x)}] x) => (float[{len(x)}] y) {{ {nodes} }}", **tensors)
    emulate(made, Scope.of(made), format_, frozenset(skipped))
    onnx.checker.check_model(made)
    with np.errstate(divide="ignore"):
        (found,) = ReferenceEvaluator(made).run(None, {"x": np.array(x, np.float32)})
    return [float(each) for each in np.asarray(found)]


THIRD, SCALED, MOVED = 1 / 3, "y = Mul (x, k)", "y = Add (x, k)"
FAULTY = replace(FLOAT16, faults=(SQUARE,))
OF_LOGARITHM = Fault("Pow", "is 7", low=-1e38, high=-88, gives=7.0, logarithm=True)
OF_POWERS = replace(FLOAT16, faults=(OF_LOGARITHM,))
COMPUTED = Fault("Div", "is 0", operand=1, low=10, high=20, gives=0.0, computed=True)
OF_COMPUTED = replace(FLOAT16, faults=(COMPUTED,))


@pytest.mark.parametrize(
    ("nodes", "x", "format_", "stored", "expected"),
    [
        (SCALED, [1.0, 3.0], FLOAT16, THIRD, [np.float16(THIRD), 1.0]),
        # Denormals are kept, and what is smaller is zero.
        (SCALED, [1e-3, 1e-5], FLOAT16, 1e-3, [np.float16(1e-6), 0.0]),
        # So is a number that the format does not have.
        (MOVED, [0.0], FLOAT16, 1e-10, [0.0]),
        (MOVED, [0.0], BFLOAT16, 1e-10, [pytest.approx(1e-10, rel=0.01)]),
        # What comes from outside is nothing, or cut off, before anything is computed.
        (SCALED, [1e-10, 2e5, 1.0], FLOAT16, 0.5, [0.0, 32752.0, 0.5]),
        # Values saturate.
        ("y = Mul (x, x)", [300.0, 1e9], FLOAT16, 0, [65504.0, 65504.0]),
        ("y = Mul (x, x)", [300.0, 1e9], WIDE, 0, [90000.0, 131008.0]),
        # A division can be a product with the reciprocal.
        (
            "a = Mul (x, k) y = Div (x, a)",
            [0.0, 0.5],
            replace(FLOAT16, has_reciprocals=True),
            1e-10,
            [0.0, 32752.0],
        ),
        # Faults, of which some are of computed values only.
        ("y = Pow (x, k)", [-0.0, 3.0], FAULTY, 2.0, [-4.0, 9.0]),
        ("y = Pow (x, k)", [-0.0, 3.0], FAULTY, 4.0, [0.0, 81.0]),
        ("y = Pow (k, x)", [-128.0, 0.0, 3.0], OF_POWERS, 2.0, [7.0, 1.0, 8.0]),
        ("y = Pow (x, k)", [-1e-4, 0.0, 2.0], OF_POWERS, 10.0, [7.0, 0.0, 1024.0]),
        ("i = Cast <to = 7> (x) y = Pow (k, i)", [-128.0, 3.0], OF_POWERS, 2.0, [7.0, 8.0]),
        ("y = Div (x, k)", [16.0], OF_COMPUTED, 16.0, [1.0]),
        ("a = Neg (x) b = Neg (a) y = Div (x, b)", [16.0, 8.0], OF_COMPUTED, 0, [0.0, 1.0]),
    ],
)
def test_results_are_those_of_the_format(
    nodes: str, x: list[float], format_: NumberFormat, stored: float, expected: list[float]
) -> None:
    assert emulated(nodes, x, format_, k=stored) == expected


def test_a_norm_is_the_root_of_a_rounded_sum_of_squares() -> None:
    qnn = PROVIDERS["qnn"].number_format("npu", {})
    assert qnn is not None
    nodes = "y = ReduceL2 <axes = [0], keepdims = 1> (x)"
    assert emulated(nodes, [3, 4], qnn) == [5.0]
    assert emulated(nodes, [300, 400], qnn) == [pytest.approx(362, abs=0.5)]
    assert emulated(nodes, [300, 400]) == [500.0]


def test_nodes_on_the_cpu_are_exact() -> None:
    assert emulated("[square] y = Mul (x, x)", [1000.0], skipped=["square"]) == [1e6]
    nodes = "[first] a = Add (x, k) [second] y = Mul (a, two)"
    assert emulated(nodes, [0.0], skipped=["first"], k=1e-10, two=2.0) == [0.0]
    found = emulated(nodes, [0.0], skipped=["first", "second"], k=1e-10, two=2.0)
    assert found == [pytest.approx(2e-10)]


@pytest.mark.parametrize(
    ("node", "stored", "skipped", "expected"),
    [
        ("Mul (x, k)", np.array([THIRD], np.float32), "", np.float32(np.float16(THIRD))),
        ("Resize (x, , k)", np.array([THIRD, THIRD], np.float32), "", np.float32(THIRD)),
        ("DequantizeLinear (z, k)", np.float32(THIRD), "", np.float32(THIRD)),
        ("Mul (x, k)", np.array([THIRD], np.float32), "n", np.float32(THIRD)),
    ],
)
def test_stored_numbers_are_rounded_as_data_only(
    node: str, stored: NDArray[np.float32], skipped: str, expected: np.float32
) -> None:
    text = f"(float[1, 4] x, int8[1, 4] z) => (float[a, b] y) {{ [n] y = {node} }}"
    made = parsed(text, k=stored)
    emulate(made, Scope.of(made), FLOAT16, {skipped})
    (kept,) = (tensor for tensor in made.graph.initializer if tensor.name == "k")
    assert numpy_helper.to_array(kept).ravel()[0] == expected


def test_sums_are_exact_up_to_the_addition_behind_them() -> None:
    made = parsed(
        """(float[1, 2] x) => (float[1, 1] y) <float[1] b = {-60000.0}> {
            sum = MatMul (x, w)
            y = Add (sum, b) }""",
        w=np.array([[1000.0], [1000.0]], np.float32),
    )
    emulate(made, Scope.of(made), FLOAT16)
    (found,) = ReferenceEvaluator(made).run(None, {"x": np.array([[50, 60]], np.float32)})
    # 110,000 is beyond the format, and 50,000 is not.
    assert float(np.asarray(found).item()) == pytest.approx(50_016, abs=32)


def test_what_is_quantized_is_not_rounded() -> None:
    made = parsed("""(uint8[1] x) => (uint8[1] y) <float scale = {0.5}, uint8 zero = {0}> {
        floats = DequantizeLinear (x, scale, zero)
        product = Mul (floats, floats)
        y = QuantizeLinear (product, scale, zero) }""")
    emulate(made, Scope.of(made), FLOAT16)
    assert len(made.graph.node) == 3


def test_all_floats_can_be_outputs() -> None:
    made = parsed("""(float[2] x) => (float[2] y) {
            square = Mul (x, x)
            larger = Greater (square, x)
            y = Where (larger, square, x) }""")
    made = exposed(made, Scope.of(made))
    assert [each.name for each in made.graph.output] == ["y", "square"]


def test_a_widened_model_keeps_its_interface_and_its_operators() -> None:
    made = parsed(
        """(float16[2] x, float[2] c, bool b) => (float16[2] y) {
        s = Softmax (x)
        h = Cast <to = 10> (c)
        i = If (b) <then_branch = one () => (float16[2] r) { r = Mul (s, k) },
                    else_branch = two () => (float16[2] r) { r = Mul (s, k) }>
        y = Add (i, h) }""",
        k=np.float16(0.1),
    )
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
