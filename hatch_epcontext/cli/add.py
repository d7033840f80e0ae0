"""``epcontext add``: adds a model from elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from hatch_epcontext.cli._common import log, open_store
from hatch_epcontext.cli._settings import use_lines
from hatch_epcontext.cli.fetch import pin_location, pinned_line
from hatch_epcontext.cli.init import Pyproject, add_tables, new_model, tables_options
from hatch_epcontext.config.environ import environment_or_error
from hatch_epcontext.config.location import Download
from hatch_epcontext.errors import BuildError, ConfigError, DownloadError, Kind, Problem
from hatch_epcontext.jobs.downloads import Downloads
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.text import file_name, show
from hatch_epcontext.tools.inspecting import TIMEOUT


@click.command("add")
@click.argument("url", metavar="URL")
@click.option("--name", help="The model's name. The default is that of its file.")
@tables_options
def command(url: str, name: str | None, providers: tuple[str, ...], dry_run: bool) -> None:
    """Add a model from elsewhere to pyproject.toml.

    URL is a location such as hf://org/repo/onnx/model.onnx, a link from a page of the model hub, or another
    https:// URL. It is downloaded into the user's cache, and gets a table with its hashes in the project of
    the current folder, as from epcontext init.
    """
    store, pyproject = open_store(), _read(Path.cwd(), name)
    try:
        table = pin_location(url, Downloads(store, log, offline=environment_or_error().offline))
    except DownloadError as error:
        raise BuildError(Problem(error.kind, "URL", str(error), error.hint)) from error
    log(pinned_line(table))
    path = Download(table["url"], table["sha256"], table.get("data", {})).path(store.root)
    with Workers(TIMEOUT) as workers:
        model = new_model(pyproject.root, str(path), workers)
    model = replace(model, path=table["url"], pinned=table, name=name)
    add_tables(pyproject, [model], providers, {}, dry_run=dry_run)


def _read(root: Path, name: str | None) -> Pyproject:
    """The project's file, before anything is downloaded; raises ConfigError, also for an invalid ``name``."""
    use_lines(root)
    pyproject = Pyproject(root)
    names = {model.casefold() for model in pyproject.listed.values()}
    if name is not None and (file_name(name, "-") != name or name.casefold() in names):
        message = f"{show(name)} is no name of a folder, or that of another model."
        raise ConfigError(Problem(Kind.INVALID_NAME, "--name", message, "Choose another name."))
    return pyproject
