from __future__ import annotations

import dataclasses
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
from tests.models import model, save, save_with_data, value
from tests.worker.actions.test_compile import target

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


def half_network() -> onnx.ModelProto:
    """Float16 with operators for which the CPU has no kernel, but that have a function's body."""
    rng = np.random.default_rng(0)
    weights = numpy_helper.from_array(rng.normal(size=(8, 8)).astype(np.float16), "w")
    scale = numpy_helper.from_array(np.ones(8, np.float16), "scale")
    operators = ("Identity", "Softmax", "HardSwish", "LogSoftmax")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"], "product"),
        helper.make_node("Identity", ["product"], ["same"], "same"),
        helper.make_node("LayerNormalization", ["same", "scale"], ["v0"], "norm", axis=-1),
        *(
            helper.make_node(op, [f"v{index}"], [f"v{index + 1}"], f"{op}{index}")
            for index, op in enumerate(operators)
        ),
        helper.make_node("Add", [f"v{len(operators)}", "product"], ["y"], "add"),
    ]
    shape = [2, 8]
    return model(nodes, [value("x", shape, HALF)], [value("y", shape, HALF)], [weights, scale])


@pytest.mark.parametrize("with_data", [False, True])
def test_float16_stays_float16_in_whole_operators(tmp_path: Path, with_data: bool) -> None:
    source, result = tmp_path / "source.onnx", tmp_path / "simplified" / "result.onnx"
    result.parent.mkdir()
    made = half_network()
    save_with_data(made, source) if with_data else save(made, source)
    session = optimize(source, result, "basic")
    found = onnx.load(result)
    assert [node.op_type for node in found.graph.node] == [
        node.op_type for node in half_network().graph.node if node.op_type != "Identity"
    ]
    assert {tensor.data_type for tensor in found.graph.initializer} == {HALF}
    x = np.linspace(-1, 1, 16, dtype=np.float16).reshape(2, 8)
    wanted = open_session(source, cpu_options()).run(None, {"x": x})[0]
    np.testing.assert_allclose(session.run(None, {"x": x})[0], wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("provider", "casts"), [("cpu", True), ("directml", False)])
def test_an_optimized_graph_has_casts_only_for_an_ep_without_float16(
    tmp_path: Path, provider: str, casts: bool
) -> None:
    source = save(half_network(), tmp_path / "source.onnx")
    optimize(source, tmp_path / "result.onnx", "basic", target(provider))
    operators = [node.op_type for node in onnx.load(tmp_path / "result.onnx").graph.node]
    assert ("Cast" in operators) is casts
    assert ("Softmax" in operators) is not casts


def test_external_weights_of_bodies_open_from_hard_links(tmp_path: Path) -> None:
    def branch(name: str, factor: float) -> onnx.GraphProto:
        weights = numpy_helper.from_array(np.full((2, 300), factor, np.float32), f"{name}_weights")
        nodes = [helper.make_node("Mul", ["x", f"{name}_weights"], [name])]
        return helper.make_graph(nodes, name, [], [value(name, [2, 300])], [weights])

    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Greater", ["most", "limit"], ["condition"]),
        helper.make_node(
            "If",
            ["condition"],
            ["y"],
            then_branch=branch("then", 2),
            else_branch=branch("else", 3),
        ),
    ]
    limit = numpy_helper.from_array(np.float32(1), "limit")
    source = model(nodes, [value("x", [2, 300])], [value("y", [2, 300])], [limit])
    result = tmp_path / "result.onnx"
    spec = target("cpu")
    settings = dataclasses.replace(spec.settings, external_initializers=True)
    spec = dataclasses.replace(spec, settings=settings)
    optimize(save(source, tmp_path / "source.onnx"), result, "all", spec)
    (data,) = tmp_path.glob("*.data")
    (tmp_path / "second").hardlink_to(data)
    x = np.full((2, 300), 0.5, np.float32)
    (y,) = open_session(result, cpu_options()).run(None, {"x": x})
    assert y.min() == y.max() == 1.5
