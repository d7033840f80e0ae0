"""``epcontext companions``: the wheels of a project's companions."""

from __future__ import annotations

import contextlib
import os
import shutil
from functools import partial
from pathlib import Path

import click

from hatch_epcontext.cli._common import echo, existing_folder, log, verbose_option
from hatch_epcontext.cli._settings import use_lines
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.errors import BuildError, ConfigError, DownloadError, Problem
from hatch_epcontext.files import replacing
from hatch_epcontext.package.companions import pinned, project_metadata, published_version
from hatch_epcontext.project_build import ProjectBuild, Terminal
from hatch_epcontext.text import listing, show_size
from hatch_epcontext.tools.project import Project


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
@click.option("--published", metavar="DIR|URL", help="A folder or an index of earlier wheels.")
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
    root, problems = project.absolute(), list[Problem]()
    use_lines(root)
    terminal = Terminal(log, partial(click.echo, err=True), verbose)
    # A companion has all its targets, or apps could not find them.
    environ = {name: text for name, text in os.environ.items() if name != f"{PREFIX}TARGETS"}
    with contextlib.closing(ProjectBuild(root, terminal)) as build:
        config, metadata = build.config(environ=environ), Project.read(root)
        about = project_metadata(root, metadata.table("project"), by_hatch=metadata.is_hatchling)
        companions = {companion.name: companion for companion in pinned(config, about)}
        if not companions or not companions.keys() >= {*names}:
            known = f"only {listing(companions)}" if companions else "none"
            raise click.UsageError(
                f"Companions of the project: {known}. The key companion names one."
            )
        for name in names or companions:
            companion = companions[name]
            wheel = build.write_companion(config, about, companion)
            try:
                same = published_version(wheel, companion, published) if published else None
            except ConfigError as error:
                problems += error.problems
                continue
            except DownloadError as error:
                raise BuildError(
                    Problem(error.kind, "--published", str(error), error.hint)
                ) from error
            if same is None:
                with replacing(output) as new:
                    shutil.copyfile(wheel, new / wheel.name)
                echo(f"wrote {output / wheel.name} ({show_size(wheel.stat().st_size)})")
            elif same == companion.version:
                echo(f"unchanged: {name} {same} is published with these models")
            else:
                echo(f"unchanged: {name} {same} has these models; pin =={same} again")
    ConfigError.check(problems)
