"""Front ends make an sdist, and the wheel from it, of a project whose other hook makes a model."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.integration.conftest import Environment, run, tool
from tests.models import network, save, save_with_data
from tests.projects import PROJECT

pytestmark = pytest.mark.front_ends

HOOKS = """\
[tool.hatch.build.hooks.custom]

[tool.hatch.build.hooks.epcontext]
"""

CUSTOM = """\
from pathlib import Path
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
class Hook(BuildHookInterface):
    def dependencies(self):
        return ["colorama"]
    def initialize(self, version, build_data):
        import colorama
        if self.target_name == "wheel":
            model = Path(self.root, "models", "made.onnx")
            model.write_bytes(Path(self.root, "network.bin").read_bytes())
"""

TOML = 'targets.cpu.provider = "cpu"\nmodels = ["models/[d]*.onnx", "models/m*.onnx"]\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "my_app").mkdir(parents=True)
    (root / "my_app" / "__init__.py").touch()
    save_with_data(network(), root / "models" / "downloaded.onnx", "weights.data")
    save(network(), root / "network.bin")
    (root / ".git").mkdir()
    (root / ".gitignore").write_text("*.onnx\n*.data\n/dist\n", encoding="utf-8")
    (root / "hatch_build.py").write_text(CUSTOM, encoding="utf-8")
    text = PROJECT.replace("[tool.hatch.build.hooks.epcontext]\n", HOOKS)
    (root / "pyproject.toml").write_text(text + TOML, encoding="utf-8")
    return root


@pytest.mark.parametrize("front_end", ["build", "uv", "hatch", "pip"])
def test_the_sdist_has_what_the_wheel_is_built_from(
    root: Path, env: dict[str, str], fresh: Environment, front_end: str
) -> None:
    if front_end == "hatch":
        # Hatch builds the wheel from the tree.
        run(tool("hatch"), "build", "-t", "sdist", cwd=root, env=env)
    elif front_end == "uv":
        run(tool("uv"), "build", cwd=root, env=env)
    elif front_end == "build":
        fresh.install("build")
        fresh.python("-m", "build", root)
    else:
        run(tool("uv"), "build", "--sdist", cwd=root, env=env)
    (sdist,) = (root / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"models/downloaded.onnx", "models/weights.data", "network.bin"} <= names
    assert "models/made.onnx" not in names
    if front_end in ("hatch", "pip"):
        fresh.install("pip")
        fresh.python("-m", "pip", "wheel", "-q", "--no-deps", "-w", root / "dist", sdist)
    (wheel,) = (root / "dist").glob("*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    for name in ("downloaded", "made"):
        assert f"my_app/epcontext/{name}/cpu/{name}_optimized.onnx" in inside
