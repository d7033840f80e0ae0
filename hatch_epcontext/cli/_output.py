"""Lines and tables for a terminal or a pipe, without control characters from models or EPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hatch_epcontext.text import printable

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 240
"""The number of columns if the output is not a terminal: enough to break no name."""


def echo(text: str, *, err: bool = False, lines: bool = False) -> None:
    """Print ``text``, which is one line unless ``lines`` is set."""
    click.echo(printable(text, lines=lines), err=err)


def table(*columns: str) -> Table:
    """A table with these columns; sizes and counts are aligned to the right."""
    from rich.table import Table

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
    from rich.console import Console

    # Without Rich's markup, because some names look like it.
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(rows)
