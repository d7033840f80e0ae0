"""Projects with another build hook, which makes the models, in hatchling's own builder."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from hatchling.builders.wheel import WheelBuilder
from hatchling.plugin.manager import PluginManager

from hatch_epcontext.cli.app import app
from hatch_epcontext.jobs.requirements import TOOLS
from tests.models import network, save
from tests.projects import PROJECT

pytestmark = pytest.mark.one_cache

CUSTOM = """\
from pathlib import Path
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
class Hook(BuildHookInterface):
    def dependencies(self):
        return ["tool-of-the-other-hook"]
    def initialize(self, version, build_data):
        if self.target_name == "wheel":
            models = Path(self.root, "my_app", "models")
            models.mkdir(exist_ok=True)
            (models / "a.onnx").write_bytes(Path(self.root, "a.bin").read_bytes())
            build_data["artifacts"] = ["my_app/models/*.onnx"]
            build_data["force_include"]["a.bin"] = "my_app/forced.onnx"
    def clean(self, versions):
        Path(self.root, "my_app", "models", "a.onnx").unlink(missing_ok=True)
"""

OURS, OTHER = "[tool.hatch.build.hooks.epcontext]\n", "[tool.hatch.build.hooks.custom]\n"

ORDER = "If a build hook makes it (custom), write the table of that hook above this one's:"

GLOB = 'targets.cpu.provider = "cpu"\nmodels = ["my_app/models/*.onnx"]\n'
PATH = 'targets.cpu.provider = "cpu"\nmodels = ["my_app/models/a.onnx"]\n'


@pytest.fixture
def root(project: Path) -> Path:
    for name in ("a", "b"):
        (project / "models" / f"{name}.onnx").unlink()
    save(network(), project / "a.bin")
    (project / "hatch_build.py").write_text(CUSTOM, encoding="utf-8")
    (project / ".git").mkdir()
    (project / ".gitignore").write_text("*.onnx\n", encoding="utf-8")
    configure(project, OTHER + OURS)
    return project


def configure(root: Path, hooks: str, toml: str = GLOB) -> None:
    (root / "pyproject.toml").write_text(PROJECT.replace(OURS, hooks) + toml, encoding="utf-8")


def builder(root: Path) -> WheelBuilder:
    return WheelBuilder(str(root), plugin_manager=PluginManager())


def make(root: Path, version: str = "standard") -> Path:
    (path,) = builder(root).build(directory=str(root / "dist"), versions=[version])
    return Path(path)


def failure(root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        make(root)
    return capsys.readouterr().err


@pytest.mark.parametrize("toml", [GLOB, PATH])
def test_requirements_do_not_wait_for_models(root: Path, toml: str) -> None:
    configure(root, OTHER + OURS, toml)
    assert builder(root).config.dependencies == [
        "tool-of-the-other-hook",
        "onnxruntime>=1.23",
        *TOOLS,
    ]


def test_requirements_are_those_of_the_targets_of_missing_models(root: Path) -> None:
    toml = """
models = [
    { path = "my_app/models/a.onnx", targets = ["npu"] },
    { path = "b.onnx", targets = ["cpu"], validate = { inputs = "b.npz" } },
]
[tool.epcontext.targets.cpu]
provider = "cpu"
[tool.epcontext.targets.npu]
provider = "plugin"
ep-name = "OtherEP"
library = "other_ep"
requirements = ["other-ep>=2", "onnxruntime"]
"""
    configure(root, OTHER + OURS, toml)
    found = builder(root).config.dependencies
    assert "other-ep>=2" in found
    assert "onnxruntime" in found
    configure(root, OTHER + OURS, toml.replace('"npu"', '"cpu"', 1))
    assert "other-ep>=2" not in builder(root).config.dependencies


def test_without_other_hooks_a_missing_model_is_an_error_at_once(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(root, OURS + "[tool.hatch.build.hooks.version]\npath = 'my_app/version.py'\n")
    with pytest.raises(SystemExit):
        _ = builder(root).config.dependencies
    assert 'no file matches "my_app/models/*.onnx"' in capsys.readouterr().err


def test_other_mistakes_are_errors_before_models_are_there(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(root, OTHER + OURS, PATH + "jbs = 1\n")
    with pytest.raises(SystemExit):
        _ = builder(root).config.dependencies
    text = capsys.readouterr().err
    assert "tool.epcontext.jbs: EPC001" in text
    assert "EPC021" not in text


def test_what_the_other_hook_makes_is_built(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = zipfile.ZipFile(make(root)).namelist()
    assert "my_app/epcontext/a/cpu/a_optimized.onnx" in names
    assert {"my_app/models/a.onnx", "my_app/forced.onnx"} <= set(names)
    text = capsys.readouterr().err
    # Also what only the other hook puts into the wheel; its copies are its own.
    assert "my_app/models/a.onnx (" in text
    assert text.count("unless a build hook or force-include adds them") == 1
    make(root, "editable")
    assert (root / "my_app" / "epcontext" / "manifest.json").is_file()
    list(builder(root).build(directory=str(root / "dist"), clean_only=True))
    assert not (root / "my_app" / "models" / "a.onnx").exists()


def test_the_wrong_order_is_named_with_the_right_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(root, OURS + OTHER)
    assert builder(root).config.dependencies
    text = failure(root, capsys)
    assert 'no file matches "my_app/models/*.onnx"' in text
    assert ORDER in text


def test_an_old_model_is_not_shipped_when_a_later_hook_makes_a_new_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(root, OURS + OTHER)
    (root / "my_app" / "models").mkdir()
    old = root / "my_app" / "models" / "a.onnx"
    old.write_bytes((root / "a.bin").read_bytes())
    make(root).unlink()
    changed = network()
    changed.producer_name = "a new version"
    save(changed, root / "a.bin")
    text = failure(root, capsys)
    assert f"{old}: EPC211\n    was changed or removed after it had been compiled." in text
    assert ORDER in text
    assert list((root / "dist").iterdir()) == []


def test_a_hook_that_makes_no_model_is_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(root, OTHER + OURS, PATH.replace("a.onnx", "b.onnx"))
    assert "If a build hook makes it (custom)" in failure(root, capsys)


@pytest.mark.parametrize("hooks", [OTHER + OURS, OURS + OTHER])
def test_a_build_whose_other_hook_fails_leaves_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hooks: str
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    configure(root, hooks, 'targets.cpu.provider = "cpu"\nmodels = ["a.bin"]\n')
    (root / "hatch_build.py").write_text(
        CUSTOM.replace(
            "if self.target_name", "raise LookupError('no hub')\n        if self.target_name"
        ),
        encoding="utf-8",
    )
    with pytest.raises(LookupError, match="no hub"):
        make(root)
    assert list((root / "dist").iterdir()) == []
    assert list(temporary.glob("hatch-epcontext-*")) == []


def test_a_command_says_how_to_make_the_models(root: Path) -> None:
    done = CliRunner().invoke(app, ["build", str(root), "--dry-run"])
    assert done.exit_code == 2
    assert 'no file matches "my_app/models/*.onnx"' in done.output
    assert "(custom)" in done.output
    assert "hatch build -t wheel --hooks-only" in done.output
