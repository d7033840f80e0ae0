from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from onnx import helper

from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.providers import PROVIDERS
from tests.cli.conftest import Cli, problems
from tests.conftest import needs_qnn
from tests.language_models import make_folder
from tests.models import model, network, parsed, save, value

BEFORE = '[project]\nname = "my-app"  # ours\nversion = "1"\n'


@pytest.fixture
def new_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
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
    cli("init", "-p", "cpu")
    assert (new_project / "pyproject.toml").is_symlink()
    assert "[tool.epcontext" in file.read_text(encoding="utf-8")


def test_models_beyond_the_limit_of_package_indexes_may_be_in_companions(
    cli: Cli, new_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "companions" not in cli("init", "-p", "cpu", "--dry-run").stdout
    monkeypatch.setattr("hatch_epcontext.cli._tables.MAX_SIZE", 10_000)
    text = cli("init", "-p", "cpu").stdout
    assert "wheels of their own: see the key companion" in text


@needs_qnn
def test_all_models_are_found_and_can_be_built(cli: Cli, new_project: Path) -> None:
    for folder in (".hidden", "dist", "env"):
        save(network(), new_project / folder / "c.onnx")
    (new_project / "env" / "pyvenv.cfg").touch()
    (new_project / "models" / "damaged.onnx").write_text("text", encoding="utf-8")
    save(network(), new_project / "tests" / "d.onnx")
    make_folder(new_project / "models" / "llama")
    cli("compile", new_project / "models" / "a.onnx", "-o", new_project / "models" / "a_ctx.onnx",
        "-p", "qnn", "-O", "soc_model=60", "--dim", "batch=1")  # fmt: skip
    printed = cli("init")
    if sys.platform != "darwin":
        assert "coreml" not in printed.stderr
    assert "a_ctx.onnx: is a context model already" in printed.stderr
    assert "damaged.onnx: is not an ONNX model" in printed.stderr
    entry = '{ path = "models/llama", context-length = 2048 }'
    assert f"is a language model, and is left out. List it: models = [{entry}]" in printed.stderr
    assert "epcontext build --dry-run" in printed.stdout
    lines = cli("build", new_project, "--dry-run").stdout.splitlines()[1:-1]
    # Of the EPs whose packages are installed, those that offer a device on this machine.
    targets = {line.split()[2] for line in lines}
    assert {"qnn", "cpu"} <= targets <= set(PROVIDERS) - {"cuda", "directml", "webgpu"}
    assert {line.split(" -> ")[0] for line in lines} == {"a", "b"}
    assert "stays as it is" in cli("init").stdout


def test_chosen_models_for_several_providers(cli: Cli, new_project: Path) -> None:
    cli("init", "models/b.onnx", "-p", "cpu", "-p", "cuda")
    assert cli("build", "--target", "cpu", "--dry-run").stdout.splitlines()[1] == "b -> cpu  cpu"
    cli("init", "models/a.onnx")
    assert cli("build", "--target", "cpu").stderr.count("agrees on ") == 2


def test_a_dry_run_changes_nothing(cli: Cli, new_project: Path) -> None:
    printed = cli("init", "-p", "cpu", "--dry-run").stdout
    assert '+path = "models/a.onnx"' in printed
    assert ' name = "my-app"  # ours' in printed
    assert (new_project / "pyproject.toml").read_text(encoding="utf-8") == BEFORE


def test_line_ends_and_the_mode_of_the_file_are_kept(cli: Cli, new_project: Path) -> None:
    file = new_project / "pyproject.toml"
    file.write_bytes(BEFORE.replace("\n", "\r\n").encode())
    file.chmod(0o640)
    cli("init", "-p", "cpu")
    text = file.read_bytes()
    assert text.startswith(BEFORE.replace("\n", "\r\n").encode())
    assert text.count(b"\n") == text.count(b"\r\n")
    assert file.stat().st_mode & 0o777 == 0o640
    assert "stays as it is" in cli("init").stdout


def test_unusable_models_and_projects_are_errors(
    cli: Cli, new_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = save(network(), tmp_path / "elsewhere.onnx")
    printed = cli("init", elsewhere, code=2).stderr
    assert "is not inside the project" in printed
    (new_project / "models" / "a.onnx").write_text("text", encoding="utf-8")
    printed = cli("init", new_project / "models" / "a.onnx", code=1).stderr
    assert "is not an ONNX model" in printed
    assert (new_project / "pyproject.toml").read_text(encoding="utf-8") == BEFORE
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert "does not exist" in cli("init", code=2).stderr
    (tmp_path / "empty" / "pyproject.toml").touch()
    assert "has no ONNX models" in cli("init", code=2).stderr
    assert "Invalid value for '-p'" in cli("init", "-p", "nothing", code=2).stderr


def test_a_link_is_taken_and_unknown_sizes_are_asked_for_in_a_comment(
    cli: Cli, new_project: Path, tmp_path: Path
) -> None:
    made = model(
        [helper.make_node("Relu", ["x"], ["y"])],
        [value("x", ["batch", "width"])],
        [value("y", ["batch", "width"])],
    )
    elsewhere = save(made, tmp_path / "elsewhere.onnx")
    link = new_project / "models" / "link.onnx"
    link.symlink_to(elsewhere)
    printed = cli("init", link, "-p", "qnn").stdout
    assert 'from my_app.epcontext import load\n    session = load("link")\n' in printed
    question = (
        "dims = { batch = 1, width = ? }  # 1 is a guess; width: which size? "
        "(epcontext record shows it)"
    )
    assert f"models/link.onnx: {question}" in printed
    # Until its size is known, there are only errors to see.
    assert "--dry-run" not in printed
    text = (new_project / "pyproject.toml").read_text(encoding="utf-8")
    assert f'path = "models/link.onnx"\n# {question}\n' in text
    assert "stays as it is" in cli("init", link).stdout


@pytest.mark.parametrize(
    ("chip", "written"),
    [
        (("--set", "chip=qcs9100"), {"chip": "qcs9100"}),
        (("-O", "soc_model=77"), {"provider-options": {"soc_model": 77}}),
        ((), {"chip": "snapdragon-x-elite"}),
    ],
)
def test_settings_are_written_into_the_tables(
    cli: Cli, new_project: Path, chip: tuple[str, ...], written: dict[str, object]
) -> None:
    flags = (*chip, "--set", "min-coverage=0.9", "--set", "validate=require")
    cli("init", "models/a.onnx", "-p", "qnn", *flags, "--dim", "a:batch=2")
    tables = parse((new_project / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "epcontext"
    ]
    assert tables["targets"]["qnn"] == {"provider": "qnn", **written, "min-coverage": 0.9}
    assert tables["models"] == [
        {"path": "models/a.onnx", "dims": {"batch": 2}, "validate": {"mode": "require"}}
    ]
    cli("init", "models/b.onnx", "--dim", "batch=4")
    tables = parse((new_project / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "epcontext"
    ]
    assert tables["models"][1] == {"path": "models/b.onnx", "dims": {"batch": 4}}
    printed = cli("init", "models/b.onnx", "--set", "min-coverage=1", code=2).stderr
    assert "targets can only be chosen for a new configuration" in printed
    printed = cli("init", "models/b.onnx", "--set", "editable=skip", code=2).stderr
    assert '--set editable: EPC001\n    "editable" is not a key that can be set' in printed


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("tool = 3", "has values to which nothing can be added"),
        ("tool.epcontext = 3", "EPC025"),
        ("tool.epcontext.models = 3", "models"),
        ("tool.hatch.build.hooks = 3", "has values to which nothing can be added"),
        ("project = 3", None),
        ('project.optional-dependencies = "x"', None),
        ('build-system = { requires = 3, build-backend = "hatchling" }', "requires: EPC025"),
        ("tool.hatch.build.targets.wheel.exclude = [3]", None),
        ("tool.hatch.build.targets.wheel.force-include = 3", None),
        ("project.dependencies = 3", None),
        ("project.requires-python = 3", None),
        ("build-system.build-backend = 3", None),
    ],
)
def test_malformed_tables_are_errors_or_are_not_read(
    cli: Cli, new_project: Path, toml: str, message: str | None
) -> None:
    (new_project / "pyproject.toml").write_text(f"{toml}\n", encoding="utf-8")
    providers = [] if "epcontext." in toml else ["-p", "cpu"]
    printed = cli("init", *providers, code=0 if message is None else 2)
    if message is None:
        assert 'session = load("a")  # or "b"' in printed.stdout
    else:
        assert message in printed.stderr


@needs_qnn
@pytest.mark.slow
def test_a_trial_writes_what_works(cli: Cli, new_project: Path) -> None:
    models = {
        "refused": "(float[4, 4] x) => (int64[2, n] y) {y = NonZero(x)}",
        "broken": "(float[4] x) => (float[4] y) {y = com.microsoft.Mystery(x)}",
        "asking": (
            "(float[width] x) => (float[2, 3] y)"
            "{s = Constant <value_ints = [2, 3]> () y = Reshape(x, s)}"
        ),
    }
    for name, text in models.items():
        save(parsed(text, check=False), new_project / "models" / f"{name}.onnx")
    file = new_project / "pyproject.toml"

    result = cli("init", "--try", "-p", "qnn", "-O", "soc_model=60")
    printed = result.stdout
    assert "models/a.onnx: works for qnn and cpu\n" in printed
    assert "models/refused.onnx: works for cpu; qnn: QNNExecutionProvider cannot compile" in printed
    assert "models/broken.onnx is left out: qnn: the source model itself" in result.stderr
    question = "its sizes are unknown: dims = { width = ? }"
    assert f"models/asking.onnx is left out: {question}" in result.stderr
    assert 'a number for each "?"' not in printed
    text = file.read_text(encoding="utf-8")
    assert "\n# qnn: QNNExecutionProvider cannot compile 1 of the 1 nodes: NonZero" in text
    tables = parse(text)["tool"]["epcontext"]
    assert tables["targets"]["cpu"] == {"provider": "cpu"}
    assert [(table["path"], table.get("targets")) for table in tables["models"]] == [
        ("models/a.onnx", None),
        ("models/b.onnx", None),
        ("models/refused.onnx", ["cpu"]),
    ]
    assert cli("build").stderr.count("from the cache") == 5
    assert "stays as it is" in cli("init", "--try").stdout

    file.write_text(
        '[tool.epcontext]\nmodels = [\n    { path = "models/a.onnx", dims = { batch = 1 } },\n]\n'
        'targets.npu = { provider = "qnn", provider-options = { soc_model = 60 } }\n',
        encoding="utf-8",
    )
    cli("init", "models/refused.onnx", "models/broken.onnx", "--try")
    text = file.read_text(encoding="utf-8")
    assert "# npu: QNNExecutionProvider cannot compile 1 of the 1 nodes: NonZero" in text
    tables = parse(text)["tool"]["epcontext"]
    assert tables["models"][1:] == [{"path": "models/refused.onnx", "targets": ["cpu"]}]
    assert tables["targets"]["cpu"] == {"provider": "cpu"}
    assert cli("build").stderr.count("from the cache") == 3


STOPPED = """
import signal, sys
from hatch_epcontext.cli import main

write = sys.stderr.write

def stop(text):
    write(text)
    if "b -> cpu" in text:
        signal.raise_signal(signal.SIGINT)

sys.stderr.write = stop
# A shell lets what it runs in the background ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""
"""The command, which gets Ctrl-C when it has compiled the model ``b``."""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_trial_that_is_stopped_keeps_what_it_has_compiled(cli: Cli, new_project: Path) -> None:
    models = new_project / "models"
    for number in range(6):
        model = network()
        model.doc_string = str(number)
        save(model, models / f"c{number}.onnx")
    arguments = (sys.executable, "-c", STOPPED, "init", "--try", "-p", "cpu")
    process = subprocess.run(arguments, stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 1
    rest = process.stderr.partition("b -> cpu")[2]
    assert "stopped; epcontext init --try compiles what is left: " in rest
    file = new_project / "pyproject.toml"
    written = [t["path"] for t in parse(file.read_text())["tool"]["epcontext"]["models"]]
    assert written[0] == "models/a.onnx"
    assert len(written) < 8
    assert f"and {written[-1]}" not in rest
    printed = cli("init", "--try").stdout
    assert all(f"{name}: works for cpu" not in printed for name in written)
    assert len(parse(file.read_text())["tool"]["epcontext"]["models"]) == 8


def test_a_size_goes_to_the_models_that_have_it_and_an_unknown_name_is_told_once(
    cli: Cli, new_project: Path
) -> None:
    texts = {
        "a": "(float[batch, length] x) => (float[batch, length] y) {y = Neg(x)}",
        "b": "(float[batch, length] z) => (float[batch, length] y) {y = Neg(z)}",
        "c": "(float[width] x) => (float[width] y) {y = Neg(x)}",
    }
    for name, text in texts.items():
        save(parsed(text), new_project / "models" / f"{name}.onnx")
    wrong = ("--dim", "lenght=3", "--dim", "c:batch=3", "--set", "constants.k=1")
    result = cli("init", "--try", "-p", "cpu", *wrong, code=2)
    assert problems(result) == [
        '--set dims."c:batch": EPC205',
        "--set dims.lenght: EPC205",
        "--set constants.k: EPC205",
    ]
    assert result.stderr.count("lenght") == 1
    sizes = ("--dim", "a:length=64", "--dim", "batch=2", "--dim", "width=8")
    cli("init", "-p", "qnn", *sizes, "--set", "shapes.z=[2, 5]")
    text = (new_project / "pyproject.toml").read_text(encoding="utf-8")
    assert [
        {k: v for k, v in t.items() if k != "path"}
        for t in parse(text)["tool"]["epcontext"]["models"]
    ] == [
        {"dims": {"length": 64, "batch": 2}},
        {"dims": {"batch": 2}, "shapes": {"z": [2, 5]}},
        {"dims": {"width": 8}},
    ]


PROJECT_TABLE = '[project]\nname = "my-app"\nversion = "1.0"\ndescription = "An app."\n'

BACKENDS = {
    "a setup.py": (None, "my_app"),
    "no back end": (
        f'{PROJECT_TABLE}[build-system]\nrequires = ["setuptools"]\n',
        "src/my_app",
    ),
    "poetry": (
        ('[tool.poetry]\nname = "my-app"\nversion = "1.0"\ndescription = "An app."\n'
        'authors = ["A <a@example.org>"]\n[tool.poetry.dependencies]\npython = "^3.10"\n'
        '[build-system]\nrequires = ["poetry-core"]\nbuild-backend = "poetry.core.masonry.api"\n'),
        "my_app",
    ),
    "flit in src": (
        ('[build-system]\nrequires = ["flit_core<4"]\nbuild-backend = "flit_core.buildapi"\n'
        f"{PROJECT_TABLE}"),
        "src/my_app",
    ),
}  # fmt: skip
"""The ``pyproject.toml`` of a project before ``init``, and the folder of its import package; others are in
``tests/test_backend.py``.
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all back ends: their models are the same."""
    return tmp_path_factory.mktemp("cache")


HOOKS = """
import sys
del sys.path[0]
# setuptools replaces them.
folder = sys.argv[1]
from hatch_epcontext import backend
backend.build_editable(".")
print(backend.build_wheel(folder), backend.build_sdist(folder))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_builds_of_any_back_end_work_without_another_edit(
    name: str, cli: Cli, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, package = BACKENDS[name]
    project = tmp_path / "project"
    (project / package).mkdir(parents=True)
    (project / package / "__init__.py").write_text('"""An app."""\n', encoding="utf-8")
    save(network(), project / "models" / "a.onnx")
    if text is not None:
        (project / "pyproject.toml").write_text(text, encoding="utf-8")
    else:
        script = 'from setuptools import setup\nsetup(name="my-app", packages=["my_app"])\n'
        (project / "setup.py").write_text(script, encoding="utf-8")
    monkeypatch.chdir(project)
    cli("init", "-p", "cpu")
    # The back ends call programs, and no worker does.
    scripts = sysconfig.get_path("scripts")
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HATCH_EPCONTEXT_CACHE_DIR", str(cache))
    # A process for each hook would import its back end anew.
    done = subprocess.run(
        [sys.executable, "-c", HOOKS, str(tmp_path)], check=True, capture_output=True, text=True
    )
    wheel, sdist = done.stdout.splitlines()[-1].split()
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        assert {"my_app/__init__.py", "my_app/epcontext/manifest.json"} <= {*archive.namelist()}
    with tarfile.open(tmp_path / sdist) as archive:
        assert any(file.endswith("/models/a.onnx") for file in archive.getnames())
    assert (project / package / "epcontext" / "manifest.json").is_file()
