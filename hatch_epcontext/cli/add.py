"""``epcontext add``: adds a model from elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from hatch_epcontext.cli._common import log, open_store
from hatch_epcontext.cli._settings import use_lines
from hatch_epcontext.cli._tables import add_tables, new_targets, tables_options
from hatch_epcontext.config.environ import environment_or_error
from hatch_epcontext.config.location import Download
from hatch_epcontext.errors import BuildError, ConfigError, DownloadError, Kind, Problem
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import check_environment
from hatch_epcontext.remote.downloads import Downloads
from hatch_epcontext.system import check_folder
from hatch_epcontext.text import file_name, show
from hatch_epcontext.tools.adding import NewModel, Pyproject, add_models, check_targets, new_model
from hatch_epcontext.tools.inspecting import READING, TIMEOUT
from hatch_epcontext.tools.pinning import as_if_pinned, check_location, pin_location, pinned_line
from hatch_epcontext.worker.requests import InspectReply


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
    check_targets(pyproject, providers, {})
    if url in pyproject.listed:
        add_tables(pyproject, [], {}, dry_run=dry_run)
        return
    downloads = Downloads(store, log, offline=environment_or_error().offline)
    with _errors():
        check_location(url, downloads)
    targets = new_targets(pyproject, providers, {})
    # What follows from only the project and this machine is an error before the download.
    check_environment((), READING)
    pinned, facts = as_if_pinned({"url": url}), InspectReply((), (), {}, {}, (), (), (), {})
    add_models(pyproject, [NewModel(pinned["url"], facts, pinned=pinned, name=name)], targets)
    if not dry_run:
        check_folder(pyproject.file.resolve().parent)
    with _errors():
        table = pin_location(url, downloads)
    log(pinned_line(table))
    path = Download(table["url"], table["sha256"], table.get("data", {})).path(store.root)
    with Workers(TIMEOUT) as workers:
        model = new_model(pyproject.root, str(path), workers)
    model = replace(model, path=table["url"], pinned=table, name=name)
    add_tables(pyproject, [model], targets, dry_run=dry_run)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Name the argument in errors of its location."""
    try:
        yield
    except DownloadError as error:
        raise BuildError(Problem(error.kind, "URL", str(error), error.hint)) from error


def _read(root: Path, name: str | None) -> Pyproject:
    """The project's file, before anything is downloaded; raises ConfigError, also for an invalid ``name``."""
    use_lines(root)
    pyproject = Pyproject(root)
    names = {model.casefold() for model in pyproject.listed.values()}
    if name is not None and (file_name(name, "-") != name or name.casefold() in names):
        message = f"{show(name)} is no name of a folder, or that of another model."
        raise ConfigError(Problem(Kind.INVALID_NAME, "--name", message, "Choose another name."))
    return pyproject
