from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper

from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.providers import PROVIDERS
from tests.cli.conftest import Cli
from tests.conftest import needs_qnn
from tests.models import model, network, save, value

BEFORE = '[project]\nname = "my-app"  # ours\nversion = "1"\n'


@pytest.fixture
def new_project(project: Path) -> Path:
    (project / "pyproject.toml").write_text(BEFORE, encoding="utf-8")
    for name in ("a", "b"):
        made = network()
        made.doc_string = name
        save(made, project / "models" / f"{name}.onnx")
    return project


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right of their own")
def test_a_link_stays_a_link(cli: Cli, new_project: Path, tmp_path: Path) -> None:
    file = tmp_path / "kept-elsewhere.toml"
    (new_project / "pyproject.toml").rename(file)
    (new_project / "pyproject.toml").symlink_to(file)
    cli("init", "--project", new_project, "-p", "cpu")
    assert (new_project / "pyproject.toml").is_symlink()
    assert "[tool.epcontext" in file.read_text(encoding="utf-8")


@needs_qnn
def test_all_models_are_found_and_can_be_built(cli: Cli, new_project: Path) -> None:
    for folder in (".hidden", "dist", "env"):
        save(network(), new_project / folder / "c.onnx")
    (new_project / "env" / "pyvenv.cfg").touch()
    (new_project / "models" / "damaged.onnx").write_text("text", encoding="utf-8")
    save(network(), new_project / "tests" / "d.onnx")
    shutil.copy(new_project / "models" / "b.onnx", new_project / "my_app" / "b.onnx")
    cli("compile", new_project / "models" / "a.onnx", "-o", new_project / "models" / "a_ctx.onnx",
        "-p", "qnn", "-O", "soc_model=60", "--dim", "batch=1", "-q")  # fmt: skip
    printed = cli("init", "--project", new_project)
    assert "a_ctx.onnx: is a context model already" in printed.stderr
    assert "damaged.onnx: is not an ONNX model" in printed.stderr
    assert "epcontext build --dry-run" in printed.stdout
    planned = json.loads(cli("build", new_project, "--dry-run", "--json").stdout)
    # Of the EPs whose packages are installed, those that offer a device on this machine.
    targets = {job["job"].split(" -> ")[1] for job in planned["jobs"]}
    assert {"qnn", "cpu"} <= targets <= set(PROVIDERS) - {"cuda", "directml"}
    assert {job["job"].split(" -> ")[0] for job in planned["jobs"]} == {"a", "b"}
    assert "left out tests/d.onnx" in printed.stderr
    assert "left out my_app/b.onnx: it is the same file as models/b.onnx" in printed.stderr
    assert "has all models already" in cli("init", "--project", new_project).stdout


