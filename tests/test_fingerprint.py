from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.fingerprint import file_sha256, fingerprint, model_sha256

MODEL: tuple[str, dict[str, Any]] = ("00", {"name": "a", "dims": {}})
TARGET = {"provider": "qnn", "provider_options": {"b": "1", "a": "2"}}
VERSIONS = {"onnxruntime": "1.31.1"}


def test_a_files_hash_is_that_of_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "file"
    content = b"x" * (3 << 20)
    file.write_bytes(content)
    assert file_sha256(file) == hashlib.sha256(content).hexdigest()


def test_external_data_counts_and_its_place_does_not(tmp_path: Path) -> None:
    hashes = []
    for folder, data in (("one", b"1"), ("two", b"1"), ("three", b"2")):
        path = tmp_path / folder / f"{folder}.onnx"
        (path.parent / "sub").mkdir(parents=True)
        path.write_bytes(b"model")
        (path.parent / "sub" / "data").write_bytes(data)
        hashes.append(model_sha256(path, ["sub/data"]))
    assert hashes[0] == hashes[1] != hashes[2]
    assert hashes[0] != model_sha256(path, [])


def test_a_fingerprint_does_not_depend_on_order() -> None:
    other = {"provider_options": {"a": "2", "b": "1"}, "provider": "qnn"}
    assert fingerprint([MODEL], TARGET, VERSIONS) == fingerprint([MODEL], other, VERSIONS)


@pytest.mark.parametrize(
    "changed",
    [
        ([("01", MODEL[1])], TARGET, VERSIONS),
        ([(MODEL[0], {"name": "a", "dims": {"n": 1}})], TARGET, VERSIONS),
        ([MODEL, MODEL], TARGET, VERSIONS),
        ([MODEL], {**TARGET, "embed": True}, VERSIONS),
        ([MODEL], TARGET, {"onnxruntime": "1.32"}),
    ],
)
def test_whatever_can_change_the_result_changes_the_fingerprint(changed: tuple[Any, ...]) -> None:
    assert fingerprint(*changed) != fingerprint([MODEL], TARGET, VERSIONS)
