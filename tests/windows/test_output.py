"""What is printed, where the code page does not have all letters, and what workers log in UTF-16."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import helper

from hatch_epcontext.api import compile_models
from hatch_epcontext.errors import BuildError, Kind
from tests.models import save, value, weights
from tests.windows.conftest import EPCONTEXT, Example, only_windows, python, variables

pytestmark = only_windows


def test_a_pipe_gets_escapes_for_what_its_code_page_lacks(example: Example, tmp_path: Path) -> None:
    app = example.unpack(tmp_path / "日本")
    env = variables(tmp_path / "temporary", PYTHONUTF8="0")
    printed = python(*EPCONTEXT, "inspect", app / "digits_app" / "epcontext", cwd=app, env=env)
    assert rb"\u65e5\u672c" in printed


def infinite() -> onnx.ModelProto:
    """A matrix product, and an operator that QNN refuses with a reason."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"], "dense"),
        helper.make_node("IsInf", ["product"], ["y"], "infinite"),
    ]
    output = helper.make_tensor_value_info("y", onnx.TensorProto.BOOL, [4, 3])
    graph = helper.make_graph(nodes, "graph", [value("x", [4, 3])], [output], [weights("w", 3, 3)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_the_reason_of_the_ep_is_found_in_a_log_in_utf16(tmp_path: Path) -> None:
    path = save(infinite(), tmp_path / "a.onnx")
    chip = {"soc_model": 60, "htp_arch": 73}
    with pytest.raises(BuildError) as raised:
        compile_models(
            path, tmp_path / "out", "qnn", provider_options=chip, settings={"validate": False}
        )
    (problem,) = raised.value.problems
    assert problem.kind is Kind.LOW_COVERAGE
    assert "does not support IsInf on the HTP backend" in problem.message
