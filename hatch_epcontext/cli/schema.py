"""``epcontext schema``: the JSON schema of ``[tool.epcontext]``."""

from __future__ import annotations

import click

from hatch_epcontext.config.json_schema import FILE


@click.command("schema")
def command() -> None:
    """Print the JSON schema of [tool.epcontext]."""
    click.echo(FILE.read_text(encoding="utf-8"), nl=False)
