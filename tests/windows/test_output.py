"""What is printed, where the code page does not have all letters, and what workers log in UTF-16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from hatch_epcontext.worker.reasons import ask
from tests.models import save, value, weights
from tests.windows.conftest import EPCONTEXT, Example, only_windows, python, variables
from tests.worker.actions.test_compile import X_ELITE, target

pytestmark = only_windows


def test_a_pipe_gets_escapes_for_what_its_code_page_lacks(example: Example, tmp_path: Path) -> None:
    app = example.unpack(tmp_path / "日本")
    env = variables(tmp_path / "temporary", PYTHONUTF8="0")
    printed = python(*EPCONTEXT, "inspect", app / "digits_app" / "epcontext", cwd=app, env=env)
    assert rb"\u65e5\u672c" in printed


def scattering() -> onnx.ModelProto:
    """A matrix product, and an operator with an attribute that QNN does not have."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"], "dense"),
        helper.make_node("ScatterND", ["product", "i", "u"], ["y"], "scatter", reduction="max"),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [value("x", [4, 3]), value("u", [2, 3])],
        [value("y", [4, 3])],
        [weights("w", 3, 3), numpy_helper.from_array(np.array([[1], [2]]), "i")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_the_reason_of_the_ep_is_found_in_a_log_in_utf16(tmp_path: Path) -> None:
    path = save(scattering(), tmp_path / "a.onnx")
    reason = ask(path, target("qnn", X_ELITE))["scatter"]
    assert "does not support reduction max" in reason
