"""The app of the example after packagers: frozen by PyInstaller, in a zip archive, as a wheel variant."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hatch_epcontext.package.bundle import modules
from tests.conftest import REPOSITORY, needs_qnn
from tests.integration.conftest import Environment, copy_example, make_environment, run, tool

pytestmark = [needs_qnn, pytest.mark.network, pytest.mark.packagers]

Env = dict[str, str]

OURS = {"PYTHONPATH": str(REPOSITORY)}
"""For commands of this checkout, where the environment of the tests has another version installed."""

IMAGE = REPOSITORY / "example_project" / "samples" / "3.png"

# The app opens the model with all checks, and gives its path to another tool.
MAIN = """
import sys

from digits_app.classify import classify, read_image
from digits_app.epcontext import LoadError, explain, load, models, path, target_of

device, image = sys.argv[1:]
device = None if device == "best" else device
session = load("digits", device=device, verify=True)
digit, _ = classify(session, read_image(image))
print(models(), target_of(session), digit)
for step in explain("digits", device=device):
    print(step)
with path("digits") as file:
    print(file.name, file.is_file())
"""


def build_wheel(project: Path, out: Path, env: Env, **variables: str) -> Path:
    run(
        sys.executable, "-m", "build", "-w", "-o", out, project,
        cwd=project, env=env | variables,
    )  # fmt: skip
    (wheel,) = out.glob("*.whl")
    return wheel


def hooked_example(folder: Path) -> Path:
    """The example, which names the hook for PyInstaller."""
    project = copy_example(folder)
    with (project / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write(HOOK)
    return project


HOOK = """
[project.entry-points.pyinstaller40]
hook-dirs = "digits_app.epcontext.__pyinstaller:get_hook_dirs"
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, env: Env) -> Path:
    folder = tmp_path_factory.mktemp("example")
    return build_wheel(hooked_example(folder / "digits-app"), folder / "dist", env)


