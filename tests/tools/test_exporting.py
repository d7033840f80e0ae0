from __future__ import annotations

import dataclasses
import errno
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import BuildError, Kind, ModelError, OutputError, Problem
from hatch_epcontext.files import FileRecord, is_intact
from hatch_epcontext.jobs.artifact import Artifact, Result
from hatch_epcontext.jobs.plan import Plan
from hatch_epcontext.package.reader import own_files
from hatch_epcontext.tools.compiling import export
from tests.results import configured, resulting

TOML = 'targets.cpu.provider = "cpu"\nmodels = ["models/a.onnx"]\nfallback = "source"\n'

Run = Callable[[Plan, Path], Result]
Tree = dict[str, bytes | None]


@pytest.fixture
def config(project: Path) -> Config:
    return configured(project, TOML)


@pytest.fixture
def run(config: Config, artifact: Artifact) -> Run:
    return lambda planned, staging: resulting(config, artifact)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "new" / "out"


def never(planned: Plan, staging: Path) -> Result:
    raise AssertionError("nothing shall be compiled")


def tree(folder: Path) -> Tree:
    """All files and folders below ``folder``; folders have no contents."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def recorded(folder: Path) -> Mapping[str, FileRecord]:
    found = own_files(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("inside", [".", "sub", "sub/sub"])
def test_the_current_folder_is_not_replaced(
    config: Config, out: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    (out / inside).mkdir(parents=True)
    monkeypatch.chdir(out / inside)
    place = Path(*(".." for _ in Path(inside).parts)) if inside != "." else Path()
    with pytest.raises(OutputError, match="is the current folder, or contains it"):
        export(config, place, never, loader=True, overwrite=True)
    assert Path.cwd() == out / inside


def test_the_folder_of_the_project_is_not_replaced(config: Config, tmp_path: Path) -> None:
    # A model may be a link to a place elsewhere.
    config = dataclasses.replace(config, root=tmp_path / "empty" / "project")
    config.root.mkdir(parents=True)
    for place in (config.root, config.root.parent):
        with pytest.raises(OutputError, match="is the project, or contains it"):
            export(config, place, never, loader=True, overwrite=True)


def test_the_folder_has_the_manifest_and_copies_of_the_artifacts_and_the_sources(
    config: Config, run: Run, out: Path, project: Path, artifact: Artifact
) -> None:
    result = export(config, out, run, loader=False, overwrite=False)
    assert sorted(name for name, content in tree(out).items() if content is not None) == [
        "a/cpu/a_ctx.onnx",
        "a/cpu/a_ctx_qnn.bin",
        "a/source/a.onnx",
        "manifest.json",
    ]
    assert {*result.files} == {path for path in out.rglob("*") if path.is_file()}
    # The manifest is written last, and names all others.
    assert result.files == (*(out / name for name in recorded(out)), out / "manifest.json")
    assert is_intact(out, recorded(out))
    assert (out / "a/source/a.onnx").read_bytes() == (project / "models/a.onnx").read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    (out / "a/source/a.onnx").write_bytes(b"changed")
    (out / "a/cpu/a_ctx.onnx").write_bytes(b"changed")
    assert (project / "models" / "a.onnx").read_bytes() == b"model a"
    assert (artifact.folder / "a_ctx.onnx").read_bytes() == b"context"


def test_a_source_that_changes_meanwhile_is_not_written(
    config: Config, run: Run, out: Path, project: Path
) -> None:
    def changing(planned: Plan, staging: Path) -> Result:
        result = run(planned, staging)
        (project / "models/a.onnx").write_bytes(b"another")
        return result

    with pytest.raises(ModelError, match=r"a\.onnx: EPC211\n    changed during the build"):
        export(config, out, changing, loader=False, overwrite=False)
    assert list(out.parent.iterdir()) == []


def test_an_earlier_package_is_only_replaced_with_overwrite_and_then_as_a_whole(
    config: Config, run: Run, out: Path, project: Path, artifact: Artifact
) -> None:
    export(config, out, run, loader=True, overwrite=False)
    (out / "__pycache__").mkdir()
    (out / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"bytecode")
    (out / "a/cpu/a_ctx.onnx").write_bytes(b"changed")
    before = tree(out)
    with pytest.raises(OutputError, match=r"out: EPC501\n    exists already\."):
        export(config, out, never, loader=True, overwrite=False)
    assert tree(out) == before
    other = configured(project, TOML.replace('"source"', '"none"'))
    export(other, out, lambda _, staging: resulting(other, artifact), loader=False, overwrite=True)
    assert tree(out).keys() == {
        "manifest.json", "a", "a/cpu", "a/cpu/a_ctx.onnx", "a/cpu/a_ctx_qnn.bin",
    }  # fmt: skip
    assert (out / "a/cpu/a_ctx.onnx").read_bytes() == b"context"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_folder_with_foreign_files_is_never_touched(config: Config, run: Run, out: Path) -> None:
    export(config, out, run, loader=False, overwrite=False)
    for index in range(7):
        (out / "a" / f"notes{index}.txt").write_bytes(b"theirs")
    before = tree(out)
    with pytest.raises(OutputError) as caught:
        export(config, out, never, loader=False, overwrite=True)
    assert (
        "the folder has files that this tool did not write: a/notes0.txt, a/notes1.txt, "
        "a/notes2.txt, a/notes3.txt, a/notes4.txt and 2 more."
    ) in str(caught.value)
    assert tree(out) == before


def test_files_that_appear_while_it_is_compiled_are_kept(
    config: Config, run: Run, out: Path
) -> None:
    def runs(planned: Plan, staging: Path) -> Result:
        out.mkdir(parents=True)
        (out / "theirs.txt").write_bytes(b"theirs")
        return run(planned, staging)

    with pytest.raises(OutputError, match=r"theirs\.txt"):
        export(config, out, runs, loader=False, overwrite=True)
    assert tree(out) == {"theirs.txt": b"theirs"}


def test_a_file_in_the_place_of_the_folder_is_an_error(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"theirs")
    for place in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(OutputError, match="is a file, and not a folder"):
            export(config, place, never, loader=False, overwrite=True)
    assert (tmp_path / "file").read_bytes() == b"theirs"


def test_a_report_in_the_folder_is_an_error_before_anything_is_compiled(
    config: Config, tmp_path: Path
) -> None:
    for report in (tmp_path / "out", tmp_path / "out" / "r.html"):
        with pytest.raises(OutputError, match="EPC501"):
            export(
                dataclasses.replace(config, report=report),
                tmp_path / "out",
                never,
                loader=False,
                overwrite=True,
            )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes with a path of that kind")
def test_a_pipe_in_place_of_the_manifest_holds_nobody_up(config: Config, out: Path) -> None:
    out.mkdir(parents=True)
    os.mkfifo(out / "manifest.json")
    with pytest.raises(OutputError, match="never overwritten"):
        export(config, out, never, loader=False, overwrite=True)


def test_a_failed_build_writes_nothing(config: Config, run: Run, tmp_path: Path) -> None:
    def fails(planned: Plan, staging: Path) -> Result:
        raise BuildError(Problem(Kind.NOTHING_COMPILED, "a", "nothing was compiled."))

    before = tree(tmp_path)
    with pytest.raises(BuildError):
        export(config, tmp_path / "deep" / "out", fails, loader=False, overwrite=False)
    assert tree(tmp_path) == before


def test_what_was_there_comes_back_when_a_file_cannot_be_replaced(
    config: Config, run: Run, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(config, out, run, loader=False, overwrite=False)
    (out / "a/cpu/a_ctx.onnx").write_bytes(b"earlier")
    before, replace = tree(out.parent), Path.replace

    def fails(path: Path, target: Path) -> Path:
        if "complete" in path.parts and target.name == "manifest.json":
            raise PermissionError(errno.EACCES, "it is in use", str(target))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OutputError, match="in use"):
        export(config, out, run, loader=False, overwrite=True)
    assert tree(out.parent) == before


def test_a_folder_with_a_source_model_is_never_replaced(
    config: Config, run: Run, out: Path, project: Path
) -> None:
    with pytest.raises(OutputError, match="is a file of the source model"):
        export(config, project / "models", never, loader=False, overwrite=True)
    with pytest.raises(OutputError, match="is a file of the source model"):
        export(config, project, never, loader=False, overwrite=True)
    export(config, out, run, loader=False, overwrite=False)
    exported = configured(out, 'targets.cpu.provider = "cpu"\nmodels = ["a/source/a.onnx"]\n')
    with pytest.raises(OutputError, match="is a file of the source model"):
        export(exported, out, never, loader=False, overwrite=True)
    assert (out / "a/source/a.onnx").read_bytes() == b"model a"


@pytest.mark.skipif(os.name == "nt", reason="Windows needs a privilege for links")
def test_a_link_stays_a_link(config: Config, run: Run, out: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    out.parent.mkdir()
    out.symlink_to(tmp_path / "real")
    export(config, out, run, loader=False, overwrite=False)
    assert out.is_symlink()
    assert (tmp_path / "real" / "manifest.json").is_file()


def test_a_place_that_cannot_be_written_to_is_named(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(dir: Path) -> None:  # noqa: A002
        raise PermissionError(13, "Permission denied", f"{dir}/x")

    monkeypatch.setattr(tempfile, "TemporaryFile", fails)
    with pytest.raises(OutputError) as caught:
        export(config, tmp_path / "deep" / "out", never, loader=False, overwrite=False)
    assert caught.value.problems[0].kind is Kind.SYSTEM_ERROR
    assert f": {tmp_path}." in caught.value.problems[0].message


def test_a_package_without_any_model_is_an_error(project: Path, out: Path) -> None:
    config = dataclasses.replace(configured(project, TOML), models=())
    with pytest.raises(OutputError, match="no model would be in it"):
        export(config, out, never, loader=False, overwrite=False)
