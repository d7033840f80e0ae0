"""The app of the example after packagers: frozen by PyInstaller, and in a zip archive."""

from __future__ import annotations

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

with open("starts", "a") as file:
    file.write("x")
device, image, *recompile = sys.argv[1:]
device = None if device == "best" else device
session = load("digits", device=device, verify=True)
digit, _ = classify(session, read_image(image))
print(models(), target_of(session), digit)
for attempt in explain("digits", device=device, recompile=bool(recompile)):
    print(attempt)
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
    """The example, which names the hook for PyInstaller, and can be compiled on users' machines."""
    project = copy_example(folder)
    toml = project / "pyproject.toml"
    chip = 'chip = "snapdragon-x-elite"\n'
    text = toml.read_text("utf-8").replace(chip, f"{chip}recompile = true\n")
    toml.write_text(text, encoding="utf-8")
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


def open_frozen(program: Path, device: str, folder: Path, *more: str) -> list[str]:
    """What the frozen app prints on a machine of a user who has no Python."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    env = {"HOME": str(home), "LOCALAPPDATA": str(home), "TMPDIR": str(folder)}
    printed = run(program, device, IMAGE, *more, cwd=home, env=env).splitlines()
    # QNN's simulator prints lines of its own.
    return [line for line in printed if ":onnxruntime:" not in line and "LIBNATIVE" not in line]


NPU = [
    "['digits'] x-elite 3",
    "x-elite: opened, QNNExecutionProvider on cpu",
    "cpu: not needed",
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
    if mode == "--onedir":
        # Where QNN refuses the context, nothing compiles another one: the app would start again.
        (blob,) = program.parent.rglob("digits_ctx_qnn.bin")
        blob.write_bytes(bytes(blob.stat().st_size))
        starts = tmp_path / "home" / "starts"
        starts.unlink()
        lines = open_frozen(program, "any", tmp_path, "recompile")
        why = "the app is frozen, and a compiler needs a Python"
        assert f"x-elite: skipped, nothing is compiled on this machine: {why}" in lines
        assert CPU[2] in lines
        assert starts.read_text("utf-8") == "x"
        assert not list((tmp_path / "home").rglob("compiled"))


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
