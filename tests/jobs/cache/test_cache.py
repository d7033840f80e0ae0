from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import platformdirs
import pytest

from hatch_epcontext.config.load import load
from hatch_epcontext.config.paths import default_root
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.files import FileRecord, record_file, record_files
from hatch_epcontext.jobs.artifact import (
    Artifact,
)
from hatch_epcontext.jobs.cache import folder as folder_module
from hatch_epcontext.jobs.cache import index as index_module
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.cache.folder import staging
from hatch_epcontext.jobs.run import open_cache
from hatch_epcontext.worker.results import (
    Agreement,
    Validation,
    ValidationStatus,
)
from tests.conftest import make_record

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
    return tmp_path / "cache" / "v5" / KEY[:2] / KEY


def test_a_stored_artifact_is_found_again(
    cache: Cache, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    assert not cache.has(KEY)
    assert cache.take(KEY, tmp_path / "none") is None
    cache.store(KEY, artifact.folder, artifact.record)
    shutil.rmtree(artifact.folder)
    assert cache.has(KEY)
    taken = cache.take(KEY, tmp_path / "taken")
    assert taken == Artifact(tmp_path / "taken", artifact.record)
    assert record_files(taken.folder) == artifact.record.files
    assert not warnings


def test_storing_sweeps_what_killed_builds_left(
    cache: Cache, artifact: Artifact, tmp_path: Path
) -> None:
    with staging(tmp_path / "cache" / "v5") as running:
        killed = running.with_name(".epcontext-abcd1234")
        (killed / "entry").mkdir(parents=True)
        marker = (running / ".lock").read_bytes()
        (killed / ".lock").write_bytes(marker.replace(running.name.encode(), killed.name.encode()))
        cache.store(KEY, artifact.folder, artifact.record)
        assert [path.name for path in killed.parent.iterdir()] == [running.name]


def test_what_was_taken_survives_the_cache(
    cache: Cache, artifact: Artifact, tmp_path: Path
) -> None:
    cache.store(KEY, artifact.folder, artifact.record)
    taken = cache.take(KEY, tmp_path / "taken")
    assert taken is not None
    shutil.rmtree(tmp_path / "cache")
    assert record_files(taken.folder) == artifact.record.files
    assert not cache.has(KEY)
    cache.store(KEY, artifact.folder, artifact.record)
    assert cache.has(KEY)


def test_storing_leaves_nothing_else_behind(cache: Cache, artifact: Artifact, entry: Path) -> None:
    cache.store(KEY, artifact.folder, artifact.record)
    assert [path.name for path in entry.parent.iterdir()] == [KEY]


BLOB, RECORD = "files/a_ctx_qnn.bin", "record.json"


def replace(file: Path, content: bytes) -> None:
    """Another file in the place of ``file``, which others may be links to."""
    file.unlink()
    file.write_bytes(content)


def change(entry: Path) -> None:
    replace(entry / BLOB, b"blub" * 100)


def shorten(entry: Path) -> None:
    replace(entry / BLOB, b"blob")


def remove(entry: Path) -> None:
    (entry / BLOB).unlink()


def remove_all(entry: Path) -> None:
    shutil.rmtree(entry / "files")


def pipe(entry: Path) -> None:
    (entry / RECORD).unlink()
    os.mkfifo(entry / RECORD)


def cut_record(entry: Path) -> None:
    replace(entry / RECORD, b"{")


def no_record(entry: Path) -> None:
    (entry / RECORD).unlink()


def deep_record(entry: Path) -> None:
    replace(entry / RECORD, b"[" * 100_000)


def foreign_record(entry: Path) -> None:
    # One of this very artifact, that was compiled once more: files of the same sizes.
    text = (entry / RECORD).read_text(encoding="utf-8")
    other = text.replace(sha256(b"blob" * 100).hexdigest(), "ef" * 32)
    assert other != text
    replace(entry / RECORD, other.encode())


CHANGED = "its file a_ctx_qnn.bin is missing or has other content"


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (change, CHANGED),
        (shorten, CHANGED),
        (remove, CHANGED),
        (remove_all, "its file a_ctx.onnx is missing or has other content"),
        (cut_record, "its record cannot be read"),
        (no_record, "its record is missing"),
        (deep_record, "its record cannot be read"),
        (foreign_record, CHANGED),
        pytest.param(
            pipe,
            "its record is missing",
            marks=pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such files"),
        ),
    ],
)
def test_a_damaged_artifact_is_a_miss_and_can_be_replaced(
    cache: Cache,
    artifact: Artifact,
    warnings: list[str],
    entry: Path,
    harm: Callable[[Path], None],
    reason: str,
) -> None:
    cache.store(KEY, artifact.folder, artifact.record)
    harm(entry)
    replace(artifact.folder / "a_ctx_qnn.bin", b"blob" * 100)
    assert not cache.has(KEY)
    assert warnings == [f"the cached artifact in {entry} is damaged ({reason}); compiling again"]
    cache.store(KEY, artifact.folder, artifact.record)
    assert cache.has(KEY)
    assert [path.name for path in entry.parent.iterdir()] == [KEY]


