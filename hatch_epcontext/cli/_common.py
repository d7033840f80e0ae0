"""Shared by commands: lines and tables without control characters, progress and reports."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hatch_epcontext.config.environ import PREFIX, REPORT_SUFFIXES, read_environment
from hatch_epcontext.config.paths import NO_HOME, default_root
from hatch_epcontext.errors import ConfigError, Kind, Problem, collect
from hatch_epcontext.files import for_windows
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.cache.store import Store
from hatch_epcontext.jobs.plan import Plan
from hatch_epcontext.jobs.processes.process import Heartbeat, Workers
from hatch_epcontext.jobs.report import make_report
from hatch_epcontext.jobs.report_file import write_report
from hatch_epcontext.jobs.run import IncompleteError, build, open_cache
from hatch_epcontext.package.manifest import FILE
from hatch_epcontext.serialize import to_json
from hatch_epcontext.system import check_file
from hatch_epcontext.text import count, printable, show_size

Command = Callable[..., Any]


_WIDTH = 240
"""The number of columns if the output is not a terminal: enough to break no name."""


def echo(text: str, *, err: bool = False, lines: bool = False) -> None:
    """Print ``text``, which is one line unless ``lines`` is set."""
    click.echo(printable(text, lines=lines), err=err)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; sizes and files are aligned to the right."""
    table = Table()
    for column in columns:
        is_number = column in ("size", "files")
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    # Without Rich's markup, because some names look like it.
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(table)


class ExistingPath(click.Path):
    """A file or folder that exists."""

    def __init__(self, *, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(exists=True, file_okay=file_okay, dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; fails if there is none."""
        if rejection := for_windows(os.fspath(value)):
            self.fail(f"{value} {rejection.message} {rejection.hint}", param, ctx)
        return super().convert(value, param, ctx)


def warn(text: str) -> None:
    """Print a warning."""
    echo(f"epcontext: {text}", err=True, lines=True)


def log(line: str) -> None:
    """Print a line about a step, beside the command's output."""
    echo(line, err=True)


@dataclass(frozen=True)
class Verbosity:
    """How much a command prints while it runs.

    ``verbose`` is how often ``--verbose`` was given. ``quiet``: errors only.
    """

    verbose: int = 0
    quiet: bool = False
    _pulse: Heartbeat = field(default_factory=Heartbeat, compare=False, repr=False)

    @classmethod
    def beside_json(cls, verbose: int, *, as_json: bool) -> Verbosity:
        """The verbosity of a command that prints JSON with ``as_json``: quiet unless it is verbose."""
        return cls(verbose, as_json and not verbose)

    @contextlib.contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        """A context with a progress bar on a terminal; elsewhere with only a line for each step.

        Its value is a function to call with a line after each of the ``total`` steps.
        """
        console = Console(stderr=True)
        if self.quiet or not console.is_terminal:
            yield self._print
            return
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bars:
            task = bars.add_task(title, total=total)

            def advance(line: str) -> None:
                bars.advance(task)
                self._print(line)

            yield advance

    def workers(self, timeout: float, memory_limit: int | None = None) -> Workers:
        """Workers with these limits, in seconds and bytes.

        Steps that run for long are printed, and the workers' log if the command is verbose.
        """
        log = self._print if self.verbose else None
        return Workers(
            timeout, log, self.verbose > 1, memory_limit, progress=self._print, pulse=self._pulse
        )

    def _print(self, line: str) -> None:
        self._pulse.mark_reported()
        if not self.quiet:
            # On a terminal rich replaces the stream, and keeps its progress bar below.
            echo(line, err=True)


def open_store() -> Store:
    """The store of `find_store`; raises ConfigError if there is none."""
    store = find_store()
    if store is None:
        variable = f"{PREFIX}CACHE_DIR"
        raise ConfigError(Problem(Kind.MISSING_KEY, variable, f"{NO_HOME}.", "Name a folder."))
    return store


def find_store() -> Store | None:
    """The store in the user's cache folder, or that of the environment; None without a home folder."""
    named = os.environ.get(f"{PREFIX}CACHE_DIR")
    try:
        root = (Path(named) if named else default_root() or Path("~")).expanduser()
    except RuntimeError:
        return None
    return Store(root.absolute())


def is_offline() -> bool:
    """Whether the environment forbids to download models."""
    environment, _ = collect(read_environment(os.environ))
    return environment.offline


verbose_option = click.option(
    "-v", "--verbose", count=True, help="Print the workers' log; -vv: all of it."
)


def _report_path(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path.suffix not in REPORT_SUFFIXES:
        raise click.BadParameter(f"{path.name} must end in {' or '.join(REPORT_SUFFIXES)}.")
    return path


def report_options(command: Command) -> Command:
    """``--json`` and ``--report``."""
    as_json = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
    report = click.option(
        "--report",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_report_path,
        metavar="F.html",
        help="Write a report: .html or .json.",
    )
    return report(as_json(command))


def show_written(package: Path, files: Sequence[Path], *, as_json: bool) -> None:
    """Print that the folder ``package`` was written with ``files``; the manifest does not count."""
    sizes = [file.stat().st_size for file in files if file != package / FILE]
    echo(
        f"wrote {package} ({count(len(sizes), 'file')}, {show_size(sum(sizes))})",
        err=as_json,
    )


def run_plan(
    planned: Plan, staging: Path, verbosity: Verbosity, title: str, *, as_json: bool
) -> Result:
    """Run all jobs, and report on them; raises as `build` does.

    With ``as_json`` the report is printed. It is written if the plan's configuration has a
    path for it.
    """
    config = planned.config
    if config.report is not None:
        check_file(config.report)
    cache = open_cache(config, warn)
    workers = verbosity.workers(config.build.timeout, config.build.memory_limit)
    try:
        with verbosity.progress("building", len(planned.jobs)) as log:
            result = build(planned, staging, cache, log, workers, warn)
    except IncompleteError as error:
        _report(error.result, planned, title, as_json=as_json)
        raise
    _report(result, planned, title, as_json=as_json)
    return result


def _report(result: Result, planned: Plan, title: str, *, as_json: bool) -> None:
    report = make_report(result)
    if as_json:
        click.echo(to_json(report), nl=False)
    if planned.config.report is not None:
        write_report(report, title, planned.config.report)
