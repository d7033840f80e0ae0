from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.branches import if_as_where
from hatch_epcontext.graph.rewriting import apply
from hatch_epcontext.worker.optimizing import optimize
from hatch_epcontext.worker.ort_values import value_types
from hatch_epcontext.worker.session import cpu_options, open_session
from tests.models import parsed, save, save_with_data
from tests.worker.actions.test_compile import target

HALF = TensorProto.FLOAT16


def branches() -> onnx.ModelProto:
    """Float16 branches with operators that ONNX Runtime computes in float32, as those around them."""
    return parsed(
        """(float16[2, 3] x) => (float16[2, 3] y) {
            [relu] a = Relu (x)
            [max] m = ReduceMax <keepdims = 0> (a)
            [greater] c = Greater (m, limit)
            [if] i = If (c) <
                then_branch = one () => (float16[2, 3] r) { [Sigmoid] r = Sigmoid (a) },
                else_branch = other () => (float16[2, 3] r) { [Softplus] r = Softplus (a) }>
            [mul] y = Mul (i, a) }""",
        limit=np.float16(1),
    )


@pytest.mark.parametrize("scale", [0.1, 3])
def test_an_optimized_float16_model_can_be_optimized_again(tmp_path: Path, scale: float) -> None:
    source, first, inlined, second = (tmp_path / f"{name}.onnx" for name in "abcd")
    save(branches(), source)
    optimize(source, first, "basic")
    made = onnx.load(first)
    assert apply(made, [if_as_where], frozenset({"If"}), value_types(made, first)).names
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
    return parsed(
        """(float16[2, 8] x) => (float16[2, 8] y) {
            [product] product = MatMul (x, w)
            [same] same = Identity (product)
            [norm] v0 = LayerNormalization <axis = -1> (same, scale)
            [Identity0] v1 = Identity (v0)
            [Softmax1] v2 = Softmax (v1)
            [HardSwish2] v3 = HardSwish (v2)
            [LogSoftmax3] v4 = LogSoftmax (v3)
            [add] y = Add (v4, product) }""",
        w=np.random.default_rng(0).normal(size=(8, 8)).astype(np.float16),
        scale=np.ones(8, np.float16),
    )


@pytest.mark.parametrize("with_data", [False, True])
def test_float16_stays_float16_in_whole_operators(tmp_path: Path, with_data: bool) -> None:
    source, result = tmp_path / "source.onnx", tmp_path / "simplified" / "result.onnx"
    result.parent.mkdir()
    made = half_network()
    save_with_data(made, source) if with_data else save(made, source)
    session = optimize(source, result, "basic")()
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
    source = parsed(
        """(float[2, 300] x) => (float[2, 300] y) <float limit = {1}> {
            most = ReduceMax <keepdims = 0> (x)
            condition = Greater (most, limit)
            y = If (condition) <then_branch = one () => (float[2, 300] t) { t = Mul (x, w) },
                                else_branch = other () => (float[2, 300] e) { e = Mul (x, w) }> }""",
        check=False,
    )
    for attribute, factor in zip(source.graph.node[-1].attribute, (2, 3), strict=True):
        weights = numpy_helper.from_array(np.full((2, 300), factor, np.float32), "w")
        attribute.g.initializer.append(weights)
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
