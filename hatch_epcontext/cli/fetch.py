"""``epcontext fetch``: downloads models before builds without a network, and pins them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import click

from hatch_epcontext.cli._common import echo, existing_folder, is_offline, log, open_store
from hatch_epcontext.cli._settings import use_lines
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import FILE, tool_table
from hatch_epcontext.errors import ConfigError, Key, Kind, Problem
from hatch_epcontext.files import write_atomically
from hatch_epcontext.jobs.downloads import Downloads, download_models
from hatch_epcontext.text import count
from hatch_epcontext.tools.pinning import pin, pinned_line


@click.command("fetch")
@click.argument("project", type=existing_folder, default=Path())
@click.option("--pin", "pins", is_flag=True, help="First write the hashes that are missing.")
def command(project: Path, pins: bool) -> None:
    """Download the models from elsewhere into the user's cache.

    Builds of PROJECT, also of an unpacked sdist, then need no network.

    --pin writes the commit, sha256, data and license of each url that lacks a hash into pyproject.toml. A
    url may be a link from a page of the model hub. Everything else stays as it is.
    """
    root = project.absolute()
    use_lines(project)
    store = open_store()
    environ = {**os.environ, f"{PREFIX}CACHE_DIR": str(store.root)}
    # Other files may be missing: hooks may make them.
    read = partial(load, root, hook_table={}, environ=environ, pending=True)
    try:
        config = read(tool_table(root))
    except ConfigError as error:
        keys = [problem.key for problem in error.problems if problem.kind is Kind.NOT_PINNED]
        if not pins or len(keys) < len(error.problems):
            raise
        _pin(root / FILE, filter(None, keys), Downloads(store, log, offline=is_offline()))
        config = read(tool_table(root))
    else:
        if pins:
            echo("all models from elsewhere are pinned")
    download_models(config.models, config, log)
    paths = {model.path for model in config.models if model.download}
    echo(f"{count(len(paths), 'model')} from elsewhere in {store.root}")


def _pin(file: Path, keys: Iterable[Key], downloads: Downloads) -> None:
    before = file.read_bytes()
    text, tables = pin(before.decode(), keys, downloads)
    if file.read_bytes() != before:
        message = "was changed meanwhile, and nothing is written."
        hint = "Run epcontext fetch --pin again."
        raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(file), message, hint))
    # A link stays a link.
    write_atomically(file.resolve(), text)
    for table in tables:
        echo(pinned_line(table))
