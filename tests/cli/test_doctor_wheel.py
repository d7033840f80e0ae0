"""``epcontext doctor WHEEL``: what becomes of the targets of a wheel here, and on machines in files."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cli.conftest import Cli, build_wheel, problems, zeroed
from tests.loader.shipped import import_copy
from tests.loader.test_check import compare
from tests.models import save

pytestmark = pytest.mark.one_cache


@pytest.fixture
def wheel(app_project: Path) -> Path:
    return build_wheel(app_project)


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with this machine, as the command prints it."""
    from click.testing import CliRunner

    from hatch_epcontext.cli.app import app

    file = tmp_path_factory.mktemp("machines") / "board.json"
    file.write_text(CliRunner().invoke(app, ["doctor", "--json"]).stdout, "utf-8")
    return file


def changed(board: Path, name: str, **facts: Any) -> Path:
    """A file beside ``board`` with another machine."""
    machine = {**json.loads(board.read_bytes()), **facts}
    file = board.parent / name
    file.write_text(json.dumps(machine), "utf-8")
    return file


def test_this_machine_opens_what_is_for_the_cpu(cli: Cli, wheel: Path) -> None:
    printed = cli("doctor", wheel).stdout
    assert printed.startswith("this machine: ")
    assert "\nmodel  target  this machine\na      one     opens\n" in printed
    assert printed.count("opens, CPUExecutionProvider on cpu") == 4


