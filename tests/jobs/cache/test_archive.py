from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hatch_epcontext.files import FileRecord, record_files
from hatch_epcontext.jobs.artifact import Artifact
from hatch_epcontext.jobs.cache.archive import pack, read_record, unpack
from hatch_epcontext.jobs.cache.store import DamagedError
from hatch_epcontext.serialize import to_json
from tests.conftest import make_record

FILE = FileRecord(7, "ab" * 32)


def test_an_artifact_is_unpacked_as_it_was(artifact: Artifact, tmp_path: Path) -> None:
    (artifact.folder / "parts").mkdir()
    (artifact.folder / "parts" / "empty.bin").touch()
    (artifact.folder / "parts" / "ü.bin").write_bytes(bytes(range(256)) * 20_000)
    record = make_record(record_files(artifact.folder))
    first = pack(artifact.folder, record, tmp_path / "first")
    assert unpack(tmp_path / "first", tmp_path / "unpacked") == record
    assert record_files(tmp_path / "unpacked") == record.files
    for path in artifact.folder.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    assert pack(artifact.folder, record, tmp_path / "second") == first


def members(archive: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    found = []
    with tarfile.open(archive) as opened:
        for member in opened:
            content = opened.extractfile(member)
            assert content is not None
            found.append((member, content.read()))
    return found


def outside(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    found[1][0].name = "files/../../evil"


def twice(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    found.insert(2, found[1])


def more(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    found.append((tarfile.TarInfo("files/more.bin"), b""))


def less(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    found.pop()


def other_content(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    found[-1] = (found[-1][0], bytes(reversed(found[-1][1])))


def as_link(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    found[-1][0].type = tarfile.SYMTYPE
    found[-1][0].linkname = "/etc/passwd"


def as_device(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    found[-1][0].type = tarfile.FIFOTYPE


def sparse(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    # A terabyte that takes no room in the archive.
    found[-1][0].pax_headers = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.size": str(10**12),
        "GNU.sparse.map": f"0,0,{10**12},0",
    }


def no_record(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    found.pop(0)


@pytest.mark.parametrize(
    "harm",
    [outside, twice, more, less, other_content, as_link, as_device, sparse, no_record],
)
def test_an_archive_that_is_not_its_record_is_damaged(
    artifact: Artifact,
    tmp_path: Path,
    harm: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None],
) -> None:
    pack(artifact.folder, artifact.record, tmp_path / "archive")
    found = members(tmp_path / "archive")
    harm(found)
    with tarfile.open(tmp_path / "archive", "w") as archive:
        for member, content in found:
            archive.addfile(member, io.BytesIO(content))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DamagedError):
        unpack(tmp_path / "archive", tmp_path / "unpacked" / "deep")
    after = [path for path in tmp_path.rglob("*") if "unpacked" not in path.parts]
    assert sorted(after) == before
    size = sum(path.stat().st_size for path in (tmp_path / "unpacked").rglob("*"))
    assert size < 10**6


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
def test_a_compressed_archive_which_could_have_any_size_is_damaged(
    artifact: Artifact, tmp_path: Path, mode: str
) -> None:
    with tarfile.open(tmp_path / "archive", mode) as archive:  # type: ignore[call-overload]
        archive.add(artifact.folder, "files")
    with pytest.raises(DamagedError, match="cannot be read"):
        unpack(tmp_path / "archive", tmp_path / "unpacked")


@pytest.mark.parametrize(
    "name",
    [
        "../evil.bin",
        "/tmp/evil.bin",
        "a/../../evil.bin",
        "..\\evil.bin",
        "C:evil.bin",
        "C:/evil.bin",
        "a//evil.bin",
        "a/./evil.bin",
        "evil.bin:stream",
        "evil.bin.",
        "",
        "a\n",
        "con",
        "parts/NUL.bin",
        "\udcff.bin",
    ],
)
def test_a_record_that_names_files_elsewhere_is_damaged(name: str) -> None:
    with pytest.raises(DamagedError, match="a file outside of its folder"):
        read_record(to_json(make_record({"a_ctx.onnx": FILE, name: FILE})))


@pytest.mark.parametrize(
    "files",
    [
        {"a_ctx.onnx": FILE, "A_CTX.onnx": FILE},
        {"a_ctx.onnx": FILE, "\u00e9.bin": FILE, "e\u0301.bin": FILE},
        {"a_ctx.onnx": FILE, "a_ctx.onnx/blob.bin": FILE},
    ],
)
def test_a_record_that_no_build_writes_is_damaged(files: dict[str, FileRecord]) -> None:
    with pytest.raises(DamagedError, match="its record has"):
        read_record(to_json(make_record(files)))


def test_a_header_with_a_number_that_is_none_is_damaged(artifact: Artifact, tmp_path: Path) -> None:
    pack(artifact.folder, artifact.record, tmp_path / "archive")
    found = members(tmp_path / "archive")
    found[0][0].pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    with tarfile.open(tmp_path / "archive", "w") as archive:
        for member, content in found:
            archive.addfile(member, io.BytesIO(content))
    with pytest.raises(DamagedError):
        unpack(tmp_path / "archive", tmp_path / "unpacked")


@pytest.mark.parametrize("text", ["", "[]", "[" * 10**5, "9" * 10**5, '{"product": NaN}'])
def test_what_is_no_record_is_damaged(text: str) -> None:
    with pytest.raises(DamagedError, match="record cannot be read"):
        read_record(text)
