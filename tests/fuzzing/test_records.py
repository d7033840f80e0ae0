from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatch_epcontext.cache.build import Cache
from hatch_epcontext.cache.signing import sign, verify
from hatch_epcontext.cache.store import DamagedError, Store
from hatch_epcontext.jobs.recipe import Record
from hatch_epcontext.serialize import to_plain
from hatch_epcontext.worker.results import Agreement, Validated, Validation, ValidationStatus
from tests.fuzzing.mutations import VALUES, mutated
from tests.results import Artifact

KEY, OTHER = "ab" * 32, "cd" * 32
VALIDATION = to_plain(
    Validated(Validation(ValidationStatus.RAN, (Agreement("y", 0.1, 0.9),)), load=0.2)
)


@pytest.fixture
def root(tmp_path: Path, artifact: Artifact) -> Path:
    """A cache with one artifact."""
    Cache(tmp_path / "cache", print).put("artifacts", KEY, artifact.record, artifact.folder)
    return tmp_path / "cache"


@given(st.data())
def test_any_small_entry_is_read_or_damaged(root: Path, data: st.DataObject) -> None:
    warnings: list[str] = []
    text = json.dumps(data.draw(mutated(VALIDATION)))
    record = Store(root).entry("facts", OTHER) / "record.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(text, encoding="utf-8")
    validation = Cache(root, warnings.append).get("facts", OTHER, Validated)
    assert (validation is None) == bool(warnings)


@given(st.binary(max_size=80), st.integers(0, 300), st.integers(0, 300))
def test_any_statement_is_that_of_its_entry_or_damaged(
    inserted: bytes, start: int, end: int
) -> None:
    content = sign("refs", KEY, "record", None)
    try:
        record = verify(content[:start] + inserted + content[end:], "refs", KEY, None)
    except DamagedError:
        return
    assert verify(sign("refs", KEY, record, None), "refs", KEY, None) == record
    with pytest.raises(DamagedError):
        verify(sign("refs", KEY, record, None), "refs", OTHER, None)


@given(VALUES)
def test_any_document_that_is_no_record_is_damaged(root: Path, document: Any) -> None:
    warnings: list[str] = []
    file = Store(root).entry("artifacts", KEY) / "record.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    assert Cache(root, warnings.append).get("artifacts", KEY, Record) is None
    assert len(warnings) == 1
