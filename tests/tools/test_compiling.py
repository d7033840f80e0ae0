from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ConfigError, OutputError
from hatch_epcontext.jobs.artifact import Artifact, Result
from hatch_epcontext.jobs.plan import Plan
from hatch_epcontext.tools.compiling import compile_models
from hatch_epcontext.tools.configure import is_file
from tests.results import configured, resulting


@pytest.fixture
def config(project: Path) -> Config:
    return configured(project)


@pytest.fixture
def run(config: Config, artifact: Artifact) -> Callable[[Plan, Path], Result]:
    return lambda planned, staging: resulting(config, artifact)


Run = Callable[[Plan, Path], Result]


@pytest.mark.parametrize(("place", "name"), [("out", "a_ctx.onnx"), ("model.onnx", "model.onnx")])
def test_sidecars_come_before_context_models_which_can_have_another_name(
    config: Config, run: Run, tmp_path: Path, place: str, name: str
) -> None:
    found = compile_models(config, tmp_path / "new" / place, run, overwrite=False).files
    assert [file.name for file in found] == ["a_ctx_qnn.bin", name]
    # Nothing else is left.
    assert {*found} == {*found[0].parent.iterdir()}


def test_existing_files_are_only_replaced_with_overwrite(
    config: Config, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "a_ctx_qnn.bin").write_bytes(b"theirs")
    with pytest.raises(OutputError, match=r"a_ctx_qnn\.bin: EPC501\n    exists already"):
        compile_models(config, folder, run, overwrite=False)
    assert [path.read_bytes() for path in folder.iterdir()] == [b"theirs"]
    compile_models(config, folder, run, overwrite=True)
    assert (folder / "a_ctx.onnx").read_bytes() == b"context"


def test_a_context_that_cannot_be_replaced_keeps_its_sidecar(
    config: Config, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    (folder / "a_ctx.onnx").mkdir(parents=True)
    (folder / "a_ctx_qnn.bin").write_bytes(b"theirs")
    with pytest.raises(OutputError, match=r"a_ctx\.onnx"):
        compile_models(config, folder, run, overwrite=True)
    assert {path.name for path in folder.iterdir()} == {"a_ctx.onnx", "a_ctx_qnn.bin"}
    assert (folder / "a_ctx_qnn.bin").read_bytes() == b"theirs"


def test_a_source_is_never_replaced(config: Config, run: Run, project: Path) -> None:
    place = project / "models" / ".." / "models" / "a.onnx"
    with pytest.raises(OutputError, match="is a file of the source model"):
        compile_models(config, place, run, overwrite=True)
    assert (project / "models" / "a.onnx").read_bytes() == b"model a"


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


@pytest.mark.parametrize("output", ["file", "file/out/a.onnx"])
def test_an_output_below_a_file_is_an_error_before_anything_runs(
    project: Path, tmp_path: Path, output: str
) -> None:
    (tmp_path / "file").write_bytes(b"theirs")

    def run(planned: Plan, staging: Path) -> Result:
        raise AssertionError

    with pytest.raises(OutputError, match=r"file: EPC501\n    is a file, and not a folder"):
        compile_models(configured(project), tmp_path / output, run, overwrite=True)
