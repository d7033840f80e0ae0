from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from hatch_epcontext.errors import ConfigError, Kind, OutputError
from hatch_epcontext.files import record_file, record_files
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.package.folder import owned_paths, project_folder, reject_others
from tests.package.conftest import opened
from tests.results import Artifact, configured, install, resulting


def manifest_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return content


def files_of(content: dict[str, Any]) -> dict[str, Any]:
    """The records of the files in our part of a manifest."""
    files: dict[str, Any] = content["additional_metadata"]["hatch-epcontext"]["files"]
    return files


def overwrite(folder: Path, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "manifest.json").write_text(text, encoding="utf-8")


@pytest.fixture
def result(project: Path, artifact: Artifact) -> Result:
    return resulting(configured(project), artifact)


@pytest.fixture
def folder(project: Path) -> Path:
    return project / "my_app" / "epcontext"


def test_the_folder_of_the_output_in_the_project() -> None:
    files = {"my_app/__init__.py": Path("/p/src/my_app/__init__.py"), "m.py": Path("/p/m.py")}
    assert project_folder(PurePosixPath("my_app/sub/models"), files) == Path(
        "/p/src/my_app/sub/models"
    )
    with pytest.raises(ConfigError, match="no package of the project contains it") as raised:
        project_folder(PurePosixPath("other/models"), files)
    assert [problem.kind for problem in raised.value.problems] == [Kind.NO_OUTPUT_PACKAGE]
    assert 'Set tool.epcontext.editable = "skip"' in str(raised.value)


def test_it_has_the_loader_the_artifacts_and_the_path_of_the_source(
    result: Result, folder: Path
) -> None:
    install(result, folder)
    assert (folder / "__init__.py").is_file()
    assert (folder / "a" / "cpu" / "a_ctx.onnx").read_bytes() == b"context"
    package = opened(folder)
    assert package.layout == "installed"
    source = package.components["a"].variants["source"]
    assert (source.variant_directory, source.model_file) == ("../../models", "../../models/a.onnx")
    assert (folder / "../../models/a.onnx").read_bytes() == b"model a"
    assert files_of(manifest_of(folder)).keys() == {
        ".gitignore",
        "__init__.py",
        "__pyinstaller/__init__.py",
        "__pyinstaller/hook-my_app.epcontext.py",
        "_check.py",
        "_runner.py",
        "_user_cache.py",
        "a/cpu/a_ctx.onnx",
        "a/cpu/a_ctx_qnn.bin",
    }


def add(folder: Path) -> str:
    (folder / "a" / "notes.txt").write_text("mine", encoding="utf-8")
    return "a/notes.txt"


def change(folder: Path) -> str:
    (folder / "a" / "cpu" / "a_ctx.onnx").write_bytes(b"edited")
    return "a/cpu/a_ctx.onnx"


@pytest.mark.parametrize("edit", [add, change])
def test_a_folder_with_added_or_changed_files_stays_as_it_is(
    result: Result, folder: Path, edit: Callable[[Path], str]
) -> None:
    install(result, folder)
    name = edit(folder)
    before = record_files(folder)
    with pytest.raises(OutputError, match=f"files that this tool did not write: {name}") as raised:
        install(result, folder)
    assert [problem.kind for problem in raised.value.problems] == [Kind.FILE_EXISTS]
    assert record_files(folder) == before


def test_a_folder_without_our_manifest_is_not_changed(folder: Path) -> None:
    folder.mkdir()
    (folder / "x").touch()
    files = {"x": {"size": 0, "sha256": record_file(folder / "x").sha256}}
    others = {"generator": "another tool 1.0", "files": files}
    for content in (
        "{",
        "[" * 100_000,
        "null",
        {"name": "an extension of a browser"},
        {"schema_version": "1.0", "components": {}},
        {"files": files},
        {"additional_metadata": files},
        {"additional_metadata": {"hatch-epcontext": {"files": files}}},
        {"additional_metadata": {"hatch-epcontext": others}},
    ):
        overwrite(folder, content)
        assert owned_paths(PurePosixPath("my_app/epcontext"), folder) == frozenset()
        with pytest.raises(OutputError, match=r"did not write: manifest\.json and x\."):
            reject_others(folder, edited=True)


def test_a_file_outside_the_folder_is_not_removed(result: Result, folder: Path) -> None:
    install(result, folder)
    victim = folder.parent / "__init__.py"
    content = manifest_of(folder)
    files_of(content)["../__init__.py"] = {
        "size": 0,
        "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    }
    overwrite(folder, content)
    install(result, folder)
    assert victim.is_file()


def test_the_files_of_an_older_version_are_replaced(result: Result, folder: Path) -> None:
    install(result, folder)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "__init__.cpython-311.pyc").touch()
    content = manifest_of(folder)
    (component,) = content["components"].values()
    about = component["variants"]["cpu"]["additional_metadata"]["hatch-epcontext"]
    about["settings"] = "as they were in another version"
    overwrite(folder, {**content, "schema_version": "9.9", "models": {}})
    install(result, folder)
    assert record_files(folder).keys() == {*files_of(manifest_of(folder)), "manifest.json"}


def test_the_paths_of_our_files(result: Result, folder: Path) -> None:
    output = PurePosixPath("my_app/epcontext")
    assert owned_paths(output, folder) == frozenset()
    install(result, folder)
    assert owned_paths(output, folder) == {
        f"my_app/epcontext/{name}" for name in (*files_of(manifest_of(folder)), "manifest.json")
    }
