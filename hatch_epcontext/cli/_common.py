"""Shared by commands: lines and tables without control characters, workers and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hatch_epcontext.cache.store import Store
from hatch_epcontext.config.environ import PREFIX, REPORT_SUFFIXES, environment_or_error
from hatch_epcontext.config.paths import NO_HOME, default_root, is_genai_folder
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import BuildError, ConfigError, Kind, Problem
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.plan import Plan, plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.run import IncompleteError, build, build_with_report, open_cache
from hatch_epcontext.package.manifest import FILE
from hatch_epcontext.text import aligned, count, printable, show_size, to_toml

Command = Callable[..., Any]


def echo(text: str, *, err: bool = False, lines: bool = False) -> None:
    """Print ``text``, which is one line unless ``lines`` is set."""
    click.echo(printable(text, lines=lines), err=err)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; sizes and files are aligned to the right."""
    lines = [columns, *([*map(printable, row)] for row in rows)]
    for line in aligned(lines, right=("size", "files")):
        click.echo(line)


class _ModelFile(click.Path):
    """A file, and no folder of onnxruntime-genai."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if is_genai_folder(Path(value)):
            message = (
                f"{value} is a language model, and this command is for single models. "
                f"{advice_for_folder(value)}\nOr compile it: epcontext compile {value} -o OUT.ortpackage"
            )
            self.fail(message, param, ctx)
        return super().convert(value, param, ctx)


def advice_for_folder(path: str) -> str:
    """What to do with the language model in the folder ``path``."""
    entry = to_toml({"path": path, "context-length": 2048})
    return f"List it: models = [{entry}]"


existing_file = _ModelFile(exists=True, dir_okay=False, path_type=Path)
existing_folder = click.Path(exists=True, file_okay=False, path_type=Path)
new_file = click.Path(dir_okay=False, path_type=Path)


def command_with_examples(name: str, *examples: str) -> Callable[[Command], click.Command]:
    """The command ``name``, whose help ends with ``examples`` of what follows the name."""
    # Click keeps the lines of a paragraph that begins with a backspace.
    lines = ["\b\nExamples:", *(f"epcontext {name} {example}" for example in examples)]
    return click.command(name, epilog="\n  ".join(lines))


def warn(text: str) -> None:
    """Print a warning."""
    echo(f"epcontext: {text}", err=True, lines=True)


def log(line: str) -> None:
    """Print a line about what runs, beside the command's output."""
    echo(line, err=True)


def make_workers(verbose: int, timeout: float, memory_limit: int | None = None) -> Workers:
    """Workers with these limits, in seconds and bytes.

    What runs for long is printed, and the workers' log if ``--verbose`` was given.
    """
    return Workers(timeout, log if verbose else None, verbose > 1, memory_limit, log)


def open_store() -> Store:
    """The store in the user's cache folder, or that of the environment; raises ConfigError without one."""
    root = environment_or_error().cache_dir or default_root()
    if root is None:
        problem = Problem(Kind.MISSING_KEY, f"{PREFIX}CACHE_DIR", f"{NO_HOME}.", "Name a folder.")
        raise ConfigError(problem)
    return Store(root)


def output_option(metavar: str, help: str) -> Callable[[Command], Command]:  # noqa: A002
    """``--output``, which is required: a file or a folder."""
    path = click.Path(path_type=Path)
    return click.option("-o", "--output", required=True, type=path, metavar=metavar, help=help)


verbose_option = click.option(
    "-v", "--verbose", count=True, help="Print the workers' log; -vv: all of it."
)


def _report_path(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path.suffix not in REPORT_SUFFIXES:
        raise click.BadParameter(f"{path.name} must end in {' or '.join(REPORT_SUFFIXES)}.")
    return path


report_option = click.option(
    "--report",
    type=new_file,
    callback=_report_path,
    metavar="F.html",
    help="Write a report: .html or .json.",
)


def show_written(package: Path, files: Sequence[Path]) -> None:
    """Print that the folder ``package`` was written with ``files``; the manifest does not count."""
    sizes = [file.stat().st_size for file in files if file != package / FILE]
    echo(f"wrote {package} ({count(len(sizes), 'file')}, {show_size(sum(sizes))})")


def run_plan(planned: Plan, staging: Path, verbose: int, name: str, report: Path | None) -> Result:
    """Run all jobs of the project ``name``, and write a ``report``; raises as `build_with_report` does."""
    settings = planned.config.build
    config = replace(planned.config, report=report or planned.config.report)
    workers = make_workers(verbose, settings.timeout, settings.memory_limit)
    return build_with_report(replace(planned, config=config), staging, log, workers, warn, name)


def failed_jobs(config: Config) -> Mapping[tuple[str, str], Problem]:
    """Run all jobs of ``config``: the first problem of each that fails, by its model and its target."""
    workers = make_workers(0, config.build.timeout, config.build.memory_limit)
    try:
        with temp_dir() as staging:
            build(plan(config), staging, open_cache(config, warn), log, workers, warn)
    except IncompleteError as error:
        failures = error.result.failures
        return {(model, job.target): job.problems[0] for job in failures for model in job.models}
    except BuildError as error:
        # The model cannot be read, perhaps for one target only.
        jobs = [(model, target) for model in config.models for target in model.targets]
        if len(jobs) == 1:
            return {(model.name, target.name): error.problems[0] for model, target in jobs}
        problems = dict[tuple[str, str], Problem]()
        for model, target in jobs:
            models = (replace(model, targets=(target,)),)
            problems |= failed_jobs(replace(config, models=models))
        return problems
    return {}
