"""What models and records contain reaches no terminal as more than text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx import helper

from hatch_epcontext.cli._common import show_table
from hatch_epcontext.text import printable
from tests.cli.conftest import Cli
from tests.models import model, save, value
from tests.projects import make_project

TITLE = "\x1b]0;owned\x07[red]\u202e\x9b31m\n"
"""It would set the title of a terminal, choose a colour in two ways, turn the line around, and end it."""

SHOWN = r"\x1b]0;owned\x07[red]\u202e\x9b31m\n"


def harmless(text: str) -> bool:
    return all(printable(line) == line for line in text.split("\n"))


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A project with a model of such names, whose output is always the same, so that nothing is proved."""
    made = model(
        [
            helper.make_node("Sub", [f"x{TITLE}", f"x{TITLE}"], [f"n{TITLE}"], f"sub{TITLE}"),
            helper.make_node("Cos", [f"n{TITLE}"], [f"y{TITLE}"], f"cos{TITLE}"),
        ],
        [value(f"x{TITLE}", [2])],
        [value(f"y{TITLE}", [2])],
    )
    toml = 'models = [{ path = "models/a.onnx", validate = "require" }]'
    root = make_project(tmp_path / "project", f'targets.cpu.provider = "cpu"\n{toml}\n')
    save(made, root / "models" / "a.onnx")
    return root


def test_a_failed_validation_names_a_tensor_as_text(cli: Cli, named: Path) -> None:
    printed = cli("build", named, "-v", code=1)
    assert harmless(printed.output)
    assert f"the comparison of the output 'y{SHOWN}' is inconclusive" in printed.output


def test_inspecting_shows_names_as_text(cli: Cli, named: Path) -> None:
    file = named / "models" / "a.onnx"
    printed = cli("inspect", file).stdout
    assert harmless(printed)
    assert f"input x{SHOWN}: float32, 2" in printed
    as_json = cli("inspect", file, "--json").stdout
    assert harmless(as_json)
    assert json.loads(as_json)["model"]["inputs"][0]["name"] == f"x{TITLE}"


def test_a_table_shows_cells_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["name"], [[TITLE]])
    printed = capsys.readouterr().out
    assert harmless(printed)
    assert SHOWN in printed
