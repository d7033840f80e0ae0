"""Lines and tables, for a terminal or for a pipe: no text that a model or an EP wrote controls it."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from hatch_epcontext.text import printable

_WIDTH = 240
"""The number of columns where the output is not a terminal: enough to break no name."""


def echo(text: str, *, err: bool = False, lines: bool = False) -> None:
    """Print ``text``, which is one line unless ``lines`` is set."""
    click.echo(printable(text, lines=lines), err=err)


def table(*columns: str) -> Table:
    """A table with these columns; sizes and counts are aligned to the right."""
    result = Table()
    for column in columns:
        numbers = column in ("size", "files")
        result.add_column(column, justify="right" if numbers else "left", overflow="fold")
    return result


def add_row(rows: Table, *cells: str) -> None:
    """Add a row to a table."""
    rows.add_row(*map(printable, cells))


def show(rows: Table) -> None:
    """Print a table."""
    # Names are printed as they are: some look like Rich's markup.
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(rows)
