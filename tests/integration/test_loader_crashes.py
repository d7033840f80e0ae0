"""Apps that open and close models again and again, also in threads.

An EP that crashes takes its process along: QNN did, in each process.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import needs_qnn
from tests.integration.conftest import build_project, run
from tests.projects import make_project

TARGETS = {
    "qnn": 'provider = "qnn"\nchip = "snapdragon-x-elite"',
    "openvino": 'provider = "openvino"',
}

# Sessions run as well, because EPs start some of their work only then. The names of the sessions go out
# of scope at once, which closes them. Logs are as they are in apps: QNN crashed while it logged.
APP = """
import sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from my_app.epcontext import load, target_of

x = {"x": np.ones((1, 1, 8, 8), np.float32)}

def open_and_close(_):
    session = load("a", device="any")
    assert target_of(session) == sys.argv[1], target_of(session)
    return session.run(None, x)[0]

outputs = [open_and_close(turn) for turn in range(15)]
with ThreadPoolExecutor(8) as pool:
    outputs += pool.map(open_and_close, range(15))
assert len(outputs) == 30
assert all(np.array_equal(each, outputs[0]) for each in outputs)
print("done")
"""


@pytest.fixture(
    params=[
        pytest.param("qnn", marks=needs_qnn),
        "openvino",
    ]
)
def target(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "openvino":
        request.getfixturevalue("openvino_cpu")
    return name


@pytest.fixture
def app(target: str, tmp_path: Path) -> Path:
    """The folder into which a wheel is installed; its only target is called as its provider."""
    toml = f"""
fallback = "none"
models = [{{ path = "models/a.onnx", shapes = {{ x = [1, 1, 8, 8] }} }}]
[tool.epcontext.targets.{target}]
{TARGETS[target]}
"""
    wheel, _ = build_project(make_project(tmp_path / "project", toml))
    shutil.unpack_archive(wheel, tmp_path / "installed", "zip")
    return tmp_path / "installed"


def test_a_process_that_opens_and_closes_models_does_not_die(app: Path, target: str) -> None:
    printed = run(sys.executable, "-X", "faulthandler", "-c", APP, target, cwd=app, env=os.environ)
    assert "done" in printed.splitlines()
