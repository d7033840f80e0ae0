from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from hatch_epcontext import wheel
from hatch_epcontext.artifact import Artifact
from hatch_epcontext.errors import ConfigError, WheelError
from tests.results import TOML, configured, resulting

OUTPUT = PurePosixPath("my_app/epcontext")


def tree(*paths: str) -> dict[str, Path]:
    return {path: Path("/project") / path for path in paths}


@pytest.mark.parametrize(
    ("paths", "output"),
    [
        (["my_app/__init__.py", "my_app/sub/__init__.py"], "my_app/epcontext"),
        (["ns/my_app/__init__.py", "ns/my_app/x.py"], "ns/my_app/epcontext"),
    ],
)
def test_the_package_goes_into_the_apps_own(paths: list[str], output: str) -> None:
    assert wheel.output_folder(None, tree(*paths)) == PurePosixPath(output)


def test_the_configuration_may_say_where() -> None:
    assert wheel.output_folder(PurePosixPath("other/models"), {}) == PurePosixPath("other/models")


@pytest.mark.parametrize("paths", [[], ["a/__init__.py", "b/__init__.py"], ["module.py"]])
def test_where_it_has_to_be_said(paths: list[str]) -> None:
    with pytest.raises(ConfigError, match="no one import package to put it in"):
        wheel.output_folder(None, tree(*paths))


@pytest.mark.parametrize(
    "path", ["my_app/epcontext/x.py", "my_app/epcontext/a/npu/x.onnx", "my_app/epcontext.py"]
)
def test_files_of_the_project_are_not_written_over(path: str) -> None:
    with pytest.raises(ConfigError, match="files of the project's own"):
        wheel.check_collisions(OUTPUT, tree("my_app/__init__.py", path), frozenset())


def test_what_an_editable_install_left_is_no_collision() -> None:
    path = "my_app/epcontext/__init__.py"
    wheel.check_collisions(OUTPUT, tree("my_app/__init__.py", path), frozenset({path}))


def test_a_whole_package_is_no_place_for_models() -> None:
    with pytest.raises(ConfigError, match='output = "my_app/epcontext"'):
        wheel.check_collisions(PurePosixPath("my_app"), tree("my_app/__init__.py"), frozenset())


def test_the_bundle_has_all_and_its_manifest_knows_it(
    project: Path, artifact: Artifact, tmp_path: Path
) -> None:
    config = configured(project)
    bundle = wheel.bundle(resulting(config, artifact), config, tmp_path)
    assert set(bundle.files) == {
        "__init__.py",
        "a/cpu/a_ctx.onnx",
        "a/cpu/a_ctx_qnn.bin",
        "a/source/a.onnx",
        "epcontext.json",
    }
    manifest = json.loads((bundle.folder / "epcontext.json").read_text(encoding="utf-8"))
    assert manifest["files"].keys() == set(bundle.files) - {"epcontext.json"}
    assert manifest["models"]["a"]["source"]["model_file"] == "a/source/a.onnx"
    entries = bundle.entries(OUTPUT)
    assert entries[str(bundle.folder / "__init__.py")] == "my_app/epcontext/__init__.py"


def test_without_a_fallback_the_source_stays_at_home(
    project: Path, artifact: Artifact, tmp_path: Path
) -> None:
    config = configured(project, TOML + 'fallback = "none"')
    bundle = wheel.bundle(resulting(config, artifact), config, tmp_path)
    assert not any("source" in name for name in bundle.files)
    manifest = json.loads((bundle.folder / "epcontext.json").read_text(encoding="utf-8"))
    assert manifest["models"]["a"]["source"]["model_file"] is None


TARGETS = """
models = ["models/a.onnx"]
[targets.one]
provider = "cpu"
platforms = {one}
[targets.two]
provider = "cpu"
platforms = {two}
"""


@pytest.mark.parametrize(
    ("one", "two", "tag"),
    [
        (["win_arm64"], ["linux_aarch64", "win_arm64"], "py3-none-linux_aarch64.win_arm64"),
        (["win_arm64"], [], None),
        (["win_arm64"], ["any"], None),
        ([], [], None),
    ],
)
def test_the_tag_is_that_of_the_targets(
    project: Path, one: list[str], two: list[str], tag: str | None
) -> None:
    toml = TARGETS.format(one=one, two=two)
    assert wheel.tag(configured(project, toml)) == tag


@pytest.mark.parametrize(
    ("setting", "tag"), [("any", "py3-none-any"), ("py3-none-win_arm64", "py3-none-win_arm64")]
)
def test_the_tag_may_be_given(project: Path, setting: str, tag: str) -> None:
    assert wheel.tag(configured(project, TOML + f'wheel-tag = "{setting}"')) == tag


@pytest.fixture
def finished(project: Path, artifact: Artifact, tmp_path: Path) -> dict[str, bytes]:
    """The entries of a wheel, by their names."""
    config = configured(project)
    bundle = wheel.bundle(resulting(config, artifact), config, tmp_path)
    return {name: Path(source).read_bytes() for source, name in bundle.entries(OUTPUT).items()} | {
        "my_app/__init__.py": b""
    }


def archived(entries: dict[str, bytes], folder: Path) -> Path:
    path = folder / "my_app-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def test_a_right_wheel_is_proven(finished: dict[str, bytes], tmp_path: Path) -> None:
    assert wheel.prove(archived(finished, tmp_path), OUTPUT) == 4


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a/cpu/a_ctx_qnn.bin", None, "is in the manifest and not in the wheel"),
        ("a/cpu/a_ctx_qnn.bin", b"other", "is not what the manifest says"),
        ("a/old/a_ctx.onnx", b"stale", "is in the wheel and not in the manifest"),
        ("epcontext.json", None, "has no epcontext.json"),
    ],
)
def test_a_wrong_wheel_is_found_out(
    finished: dict[str, bytes], tmp_path: Path, name: str, content: bytes | None, what: str
) -> None:
    finished[f"{OUTPUT}/{name}"] = content or b""
    if content is None:
        del finished[f"{OUTPUT}/{name}"]
    with pytest.raises(WheelError, match=what):
        wheel.prove(archived(finished, tmp_path), OUTPUT)


def test_a_large_wheel_is_told_with_its_largest_files(
    finished: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = {**finished, **{f"my_app/data/{n}": b"x" * n for n in range(1, 20)}}
    path = archived({**finished, "my_app/large.bin": b"x" * 100_000}, tmp_path)
    assert wheel.check_size(path, None) == ""
    monkeypatch.setattr(wheel, "WARN_AT", 50_000)
    told = wheel.check_size(path, None).splitlines()
    assert re.fullmatch(r"my_app-1-py3-none-any.whl has 1\d\d\.\d kB", told[0])
    assert told[1] == "  100.0 kB  my_app/large.bin"
    assert told[-2] == f"  and {len(finished) + 1 - 10} smaller ones"
    assert "max-size" in told[-1]
    # What is expected needs no word.
    assert wheel.check_size(path, 200_000) == ""
    with pytest.raises(WheelError, match=r"at most 60\.0 kB are allowed") as raised:
        wheel.check_size(path, 60_000)
    assert "my_app/large.bin" in str(raised.value)
