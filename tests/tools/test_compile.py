from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hatch_epcontext.build.artifact import Artifact
from hatch_epcontext.errors import OutputError
from hatch_epcontext.tools.compile import places, publish, refuse_sources
from tests.results import configured, resulting


@pytest.fixture
def files(project: Path, artifact: Artifact, tmp_path: Path) -> dict[Path, Path]:
    built = resulting(configured(project), artifact).built
    return places(built, tmp_path / "new" / "out")


def test_sidecars_come_before_what_names_them(files: dict[Path, Path]) -> None:
    assert [target.name for target in files] == ["a_ctx_qnn.bin", "a_ctx.onnx"]


def test_the_context_model_may_be_called_otherwise(
    project: Path, artifact: Artifact, tmp_path: Path
) -> None:
    built = resulting(configured(project), artifact).built
    found = places(built, tmp_path, "model.onnx")
    assert [target.name for target in found] == ["a_ctx_qnn.bin", "model.onnx"]


def test_all_are_copied_and_nothing_else_is_left(files: dict[Path, Path]) -> None:
    publish(files, overwrite=False)
    folder = next(iter(files)).parent
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        source.name: source.read_bytes() for source in files.values()
    }


def test_what_is_there_stays_unless_it_may_be_replaced(files: dict[Path, Path]) -> None:
    folder = next(iter(files)).parent
    folder.mkdir(parents=True)
    (folder / "a_ctx.onnx").write_bytes(b"theirs")
    with pytest.raises(OutputError, match=r"a_ctx\.onnx\n    is there already"):
        publish(files, overwrite=False)
    assert [path.name for path in folder.iterdir()] == ["a_ctx.onnx"]
    assert (folder / "a_ctx.onnx").read_bytes() == b"theirs"
    publish(files, overwrite=True)
    assert (folder / "a_ctx.onnx").read_bytes() == b"context"


def test_a_copy_that_fails_leaves_nothing(
    files: dict[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copyfile

    def fails(source: Path, target: Path) -> None:
        copy(source, target)
        if source.suffix == ".onnx":
            raise OSError("the disk is full")

    monkeypatch.setattr(shutil, "copyfile", fails)
    with pytest.raises(OSError, match="full"):
        publish(files, overwrite=True)
    assert list(next(iter(files)).parent.iterdir()) == []


def test_a_source_is_never_replaced(project: Path, artifact: Artifact) -> None:
    result = resulting(configured(project), artifact)
    with pytest.raises(OutputError, match="is the source's own file"):
        refuse_sources([project / "models" / ".." / "models" / "a.onnx"], result.sources)
    refuse_sources([project / "models" / "other.onnx"], result.sources)
