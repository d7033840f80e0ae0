"""A model of several shapes with a frozen input, from the configuration to the app."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.cli.conftest import scaled
from tests.conftest import needs_qnn, printed_json
from tests.integration.conftest import build_project, run
from tests.projects import make_project

pytestmark = needs_qnn

TOML = """
[tool.epcontext.targets.npu]
provider = "qnn"
chip = "snapdragon-x-elite"

[tool.epcontext.targets.cpu]
provider = "cpu"

[[tool.epcontext.models]]
name = "net"
path = "models/a.onnx"
constants = { scale = 2.0 }
shapes = [{ x = [1, 1, 8, 8] }, { x = [4, 1, 8, 8] }]
fallback = "source"

[[tool.epcontext.models]]
name = "one"
path = "models/a.onnx"
constants = { scale = 2.0 }
dims = { batch = 1 }
"""

OPEN = """
import json, sys
import numpy as np
from my_app.epcontext import LoadError, load, models, shapes_of, target_of

def answer(batch, target):
    shapes = None if batch is None else {"x": (batch, 1, 8, 8)}
    arguments = {"target": target, "device": "any", "shapes": shapes}
    try:
        session = load("net", **arguments)
    except LoadError as error:
        return {"error": str(error)}
    size = shapes_of(session)["x"][0]
    x = np.linspace(0, 1, 64 * (size if isinstance(size, int) else batch or 1), dtype=np.float32)
    x = x.reshape(-1, 1, 8, 8)
    y = session.run(None, {"x": x})[0]
    try:
        session.run(None, {"x": x, "scale": np.array(2, np.float32)})
        refused = None
    except Exception as error:
        refused = str(error)
    return {
        "models": models(), "target": target_of(session), "size": size, "y": y.tolist(),
        "inputs": [each.name for each in session.get_inputs()], "refused": refused,
    }

print(json.dumps([answer(*case) for case in json.loads(sys.argv[1])]))
"""

Case = tuple[int | None, str | None]
"""A number of images, and a target."""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel."""
    root = make_project(tmp_path_factory.mktemp("shapes") / "project", TOML, scaled())
    wheel, _ = build_project(root)
    shutil.unpack_archive(wheel, root / "installed", "zip")
    return root / "installed"


RUN = """
import json
import numpy as np
from my_app.epcontext import runner

x = np.linspace(-1, 1, 64 * 5, dtype=np.float32).reshape(-1, 1, 8, 8)
runners = [runner(name, device="any") for name in ("one", "net")]
answers = [runner.run(None, {"x": x})[0].tolist() for runner in runners]
print(json.dumps([[*map(str, runner.explain())] for runner in runners] + answers))
"""


def environment(app: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(app), "XDG_CACHE_HOME": str(app / "user")}


def opened(app: Path, *cases: Case) -> list[dict[str, Any]]:
    """The answers of a new process that opens the model for each of ``cases``."""
    output = run(sys.executable, "-c", OPEN, json.dumps(cases), cwd=app, env=environment(app))
    answers: list[dict[str, Any]] = printed_json(output)
    return answers


def test_the_smallest_shape_that_is_large_enough_is_opened(app: Path) -> None:
    expected = {None: ("npu", 1), 1: ("npu", 1), 2: ("npu", 4), 4: ("npu", 4), 5: ("cpu", "batch")}
    answers = opened(app, *((batch, None) for batch in expected))
    choices = [(answer["target"], answer["size"]) for answer in answers]
    assert dict(zip(expected, choices, strict=True)) == expected
    assert all(answer["models"] == ["net", "one"] for answer in answers)


def test_a_frozen_input_is_taken_and_checked_on_every_target(app: Path) -> None:
    reference = onnxruntime.InferenceSession(app.parent / "models" / "a.onnx")
    x = np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8)
    (expected,) = reference.run(None, {"x": x, "scale": np.array(2, np.float32)})
    targets = ("npu", "cpu", "source")
    for target, answer in zip(
        targets, opened(app, *((1, target) for target in targets)), strict=True
    ):
        assert answer["inputs"] == ["x"], target
        assert "Invalid input name: scale" in answer["refused"], target
        np.testing.assert_allclose(answer["y"], expected, rtol=2e-2, atol=2e-2, err_msg=target)


def test_a_larger_batch_runs_in_the_compiled_sizes(app: Path) -> None:
    reference = onnxruntime.InferenceSession(app.parent / "models" / "a.onnx")
    x = np.linspace(-1, 1, 64 * 5, dtype=np.float32).reshape(-1, 1, 8, 8)
    (expected,) = reference.run(None, {"x": x, "scale": np.array(2, np.float32)})
    one, net, *answers = printed_json(run(sys.executable, "-c", RUN, cwd=app, env=environment(app)))
    assert [line.rpartition(", ")[2] for line in (*one, *net)] == ["runs: 5", "runs: 2"]
    for answer in answers:
        np.testing.assert_allclose(answer, expected, rtol=2e-2, atol=2e-2)
