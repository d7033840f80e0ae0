from __future__ import annotations

import pytest

from hatch_epcontext.files import is_intact
from hatch_epcontext.jobs.recipe import Stop
from hatch_epcontext.serialize import from_json
from tests.results import Artifact


def test_the_size_of_an_artifact_is_that_of_all_its_files(artifact: Artifact) -> None:
    assert artifact.record.size == 407


def test_every_byte_of_an_artifact_counts(artifact: Artifact) -> None:
    file = artifact.folder / "a_ctx_qnn.bin"
    recorded = artifact.record.files[file.name]
    assert is_intact(file, recorded)
    file.write_bytes(b"blub" * 100)
    assert not is_intact(file, recorded)
    file.unlink()
    assert not is_intact(file, recorded)


def test_a_stored_refusal_without_a_reason_is_damaged() -> None:
    assert from_json('{"step": "change"}', Stop) == Stop("change")
    for step in ("prepare", "compile"):
        with pytest.raises(ValueError, match="without a reason"):
            from_json(f'{{"step": "{step}"}}', Stop)
