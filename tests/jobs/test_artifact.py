from __future__ import annotations

from hatch_epcontext.files import is_intact
from hatch_epcontext.jobs.artifact import Artifact


def test_the_size_of_an_artifact_is_that_of_all_its_files(artifact: Artifact) -> None:
    assert artifact.size == 407


def test_every_byte_of_an_artifact_counts(artifact: Artifact) -> None:
    files = artifact.record.files
    assert is_intact(artifact.folder, files)
    (artifact.folder / "a_ctx_qnn.bin").write_bytes(b"blub" * 100)
    assert not is_intact(artifact.folder, files)
    (artifact.folder / "a_ctx_qnn.bin").unlink()
    assert not is_intact(artifact.folder, files)
