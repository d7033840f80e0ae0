"""``epcontext build``: the models of a project, without making a wheel."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import click

from hatch_epcontext.build import cache_of, peek
from hatch_epcontext.cache import Cache
from hatch_epcontext.cli import output
from hatch_epcontext.cli.running import (
    Voice,
    report_options,
    run_plan,
    voice_options,
    warn,
    workplace,
)
from hatch_epcontext.config import Config, load
from hatch_epcontext.errors import ConfigError, Problem
from hatch_epcontext.plan import Plan, plan
from hatch_epcontext.pyproject import tool_table
from hatch_epcontext.structure import show, suggestion, to_json


@dataclasses.dataclass(frozen=True)
class PlannedJob:
    """A job of ``--dry-run --json``."""

    job: str
    provider: str
    fingerprint: str
    cached: bool


@dataclasses.dataclass(frozen=True)
class Planned:
    """The answer to ``--dry-run --json``."""

    jobs: tuple[PlannedJob, ...]
    requirements: tuple[str, ...]


@click.command()
@click.argument(
    "project", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path()
)
@click.option("-t", "--target", "targets", multiple=True, help="Only this target; repeatable.")
@click.option("-m", "--model", "models", multiple=True, help="Only this model; repeatable.")
@click.option("--dry-run", is_flag=True, help="Show the jobs, and compile nothing.")
@report_options
@voice_options
def build(
    project: Path,
    targets: tuple[str, ...],
    models: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    report: Path | None,
    quiet: bool,
    verbose: int,
) -> None:
    """Compile and prove a project's models, without a wheel.

    PROJECT is the folder with its pyproject.toml; this one if left out. What is made goes into
    the cache, from which the next build of the wheel takes it.
    """
    config = _config(project.absolute(), targets, models)
    config = dataclasses.replace(config, report=report or config.report)
    planned = plan(config)
    with workplace() as staging:
        cache = cache_of(config, staging, warn)
        if dry_run:
            _show_plan(planned, staging, cache, as_json=as_json)
            return
        voice = Voice.of(quiet, verbose, as_json=as_json)
        run_plan(planned, staging, cache, voice, config.root.name, as_json=as_json)


def _config(project: Path, targets: tuple[str, ...], models: tuple[str, ...]) -> Config:
    environ = dict(os.environ)
    if targets:
        environ["HATCH_EPCONTEXT_TARGETS"] = ",".join(targets)
    try:
        config = load(project, tool_table(project), {}, environ)
    except ConfigError as error:
        if not targets:
            raise
        # Said where the user said it.
        raise ConfigError(
            *(
                dataclasses.replace(problem, where="--target")
                if problem.where == "HATCH_EPCONTEXT_TARGETS"
                else problem
                for problem in error.problems
            )
        ) from error
    if not models:
        return config
    names = [model.name for model in config.models]
    if unknown := [name for name in models if name not in names]:
        raise ConfigError(
            *(
                Problem("--model", f"{show(name)} is not a model.", suggestion(name, names))
                for name in unknown
            )
        )
    # A weight-sharing group is one artifact.
    groups = {m.share_weights for m in config.models if m.name in models} - {None}
    chosen = tuple(m for m in config.models if m.name in models or m.share_weights in groups)
    return dataclasses.replace(config, models=chosen)


def _show_plan(planned: Plan, staging: Path, cache: Cache, *, as_json: bool) -> None:
    peeks = peek(planned, staging, cache)
    if as_json:
        jobs = tuple(
            PlannedJob(each.job.where, each.job.target.provider.name, each.fingerprint, each.cached)
            for each in peeks
        )
        click.echo(to_json(Planned(jobs, planned.requirements)), nl=False)
        return
    made = output.table("job", "provider", "fingerprint", "cache")
    for each in peeks:
        made.add_row(
            each.job.where,
            each.job.target.provider.name,
            each.fingerprint[:12],
            "has it" if each.cached else "to be compiled",
        )
    output.show(made)
    click.echo(f"requires: {', '.join(planned.requirements)}")
