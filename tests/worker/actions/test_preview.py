from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Kind
from hatch_epcontext.worker.actions import find_refused
from hatch_epcontext.worker.actions.preview import handle
from hatch_epcontext.worker.requests import (
    FindRefusedRequest,
    PreviewReply,
    PreviewRequest,
)
from tests.conftest import needs_qnn
from tests.models import model, network, save, value
from tests.worker.actions.test_compile import MODEL, X_ELITE, target


def preview(made: onnx.ModelProto, folder: Path, *, dequantized: bool = False) -> PreviewReply:
    spec = Model("a", save(made, folder / "a.onnx"), MODEL)
    return handle(PreviewRequest(spec, target("qnn", dequantize=dequantized)))


def test_a_model_that_compiles_has_no_problem(tmp_path: Path) -> None:
    found = preview(network(1), tmp_path)
    assert (found.nodes, found.refused, found.problems) == (4, (), ())


def test_open_shapes_are_a_problem_for_an_ep_of_fixed_shapes(tmp_path: Path) -> None:
    (problem,) = preview(network(), tmp_path).problems
    assert problem.kind is Kind.OPEN_DIMENSION


def test_a_condition_on_an_input_is_to_be_frozen(tmp_path: Path) -> None:
    then, other = (
        helper.make_graph(
            [helper.make_node(operator, ["x"], [name])], name, [], [value(name, [1, 4])]
        )
        for name, operator in (("then", "Relu"), ("else", "Neg"))
    )
    nodes = [
        helper.make_node("Constant", [], ["rate"], value_int=16000),
        helper.make_node("Equal", ["sr", "rate"], ["k"]),
        helper.make_node("If", ["k"], ["y"], "choice", then_branch=then, else_branch=other),
    ]
    inputs = [value("x", [1, 4]), value("sr", [], TensorProto.INT64)]
    found = preview(model(nodes, inputs, [value("y", [1, 4])]), tmp_path)
    texts = [str(setting) for problem in found.problems for setting in problem.settings]
    assert any("constants" in text and "16000" in text for text in texts)


@pytest.mark.parametrize("dequantized", [False, True])
def test_an_operator_that_the_ep_lacks_is_refused(tmp_path: Path, dequantized: bool) -> None:
    made = model(
        [helper.make_node("Hardmax", ["x"], ["y"], "last")],
        [value("x", [1, 4])],
        [value("y", [1, 4])],
    )
    found = preview(made, tmp_path, dequantized=dequantized)
    assert [(node.name, node.op) for node in found.refused] == [("last", "Hardmax")]


@needs_qnn
def test_the_ep_itself_says_what_it_refuses(tmp_path: Path) -> None:
    made = model(
        [
            helper.make_node("Relu", ["x"], ["r"]),
            helper.make_node("Hardmax", ["r"], ["h"]),
            helper.make_node("Relu", ["h"], ["y"]),
        ],
        [value("x", [1, 4])],
        [value("y", [1, 4])],
    )
    spec = Model("a", save(made, tmp_path / "a.onnx"), MODEL)
    folder = tmp_path / "asked"
    folder.mkdir()
    found = find_refused.handle(FindRefusedRequest(spec, target("qnn", X_ELITE), str(folder)))
    assert found.nodes == 3
    assert [node.op for node in found.refused] == ["Hardmax"]
