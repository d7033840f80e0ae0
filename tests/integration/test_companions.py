"""An app with two companions: built, installed by pip and uv, upgraded without them, and removed."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.conftest import REPOSITORY, needs_qnn, printed_json
from tests.integration.conftest import UV, Environment, copy_example, make_environment, run, tool

pytestmark = [needs_qnn, pytest.mark.network, pytest.mark.packagers]

EXTRAS = """
x-elite = ["digits-app-models-x-elite=={version}", "onnxruntime-qnn"]
cpu = ["digits-app-models-cpu=={version}"]
"""

COMPANIONS = """
[project.entry-points.pyinstaller40]
hook-dirs = "digits_app.epcontext.__pyinstaller:get_hook_dirs"

[tool.epcontext]
fallback = { companion = "digits-app-models-cpu" }
wheel.sbom = true

[tool.epcontext.targets.x-elite]
provider = "qnn"
chip = "snapdragon-x-elite"
companion = "digits-app-models-x-elite"

[tool.epcontext.targets.cpu]
provider = "cpu"
companion = "digits-app-models-cpu"

[[tool.epcontext.models]]
path = "models/digits.onnx"
dims = { batch = 1 }
license = "MIT"
"""

VERSION = "1.0.0"

NAMES = ("digits_app_models_cpu-1", "digits_app_models_x_elite-1")

SCRIPT = """
import json, sys
from digits_app import epcontext
from digits_app.classify import classify, read_image

attempts = epcontext.explain("digits", device="any")
numbers = {}
for target in (attempt.target for attempt in attempts):
    try:
        session = epcontext.load("digits", target=target, device="any", verify=True)
        numbers[target] = classify(session, read_image(sys.argv[1]))
    except epcontext.LoadError:
        pass
print(json.dumps([[[s.target, s.outcome, s.reason] for s in attempts], numbers]))
"""

MISSING = "its models are not installed: pip install 'digits-app[{}]'"


class Index:
    """The project, and a folder with its wheels instead of an index."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.env = env
        self.project = copy_example(folder / "digits-app")
        self.dist = self.project / "dist"
        file = self.project / "pyproject.toml"
        self._text = file.read_text(encoding="utf-8").partition("[tool.epcontext.")[0] + COMPANIONS
        (self.project / "LICENSE").write_text("of the models", encoding="utf-8")

    def write(self, version: str, pin: str) -> None:
        head, _, rest = self._text.partition("npu = ")
        text = head + EXTRAS.format(version=pin) + rest.partition("\n")[2]
        text = text.replace('version = "1.0.0"', f'version = "{version}"')
        (self.project / "pyproject.toml").write_text(text, encoding="utf-8")

    def run(self, *command: str | Path) -> str:
        env = {**self.env, "PYTHONPATH": str(REPOSITORY)}
        return run(tool(str(command[0])), *command[1:], cwd=self.project, env=env)

    def uv(self, environment: Environment, *what: str) -> None:
        environment.install("--find-links", str(self.dist), *what)

    def pip(self, environment: Environment, command: str, *what: str) -> str:
        python = environment.executable("python")
        links = () if command == "uninstall" else ("--find-links", str(self.dist))
        pip = (sys.executable, "-m", "pip", "--python", python, command, "-q", *links, *what)
        return run(*pip, cwd=environment.folder, env=environment.env)


def open_all(environment: Environment, project: Path) -> tuple[list[Any], dict[str, Any]]:
    """The attempts of the app, and what each target reads in an image of a 3."""
    image = project / "samples" / "3.png"
    attempts, numbers = printed_json(environment.python("-c", SCRIPT, image))
    return attempts, numbers


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> Index:
    """With the app and its companions."""
    index = Index(tmp_path_factory.mktemp("companions"), env)
    index.write(VERSION, "1")
    built = run(sys.executable, "-m", "build", UV, "-w", cwd=index.project, env=env)
    # It compiles nothing, and needs no compiler.
    assert "onnxruntime-qnn" not in built
    assert "agrees" not in built
    assert index.run("epcontext", "companions").count("wrote ") == 2
    return index


