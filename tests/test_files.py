from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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
    temp_dir,
    too_large,
    write_atomically,
)
from tests.conftest import REPOSITORY


@pytest.fixture
def system_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


KILLED = """
import os, sys, tempfile
from pathlib import Path
from hatch_epcontext.files import temp_dir
tempfile.tempdir = sys.argv[1]
with temp_dir() as folder:
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_bytes(b"model")
    (folder / "link").symlink_to(sys.argv[2])
    os._exit(9)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right of their own")
def test_what_a_killed_process_left_is_removed_and_nothing_else(
    system_folder: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    arguments = (sys.executable, "-c", KILLED, str(system_folder), str(precious))
    assert subprocess.run(arguments, cwd=REPOSITORY, check=False).returncode == 9
    (left,) = system_folder.iterdir()
    assert (left / "sub" / "file").is_file()
    others = ["hatch-epcontext-abcdefgh", "hatch-epcontext-mine", "other-abcdefgh"]
    (system_folder / others[0]).symlink_to(precious)
    for name in others[1:]:
        (system_folder / name).mkdir()
        (system_folder / name / ".lock").touch()
    new = system_folder / "hatch-epcontext-newnewne"
    new.mkdir()
    with temp_dir() as live:
        assert not left.exists()
        with temp_dir():
            assert live.is_dir()
        assert {path.name for path in system_folder.iterdir()} == {*others, new.name, live.name}
    assert not live.exists()
    assert (precious / "file").is_file()
    # Its process was killed before it could lock it.
    os.utime(new, (10**9, 10**9))
    with temp_dir():
        assert not new.exists()


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root has other users"
)
def test_what_another_user_left_is_kept(system_folder: Path) -> None:
    left = system_folder / "hatch-epcontext-abcdefgh"
    left.mkdir()
    (left / ".lock").touch()
    os.chown(left, 12345, 12345)
    with temp_dir():
        assert left.is_dir()
    os.chown(left, 0, 0)
    with temp_dir():
        assert not left.exists()


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    system_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    real = os.open

    def swept(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).name == ".lock":
            made.append(Path(path).parent)
            if len(made) == 1:
                path.parent.rename(tmp_path / "removed")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", swept)
    with temp_dir() as folder:
        assert folder.is_dir()
        assert made[1:] == [folder]
    assert list(system_folder.iterdir()) == []


def test_a_folder_beside_the_users_files_is_swept_too(tmp_path: Path) -> None:
    left = tmp_path / ".epcontext-abcdefgh"
    left.mkdir()
    (left / ".lock").touch()
    (tmp_path / ".epcontext-notes").mkdir()
    with temp_dir(tmp_path) as folder:
        assert folder.parent == tmp_path
        assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".epcontext-notes"]


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
def test_a_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Path, "write_bytes", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"x")
        )
        with pytest.raises(OSError, match="No space") as raised:
            write_atomically(file, "new")
    assert raised.value.filename == str(file)


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
