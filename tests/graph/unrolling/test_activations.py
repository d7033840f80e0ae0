from __future__ import annotations

import onnx
import pytest

from hatch_epcontext.graph.unrolling.activations import drop_default_activations
from tests.graph.rewrites.equal import reasons, rewritten
from tests.models import parsed

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
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
