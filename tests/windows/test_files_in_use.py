"""Files that another program has open, as virus scanners do."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hatch_epcontext.files import replace_files, sync, write_atomically
from tests.windows.conftest import kernel, only_windows

pytestmark = only_windows

GENERIC_READ, OPEN_EXISTING = 0x80000000, 3


@contextlib.contextmanager
def in_use(file: Path) -> Iterator[Callable[[], None]]:
    """Keep ``file`` open, shared with nobody, until what this gives is called, or to the end."""
    api = kernel()
    api.CreateFileW.restype = ctypes.c_void_p
    handle = api.CreateFileW(str(file), GENERIC_READ, 0, None, OPEN_EXISTING, 0, None)
    assert handle != ctypes.c_void_p(-1).value
    with contextlib.ExitStack() as stack:
        stack.callback(api.CloseHandle, ctypes.c_void_p(handle))
        yield stack.close


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ü 日本.txt"
    path.write_text("old", encoding="utf-8")
    return path


def test_a_file_is_replaced_when_it_is_free_again(file: Path) -> None:
    with in_use(file) as release:
        timer = threading.Timer(0.5, release)
        timer.start()
        write_atomically(file, "new")
        timer.join()
    assert file.read_text("utf-8") == "new"


def test_a_file_is_written_to_its_disk_when_it_is_free_again(file: Path) -> None:
    with in_use(file) as release:
        timer = threading.Timer(0.5, release)
        timer.start()
        sync(file)
        timer.join()


def test_after_two_seconds_it_is_an_error_that_names_the_file(file: Path) -> None:
    start = time.monotonic()
    with in_use(file), pytest.raises(PermissionError) as raised:
        write_atomically(file, "new")
    assert 1.9 < time.monotonic() - start < 5
    assert str(file) in (raised.value.filename, raised.value.filename2)
    assert file.read_text("utf-8") == "old"
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("name", ["a.bin", "a.onnx", "old.bin"])
def test_no_file_is_replaced_if_one_of_them_is_in_use(tmp_path: Path, name: str) -> None:
    new, folder = tmp_path / "new", tmp_path / "out"
    for path, content in ((new, "new"), (folder, "old")):
        path.mkdir()
        for each in ("a.bin", "a.onnx", "old.bin"):
            (path / each).write_text(content, encoding="utf-8")
    files = {each: new / each for each in ("a.bin", "a.onnx")}
    with in_use(folder / name), pytest.raises(PermissionError):
        replace_files(folder, files, ["old.bin"])
    assert {path.read_text("utf-8") for path in folder.iterdir()} == {"old"}
    replace_files(folder, files, ["old.bin"])
    assert [path.read_text("utf-8") for path in folder.iterdir()] == ["new", "new"]
