from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hatch_epcontext.build.artifact import Artifact, Validation, ValidationStatus
from hatch_epcontext.build.cache import Cache, default_root
from hatch_epcontext.files import record_files
from hatch_epcontext.ipc.protocol import Agreement
from tests.conftest import make_record

KEY = "ab" * 32


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, warnings: list[str]) -> Cache:
    return Cache(tmp_path / "cache", tmp_path / "overflow", warnings.append)


def test_a_stored_artifact_is_found_again(
    cache: Cache, artifact: Artifact, warnings: list[str]
) -> None:
    assert cache.get(KEY) is None
    stored = cache.store(KEY, artifact.folder, artifact.record)
    shutil.rmtree(artifact.folder)
    assert cache.get(KEY) == stored
    assert record_files(stored.folder) == artifact.record.files
    assert not warnings


def test_storing_leaves_nothing_else_behind(
    cache: Cache, artifact: Artifact, tmp_path: Path
) -> None:
    stored = cache.store(KEY, artifact.folder, artifact.record)
    shelf = stored.folder.parents[1]
    assert [path.name for path in shelf.iterdir()] == [KEY]
    assert shelf == tmp_path / "cache" / "v2" / KEY[:2]


@pytest.mark.parametrize("harm", ["change", "remove", "record"])
def test_a_damaged_artifact_is_a_miss_and_can_be_replaced(
    cache: Cache, artifact: Artifact, warnings: list[str], harm: str
) -> None:
    stored = cache.store(KEY, artifact.folder, artifact.record)
    blob = stored.folder / "a_ctx_qnn.bin"
    blob.unlink()
    if harm == "change":
        blob.write_bytes(b"blub" * 100)
    if harm == "record":
        (stored.folder.parent / "record.json").write_text("{", encoding="utf-8")
    (artifact.folder / "a_ctx_qnn.bin").write_bytes(b"blob" * 100)
    assert cache.get(KEY) is None
    assert "is damaged; compiling again" in warnings[0]
    again = cache.store(KEY, artifact.folder, artifact.record)
    assert cache.get(KEY) == again
    assert [path.name for path in again.folder.parents[1].iterdir()] == [KEY]


def test_the_first_of_two_builds_wins(cache: Cache, artifact: Artifact, tmp_path: Path) -> None:
    first = cache.store(KEY, artifact.folder, artifact.record)
    other = tmp_path / "other"
    other.mkdir()
    (other / "a_ctx.onnx").write_bytes(b"compiled by another build")
    second = cache.store(KEY, other, make_record(record_files(other)))
    assert second == first


def test_many_builds_at_once(cache: Cache, artifact: Artifact, warnings: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(cache.store, KEY, artifact.folder, artifact.record) for _ in range(32)]
        assert len({job.result().folder for job in jobs}) == 1
    assert cache.get(KEY) is not None
    assert not warnings


def test_a_cache_that_cannot_be_written_is_one_warning(
    tmp_path: Path, artifact: Artifact, warnings: list[str]
) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "cache", tmp_path / "overflow", warnings.append)
    stored = cache.store(KEY, artifact.folder, artifact.record)
    cache.store("cd" * 32, artifact.folder, artifact.record)
    assert stored.folder.is_relative_to(tmp_path / "overflow")
    assert record_files(stored.folder) == artifact.record.files
    assert len(warnings) == 1
    assert "cannot be written" in warnings[0]


def test_without_a_cache_nothing_is_found_again(
    tmp_path: Path, artifact: Artifact, warnings: list[str]
) -> None:
    cache = Cache(None, tmp_path / "overflow", warnings.append)
    stored = cache.store(KEY, artifact.folder, artifact.record)
    assert stored.folder.is_relative_to(tmp_path / "overflow")
    assert cache.get(KEY) is None
    assert not warnings


def test_validations_are_stored_by_their_key(cache: Cache, artifact: Artifact) -> None:
    stored = cache.store(KEY, artifact.folder, artifact.record)
    validation = Validation(
        ValidationStatus.RAN, (Agreement("y", 0.001, 0.999), Agreement("z", 0.1, 0.99))
    )
    cache.store_validation(stored, "random", validation)
    assert cache.validation(stored, "random") == validation
    assert cache.validation(stored, "ones") is None
    assert validation.cosine == 0.99
    assert cache.get(KEY) == stored


def test_a_damaged_validation_is_a_miss(cache: Cache, artifact: Artifact) -> None:
    stored = cache.store(KEY, artifact.folder, artifact.record)
    cache.store_validation(stored, "random", Validation(ValidationStatus.RAN))
    (file,) = stored.folder.parent.glob("validation-*.json")
    file.write_text('{"status": 3}', encoding="utf-8")
    assert cache.validation(stored, "random") is None


def test_the_users_cache_folder_is_named_after_the_package() -> None:
    assert default_root().name == "hatch-epcontext"


def test_the_latest_artifact_with_the_same_settings_is_found(
    cache: Cache, artifact: Artifact
) -> None:
    settings_key, newer = "ee" * 32, "cd" * 32
    assert cache.latest(settings_key) is None
    cache.store(KEY, artifact.folder, artifact.record)
    cache.set_latest(settings_key, KEY)
    assert cache.latest(settings_key) == cache.get(KEY)
    cache.store(newer, artifact.folder, artifact.record)
    cache.set_latest(settings_key, newer)
    assert cache.latest(settings_key) == cache.get(newer)


def test_without_a_cache_there_is_no_latest(tmp_path: Path, artifact: Artifact) -> None:
    none = Cache(None, tmp_path / "overflow", print)
    none.set_latest("ee" * 32, KEY)
    assert none.latest("ee" * 32) is None
