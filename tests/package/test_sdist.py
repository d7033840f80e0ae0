"""Sdists as hatchling makes them, with the hook and without it."""

from __future__ import annotations

import re
import sys
import tarfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.plugin.manager import PluginManager

from hatch_epcontext.package.sdist import RECORDED_IGNORE
from tests.models import network, save, save_with_data
from tests.projects import PROJECT

CPU = 'targets.cpu.provider = "cpu"\nmodels = ["models/a.onnx"]\n'

CUSTOM = """\
from pathlib import Path
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
class Hook(BuildHookInterface):
    def initialize(self, version, build_data):
        if self.target_name == "{target}":
            source = Path(self.root, "a.bin")
            Path(self.root, "models").mkdir(exist_ok=True)
            Path(self.root, "models", "a.onnx").write_bytes(source.read_bytes())
"""


@pytest.fixture
def root(project: Path) -> Path:
    (project / "models" / "b.onnx").unlink()
    save(network(), project / "models" / "a.onnx")
    configure(project)
    return project


def configure(root: Path, more: str = "", toml: str = CPU) -> None:
    (root / "pyproject.toml").write_text(PROJECT + toml + more, encoding="utf-8")


def ignore(root: Path, *patterns: str) -> None:
    (root / ".git").mkdir()
    (root / ".gitignore").write_text("\n".join(patterns), encoding="utf-8")


def make(root: Path) -> dict[str, tarfile.TarInfo]:
    """Make the sdist; its members, relative to its folder."""
    builder = SdistBuilder(str(root), plugin_manager=PluginManager())
    (path,) = builder.build(directory=str(root / "dist"), versions=["standard"])
    with tarfile.open(path) as tar:
        return {member.name.partition("/")[2]: member for member in tar.getmembers()}