def test_chosen_models_for_several_providers(
    cli: Cli, new_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(new_project)
    cli("init", "models/b.onnx", "-p", "cpu", "-p", "cuda")
    planned = json.loads(cli("build", "-t", "cpu", "--dry-run", "--json").stdout)
    assert [job["job"] for job in planned["jobs"]] == ["b -> cpu"]
    cli("init", "models/a.onnx")
    assert cli("build", "-t", "cpu").stderr.count("ran and agrees") == 2


def samples(project: Path, **files: dict[str, tuple[int, ...]]) -> None:
    for name, shapes in files.items():
        path = project / f"{name.replace('__', '/')}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {n: np.ones(shape, np.float32) for n, shape in shapes.items()}
        np.savez(path, **arrays)  # type: ignore[arg-type]


def given(project: Path) -> list[object]:
    models = parse((project / "pyproject.toml").read_text("utf-8"))["tool"]["epcontext"]["models"]
    return [model.get("validate", {}).get("inputs") for model in models]


def test_samples_that_fit_a_model_validate_it(cli: Cli, new_project: Path) -> None:
    image = (1, 1, 8, 8)
    samples(
        new_project,
        tests__data__1={"x": image},
        tests__data__2={"x": image},
        tests__mixed__b={"x": image},
        tests__mixed__wrong_shape={"x": (1, 1, 9, 8)},
        tests__mixed__wrong_name={"y": image},
        tests__mixed__too_many={"x": image, "y": image},
    )
    (new_project / "tests" / "mixed" / "damaged.npz").write_text("text", encoding="utf-8")
    printed = cli("init", "--project", new_project, "-p", "cpu").stdout
    # The one with its name, and the folder of which all fit.
    assert given(new_project) == ["tests/data", "tests/mixed/b.npz"]
    assert 'models/a.onnx: validate.inputs = "tests/data"' in printed
    assert "synthetic" not in cli("build", new_project).stderr


def test_folders_of_test_data_are_found(cli: Cli, new_project: Path) -> None:
    for name in ("test_data_set_0", "test_data_set_1", "other"):
        folder = new_project / "models" / name
        folder.mkdir(parents=True)
        size = 9 if name == "other" else 8
        tensor = numpy_helper.from_array(np.ones((1, 1, size, 8), np.float32))
        (folder / "input_0.pb").write_bytes(tensor.SerializeToString())
    cli("init", "--project", new_project, "-p", "cpu")
    assert given(new_project) == ["models/test_data_set_0"] * 2


def test_a_sample_answers_what_nothing_else_says_of_a_size(cli: Cli, new_project: Path) -> None:
    for name in ("a", "b"):
        (new_project / "models" / f"{name}.onnx").unlink()
    made = model(
        [helper.make_node("Relu", ["x"], ["y"])],
        [value("x", ["batch", "length"])],
        [value("y", ["batch", "length"])],
    )
    save(made, new_project / "models" / "a.onnx")
    samples(new_project, models__samples={"x": (1, 700)})
    cli("init", "--project", new_project, "-p", "qnn")
    text = (new_project / "pyproject.toml").read_text("utf-8")
    assert (
        "\ndims = { batch = 1, length = 700 }  # 1 is a guess; as in models/samples.npz\n" in text
    )


def test_a_dry_run_changes_nothing(cli: Cli, new_project: Path) -> None:
    printed = cli("init", "--project", new_project, "-p", "cpu", "--dry-run").stdout
    assert '+path = "models/a.onnx"' in printed
    assert ' name = "my-app"  # ours' in printed
    assert (new_project / "pyproject.toml").read_text(encoding="utf-8") == BEFORE


def test_line_ends_and_the_mode_of_the_file_are_kept(cli: Cli, new_project: Path) -> None:
    file = new_project / "pyproject.toml"
    file.write_bytes(BEFORE.replace("\n", "\r\n").encode())
    file.chmod(0o640)
    cli("init", "--project", new_project, "-p", "cpu")
    text = file.read_bytes()
    assert text.startswith(BEFORE.replace("\n", "\r\n").encode())
    assert text.count(b"\n") == text.count(b"\r\n")
    assert file.stat().st_mode & 0o777 == 0o640
    assert "has all models already" in cli("init", "--project", new_project).stdout


def test_unusable_models_and_projects_are_errors(
    cli: Cli, new_project: Path, tmp_path: Path
) -> None:
    elsewhere = save(network(), tmp_path / "elsewhere.onnx")
    printed = cli("init", elsewhere, "--project", new_project, code=2).stderr
    assert "is not inside the project" in printed
    (new_project / "models" / "a.onnx").write_text("text", encoding="utf-8")
    printed = cli(
        "init", new_project / "models" / "a.onnx", "--project", new_project, code=1
    ).stderr
    assert "is not an ONNX model" in printed
    assert (new_project / "pyproject.toml").read_text(encoding="utf-8") == BEFORE
    (tmp_path / "empty").mkdir()
    assert "does not exist" in cli("init", "--project", tmp_path / "empty", code=2).stderr
    (tmp_path / "empty" / "pyproject.toml").touch()
    assert "has no ONNX models" in cli("init", "--project", tmp_path / "empty", code=2).stderr
    assert "Invalid value for '-p'" in cli("init", "-p", "nothing", code=2).stderr


def test_a_link_is_taken_and_sizes_are_asked_for(
    cli: Cli, new_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model(
        [helper.make_node("Relu", ["x"], ["y"])],
        [value("x", ["batch", "width"])],
        [value("y", ["batch", "width"])],
    )
    elsewhere = save(made, tmp_path / "elsewhere.onnx")
    link = new_project / "models" / "link.onnx"
    link.symlink_to(elsewhere)
    printed = cli("init", link, "--project", new_project, "-p", "cpu").stdout
    assert 'from my_app.epcontext import load\n    session = load("link")\n' in printed
    assert (
        "models/link.onnx: dims = { batch = 1, width = ? }  # 1 is a guess; width: how" in printed
    )
    # Until its size is known, there are only errors to see.
    assert "--dry-run" not in printed
    file = new_project / "pyproject.toml"
    text = file.read_text(encoding="utf-8")
    assert 'path = "models/link.onnx"' in text
    assert "?" not in text
    assert "has all models already" in cli("init", link, "--project", new_project).stdout
    monkeypatch.setattr("hatch_epcontext.cli.init._on_terminal", lambda: True)
    monkeypatch.setattr("click.prompt", lambda question, **_: 640 if "width" in question else 0)
    file.write_text(BEFORE, encoding="utf-8")
    cli("init", link, "--project", new_project, "-p", "cpu")
    assert "\ndims = { batch = 1, width = 640 }  # 1 is a guess\n" in file.read_text(
        encoding="utf-8"
    )
