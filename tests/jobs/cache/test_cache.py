from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import platformdirs
import pytest

from hatch_epcontext import files as files_module
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.files import FileRecord, record_files
from hatch_epcontext.jobs.artifact import (
    Artifact,
    Record,
    Validation,
    ValidationRun,
    ValidationStatus,
)
from hatch_epcontext.jobs.cache import cache_folder as cache_module
from hatch_epcontext.jobs.cache.cache import Cache, default_root
from hatch_epcontext.jobs.cache.cache_folder import staging
from hatch_epcontext.jobs.cache.entry import entry_name, validation_name
from hatch_epcontext.jobs.cache.envelope import DamagedError, envelope_around
from hatch_epcontext.jobs.run import open_cache
from hatch_epcontext.serialize import to_json
from hatch_epcontext.worker.facts import Agreement
from tests.conftest import any_record, make_record

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
    return tmp_path / "cache" / "v4" / KEY[:2] / KEY


def test_a_stored_artifact_is_found_again(
    cache: Cache, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    assert not cache.has(KEY, any_record)
    assert cache.take(KEY, tmp_path / "none", any_record) is None
    cache.store(KEY, artifact.folder, artifact.record, any_record)
    shutil.rmtree(artifact.folder)
    assert cache.has(KEY, any_record)
    taken = cache.take(KEY, tmp_path / "taken", any_record)
    assert taken == Artifact(tmp_path / "taken", artifact.record)
    assert record_files(taken.folder) == artifact.record.files
    assert not warnings


def test_storing_sweeps_what_killed_builds_left(
    cache: Cache, artifact: Artifact, tmp_path: Path
) -> None:
    with staging(tmp_path / "cache" / "v4") as running:
        killed = running.with_name(".epcontext-abcd1234")
        (killed / "entry").mkdir(parents=True)
        marker = (running / ".lock").read_bytes()
        (killed / ".lock").write_bytes(marker.replace(running.name.encode(), killed.name.encode()))
        cache.store(KEY, artifact.folder, artifact.record, any_record)
        assert [path.name for path in killed.parent.iterdir()] == [running.name]


def test_what_was_taken_survives_the_cache(
    cache: Cache, artifact: Artifact, tmp_path: Path
) -> None:
    cache.store(KEY, artifact.folder, artifact.record, any_record)
    taken = cache.take(KEY, tmp_path / "taken", any_record)
    assert taken is not None
    shutil.rmtree(tmp_path / "cache")
    assert record_files(taken.folder) == artifact.record.files
    assert not cache.has(KEY, any_record)
    cache.store(KEY, artifact.folder, artifact.record, any_record)
    assert cache.has(KEY, any_record)


def test_storing_leaves_nothing_else_behind(cache: Cache, artifact: Artifact, entry: Path) -> None:
    cache.store(KEY, artifact.folder, artifact.record, any_record)
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


def add(entry: Path) -> None:
    (entry / "files" / "more.bin").touch()


def link(entry: Path) -> None:
    # The same content, in a file that somebody else can change.
    shutil.copyfile(entry / BLOB, entry / "elsewhere")
    (entry / BLOB).unlink()
    (entry / BLOB).symlink_to(entry / "elsewhere")


def link_folder(entry: Path) -> None:
    (entry / "files").rename(entry / "elsewhere")
    (entry / "files").symlink_to(entry / "elsewhere")


def pipe(entry: Path) -> None:
    (entry / BLOB).unlink()
    os.mkfifo(entry / BLOB)


def cut_record(entry: Path) -> None:
    replace(entry / RECORD, b"{")


def no_record(entry: Path) -> None:
    (entry / RECORD).unlink()


def link_record(entry: Path) -> None:
    (entry / RECORD).rename(entry / "elsewhere")
    (entry / RECORD).symlink_to(entry / "elsewhere")


def edit_record(entry: Path) -> None:
    text = (entry / RECORD).read_text(encoding="utf-8")
    assert "1.0" in text
    replace(entry / RECORD, text.replace("1.0", "2.0").encode())


def deep_record(entry: Path) -> None:
    replace(entry / RECORD, b"[" * 100_000)


def deep_text(entry: Path) -> None:
    replace(entry / RECORD, envelope_around(entry_name(KEY), "[" * 100_000).encode())


def foreign_record(entry: Path) -> None:
    # One of this very artifact, that was compiled once more: files of the same sizes.
    document = json.loads((entry / RECORD).read_text(encoding="utf-8"))
    text = document["text"].replace(sha256(b"blob" * 100).hexdigest(), "ef" * 32)
    assert text != document["text"]
    replace(entry / RECORD, envelope_around(entry_name(KEY), text).encode())


def other_record(entry: Path) -> None:
    document = envelope_around(entry_name("cd" * 32), to_json(make_record({})))
    replace(entry / RECORD, document.encode())


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (change, "its file a_ctx_qnn.bin has other content"),
        (shorten, "its file a_ctx_qnn.bin has another size"),
        (remove, "it has no file a_ctx_qnn.bin"),
        (remove_all, "files is not a folder"),
        (add, "it has a file more than its record: more.bin"),
        (link, "a_ctx_qnn.bin is not a regular file"),
        (link_folder, "files is not a folder"),
        (cut_record, "it is not a document of this cache"),
        (no_record, "its record is missing"),
        (link_record, "record.json is not a regular file"),
        (edit_record, "its text was changed"),
        (deep_record, "it is not a document of this cache"),
        (deep_text, "its record cannot be read"),
        (other_record, "it belongs to something else"),
        (foreign_record, "its file a_ctx_qnn.bin has other content"),
        pytest.param(
            pipe,
            "a_ctx_qnn.bin is not a regular file",
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
    cache.store(KEY, artifact.folder, artifact.record, any_record)
    harm(entry)
    replace(artifact.folder / "a_ctx_qnn.bin", b"blob" * 100)
    assert not cache.has(KEY, any_record)
    assert warnings == [f"the cached artifact in {entry} is damaged ({reason}); compiling again"]
    cache.store(KEY, artifact.folder, artifact.record, any_record)
    assert cache.has(KEY, any_record)
    assert [path.name for path in entry.parent.iterdir()] == [KEY]


def test_unchanged_files_are_not_read_again(
    cache: Cache, artifact: Artifact, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(KEY, artifact.folder, artifact.record, any_record)
    for file in (entry / "files").rglob("*"):
        os.utime(file, (1, 1))
    read: list[str] = []

    def is_intact(folder: Path, files: Mapping[str, FileRecord]) -> bool:
        read.extend(files)
        return files_module.is_intact(folder, files)

    monkeypatch.setattr(cache_module, "is_intact", is_intact)
    # Their status is another one, and their contents are the same.
    assert cache.has(KEY, any_record)
    assert sorted(read) == sorted(artifact.record.files)
    assert cache.has(KEY, any_record)
    assert len(read) == len(artifact.record.files)


def test_the_first_of_two_builds_wins(cache: Cache, artifact: Artifact, tmp_path: Path) -> None:
    cache.store(KEY, artifact.folder, artifact.record, any_record)
    other = tmp_path / "other"
    other.mkdir()
    (other / "a_ctx.onnx").write_bytes(b"compiled by another build")
    cache.store(KEY, other, make_record(record_files(other)), any_record)
    taken = cache.take(KEY, tmp_path / "taken", any_record)
    assert taken is not None
    assert taken.record == artifact.record


def test_many_builds_at_once(cache: Cache, artifact: Artifact, warnings: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(cache.store, KEY, artifact.folder, artifact.record, any_record)
            for _ in range(32)
        ]
        for job in jobs:
            job.result()
    assert cache.has(KEY, any_record)
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
        cache.store(KEY, artifact.folder, artifact.record, any_record)
        cache.store("cd" * 32, artifact.folder, artifact.record, any_record)
    assert not cache.has(KEY, any_record)
    assert len(warnings) == 1
    assert "cannot be written" in warnings[0]


def test_a_full_cache_folder_is_one_warning_in_words(
    cache: Cache, artifact: Artifact, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: str) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", source, None, target)

    monkeypatch.setattr(cache_module, "link_or_copy", full)
    cache.store(KEY, artifact.folder, artifact.record, any_record)
    (warning,) = warnings
    assert "(No space left on device. The file system " in warning
    assert "HATCH_EPCONTEXT_CACHE_DIR names another folder" in warning
    assert "Errno" not in warning


def test_without_a_cache_nothing_is_found_again(artifact: Artifact, warnings: list[str]) -> None:
    cache = Cache(None, warnings.append)
    with cache.lock(KEY, lambda: None):
        cache.store(KEY, artifact.folder, artifact.record, any_record)
    assert not cache.has(KEY, any_record)
    assert cache.index().folder is None
    assert not warnings


def test_validations_are_stored_by_their_key(cache: Cache, artifact: Artifact) -> None:
    cache.store(KEY, artifact.folder, artifact.record, any_record)
    agreements = (Agreement("y", 0.001, 0.999), Agreement("z", 0.1, 0.99))
    run = ValidationRun(Validation(ValidationStatus.RAN, agreements), 0.25)
    cache.store_validation(KEY, "random", run)
    assert cache.validation(KEY, "random") == run
    assert cache.validation(KEY, "ones") is None
    assert run.validation.cosine == 0.99
    assert cache.has(KEY, any_record)


def test_a_damaged_validation_is_a_miss(
    cache: Cache, artifact: Artifact, entry: Path, warnings: list[str]
) -> None:
    cache.store(KEY, artifact.folder, artifact.record, any_record)
    run = ValidationRun(Validation(ValidationStatus.RAN))
    cache.store_validation(KEY, "random", run)
    (file,) = entry.glob("validation-*.json")
    name = validation_name(KEY, "random")
    for text, reason in {
        '{"validation": 3}': "it is not a document of this cache",
        envelope_around(name, '{"validation": 3}'): "its validation cannot be read",
        envelope_around(name, "[" * 100_000): "its validation cannot be read",
        # That of another artifact.
        file.read_text(encoding="utf-8").replace(KEY, "cd" * 32): "its text was changed",
        envelope_around(
            validation_name("cd" * 32, "random"), to_json(run)
        ): "belongs to something else",
        file.read_text(encoding="utf-8").replace("ran", "structure"): "its text was changed",
    }.items():
        warnings.clear()
        file.write_text(text, encoding="utf-8")
        assert cache.validation(KEY, "random") is None
        (warning,) = warnings
        assert reason in warning


def test_the_users_cache_folder_is_named_after_the_package() -> None:
    root = default_root()
    assert root is not None
    assert root.name == "hatch-epcontext"


@pytest.mark.usefixtures("no_home")
def test_without_a_home_folder_the_build_goes_on_without_the_users_cache(project: Path) -> None:
    lines: list[str] = []
    config = load(project, parse('provider = "cpu"\nmodels = ["models/a.onnx"]\n'), {}, {})
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
def test_only_a_fingerprint_is_taken_as_the_latest(cache: Cache, tmp_path: Path, text: str) -> None:
    settings_key = "ee" * 32
    cache.set_latest(settings_key, KEY)
    file = tmp_path / "cache" / "v4" / "latest" / settings_key
    file.write_text(envelope_around(f"latest/{settings_key}", text), encoding="utf-8")
    assert cache.latest(settings_key) is None
    file.write_text(envelope_around("latest/other", KEY), encoding="utf-8")
    assert cache.latest(settings_key) is None


def test_a_record_that_the_job_does_not_want_is_a_miss(
    cache: Cache, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    def refuse(record: Record) -> None:
        raise DamagedError("it is that of another model")

    cache.store(KEY, artifact.folder, artifact.record, any_record)
    assert not cache.has(KEY, refuse)
    assert cache.take(KEY, tmp_path / "taken", refuse) is None
    assert "is damaged (it is that of another model); compiling again" in warnings[0]


def test_without_a_cache_there_is_no_latest() -> None:
    none = Cache(None, print)
    none.set_latest("ee" * 32, KEY)
    assert none.latest("ee" * 32) is None
