from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.artifact import Artifact, is_intact, link_or_copy, record_files


def test_files_are_recorded_by_their_place_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_bytes(b"12")
    (tmp_path / "a").write_bytes(b"1")
    files = record_files(tmp_path)
    assert list(files) == ["a", "sub/b"]
    assert files["sub/b"].size == 2


def test_every_byte_counts(artifact: Artifact) -> None:
    files = artifact.record.files
    assert artifact.size == 407
    assert is_intact(artifact.folder, files)
    (artifact.folder / "a_ctx_qnn.bin").write_bytes(b"blub" * 100)
    assert not is_intact(artifact.folder, files)
    (artifact.folder / "a_ctx_qnn.bin").unlink()
    assert not is_intact(artifact.folder, files)


def test_a_file_gets_a_second_place(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"content")
    assert Path(link_or_copy(source, tmp_path / "target")).read_bytes() == b"content"


def test_where_there_are_no_hard_links_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    source = tmp_path / "source"
    source.write_bytes(b"content")
    target = Path(link_or_copy(source, tmp_path / "target"))
    assert target.read_bytes() == b"content"
    assert target.stat().st_ino != source.stat().st_ino
