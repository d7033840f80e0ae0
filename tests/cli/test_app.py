from __future__ import annotations

import builtins
import json
import subprocess
import sys
from typing import Any

import pytest
from click.shell_completion import ShellComplete

import hatch_epcontext
from hatch_epcontext import cli as package
from hatch_epcontext.cli.app import app
from tests.cli.conftest import Cli


def test_help_and_version(cli: Cli) -> None:
    assert "Exit codes: 0 done, 1 something failed, 2 wrong" in cli("--help").stdout
    assert cli("-h").stdout == cli("--help").stdout
    assert hatch_epcontext.__version__ in cli("--version").stdout
    for command in app.commands:
        assert command in cli("--help").stdout
        assert "Usage: " in cli(command, "--help").stdout


def test_the_schema(cli: Cli) -> None:
    assert json.loads(cli("schema").stdout) == schema.make()


def test_it_is_installed_as_a_command() -> None:
    code = (
        "import sys; from hatch_epcontext.cli import main; sys.argv = ['epcontext', '-h']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: ")


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "hatch_epcontext.cli.app":
            raise ModuleNotFoundError("No module named 'click'", name="click")
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit) as ended:
        package.main()
    assert ended.value.code == 2
    assert 'pip install "hatch-epcontext[cli]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "begun", "completed"),
    [
        ([], "com", ["compile"]),
        (["compile", "-p"], "ten", ["tensorrt", "tensorrt-rtx"]),
        (["bench", "--optimization"], "b", ["basic"]),
        (["cache"], "p", ["prune"]),
    ],
)
def test_shells_complete_commands_and_what_flags_take(
    arguments: list[str], begun: str, completed: list[str]
) -> None:
    shell = ShellComplete(app, {}, "epcontext", "_EPCONTEXT_COMPLETE")
    assert [item.value for item in shell.get_completions(arguments, begun)] == completed


def test_every_command_says_in_a_line_what_it_does() -> None:
    for command in app.commands.values():
        # A line that is too long would be cut, with dots in place of the rest.
        assert command.get_short_help_str(60).endswith(".")
        assert "..." not in command.get_short_help_str(60)
