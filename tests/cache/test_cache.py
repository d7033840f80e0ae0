from __future__ import annotations

import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import platformdirs
import pytest

from hatch_epcontext.cache import store as store_module
from hatch_epcontext.cache.build import Cache
from hatch_epcontext.cache.store import Files, Store
from hatch_epcontext.config.load import load
from hatch_epcontext.config.location import LAYOUT
from hatch_epcontext.config.paths import default_root
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.files import FileRecord, is_intact, is_sha256, record_files, temp_dir
from hatch_epcontext.jobs.recipe import Record
from hatch_epcontext.jobs.run import open_cache
from tests.conftest import make_record
from tests.results import Artifact

KEY = "ab" * 32


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, warnings: list[str]) -> Cache:
    return Cache(tmp_path / "cache", warnings.append)


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    """The folder of the artifact of `KEY`."""
    return tmp_path / "cache" / LAYOUT / "artifacts" / KEY


def put(cache: Cache, artifact: Artifact, key: str = KEY) -> None:
    cache.put("artifacts", key, artifact.record, artifact.folder)


def has(cache: Cache, key: str = KEY) -> bool:
    return cache.get("artifacts", key, Record) is not None


def get(cache: Cache, folder: Path) -> Record | None:
    return cache.get("artifacts", KEY, Record, folder)


def test_a_stored_artifact_is_found_again(
    cache: Cache, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    assert not has(cache)
    assert get(cache, tmp_path / "none") is None
    put(cache, artifact)
    shutil.rmtree(artifact.folder)
    assert has(cache)
    assert get(cache, tmp_path / "taken") == artifact.record
    # What was taken survives the cache.
    shutil.rmtree(tmp_path / "cache")
    assert record_files(tmp_path / "taken") == artifact.record.files
    assert not has(cache)
    assert not warnings


def test_storing_sweeps_what_killed_builds_left(
    cache: Cache, artifact: Artifact, tmp_path: Path
) -> None:
    with temp_dir(Store(tmp_path / "cache").staging) as running:
        killed = running.with_name(".epcontext-abcd1234")
        (killed / "entry").mkdir(parents=True)
        marker = (running / ".lock").read_bytes()
        (killed / ".lock").write_bytes(marker.replace(running.name.encode(), killed.name.encode()))
        put(cache, artifact)
        assert [path.name for path in killed.parent.iterdir()] == [running.name]


BLOB, RECORD = "files/a_ctx_qnn.bin", "record.json"


def replace(file: Path, content: bytes | str | None) -> None:
    """Another file in the place of ``file``, which others may be links to; or none."""
    file.unlink()
    if isinstance(content, bytes):
        file.write_bytes(content)


CHANGED = "its file a_ctx_qnn.bin is missing or has other content"


UNREADABLE = "its record cannot be read"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (BLOB, b"blub" * 100, CHANGED),
        (BLOB, b"blob", CHANGED),
        (BLOB, None, CHANGED),
        ("files/a_ctx.onnx", None, "its file a_ctx.onnx is missing or has other content"),
        (RECORD, b"{", UNREADABLE),
        (RECORD, b"[" * 100_000, UNREADABLE),
        # That of the same artifact, compiled once more: its files have the same sizes.
        (RECORD, "another record", CHANGED),
    ],
)
def test_a_damaged_artifact_is_a_miss_and_can_be_replaced(
    cache: Cache,
    artifact: Artifact,
    warnings: list[str],
    entry: Path,
    name: str,
    content: bytes | str | None,
    reason: str,
) -> None:
    put(cache, artifact)
    if content == "another record":
        blob = sha256(b"blob" * 100).hexdigest()
        content = (entry / RECORD).read_bytes().replace(blob.encode(), b"ef" * 32)
    replace(entry / name, content)
    replace(artifact.folder / "a_ctx_qnn.bin", b"blob" * 100)
    assert not has(cache)
    assert warnings == [f"the entry {entry} of the cache is damaged ({reason}), and is made again"]
    put(cache, artifact)
    assert has(cache)
    assert [path.name for path in entry.parent.iterdir()] == [KEY]


def test_unchanged_files_are_not_read_again(
    cache: Cache, artifact: Artifact, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, artifact)
    read: list[str] = []

    def reading(path: Path, recorded: FileRecord) -> bool:
        read.append(path.name)
        return is_intact(path, recorded)

    monkeypatch.setattr(store_module, "is_intact", reading)
    assert has(cache)
    assert read == []
    for file in (entry / "files").rglob("*"):
        os.utime(file, (1, 1))
    # Their status is another one, and their contents are the same.
    assert has(cache)
    assert sorted(read) == sorted(artifact.record.files)
    assert has(cache)
    assert len(read) == len(artifact.record.files)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no modes of this kind")
