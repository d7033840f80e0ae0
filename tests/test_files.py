from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hatch_epcontext.files import replace


def test_a_folder_is_made_and_nothing_else_is_left(tmp_path: Path) -> None:
    file = replace(tmp_path / "new" / "a.txt", "one\r\ntwo\n")
    assert file.read_bytes() == b"one\r\ntwo\n"
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.skipif(sys.platform == "win32", reason="modes are POSIX's")
def test_a_file_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("old", encoding="utf-8")
    file.chmod(0o640)
    replace(file, "new")
    assert (file.read_text(encoding="utf-8"), file.stat().st_mode & 0o777) == ("new", 0o640)


def test_the_old_text_stays_when_the_new_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("old", encoding="utf-8")

    def fails(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="full"):
        replace(file, "new")
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_text(encoding="utf-8") == "old"


def test_what_is_no_unicode_is_an_escape(tmp_path: Path) -> None:
    assert replace(tmp_path / "a.txt", "caf\udce9").read_bytes() == b"caf\\udce9"
