from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from hatch_epcontext.build.artifact import Artifact
from hatch_epcontext.errors import ConfigError, Kind, WheelError
from hatch_epcontext.package import wheel
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
def test_the_default_output_is_inside_the_apps_package(paths: list[str], output: str) -> None:
    assert wheel.output_folder(None, tree(*paths)) == PurePosixPath(output)


def test_the_output_can_be_configured() -> None:
    assert wheel.output_folder(PurePosixPath("other/models"), {}) == PurePosixPath("other/models")


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "no import package"),
        (["a/__init__.py", "b/__init__.py"], r"several import packages \(a and b\)"),
        (["module.py"], "no import package"),
    ],
)
def test_without_a_single_import_package_the_output_is_required(
    paths: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"the wheel has {message}") as raised:
        wheel.output_folder(None, tree(*paths))
    assert [problem.key for problem in raised.value.problems] == [wheel.OUTPUT]


@pytest.mark.parametrize(
    "path", ["my_app/epcontext/x.py", "my_app/epcontext/a/npu/x.onnx", "my_app/epcontext.py"]
)
def test_files_of_the_project_are_not_overwritten(path: str) -> None:
    with pytest.raises(ConfigError, match="the project has files of its own"):
        wheel.check_collisions(OUTPUT, tree("my_app/__init__.py", path), frozenset())


def test_files_of_an_editable_install_are_no_collision() -> None:
    path = "my_app/epcontext/__init__.py"
    wheel.check_collisions(OUTPUT, tree("my_app/__init__.py", path), frozenset({path}))


def test_many_files_of_the_project_are_not_all_listed() -> None:
    names = [f"my_app/epcontext/{name}" for name in "abcdefgh"]
    with pytest.raises(ConfigError, match=r"epcontext/d, my_app/epcontext/e and 3 more\."):
        wheel.check_collisions(OUTPUT, tree(*names), frozenset())


def test_the_output_cannot_be_a_whole_package() -> None:
    with pytest.raises(ConfigError, match='output = "my_app/epcontext"'):
        wheel.check_collisions(PurePosixPath("my_app"), tree("my_app/__init__.py"), frozenset())


def test_the_bundle_has_all_files_and_the_manifest_lists_them(
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


def test_without_a_fallback_the_source_is_not_shipped(
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
def test_the_tag_has_the_platforms_of_the_targets(
    project: Path, one: list[str], two: list[str], tag: str | None
) -> None:
    toml = TARGETS.format(one=one, two=two)
    assert wheel.tag(configured(project, toml)) == tag


@pytest.mark.parametrize(
    ("setting", "tag"), [("any", "py3-none-any"), ("py3-none-win_arm64", "py3-none-win_arm64")]
)
def test_the_tag_can_be_configured(project: Path, setting: str, tag: str) -> None:
    assert wheel.tag(configured(project, TOML + f'wheel.tag = "{setting}"')) == tag


@pytest.fixture
def finished(project: Path, artifact: Artifact, tmp_path: Path) -> dict[str, bytes]:
    """The contents of a wheel's files, by name."""
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


def test_a_valid_wheel_is_verified(finished: dict[str, bytes], tmp_path: Path) -> None:
    assert wheel.verify(archived(finished, tmp_path), OUTPUT) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a/cpu/a_ctx_qnn.bin", None, "is in the manifest, but not in the wheel"),
        ("a/cpu/a_ctx_qnn.bin", b"other", "differs from its record in the manifest"),
        ("a/old/a_ctx.onnx", b"stale", "is in the wheel, but not in the manifest"),
        ("epcontext.json", None, "epcontext.json is missing"),
    ],
)
def test_a_wheel_that_differs_from_its_manifest_is_an_error(
    finished: dict[str, bytes], tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    finished[f"{OUTPUT}/{name}"] = content or b""
    if content is None:
        del finished[f"{OUTPUT}/{name}"]
    with pytest.raises(WheelError, match=message) as raised:
        wheel.verify(archived(finished, tmp_path), OUTPUT)
    assert [problem.kind for problem in raised.value.problems] == [Kind.INVALID_WHEEL]


def test_a_large_wheel_is_a_warning_with_its_largest_files(
    finished: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = {**finished, **{f"my_app/data/{n}": b"x" * n for n in range(1, 20)}}
    path = archived({**finished, "my_app/large.bin": b"x" * 100_000}, tmp_path)
    assert wheel.check_size(path, None) is None
    monkeypatch.setattr(wheel, "_WARN_AT", 50_000)
    warning = wheel.check_size(path, None)
    assert warning is not None
    lines = warning.splitlines()
    assert re.fullmatch(r"my_app-1-py3-none-any.whl has 1\d\d\.\d kB", lines[0])
    assert lines[1] == "  100.0 kB  my_app/large.bin"
    assert lines[-2] == f"  and {len(finished) + 1 - 10} smaller files"
    assert "tool.epcontext.wheel.max-size" in lines[-1]
    # A size below the limit is expected.
    assert wheel.check_size(path, 200_000) is None
    with pytest.raises(WheelError, match=r"At most 60\.0 kB are allowed") as raised:
        wheel.check_size(path, 60_000)
    assert "my_app/large.bin" in str(raised.value)
    (problem,) = raised.value.problems
    assert (problem.kind, problem.key) == (Kind.LARGE_WHEEL, wheel._MAX_SIZE)