@pytest.fixture(scope="module")
def app(wheel: Path, env: Env, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the app, QNN's package and PyInstaller."""
    installed = make_environment(tmp_path_factory.mktemp("app") / "venv", env)
    installed.install(wheel, "onnxruntime-qnn", "pyinstaller")
    return installed


@pytest.fixture(scope="module")
def plain(env: Env, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with PyInstaller and what the app needs, and no EP's package."""
    installed = make_environment(tmp_path_factory.mktemp("plain") / "venv", env)
    installed.install("pyinstaller", "onnxruntime", "numpy", "pillow")
    return installed


def freeze(environment: Environment, folder: Path, *flags: str, fails: bool = False) -> str:
    (folder / "main.py").write_text(MAIN, encoding="utf-8")
    program = environment.executable("pyinstaller")
    command = ("--noconfirm", "--name", "digits", *flags, "main.py")
    return run(program, *command, cwd=folder, env=environment.env, fails=fails)


def open_frozen(program: Path, device: str, folder: Path) -> list[str]:
    """What the frozen app prints on a machine of a user who has no Python."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    env = {"HOME": str(home), "LOCALAPPDATA": str(home), "TMPDIR": str(folder)}
    printed = run(program, device, IMAGE, cwd=home, env=env).splitlines()
    # QNN's simulator prints lines of its own.
    return [line for line in printed if ":onnxruntime:" not in line and "LIBNATIVE" not in line]


NPU = [
    "['digits'] x-elite 3",
    "x-elite: opened, QNNExecutionProvider on cpu",
    "cpu: not tried",
    "digits_ctx.onnx True",
]
CPU = [
    "['digits'] cpu 3",
    "x-elite: skipped, it is for the npu, and device='cpu' was requested",
    "cpu: opened, CPUExecutionProvider on cpu",
    "digits_ctx.onnx True",
]


@pytest.mark.parametrize("mode", ["--onedir", "--onefile"])
def test_pyinstaller_freezes_the_app_with_its_models_and_eps(
    mode: str, app: Environment, tmp_path: Path
) -> None:
    printed = freeze(app, tmp_path, mode)
    assert "is not installed" not in printed
    # Moved: nothing may refer to where it was made.
    program = Path(shutil.move(tmp_path / "dist", tmp_path / "moved"))
    program /= "digits/digits" if mode == "--onedir" else "digits"
    shutil.rmtree(tmp_path / "build")
    assert open_frozen(program, "any", tmp_path) == NPU
    assert open_frozen(program, "cpu", tmp_path) == CPU
    skipped = "x-elite: skipped, QNNExecutionProvider finds no npu, only cpu"
    assert open_frozen(program, "best", tmp_path)[1].startswith(skipped)


def test_an_exported_package_is_frozen_without_being_installed(
    plain: Environment, tmp_path: Path, env: Env
) -> None:
    project = copy_example(tmp_path / "digits-app")
    package = project / "digits_app" / "epcontext"
    run(tool("epcontext"), "export", "-o", package, cwd=project, env=env | OURS)
    assert set(modules("digits_app.epcontext", ())) <= {
        path.relative_to(package).as_posix() for path in package.rglob("*")
    }
    hooks = str(package / "__pyinstaller")
    printed = freeze(plain, project, "--onedir", "--additional-hooks-dir", hooks)
    assert "digits_app.epcontext: onnxruntime-qnn is not installed" in printed
    printed_by_app = open_frozen(project / "dist" / "digits" / "digits", "any", tmp_path)
    assert printed_by_app[0] == "['digits'] cpu 3"
    assert printed_by_app[1].startswith("x-elite: skipped, onnxruntime-qnn is not installed")


def test_an_editable_install_is_not_frozen_without_its_models(
    plain: Environment, tmp_path: Path
) -> None:
    project = hooked_example(tmp_path / "digits-app")
    plain.install("--no-deps", "-e", project)
    (tmp_path / "freeze").mkdir()
    printed = freeze(plain, tmp_path / "freeze", fails=True)
    assert "digits_app.epcontext is an editable install" in printed
    assert not list((tmp_path / "freeze" / "dist").glob("*"))


@pytest.fixture
def archived(app: Environment, wheel: Path, tmp_path: Path) -> Iterator[dict[str, list[str]]]:
    """Command lines that open the app from an archive, beside an environment that has onnxruntime."""
    target = tmp_path / "target"
    app.install("--no-deps", "--target", target, wheel)
    (target / "main.py").write_text(MAIN, encoding="utf-8")
    (target / "__main__.py").write_text("import main", encoding="utf-8")
    run(
        sys.executable,
        "-m",
        "zipapp",
        target,
        "-o",
        tmp_path / "digits.pyz",
        cwd=tmp_path,
        env=app.env,
    )
    code = f"import sys; sys.path.insert(0, {str(wheel)!r})\n{MAIN}"
    # With the app itself in the environment nothing would be opened from the archive.
    run(tool("uv"), "pip", "uninstall", "--python", app.executable("python"), "digits-app",
        cwd=tmp_path, env=app.env)  # fmt: skip
    yield {"zipapp": [str(tmp_path / "digits.pyz")], "zipimport": ["-c", code]}
    app.install("--no-deps", wheel)


def test_the_app_runs_from_a_zip_archive(
    archived: dict[str, list[str]], app: Environment, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    env = dict(app.env) | {"XDG_CACHE_HOME": str(cache), "LOCALAPPDATA": str(cache)}
    stamps = set()
    for arguments in archived.values():
        for device, expected in (("any", NPU), ("cpu", CPU)):
            python = app.executable("python")
            printed = run(python, *arguments, device, IMAGE, cwd=tmp_path, env=env).splitlines()
            assert [line for line in printed if line in expected] == expected
        copied = sorted((cache / "digits_app" / "unpacked").rglob("*.onnx"))
        assert {file.name for file in copied} == {"digits_ctx.onnx", "digits_optimized.onnx"}
        # The same contents, from the zipapp and from the wheel.
        stamps.add(tuple(file.stat().st_mtime_ns for file in copied))
    assert len(stamps) == 1


# A provider plugin, which an installer asks what the machine has. There is none for NPUs on PyPI.
PROVIDER = """
import os
from typing import NamedTuple

class Config(NamedTuple):
    name: str
    values: list
    multi_value: bool = False

class Plugin:
    namespace = "qualcomm"

    @staticmethod
    def get_all_configs():
        return [Config("soc_model", ["60", "57"])]

    @staticmethod
    def get_supported_configs():
        soc = os.environ.get("TEST_SOC_MODEL")
        return [Config("soc_model", [soc])] if soc else []
"""

PROVIDER_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "qualcomm-variant-provider"
version = "1.0"
"""

VARIANTS = """
[variant.default-priorities]
namespace = ["qualcomm"]

[variant.providers.qualcomm]
requires = ["qualcomm-variant-provider"]
plugin-api = "qualcomm_variant_provider:Plugin"
"""

CHOOSE = """
import json, sys
from variantlib.api import get_variants_by_priority
table = json.load(open(sys.argv[1]))
print([each.label for each in get_variants_by_priority(variants_json=table)])
"""


def test_a_finished_wheel_becomes_a_wheel_variant(env: Env, tmp_path: Path) -> None:
    provider = tmp_path / "provider"
    (provider / "qualcomm_variant_provider").mkdir(parents=True)
    (provider / "pyproject.toml").write_text(PROVIDER_PROJECT, encoding="utf-8")
    (provider / "qualcomm_variant_provider" / "__init__.py").write_text(PROVIDER, encoding="utf-8")
    project = copy_example(tmp_path / "digits-app")
    with (project / "pyproject.toml").open("a", encoding="utf-8") as opened:
        opened.write(VARIANTS)
    for target in ("x-elite", "cpu"):
        build_wheel(project, tmp_path / target, env, HATCH_EPCONTEXT_TARGETS=target)
    npu, cpu = (next((tmp_path / target).glob("*.whl")) for target in ("x-elite", "cpu"))
    environment = make_environment(tmp_path / "venv", env)
    environment.install("variantlib[cli]==0.2.2", "pip", provider)
    out = tmp_path / "variants"
    out.mkdir()

    def variant(wheel: Path, *flags: str, fails: bool = False) -> str:
        command = (environment.executable("variantlib"), "make-variant", "--no-isolation")
        given = ("-f", wheel, "-o", out, "--pyproject-toml", project / "pyproject.toml")
        return run(*command, *given, *flags, cwd=tmp_path, env=env, fails=fails)

    variant(npu, "--variant-label", "x_elite", "-p", "qualcomm :: soc_model :: 60")
    variant(cpu, "--null-variant")
    unknown = variant(npu, "-p", "qualcomm :: soc_model :: 99", fails=True)
    assert "qualcomm :: soc_model :: 99" in unknown
    names = [path.name for path in sorted(out.glob("*.whl"))]
    assert names == [f"digits_app-1.0.0-py3-none-any-{label}.whl" for label in ("null", "x_elite")]
    # They are what they were, with one more file in .dist-info.
    for path in out.glob("*.whl"):
        verify = (tool("epcontext"), "inspect", "--verify", path)
        assert "verified: " in run(*verify, cwd=tmp_path, env=env | OURS)
    run(
        environment.executable("variantlib"), "generate-index-json", "-d", out,
        cwd=tmp_path, env=env,
    )  # fmt: skip
    table = out / "digits_app-1.0.0-variants.json"
    assert set(json.loads(table.read_text("utf-8"))["variants"]) == {"null", "x_elite"}

    def chosen(soc: str) -> str:
        command = (environment.executable("python"), "-c", CHOOSE, table)
        return run(*command, cwd=tmp_path, env=env | {"TEST_SOC_MODEL": soc}).splitlines()[-1]

    assert chosen("60") == "['x_elite', 'null']"
    assert chosen("57") == chosen("") == "['null']"
    # What installers do with them today; docs/targets.md says it.
    (found,) = out.glob("*x_elite.whl")
    with_pip = (environment.executable("python"), "-m", "pip", "install", "--no-deps", found)
    assert "Invalid build number" in run(*with_pip, cwd=tmp_path, env=env, fails=True)
    with_uv = (tool("uv"), "pip", "install", "--no-deps", "-p", environment.folder, found)
    assert "unsupported wheel variants" in run(*with_uv, cwd=tmp_path, env=env, fails=True)
    # Back to a wheel that they install.
    (tmp_path / "plain").mkdir()
    run(environment.executable("variantlib"), "unmake-variant", "-f", found, "-o", tmp_path / "plain",
        cwd=tmp_path, env=env)  # fmt: skip
    environment.install("--no-deps", next((tmp_path / "plain").glob("*.whl")))
