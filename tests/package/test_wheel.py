from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from hatch_epcontext.errors import ConfigError, InspectionError, Kind, WheelError
from hatch_epcontext.files import FileRecord
from hatch_epcontext.jobs.requirements import oldest_releases
from hatch_epcontext.package import wheel
from hatch_epcontext.tools.inspecting import inspect, verify
from tests.conftest import needs_qnn
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
    files = tree("my_app/__init__.py", path)
    with pytest.raises(ConfigError, match="the project has files of its own"):
        wheel.check_collisions(OUTPUT, files, frozenset())
    # Those of an earlier editable install are replaced.
    wheel.check_collisions(OUTPUT, files, frozenset({path}))
    with pytest.raises(ConfigError, match='output = "my_app/epcontext"'):
        wheel.check_collisions(PurePosixPath("my_app"), files, frozenset({path}))


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
    toml = TOML + 'wheel.tag = "py3-none-win_arm64"'
    assert wheel.tag(configured(project, toml)) == "py3-none-win_arm64"


def repeated(project: Path, tree: dict[str, Path], toml: str, folder: Path) -> str | None:
    """The warning about models that are also package data."""
    result = compiled(configured(project, toml), folder)
    return wheel.repeated_models(result, tree, "hatchling", project)


@pytest.mark.parametrize(
    ("backend", "files", "advice"),
    [
        (
            "setuptools.build_meta",
            (),
            'exclude-package-data = { "*" = ["a.onnx", "m/a.onnx"] } in [tool.set',
        ),
        (
            "setuptools.build_meta:__legacy__",
            ("setup.py",),
            "exclude_package_data={'': ['a.onnx', 'm/a.onnx']}",
        ),
        (
            "setuptools.build_meta",
            ("setup.cfg",),
            "* = a.onnx, m/a.onnx below [options.exclude_package_data]",
        ),
        ("poetry.core.masonry.api", (), 'exclude = ["src/app/m/a.onnx"] in [tool.poetry]'),
        ("pdm.backend", (), 'excludes = ["src/app/m/a.onnx"] in [tool.pdm.build]'),
        ("uv_build", (), 'wheel-exclude = ["a.onnx"] in [tool.uv.build-backend]'),
        ("flit_core.buildapi", (), "move them out of the import package"),
        (
            "maturin",
            (),
            'exclude = [{ path = "src/app/m/a.onnx", format = "wheel" }] in [tool.maturin]',
        ),
        (
            "scikit_build_core.build",
            (),
            'wheel.exclude = ["app/m/a.onnx"] in [tool.scikit-build]',
        ),
        ("mesonpy", (), "remove them from what meson.build installs"),
        ("my_backend", (), "where your build back end adds them"),
    ],
)
def test_each_back_end_leaves_models_out_in_its_own_way(
    project: Path, backend: str, files: tuple[str, ...], advice: str
) -> None:
    for name in files:
        (project / name).touch()
    tree = {"app/m/a.onnx": project / "src" / "app" / "m" / "a.onnx"}
    assert wheel.excluding(backend, project, tree).startswith(advice)


def test_a_model_that_is_also_package_data_is_a_warning(project: Path, tmp_path: Path) -> None:
    tree = {
        "my_app/__init__.py": project / "my_app" / "__init__.py",
        "my_app/models/a.onnx": project / "models" / "a.onnx",
    }
    message = repeated(project, tree, TOML, tmp_path / "one")
    assert message is not None
    assert message.startswith(
        "models are in the wheel as package data, beside what is shipped of them: my_app/models/a.onnx "
        "(7 bytes). If the app opens them only through the loader, leave them out: exclude = "
        '["models/a.onnx"] in [tool.hatch.build.targets.wheel]'
    )
    other = TOML.replace("a.onnx", "b.onnx")
    assert repeated(project, tree, other, tmp_path / "two") is None


