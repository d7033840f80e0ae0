from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from hatch_epcontext.errors import ConfigError, Kind, Problem, WheelError
from hatch_epcontext.files import FileRecord, record_file
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.package import wheel
from tests.package import foreign
from tests.package.conftest import OUTPUT
from tests.results import TOML, compiled, configured


def tree(*paths: str) -> dict[str, Path]:
    return {path: Path("/project") / path for path in paths}


@pytest.mark.parametrize(
    ("paths", "output"),
    [
        (["my_app/__init__.py", "my_app/sub/__init__.py"], "my_app/epcontext"),
        (["ns/my_app/__init__.py", "ns/my_app/x.py"], "ns/my_app/epcontext"),
    ],
)
def test_the_default_output_is_inside_the_apps_package(paths: list[str], output: str) -> None:
    assert wheel.output_folder(None, tree(*paths)) == PurePosixPath(output)


def test_the_output_can_be_configured() -> None:
    assert wheel.output_folder(PurePosixPath("other/models"), {}) == PurePosixPath("other/models")


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "no import package"),
        (["a/__init__.py", "b/__init__.py"], r"several import packages \(a and b\)"),
        (["module.py"], "no import package"),
    ],
)
def test_without_a_single_import_package_the_output_is_required(
    paths: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"the wheel has {message}") as raised:
        wheel.output_folder(None, tree(*paths))
    assert [problem.key for problem in raised.value.problems] == [wheel.OUTPUT]


@pytest.mark.parametrize(
    "path", ["my_app/epcontext/x.py", "my_app/epcontext/a/npu/x.onnx", "my_app/epcontext.py"]
)
def test_files_of_the_project_are_not_overwritten(path: str) -> None:
    with pytest.raises(ConfigError, match="the project has files of its own"):
        wheel.check_collisions(OUTPUT, tree("my_app/__init__.py", path), frozenset())


def test_files_of_an_editable_install_are_no_collision() -> None:
    path = "my_app/epcontext/__init__.py"
    wheel.check_collisions(OUTPUT, tree("my_app/__init__.py", path), frozenset({path}))


def test_many_files_of_the_project_are_not_all_listed() -> None:
    names = [f"my_app/epcontext/{name}" for name in "abcdefgh"]
    with pytest.raises(ConfigError, match=r"epcontext/d, my_app/epcontext/e and 3 more\."):
        wheel.check_collisions(OUTPUT, tree(*names), frozenset())


def test_the_output_cannot_be_a_whole_package() -> None:
    with pytest.raises(ConfigError, match='output = "my_app/epcontext"'):
        wheel.check_collisions(PurePosixPath("my_app"), tree("my_app/__init__.py"), frozenset())


TARGETS = """
models = ["models/a.onnx"]
[targets.one]
provider = "cpu"
platforms = {one}
[targets.two]
provider = "cpu"
platforms = {two}
"""


@pytest.mark.parametrize(
    ("one", "two", "tag"),
    [
        (["win_arm64"], ["linux_aarch64", "win_arm64"], "py3-none-linux_aarch64.win_arm64"),
        (["win_arm64"], [], None),
        (["win_arm64"], ["any"], None),
        ([], [], None),
    ],
)
def test_the_tag_has_the_platforms_of_the_targets(
    project: Path, one: list[str], two: list[str], tag: str | None
) -> None:
    toml = TARGETS.format(one=one, two=two)
    assert wheel.tag(configured(project, toml)) == tag


@pytest.mark.parametrize(
    ("setting", "tag"), [("any", "py3-none-any"), ("py3-none-win_arm64", "py3-none-win_arm64")]
)
def test_the_tag_can_be_configured(project: Path, setting: str, tag: str) -> None:
    assert wheel.tag(configured(project, TOML + f'wheel.tag = "{setting}"')) == tag


RECORD = "my_app-1.dist-info/RECORD"


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


def verify_record(path: Path, finished: dict[str, bytes]) -> int:
    """Verify the wheel ``path``, which should have the package that ``finished`` has."""
    prefix = f"{OUTPUT}/"
    records = {
        name.removeprefix(prefix): FileRecord(len(content), hashlib.sha256(content).hexdigest())
        for name, content in finished.items()
        if name.startswith(prefix)
    }
    return wheel.verify_record(path, OUTPUT, records)


