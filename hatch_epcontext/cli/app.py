"""The group of all commands: it turns errors into messages and exit codes."""

from __future__ import annotations

from typing import Any

import click

import hatch_epcontext
from hatch_epcontext.cli._flag_errors import error_text
from hatch_epcontext.cli._output import echo
from hatch_epcontext.cli.add import add
from hatch_epcontext.cli.bench import bench_
from hatch_epcontext.cli.build import build
from hatch_epcontext.cli.cache import cache
from hatch_epcontext.cli.compile import compile_
from hatch_epcontext.cli.doctor import doctor
from hatch_epcontext.cli.export import export_
from hatch_epcontext.cli.fetch import fetch
from hatch_epcontext.cli.init import init
from hatch_epcontext.cli.inspect import inspect
from hatch_epcontext.cli.pin import pin_
from hatch_epcontext.cli.record import record
from hatch_epcontext.cli.schema import schema
from hatch_epcontext.cli.validate import validate
from hatch_epcontext.errors import ConfigError, EpcontextError
from hatch_epcontext.jobs.termination import terminated_as_error
from hatch_epcontext.system import os_error_text


class _Failure(click.ClickException):
    """An expected error: a message without a traceback."""

    def show(self, file: Any = None) -> None:
        echo(f"epcontext: {self.message}", err=True, lines=True)


class _InvalidConfiguration(_Failure):
    exit_code = 2


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            with terminated_as_error():
                return super().invoke(ctx)
        except ConfigError as error:
            raise _InvalidConfiguration(error_text(error, ctx)) from error
        except EpcontextError as error:
            raise _Failure(error_text(error, ctx)) from error
        except OSError as error:
            raise _Failure(os_error_text(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hatch_epcontext.__version__, prog_name="epcontext")
def app() -> None:
    """Compile ONNX models into ONNX Runtime EP-context artifacts.

    Exit codes: 0 success, 1 failure, 2 wrong usage or invalid configuration.
    """


for _command in (
    add,
    bench_,
    build,
    cache,
    compile_,
    doctor,
    export_,
    fetch,
    init,
    inspect,
    pin_,
    record,
    schema,
    validate,
):
    app.add_command(_command)