@pytest.mark.parametrize(
    ("dependency", "fits"),
    [
        ("onnxruntime-ep-nv-tensorrt-rtx-cu13", True),
        ("onnxruntime-ep-nv-tensorrt-rtx-cu13>=0.5", True),
        ("onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.0rc1", True),
        ("onnxruntime_ep_nv_tensorrt_rtx_cu12==0.5.3", True),
        ("onnxruntime-ep-nv-tensorrt-rtx-cu13>=0.6", False),
        ("onnxruntime-ep-nv-tensorrt-rtx-cu12<0.5; sys_platform == 'win32'", False),
        ("onnxruntime-qnn<1", True),
    ],
)
def test_the_app_needs_an_ep_that_runs_what_the_library_compiles(
    project: Path, installed: dict[str, str], dependency: str, fits: bool
) -> None:
    keys = 'provider = "tensorrt-rtx"\nchip = "rtx-40"'
    toml = f'models = ["models/a.onnx"]\n[targets.rtx]\n{keys}'
    target = configured(project, toml).targets[0]
    # Of a release without a known EP nothing is known.
    for version in ("", "9.1.2"):
        installed |= {"tensorrt-rtx-cu13-bindings": version} if version else {}
        wheel.check_app([target], [dependency])
    installed["tensorrt-rtx-cu13-bindings"] = "1.7.1.116"
    if fits:
        wheel.check_app([target], ["numpy", dependency])
        return
    with pytest.raises(ConfigError) as raised:
        wheel.check_app([target], ["numpy", dependency])
    (problem,) = raised.value.problems
    assert (problem.kind, problem.key) == (Kind.CONFLICTING_REQUIREMENTS, target.key)


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


def verified(path: Path) -> int:
    return verify(path, inspect(path))


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
    assert not [*wheel.differences(path, OUTPUT, records(files))]
    assert verified(path) == 9


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
        WheelError.check(wheel.differences(archived(packed, tmp_path), OUTPUT, records(finished)))
    (problem,) = raised.value.problems
    assert problem.kind is Kind.INVALID_WHEEL
    assert problem.location == f"my_app-1-py3-none-any.whl: {OUTPUT}"
    # An old file may be only in the folder of setuptools.
    assert ("build/" in (problem.hint or "")) == (content == b"stale")