def failure(root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        make(root)
    assert not list((root / "dist").iterdir())
    return capsys.readouterr().err


def test_an_sdist_with_all_files_is_as_hatch_makes_it(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = make(root)
    assert set(names) == {"PKG-INFO", "pyproject.toml", "my_app/__init__.py", "models/a.onnx"}
    assert capsys.readouterr().err == ""


def test_a_missing_model_fails_the_sdist(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "models" / "a.onnx").unlink()
    text = failure(root, capsys)
    first, second, *_ = text.splitlines()
    assert first == "epcontext: incomplete sdist:"
    assert re.match(r"pyproject\.toml:\d+: tool\.epcontext\.models\[0\] \(", second)


def test_recorded_samples_are_not_published_by_accident(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = root / ".epcontext-samples" / "a"
    samples.mkdir(parents=True)
    (samples / ".gitignore").write_text(RECORDED_IGNORE, encoding="utf-8", newline="\n")
    (samples / "1.npz").touch()
    text = failure(root, capsys)
    assert ".epcontext-samples/a: EPC510" in text
    exclude = 'exclude = ["/.epcontext-samples/a"]'
    assert exclude in text
    configure(root, f"[tool.hatch.build.targets.sdist]\n{exclude}\n")
    assert ".epcontext-samples/a/1.npz" not in make(root)
    configure(root)
    (samples / ".gitignore").unlink()
    assert ".epcontext-samples/a/1.npz" in make(root)


def test_what_is_ignored_or_not_selected_is_added_and_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_with_data(network(), root / "models" / "a.onnx", "a.bin")
    ignore(root, "*.onnx", "*.bin")
    names = make(root)
    assert {"models/a.onnx", "models/a.bin"} <= set(names)
    assert "epcontext: added to the sdist: models/a.onnx (" in capsys.readouterr().err
    (root / ".gitignore").unlink()
    configure(root, "[tool.hatch.build.targets.sdist]\nonly-include = ['my_app']\n")
    assert {"models/a.onnx", "models/a.bin"} <= set(make(root))


def test_what_is_excluded_is_not_added(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(root, "[tool.hatch.build.targets.sdist]\nexclude = ['/models']\n")
    text = failure(root, capsys)
    assert "(models/a.onnx): EPC509\n    models/a.onnx is not in the sdist" in text
    assert 'without it: exclude has "/models".' in text
    assert "for wheels only: [tool.hatch.build.targets.wheel.hooks.epcontext]" in text


def test_ignored_inputs_are_not_published_unasked(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = root / "inputs" / "first"
    folder.mkdir(parents=True)
    for name in ("0.npz", "notes.txt"):
        (folder / name).touch()
    toml = """
targets.cpu.provider = "cpu"
models = [{ path = "models/a.onnx", validate = { inputs = "inputs" } }]
"""
    configure(root, toml=toml)
    assert "inputs/first/0.npz" in make(root)
    ignore(root, "/inputs\n")
    (root / "dist" / "my_app-1.0.tar.gz").unlink()
    text = failure(root, capsys)
    assert "models[0].validate.inputs (models/a.onnx): EPC509" in text
    assert '.gitignore or .hgignore has "/inputs"' in text
    assert 'artifacts = ["/inputs/first/0.npz"] in [tool.hatch.build.targets.sdist]' in text
    configure(
        root,
        '[tool.hatch.build.targets.sdist]\nartifacts = ["/inputs/first/0.npz"]\n',
        toml,
    )
    assert "inputs/first/0.npz" in make(root)


def test_all_files_of_all_targets_count(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "vendor").mkdir()
    for name in ("ep.so", "npu.json"):
        (root / "vendor" / name).touch()
    toml = """
models = ["models/a.onnx"]
targets.cpu.provider = "cpu"
[tool.epcontext.targets.other]
provider = "plugin"
ep-name = "OtherEP"
library = "vendor/ep.so"
provider-options = { config_file = "vendor/npu.json", level = "3" }
"""
    configure(root, "[tool.hatch.build.targets.sdist]\nexclude = ['/vendor']\n", toml)
    monkeypatch.setenv("HATCH_EPCONTEXT_TARGETS", "cpu")
    text = failure(root, capsys)
    assert "vendor/ep.so is not in the sdist" in text
    assert "vendor/npu.json is not in the sdist" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "    Run: git lfs pull"),
        (b"text", "a.onnx is not an ONNX model"),
        (None, "there is no file models/a.bin."),
    ],
)
def test_what_is_no_whole_model_fails_the_sdist(
    root: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    if content is None:
        save_with_data(network(), root / "models" / "a.onnx", "a.bin")
        (root / "models" / "a.bin").unlink()
    else:
        (root / "models" / "a.onnx").write_bytes(content)
    assert message in failure(root, capsys)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege")
def test_a_link_becomes_the_file_that_it_leads_to(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = root / "models" / "a.onnx"
    model.replace(tmp_path / "blob")
    model.symlink_to(tmp_path / "blob")
    member = make(root)["models/a.onnx"]
    assert (member.isfile(), member.size) == (True, (tmp_path / "blob").stat().st_size)
    assert "added to the sdist: models/a.onnx" in capsys.readouterr().err
    # Within the project a link stays one.
    (tmp_path / "blob").replace(root / "models" / "real.onnx")
    model.unlink()
    model.symlink_to("real.onnx")
    names = make(root)
    assert names["models/real.onnx"].isfile()
    assert names["models/a.onnx"].issym()


def with_custom(root: Path, target: str, *tables: str) -> None:
    """A project whose other hook makes the model when ``target`` is built; hooks are in ``tables``."""
    if (root / "models" / "a.onnx").exists():
        (root / "models" / "a.onnx").replace(root / "a.bin")
    (root / "hatch_build.py").write_text(CUSTOM.format(target=target), encoding="utf-8")
    text = (PROJECT + CPU).replace("[tool.hatch.build.hooks.epcontext]", "")
    text += "".join(f"[tool.hatch.build.{table}]\n" for table in tables)
    (root / "pyproject.toml").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("target", ["sdist", "wheel"])
def test_what_a_hook_makes_is_in_the_sdist_unless_it_makes_it_for_the_wheel(
    root: Path, target: str
) -> None:
    ignore(root, "*.onnx")
    tables = ("hooks.custom", "hooks.epcontext", "targets.sdist.hooks.epcontext")
    with_custom(root, target, *tables[: 2 + (target == "wheel")])
    assert ("models/a.onnx" in make(root)) == (target == "sdist")


def test_a_hook_that_makes_it_later_is_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ignore(root, "*.onnx")
    with_custom(root, "sdist", "hooks.epcontext", "hooks.custom")
    text = failure(root, capsys)
    assert "If a build hook makes it (custom), write the table of that hook above" in text
