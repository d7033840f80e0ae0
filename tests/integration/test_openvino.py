"""OpenVINO's CPU device, for real, on machines that have it: with Intel processors."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import printed_json
from tests.integration.conftest import build_project, run
from tests.projects import make_project

pytestmark = pytest.mark.usefixtures("openvino_cpu")

TOML = """
targets.openvino.provider = "openvino"
targets.openvino.provider-options = { load_config = { CPU = { INFERENCE_PRECISION_HINT = "f32" } } }
fallback = "none"
models = [
    { path = "models/a.onnx", shapes = { x = [3, 1, 8, 8] } },
    { name = "b", path = "models/a.onnx", targets.openvino.embed = true },
]
"""

OPEN = """
import json, sys
import numpy as np
from my_app.epcontext import explain, load
x = np.load(sys.argv[1])
text = {}
for name in ("a", "b"):
    session = load(name)
    text[name] = [session.run(None, {"x": x})[0].tolist(), [str(s) for s in explain(name)]]
print(json.dumps(text))
"""


def test_contexts_for_the_cpu_are_compiled_shipped_and_opened(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", TOML)
    wheel, text = build_project(project)
    assert "a -> openvino (openvino): ok, 4/4 nodes, agrees" in text
    assert text.count("agrees on synthetic inputs") == 2

    shutil.unpack_archive(wheel, tmp_path / "installed", "zip")
    folder = tmp_path / "installed" / "my_app" / "epcontext"
    components = json.loads((folder / "manifest.json").read_text("utf-8"))["components"]
    assert list(components) == ["a", "b"]
    assert len(list((folder / "a" / "openvino").iterdir())) == 2
    assert len(list((folder / "b" / "openvino").iterdir())) == 1
    for component in components.values():
        (variant,) = component["variants"].values()
        assert (variant["ep"], "device" in variant) == ("OpenVINOExecutionProvider", False)
        assert "isa=" in variant["compatibility_string"]
        about = variant["additional_metadata"]["hatch-epcontext"]
        assert about["validation"]["status"] == "ran"
        assert about["coverage"]["uncovered"] == []

    # Another batch than that of the dummy inputs: shapes stay open on the CPU.
    x = np.random.default_rng(0).standard_normal((5, 1, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "open.py").write_text(OPEN, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path / "installed"), os.environ.get("PYTHONPATH", "")])
    printed = run(
        sys.executable, tmp_path / "open.py", tmp_path / "x.npy",
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    opened = printed_json(printed)
    from hatch_epcontext.worker.session import cpu_options, open_session

    source = open_session(project / "models" / "a.onnx", cpu_options())
    expected = source.run(None, {"x": x})[0]
    for name in ("a", "b"):
        outputs, attempts = opened[name]
        np.testing.assert_allclose(outputs, expected, rtol=1e-3, atol=1e-4)
        assert attempts[0] == "openvino: opened, OpenVINOExecutionProvider on cpu"