@pytest.mark.parametrize("place", ["", LAYOUT])
def test_a_folder_to_which_others_can_write_is_not_used(
    tmp_path: Path, artifact: Artifact, warnings: list[str], place: str
) -> None:
    root = tmp_path / "cache"
    first = Cache(root, warnings.append)
    put(first, artifact)
    assert {path.stat().st_mode & 0o777 for path in (root, root / LAYOUT)} == {0o700}
    (root / place).chmod(0o775)
    second = Cache(root, warnings.append)
    assert not has(second)
    put(second, artifact, "cd" * 32)
    assert second.index.store is None
    (warning,) = warnings
    assert f"other users can write to {root / place}" in warning
    assert "HATCH_EPCONTEXT_CACHE_DIR" in warning
    (root / place).chmod(0o755)
    third = Cache(root, warnings.append)
    assert has(third)
    assert not has(third, "cd" * 32)
    # Whatever modes the folders inside have.
    assert (root / LAYOUT).stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_used_by_the_superuser_only(
    tmp_path: Path, artifact: Artifact, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(os, "geteuid"):
        pytest.skip("Windows has no such users")
    root = tmp_path / "cache"
    put(Cache(root, warnings.append), artifact)
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    assert not has(Cache(root, warnings.append))
    assert "belongs to another user" in warnings[0]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert has(Cache(root, warnings.append))


def test_the_first_of_two_builds_wins(cache: Cache, artifact: Artifact, tmp_path: Path) -> None:
    put(cache, artifact)
    other = tmp_path / "other"
    other.mkdir()
    (other / "a_ctx.onnx").write_bytes(b"compiled by another build")
    put(cache, Artifact(other, make_record(record_files(other))))
    assert get(cache, tmp_path / "taken") == artifact.record


def test_many_builds_at_once(cache: Cache, artifact: Artifact, warnings: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(put, cache, artifact) for _ in range(32)]
        for job in jobs:
            job.result()
    assert has(cache)
    assert not warnings


def test_a_lock_is_held_by_one_build_at_a_time(cache: Cache, tmp_path: Path) -> None:
    order: list[str] = []
    waiting = threading.Event()

    def second() -> None:
        with Cache(tmp_path / "cache", print).lock(KEY, waiting.set):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with cache.lock(KEY, lambda: None):
            other = pool.submit(second)
            assert waiting.wait(60)
            order.append("first")
        other.result(60)
    assert order == ["first", "second"]


def test_what_waiting_raises_ends_it(cache: Cache, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    other = Cache(tmp_path / "cache", print)
    with cache.lock(KEY, interrupt), pytest.raises(KeyboardInterrupt), other.lock(KEY, interrupt):
        pytest.fail("the lock is not held twice")


def test_a_cache_that_cannot_be_written_is_one_warning(
    tmp_path: Path, artifact: Artifact, warnings: list[str]
) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "cache", warnings.append)
    with cache.lock(KEY, lambda: None):
        put(cache, artifact)
        put(cache, artifact, "cd" * 32)
    assert not has(cache)
    assert len(warnings) == 1
    assert "cannot be written" in warnings[0]


def test_a_full_cache_folder_is_one_warning_in_words(
    cache: Cache, artifact: Artifact, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: str) -> str:
        # The number of Windows for it, which other systems ignore.
        raise OSError(errno.ENOSPC, "No space left on device", source, 112, target)

    put(cache, artifact, "cd" * 32)
    monkeypatch.setattr(store_module, "link_or_copy", full)
    put(cache, artifact)
    assert has(cache, "cd" * 32)
    (warning,) = warnings
    assert "(No space left on device. The file system " in warning
    assert "HATCH_EPCONTEXT_CACHE_DIR names another folder" in warning
    assert "Errno" not in warning


def test_without_a_cache_nothing_is_found_again(artifact: Artifact, warnings: list[str]) -> None:
    cache = Cache(None, warnings.append)
    with cache.lock(KEY, lambda: None):
        put(cache, artifact)
    assert not has(cache)
    assert cache.index.store is None
    assert not warnings


@pytest.mark.parametrize(
    "text", ["", '{"files": 3}', "[" * 100_000, '{"files": {"../x": {"size": 1, "sha256": ""}}}']
)
def test_a_damaged_small_entry_is_a_miss(
    cache: Cache, tmp_path: Path, warnings: list[str], text: str
) -> None:
    cache.put("facts", KEY, Files({}))
    cache.put("facts", KEY, Files({"a": FileRecord(1, KEY)}))
    (file,) = (tmp_path / "cache").rglob("record.json")
    assert '"a"' in file.read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    assert cache.get("facts", KEY, Files) is None
    (warning,) = warnings
    assert "is damaged" in warning


def test_the_users_cache_folder_is_named_after_the_package() -> None:
    root = default_root()
    assert root is not None
    # On Windows it is a folder Cache in that one.
    assert "hatch-epcontext" in root.parts[-2:]


@pytest.mark.usefixtures("no_home")
def test_without_a_home_folder_the_build_goes_on_without_the_users_cache(project: Path) -> None:
    lines: list[str] = []
    config = load(
        project, parse('targets.cpu.provider = "cpu"\nmodels = ["models/a.onnx"]\n'), {}, {}
    )
    cache = open_cache(config, lines.append)
    assert default_root() is None
    cache.put("refs", KEY, KEY)
    (line,) = lines
    assert line.startswith("this user has no home folder, and so no cache folder; this build ")


def test_a_cache_folder_that_is_not_absolute_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *_, **__: "~/.cache/x")
    assert default_root() is None


def key_of(cache: Cache, name: str) -> str | None:
    return cache.get("refs", name, str, fits=is_sha256, latest=True)


def test_a_name_stands_for_the_key_that_was_set_last(cache: Cache, tmp_path: Path) -> None:
    name, newer = "ee" * 32, "cd" * 32
    assert key_of(cache, name) is None
    for key in (KEY, newer):
        cache.put("refs", name, key)
        assert key_of(cache, name) == key
    for text in ("", '"../../evil"', f'"{"zz" * 32}"', "3"):
        record = Store(tmp_path / "cache").entry("refs", name) / "record.json"
        record.write_text(text, encoding="utf-8")
        assert key_of(cache, name) is None
    none = Cache(None, print)
    none.put("refs", name, KEY)
    assert key_of(none, name) is None
