from __future__ import annotations

import base64
import hashlib
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hatch_epcontext.errors import InspectionError, Kind, WheelError
from hatch_epcontext.files import FileRecord
from hatch_epcontext.package import finished as module
from hatch_epcontext.package.finished import check_size
from hatch_epcontext.package.finished import verify as verify_built
from hatch_epcontext.tools.inspecting import Verification, inspect, verify
from tests.package.conftest import OUTPUT

RECORD = "my_app-1.dist-info/RECORD"
INFO = "my_app-1.dist-info"

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


def edited(old: str, new: str) -> Callable[[str], str]:
    return lambda record: record.replace(old, new)


ROW = f"{OUTPUT}/a/cpu/a_ctx.onnx,sha256="


@pytest.mark.parametrize(
    "edit",
    [
        edited(ROW, f"{ROW}AAAA"),
        edited(ROW, ROW.replace("sha256", "md5")),
        edited(ROW, f"x{ROW}"),
        lambda _: "",
        lambda _: "no,csv\n",
    ],
)
def test_a_file_with_another_hash_in_record_is_an_error(
    files: Files, tmp_path: Path, edit: Callable[[str], str]
) -> None:
    record = edit(record_of(archived(files, tmp_path)))
    with pytest.raises(InspectionError, match=r"a/cpu/a_ctx\.onnx differs from its record"):
        verified(archived(files, tmp_path, record))


@pytest.mark.parametrize("value", ["A", "\xff"])
def test_a_record_that_cannot_be_read_is_an_error(files: Files, tmp_path: Path, value: str) -> None:
    with pytest.raises(InspectionError, match="RECORD cannot be read: "):
        verified(archived(files, tmp_path, f"{ROW}{value},7\n"))


def test_a_wheel_has_one_record(files: Files, tmp_path: Path) -> None:
    path = archived({**files, "other-1.dist-info/RECORD": b""}, tmp_path)
    with pytest.raises(InspectionError, match="a wheel has one, and this one has 2"):
        verified(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    with pytest.raises(InspectionError, match="a wheel has one, and this one has 0"):
        verified(path)


def test_what_is_no_archive_or_is_cut_off_is_an_error(files: Files, tmp_path: Path) -> None:
    path = archived(files, tmp_path)
    whole = path.read_bytes()
    for content in (b"", b"no archive", b"PK\x03\x04", whole[:-30]):
        path.write_bytes(content)
        with pytest.raises(InspectionError, match="is damaged, or not a wheel"):
            inspect(path)


def test_files_that_the_build_backend_left_out_are_an_error(files: Files, tmp_path: Path) -> None:
    packed = {name: content for name, content in files.items() if not name.endswith(".bin")}
    with pytest.raises(InspectionError) as raised:
        verified(archived(packed, tmp_path))
    (problem,) = raised.value.problems
    assert problem.message == "a/cpu/a_ctx_qnn.bin is not in the wheel."
    assert problem.hint is not None
    assert "package data" in problem.hint


def records(finished: Files) -> dict[str, FileRecord]:
    """The records of the package in a wheel with the files ``finished``."""
    prefix = f"{OUTPUT}/"
    return {
        name.removeprefix(prefix): FileRecord(len(content), hashlib.sha256(content).hexdigest())
        for name, content in finished.items()
        if name.startswith(prefix)
    }


def test_the_package_in_a_valid_wheel_is_verified(files: Files, tmp_path: Path) -> None:
    path = archived(files, tmp_path)
    verify_built(path, OUTPUT, records(files))
    assert verified(path) == Verification(files=6, models=1, variants=2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a/cpu/a_ctx_qnn.bin", None, "is not in the wheel"),
        ("a/cpu/a_ctx_qnn.bin", b"other", "differs from its record in the manifest"),
        ("a/old/a_ctx.onnx", b"stale", "is in the wheel, but not in the manifest"),
        ("manifest.json", None, "manifest.json is not in the wheel"),
        ("manifest.json", b"{}", "manifest.json differs from its record"),
    ],
)
def test_a_package_that_differs_from_what_was_built_is_an_error(
    finished: Files, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    packed = {**finished, f"{OUTPUT}/{name}": content or b""}
    if content is None:
        del packed[f"{OUTPUT}/{name}"]
    with pytest.raises(WheelError, match=message) as raised:
        verify_built(archived(packed, tmp_path), OUTPUT, records(finished))
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
    with pytest.raises(InspectionError) as raised:
        verified(archived(files, tmp_path))
    assert sorted(problem.message for problem in raised.value.problems) == [
        "__init__.py differs from its record in the manifest.",
        "a/cpu/a_ctx_qnn.bin is in the wheel, but not in the manifest.",
        "gone.bin is not in the wheel.",
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
    assert problem.location == f"{path}: {OUTPUT}"
    assert "'a/gone/a_ctx.onnx' is not among its files" in problem.message


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
