"""``epcontext fetch``: downloads models before builds without a network."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hatch_epcontext.cli._common import cache_option, log, open_store, warn
from hatch_epcontext.cli._flag_errors import ExistingPath, use_lines
from hatch_epcontext.cli._output import echo
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import tool_table
from hatch_epcontext.jobs.downloads import download_models
from hatch_epcontext.jobs.run import open_cache
from hatch_epcontext.text import count


@click.command("fetch")
@click.argument("project", type=ExistingPath(file_okay=False), default=Path())
@cache_option
def command(project: Path, cache_dir: Path | None) -> None:
    """Download the models from elsewhere into the user's cache.

    Builds of PROJECT, also of an unpacked sdist, then need no network.
    """
    root = project.absolute()
    use_lines(project)
    store = open_store(cache_dir)
    environ = {**os.environ, f"{PREFIX}CACHE_DIR": str(store.root)}
    # Other files may be missing: hooks may make them.
    config = load(root, tool_table(root), {}, environ, pending=True)
    index = open_cache(config, warn).index()
    download_models(config.models, config, index, log)
    paths = {each.path for each in config.models if each.download}
    echo(f"{count(len(paths), 'model')} from elsewhere in {store.root}")
