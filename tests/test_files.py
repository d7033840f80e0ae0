from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from hatch_epcontext import files
from hatch_epcontext.files import (
    MAX_BYTES,
    file_sha256,
    is_inside,
    is_portable,
    is_regular,
    link_or_copy,
    patiently,
    remove,
    sweep,
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


posix_only = pytest.mark.skipif(sys.platform == "win32", reason="links need a right of their own")

SWEPT_AND_KILLED = """
import os, tempfile
from hatch_epcontext.files import sweep
tempfile.tempdir = {folder!r}
done = 0
def count(function):
    def remove(*arguments, **options):
        global done
        if done == {removed}:
            os._exit(9)
        done += 1
        return function(*arguments, **options)
    return remove
for name in ("unlink", "rmdir"):
    setattr(os, name, count(getattr(os, name)))
sweep()
"""

KILLED = """
import os, sys, tempfile
from pathlib import Path
from hatch_epcontext.files import temp_dir
tempfile.tempdir = sys.argv[1]
with temp_dir(Path(sys.argv[3]) if sys.argv[3:] else None) as folder:
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_bytes(b"model")
    (folder / "link").symlink_to(sys.argv[2])
    os._exit(9)
"""


def left_behind(folder: Path, precious: Path, *parent: Path) -> Path:
    """What a killed process leaves in ``folder``, with a link to the folder ``precious``."""
    before = set(folder.iterdir())
    arguments = (sys.executable, "-c", KILLED, str(folder), str(precious), *map(str, parent))
    assert subprocess.run(arguments, cwd=REPOSITORY, check=False).returncode == 9
    (left,) = set(folder.iterdir()) - before
    return left


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A folder of the user's with a file."""
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "file").touch()
    return folder


@posix_only
def test_what_a_killed_process_left_is_removed(system_folder: Path, precious: Path) -> None:
    left = left_behind(system_folder, precious)
    assert (left / "sub" / "file").is_file()
    with temp_dir() as live:
        assert not left.exists()
        with temp_dir():
            assert live.is_dir()
        assert list(system_folder.iterdir()) == [live]
    assert not live.exists()
    assert (precious / "file").is_file()


@pytest.mark.parametrize("marker", [None, "", "hatch-epcontext made this folder\n"])
@pytest.mark.parametrize(
    "name",
    [
        "hatch-epcontext-mine",
        "hatch-epcontext-abcdefgh",
        "hatch-epcontext-",
        ".epcontext-datasets",
        ".epcontext-abcd1234",
    ],
)
def test_folders_of_the_user_are_kept_whatever_their_names(
    system_folder: Path, name: str, marker: str | None
) -> None:
    mine = system_folder / name
    mine.mkdir()
    (mine / "file").write_bytes(b"mine")
    if marker is not None:
        (mine / ".lock").write_text(marker, encoding="utf-8")
    os.utime(mine, (10**9, 10**9))
    before = {path: path.is_file() and path.read_bytes() for path in mine.rglob("*")}
    for parent in (None, system_folder):
        with temp_dir(parent):
            pass
    assert {path: path.is_file() and path.read_bytes() for path in mine.rglob("*")} == before


@posix_only
@pytest.mark.parametrize("name", ["hatch-epcontext-mybackup", "hatch-epcontext-abcdefgh"])
@pytest.mark.parametrize("moved", [False, True])
def test_a_copy_is_kept(
    system_folder: Path, tmp_path: Path, precious: Path, name: str, moved: bool
) -> None:
    mine = system_folder / name
    left = left_behind(system_folder, precious)
    if moved:
        left.rename(mine)
    else:
        shutil.copytree(left, mine, symlinks=True)
    with temp_dir():
        assert (mine / "sub" / "file").read_bytes() == b"model"


@posix_only
def test_links_and_pipes_are_kept_and_hold_nobody_up(system_folder: Path, precious: Path) -> None:
    left = left_behind(system_folder, precious)
    link = system_folder / "hatch-epcontext-abcdefgh"
    link.symlink_to(left)
    pipe = system_folder / "hatch-epcontext-bcdefghi"
    pipe.mkdir()
    os.mkfifo(pipe / ".lock")
    linked = system_folder / "hatch-epcontext-cdefghij"
    linked.mkdir()
    (precious / "marker").write_bytes((left / ".lock").read_bytes())
    (linked / ".lock").symlink_to(precious / "marker")
    with temp_dir() as live:
        assert set(system_folder.iterdir()) == {link, pipe, linked, live}


