from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from hatch_epcontext.graph.rewrites.recurrent import drop_default_activations, unroll_recurrent
from tests.conftest import newer_runtime
from tests.graph.rewrites.equal import feeds, reasons, rewritten, session
from tests.graph.rewrites.unrolled import BATCH, GATES, LENGTH, assert_equal, recurrent, unrolled
from tests.models import parsed

FUNCTIONS = {"LSTM": 3, "GRU": 2, "RNN": 1}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without bias": {"inputs": ()},
    "states": {"inputs": ("B", "h")},
    "whole lengths": {"lengths": [LENGTH] * BATCH},
    "shorter sequences": {"lengths": [1, LENGTH], "inputs": ("B", "h")},
    "last only": {"outputs": ("Y_h",)},
    "sequence only": {"outputs": ("Y",)},
}
LSTM_FORMS: dict[str, dict[str, Any]] = {
    "both states": {"inputs": ("B", "h", "c")},
    "cell only": {"outputs": ("Y_c",)},
    "peepholes": {"inputs": ("B", "h", "c", "P")},
    "coupled gates": {"input_forget": 1},
    "clipped": {"clip": 0.3, "inputs": ("B", "h", "c")},
    "hard functions": {
        "activations": ["HardSigmoid", "Relu", "HardSigmoid"] * 2,
        "activation_alpha": [0.3, 0.4, 0.1, 0.2],
        "activation_beta": [0.1, 0.7, 0.3, 0.6],
    },
}
GRU_FORMS: dict[str, dict[str, Any]] = {
    "late": {"linear_before_reset": 1, "inputs": ("B", "h")},
    "clipped": {"clip": 0.3, "inputs": ("B", "h")},
    "late without bias": {"linear_before_reset": 1, "inputs": ()},
}
RNN_FORMS: dict[str, dict[str, Any]] = {"clipped": {"clip": 0.3, "inputs": ("B", "h")}}
CASES = [
    pytest.param(op, variant, id=f"{op}-{name}")
    for op, own in (("LSTM", LSTM_FORMS), ("GRU", GRU_FORMS), ("RNN", RNN_FORMS))
    for name, variant in {**VARIANTS, **own}.items()
]


@pytest.mark.parametrize(("op", "variant"), CASES)
def test_a_layer_of_both_directions_computes_the_same(op: str, variant: dict[str, Any]) -> None:
    assert_equal(recurrent(op, "bidirectional", **variant), "unroll_recurrent")


@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_layer_of_one_direction_computes_the_same(op: str, direction: str) -> None:
    inputs = ("B", "h", "c") if op == "LSTM" else ("B", "h")
    assert_equal(recurrent(op, direction, inputs=inputs), "unroll_recurrent")


@pytest.mark.parametrize("op", FUNCTIONS)
def test_one_position_computes_the_same(op: str) -> None:
    assert_equal(recurrent(op, "bidirectional", length=1), "unroll_recurrent")


def test_doubles_stay_doubles() -> None:
    # ONNX Runtime's CPU has no layers of doubles: the result is compared with that of floats.
    single = recurrent("GRU", inputs=("B",))
    double, _ = unrolled(recurrent("GRU", inputs=("B",), elem_type=TensorProto.DOUBLE))
    floats, doubles = session(single), session(double)
    given = feeds(floats, 1)
    for expected, found in zip(
        floats.run(None, given),
        doubles.run(None, {name: values.astype(np.float64) for name, values in given.items()}),
        strict=True,
    ):
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", ["RELU", "tanh", "Sigmoid", "HardSigmoid"])
def test_a_function_of_any_case_computes_the_same(function: str) -> None:
    assert_equal(recurrent("LSTM", activations=[function] * 3), "unroll_recurrent", atol=1e-5)


@pytest.mark.parametrize("op", ["GRU", pytest.param("RNN", marks=newer_runtime)])
def test_other_layers_take_functions_too(op: str) -> None:
    model = recurrent(op, activations=["HardSigmoid", "Relu"][: FUNCTIONS[op]])
    assert_equal(model, "unroll_recurrent")


def test_a_layer_of_one_direction_may_name_functions_for_two() -> None:
    # That is the default of RNN.
    model = recurrent("RNN", activations=["Relu", "Tanh"])
    assert_equal(model, "unroll_recurrent")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            recurrent("GRU", activations=["Sigmoid", "Softsign"]),
            "its activation 'Softsign' is not known",
        ),
        (recurrent("GRU", activations=["Sigmoid"]), "it has 1 activations, not 2"),
        (recurrent("RNN", layout=1), "its batch comes first"),
    ],
)
def test_a_layer_that_is_not_understood_stays(model: onnx.ModelProto, reason: str) -> None:
    assert reasons(model, unroll_recurrent) == [reason]


def test_a_layer_of_unknown_length_stays() -> None:
    model = recurrent("LSTM", outputs=("Y_h",))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "length"
    expected = ["its length or its batch is not fixed"]
    assert reasons(model, unroll_recurrent) == expected


def test_no_function_follows_a_sum_at_once() -> None:
    # QNN's HTP joins them into one that is far less exact.
    for op in FUNCTIONS:
        result, _ = unrolled(recurrent(op, "bidirectional"))
        makers = {name: node.op_type for node in result.graph.node for name in node.output}
        before = {
            makers[node.input[0]]
            for node in result.graph.node
            if node.op_type in ("Sigmoid", "Tanh")
        }
        assert before <= {"Clip", "Split"}


DEFAULTS = {"LSTM": '"Sigmoid", "Tanh", "Tanh"', "GRU": '"Sigmoid", "Tanh"', "RNN": '"Tanh"'}


def layer(operator: str, directions: int, activations: str) -> onnx.ModelProto:
    direction = "bidirectional" if directions == 2 else "reverse"
    return parsed(
        f"""(float[5, 1, 4] x) => (float[5, {directions}, 1, 3] y) {{ y = {operator} <hidden_size = 3,
        activations = [{activations}], direction = "{direction}"> (x, w, r) }}""",
        w=(directions, GATES[operator] * 3, 4),
        r=(directions, GATES[operator] * 3, 3),
    )


@pytest.mark.parametrize("operator", GATES)
@pytest.mark.parametrize("directions", [1, 2])
def test_default_activations_are_left_out(operator: str, directions: int) -> None:
    activations = ", ".join([DEFAULTS[operator]] * directions)
    model = layer(operator, directions, activations)
    (node,) = rewritten(model, drop_default_activations).graph.node
    assert {attribute.name for attribute in node.attribute} == {"hidden_size", "direction"}


@pytest.mark.parametrize(
    ("operator", "activations"),
    [("LSTM", '"Sigmoid", "Relu", "Tanh"'), ("GRU", '"Tanh", "Sigmoid"'), ("RNN", '"Relu"')],
)
def test_other_activations_stay(operator: str, activations: str) -> None:
    expected = ["its activations are not the default ones"]
    assert reasons(layer(operator, 1, activations), drop_default_activations) == expected
