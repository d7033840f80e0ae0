from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from hatch_epcontext.errors import ConfigError, OutputError
from hatch_epcontext.jobs.artifact import Artifact, Result
from hatch_epcontext.jobs.plan import Plan
from hatch_epcontext.tools.compiling import (
    _destinations,
    _publish,
    _refuse_sources,
    compile_models,
    is_file,
)
from tests.results import configured, resulting


@pytest.fixture
def files(project: Path, artifact: Artifact, tmp_path: Path) -> dict[Path, Path]:
    built = resulting(configured(project), artifact).built
    return _destinations(built, tmp_path / "new" / "out")


def test_sidecars_come_before_context_models(files: dict[Path, Path]) -> None:
    assert [target.name for target in files] == ["a_ctx_qnn.bin", "a_ctx.onnx"]


def test_the_context_model_can_have_another_name(
    project: Path, artifact: Artifact, tmp_path: Path
) -> None:
    built = resulting(configured(project), artifact).built
    found = _destinations(built, tmp_path, "model.onnx")
    assert [target.name for target in found] == ["a_ctx_qnn.bin", "model.onnx"]


def test_all_files_are_copied_and_nothing_else_is_left(files: dict[Path, Path]) -> None:
    _publish(files, overwrite=False)
    folder = next(iter(files)).parent
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        source.name: source.read_bytes() for source in files.values()
    }


def test_existing_files_are_only_replaced_with_overwrite(files: dict[Path, Path]) -> None:
    folder = next(iter(files)).parent
    folder.mkdir(parents=True)
    (folder / "a_ctx.onnx").write_bytes(b"theirs")
    with pytest.raises(OutputError, match=r"a_ctx\.onnx: EPC501\n    exists already"):
        _publish(files, overwrite=False)
    assert [path.name for path in folder.iterdir()] == ["a_ctx.onnx"]
    assert (folder / "a_ctx.onnx").read_bytes() == b"theirs"
    _publish(files, overwrite=True)
    assert (folder / "a_ctx.onnx").read_bytes() == b"context"


def test_a_failed_copy_leaves_nothing(
    files: dict[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copyfile

    def fails(source: Path, target: Path) -> None:
        copy(source, target)
        if source.suffix == ".onnx":
            raise OSError("the disk is full")

    monkeypatch.setattr(shutil, "copyfile", fails)
    with pytest.raises(OutputError, match="full"):
        _publish(files, overwrite=True)
    assert list(next(iter(files)).parent.iterdir()) == []


def test_a_source_is_never_replaced(project: Path, artifact: Artifact) -> None:
    result = resulting(configured(project), artifact)
    with pytest.raises(OutputError, match="is a file of the source model"):
        _refuse_sources([project / "models" / ".." / "models" / "a.onnx"], result.sources)
    _refuse_sources([project / "models" / "other.onnx"], result.sources)


def test_only_a_single_model_can_be_compiled_into_a_file(tmp_path: Path) -> None:
    assert is_file(tmp_path / "a.onnx", ["a"])
    assert not is_file(tmp_path / "out", ["a", "b"])
    (tmp_path / "b.onnx").mkdir()
    assert not is_file(tmp_path / "b.onnx", ["a", "b"])
    with pytest.raises(ConfigError, match="several models need a folder"):
        is_file(tmp_path / "a.onnx", ["a", "b"])


def test_a_report_in_the_place_of_the_result_is_an_error_before_anything_runs(
    project: Path, tmp_path: Path
) -> None:
    def run(planned: Plan, staging: Path) -> Result:
        raise AssertionError

    place = tmp_path / "a_ctx.onnx"
    config = dataclasses.replace(configured(project), report=place)
    with pytest.raises(OutputError, match="EPC501"):
        compile_models(config, place, run, overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("output", ["file", "file/out", "file/out/a.onnx"])
def test_an_output_below_a_file_is_an_error_before_anything_runs(
    project: Path, tmp_path: Path, output: str, overwrite: bool
) -> None:
    (tmp_path / "file").write_bytes(b"theirs")

    def run(planned: Plan, staging: Path) -> Result:
        raise AssertionError

    with pytest.raises(OutputError, match=r"file: EPC501\n    is a file, and not a folder"):
        compile_models(configured(project), tmp_path / output, run, overwrite=overwrite)
