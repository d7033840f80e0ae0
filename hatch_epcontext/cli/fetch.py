"""``epcontext fetch``: downloads models before builds without a network, and pins them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import tomlkit

from hatch_epcontext.cli._common import echo, existing_folder, log, open_store
from hatch_epcontext.cli._settings import use_lines
from hatch_epcontext.config.environ import PREFIX, environment_or_error
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import FILE, tool_table, write
from hatch_epcontext.errors import BuildError, ConfigError, DownloadError, Key, Kind, Problem
from hatch_epcontext.remote.downloads import Downloads, download_models
from hatch_epcontext.system import check_folder
from hatch_epcontext.text import count, to_toml
from hatch_epcontext.tools.pinning import Table, as_if_pinned, pin_location, pinned_line


@click.command("fetch")
@click.argument("project", type=existing_folder, default=Path())
@click.option("--pin", "pins", is_flag=True, help="First write the hashes that are missing.")
def command(project: Path, pins: bool) -> None:
    """Download the models from elsewhere into the user's cache.

    Builds of PROJECT, also of an unpacked sdist, then need no network.

    --pin writes the commit, sha256, data and license of each url that lacks a hash into pyproject.toml. A
    url may be a link from a page of the model hub.
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
        # What pinning cannot mend is an error before the download.
        read(_as_if_pinned(tool_table(root), [*filter(None, keys)]))
        check_folder((root / FILE).resolve().parent)
        downloads = Downloads(store, log, offline=environment_or_error().offline)
        _pin(root / FILE, [*filter(None, keys)], downloads)
        config = read(tool_table(root))
    else:
        if pins:
            echo("all models from elsewhere are pinned")
    download_models(config, log)
    paths = {model.path for model in config.models if model.download}
    echo(f"{count(len(paths), 'model')} from elsewhere in {store.root}")


def _as_if_pinned(table: Table, keys: Sequence[Key]) -> Table:
    """The configuration ``table`` with pins for the models that have urls at ``keys``."""
    models = list(table["models"])
    for key in keys:
        index: Any = key.parts[1]
        models[index] = as_if_pinned(models[index])
    return {**table, "models": models}


def _pin(file: Path, keys: Sequence[Key], downloads: Downloads) -> None:
    """Write commits, and keys that are missing, beside the urls at ``keys`` in a ``pyproject.toml``.

    Raises BuildError with the problems of all locations that cannot be pinned, and ConfigError if the file
    is changed meanwhile.
    """
    before = file.read_bytes()
    text = before.decode()
    document = tomlkit.parse(text.replace("\r\n", "\n"))
    listed: Any = document["tool"]["epcontext"]["models"]
    tables = [listed[key.parts[1]] for key in keys]
    problems = list[Problem]()
    for key, table in zip(keys, tables, strict=True):
        try:
            pinned = pin_location(table["url"], downloads, table.unwrap())
        except DownloadError as error:
            problems.append(Problem.at(key, error.kind, str(error), error.hint))
            continue
        data = pinned.get("data", {})
        if table.get("data", data) != data:
            message = "its model has other files of external data than data."
            hint = "Remove data, and run epcontext fetch --pin."
            problems.append(Problem.at(key, Kind.EXTERNAL_DATA, message, hint))
        for name, value in pinned.items():
            if name == "url" or name not in table:
                table[name] = tomlkit.value(to_toml(value))
    BuildError.check(problems)
    if file.read_bytes() != before:
        message = "was changed meanwhile, and nothing is written."
        hint = "Run epcontext fetch --pin again."
        raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(file), message, hint))
    write(file, tomlkit.dumps(document), text)
    for table in tables:
        echo(pinned_line(table))
