from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from onnx import helper

import hatch_epcontext
from hatch_epcontext import cli as package
from hatch_epcontext.cli.app import SUMMARIES, app
from hatch_epcontext.config import json_schema
from tests.cli.conftest import Cli
from tests.models import model, save, value


def test_help_and_version(cli: Cli) -> None:
    assert "Exit codes: 0 success, 1 failure, 2 wrong" in cli("--help").stdout
    assert cli("-h").stdout == cli("--help").stdout
    assert hatch_epcontext.__version__ in cli("--version").stdout
    for command in app.commands:
        assert command in cli("--help").stdout
        printed = cli(command, "--help").stdout
        assert "Usage: " in printed
        assert printed.count("\n") <= 48, f"the help of {command} does not fit a screen"


def test_schema_prints_the_json_schema(cli: Cli) -> None:
    assert json.loads(cli("schema").stdout) == json_schema.make()


def test_without_its_extra_it_prints_what_to_install(
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
    ("arguments", "incomplete", "completed"),
    [
        ([], "com", ["companions", "compile"]),
        (["compile", "-p"], "ten", ["tensorrt", "tensorrt-rtx"]),
        (["compile", "--device"], "n", ["npu"]),
        (["cache"], "p", ["prune"]),
    ],
)
def test_shells_complete_commands_and_values_of_flags(
    arguments: list[str], incomplete: str, completed: list[str]
) -> None:
    shell = ShellComplete(app, {}, "epcontext", "_EPCONTEXT_COMPLETE")
    assert [item.value for item in shell.get_completions(arguments, incomplete)] == completed


def test_the_summary_of_every_command_is_the_first_line_of_its_help() -> None:
    assert {name: each.get_short_help_str(60) for name, each in app.commands.items()} == SUMMARIES


def test_the_help_of_the_group_imports_no_command() -> None:
    code = (
        "import sys; from hatch_epcontext.cli import main; sys.argv = ['epcontext', '-h']\n"
        "try: main()\n"
        "except SystemExit: print(*(name for name in sys.modules if name.startswith('hatch_epcontext.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: ")
    imported = done.stdout.splitlines()[-1].split()
    assert imported == ["hatch_epcontext.cli.app"]


def _commands(group: click.Group, *names: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*names, name)
        if isinstance(command, click.Group):
            yield from _commands(command, *names, name)


_MAIN = "import sys; from hatch_epcontext.cli import main; sys.argv[0] = 'epcontext'; main()"


@pytest.mark.parametrize(
    ("arguments", "with_errors"), [(["schema"], False), (["validate", "nothing.onnx"], True)]
)
def test_a_reader_that_leaves_ends_the_command(arguments: list[str], with_errors: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MAIN, *arguments],
            check=False,
            stdout=writing,
            stderr=writing if with_errors else subprocess.PIPE,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr or b"") == (1, b"")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signal")
def test_an_interruption_while_commands_are_imported_is_one_line() -> None:
    interrupted = (
        "import os, signal, sys\n"
        # A shell lets what it runs in the background ignore it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'hatch_epcontext.cli.app': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", interrupted + _MAIN, "schema"], check=False, capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"Aborted!\n")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_a_closed_stream_is_no_error() -> None:
    command = '"$0" -c "$1" schema >&-'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, _MAIN], check=False, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_a_code_page_lacks_is_escaped(tmp_path: Path) -> None:
    """A pipe on Windows has the code page of the system."""
    relu = helper.make_node("Relu", ["\u65e5"], ["y"])
    path = save(model([relu], [value("\u65e5", [2])], [value("y", [2])]), tmp_path / "a.onnx")
    done = subprocess.run(
        [sys.executable, "-c", _MAIN, "inspect", str(path)],
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "cp1252:strict"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"input \\u65e5: float32" in done.stdout
