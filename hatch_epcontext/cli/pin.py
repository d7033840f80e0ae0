"""``epcontext pin``: commits, hashes and licenses of models from elsewhere."""

from __future__ import annotations

from pathlib import Path

import click

from hatch_epcontext.cli._common import cache_option, is_offline, log, open_store, warn
from hatch_epcontext.cli._flag_errors import ExistingPath, use_lines
from hatch_epcontext.cli._output import echo
from hatch_epcontext.config.pyproject import FILE
from hatch_epcontext.errors import ConfigError, Kind, Problem
from hatch_epcontext.files import write_atomically
from hatch_epcontext.tools.pinning import pin


@click.command("pin")
@click.argument("project", type=ExistingPath(file_okay=False), default=Path())
@cache_option
def command(project: Path, cache_dir: Path | None) -> None:
    """Pin the models from elsewhere.

    Fills in the commit, sha256, data and license of each model in PROJECT that has a url without them. A
    url may be a link from a page of the model hub. Everything else in pyproject.toml stays as it is.
    """
    file = project.absolute() / FILE
    if not file.is_file():
        raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(file), "is missing."))
    use_lines(project)
    before = _text(file)
    root = open_store(cache_dir).root
    text, done = pin(before, root, log, offline=is_offline())
    for pinned in done if text != before else ():
        for warning in pinned.warnings:
            warn(warning)
        echo(f"pinned {pinned.download.url}")
    if text != before:
        if _text(file) != before:
            message = "was changed meanwhile, and nothing is written."
            hint = "Run epcontext pin again."
            raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(file), message, hint))
        # A link stays a link.
        write_atomically(file.resolve(), text)
        echo(f"wrote {file}")
    else:
        echo("all models from elsewhere are pinned")


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        message = f"is not UTF-8: {error.reason} at byte {error.start}."
        raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(file), message)) from error