def test_the_wheels_of_companions_are_whole_and_reproducible(index: Index) -> None:
    wheels = [index.dist / f"{name}-py3-none-any.whl" for name in NAMES]
    first = [wheel.read_bytes() for wheel in wheels]
    assert index.run("epcontext", "companions", "-o", "again").count("from the cache") == 2
    assert [(index.project / "again" / wheel.name).read_bytes() for wheel in wheels] == first
    assert index.run("epcontext", "companions", "--published", "dist").count("unchanged: ") == 2
    index.run("twine", "check", "--strict", *wheels)
    index.run("check-wheel-contents", *wheels)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (folder,) = {
                name.partition("/")[0] for name in archive.namelist() if "dist-info" in name
            }
            assert archive.read(f"{folder}/licenses/LICENSE") == b"of the models"
            assert b"\nLicense-Expression: MIT\n" in archive.read(f"{folder}/METADATA")
            assert f"{folder}/sboms/epcontext.cdx.json" in archive.namelist()
    assert "verified: 3 files" in index.run("epcontext", "inspect", "--verify", wheels[1])


def test_an_app_gets_its_models_from_companions(index: Index, tmp_path: Path) -> None:
    env = index.env
    plain = make_environment(tmp_path / "plain", env)
    index.uv(plain, "digits-app")
    skipped = [[name, "skipped", MISSING.format(name)] for name in ("x-elite", "cpu")]
    source = ["source", "skipped", MISSING.format("cpu")]
    assert open_all(plain, index.project) == ([*skipped, source], {})
    index.pip(plain, "install", "digits-app[cpu]")
    attempts, numbers = open_all(plain, index.project)
    assert [attempt[1] for attempt in attempts] == ["skipped", "opened", "not needed"]
    assert [digit for digit, _ in numbers.values()] == [3, 3]

    whole = make_environment(tmp_path / "whole", env)
    index.uv(whole, "digits-app[x-elite,cpu]")
    attempts, numbers = open_all(whole, index.project)
    assert [attempt[:2] for attempt in attempts] == [
        ["x-elite", "opened"], ["cpu", "not needed"], ["source", "not needed"],
    ]  # fmt: skip
    assert attempts[0][2] == "QNNExecutionProvider on cpu"
    assert numbers["x-elite"][0] == 3
    assert numbers["x-elite"][1] == pytest.approx(numbers["cpu"][1], abs=0.02)
    companion = next(whole.folder.rglob("digits_app_models_x_elite"))
    validated = index.run("epcontext", "validate", companion)
    assert validated.startswith("digits -> x-elite: 1 context of QNNExecutionProvider, for ")

    # A release with the same model takes the companions that are there.
    index.write("1.0.1", "1")
    index.run("hatchling", "build", "-t", "wheel")
    index.uv(whole, "-U", "digits-app")
    assert open_all(whole, index.project) == (attempts, numbers)
    # With another model they are refused, and pip and uv leave them.
    model = onnx.load(index.project / "models" / "digits.onnx")
    onnx.helper.set_model_props(model, {"trained": "again"})
    onnx.save(model, index.project / "models" / "digits.onnx")
    index.write("1.1.0", "2")
    index.run("hatchling", "build", "-t", "wheel")
    index.pip(whole, "install", "-U", "digits-app")
    attempts, numbers = open_all(whole, index.project)
    assert ([attempt[1] for attempt in attempts], numbers) == (["failed"] * 3, {})
    assert attempts[0][2] == (
        "digits_app_models_x_elite is for another version of this model: pip install "
        "'digits-app[x-elite]'"
    )
    index.run("epcontext", "companions", "--companion", "digits-app-models-cpu")
    index.pip(whole, "install", "digits-app[cpu]")
    attempts, numbers = open_all(whole, index.project)
    assert [attempt[1] for attempt in attempts] == ["failed", "opened", "not needed"]
    index.pip(whole, "uninstall", "-y", "digits-app-models-x-elite", "digits-app-models-cpu")
    assert open_all(whole, index.project) == ([*skipped, source], {})
    assert not list(whole.folder.rglob("digits_app_models_*"))


def test_a_frozen_app_has_the_companions_that_were_installed(index: Index, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "venv", index.env)
    index.uv(environment, f"digits-app[x-elite]=={VERSION}", "pyinstaller")
    (tmp_path / "main.py").write_text(SCRIPT, encoding="utf-8")
    pyinstaller = environment.executable("pyinstaller")
    text = run(pyinstaller, "--noconfirm", "main.py", cwd=tmp_path, env=index.env)
    assert "digits_app_models_cpu is not installed, and left out" in text
    program = (tmp_path / "dist").rename(tmp_path / "moved") / "main" / "main"
    image = index.project / "samples" / "3.png"
    attempts, numbers = printed_json(run(program, image, cwd=tmp_path, env={"HOME": str(tmp_path)}))
    assert [attempt[1] for attempt in attempts] == ["opened", "not needed", "not needed"]
    assert numbers["x-elite"][0] == 3
