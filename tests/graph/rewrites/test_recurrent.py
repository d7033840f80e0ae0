from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.basics import DEFAULT_ACTIVATIONS
from tests.graph.rewrites.equal import made, rewritten, untouched

FLOAT = TensorProto.FLOAT
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


def layer(
    operator: str, directions: int, activations: list[str], **attributes: Any
) -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    gates = GATES[operator]
    stored = {
        "w": rng.standard_normal((directions, gates * 3, 4)).astype(np.float32),
        "r": rng.standard_normal((directions, gates * 3, 3)).astype(np.float32),
    }
    node = helper.make_node(
        operator,
        ["x", "w", "r"],
        ["y"],
        hidden_size=3,
        activations=activations,
        direction="bidirectional" if directions == 2 else "reverse",
        **attributes,
    )
    return made([node], {"x": (FLOAT, [5, 1, 4])}, {"y": (FLOAT, [5, directions, 1, 3])}, stored)


@pytest.mark.parametrize("operator", GATES)
@pytest.mark.parametrize("directions", [1, 2])
def test_default_activations_are_left_out(operator: str, directions: int) -> None:
    activations = DEFAULTS[operator] * directions
    after = rewritten(layer(operator, directions, activations), DEFAULT_ACTIVATIONS)
    (node,) = after.graph.node
    assert {each.name for each in node.attribute} == {"hidden_size", "direction"}


@pytest.mark.parametrize(
    ("operator", "activations"),
    [("LSTM", ["Sigmoid", "Relu", "Tanh"]), ("GRU", ["Tanh", "Sigmoid"]), ("RNN", ["Relu"])],
)
def test_other_activations_stay(operator: str, activations: list[str]) -> None:
    assert untouched(layer(operator, 1, activations), DEFAULT_ACTIVATIONS)


def test_what_the_ep_takes_stays() -> None:
    model = layer("GRU", 1, DEFAULTS["GRU"])
    assert untouched(model, DEFAULT_ACTIVATIONS, refused=["LSTM"])
    assert graph.attribute(model.graph.node[0], "activations", None)
