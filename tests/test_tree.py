from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

import pytest

from hatch_epcontext import tree
from hatch_epcontext.artifact import Artifact
from hatch_epcontext.errors import ConfigError
from hatch_epcontext.result import Result
from tests.results import configured, resulting


@pytest.fixture
def result(project: Path, artifact: Artifact) -> Result:
    return resulting(configured(project), artifact)


@pytest.fixture
def folder(project: Path) -> Path:
    return project / "my_app" / "epcontext"


def test_where_the_output_is_in_the_project() -> None:
    files = {"my_app/__init__.py": Path("/p/src/my_app/__init__.py"), "m.py": Path("/p/m.py")}
    assert tree.folder_of(PurePosixPath("my_app/sub/models"), files) == Path(
        "/p/src/my_app/sub/models"
    )
    with pytest.raises(ConfigError, match="no package of the project holds it"):
        tree.folder_of(PurePosixPath("other/models"), files)


def test_it_has_the_loader_and_the_artifacts_and_names_the_source_where_it_is(
    result: Result, folder: Path
) -> None:
    tree.write(result, folder)
    assert (folder / "__init__.py").is_file()
    assert (folder / "a" / "cpu" / "a_ctx.onnx").read_bytes() == b"context"
    manifest = json.loads((folder / "epcontext.json").read_text(encoding="utf-8"))
    source = manifest["models"]["a"]["source"]["model_file"]
    assert source == "../../models/a.onnx"
    assert (folder / source).read_bytes() == b"model a"
    assert manifest["files"].keys() == {
        ".gitignore",
        "__init__.py",
        "a/cpu/a_ctx.onnx",
        "a/cpu/a_ctx_qnn.bin",
    }


def test_artifacts_in_the_project_are_copies(result: Result, folder: Path) -> None:
    tree.write(result, folder)
    (folder / "a" / "cpu" / "a_ctx.onnx").write_bytes(b"edited")
    assert (result.built[0].artifact.folder / "a_ctx.onnx").read_bytes() == b"context"


def test_removing_takes_all_that_is_ours_and_the_folder(result: Result, folder: Path) -> None:
    tree.write(result, folder)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "__init__.cpython-311.pyc").touch()
    assert list(tree.remove(folder)) == []
    assert not folder.exists()
    assert (folder.parents[1] / "models" / "a.onnx").is_file()


def test_removing_keeps_what_is_not_ours(result: Result, folder: Path) -> None:
    tree.write(result, folder)
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    changed = folder / "a" / "cpu" / "a_ctx.onnx"
    changed.write_bytes(b"edited")
    assert list(tree.remove(folder)) == [str(changed)]
    assert {path for path in folder.rglob("*") if path.is_file()} == {
        changed,
        folder / "notes.txt",
    }


def test_a_folder_without_our_manifest_is_not_touched(folder: Path) -> None:
    folder.mkdir()
    for content in (
        '{"files": {"x": 1}}',
        json.dumps({"manifest": 1, "generator": "other", "models": {}, "files": {}}),
    ):
        (folder / "epcontext.json").write_text(content, encoding="utf-8")
        (folder / "x").touch()
        assert list(tree.remove(folder)) == []
        assert (folder / "x").exists()


def test_a_manifest_cannot_lead_out_of_its_folder(result: Result, folder: Path) -> None:
    tree.write(result, folder)
    victim = folder.parent / "__init__.py"
    manifest = json.loads((folder / "epcontext.json").read_text(encoding="utf-8"))
    manifest["files"]["../__init__.py"] = {
        "size": 0,
        "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    }
    (folder / "epcontext.json").write_text(json.dumps(manifest), encoding="utf-8")
    list(tree.remove(folder))
    assert victim.is_file()


def test_writing_again_replaces_what_was_there(result: Result, folder: Path) -> None:
    tree.write(result, folder)
    tree.write(Result(result.sources, ()), folder)
    assert not (folder / "a").exists()


def test_changed_files_are_not_overwritten(result: Result, folder: Path) -> None:
    tree.check(folder)
    tree.write(result, folder)
    tree.check(folder)
    (folder / "__init__.py").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"and then changed: __init__\.py"):
        tree.check(folder)


def test_files_of_somebody_else_are_not_written_over(folder: Path) -> None:
    folder.mkdir()
    (folder / "__init__.py").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="has files of its own"):
        tree.check(folder)


def test_the_paths_that_are_ours(result: Result, folder: Path) -> None:
    output = PurePosixPath("my_app/epcontext")
    assert tree.owned(output, folder) == frozenset()
    tree.write(result, folder)
    assert "my_app/epcontext/epcontext.json" in tree.owned(output, folder)
