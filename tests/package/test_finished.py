from __future__ import annotations

import base64
import hashlib
import json
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hatch_epcontext.errors import InspectionError, Kind, WheelError
from hatch_epcontext.files import FileRecord
from hatch_epcontext.package import finished as module
from hatch_epcontext.package.finished import check_size
from hatch_epcontext.package.finished import verify as verify_package
from hatch_epcontext.tools.inspecting import Verification, inspect, verify
from tests.package import foreign
from tests.package.conftest import OUTPUT

RECORD = "my_app-1.dist-info/RECORD"
INFO = "my_app-1.dist-info"
CONTEXT = f"{OUTPUT}/a/cpu/a_ctx.onnx"

Files = dict[str, bytes]


@pytest.fixture
def files(finished: Files) -> Files:
    """The files of a whole wheel, by name, without RECORD."""
    return {**finished, f"{INFO}/METADATA": b"Name: my_app", f"{INFO}/WHEEL": b"Wheel-Version: 1.0"}


def archived(entries: dict[str, bytes], folder: Path, record: str | None = None) -> Path:
    """A wheel with these files; ``record`` replaces its RECORD."""
    path = folder / "my_app-1-py3-none-any.whl"
    lines = [f"{name},{_recorded(content)},{len(content)}\n" for name, content in entries.items()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
        archive.writestr(RECORD, "".join(lines) + f"{RECORD},,\n" if record is None else record)
    return path


def _recorded(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
    return f"sha256={digest.rstrip('=')}"


def record_of(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        return archive.read(RECORD).decode()


def verified(path: Path) -> Verification:
    found = verify(path, inspect(path))
    found.check()
    return found


def test_each_file_of_a_wheel_is_compared_with_its_records(files: Files, tmp_path: Path) -> None:
    assert verified(archived(files, tmp_path)) == Verification(
        files=6, recorded=len(files), models=1, variants=2
    )


def test_the_hash_of_a_row_can_be_a_longer_one(files: Files, tmp_path: Path) -> None:
    record = record_of(archived(files, tmp_path))
    # That of no bytes at all.
    empty = "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
    longer = "OLBgp1GsljhM2TJ-sbHjaiH9txEUvgdDTAzHv2P24donTt6_529l-9Ua0vFImLlb"
    assert f"sha256={empty}" in record
    record = record.replace(f"sha256={empty}", f"sha384={longer}")
    assert verified(archived(files, tmp_path, record)).recorded == len(files)
    with pytest.raises(WheelError, match=r"my_app/__init__\.py differs from RECORD"):
        verified(archived({**files, "my_app/__init__.py": b" "}, tmp_path, record))


def edited(old: str, new: str) -> Callable[[str], str]:
    return lambda record: record.replace(old, new)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            edited("my_app/__init__.py,sha256=4", "my_app/__init__.py,sha256=5"),
            "differs from RECORD",
        ),
        (edited("uFU,0", "uFU,1"), "differs from RECORD"),
        (
            edited("my_app/__init__.py,", "my_app/gone.py,"),
            "gone.py is in RECORD, but not in the wheel",
        ),
        (
            edited("my_app/__init__.py,", "my_app/gone.py,"),
            "__init__.py is in the wheel, but not in",
        ),
        (
            edited("my_app/__init__.py,sha256=", "my_app/__init__.py,md5="),
            "row that cannot be read",
        ),
        (edited("uFU,0", "uFU,many"), "row that cannot be read"),
        (edited("uFU,0", "***,0"), "row that cannot be read"),
        (edited("uFU,0", "uFU"), "row that cannot be read"),
        (lambda _: "", "METADATA is in the wheel, but not in RECORD"),
    ],
)
def test_a_wheel_that_differs_from_its_record_is_an_error(
    files: Files, tmp_path: Path, edit: Callable[[str], str], message: str
) -> None:
    record = edit(record_of(archived(files, tmp_path)))
    with pytest.raises(WheelError) as raised:
        verified(archived(files, tmp_path, record))
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["METADATA", "WHEEL"])
def test_a_wheel_without_its_metadata_is_an_error(files: Files, tmp_path: Path, name: str) -> None:
    del files[f"{INFO}/{name}"]
    with pytest.raises(WheelError, match=f"{name} is missing"):
        verified(archived(files, tmp_path))


