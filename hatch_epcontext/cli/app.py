"""The group of all commands: it turns errors into messages and exit codes."""

from __future__ import annotations

import importlib
from collections import UserDict
from collections.abc import Mapping
from typing import Any

import click

import hatch_epcontext
from hatch_epcontext.errors import ConfigError, EpcontextError
from hatch_epcontext.system import system_error_text, terminated_as_error
from hatch_epcontext.text import printable

SUMMARIES: Mapping[str, str] = {
    "add": "Add a model from elsewhere to pyproject.toml.",
    "bench": "Measure how fast compiled models open and run.",
    "build": "Compile and validate a project's models, without a wheel.",
    "cache": "Show and clean the cache of artifacts.",
    "companions": "Build the wheels of a project's companions.",
    "compile": "Compile any models, and validate the results.",
    "doctor": "Show what this machine can compile, and what a wheel does.",
    "export": "Write the model package of a project.",
    "fetch": "Download the models from elsewhere into the user's cache.",
    "init": "Write the tables for models into pyproject.toml.",
    "inspect": "Show the facts of a model, a wheel or a model package.",
    "record": "Run the app, and keep some inputs of its models.",
    "schema": "Print the JSON schema of [tool.epcontext].",
    "validate": "Validate a context model or a model package.",
}
"""What each command does. The command itself is ``command`` in the module with its name, which the help of
the group does not import.
"""


class _Failure(click.ClickException):
    """An expected error: a message without a traceback."""

    def show(self, file: Any = None) -> None:
        click.echo(printable(f"epcontext: {self.message}", lines=True), err=True)


class _InvalidConfiguration(_Failure):
    exit_code = 2


class _Commands(UserDict[str, Any]):
    """The commands by name; each is imported when it is looked up."""

    def __getitem__(self, name: str) -> click.Command:
        if name not in self:
            raise KeyError(name)
        command: click.Command = importlib.import_module(f"hatch_epcontext.cli.{name}").command
        return command


class _Group(click.Group):
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with terminated_as_error():
                return super().invoke(ctx)
        except EpcontextError as error:
            from hatch_epcontext.cli._settings import error_text

            kind = _InvalidConfiguration if isinstance(error, ConfigError) else _Failure
            raise kind(error_text(error, ctx)) from error
        except BrokenPipeError:
            # As in ``epcontext doctor | head``: click ends the command.
            raise
        except (OSError, UnicodeError) as error:
            if (text := system_error_text(error)) is None:
                raise
            raise _Failure(text) from error


@click.group(
    cls=_Group,
    commands=_Commands(SUMMARIES),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(hatch_epcontext.__version__, prog_name="epcontext")
def app() -> None:
    """Compile ONNX models into ONNX Runtime EP-context artifacts.

    Exit codes: 0 success, 1 failure, 2 wrong usage or invalid configuration.
    """
