from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Key, ModelError
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.facts import Cut
from hatch_epcontext.worker.actions.cut import handle
from hatch_epcontext.worker.requests import CutReply, CutRequest
from hatch_epcontext.worker.session import cpu_options, open_session
from tests.models import (
    initializer_among_the_inputs,
    network,
    parsed,
    save,
    save_with_data,
    value,
)

KEY = Key(("models", 0))


def branching() -> onnx.ModelProto:
    """``x`` -> ``a``; ``a`` and ``s`` -> ``b``, whose sign chooses ``y``; ``s`` -> ``z``; all n x 4."""
    return parsed(
        """(float[n, 4] x, float[n, 4] s) => (float[n, 4] y, float[n, 4] z)
        <float zero = {0}, float two = {2}, float three = {3}> {
            [product] a = MatMul (x, w)
            [sum] b = Add (a, s)
            [total] total = ReduceSum <keepdims = 0> (b)
            [sign] positive = Greater (total, zero)
            [choice] y = If (positive) <
                then_branch = one () => (float[n, 4] then) { then = Mul (b, two) },
                else_branch = other () => (float[n, 4] else) { else = Mul (b, three) }>
            [other] z = Relu (s) }""",
        w=(4, 4),
    )


def cut(
    path: Path,
    folder: Path,
    inputs: tuple[str, ...] = (),
    outputs: tuple[str, ...] = (),
    **fixed: Any,
) -> CutReply:
    folder.mkdir()
    spec = Model("a", path, KEY, cut=Cut(inputs, outputs), **fixed)
    return handle(CutRequest(spec, str(folder)))


def run(path: Path, feeds: dict[str, Any]) -> dict[str, Any]:
    session = open_session(path, cpu_options())
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def test_the_parts_of_a_model_are_together_the_model(tmp_path: Path) -> None:
    source = save(branching(), tmp_path / "a.onnx")
    before = source.read_bytes()
    head = cut(source, tmp_path / "head", outputs=("b",))
    tail = cut(source, tmp_path / "tail", inputs=("b",), outputs=("y",))
    assert (head.files, tail.files) == (("a.onnx",), ("a.onnx",))
    rng = np.random.default_rng(1)
    for sign in (1, -1):
        feeds = {name: sign * rng.random((2, 4), np.float32) for name in ("x", "s")}
        between = run(tmp_path / "head" / "a.onnx", feeds)
        assert list(between) == ["b"]
        whole, rest = run(source, feeds), run(tmp_path / "tail" / "a.onnx", between)
        np.testing.assert_array_equal(rest["y"], whole["y"])
    stored = onnx.load(tmp_path / "tail" / "a.onnx").graph.initializer
    assert {each.name for each in stored} == {"zero", "two", "three"}
    assert source.read_bytes() == before


def test_inputs_that_no_output_needs_are_left_out(tmp_path: Path) -> None:
    cut(save(branching(), tmp_path / "a.onnx"), tmp_path / "cut", outputs=("a",))
    made = onnx.load(tmp_path / "cut" / "a.onnx")
    assert [each.name for each in made.graph.input] == ["x"]


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (("bb",), (), "computes 'bb'"),
        ((), ("yy",), "computes 'yy'"),
        # It exists only inside a node.
        ((), ("then",), "computes 'then'"),
        (("w",), ("y",), "computes 'w'"),
        ((), ("x",), "computes 'x'"),
        (("a",), ("b",), "removes 's', which 'b' depends on"),
        (("b",), (), "removes 's', which 'z' depends on"),
        (("a", "s"), ("z",), "no output depends on 'a'"),
        (("b", "z"), ("y",), "no output depends on 'z'"),
    ],
)
def test_a_cut_that_is_no_model_is_an_error(
    tmp_path: Path, inputs: tuple[str, ...], outputs: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ModelError) as raised:
        cut(save(branching(), tmp_path / "a.onnx"), tmp_path / "cut", inputs, outputs)
    assert message in str(raised.value)
    assert "models[0].cut." in str(raised.value)


def test_an_output_that_depends_on_no_input_is_an_error(tmp_path: Path) -> None:
    made = parsed(
        "(float[2, 2] x) => (float[2, 2] y) { fixed = Relu (w) y = Add (x, fixed) }", w=(2, 2)
    )
    with pytest.raises(ModelError, match="no input of the cut decides 'fixed'"):
        cut(save(made, tmp_path / "a.onnx"), tmp_path / "cut", outputs=("fixed",))


def test_an_input_with_a_constant_need_not_be_named(tmp_path: Path) -> None:
    source = save(branching(), tmp_path / "a.onnx")
    constants = {"s": [[1.0] * 4]}
    cut(source, tmp_path / "cut", ("a",), ("b",), constants=constants)
    made = onnx.load(tmp_path / "cut" / "a.onnx")
    assert [each.name for each in made.graph.input] == ["a"]
    assert "s" in [each.name for each in made.graph.initializer]


def test_only_the_data_that_is_needed_goes_along(tmp_path: Path) -> None:
    source = save_with_data(network(), tmp_path / "models" / "a.onnx")
    head = cut(source, tmp_path / "head", outputs=("r",))
    # Its weights are few, and so in its own file.
    assert (head.files, head.data) == (("a.onnx",), ("network.data",))
    x = np.ones((1, 1, 8, 8), np.float32)
    between = run(tmp_path / "head" / "a.onnx", {"x": x})
    tail = cut(source, tmp_path / "tail", inputs=("r",))
    assert tail.files == ("a.onnx", "a.onnx.data")
    made = run(tmp_path / "tail" / "a.onnx", between)
    np.testing.assert_array_equal(made["y"], run(source, {"x": x})["y"])
    assert (tmp_path / "tail" / "a.onnx.data").stat().st_size == 256 * 10 * 4


def test_operators_that_onnx_does_not_know_have_a_type_too(tmp_path: Path) -> None:
    made = parsed(
        """(float[n, 4] x) => (float[n, 4] y) {
            a = com.microsoft.FusedMatMul (x, w)
            y = Relu (a) }""",
        w=(4, 4),
    )
    cut(save(made, tmp_path / "a.onnx"), tmp_path / "cut", inputs=("a",))
    facts = graph.facts(onnx.load(tmp_path / "cut" / "a.onnx").graph.input[0])
    assert (facts.dtype, facts.shape) == ("float32", ("n", 4))


def test_a_tensor_of_unknown_rank_cannot_be_cut(tmp_path: Path) -> None:
    made = parsed(
        """(float[4] x, int64[n] sizes) => (float[m] y) {
            a = Reshape (x, sizes)
            y = Flatten (a) }"""
    )
    with pytest.raises(ModelError, match="the type of 'a' is not known before the model runs"):
        cut(save(made, tmp_path / "a.onnx"), tmp_path / "cut", inputs=("a",))


def test_initializers_among_the_inputs_stay_there(tmp_path: Path) -> None:
    made = initializer_among_the_inputs()
    made.graph.node.append(helper.make_node("Relu", ["y"], ["z"]))
    made.graph.output.append(value("z", [1, 2], TensorProto.FLOAT))
    cut(save(made, tmp_path / "a.onnx"), tmp_path / "cut", outputs=("y",))
    result = run(tmp_path / "cut" / "a.onnx", {"x": np.ones((1, 2), np.float32)})
    assert result["y"].shape == (1, 2)
