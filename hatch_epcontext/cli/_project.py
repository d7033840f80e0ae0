"""Shared by commands about a project: its folder, and a selection of its targets and models."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path

import click

from hatch_epcontext.cli._common import Command, ExistingPath
from hatch_epcontext.cli._settings import use_lines
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import FILE, parse, tool_table
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ConfigError, Kind, Problem
from hatch_epcontext.package.dependencies import check_app
from hatch_epcontext.text import show, suggestion
from hatch_epcontext.tools.project import Project


def project_options(command: Command) -> Command:
    """``PROJECT``, ``--target`` and ``--model``."""
    models = click.option(
        "-m", "--model", "models", multiple=True, help="Only this model; repeatable."
    )
    targets = click.option(
        "--target", "targets", multiple=True, help="Only this target; repeatable."
    )
    project = click.argument("project", type=ExistingPath(file_okay=False), default=Path())
    return project(targets(models(command)))


def project_config(project: Path, targets: tuple[str, ...], models: tuple[str, ...]) -> Config:
    """The configuration of the project in ``project``, for these targets and models, or for all.

    Raises ConfigError as `load` does, and for an unknown target or model.
    """
    use_lines(project)
    config = _load(project, targets)
    values = parse((project / FILE).read_text(encoding="utf-8"))
    check_app(config.targets, Project(project, values).dependencies)
    if not models:
        return config
    both = ((model.configured_name, model.name) for model in config.models)
    names = list(dict.fromkeys(itertools.chain.from_iterable(both)))
    if unknown := [name for name in models if name not in names]:
        texts = ((f"{show(name)} is not a model.", suggestion(name, names)) for name in unknown)
        raise ConfigError(*(Problem(Kind.UNKNOWN_MODEL, "--model", *text) for text in texts))
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
    # Raises all other problems, so that those of the second configuration are only about `targets`.
    load(project, table, {}, environ)
    try:
        chosen = {**environ, variable: ",".join(targets)}
        return load(project, table, {}, chosen)
    except ConfigError as error:
        problems = (dataclasses.replace(problem, location="--target") for problem in error.problems)
        raise ConfigError(*problems) from error
