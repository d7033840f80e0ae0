"""The user's cache folder."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from hatch_epcontext import _user_cache
from tests.loader.shipped import CPU, Shipper, changed


def test_the_users_cache_folder_is_that_of_the_system(
    ship: Shipper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = ship(cpu=CPU)
    name = app.__name__.split(".")[0]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for platform, variable, default in (
        ("linux", "XDG_CACHE_HOME", ".cache"),
        ("win32", "LOCALAPPDATA", "AppData/Local"),
        ("darwin", "XDG_CACHE_HOME", "Library/Caches"),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setenv(variable, str(tmp_path / "caches"))
        app.user_folder.cache_clear()
        assert app.user_folder() == tmp_path / "caches" / name
        monkeypatch.delenv(variable)
        app.user_folder.cache_clear()
        assert app.user_folder() == tmp_path / default / name
        assert app.user_folder().is_dir()


@pytest.mark.parametrize("kind", ["no home", "a file"])
def test_without_a_cache_folder_a_temporary_one_is_used(
    ship: Shipper, tmp_path: Path, kind: str
) -> None:
    ship(cpu=changed(CPU, load_options={"cache": "{user-cache}/kernels"}))
    env = {"TMPDIR": str(tmp_path / "temp"), "TMP": str(tmp_path / "temp")}
    (tmp_path / "temp").mkdir()
    script = WITHOUT_CACHE
    if kind == "no home":
        env |= {"XDG_CACHE_HOME": "", "LOCALAPPDATA": ""}
        script = f"{NO_HOME}{WITHOUT_CACHE}"
    else:
        (tmp_path / "home").write_text("a file", encoding="utf-8")
    assert ship.script(script, env=env) == ["cpu", True]
    assert not list((tmp_path / "temp").glob("epcontext-*"))


def test_what_is_unused_or_too_much_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_user_cache, "_MOST", 1000)
    now = time.time()

    def entry(name: str, days: float, size: int) -> None:
        if not name.startswith("lock"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "blob").write_bytes(bytes(size))
        else:
            (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - days * 86400,) * 2)

    for name, days in (("used", 9), ("lock29", 29), ("lock31", 31), ("of29", 29), ("of31", 31)):
        entry(name, days, 100)
    _user_cache.mark_used(tmp_path / "used")
    assert {path.name for path in tmp_path.iterdir()} == {"used", "lock29", "of29"}
    entry("of6", 6, 1000)
    _user_cache.mark_used(tmp_path / "used")
    assert {path.name for path in tmp_path.iterdir()} == {"used", "lock29", "of6"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_leaves_the_temporary_folder(ship: Shipper, tmp_path: Path) -> None:
    ship(cpu=CPU)
    (tmp_path / "home").write_text("a file", encoding="utf-8")
    script = """
import json, os, sys
import shipped
folder = shipped.user_folder()
if (child := os.fork()) == 0:
    sys.exit()
os.waitpid(child, 0)
print(json.dumps(folder.is_dir()))
"""
    assert ship.script(script) is True


NO_HOME = """
import pathlib
def expanduser(path):
    raise RuntimeError("Could not determine home directory.")
pathlib.Path.expanduser = expanduser
"""

WITHOUT_CACHE = """
import json, tempfile
import shipped
session, folder = shipped.load("a"), shipped.user_folder()
found = folder.is_relative_to(tempfile.gettempdir()) and (folder / "kernels").is_dir()
print(json.dumps([shipped.target_of(session), found]))
"""