def repacked(path: Path, without: str = "", more: Files | None = None) -> Path:
    """The wheel without the files whose names begin with ``without``, and with ``more``."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        # zipfile warns about a name that there is already.
        warnings.simplefilter("ignore")
        for name, each in content.items():
            if not without or not name.startswith(without):
                archive.writestr(name, each)
        for name, each in (more or {}).items():
            archive.writestr(name, each)
    return path


def test_what_is_no_whole_wheel_is_an_error(files: Files, tmp_path: Path) -> None:
    path = archived(files, tmp_path)
    with pytest.raises(WheelError, match=r"RECORD is missing"):
        verified(repacked(path, RECORD))
    path = archived(files, tmp_path)
    with pytest.raises(WheelError, match=r"one \.dist-info folder, and this one has none"):
        verified(repacked(path, INFO))
    path = archived({**files, "other-1.dist-info/METADATA": b""}, tmp_path)
    with pytest.raises(WheelError, match=r"has the folders my_app-1\.dist-info and other-1"):
        verified(path)
    path = repacked(archived(files, tmp_path), more={CONTEXT: b"another"})
    with pytest.raises(WheelError, match=r"a_ctx\.onnx is in the archive 2 times"):
        verified(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_app.whl", "pip does not install a wheel of this name"),
        (
            "other-1-py3-none-any.whl",
            "the name is that of other 1, and the wheel contains my_app-1",
        ),
    ],
)
def test_a_wheel_with_another_name_is_an_error(
    files: Files, tmp_path: Path, name: str, message: str
) -> None:
    path = archived(files, tmp_path).rename(tmp_path / name)
    with pytest.raises(WheelError, match=message):
        verified(path)


def test_damaged_bytes_are_an_error(files: Files, tmp_path: Path) -> None:
    path = archived(files, tmp_path)
    path.write_bytes(path.read_bytes().replace(b"blobblob", b"blubblub", 1))
    with pytest.raises(WheelError, match=r"a_ctx_qnn\.bin cannot be read: Bad CRC-32") as raised:
        verified(path)
    assert "a/cpu/a_ctx_qnn.bin differs from its record in the manifest" in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04"])
def test_what_is_no_archive_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "my_app-1-py3-none-any.whl"
    path.write_bytes(content)
    with pytest.raises(InspectionError, match="is damaged, or not a wheel"):
        inspect(path)


def test_a_wheel_that_was_cut_off_is_an_error(files: Files, tmp_path: Path) -> None:
    path = archived(files, tmp_path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InspectionError, match="is damaged, or not a wheel"):
        inspect(path)


def test_files_that_the_build_backend_left_out_are_an_error(files: Files, tmp_path: Path) -> None:
    packed = {name: content for name, content in files.items() if not name.endswith(".bin")}
    with pytest.raises(WheelError) as raised:
        verified(archived(packed, tmp_path))
    (problem,) = raised.value.problems
    assert problem.message == "a/cpu/a_ctx_qnn.bin is in the manifest, but not in the wheel."
    assert problem.hint is not None
    assert "package data" in problem.hint


def test_a_wheel_without_models_is_an_error_that_says_how_they_get_in(
    files: Files, tmp_path: Path
) -> None:
    packed = {name: each for name, each in files.items() if not name.startswith(f"{OUTPUT}/")}
    with pytest.raises(InspectionError, match=r"epcontext export -o DIR"):
        inspect(archived(packed, tmp_path))


def test_a_package_of_another_tool_is_verified_by_record(files: Files, tmp_path: Path) -> None:
    folder = foreign.save(tmp_path / "made", foreign.manifest())
    other = {
        f"my_app/models/{name}": (folder / name).read_bytes()
        for name in ("manifest.json", foreign.MODEL)
    }
    both = archived({**files, **other}, tmp_path)
    assert verified(both) == Verification(files=7, recorded=len(files) + 2, models=2, variants=3)
    del other[f"my_app/models/{foreign.MODEL}"]
    other["my_app/models/det/cpu/other.onnx"] = b""
    with pytest.raises(
        WheelError, match=r"det/cpu/det\.onnx is the model of a variant, and not in"
    ):
        verified(archived({**files, **other}, tmp_path))


def test_another_archive_has_no_record(files: Files, tmp_path: Path) -> None:
    path = repacked(archived(files, tmp_path), INFO).rename(tmp_path / "models.zip")
    assert verified(path) == Verification(files=6, models=1, variants=2)


def verify_built(path: Path, finished: Files, *, read: bool = False) -> int:
    """Verify the wheel ``path``, which should have the package that ``finished`` has."""
    prefix = f"{OUTPUT}/"
    records = {
        name.removeprefix(prefix): FileRecord(len(content), hashlib.sha256(content).hexdigest())
        for name, content in finished.items()
        if name.startswith(prefix)
    }
    return verify_package(path, OUTPUT, records, read=read)


@pytest.mark.parametrize("read", [False, True])
def test_the_package_in_a_valid_wheel_is_verified(
    finished: Files, tmp_path: Path, read: bool
) -> None:
    assert verify_built(archived(finished, tmp_path), finished, read=read) == 6


def test_record_is_enough_unless_all_files_are_to_be_read(finished: Files, tmp_path: Path) -> None:
    path = archived(finished, tmp_path)
    # The size stays, and RECORD has the hash of what was written.
    path.write_bytes(path.read_bytes().replace(b"blobblob", b"blubblub", 1))
    assert verify_built(path, finished) == 6
    with pytest.raises(WheelError, match=r"a_ctx_qnn\.bin differs from its record"):
        verify_built(path, finished, read=True)


@pytest.mark.parametrize(
    "record", ["", "no,csv\n", f"{OUTPUT}/a/cpu/a_ctx.onnx,sha256=***,7\n", "\xff\n"]
)
def test_without_the_hashes_of_record_a_wheel_is_read_or_not_verified(
    finished: Files, tmp_path: Path, record: str
) -> None:
    path = archived(finished, tmp_path, record)
    with pytest.raises(WheelError, match="differs from its record"):
        verify_built(path, finished)
    assert verify_built(path, finished, read=True) == 6


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a/cpu/a_ctx_qnn.bin", None, "is in the manifest, but not in the wheel"),
        ("a/cpu/a_ctx_qnn.bin", b"other", "differs from its record in the manifest"),
        ("a/old/a_ctx.onnx", b"stale", "is in the wheel, but not in the manifest"),
        ("manifest.json", None, "manifest.json is missing"),
        ("manifest.json", b"{}", "manifest.json differs from its record"),
    ],
)
def test_a_package_that_differs_from_what_was_built_is_an_error(
    finished: Files, tmp_path: Path, name: str, content: bytes | None, message: str, read: bool
) -> None:
    packed = {**finished, f"{OUTPUT}/{name}": content or b""}
    if content is None:
        del packed[f"{OUTPUT}/{name}"]
    with pytest.raises(WheelError, match=message) as raised:
        verify_built(archived(packed, tmp_path), finished, read=read)
    (problem,) = raised.value.problems
    assert problem.kind is Kind.INVALID_WHEEL
    assert problem.location == f"my_app-1-py3-none-any.whl: {OUTPUT}"
    # An old file may be only in the folder of setuptools.
    assert ("build/" in (problem.hint or "")) == (content == b"stale")


def test_all_differences_are_reported(files: Files, tmp_path: Path) -> None:
    content = json.loads(files[f"{OUTPUT}/manifest.json"])
    recorded = content["additional_metadata"]["hatch-epcontext"]["files"]
    recorded["gone.bin"] = recorded.pop("a/cpu/a_ctx_qnn.bin")
    recorded["__init__.py"]["sha256"] = "00" * 32
    files[f"{OUTPUT}/manifest.json"] = json.dumps(content).encode()
    with pytest.raises(WheelError) as raised:
        verified(archived(files, tmp_path))
    assert sorted(problem.message for problem in raised.value.problems) == [
        "__init__.py differs from its record in the manifest.",
        "a/cpu/a_ctx_qnn.bin is in the wheel, but not in the manifest.",
        "gone.bin is in the manifest, but not in the wheel.",
    ]


def test_an_invalid_manifest_is_an_error_with_its_place(files: Files, tmp_path: Path) -> None:
    content = json.loads(files[f"{OUTPUT}/manifest.json"])
    content["components"]["a"]["variants"]["cpu"]["variant_directory"] = "a/gone"
    files[f"{OUTPUT}/manifest.json"] = json.dumps(content).encode()
    path = archived(files, tmp_path)
    with pytest.raises(InspectionError) as raised:
        inspect(path)
    (problem,) = raised.value.problems
    assert problem.kind is Kind.INVALID_PACKAGE
    assert problem.location == (f"{path}: {OUTPUT}: components.a.variants.cpu.variant_directory")


def test_a_large_wheel_is_a_warning_with_its_largest_files(
    finished: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = {**finished, **{f"my_app/data/{n}": b"x" * n for n in range(1, 20)}}
    path = archived({**finished, "my_app/large.bin": b"x" * 100_000}, tmp_path)
    assert check_size(path, None) is None
    monkeypatch.setattr(module, "_WARN_AT", 50_000)
    warning = check_size(path, None)
    assert warning is not None
    lines = warning.splitlines()
    assert re.fullmatch(r"my_app-1-py3-none-any.whl has 1\d\d\.\d kB", lines[0])
    assert lines[1] == "  100.0 kB  my_app/large.bin"
    assert lines[-2] == f"  and {len(finished) + 2 - 10} smaller files"
    assert "tool.epcontext.wheel.max-size" in lines[-1]
    # A size below the limit is expected.
    assert check_size(path, 200_000) is None
    with pytest.raises(WheelError, match=r"At most 60\.0 kB are allowed") as raised:
        check_size(path, 60_000)
    assert "my_app/large.bin" in str(raised.value)
    (problem,) = raised.value.problems
    assert (problem.kind, problem.key) == (Kind.LARGE_WHEEL, module._MAX_SIZE)
