"""Wheels, sdists and editable installs of other build back ends, with the models in them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.tags import parse_tag
from pyproject_hooks import BuildBackendHookCaller

from hatch_epcontext import backend
from hatch_epcontext.files import replacing
from tests.conftest import needs_qnn
from tests.integration.conftest import environment_without, make_environment
from tests.models import network, save

BACKENDS = {
    "setuptools.build_meta": "my_app",
    "poetry.core.masonry.api": "src/my_app",
    "flit_core.buildapi": "my_app",
    "uv_build": "src/my_app",
    "pdm.backend": "src/my_app",
    "scikit_build_core.build": "src/my_app",
}
"""The tested back ends, each with the folder of the app's import package."""

PROJECT = """
[build-system]
requires = ["hatch-epcontext"]
build-backend = "hatch_epcontext.backend"

[project]
name = "my-app"
version = "1.0"
description = "Opens a model."
requires-python = ">=3.10"
dependencies = ["onnxruntime"]

[tool.setuptools.packages.find]
include = ["my_app*"]

[tool.scikit-build]
wheel.cmake = false

[tool.epcontext]
output = "my_app/epcontext"
targets.cpu.provider = "cpu"
models = [{ path = "models/a.onnx", dims = { batch = 1 } }]

[tool.epcontext.build]
"""

IN_TREE = """
import zipfile, pathlib

TAG = "py3-none-manylinux_2_17_x86_64"
MORE = {}

class Backend:
    def build_wheel(self, folder, config_settings=None, metadata_directory=None):
        name = f"my_app-1.0-{TAG}.whl"
        files = {
            "my_app/__init__.py": "",
            "my_app-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: my-app\\nVersion: 1.0\\n",
            "my_app-1.0.dist-info/WHEEL": f"Wheel-Version: 1.0\\nTag: {TAG}\\n",
            "my_app-1.0.dist-info/RECORD": "",
            **MORE,
        }
        with zipfile.ZipFile(pathlib.Path(folder, name), "w") as archive:
            for path, text in files.items():
                # A path alone gets the time in SOURCE_DATE_EPOCH, from Python 3.14 on.
                archive.writestr(zipfile.ZipInfo(path), text)
        return name

    def build_sdist(self, folder, config_settings=None):
        raise OSError("this back end makes no sdists")

backend = Backend()
"""
"""A back end in the project's own folder ``tools``, an object, which makes wheels for Linux."""

PLATFORMS = 'targets.cpu.platforms = ["win_amd64", "win_arm64"]'

SIGNED = IN_TREE.replace("MORE = {}", 'MORE = {"my_app-1.0.dist-info/RECORD.jws": ""}')


def make_project(folder: Path, name: str, package: str = "my_app", more: str = "") -> Path:
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text('"""An app."""\n', encoding="utf-8")
    save(network(), folder / "models" / "a.onnx")
    text = f'{PROJECT}backend = "{name}"\n{more}'
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def make_in_tree(folder: Path, text: str, more: str = "") -> Path:
    project = make_project(folder, "in_tree:backend", more=f'backend-path = ["tools"]\n{more}')
    (project / "tools").mkdir()
    (project / "tools" / "in_tree.py").write_text(text, encoding="utf-8")
    return project


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all back ends: their models are the same."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def variables(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    # uv_build calls its program by its name.
    scripts = sysconfig.get_path("scripts")
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HATCH_EPCONTEXT_CACHE_DIR", str(cache))
    monkeypatch.delitem(sys.modules, "in_tree", raising=False)


def call(project: Path, hook: str, folder: Path, name: str = "hatch_epcontext.backend") -> Path:
    """What the ``hook`` of the back end ``name`` makes in ``folder``, in a process of its own."""
    hooks = BuildBackendHookCaller(str(project), name)
    return Path(folder, getattr(hooks, hook)(str(folder)))


