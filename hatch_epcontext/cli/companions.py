"""``epcontext companions``: the wheels of a project's companions."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import click

from hatch_epcontext.cli._common import echo, existing_folder, log, verbose_option
from hatch_epcontext.cli._settings import Project, use_lines
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.errors import ConfigError, Kind, Problem
from hatch_epcontext.package.companions import pinned
from hatch_epcontext.project_build import ProjectBuild, Terminal
from hatch_epcontext.text import show, show_size, suggestion
from hatch_epcontext.tools.companions import project_metadata, published_version


@click.command("companions")
@click.argument("project", type=existing_folder, default=Path())
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("dist"),
    metavar="DIR",
    help="The folder of the wheels; dist by default.",
)
@click.option("--companion", "names", multiple=True, help="Only this companion; repeatable.")
@click.option(
    "--published",
    metavar="DIR|URL",
    help="A folder or an index with earlier wheels: what is unchanged is not written.",
)
@verbose_option
def command(
    project: Path, output: Path, names: tuple[str, ...], published: str | None, verbose: int
) -> None:
    """Build the wheels of a project's companions.

    PROJECT is the folder with the pyproject.toml; the default is the current folder. A companion has the
    models of the targets that name it, and the version that an extra of the app pins.

    With --published, such as https://pypi.org/simple, a companion is not written if its pinned version or the
    newest one has the same models. If the pinned version has other models, that is an error.
    """
    root = project.absolute()
    use_lines(root)
    build = ProjectBuild(root, Terminal(log, partial(click.echo, err=True), verbose))
    # A companion has all its targets, or apps could not find them.
    environ = {name: text for name, text in os.environ.items() if name != f"{PREFIX}TARGETS"}
    try:
        config = build.config(environ=environ)
        its = Project.read(root)
        about = project_metadata(root, its.table("project"), by_hatch=its.is_hatchling)
        companions = pinned(config, about)
        _check_names(names, [companion.name for companion in companions])
        problems = list[Problem]()
        for companion in companions:
            if not names or companion.name in names:
                wheel = build.write_companion(config, about, companion)
                try:
                    same = published_version(wheel, companion, published) if published else None
                except ConfigError as error:
                    problems += error.problems
                    continue
                if same is None:
                    output.mkdir(parents=True, exist_ok=True)
                    size = show_size(wheel.stat().st_size)
                    echo(f"wrote {shutil.copyfile(wheel, output / wheel.name)} ({size})")
                elif same == companion.version:
                    echo(f"unchanged: {companion.name} {same} is published with these models")
                else:
                    echo(f"unchanged: {companion.name} {same} has these models; pin =={same} again")
        if problems:
            raise ConfigError(*problems)
    finally:
        build.close()


def _check_names(names: tuple[str, ...], known: list[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        texts = ((f"{show(name)} is not a companion.", suggestion(name, known)) for name in unknown)
        raise ConfigError(
            *(Problem(Kind.INVALID_COMPANION, "--companion", *text) for text in texts)
        )
    if not known:
        message = "the project has no companions."
        hint = 'Name one in a target: companion = "my-app-models-npu" (docs/companions.md).'
        raise ConfigError(Problem(Kind.INVALID_COMPANION, "pyproject.toml", message, hint))
