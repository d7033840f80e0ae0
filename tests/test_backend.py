"""Wheels, sdists and editable installs of other build back ends, with the models in them."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest
from pyproject_hooks import BuildBackendHookCaller

from hatch_epcontext import backend
from tests.integration.conftest import environment_without, make_environment, run, tool
from tests.models import network, save

BACKENDS = {
    "setuptools.build_meta": "my_app",
    "poetry.core.masonry.api": "src/my_app",
    "flit_core.buildapi": "my_app",
    "uv_build": "src/my_app",
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
                archive.writestr(path, text)
        return name

    def build_sdist(self, folder, config_settings=None):
        raise OSError("this back end makes no sdists")

backend = Backend()
"""
"""A back end in the project's own folder ``tools``, an object, which makes wheels for Linux."""

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
def variables(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    # uv_build calls its program by its name.
    scripts = sysconfig.get_path("scripts")
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HATCH_EPCONTEXT_CACHE_DIR", str(cache))
    yield
    backend._backend.cache_clear()


def call(project: Path, hook: str, folder: Path, name: str = "hatch_epcontext.backend") -> Path:
    """What the ``hook`` of the back end ``name`` makes in ``folder``, in a process of its own."""
    hooks = BuildBackendHookCaller(str(project), name)
    return Path(folder, getattr(hooks, hook)(str(folder)))


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
    first = wheel.read_bytes()
    assert call(unpacked, "build_wheel", tmp_path).read_bytes() == first
    with_models = contents(wheel)
    run(tool("check-wheel-contents"), wheel, cwd=tmp_path, env={})
    plain = contents(call(unpacked, "build_wheel", tmp_path, name))
    changed = {path for path in plain if with_models[path] != plain[path]}
    assert changed == {"my_app-1.0.dist-info/RECORD"}
    assert set(with_models.keys() - plain.keys()) == {
        f"my_app/epcontext/{path}"
        for path in ("__init__.py", "_runner.py", "manifest.json", "a/cpu/a_optimized.onnx")
    }

    monkeypatch.setenv("HATCH_EPCONTEXT_SKIP", "1")
    skipped = contents(call(project, "build_wheel", tmp_path))
    # uv_build also lists folders.
    assert [path for path in skipped if path.startswith("my_app/epcontext/")] in (
        [],
        ["my_app/epcontext/"],
    )


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


def test_targets_of_companions_are_left_out_with_their_compilers(tmp_path: Path) -> None:
    more = """[project.optional-dependencies]
    npu = ["my-app-models-npu==2"]
    [tool.epcontext.targets.npu]
    provider = "qnn"
    companion = "my-app-models-npu"
    """
    project = make_project(tmp_path, "flit_core.buildapi", more=more)
    hooks = BuildBackendHookCaller(str(project), "hatch_epcontext.backend")
    assert "onnxruntime-qnn" not in " ".join(hooks.get_requires_for_build_wheel())
    packed = contents(call(project, "build_wheel", tmp_path))
    manifest = json.loads(packed["my_app/epcontext/manifest.json"][0])
    about = manifest["additional_metadata"]["hatch-epcontext"]
    assert about["companions"] == {"my_app_models_npu": "my-app[npu]"}
    component = manifest["components"]["a"]
    modules = component["additional_metadata"]["hatch-epcontext"]["modules"]
    assert list(component["variants"]) == ["cpu"]
    assert modules == {"cpu": "", "npu": "my_app_models_npu", "source": ""}


def test_platforms_name_a_wheel_that_has_none(tmp_path: Path) -> None:
    project = make_project(tmp_path, "flit_core.buildapi")
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    text = text.replace(
        "\nmodels =", '\ntargets.cpu.platforms = ["win_amd64", "win_arm64"]\nmodels ='
    )
    (project / "pyproject.toml").write_text(text, encoding="utf-8")
    wheel = call(project, "build_wheel", tmp_path)
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
    wheel = call(project, "build_wheel", tmp_path)
    assert wheel.name == f"my_app-1.0-{tag}.whl"
    # The earliest time of a zip file.
    assert contents(wheel)["my_app/epcontext/manifest.json"][2] == (1980, 1, 1, 0, 0, 0)


def test_a_time_that_is_no_number_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = make_in_tree(tmp_path, IN_TREE)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "today")
    text = fails(project, monkeypatch, capsys)
    assert "SOURCE_DATE_EPOCH: EPC020" in text
    assert 'must be a number of seconds, not "today".' in text


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
    monkeypatch.delitem(sys.modules, "in_tree", raising=False)
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


def test_a_failure_of_the_wrapped_back_end_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "in_tree", raising=False)
    monkeypatch.chdir(make_in_tree(tmp_path, IN_TREE))
    with pytest.raises(OSError, match="this back end makes no sdists"):
        backend.build_sdist(str(tmp_path))
    assert not hasattr(backend, "build_editable")