def test_it_imports_nothing_of_the_wheel(
    cli: Cli, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(wheel)
    cli("doctor", wheel)
    assert "my_app" not in sys.modules


def test_a_fleet_is_a_table(cli: Cli, wheel: Path, board: Path) -> None:
    old = changed(board, "old.json", chip=None, runtime=None)
    snake = changed(board, "snake.json", python="3.9.1")
    narrow = wheel.with_name("my_app-1.0-py3-none-win_arm64.whl")
    shutil.copy(wheel, narrow)
    files = ("--devices", board, "--devices", old)
    printed = cli("doctor", wheel, *files).stdout
    assert "model  target  board  old\na      one     opens  unknown\n" in printed
    assert "a for one: opens on board, CPUExecutionProvider on cpu\n" in printed
    assert "a for one: unknown on old, nothing is known of an ONNX Runtime there\n" in printed
    table = json.loads(cli("doctor", wheel, *files, "--json").stdout)
    assert (table["wheels"], len(table["targets"])) == ([wheel.name], 4)
    first = table["targets"][0]
    assert (first["package"], first["model"], first["target"]) == ("my_app/epcontext", "a", "one")
    answers = {name: cell["answer"] for name, cell in first["machines"].items()}
    assert answers == {"board": "opens", "old": "unknown"}
    failed = cli("doctor", narrow, *files, "--devices", snake, code=1)
    assert (
        "a for two: cannot on board, old and snake, the wheel is for win_arm64\n" in failed.stdout
    )
    assert "board: load raises an error for a and b, because no target opens" in failed.stderr


def test_files_with_one_name_are_told_apart(cli: Cli, wheel: Path, board: Path) -> None:
    (board.parent / "other").mkdir()
    other = changed(board, "other/board.json")
    printed = cli("doctor", wheel, "--devices", board, "--devices", other).stdout
    assert f"a for one: opens on {board} and {other}, CPUExecutionProvider" in printed


def hostile(board: Path) -> dict[str, bytes]:
    machine = json.loads(board.read_bytes())
    return {
        "empty": b"",
        "no text": b"\xff\xfe\x00\xd8",
        "no table": b"[]",
        "nothing": b"{}",
        "a number": json.dumps({**machine, "python": 3}).encode(),
        "no number": json.dumps({**machine, "packages": float("nan")}).encode(),
        "deep": b"[" * 100_000,
        "digits": b"9" * 5000,
        "providers": json.dumps({**machine, "providers": [{"ep": "x"}]}).encode(),
        "runtime": json.dumps({**machine, "runtime": {"version": "1"}}).encode(),
    }


def test_a_file_that_describes_no_machine_is_an_error(
    cli: Cli, wheel: Path, board: Path, tmp_path: Path
) -> None:
    files = hostile(board)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        result = cli("doctor", wheel, "--devices", tmp_path / name, code=2)
        assert problems(result) == [f"--devices {tmp_path / name}: EPC027"], name
        assert max(map(len, result.stderr.replace(str(tmp_path), "").splitlines())) < 250
    for other in (tmp_path, tmp_path / "none", os.devnull):
        assert "EPC027" in cli("doctor", wheel, "--devices", other, code=2).stderr
    assert len(files) == 10


def test_what_a_file_says_is_printed_without_control_characters(
    cli: Cli, wheel: Path, board: Path
) -> None:
    red = changed(board, "red.json", system="\x1b[31mred\nred")
    printed = cli("doctor", wheel, "--devices", red).stdout
    assert r"red: \x1b[31mred\nred, " in printed


def test_files_of_powershell_are_read(cli: Cli, wheel: Path, board: Path) -> None:
    file = board.with_name("utf16.json")
    file.write_text(board.read_text("utf-8"), "utf-16")
    assert "a      one     opens" in cli("doctor", wheel, "--devices", file).stdout


def test_a_wheel_without_models_is_an_error(cli: Cli, tmp_path: Path) -> None:
    for name in ("none-1.0-py3-none-any.whl", "pyproject.toml"):
        assert problems(cli("doctor", tmp_path / name, code=1)) == [f"{tmp_path / name}: EPC505"]


COMPANIONS = """
[project.optional-dependencies]
cpu = ["my-app-cpu==1.0"]
npu = ["my-app-npu==1.0"]
[tool.epcontext]
models = ["models/a.onnx"]
fallback = { companion = "my-app-cpu" }
targets.npu = { provider = "cpu", companion = "my-app-npu" }
targets.two = { provider = "cpu", companion = "my-app-cpu" }
targets.one = { provider = "cpu" }
"""


def test_companions_count_for_the_app(
    cli: Cli, app_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (app_project / "pyproject.toml").write_text(COMPANIONS, encoding="utf-8")
    app = build_wheel(app_project)
    cli("companions", app_project, "-o", tmp_path)
    cpu, npu = tmp_path.glob("my_app_cpu-*.whl"), tmp_path.glob("my_app_npu-*.whl")
    wheels = [app, *cpu, *npu]
    assert len(wheels) == 3
    alone = cli("doctor", app).stdout
    assert "a for npu: unknown, it is in the wheel of my-app[npu]\n" in alone
    table = json.loads(cli("doctor", *wheels, "--json").stdout)["targets"]
    assert [(row["package"], row["target"]) for row in table] == [
        ("my_app/epcontext", target) for target in ("npu", "two", "one", "source")
    ]
    answers = {row["target"]: row["machines"]["this machine"]["answer"] for row in table}
    assert set(answers.values()) == {"opens"}
    # As the loader says where they are installed.
    for wheel in wheels:
        shutil.unpack_archive(wheel, tmp_path / "installed", "zip")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.setitem(sys.modules, "shipped", ModuleType("shipped"))
    module = import_copy(tmp_path / "installed" / "my_app" / "epcontext" / "__init__.py")
    assert compare(module) == ["opens"] * 4
    narrow = wheels[2].rename(tmp_path / "my_app_npu-1.0-py3-none-win_arm64.whl")
    printed = cli("doctor", app, wheels[1], narrow).stdout
    assert "a for npu: cannot, the wheel is for win_arm64\n" in printed
    assert "a for two: opens, " in printed


def test_a_companion_of_another_model_cannot(cli: Cli, app_project: Path, tmp_path: Path) -> None:
    (app_project / "pyproject.toml").write_text(COMPANIONS, encoding="utf-8")
    app = build_wheel(app_project)
    save(zeroed(), app_project / "models" / "a.onnx")
    cli("companions", app_project, "-o", tmp_path)
    (npu,) = tmp_path.glob("my_app_npu-*.whl")
    printed = cli("doctor", app, npu).stdout
    assert f"a for npu: cannot, {npu.name} is for another version of this model\n" in printed


def test_flags_that_exclude_each_other(cli: Cli, wheel: Path, board: Path) -> None:
    cli("doctor", "--devices", board, code=2)
    cli("doctor", wheel, "--library", "x", code=2)
