"""One context for several chips in a real wheel."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

from tests.conftest import needs_qnn
from tests.integration.conftest import run
from tests.projects import make_project

pytestmark = needs_qnn

TOML = """
targets.qnn.provider = "qnn"
targets.qnn.provider-options = { soc_model = [60, 57] }
models = [{ name = "net", path = "models/a.onnx", dims = { batch = 1 } }]
"""


def test_a_wheel_has_one_context_for_all_chips(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", TOML)
    env = {**os.environ, "HATCH_EPCONTEXT_CACHE_DIR": str(tmp_path / "cache")}
    wheels = []
    for ending in ("compiled in ", "from the cache"):
        text = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", cwd=project, env=env)
        (line,) = [each for each in text.splitlines() if "net -> qnn" in each]
        assert "for soc_model 60,57, htp_arch 73,75" in line
        assert "compiled separately, it ran and agrees with the CPU" in line
        assert ending in line
        (wheel,) = (project / "dist").glob("*.whl")
        wheels.append(wheel.read_bytes())
        with zipfile.ZipFile(wheel) as archive:
            names = [Path(name) for name in archive.namelist()]
        # The contexts for one chip each are only for validation.
        assert [path.name for path in names if path.suffix == ".bin"] == ["net_ctx_qnn.bin"]
        assert [path.name for path in names if path.name.endswith("_ctx.onnx")] == ["net_ctx.onnx"]
    assert wheels[0] == wheels[1]
