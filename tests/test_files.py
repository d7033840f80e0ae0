from __future__ import annotations

import hashlib
import io
import os
import shutil
import sys
from pathlib import Path

import pytest

from hatch_epcontext.files import (
    MOST_BYTES,
    FileRecord,
    file_sha256,
    is_intact,
    is_portable,
    is_regular,
    link_or_copy,
    record_file,
    record_files,
    stream_sha256,
    too_large,
    write_atomically,
)


def test_the_folder_is_made_and_contains_nothing_else(tmp_path: Path) -> None:
    file = write_atomically(tmp_path / "new" / "a.txt", "one\r\ntwo\n")
    assert file.read_bytes() == b"one\r\ntwo\n"
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.skipif(sys.platform == "win32", reason="modes are POSIX's")
def test_an_existing_file_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("old", encoding="utf-8")
    file.chmod(0o640)
    write_atomically(file, "new")
    assert (file.read_text(encoding="utf-8"), file.stat().st_mode & 0o777) == ("new", 0o640)


def test_the_old_text_stays_when_the_new_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("old", encoding="utf-8")

    def fails(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="full"):
        write_atomically(file, "new")
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_text(encoding="utf-8") == "old"


def test_characters_that_are_not_unicode_are_escaped(tmp_path: Path) -> None:
    assert write_atomically(tmp_path / "a.txt", "caf\udce9").read_bytes() == b"caf\\udce9"


def test_files_are_recorded_by_their_path_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_bytes(b"12")
    (tmp_path / "a").write_bytes(b"1")
    files = record_files(tmp_path)
    assert list(files) == ["a", "sub/b"]
    assert files["sub/b"].size == 2
    assert files["a"] == record_file(tmp_path / "a")
    assert files["a"] == FileRecord(1, hashlib.sha256(b"1").hexdigest())


def test_each_changed_or_missing_file_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "a"
    file.write_bytes(b"blob" * 100)
    files = record_files(tmp_path)
    assert is_intact(tmp_path, files)
    (tmp_path / "other").touch()
    assert is_intact(tmp_path, files)
    file.write_bytes(b"blub" * 100)
    assert not is_intact(tmp_path, files)
    file.unlink()
    assert not is_intact(tmp_path, files)


def test_the_hash_of_a_file_larger_than_a_piece(tmp_path: Path) -> None:
    file = tmp_path / "a"
    content = bytes(range(256)) * 4096 + b"end"
    file.write_bytes(content)
    assert file_sha256(file) == hashlib.sha256(content).hexdigest()
    stream = io.BytesIO(content)
    stream.seek(3)
    assert stream_sha256(stream) == hashlib.sha256(content[3:]).hexdigest()


def test_a_file_is_linked(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"content")
    target = Path(link_or_copy(source, tmp_path / "target"))
    assert target.read_bytes() == b"content"
    assert target.stat().st_ino == source.stat().st_ino


def test_a_file_is_copied_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("this file system has no links")

    monkeypatch.setattr(os, "link", refuse)
    source = tmp_path / "source"
    source.write_bytes(b"content")
    target = Path(link_or_copy(source, tmp_path / "target"))
    assert target.read_bytes() == b"content"
    assert target.stat().st_ino != source.stat().st_ino


def test_a_tree_can_be_copied_with_links(tmp_path: Path) -> None:
    (tmp_path / "one" / "sub").mkdir(parents=True)
    (tmp_path / "one" / "sub" / "a").write_bytes(b"content")
    shutil.copytree(tmp_path / "one", tmp_path / "two", copy_function=link_or_copy)
    assert (tmp_path / "two" / "sub" / "a").read_bytes() == b"content"


@pytest.mark.parametrize("name", ["a.onnx", "a/.hidden/b_ctx.v1-2 (x).onnx", "ü/1"])
def test_names_that_stay_below_their_folder_on_every_system(name: str) -> None:
    assert is_portable(name)


@pytest.mark.parametrize(
    "name", ["", "/a", "..", "a/../b", "./a", "a//b", "a/", "a\\b", "C:a", "a ", "a.", "a\nb", "a?"]
)
def test_names_that_leave_it_on_some_system(name: str) -> None:
    assert not is_portable(name)


@pytest.mark.skipif(sys.platform == "win32", reason="files with holes take space there")
def test_files_that_nothing_can_need_are_too_large(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"\0" * 4096)
    assert too_large(file.stat()) is None
    assert too_large(file.stat(), 1) is None
    with file.open("r+b") as opened:
        opened.truncate(2 * 10**9)
    assert "of which only" in (too_large(file.stat()) or "")
    assert "the model uses 7 bytes of it" in (too_large(file.stat(), 7) or "")
    with file.open("r+b") as opened:
        opened.truncate(MOST_BYTES + 1)
    assert "is larger than 256.0 GB" in (too_large(file.stat()) or "")


def test_what_cannot_be_a_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    names = ("a", "b", ".", "a" * 5000, "a\0")
    assert [name for name in names if is_regular(tmp_path / name)] == ["a"]
