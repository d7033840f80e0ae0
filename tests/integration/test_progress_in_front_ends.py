"""Somebody who waits for a real front end sees what a long step does."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.integration.conftest import run
from tests.models import network
from tests.projects import make_project

pytestmark = [pytest.mark.front_ends, pytest.mark.network]

SLOW_WORKER = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "slow-worker"
version = "1.0"
[tool.hatch.build.targets.wheel.force-include]
"slow.pth" = "slow_worker.pth"
"slow_worker.py" = "slow_worker.py"
"""

# Python runs it at each start of an environment that has it. It imports little, because not all of the
# environment can be imported then.
PATCH = """
import sys
if "hatch_epcontext.worker" in " ".join(sys.orig_argv):
    import time
    from hatch_epcontext.worker import progress as module
    real = module.step
    def step(text):
        real(text)
        if text.startswith("simplifying"):
            time.sleep(12)
    module.step = step
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of this package, and of one that makes workers slow."""
    folder = tmp_path_factory.mktemp("wheels")
    slow = tmp_path_factory.mktemp("slow")
    (slow / "pyproject.toml").write_text(SLOW_WORKER, encoding="utf-8")
    (slow / "slow.pth").write_text("import slow_worker\n", encoding="utf-8")
    (slow / "slow_worker.py").write_text(PATCH, encoding="utf-8")
    for each in (REPOSITORY, slow):
        command = (sys.executable, "-m", "build", "-w", "-o", folder, each)
        run(*command, cwd=folder, env=os.environ)
    return folder


@pytest.mark.parametrize(
    "front_end",
    [
        ("pip", "wheel", "-v", "--no-cache-dir", "--no-deps", "."),
        ("build", "-w"),
        ("uv", "build", "--wheel"),
    ],
    ids=lambda command: command[0],
)
def test_a_step_of_more_than_ten_seconds_is_seen(
    wheels: Path, tmp_path: Path, front_end: tuple[str, ...]
) -> None:
    toml = 'targets.cpu.provider = "cpu"\nmodels = ["models/*.onnx"]\n'
    project = make_project(tmp_path / "project", toml, network(1))
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    text = text.replace('"hatch-epcontext"]', '"hatch-epcontext", "slow-worker"]')
    (project / "pyproject.toml").write_text(text, encoding="utf-8")
    links = " ".join(filter(None, [os.environ.get("PIP_FIND_LINKS"), str(wheels)]))
    environ = {
        **os.environ,
        "PIP_FIND_LINKS": links,
        "UV_FIND_LINKS": str(wheels),
        "UV_NO_CACHE": "1",
    }
    shown = run(sys.executable, "-m", *front_end, cwd=project, env=environ)
    assert re.search(r"epcontext: a -> cpu: preparation: prepare has run for \d+ s", shown), shown
    assert list(project.rglob("my_app-*.whl"))
