from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from hatch_epcontext.cache import build as build_module
from hatch_epcontext.cache.build import Index
from hatch_epcontext.cache.store import Store
from hatch_epcontext.errors import Kind, ModelError
from hatch_epcontext.files import file_sha256

LONG_AGO = 10**9


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read whole."""
    names: list[str] = []

    def reading(path: Path) -> str:
        names.append(path.name)
        return file_sha256(path)

    monkeypatch.setattr(build_module, "file_sha256", reading)
    return names


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "a.onnx").write_bytes(b"model")
    return tmp_path / "a.onnx"


@pytest.fixture
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock be a minute later than it is."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 60 * 10**9)


@pytest.mark.skipif(sys.platform == "win32", reason="there each build reads each file")
@pytest.mark.usefixtures("_settled")
def test_a_settled_file_is_read_once(tmp_path: Path, file: Path, read: list[str]) -> None:
    first = Index(Store(tmp_path)).sha256(file)
    assert first == Index(Store(tmp_path)).sha256(file) == file_sha256(file)
    assert read == ["a.onnx"]


def test_a_file_that_has_just_been_written_is_read_by_each_build(
    tmp_path: Path, file: Path, read: list[str]
) -> None:
    # An old time of change does not hide that it is new.
    os.utime(file, (LONG_AGO, LONG_AGO))
    index = Index(Store(tmp_path))
    index.sha256(file)
    index.sha256(file)
    assert read == ["a.onnx"]
    Index(Store(tmp_path)).sha256(file)
    assert read == ["a.onnx"] * 2


@pytest.mark.skipif(sys.platform == "win32", reason="no status there has the time of a change")
@pytest.mark.parametrize("size", [5, 6])
@pytest.mark.usefixtures("_settled")
def test_a_changed_file_is_read_again_by_the_next_build(
    tmp_path: Path, file: Path, read: list[str], size: int
) -> None:
    index = Index(Store(tmp_path))
    first = index.sha256(file)
    before = file.stat()
    file.write_bytes(b"x" * size)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Index(Store(tmp_path)).sha256(file) == file_sha256(file) != first
    assert len(read) == 2
    for again in (False, True):
        with pytest.raises(ModelError) as raised:
            index.sha256(file, again=again)
        assert [(problem.kind, problem.location) for problem in raised.value.problems] == [
            (Kind.MODEL_CHANGED, str(file))
        ]


def test_a_file_that_has_just_been_written_is_read_again_in_the_end(
    file: Path, read: list[str]
) -> None:
    index = Index()
    index.sha256(file)
    index.sha256(file, again=True)
    assert read == ["a.onnx"] * 2


@pytest.mark.usefixtures("_settled")
def test_another_link_or_mode_is_no_change(tmp_path: Path, file: Path, read: list[str]) -> None:
    index = Index()
    index.sha256(file)
    os.link(file, tmp_path / "b.onnx")
    file.chmod(0o600)
    index.sha256(file, again=True)
    index.sha256(file, again=True)
    # On Windows each check reads it.
    assert len(read) <= (3 if sys.platform == "win32" else 2)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes with a path of that kind")
@pytest.mark.usefixtures("_settled")
def test_a_pipe_in_an_index_holds_nobody_up(tmp_path: Path, file: Path, read: list[str]) -> None:
    Index(Store(tmp_path)).sha256(file)
    (document,) = tmp_path.rglob("record.json")
    document.unlink()
    os.mkfifo(document)
    assert Index(Store(tmp_path)).sha256(file) == file_sha256(file)
    assert read[:2] == ["a.onnx"] * 2


def test_an_index_that_cannot_be_written_is_no_error(tmp_path: Path, read: list[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "a.onnx").write_bytes(b"model")
    for index in (Index(), Index(Store(tmp_path / "file"))):
        assert index.sha256(tmp_path / "a.onnx") == file_sha256(tmp_path / "a.onnx")
    assert read == ["a.onnx"] * 2