def test_a_large_wheel_is_a_warning(
    finished: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = archived({**finished, "my_app/large.bin": b"x" * 100_000}, tmp_path)
    assert wheel.check_size(path) is None
    monkeypatch.setattr(wheel, "MAX_SIZE", 50_000)
    warning = wheel.check_size(path)
    assert warning is not None
    assert re.match(r"my_app-1-py3-none-any.whl has 1\d\d\.\d kB\. ", warning)


@pytest.mark.parametrize(
    ("dependencies", "python", "written"),
    [
        (["onnxruntime>=1.16"], ">=3.10", ["onnxruntime>=1."]),
        (
            ["onnxruntime-gpu==1.18.*", "onnxruntime; python_version < '3.10'"],
            ">=3.10",
            ["onnxruntime-gpu>=1."],
        ),
        (["onnxruntime>=1.30", "onnxruntime; extra == 'cpu'"], ">=3.11", []),
        (["numpy", "onnxruntime; extra == 'cpu'"], ">=3.11", ["onnxruntime>=1."]),
        (
            ["onnxruntime>=1.30; python_version >= '3.11'", "onnxruntime; python_version < '3.11'"],
            ">=3.10",
            [],
        ),
        (["onnxruntime>=1.30", "onnxruntime_qnn>=2.3"], ">=3.11", ["onnxruntime_qnn>=2.7"]),
        (["onnxruntime>=1.30", "onnxruntime-qnn>=2.7"], ">=3.11", []),
        (["onnxruntime>=1.30", "onnxruntime-qnn~=2.8", "onnxruntime-ep-openvino"], ">=3.11", []),
        (
            ["onnxruntime>=1.30", "onnxruntime-qnn; extra == 'npu'"],
            ">=3.11",
            ["onnxruntime-qnn>=2.7"],
        ),
        (["onnxruntime-qnn==1.9.0; python_version < '3.11'"], ">=3.10", []),
        (["onnxruntime>=1.30"], ">=3.6", ['requires-python = ">=3.10"']),
        (["onnxruntime>=1.30"], "", ['requires-python = ">=3.10"']),
        (["onnxruntime>=1.30"], None, []),
    ],
)
def test_bounds_that_allow_what_opens_nothing_are_lines_with_what_to_write(
    project: Path, dependencies: list[str], python: str | None, written: list[str]
) -> None:
    toml = 'models = ["models/a.onnx"]\ntargets.npu = { provider = "qnn", chip = "qcs9100" }'
    targets = configured(project, toml).targets
    lines = list(wheel.loose_bounds(targets, dependencies, python))
    assert len(lines) == len(written)
    assert all(f"Write: {text}" in line for line, text in zip(lines, written, strict=True))


@needs_qnn
def test_a_bound_is_for_the_targets_that_it_misses(project: Path) -> None:
    toml = 'models = ["models/a.onnx"]\n[targets]\nnpu = { provider = "qnn", chip = "qcs9100" }\n'
    targets = configured(project, f'{toml}rtx = {{ provider = "tensorrt-rtx" }}').targets
    bounds = {target.name: oldest_releases(target)["onnxruntime"] for target in targets}
    low, high = sorted(bounds, key=lambda name: bounds[name])
    assert bounds[low] != bounds[high], bounds
    (line,) = wheel.loose_bounds(targets, [f"onnxruntime>={bounds[low]}"], None)
    assert f"is compiled for {high}: " in line
    assert line.endswith(f"Write: onnxruntime>={bounds[high]}")


@needs_qnn
@pytest.mark.parametrize(
    ("version", "dependency", "bound"),
    [
        ("2.8.1", "onnxruntime-qnn>=2.7", "2.8"),
        ("2.8.1", "onnxruntime-qnn>=2.8", None),
        ("2.8.0rc1", "onnxruntime-qnn>=2.7", "2.8.0rc1"),
        ("3.0.0", "onnxruntime-qnn>=2.7", "3.0"),
        ("2.7.0", "onnxruntime-qnn>=2.7", None),
    ],
)
def test_the_release_of_the_ep_that_compiles_is_the_oldest_that_opens(
    project: Path, installed: dict[str, str], version: str, dependency: str, bound: str | None
) -> None:
    toml = 'models = ["models/a.onnx"]\ntargets.npu = { provider = "qnn", chip = "qcs9100" }'
    targets = configured(project, toml).targets
    installed["onnxruntime-qnn"] = version
    lines = list(wheel.loose_bounds(targets, [dependency], None))
    assert [line.partition("Write: ")[2] for line in lines] == (
        [f"onnxruntime-qnn>={bound}"] if bound else []
    )


def test_packages_of_the_ep_for_other_versions_of_cuda_have_its_bound(project: Path) -> None:
    toml = 'models = ["models/a.onnx"]\n[targets.rtx]\nprovider = "tensorrt-rtx"\nchip = "rtx-40"'
    targets = configured(project, toml).targets
    (line,) = wheel.loose_bounds(targets, ["onnxruntime-ep-nv-tensorrt-rtx-cu12"], None)
    assert line.endswith("Write: onnxruntime-ep-nv-tensorrt-rtx-cu12>=0.5")


def test_requirements_of_the_users_own_may_be_for_an_older_python(project: Path) -> None:
    own = 'targets.npu = { provider = "qnn", chip = "qcs9100", requirements = ["my-ep"] }'
    targets = configured(project, f'models = ["models/a.onnx"]\n{own}').targets
    dependency = "onnxruntime>=1.16; python_version < '3.11'"
    (line,) = wheel.loose_bounds(targets, [dependency], None)
    assert "is compiled for npu: " in line


def test_optimized_graphs_for_the_cpu_have_no_bound(project: Path) -> None:
    targets = configured(project).targets
    assert not list(wheel.loose_bounds(targets, ["onnxruntime>=1.16"], ">=3.10"))
