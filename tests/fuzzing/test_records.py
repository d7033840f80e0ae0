from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatch_epcontext.files import is_intact
from hatch_epcontext.jobs.artifact import Artifact, Validation, ValidationRun, ValidationStatus
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.cache.cache_folder import entry_folder, validation_file
from hatch_epcontext.jobs.cache.entry import entry_name, validation_name
from hatch_epcontext.jobs.cache.envelope import envelope_around
from hatch_epcontext.serialize import to_plain
from hatch_epcontext.worker.facts import Agreement
from tests.conftest import any_record, make_record
from tests.fuzzing.mutations import VALUES, mutated

KEY, OTHER = "ab" * 32, "cd" * 32
RECORD = to_plain(make_record({}))
RUN = to_plain(ValidationRun(Validation(ValidationStatus.RAN, (Agreement("y", 0.1, 0.9),)), 0.2))


@pytest.fixture
def root(tmp_path: Path, artifact: Artifact) -> Path:
    """A cache with one artifact."""
    Cache(tmp_path / "cache", print).store(KEY, artifact.folder, artifact.record, any_record)
    return tmp_path / "cache"


@given(st.data())
def test_any_record_is_used_as_it_is_or_damaged(
    artifact: Artifact, root: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """Records with a right checksum, so that what they say is looked at."""
    warnings: list[str] = []
    text = json.dumps(data.draw(mutated(to_plain(artifact.record))))
    document = envelope_around(entry_name(KEY), text)
    (entry_folder(root, KEY) / "record.json").write_text(document, encoding="utf-8")
    taken = Cache(root, warnings.append).take(KEY, tmp_path / "taken", any_record)
    assert (taken is None) == bool(warnings)
    if taken is None:
        assert not (tmp_path / "taken").exists()
        return
    assert taken.record.files == artifact.record.files
    assert is_intact(taken.folder, artifact.record.files)
    assert all(context.model_file in taken.record.files for context in taken.record.contexts)
    shutil.rmtree(taken.folder)


@given(st.data())
def test_any_validation_is_read_or_damaged(root: Path, data: st.DataObject) -> None:
    warnings: list[str] = []
    cache = Cache(root, warnings.append)
    file = validation_file(root, KEY, OTHER)
    text = json.dumps(data.draw(mutated(RUN)))
    file.write_text(envelope_around(validation_name(KEY, OTHER), text), encoding="utf-8")
    assert (cache.validation(KEY, OTHER) is None) == bool(warnings)


@given(st.one_of(VALUES, mutated(json.loads(envelope_around(entry_name(KEY), "text")))))
def test_any_document_without_its_checksum_is_damaged(root: Path, document: Any) -> None:
    warnings: list[str] = []
    file = entry_folder(root, KEY) / "record.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    assert not Cache(root, warnings.append).has(KEY, any_record)
    assert len(warnings) == 1
