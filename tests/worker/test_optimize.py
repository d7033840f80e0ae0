from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites import rewrite
from hatch_epcontext.graph.rewrites.branches import BRANCHES
from hatch_epcontext.worker.optimize import optimize
from hatch_epcontext.worker.session import cpu_options, open_session
from hatch_epcontext.worker.value_types import value_types
from tests.models import model, save, value

HALF = TensorProto.FLOAT16


def branches() -> onnx.ModelProto:
    """Float16 branches with operators that ONNX Runtime computes in float32, as those around them."""

    def branch(op: str) -> onnx.GraphProto:
        nodes = [helper.make_node(op, ["a"], ["r"], op)]
        return helper.make_graph(nodes, op, [], [value("r", [2, 3], HALF)])

    stored = numpy_helper.from_array(np.float16(1), "limit")
    return model(
        [
            helper.make_node("Relu", ["x"], ["a"], "relu"),
            helper.make_node("ReduceMax", ["a"], ["m"], "max", keepdims=0),
            helper.make_node("Greater", ["m", "limit"], ["c"], "greater"),
            helper.make_node(
                "If",
                ["c"],
                ["i"],
                "if",
                then_branch=branch("Sigmoid"),
                else_branch=branch("Softplus"),
            ),
            helper.make_node("Mul", ["i", "a"], ["y"], "mul"),
        ],
        [value("x", [2, 3], HALF)],
        [value("y", [2, 3], HALF)],
        [stored],
    )


@pytest.mark.parametrize("scale", [0.1, 3])
def test_an_optimized_float16_model_can_be_optimized_again(tmp_path: Path, scale: float) -> None:
    source, first, inlined, second = (tmp_path / f"{name}.onnx" for name in "abcd")
    save(branches(), source)
    optimize(source, first, "basic")
    made = onnx.load(first)
    assert rewrite(made, frozenset({"If"}), value_types(made, first), (BRANCHES,))
    save(made, inlined)
    optimize(inlined, second, "basic")
    x = np.linspace(-1, 1, 6, dtype=np.float16).reshape(2, 3) * np.float16(scale)
    wanted, *found = (
        open_session(each, cpu_options()).run(None, {"x": x})[0] for each in (source, first, second)
    )
    for each in found:
        # Casts to float16 and back are left out.
        np.testing.assert_allclose(each, wanted, rtol=2e-3)
    names = [name for node in graph.nodes(onnx.load(second).graph) for name in node.output]
    assert len(set(names)) == len(names)