def build_here(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel of ``project``, built in this process, in a quarter of the time."""
    monkeypatch.chdir(project)
    (project / "dist").mkdir()
    return project / "dist" / backend.build_wheel(str(project / "dist"))


def contents(wheel: Path) -> dict[str, tuple[bytes, int, tuple[int, ...]]]:
    with zipfile.ZipFile(wheel) as archive:
        return {
            info.filename: (archive.read(info), info.external_attr, info.date_time)
            for info in archive.infolist()
        }


@pytest.mark.slow
# setuptools warns of folders that have the package's name.
@pytest.mark.filterwarnings("ignore:Editable installation")
@pytest.mark.parametrize(("name", "package"), BACKENDS.items())
def test_editable_installs_sdists_and_wheels_have_the_models(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(tmp_path / "my-app", name, package)
    editable = call(project, "build_editable", tmp_path)
    env = environment_without("PYTHON", "VIRTUAL_ENV")
    installed = make_environment(tmp_path / "venv", env)
    installed.install("--no-deps", editable)
    assert (
        installed.python("-c", "from my_app.epcontext import models; print(models())") == "['a']\n"
    )

    # What it wrote is in neither archive, and a wheel has a package of its own.
    (tmp_path / "dist").mkdir()
    sdist = call(project, "build_sdist", tmp_path / "dist")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert "my_app-1.0/models/a.onnx" in names
    assert [path for path in names if path.endswith("manifest.json")] == []
    built = contents(call(project, "build_wheel", tmp_path / "dist"))
    assert b'"installed"' not in built["my_app/epcontext/manifest.json"][0]
    assert "my_app/epcontext/.gitignore" not in built

    unpacked = tmp_path / "unpacked" / "my_app-1.0"
    wheel = call(unpacked, "build_wheel", tmp_path)
    with_models = contents(wheel)
    # In the same order, with the same times; uv_build also lists folders.
    files, own_files = (
        [file for file in files.items() if not file[0].endswith("/")]
        for files in (with_models, built)
    )
    assert files == own_files
    # Other processes that collect tests need not import it.
    from check_wheel_contents.__main__ import main as check_contents

    checked = CliRunner().invoke(check_contents, ["--no-config", str(wheel)])
    assert checked.exit_code == 0, checked.output
    plain = contents(call(unpacked, "build_wheel", tmp_path, name))
    changed = {path for path in plain if with_models[path] != plain[path]}
    assert changed == {"my_app-1.0.dist-info/RECORD"}
    assert set(with_models.keys() - plain.keys()) == {
        f"my_app/epcontext/{path}"
        for path in (
            "__init__.py",
            "_check.py",
            "_runner.py",
            "_user_cache.py",
            "manifest.json",
            "a/cpu/a_optimized.onnx",
        )
    }

    monkeypatch.setenv("HATCH_EPCONTEXT_SKIP", "1")
    skipped = contents(call(project, "build_wheel", tmp_path))
    # uv_build also lists folders.
    assert [path for path in skipped if path.startswith("my_app/epcontext/")] in (
        [],
        ["my_app/epcontext/"],
    )


@needs_qnn
def test_the_targets_need_packages_too(tmp_path: Path) -> None:
    project = make_project(tmp_path, "flit_core.buildapi")
    with (project / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write('[tool.epcontext.targets.npu]\nprovider = "qnn"\n')
    hooks = BuildBackendHookCaller(str(project), "hatch_epcontext.backend")
    assert "onnxruntime-qnn>=2.7" in hooks.get_requires_for_build_wheel()
    # It opens the source models.
    editable = hooks.get_requires_for_build_editable()
    assert [name for name in editable if name.startswith("onnxruntime")] == ["onnxruntime>=1.23"]
    metadata = hooks.prepare_metadata_for_build_wheel(str(tmp_path))
    assert (tmp_path / metadata / "METADATA").is_file()


def test_targets_of_companions_are_left_out_with_their_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = """[project.optional-dependencies]
    npu = ["my-app-models-npu==2"]
    [tool.epcontext.targets.npu]
    provider = "qnn"
    companion = "my-app-models-npu"
    """
    project = make_project(tmp_path, "flit_core.buildapi", more=more)
    hooks = BuildBackendHookCaller(str(project), "hatch_epcontext.backend")
    assert "onnxruntime-qnn" not in " ".join(hooks.get_requires_for_build_wheel())
    packed = contents(build_here(project, monkeypatch))
    manifest = json.loads(packed["my_app/epcontext/manifest.json"][0])
    about = manifest["additional_metadata"]["hatch-epcontext"]
    assert about["companions"] == {"my_app_models_npu": "my-app[npu]"}
    component = manifest["components"]["a"]
    modules = component["additional_metadata"]["hatch-epcontext"]["modules"]
    assert list(component["variants"]) == ["cpu"]
    assert modules == {"cpu": "", "npu": "my_app_models_npu", "source": ""}


def test_platforms_name_a_wheel_that_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(tmp_path, "flit_core.buildapi")
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    text = text.replace(
        "\nmodels =", '\ntargets.cpu.platforms = ["win_amd64", "win_arm64"]\nmodels ='
    )
    (project / "pyproject.toml").write_text(text, encoding="utf-8")
    wheel = build_here(project, monkeypatch)
    assert wheel.name == "my_app-1.0-py3-none-win_amd64.win_arm64.whl"
    text = contents(wheel)["my_app-1.0.dist-info/WHEEL"][0].decode()
    assert Parser().parsestr(text).get_all("Tag") == ["py3-none-win_amd64", "py3-none-win_arm64"]


@pytest.mark.parametrize(
    ("tag", "platform"),
    [
        ("py3-none-manylinux_2_17_x86_64", "linux_x86_64"),
        ("py3-none-macosx_11_0_universal2", "macosx_14_0_arm64"),
    ],
)
def test_a_platform_wheel_keeps_its_tag(
    tag: str, platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    text = IN_TREE.replace("py3-none-manylinux_2_17_x86_64", tag)
    project = make_in_tree(
        tmp_path,
        text,
        f'[tool.epcontext.targets.npu]\nprovider = "cpu"\nplatforms = ["{platform}"]\n',
    )
    wheel = build_here(project, monkeypatch)
    assert wheel.name == f"my_app-1.0-{tag}.whl"
    # The earliest time of a zip file.
    assert contents(wheel)["my_app/epcontext/manifest.json"][2] == (1980, 1, 1, 0, 0, 0)


@pytest.mark.parametrize("time", ["today", "", "1.5", "-1", "4294967296", "9" * 5000])
def test_a_time_that_archives_do_not_have_is_an_error_before_anything_is_built(
    time: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = make_in_tree(tmp_path, "raise SystemExit('called')")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", time)
    text = fails(project, monkeypatch, capsys)
    assert "SOURCE_DATE_EPOCH: EPC020\n    must be a number of seconds since 1970, at most" in text
    with pytest.raises(SystemExit):
        backend.build_sdist(str(tmp_path))
    assert "SOURCE_DATE_EPOCH: EPC020" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tag", "more", "name"),
    [
        ("py2.py3-none-any", 'wheel.tag = "py3-none-win_arm64"', "py3-none-win_arm64"),
        ("py2.py3-none-any", PLATFORMS, "py3-none-win_amd64.win_arm64"),
        ("cp311.cp312-none-any", PLATFORMS, "cp311.cp312-none-win_amd64.win_arm64"),
        ("py3-none-any.win_arm64", PLATFORMS, "py3-none-win_amd64.win_arm64"),
        ("cp311-abi3-any", PLATFORMS, "cp311-abi3-win_amd64.win_arm64"),
        ("2-py3-none-any", PLATFORMS, "2-py3-none-win_amd64.win_arm64"),
        ("py2.py3-none-any", "", "py2.py3-none-any"),
        ("cp311-cp311-linux_x86_64", 'wheel.tag = "py3-none-win_arm64"', None),
    ],
)
def test_a_wheel_for_all_platforms_gets_the_tag_and_others_keep_theirs_with_a_warning(
    tag: str,
    more: str,
    name: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = r"\n".join(f"Tag: {name}" for name in parse_tags(tag))
    text = IN_TREE.replace("py3-none-manylinux_2_17_x86_64", tag)
    project = make_in_tree(tmp_path, text.replace("Tag: {TAG}", lines))
    toml = (project / "pyproject.toml").read_text(encoding="utf-8")
    toml = toml.replace("\nmodels =", f"\n{more}\nmodels =")
    (project / "pyproject.toml").write_text(toml, encoding="utf-8")
    wheel = build_here(project, monkeypatch)
    assert wheel.name == f"my_app-1.0-{name or tag}.whl"
    about = contents(wheel)["my_app-1.0.dist-info/WHEEL"][0].decode()
    assert {*Parser().parsestr(about).get_all("Tag", [])} == {*parse_tags(wheel.stem[11:])}
    warning = "the wheel's tag stays that of my_app-1.0-cp311-cp311-linux_x86_64.whl: wheel.tag"
    assert (warning in capsys.readouterr().err) == (name is None)


def parse_tags(tags: str) -> set[str]:
    return {str(tag) for tag in parse_tag(tags.removeprefix("2-"))}


def fails(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """The message of a wheel's build that fails, and leaves nothing."""
    monkeypatch.chdir(project)
    (project / "dist").mkdir()
    with pytest.raises(SystemExit):
        backend.build_wheel(str(project / "dist"))
    assert list((project / "dist").iterdir()) == []
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (SIGNED, "", "it has RECORD.jws, and a signature fits no changed wheel"),
        (
            IN_TREE,
            '[tool.epcontext.targets.npu]\nprovider = "cpu"\nplatforms = ["win_arm64"]\n',
            "targets.npu.platforms: EPC006\n    has no platform of the wheel",
        ),
        ("import missing_module", "", "cannot be imported (No module named 'missing_module')"),
    ],
    ids=["a signed wheel", "other platforms", "a back end that is not installed"],
)
def test_what_the_wrapped_back_end_makes_is_checked(
    text: str,
    more: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project = make_in_tree(tmp_path / "my-app", text, more)
    assert message in fails(project, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "tool.epcontext.build.backend: EPC004\n    is required"),
        ('backend = "hatchling.build"', "names hatchling, which has hooks"),
        ('backend = "no such"', "build.backend: EPC005\n    must be a module"),
        (
            'backend = "a"\nbackend-path = ["../b"]',
            "build.backend-path[0]: EPC005\n    must be a folder",
        ),
    ],
)
def test_an_invalid_back_end_is_an_error(
    line: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project = make_project(tmp_path / "my-app", "")
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    (project / "pyproject.toml").write_text(text.replace('backend = ""', line), encoding="utf-8")
    assert message in fails(project, monkeypatch, capsys)


def test_an_editable_install_needs_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = make_project(tmp_path, "flit_core.buildapi")
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    text = text.replace('output = "my_app/epcontext"\n', "")
    (project / "pyproject.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(project)
    with pytest.raises(SystemExit):
        backend.build_editable(str(tmp_path))
    assert "tool.epcontext.output: EPC004\n    is required for an editable install" in (
        capsys.readouterr().err
    )


WHEEL_ERROR = "my_app-1.0-py3-none-any.whl of in_tree:backend: EPC502\n    it "
FAILED = "tool.epcontext.build.backend: EPC031\n    in_tree:backend "

OTHER_METADATA = f"{WHEEL_ERROR[:-3]}its METADATA names"

BROKEN = {
    "returns None": ("return None", f"{FAILED}returned None from build_wheel, and not the name"),
    "returns a path": ("return str(folder / build())", f"{FAILED}returned '"),
    "returns a Path": ("return pathlib.Path(build())", f"{FAILED}returned PosixPath("),
    "returns bytes": ("return build().encode()", f"{FAILED}returned b'my_app"),
    "returns nothing at all": ('return ""', f"{FAILED}returned '' from"),
    "returns the parent": ('return ".."', f"{FAILED}returned '..' from"),
    "returns a name without its file": ('return "a-1-py3-none-any.whl"', f"{FAILED}returned 'a-1"),
    "returns a folder": ('(folder / "a").mkdir(); return "a"', f"{FAILED}returned 'a' from"),
    "returns no wheel": ('(folder / "a.zip").touch(); return "a.zip"', "a.zip of in_tree:backend"),
    "a name that is no wheel's": (
        'return build(name="my_app.whl")',
        "my_app.whl of in_tree:backend: EPC502\n    Invalid wheel filename",
    ),
    "an empty file": (
        "(folder / NAME).touch(); return NAME",
        f"{WHEEL_ERROR}cannot be read: File is",
    ),
    "half a file": (
        "build(); f = folder / NAME; f.write_bytes(f.read_bytes()[:99]); return NAME",
        f"{WHEEL_ERROR}cannot be read: File is not a zip file",
    ),
    "a damaged file": (
        'build(); f = folder / NAME; f.write_bytes(f.read_bytes().replace(b"hello", b"hallo")); return NAME',
        f"{WHEEL_ERROR}cannot be read: Bad CRC-32 for file 'my_app/__init__.py'",
    ),
    "no metadata": (
        "return build(METADATA=None)",
        f"{WHEEL_ERROR}lacks my_app-1.0.dist-info/METADATA",
    ),
    "no record": ("return build(RECORD=None)", f"{WHEEL_ERROR}lacks my_app-1.0.dist-info/RECORD"),
    "no folder": (
        "return build(METADATA=None, RECORD=None, WHEEL=None)",
        f"{WHEEL_ERROR}has no folder *.dist-info",
    ),
    "two folders": (
        'return build(**{"../b-1.dist-info/WHEEL": ""})',
        f"{WHEEL_ERROR}has b-1.dist-info and my_app-1.0.dist-info, and a wheel has one",
    ),
    "metadata that are not UTF-8": (
        'return build(METADATA="Name: my-app\\nVersion: 1.0\\nAuthor: \\xe9".encode("latin-1"))',
        f"{WHEEL_ERROR}cannot be read: 'utf-8' codec can't decode byte 0xe9",
    ),
    "another project": (
        'return build(METADATA="Name: b\\nVersion: 1.0")',
        OTHER_METADATA,
    ),
    "a project without a name": (
        'return build(METADATA="Version: 1.0")',
        OTHER_METADATA,
    ),
    "another version": (
        'return build(METADATA="Name: my-app\\nVersion: 1.1")',
        f'{OTHER_METADATA} "my-app" with the version "1.1", and its own name says my-app 1.0',
    ),
    "an invalid version": ('return build(METADATA="Name: my-app\\nVersion: one")', OTHER_METADATA),
    "an empty WHEEL": ('return build(WHEEL="")', f"{WHEEL_ERROR[:-3]}its WHEEL lacks"),
    "another format": (
        'return build(WHEEL="Wheel-Version: 2.0")',
        f"{WHEEL_ERROR[:-3]}its WHEEL lacks Wheel-Version: 1.0",
    ),
    "an invalid requirement": (
        'return build(METADATA="Name: my-app\\nVersion: 1.0\\nRequires-Dist: ?")',
        f"{WHEEL_ERROR[:-3]}its METADATA has an invalid requirement",
    ),
    "a file twice": (
        'return build(**{"../my_app/__init__.py": "again"})',
        f"{WHEEL_ERROR}has several files with one name: my_app/__init__.py",
    ),
    "a file elsewhere": ('return build(**{"../../evil": ""})', f"{WHEEL_ERROR}has files outside"),
    "raises": ('raise KeyError("x")', f"{FAILED}failed in build_wheel:\n      File"),
    "raises its own error": ('class E(Exception): pass\n    raise E("mine")', "E: mine\n"),
    "exits": ('raise SystemExit("error: no compiler")', "    SystemExit: error: no compiler"),
    "panics": ("raise BaseException('panic')", "    BaseException: panic"),
    "exits with success": ("sys.exit(0)", f"{FAILED}failed in build_wheel:"),
}
"""What a broken back end does, and the message."""

BROKEN_BACKEND = """
import pathlib, sys, warnings, zipfile

NAME = "my_app-1.0-py3-none-any.whl"

def build_wheel(folder, config_settings=None, metadata_directory=None):
    folder = pathlib.Path(folder)
    def build(name=NAME, **texts):
        about = {{"METADATA": "Name: my-app\\nVersion: 1.0", "WHEEL": "Wheel-Version: 1.0", "RECORD": ""}}
        with zipfile.ZipFile(folder / name, "w") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            archive.writestr("my_app/__init__.py", "hello")
            for path, text in {{**about, **texts}}.items():
                if text is not None:
                    path = path[3:] if path.startswith("../") else f"my_app-1.0.dist-info/{{path}}"
                    archive.writestr(path, text)
        return name
    {body}

backend = sys.modules[__name__]
"""


@pytest.mark.parametrize(("body", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_back_end_is_one_error_that_names_it_and_what_it_made(
    body: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project = make_in_tree(tmp_path / "my-app", BROKEN_BACKEND.format(body=body))
    if sys.platform == "win32":
        message = message.replace("Posix", "Windows")
    printed = fails(project, monkeypatch, capsys)
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signal")
def test_a_build_that_is_terminated_in_the_wrapped_back_end_ends_as_after_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "import os, time; os.kill(os.getpid(), 15); time.sleep(10)"
    monkeypatch.chdir(make_in_tree(tmp_path, BROKEN_BACKEND.format(body=body)))
    with pytest.raises(SystemExit) as raised:
        backend.build_wheel(str(tmp_path))
    assert (raised.value.code, capsys.readouterr().err) == (143, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backend = []", f"{FAILED}has no hook build_wheel"),
        ("class backend: build_wheel = None", f"{FAILED}has no hook build_wheel"),
        ("def build_wheel(folder): pass\nbackend = __import__(__name__)", "positional argument"),
        ("1 / 0", "in_tree:backend, which cannot be imported:\n      File"),
        ("backend = (", "SyntaxError"),
        ("exit(3)", "SystemExit: 3"),
        ("a = 1", "(module 'in_tree' has no attribute 'backend')"),
    ],
)
def test_what_is_no_back_end_is_an_error(
    text: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = fails(make_in_tree(tmp_path / "my-app", text), monkeypatch, capsys)
    assert message in printed
    assert "Traceback" not in printed


OTHER_HOOKS = """
import io, pathlib, tarfile

class UnsupportedOperation(OSError):
    pass

class Backend:
    UnsupportedOperation = UnsupportedOperation

    def build_sdist(self, folder, config_settings=None):
        {sdist}

    def get_requires_for_build_wheel(self, config_settings=None):
        return "setuptools"

    def get_requires_for_build_sdist(self, config_settings=None):
        return None

    def prepare_metadata_for_build_wheel(self, folder, config_settings=None):
        pathlib.Path(folder, "a.dist-info").mkdir()
        return "a.dist-info"

    def build_editable(self, folder, config_settings=None, metadata_directory=None):
        return 3

def tar(folder, name, *members):
    with tarfile.open(pathlib.Path(folder, name), "w:gz") as archive:
        for member in members:
            archive.addfile(tarfile.TarInfo(member))
    return name

def half(file):
    file.write_bytes(file.read_bytes()[:-20])
    return file.name

backend = Backend()
"""


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("get_requires_for_build_wheel", "returned 'setuptools' from get_requires_for_build_wheel"),
        ("get_requires_for_build_sdist", "returned None from get_requires_for_build_sdist"),
        ("prepare_metadata_for_build_wheel", "and not the name of a folder with METADATA"),
        ("build_editable", "returned 3 from build_editable"),
    ],
)
def test_what_the_other_hooks_return_is_checked(
    hook: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(make_in_tree(tmp_path, OTHER_HOOKS.format(sdist="pass")))
    arguments = () if hook.startswith("get_requires") else (str(tmp_path),)
    with pytest.raises(SystemExit):
        getattr(backend, hook)(*arguments)
    assert f"{FAILED}{message}" in capsys.readouterr().err.replace(
        f"{FAILED}returned 'a.dist-info' from prepare_metadata_for_build_wheel, ", FAILED
    )


@pytest.mark.parametrize(
    ("sdist", "message"),
    [
        ("return None", f"{FAILED}returned None from build_sdist"),
        ('return tar(folder, "my_app-1.0.tar.gz")', "my_app-1.0.tar.gz of in_tree:backend: EPC509"),
        (
            'return tar(folder, "my_app-1.0.tar.gz", "other-1.0/a")',
            "outside of the folder my_app-1.0: other",
        ),
        ('return tar(folder, "my_app-1.0.tgz", "my_app-1.0/a")', "an sdist is a .tar.gz"),
        (
            'open(folder + "/a-1.tar.gz", "w").close(); return "a-1.tar.gz"',
            "a-1.tar.gz of in_tree:backend: EPC509\n    it cannot be read",
        ),
        (
            'tar(folder, "a-1.tar.gz", "a-1/b"); return half(pathlib.Path(folder, "a-1.tar.gz"))',
            "a-1.tar.gz of in_tree:backend: EPC509\n    it cannot be read",
        ),
    ],
)
def test_a_broken_sdist_is_an_error(
    sdist: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(make_in_tree(tmp_path / "my-app", OTHER_HOOKS.format(sdist=sdist)))
    (tmp_path / "dist").mkdir()
    with pytest.raises(SystemExit):
        backend.build_sdist(str(tmp_path / "dist"))
    assert message in capsys.readouterr().err
    assert list((tmp_path / "dist").iterdir()) == []


def test_a_back_end_may_say_that_it_builds_no_sdist_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = OTHER_HOOKS.format(sdist='raise UnsupportedOperation("needs git")')
    monkeypatch.chdir(make_in_tree(tmp_path, text))
    with pytest.raises(backend.UnsupportedOperation, match="needs git"):
        backend.build_sdist(str(tmp_path))
    assert not hasattr(backend, "prepare_metadata_for_build_editable")


@pytest.mark.parametrize(
    "text",
    [
        "import hatch_epcontext.backend as backend",
        "from hatch_epcontext.backend import *\nbackend = __import__(__name__)",
        "from hatch_epcontext.backend import build_editable",
        """
        import hatch_epcontext.backend
        class Backend:
            def __getattr__(self, name):
                return getattr(hatch_epcontext.backend, name)
        backend = Backend()
        """,
        """
        import subprocess, sys
        code = "import sys, hatch_epcontext.backend as b; print(b.build_wheel(sys.argv[1]))"
        class backend:
            def build_wheel(folder, config_settings=None, metadata_directory=None):
                subprocess.run([sys.executable, "-c", code, folder], check=True)
        """,
    ],
    ids=["an alias", "its functions", "an optional hook", "a proxy", "another process"],
)
def test_a_back_end_that_is_this_one_is_an_error(
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    project = make_in_tree(tmp_path / "my-app", textwrap.dedent(text))
    message = "names in_tree:backend, which is hatch_epcontext.backend, or calls it."
    monkeypatch.chdir(project)
    for hook in ("build_wheel", "build_sdist"):
        with pytest.raises(SystemExit):
            getattr(backend, hook)(str(tmp_path))
        printed = capfd.readouterr().err
        if "subprocess" not in text:
            assert message in printed
            with contextlib.suppress(SystemExit):
                assert not hasattr(backend, "build_editable")
        elif hook == "build_wheel":
            assert f"{FAILED}failed in build_wheel:" in printed


LIMITED = """
import os, pathlib, tarfile, zipfile
from in_tree_limit import limit

class backend:
    def build_wheel(folder, config_settings=None, metadata_directory=None):
        name = "my_app-1.0-py3-none-any.whl"
        with zipfile.ZipFile(pathlib.Path(folder, name), "w") as archive:
            archive.writestr("my_app/__init__.py", os.urandom(500_000))
            archive.writestr("my_app-1.0.dist-info/METADATA", "Name: my-app\\nVersion: 1.0")
            archive.writestr("my_app-1.0.dist-info/WHEEL", "Wheel-Version: 1.0")
            archive.writestr("my_app-1.0.dist-info/RECORD", "")
        limit()
        return name

    build_editable = build_wheel

    def build_sdist(folder, config_settings=None):
        name = "my_app-1.0.tar.gz"
        pathlib.Path("random").write_bytes(os.urandom(500_000))
        with tarfile.open(pathlib.Path(folder, name), "w:gz") as archive:
            archive.add("random", "my_app-1.0/random")
        limit()
        return name
"""

LIMIT = """
import os, resource, signal

def limit():
    if how := os.environ.get("LIMIT"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        # The signal of a file that is too large; Python ignores it, and gets an error.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if how == "killed" else signal.SIG_IGN)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits are POSIX's")
@pytest.mark.parametrize("hook", ["build_wheel", "build_sdist", "build_editable"])
def test_an_earlier_file_stays_if_a_build_is_killed_or_the_disk_is_full(
    hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only what the wrapped back end makes is written.
    monkeypatch.setenv("HATCH_EPCONTEXT_SKIP", "1")
    project = make_in_tree(tmp_path / "my-app", LIMITED)
    (project / "tools" / "in_tree_limit.py").write_text(LIMIT, encoding="utf-8")
    code = f"import sys, hatch_epcontext.backend as b; print(b.{hook}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path / "dist")]
    for how, ends, message in (
        ("", 0, ""),
        ("full", 1, "File too large while the"),
        ("killed", -25, ""),
    ):
        monkeypatch.setenv("LIMIT", how)
        before = {path: path.read_bytes() for path in (tmp_path / "dist").glob("my_app*")}
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode == ends
        assert message in done.stderr
        after = {path: path.read_bytes() for path in (tmp_path / "dist").glob("my_app*")}
        assert len(after) == 1
        assert how == "" or after == before
    with replacing(tmp_path / "dist"):
        pass
    assert list((tmp_path / "dist").iterdir()) == list(after)


def test_an_earlier_wheel_stays_if_the_new_one_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (body, message) = BROKEN["a damaged file"]
    project = make_in_tree(tmp_path / "my-app", BROKEN_BACKEND.format(body=body))
    wheel = tmp_path / "dist" / "my_app-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"earlier")
    monkeypatch.chdir(project)
    with pytest.raises(SystemExit):
        backend.build_wheel(str(wheel.parent))
    assert message in capsys.readouterr().err
    assert wheel.read_bytes() == b"earlier"
    assert list(wheel.parent.iterdir()) == [wheel]


ASCII = {
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": "ascii:strict",
}


@pytest.mark.skipif(sys.platform == "win32", reason="names are Unicode on Windows")
@pytest.mark.parametrize("hook", ["build_wheel", "build_sdist"])
def test_names_that_are_not_ascii_are_packed_in_any_locale(
    hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = 'return build(**{"../my_app/\\u00e9.txt": ""})'
    sdist = """
    name = "my_app-1.0.tar.gz"
    with tarfile.open(pathlib.Path(folder, name), "w:gz", encoding="utf-8") as archive:
        archive.addfile(tarfile.TarInfo("my_app-1.0/my_app/\\u00e9.txt"))
    return name
"""
    text = BROKEN_BACKEND.format(body=body)
    text += f"import tarfile\ndef build_sdist(folder, config_settings=None):{sdist}"
    project = make_in_tree(tmp_path / "my-app", text)
    (project / "my_app" / "\u00e9.txt").touch()
    for name, value in ASCII.items():
        monkeypatch.setenv(name, value)
    # Its path is printed, too.
    monkeypatch.setenv("HATCH_EPCONTEXT_CACHE_DIR", str(tmp_path / "cache"))
    file = call(project, hook, tmp_path)
    if hook == "build_wheel":
        names = set(contents(file))
    else:
        with tarfile.open(file, encoding="utf-8") as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
            assert "models/a.onnx" in names
    assert "my_app/\u00e9.txt" in names


@pytest.mark.skipif(sys.platform == "win32", reason="names are Unicode on Windows")
@pytest.mark.parametrize(
    ("model", "path", "message"),
    [
        ("\u00e9.onnx", "models/*.onnx", "models[0]: EPC027"),
        ("\u00e9.onnx", "models/\u00e9.onnx", "there is no model at"),
        ("\u00e9.onnx", "models/\u00e9*.onnx", "no file matches"),
        ("a.onnx", "models/a.onnx", "'ascii' codec can't encode character"),
    ],
)
def test_what_the_locale_cannot_name_is_an_error_that_says_how_to_set_it(
    model: str, path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_in_tree(tmp_path, IN_TREE)
    (project / "models" / "a.onnx").rename(project / "models" / model)
    toml = (project / "pyproject.toml").read_text(encoding="utf-8")
    toml = toml.replace('{ path = "models/a.onnx", dims = { batch = 1 } }', f'"{path}"')
    if model == "a.onnx":
        toml = toml.replace('["tools"]', '["\u00e9"]')
    (project / "pyproject.toml").write_text(toml, encoding="utf-8")
    code = "import hatch_epcontext.backend as b; b.build_wheel('.')"
    environ = {**os.environ, **ASCII}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=project, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Here Python reads names of files as ascii: set PYTHONUTF8=1" in done.stderr
    assert "Traceback" not in done.stderr
