from __future__ import annotations

import builtins
import json
import subprocess
import sys
from typing import Any

import pytest

import hatch_epcontext
from hatch_epcontext import cli as package
from hatch_epcontext import schema
from tests.cli.conftest import Cli


def test_help_and_version(cli: Cli) -> None:
    assert "Exit codes: 0 done, 1 something failed, 2 wrong" in cli("--help").stdout
    assert cli("-h").stdout == cli("--help").stdout
    assert hatch_epcontext.__version__ in cli("--version").stdout
    for command in ("build", "cache", "schema"):
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
