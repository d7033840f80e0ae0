"""The shipped loader and its packages, with the oldest ONNX Runtime that it supports and the newest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import printed_json
from tests.integration.conftest import copy_example, make_environment, run

pytestmark = [
    pytest.mark.usefixtures("openvino_cpu"),
    pytest.mark.network,
]

# Python 3.10 has no newer one than 1.23.2, and Python 3.14 no older one than 1.24.1.
OLDEST = f"onnxruntime=={'1.23.2' if sys.version_info < (3, 14) else '1.24.1'}"
NEWEST = "onnxruntime"

SCRIPT = """
import json
import numpy as np
import onnxruntime
from digits_app.epcontext import explain, load, target_of

x = {"image": np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8)}
answers = {}
for target in ("openvino", "cpu", "source"):
    session = load("digits", target=target)
    answers[target_of(session)] = session.run(None, x)[0].tolist()
attempts = [[attempt.target, attempt.outcome.value] for attempt in explain("digits")]
print(json.dumps([onnxruntime.__version__, attempts, answers]))
"""


@pytest.fixture(scope="module")
def wheel(
    openvino_cpu: None, env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The example's wheel with a context for OpenVINO, the optimized graph and the source."""
    project = copy_example(tmp_path_factory.mktemp("both-ends") / "digits-app")
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    # Processors with AMX compute in bfloat16 otherwise.
    options = 'load_config = { CPU = { INFERENCE_PRECISION_HINT = "f32" } }'
    table = f"""[tool.epcontext.targets.openvino]
provider = "openvino"
device = "cpu"
provider-options = {{ {options} }}

"""
    text = text.replace("[tool.epcontext.targets.cpu]", f"{table}[tool.epcontext.targets.cpu]")
    text += 'fallback = "source"\n'
    # The bound is that of the other NPU's EP.
    text = text.replace("onnxruntime>=1.24.2", "onnxruntime>=1.23")
    (project / "pyproject.toml").write_text(text, encoding="utf-8")
    own = {**os.environ, **env, "HATCH_EPCONTEXT_TARGETS": "openvino,cpu"}
    run(sys.executable, "-m", "build", "-w", "-n", project, cwd=project, env=own)
    (found,) = (project / "dist").glob("*.whl")
    return found


@pytest.mark.parametrize("runtime", [OLDEST, NEWEST])
def test_every_target_opens(wheel: Path, runtime: str, tmp_path: Path, env: dict[str, str]) -> None:
    environment = make_environment(tmp_path / "venv", env)
    environment.install(wheel, runtime, "onnxruntime-ep-openvino")
    version, attempts, answers = printed_json(environment.python("-c", SCRIPT))
    if "==" in runtime:
        assert runtime.endswith(version)
    assert attempts == [["openvino", "opened"], ["cpu", "not needed"], ["source", "not needed"]]
    for logits in answers.values():
        assert logits[0] == pytest.approx(answers["source"][0], abs=1e-3)