@posix_only
# Two files, a folder and the marker; then only an empty folder is left, which can be anybody's.
@pytest.mark.parametrize("removed", range(4))
def test_a_removal_that_is_killed_is_gone_on_with(
    system_folder: Path, precious: Path, removed: int
) -> None:
    left = left_behind(system_folder, precious)
    script = SWEPT_AND_KILLED.format(folder=str(system_folder), removed=removed)
    subprocess.run((sys.executable, "-c", script), cwd=REPOSITORY, check=False)
    with temp_dir() as live:
        assert list(system_folder.iterdir()) == [live]
    assert not left.exists()


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root has other users"
)
def test_what_another_user_left_is_kept(system_folder: Path, precious: Path) -> None:
    left = left_behind(system_folder, precious)
    os.chown(left, 12345, 12345)
    with temp_dir():
        assert left.is_dir()
    os.chown(left, 0, 0)
    with temp_dir():
        assert not left.exists()


@posix_only
def test_a_folder_beside_the_users_files_is_swept_too(tmp_path: Path, precious: Path) -> None:
    left = left_behind(tmp_path, precious, tmp_path)
    assert left.name.startswith(".epcontext-")
    with temp_dir(tmp_path) as folder:
        assert folder.parent == tmp_path
        assert not left.exists()
    assert list(tmp_path.iterdir()) == [precious]


REPLACE = """
import os, sys
from pathlib import Path
from hatch_epcontext import files
folder, new, end = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
patiently, moves = files.patiently, 0
def counted(action):
    global moves
    moves += 1
    if moves == end + 1:
        if sys.argv[4] == "killed":
            os._exit(9)
        raise OSError("it is in use")
    patiently(action)
files.patiently = counted
names = ("sub/shared.bin", "a.bin", "a.onnx")
try:
    files.replace_files(folder, {name: new / name for name in names}, ["old.bin"])
except OSError:
    sys.exit(1)
"""


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_files_are_replaced_all_or_none_and_never_mixed(tmp_path: Path, how: str) -> None:
    old = {"a.bin": b"old", "a.onnx": b"old", "old.bin": b"old", "theirs": b"theirs"}
    new = {"sub/shared.bin": b"new", "a.bin": b"new", "a.onnx": b"new"}
    for name, content in new.items():
        (tmp_path / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "new" / name).write_bytes(content)
    # Three files are moved away, then the copies are ready, and three are moved to their places.
    for end in range(8):
        folder = tmp_path / f"{end}"
        folder.mkdir()
        for name, content in old.items():
            (folder / name).write_bytes(content)
        arguments = (str(folder), str(tmp_path / "new"), str(end), how)
        done = subprocess.run(
            [sys.executable, "-c", REPLACE, *arguments], cwd=REPOSITORY, check=False
        )
        assert done.returncode == (0 if end == 7 else 9 if how == "killed" else 1)
        # A context is never with other data than its own.
        assert (folder / "a.onnx").exists() == (how == "failed" or end in (0, 7))
        sweep(folder)
        files = [path for path in folder.rglob("*") if path.is_file()]
        left = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
        is_done = end == 7 or (how == "killed" and end > 3)
        assert left == ({**new, "theirs": b"theirs"} if is_done else old)


@pytest.mark.parametrize("end", [0, 1])
def test_a_file_alone_is_there_also_if_the_process_is_killed(tmp_path: Path, end: int) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a.onnx").write_bytes(b"new")
    (tmp_path / "a.onnx").write_bytes(b"old")
    code = REPLACE.replace('("sub/shared.bin", "a.bin", "a.onnx")', '("a.onnx",)')
    arguments = (str(tmp_path), str(tmp_path / "new"), str(end), "killed")
    code = code.replace(', ["old.bin"]', "")
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=REPOSITORY, check=False)
    assert (done.returncode, (tmp_path / "a.onnx").read_bytes()) == (9, b"old")


