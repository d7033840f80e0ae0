"""What commands that run jobs have in common: a folder to work in, a voice, progress, and reports."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hatch_epcontext import page
from hatch_epcontext.build import IncompleteError, build
from hatch_epcontext.cache import Cache, Store, default_root
from hatch_epcontext.environment import PREFIX
from hatch_epcontext.plan import Plan
from hatch_epcontext.process import Workers
from hatch_epcontext.report import make
from hatch_epcontext.result import Result
from hatch_epcontext.structure import to_json

Command = TypeVar("Command", bound=Callable[..., Any])


def warn(text: str) -> None:
    """Tell what is not as it should be, and does not keep the command from going on."""
    click.echo(f"epcontext: {text}", err=True)


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder of the command's own, which is removed in the end."""
    with tempfile.TemporaryDirectory(
        prefix="hatch-epcontext-", ignore_cleanup_errors=True
    ) as temporary:
        # Resolved, for a temporary folder is often behind a link, and EPs compare paths.
        yield Path(temporary).resolve()


@dataclass(frozen=True)
class Voice:
    """How much a command says while it runs."""

    quiet: bool
    verbose: int

    @classmethod
    def of(cls, quiet: bool, verbose: int, *, as_json: bool) -> Voice:
        """The voice that was asked for; beside JSON nothing is said unless that was asked for too."""
        return cls(quiet or (as_json and not verbose), verbose)

    @contextlib.contextmanager
    def progress(self, doing: str, total: int) -> Iterator[Callable[[str], None]]:
        """While it is entered, a bar on a terminal; gives what tells a finished step in a line.

        Elsewhere than on a terminal a bar is noise: there each step is a line.
        """
        console = Console(stderr=True)
        if self.quiet or not console.is_terminal:
            yield self._tell
            return
        columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bars:
            task = bars.add_task(doing, total=total)

            def advance(line: str) -> None:
                bars.advance(task)
                self._tell(line)

            yield advance

    def workers(self, timeout: float) -> Workers:
        """Workers that are followed as closely as is wanted; ``timeout`` in seconds."""
        return Workers(timeout, self._tell if self.verbose else None, verbose=self.verbose > 1)

    def _tell(self, line: str) -> None:
        if not self.quiet:
            # On a terminal rich has taken the stream over, and keeps its bar below.
            click.echo(line, err=True)


cache_option = click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=f"{PREFIX}CACHE_DIR",
    help="Another folder for the cache than the user's.",
)


def store_at(cache_dir: Path | None) -> Store:
    """The store in ``cache_dir``, or in the user's cache folder."""
    return Store((cache_dir or default_root()).expanduser().absolute())


def voice_options(command: Command) -> Command:
    """``--quiet`` and ``--verbose``."""
    quiet = click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
    verbose = click.option(
        "-v",
        "--verbose",
        count=True,
        help="Print what workers do and their log while they run; twice: ONNX Runtime's whole log.",
    )
    return verbose(quiet(command))


def report_options(command: Command) -> Command:
    """``--json`` and ``--report``."""
    as_json = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
    report = click.option(
        "--report",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="F.html",
        help="Write a page about the jobs: sizes, coverage, agreement, times, failures.",
    )
    return report(as_json(command))


def run_plan(
    planned: Plan, staging: Path, cache: Cache, voice: Voice, title: str, *, as_json: bool
) -> Result:
    """Run all jobs, and report on them as ``planned`` and ``as_json`` want; raises as `build` does."""
    try:
        with voice.progress("building", len(planned.jobs)) as tell:
            result = build(planned, staging, cache, tell, voice.workers(planned.config.timeout))
    except IncompleteError as error:
        _report(error.result, planned, title, as_json=as_json)
        raise
    _report(result, planned, title, as_json=as_json)
    return result


def _report(result: Result, planned: Plan, title: str, *, as_json: bool) -> None:
    made = make(result)
    if as_json:
        click.echo(to_json(made), nl=False)
    if planned.config.report is not None:
        page.write(made, title, planned.config.report)
