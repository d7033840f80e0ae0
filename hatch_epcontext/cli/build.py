"""``epcontext build``: builds the models of a project, without a wheel."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import click

from hatch_epcontext.build.plan import Plan, plan
from hatch_epcontext.build.run import dry_run, open_cache
from hatch_epcontext.cli._common import (
    Verbosity,
    report_options,
    run_plan,
    verbosity_options,
    warn,
)
from hatch_epcontext.cli._output import show, table
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import tool_table
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ConfigError, Kind, Problem
from hatch_epcontext.files import temp_dir
from hatch_epcontext.serialize import to_json
from hatch_epcontext.text import show as show_value
from hatch_epcontext.text import suggestion


@dataclasses.dataclass(frozen=True)
class _PlannedJob:
    """A job of ``--dry-run --json``."""

    job: str
    provider: str
    fingerprint: str
    cached: bool


@dataclasses.dataclass(frozen=True)
class _PlannedBuild:
    """The result of ``--dry-run --json``."""

    jobs: tuple[_PlannedJob, ...]
    requirements: tuple[str, ...]


@click.command()
@click.argument(
    "project", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path()
)
@click.option("-t", "--target", "targets", multiple=True, help="Only this target; repeatable.")
@click.option("-m", "--model", "models", multiple=True, help="Only this model; repeatable.")
@click.option("--dry-run", "only_plan", is_flag=True, help="Show the jobs, and compile nothing.")
@report_options
@verbosity_options
def build(
    project: Path,
    targets: tuple[str, ...],
    models: tuple[str, ...],
    only_plan: bool,
    as_json: bool,
    report: Path | None,
    quiet: bool,
    verbose: int,
) -> None:
    """Compile and validate a project's models, without a wheel.

    PROJECT is the folder with the pyproject.toml; the default is the current folder. The artifacts go into
    the cache, from which the next build of the wheel takes them.
    """
    config = _config(project.absolute(), targets, models)
    config = dataclasses.replace(config, report=report or config.report)
    planned = plan(config)
    with temp_dir() as staging:
        if only_plan:
            _show_plan(planned, staging, as_json=as_json)
            return
        verbosity = Verbosity.beside_json(quiet, verbose, as_json=as_json)
        run_plan(planned, staging, verbosity, config.root.name, as_json=as_json)


def _config(project: Path, targets: tuple[str, ...], models: tuple[str, ...]) -> Config:
    config = _load(project, targets)
    if not models:
        return config
    names = list(
        dict.fromkeys(
            name for model in config.models for name in (model.configured_name, model.name)
        )
    )
    if unknown := [name for name in models if name not in names]:
        raise ConfigError(
            *(
                Problem(
                    Kind.UNKNOWN_MODEL,
                    "--model",
                    f"{show_value(name)} is not a model.",
                    suggestion(name, names),
                )
                for name in unknown
            )
        )
    # A weight-sharing group is one artifact.
    named = [m for m in config.models if m.name in models or m.configured_name in models]
    groups = {m.share_weights for m in named} - {None}
    chosen = tuple(m for m in config.models if m in named or m.share_weights in groups)
    return dataclasses.replace(config, models=chosen)


def _load(project: Path, targets: tuple[str, ...]) -> Config:
    """The project's configuration, for ``targets`` if there are any."""
    table = tool_table(project)
    if not targets:
        return load(project, table, {})
    variable = f"{PREFIX}TARGETS"
    environ = {name: text for name, text in os.environ.items() if name != variable}
    # Raises all other problems: those of the second configuration are about `targets` alone.
    load(project, table, {}, environ)
    try:
        return load(project, table, {}, {**environ, variable: ",".join(targets)})
    except ConfigError as error:
        problems = (dataclasses.replace(each, location="--target") for each in error.problems)
        raise ConfigError(*problems) from error


def _show_plan(planned: Plan, staging: Path, *, as_json: bool) -> None:
    runs = dry_run(planned, staging, open_cache(planned.config, staging, warn))
    if as_json:
        jobs = tuple(
            _PlannedJob(
                each.job.location, each.job.target.provider.name, each.fingerprint, each.cached
            )
            for each in runs
        )
        click.echo(to_json(_PlannedBuild(jobs, planned.requirements)), nl=False)
        return
    rows = table("job", "provider", "fingerprint", "cache")
    for each in runs:
        rows.add_row(
            each.job.location,
            each.job.target.provider.name,
            each.fingerprint[:12],
            "cached" if each.cached else "not cached",
        )
    show(rows)
    click.echo(f"requires: {', '.join(planned.requirements)}")