@posix_only
def test_a_temporary_folder_that_is_no_text_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = tmp_path / os.fsdecode(b"t\xff")
    try:
        strange.mkdir()
    except OSError:
        pytest.skip("this file system has only names that are text")
    monkeypatch.setattr(tempfile, "tempdir", str(strange))
    with pytest.raises(OSError, match="not UTF-8"), temp_dir():
        pass
    assert list(strange.iterdir()) == []


@pytest.mark.parametrize("length", [245, 251, 255])
def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path: Path, length: int) -> None:
    file = write_atomically(tmp_path / ("n" * length), "text")
    assert file.read_text(encoding="utf-8") == "text"


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
    temporary = tmp_path / f".a.txt.{os.getpid()}-{threading.get_ident()}.tmp"
    temporary.symlink_to("/dev/full")
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


def test_the_hash_of_a_file_larger_than_a_piece(tmp_path: Path) -> None:
    file = tmp_path / "a"
    content = bytes(range(256)) * 4096 + b"end"
    file.write_bytes(content)
    assert file_sha256(file) == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("links", [True, False])
def test_a_file_is_copied_only_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("this file system has no links")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    source = tmp_path / "source"
    source.write_bytes(b"content")
    target = Path(link_or_copy(source, tmp_path / "target"))
    assert target.read_bytes() == b"content"
    assert (target.stat().st_ino == source.stat().st_ino) == links


@pytest.mark.parametrize(
    "name", ["", "/a", "..", "a/../b", "./a", "a//b", "a/", "a\\b", "C:a", "a ", "a.", "a\nb", "a?"]
)
def test_a_portable_name_stays_below_its_folder_on_every_system(name: str) -> None:
    for portable in ("a.onnx", "a/.hidden/b_ctx.v1-2 (x).onnx", "ü/1"):
        assert is_portable(portable)
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
        opened.truncate(MAX_BYTES + 1)
    assert "is larger than 256.0 GB" in (too_large(file.stat()) or "")


def test_what_cannot_be_a_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    names = ("a", "b", ".", "a" * 5000, "a\0")
    assert [name for name in names if is_regular(tmp_path / name)] == ["a"]


@pytest.mark.parametrize(
    "path",
    ["", "..", "../a", "a/../b", "a/..", "/", "/a", "//a/b", "C:", "C:a", "c:/a", "C:\\a", "\\a", "\\\\a\\b",
     "..\\a", "a\\..\\b", "a/..\\b", "./C:/a", ".\\c:a", "a/.. /b", "a/. ./b", "..."],
)  # fmt: skip
def test_a_path_outside_of_its_folder(path: str) -> None:
    inside = (".", "a", "a/b", "./a", "a//b", "a\\b", "a/", "a b", "..a", "a..", "模型")
    assert all(map(is_inside, inside))
    assert not is_inside(path)


def in_use(code: int) -> OSError:
    """What Windows says of a file that another program has open."""
    error = PermissionError(13, "The process cannot access the file", "a.json")
    # Elsewhere the constructor drops it.
    error.winerror = code  # type: ignore[attr-defined, unused-ignore]
    return error


@pytest.mark.parametrize("code", [5, 32, 33])
def test_what_another_program_has_open_is_tried_again(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not run on Windows."""
    attempts, replace = [in_use(code), in_use(code)], Path.replace

    def refusing(path: Path, target: Path) -> Path:
        if attempts:
            raise attempts.pop()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refusing)
    assert write_atomically(tmp_path / "a.json", "new").read_text() == "new"
    assert not attempts


def test_after_some_time_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not run on Windows."""
    monkeypatch.setattr(files, "_PATIENCE", 0.1)
    attempts: list[int] = []

    def refused(code: int) -> None:
        attempts.append(code)
        raise in_use(code)

    with pytest.raises(PermissionError, match=r"a\.json"):
        patiently(lambda: refused(32))
    assert len(attempts) > 1
    # A disk that is full does not become empty.
    with pytest.raises(PermissionError):
        patiently(lambda: refused(112))
    assert attempts.count(112) == 1


def test_what_cannot_be_removed_hides_no_other_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not run on Windows."""
    monkeypatch.setattr(files, "_PATIENCE", 0.1)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(in_use(32)))
    remove(tmp_path / "a.whl")
    monkeypatch.undo()
    (tmp_path / "a.whl").touch()
    remove(tmp_path / "a.whl")
    assert not (tmp_path / "a.whl").exists()
