"""``epcontext add``: adds a model from elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from hatch_epcontext.cli._common import cache_option, is_offline, log, open_store, warn
from hatch_epcontext.cli._flag_errors import use_lines
from hatch_epcontext.cli.init import add_tables, chosen_providers, tables_options
from hatch_epcontext.config.build_hooks import hooks_of_project
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import FILE, tool_table
from hatch_epcontext.errors import BuildError, ConfigError, Key, Kind, Problem
from hatch_epcontext.jobs.downloads import FailedError
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.tools.initializing import NewModel, new_model
from hatch_epcontext.tools.inspecting import TIMEOUT, inspect_model
from hatch_epcontext.tools.pinning import complete, pin_location


@click.command("add")
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@tables_options
@cache_option
def command(
    urls: tuple[str, ...],
    providers: tuple[str, ...],
    project: Path,
    cache_dir: Path | None,
    dry_run: bool,
) -> None:
    """Add models from elsewhere to pyproject.toml.

    Each URL is pinned, downloaded into the user's cache, and gets a table as from epcontext init. It is a
    location such as hf://org/repo/onnx/model.onnx, a link that you copy from a page of the model hub, or
    https://, s3://, gs:// or az://.
    """
    root, store = project.resolve(), open_store(cache_dir)
    found = dict[str, NewModel]()
    _check(root)
    with Workers(TIMEOUT) as workers:
        for url in urls:
            try:
                pinned = pin_location(url, store.root, log, offline=is_offline())
                complete(pinned, root, log)
            except FailedError as error:
                raise BuildError(Problem(error.kind, "URL", str(error), error.hint)) from error
            for warning in pinned.warnings:
                warn(warning)
            facts = inspect_model(pinned.path, workers)
            if facts.contexts:
                message = "is a context model already."
                hint = "Name its source model."
                raise BuildError(Problem(Kind.COMPILED_MODEL, url, message, hint))
            model = new_model(root, str(pinned.path), facts, workers)
            found[pinned.download.url] = replace(model, path=pinned.download.url, pinned=pinned)
    add_tables(root, [*found.values()], chosen_providers(root, providers), dry_run=dry_run)


def _check(root: Path) -> None:
    """Raise the errors of the project's configuration, if it has one, before anything is downloaded."""
    if (root / FILE).is_file() and (table := tool_table(root)) is not None:
        use_lines(root)
        try:
            load(root, table, {}, pending=bool(hooks_of_project(root)))
        except ConfigError as error:
            # A configuration without models gets the first one.
            if any(each.key != Key() / "models" for each in error.problems):
                raise