def test_unchanged_files_are_not_read_again(
    cache: Cache, artifact: Artifact, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(KEY, artifact.folder, artifact.record)
    read: list[str] = []

    def reading(path: Path) -> FileRecord:
        read.append(path.name)
        return record_file(path)

    monkeypatch.setattr(index_module, "record_file", reading)
    assert cache.has(KEY)
    assert read == []
    for file in (entry / "files").rglob("*"):
        os.utime(file, (1, 1))
    # Their status is another one, and their contents are the same.
    assert cache.has(KEY)
    assert sorted(read) == sorted(artifact.record.files)
    assert cache.has(KEY)
    assert len(read) == len(artifact.record.files)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no modes of this kind")
@pytest.mark.parametrize("place", ["", "v5"])
def test_a_folder_to_which_others_can_write_is_not_used(
    tmp_path: Path, artifact: Artifact, warnings: list[str], place: str
) -> None:
    root = tmp_path / "cache"
    first = Cache(root, warnings.append)
    first.store(KEY, artifact.folder, artifact.record)
    assert {path.stat().st_mode & 0o777 for path in (root, root / "v5")} == {0o700}
    (root / place).chmod(0o775)
    second = Cache(root, warnings.append)
    assert not second.has(KEY)
    second.store("cd" * 32, artifact.folder, artifact.record)
    assert second.index().folder is None
    (warning,) = warnings
    assert f"other users can write to {root / place}" in warning
    assert "HATCH_EPCONTEXT_CACHE_DIR" in warning
    (root / place).chmod(0o755)
    third = Cache(root, warnings.append)
    assert third.has(KEY)
    assert not third.has("cd" * 32)
    # Whatever modes the folders inside have.
    assert (root / "v5").stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_used_by_the_superuser_only(
    tmp_path: Path, artifact: Artifact, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(os, "geteuid"):
        pytest.skip("Windows has no such users")
    root = tmp_path / "cache"
    Cache(root, warnings.append).store(KEY, artifact.folder, artifact.record)
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    assert not Cache(root, warnings.append).has(KEY)
    assert "belongs to another user" in warnings[0]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert Cache(root, warnings.append).has(KEY)


def test_the_first_of_two_builds_wins(cache: Cache, artifact: Artifact, tmp_path: Path) -> None:
    cache.store(KEY, artifact.folder, artifact.record)
    other = tmp_path / "other"
    other.mkdir()
    (other / "a_ctx.onnx").write_bytes(b"compiled by another build")
    cache.store(KEY, other, make_record(record_files(other)))
    taken = cache.take(KEY, tmp_path / "taken")
    assert taken is not None
    assert taken.record == artifact.record


def test_many_builds_at_once(cache: Cache, artifact: Artifact, warnings: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(cache.store, KEY, artifact.folder, artifact.record) for _ in range(32)]
        for job in jobs:
            job.result()
    assert cache.has(KEY)
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


def test_another_artifact_is_not_locked(cache: Cache) -> None:
    with cache.lock(KEY, lambda: None), cache.lock("cd" * 32, lambda: pytest.fail("waits")):
        pass


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
        cache.store(KEY, artifact.folder, artifact.record)
        cache.store("cd" * 32, artifact.folder, artifact.record)
    assert not cache.has(KEY)
    assert len(warnings) == 1
    assert "cannot be written" in warnings[0]


def test_a_full_cache_folder_is_one_warning_in_words(
    cache: Cache, artifact: Artifact, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: str) -> str:
        # The number of Windows for it, which other systems ignore.
        raise OSError(errno.ENOSPC, "No space left on device", source, 112, target)

    monkeypatch.setattr(folder_module, "link_or_copy", full)
    cache.store(KEY, artifact.folder, artifact.record)
    (warning,) = warnings
    assert "(No space left on device. The file system " in warning
    assert "HATCH_EPCONTEXT_CACHE_DIR names another folder" in warning
    assert "Errno" not in warning


def test_without_a_cache_nothing_is_found_again(artifact: Artifact, warnings: list[str]) -> None:
    cache = Cache(None, warnings.append)
    with cache.lock(KEY, lambda: None):
        cache.store(KEY, artifact.folder, artifact.record)
    assert not cache.has(KEY)
    assert cache.index().folder is None
    assert not warnings


def test_validations_are_stored_by_their_key(cache: Cache, artifact: Artifact) -> None:
    cache.store(KEY, artifact.folder, artifact.record)
    agreements = (Agreement("y", 0.001, 0.999), Agreement("z", 0.1, 0.99))
    run = Validation(ValidationStatus.RAN, agreements, load=0.25)
    cache.store_validation(KEY, "random", run)
    assert cache.validation(KEY, "random") == run
    assert cache.validation(KEY, "ones") is None
    assert run.cosine == 0.99
    assert cache.has(KEY)


@pytest.mark.parametrize("text", ["", '{"validation": 3}', "[" * 100_000])
def test_a_damaged_validation_is_a_miss(
    cache: Cache, artifact: Artifact, entry: Path, warnings: list[str], text: str
) -> None:
    cache.store(KEY, artifact.folder, artifact.record)
    cache.store_validation(KEY, "random", Validation(ValidationStatus.RAN))
    (file,) = entry.glob("validation-*.json")
    file.write_text(text, encoding="utf-8")
    assert cache.validation(KEY, "random") is None
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
    assert cache.store_report("a", "text") is None
    (line,) = lines
    assert line.startswith("this user has no home folder, and so no cache folder; this build ")


def test_a_cache_folder_that_is_not_absolute_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *_, **__: "~/.cache/x")
    assert default_root() is None


def test_the_latest_artifact_with_the_same_settings_is_found(
    cache: Cache, artifact: Artifact
) -> None:
    settings_key, newer = "ee" * 32, "cd" * 32
    assert cache.latest(settings_key) is None
    cache.set_latest(settings_key, KEY)
    assert cache.latest(settings_key) == KEY
    cache.set_latest(settings_key, newer)
    assert cache.latest(settings_key) == newer


@pytest.mark.parametrize("text", ["", "../../evil", "zz" * 32])
def test_only_a_key_is_taken_as_the_latest(cache: Cache, tmp_path: Path, text: str) -> None:
    settings_key = "ee" * 32
    cache.set_latest(settings_key, KEY)
    (tmp_path / "cache" / "v5" / "latest" / settings_key).write_text(text, encoding="utf-8")
    assert cache.latest(settings_key) is None


def test_without_a_cache_there_is_no_latest() -> None:
    none = Cache(None, print)
    none.set_latest("ee" * 32, KEY)
    assert none.latest("ee" * 32) is None