def test_a_valid_wheel_is_verified(finished: dict[str, bytes], tmp_path: Path) -> None:
    path = archived(finished, tmp_path)
    assert wheel.verify(path, OUTPUT) == verify_record(path, finished) == 6


def test_record_is_enough_unless_all_files_are_to_be_read(
    finished: dict[str, bytes], tmp_path: Path
) -> None:
    path = archived(finished, tmp_path)
    # The size stays, and RECORD has the hash of what was written.
    path.write_bytes(path.read_bytes().replace(b"blobblob", b"blubblub", 1))
    assert verify_record(path, finished) == 6
    with pytest.raises(WheelError, match=r"a_ctx_qnn\.bin differs from its record"):
        wheel.verify(path, OUTPUT)


@pytest.mark.parametrize(
    "record", ["", "no,csv\n", f"{OUTPUT}/a/cpu/a_ctx.onnx,sha256=***,7\n", "\xff\n"]
)
def test_without_the_hashes_of_record_a_wheel_is_not_verified(
    finished: dict[str, bytes], tmp_path: Path, record: str
) -> None:
    with pytest.raises(WheelError, match="differs from its record"):
        verify_record(archived(finished, tmp_path, record), finished)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a/cpu/a_ctx_qnn.bin", None, "is in the manifest, but not in the wheel"),
        ("a/cpu/a_ctx_qnn.bin", b"other", "differs from its record in the manifest"),
        ("a/old/a_ctx.onnx", b"stale", "is in the wheel, but not in the manifest"),
        ("manifest.json", None, "manifest.json is missing"),
    ],
)
def test_a_wheel_that_differs_from_its_manifest_is_an_error(
    finished: dict[str, bytes], tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    packed = dict(finished)
    finished[f"{OUTPUT}/{name}"] = content or b""
    if content is None:
        del finished[f"{OUTPUT}/{name}"]
    with pytest.raises(WheelError, match=message) as raised:
        wheel.verify(archived(finished, tmp_path), OUTPUT)
    assert [problem.kind for problem in raised.value.problems] == [Kind.INVALID_WHEEL]
    with pytest.raises(WheelError, match=message) as raised:
        verify_record(archived(finished, tmp_path), packed)
    assert [problem.kind for problem in raised.value.problems] == [Kind.INVALID_WHEEL]


def verify_with(manifest: Any, finished: dict[str, bytes], folder: Path) -> list[Problem]:
    """The problems of a wheel with another manifest."""
    finished[f"{OUTPUT}/manifest.json"] = json.dumps(manifest).encode()
    with pytest.raises(WheelError) as raised:
        wheel.verify(archived(finished, folder), OUTPUT)
    return list(raised.value.problems)


def test_all_differences_are_reported(finished: dict[str, bytes], tmp_path: Path) -> None:
    content = json.loads(finished[f"{OUTPUT}/manifest.json"])
    files = content["additional_metadata"]["hatch-epcontext"]["files"]
    files["gone.bin"] = files.pop("a/cpu/a_ctx_qnn.bin")
    files["__init__.py"]["sha256"] = "00" * 32
    problems = verify_with(content, finished, tmp_path)
    assert sorted(problem.message for problem in problems) == [
        "__init__.py differs from its record in the manifest.",
        "a/cpu/a_ctx_qnn.bin is in the wheel, but not in the manifest.",
        "gone.bin is in the manifest, but not in the wheel.",
    ]
    location = f"my_app-1-py3-none-any.whl: {OUTPUT}"
    assert {problem.location for problem in problems} == {location}


def test_an_invalid_manifest_is_an_error_with_its_place(
    finished: dict[str, bytes], tmp_path: Path
) -> None:
    content = json.loads(finished[f"{OUTPUT}/manifest.json"])
    content["components"]["a"]["variants"]["cpu"]["variant_directory"] = "a/gone"
    (problem,) = verify_with(content, finished, tmp_path)
    assert problem.kind is Kind.INVALID_PACKAGE
    assert problem.location == (
        f"my_app-1-py3-none-any.whl: {OUTPUT}: components.a.variants.cpu.variant_directory"
    )


@pytest.mark.parametrize(
    "manifest", [None, foreign.manifest(foreign.put("components", det={"variants": {}}))]
)
def test_a_package_of_another_tool_cannot_be_verified_in_a_wheel(
    manifest: Any, finished: dict[str, bytes], tmp_path: Path
) -> None:
    (problem,) = verify_with(manifest, finished, tmp_path)
    assert problem.kind in (Kind.INVALID_WHEEL, Kind.INVALID_PACKAGE)


def test_a_large_wheel_is_a_warning_with_its_largest_files(
    finished: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = {**finished, **{f"my_app/data/{n}": b"x" * n for n in range(1, 20)}}
    path = archived({**finished, "my_app/large.bin": b"x" * 100_000}, tmp_path)
    assert wheel.check_size(path, None) is None
    monkeypatch.setattr(wheel, "_WARN_AT", 50_000)
    warning = wheel.check_size(path, None)
    assert warning is not None
    lines = warning.splitlines()
    assert re.fullmatch(r"my_app-1-py3-none-any.whl has 1\d\d\.\d kB", lines[0])
    assert lines[1] == "  100.0 kB  my_app/large.bin"
    assert lines[-2] == f"  and {len(finished) + 2 - 10} smaller files"
    assert "tool.epcontext.wheel.max-size" in lines[-1]
    # A size below the limit is expected.
    assert wheel.check_size(path, 200_000) is None
    with pytest.raises(WheelError, match=r"At most 60\.0 kB are allowed") as raised:
        wheel.check_size(path, 60_000)
    assert "my_app/large.bin" in str(raised.value)
    (problem,) = raised.value.problems
    assert (problem.kind, problem.key) == (Kind.LARGE_WHEEL, wheel._MAX_SIZE)


def repeated(project: Path, tree: dict[str, Path], toml: str, folder: Path) -> list[str]:
    """The warnings about models that are also package data."""
    result = compiled(configured(project, toml), folder)
    shipped = [source.model.name for source in result.sources]
    return list(wheel.repeated_models(result, shipped, tree, tree, project))


def test_a_model_that_is_also_package_data_is_a_warning(project: Path, tmp_path: Path) -> None:
    tree = {
        "my_app/__init__.py": project / "my_app" / "__init__.py",
        "my_app/models/a.onnx": project / "models" / "a.onnx",
    }
    (message,) = repeated(project, tree, TOML, tmp_path / "one")
    assert message == (
        "my_app/models/a.onnx (7 bytes) is in the wheel as package data, and again as the source of the "
        'model a. Exclude it (exclude = ["models/a.onnx"] in [tool.hatch.build.targets.wheel]), or set '
        'fallback = "none" for that model.'
    )
    # A file with the same size and other contents is no copy, and a copy counts wherever it is.
    assert repeated(project, tree, TOML.replace("a.onnx", "b.onnx"), tmp_path / "two") == []
    copy = project / "my_app" / "copy.onnx"
    copy.write_bytes(b"model b")
    (message,) = repeated(
        project, {"x/c.onnx": copy}, TOML.replace("a.onnx", "b.onnx"), tmp_path / "three"
    )
    assert 'exclude = ["my_app/copy.onnx"]' in message


def test_package_data_beside_compiled_models_is_a_warning(project: Path, tmp_path: Path) -> None:
    (project / "models" / "w.bin").write_bytes(b"many weights")
    result = compiled(configured(project), tmp_path / "artifacts")
    (source,) = result.sources
    records = {**source.records, "w.bin": record_file(project / "models" / "w.bin")}
    result = Result((dataclasses.replace(source, records=records),), result.built)
    tree = {"my_app/w.bin": project / "models" / "w.bin"}
    (message,) = wheel.repeated_models(result, (), tree, tree, project)
    assert message.startswith(
        "my_app/w.bin (12 bytes) is in the wheel as package data, beside the compiled models of a."
    )
    assert "if the app opens it only through the loader" in message
