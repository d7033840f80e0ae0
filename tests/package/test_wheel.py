from __future__ import annotations

import dataclasses
from pathlib import Path, PurePosixPath

import pytest

from hatch_epcontext.errors import ConfigError
from hatch_epcontext.files import record_file
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.package import wheel
from tests.package.conftest import OUTPUT
from tests.results import TOML, compiled, configured


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


def repeated(project: Path, tree: dict[str, Path], toml: str, folder: Path) -> list[str]:
    """The warnings about models that are also package data."""
    result = compiled(configured(project, toml), folder)
    shipped = [source.model.path for source in result.sources]
    return list(wheel.repeated_models(result, shipped, tree, tree, project))


def test_a_model_that_is_also_package_data_is_a_warning(project: Path, tmp_path: Path) -> None:
    tree = {
        "my_app/__init__.py": project / "my_app" / "__init__.py",
        "my_app/models/a.onnx": project / "models" / "a.onnx",
    }
    (message,) = repeated(project, tree, TOML, tmp_path / "one")
    assert message == (
        "my_app/models/a.onnx (7 bytes) is in the wheel as package data, and again as the source of the "
        'model a. Exclude it (exclude = ["models/a.onnx"] in [tool.hatch.build.targets.wheel]), or set '
        'fallback = "none" for that model.'
    )
    # A file with the same size and other contents is no copy, and a copy counts wherever it is.
    assert repeated(project, tree, TOML.replace("a.onnx", "b.onnx"), tmp_path / "two") == []
    copy = project / "my_app" / "copy.onnx"
    copy.write_bytes(b"model b")
    (message,) = repeated(
        project, {"x/c.onnx": copy}, TOML.replace("a.onnx", "b.onnx"), tmp_path / "three"
    )
    assert 'exclude = ["my_app/copy.onnx"]' in message


def test_package_data_beside_compiled_models_is_a_warning(project: Path, tmp_path: Path) -> None:
    (project / "models" / "w.bin").write_bytes(b"many weights")
    result = compiled(configured(project), tmp_path / "artifacts")
    (source,) = result.sources
    records = {**source.records, "w.bin": record_file(project / "models" / "w.bin")}
    result = Result((dataclasses.replace(source, records=records),), result.built)
    tree = {"my_app/w.bin": project / "models" / "w.bin"}
    (message,) = wheel.repeated_models(result, (), tree, tree, project)
    assert message.startswith(
        "my_app/w.bin (12 bytes) is in the wheel as package data, beside the compiled models of a."
    )
    assert "if the app opens it only through the loader" in message
