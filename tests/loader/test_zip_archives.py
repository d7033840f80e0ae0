"""Packages in zip archives."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.shipped import METADATA
from tests.loader.shipped import CPU, NPU, OUTSIDE, Shipper, X, damage, variant
from tests.models import network, save_with_data


def unpacked(app: Any) -> list[Path]:
    """The folders in the user's cache with copies of files from the archive."""
    folder = app.user_folder() / "unpacked"
    return sorted(each for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []


def test_a_model_is_opened_from_a_zip_archive(
    ship: Shipper, from_zip: Callable[[], Any], tmp_path: Path
) -> None:
    source = save_with_data(network(), ship.folder / "a/data/a.onnx")
    assert (source.parent / "network.data").is_file()
    ship(cpu=CPU, data=variant("a/data", "a.onnx"), npu=NPU)
    app = from_zip()
    assert app.models() == ["a"]
    for target in ("cpu", "data", "source"):
        for verify in (False, True):
            session = app.load("a", target=target, verify=verify)
            assert session.run(None, X)[0].shape == (1, 10)
            assert app.target_of(session) == target
            assert len(unpacked(app)) == 1
    assert not list((tmp_path / "temp").iterdir())


def again(app: Any) -> None:
    """As in another process."""
    app._read.cache_clear()
    app.user_folder.cache_clear()


def test_files_of_a_zip_archive_are_copied_once(ship: Shipper, from_zip: Callable[[], Any]) -> None:
    ship(cpu=CPU)
    app = from_zip()
    with app.path("a") as file:
        (folder,) = unpacked(app)
        assert file.is_relative_to(folder)
        first = file.stat()
    # So that nobody removes what is in use.
    os.utime(folder, (0, 0))
    again(app)
    with app.path("a") as file:
        assert file.stat() == first
    assert folder.stat().st_mtime > 0


def test_a_damaged_copy_of_a_file_from_a_zip_archive_is_made_again(
    ship: Shipper, from_zip: Callable[[], Any]
) -> None:
    ship(cpu=CPU)
    app = from_zip()
    with app.path("a") as file:
        content = file.read_bytes()
    file.write_bytes(content[:100])
    again(app)
    app.load("a", target="cpu")
    assert file.read_bytes() == content
    assert len(unpacked(app)) == 1
    # The size alone does not show it.
    damage(file)
    app.load("a", target="cpu", verify=True)
    assert file.read_bytes() == content
    for text in (None, "{}"):
        manifest = file.parents[2] / "manifest.json"
        manifest.unlink() if text is None else manifest.write_text(text)
        app.load("a", target="cpu")
    shutil.rmtree(file.parents[2])
    app.load("a", target="cpu")
    assert len(unpacked(app)) == 1


UNPACK = """
import sys
sys.path.insert(0, sys.argv[1])
from zipped import epcontext
print("ready", flush=True)
sys.stdin.read()
with epcontext.path("a") as file:
    print(file)
    file.read_bytes()
"""


def test_processes_that_copy_at_the_same_moment_get_one_whole_copy(
    ship: Shipper, from_zip: Callable[[], Any], tmp_path: Path
) -> None:
    (ship.folder / "a/cpu").mkdir(parents=True)
    (ship.folder / "a/cpu/weights.bin").write_bytes(random.Random(1).randbytes(5_000_000))
    ship(cpu=CPU)
    app = from_zip()
    (archive,) = tmp_path.glob("*.zip")
    pipes: Any = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    command = [sys.executable, "-c", UNPACK, str(archive)]
    processes: list[Any] = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    with ThreadPoolExecutor(2) as pool:
        found = set(pool.map(lambda process: process.communicate("", timeout=60)[0], processes))
    assert [process.returncode for process in processes] == [0, 0]
    (folder,) = unpacked(app)
    assert found == {f"{folder / 'a/cpu/a_optimized.onnx'}\n"}
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]


def test_copies_from_zip_archives_do_not_fill_the_disk(
    ship: Shipper, from_zip: Callable[[], Any]
) -> None:
    ship(cpu=CPU)
    app = from_zip()
    old = app.user_folder() / "unpacked" / "old"
    used = app.user_folder() / "unpacked" / "used"
    for each in (old, used):
        (each / "a").mkdir(parents=True)
    # Nobody has opened it for a long time.
    os.utime(old, (0, 0))
    app.load("a")
    assert used in unpacked(app)
    assert old not in unpacked(app)
    assert len(unpacked(app)) == 2


def test_without_a_cache_the_copies_live_as_long_as_the_process(
    ship: Shipper, from_zip: Callable[[], Any], tmp_path: Path
) -> None:
    ship(cpu=CPU)
    from_zip()
    (archive,) = tmp_path.glob("*.zip")
    (tmp_path / "home").write_text("a file", encoding="utf-8")
    variables = {"TMPDIR": str(tmp_path / "temp"), "TMP": str(tmp_path / "temp")}
    script = f"import sys; sys.path.insert(0, {str(archive)!r})\n{NO_CACHE}"
    used, copies = ship.script(script, str(tmp_path / "temp"), env=variables)
    assert (used, copies) == ("cpu", 1)
    assert not list((tmp_path / "temp").glob("epcontext-*"))


NO_CACHE = """
import json
from pathlib import Path
from zipped.epcontext import load, target_of
sessions = [load("a") for _ in range(3)]
print(json.dumps([target_of(sessions[0]), len(list(Path(sys.argv[1]).glob("epcontext-*")))]))
"""


def test_a_manifest_in_a_zip_archive_names_nothing_outside_of_the_cache(
    ship: Shipper, from_zip: Callable[[], Any], tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("theirs", encoding="utf-8")
    before = {path: path.stat().st_mtime_ns for path in (theirs, theirs / "file")}
    outside = {"files": {"../../../x": {"size": 6, "sha256": "0" * 64}}}
    for layout, about in (
        ("portable", {"manifest_sha256": str(theirs)}),
        ("portable", {"manifest_sha256": f"../../../{theirs.name}"}),
        ("installed", outside),
    ):
        ship(cpu=CPU)
        manifest = json.loads((ship.folder / "manifest.json").read_text("utf-8"))
        manifest["additional_metadata"][METADATA].update(about)
        ship.manifest(json.dumps({**manifest, "layout": layout}))
        app = from_zip()
        refused = pytest.raises(app.LoadError, match=OUTSIDE)
        with refused if about is outside else contextlib.nullcontext():
            app.load("a")
        assert before == {path: path.stat().st_mtime_ns for path in before}
        importlib.invalidate_caches()


def test_a_damaged_zip_archive_is_a_load_error(
    ship: Shipper, from_zip: Callable[[], Any], tmp_path: Path
) -> None:
    # Not compressible, so that it can be found in the archive.
    (ship.folder / "a/cpu").mkdir(parents=True)
    content = random.Random(1).randbytes(10_000)
    (ship.folder / "a/cpu/weights.bin").write_bytes(content)
    ship(cpu=CPU)
    app = from_zip()
    (archive,) = tmp_path.glob("*.zip")
    damaged = archive.read_bytes().replace(content[100:200], b"?" * 100)
    for broken in (damaged, damaged[:5000]):
        archive.write_bytes(broken)
        for call in (app.load, app.explain, lambda name: app.path(name).__enter__()):
            with pytest.raises(app.LoadError, match="cannot be read"):
                call("a")
        assert unpacked(app) == []
